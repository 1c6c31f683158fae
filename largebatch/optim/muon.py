"""Muon: the momentum of a kernel as a matrix whose singular values are all near 1.

optax.contrib.muon computes the same, but takes three times as long on a CPU (LOG.md).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from largebatch.optim.adam import Average, look_ahead

# Coefficients of the quintic polynomial that Newton-Schulz iterates: Jordan et al. 2024, "Muon".
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
DIRECT_ITERATIONS = 2  # iterations on the matrix itself in `by_gram_matrix`; the others are on Gram matrices
EPSILON = 1e-8  # added to the norm of a matrix
HIGHEST = lax.Precision.HIGHEST


def scale_by_muon(beta, *, nesterov: bool) -> optax.GradientTransformation:
    """Orthogonalise the momentum, times the root of (outputs / inputs) for kernels with more outputs than inputs.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". A kernel [..., outputs] is the
    matrix [inputs, outputs].

    Args:
      beta: decay of the momentum; may be traced.
      nesterov: orthogonalises the momentum as it will be after the next step, if the gradient stays.
    """

    def init(params):
        return Average.start(params)

    def update(grads, momentum, params=None):
        del params
        momentum = momentum.add(grads, beta)
        directions = look_ahead(momentum, grads, beta) if nesterov else momentum.corrected
        return _directions(directions), momentum

    return optax.GradientTransformation(init, update)


def orthogonalize_directions() -> optax.GradientTransformation:
    """Create a transformation that orthogonalises directions of kernels as `scale_by_muon` does momentum."""
    return optax.stateless(lambda directions, params=None: _directions(directions))


def _directions(kernels):
    """Return the orthogonalised kernels of a pytree, each times the factor for its shape."""
    leaves, structure = jax.tree.flatten(kernels)
    matrices = orthogonalize([kernel.reshape(-1, kernel.shape[-1]) for kernel in leaves])
    scaled = [
        matrix.reshape(kernel.shape) * max(1.0, matrix.shape[1] / matrix.shape[0]) ** 0.5
        for matrix, kernel in zip(matrices, leaves, strict=True)
    ]
    return structure.unflatten(scaled)


def orthogonalize(matrices: list[jax.Array]) -> list[jax.Array]:
    """Return matrices with the singular vectors of these, and singular values between 0.7 and 1.2.

    (Singular values 1000 times smaller than the largest ones of their matrix end lower.)
    """
    of_shape: dict[tuple[int, int], list[int]] = {}
    for number, matrix in enumerate(matrices):
        of_shape.setdefault((max(matrix.shape), min(matrix.shape)), []).append(number)
    results = list(matrices)
    for numbers in of_shape.values():
        tall = [_made_tall(matrices[number]) for number in numbers]
        # Accelerators multiply in less than float32 unless asked for more, and Gram matrices need float32. On a GPU
        # one kernel computes all products of a shape, since they are small.
        alone = _one_by_one(by_newton_schulz)
        together = _at_once if len(tall) > 1 else alone
        found = lax.platform_dependent(*tall, cpu=_one_by_one(by_gram_matrix), cuda=together, default=alone)
        for number, matrix in zip(numbers, found, strict=True):
            results[number] = matrix if matrix.shape == matrices[number].shape else matrix.T
    return results


def _made_tall(matrix: jax.Array) -> jax.Array:
    return matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T


def _one_by_one(function: Callable) -> Callable:
    return lambda *matrices: tuple(function(_normalised(matrix)) for matrix in matrices)


def _at_once(*matrices):
    return tuple(jax.vmap(lambda matrix: by_newton_schulz(_normalised(matrix)))(jnp.stack(matrices)))


def _normalised(matrix: jax.Array) -> jax.Array:
    return matrix / (jnp.linalg.norm(matrix) + EPSILON)


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
