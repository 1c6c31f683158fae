"""Muon: the momentum of a kernel as a matrix whose singular values are all near 1.

optax.contrib.muon computes the same, but takes three times as long on a CPU (LOG.md).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from largebatch.optim.averages import Average

# Coefficients of the quintic polynomial that Newton-Schulz iterates: Jordan et al. 2024, "Muon".
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
DIRECT_ITERATIONS = 2  # iterations on the matrix itself in `by_gram_matrix`; the others are on Gram matrices
EPSILON = 1e-8  # added to the norm of a matrix
HIGHEST = lax.Precision.HIGHEST


def scale_by_muon(beta, *, nesterov: bool) -> optax.GradientTransformation:
    """Orthogonalise the momentum of kernels [..., outputs], each as a matrix [inputs, outputs].

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".

    Args:
      beta: decay of the momentum; may be traced.
      nesterov: orthogonalises the momentum as it will be after the next step, if the gradient stays.
    """

    def update(grads, momentum, params=None):
        del params
        momentum = momentum.add(grads, beta)
        directions = momentum.nesterov(grads, beta) if nesterov else momentum.corrected
        kernels, structure = jax.tree.flatten(directions)
        matrices = orthogonalize([kernel.reshape(-1, kernel.shape[-1]) for kernel in kernels])
        shaped = [matrix.reshape(kernel.shape) for matrix, kernel in zip(matrices, kernels, strict=True)]
        return structure.unflatten(shaped), momentum

    return optax.GradientTransformation(Average.start, update)


def orthogonalize(matrices: list[jax.Array]) -> list[jax.Array]:
    """Return matrices [inputs, outputs] with the singular vectors of these, and nearly equal singular values.

    Singular values are between 0.7 and 1.2, times the root of (outputs / inputs) where there are more outputs.
    (Those 1000 times smaller than the largest ones of their matrix end lower.)
    """
    tall = [matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T for matrix in matrices]
    by_shape: dict[tuple[int, int], list[int]] = {}
    for number, matrix in enumerate(tall):
        by_shape.setdefault(matrix.shape, []).append(number)
    for numbers in by_shape.values():
        # Accelerators multiply in less than float32 unless asked for more, and Gram matrices need float32. On a GPU
        # one kernel computes all products of a shape, since they are small.
        alone = _one_by_one(by_newton_schulz)
        together = _at_once if len(numbers) > 1 else alone
        ways = {"cpu": _one_by_one(by_gram_matrix), "cuda": together, "default": alone}
        found = lax.platform_dependent(*(tall[number] for number in numbers), **ways)
        for number, matrix in zip(numbers, found, strict=True):
            tall[number] = matrix
    results = [new if new.shape == old.shape else new.T for new, old in zip(tall, matrices, strict=True)]
    return [matrix * max(1.0, matrix.shape[1] / matrix.shape[0]) ** 0.5 for matrix in results]


def _one_by_one(way: Callable) -> Callable:
    return lambda *matrices: tuple(way(matrix / (jnp.linalg.norm(matrix) + EPSILON)) for matrix in matrices)


def _at_once(*matrices):
    (found,) = jax.vmap(_one_by_one(by_newton_schulz))(jnp.stack(matrices))
    return tuple(found)


def by_newton_schulz(matrix: jax.Array, iterations: int = ITERATIONS) -> jax.Array:
    """Iterate X <- X (a + b G + c G^2) with the Gram matrix G = X^T X, for a tall X of norm 1."""
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        gram = matrix.T @ matrix
        matrix = a * matrix + matrix @ (b * gram + c * gram @ gram)
    return matrix


def by_gram_matrix(matrix: jax.Array) -> jax.Array:
    """Iterate as `by_newton_schulz` does, with only the first and the last products being large.

    Each iteration multiplies X by a polynomial P of its Gram matrix G, which becomes P G P. So X itself is
    multiplied only once, by the product of all P. G holds the squares of singular values, of which small ones would
    be rounded away; so two iterations on X come first and make them twelve times as large.
    """
    a, b, c = COEFFICIENTS
    matrix = by_newton_schulz(matrix, DIRECT_ITERATIONS)
    gram = jnp.matmul(matrix.T, matrix, precision=HIGHEST)
    identity = jnp.eye(len(gram))
    product = identity
    for _ in range(ITERATIONS - DIRECT_ITERATIONS):
        polynomial = a * identity + b * gram + c * jnp.matmul(gram, gram, precision=HIGHEST)
        product = jnp.matmul(polynomial, product, precision=HIGHEST)
        gram = jnp.linalg.multi_dot([polynomial, gram, polynomial], precision=HIGHEST)
    return jnp.matmul(matrix, product, precision=HIGHEST)
