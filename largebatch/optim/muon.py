"""Muon's direction: the momentum of a kernel, as a matrix whose singular values are all near 1.

optax.contrib.muon gives the same. On a CPU it takes three times as long (LOG.md).
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from largebatch.optim.adam import Average, look_ahead

# Of the quintic polynomial that Newton-Schulz iterates: Jordan et al. 2024, "Muon".
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
DIRECT_ITERATIONS = 2  # of them, before `by_gram_matrix` goes on with Gram matrices alone
EPSILON = 1e-8  # beside the norm of a matrix
HIGHEST = lax.Precision.HIGHEST


def scale_by_muon(beta, *, nesterov: bool) -> optax.GradientTransformation:
    """Orthogonalised momentum, times the root of (outputs / inputs) where a kernel has more outputs than inputs.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". A kernel [..., outputs] is the
    matrix [inputs, outputs].

    Args:
      beta: decay of the momentum; may be traced.
      nesterov: orthogonalises the momentum as it will be after the next update, if the gradient stays.
    """

    def init(params):
        return Average.start(params)

    def update(grads, momentum, params=None):
        del params
        momentum = momentum.add(grads, beta)
        directions = look_ahead(momentum, grads, beta) if nesterov else momentum.corrected
        return jax.tree.map(_direction, directions), momentum

    return optax.GradientTransformation(init, update)


def orthogonalize_directions() -> optax.GradientTransformation:
    """Orthogonalises any direction of a kernel, with the factor for its shape, as `scale_by_muon` the momentum."""
    return optax.stateless(lambda directions, params=None: jax.tree.map(_direction, directions))


def _direction(kernel: jax.Array) -> jax.Array:
    matrix = kernel.reshape(-1, kernel.shape[-1])
    inputs, outputs = matrix.shape
    return orthogonalize(matrix).reshape(kernel.shape) * max(1.0, outputs / inputs) ** 0.5


def orthogonalize(matrix: jax.Array) -> jax.Array:
    """A matrix with the singular vectors of `matrix`, and singular values between 0.7 and 1.2.

    (Those that are 1000 times smaller than the largest ones become less.)
    """
    rows, columns = matrix.shape
    if rows < columns:
        return orthogonalize(matrix.T).T
    matrix = matrix / (jnp.linalg.norm(matrix) + EPSILON)
    # Elsewhere matrix products are in less than float32 unless one pays for it, and Gram matrices need it.
    return lax.platform_dependent(matrix, cpu=by_gram_matrix, default=by_newton_schulz)


def by_newton_schulz(matrix: jax.Array, iterations: int = ITERATIONS) -> jax.Array:
    """X <- X (a + b G + c G^2) with the Gram matrix G = X^T X, for a tall X of norm 1."""
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        gram = matrix.T @ matrix
        matrix = a * matrix + matrix @ (b * gram + c * gram @ gram)
    return matrix


def by_gram_matrix(matrix: jax.Array) -> jax.Array:
    """The same in small products alone, but for the first and the last.

    Each iteration multiplies X by a polynomial P of its Gram matrix G, which becomes P G P. So X itself is
    multiplied only once, by the product of all P. G holds the squares of singular values, of which small ones are
    rounded away: so two iterations come before, which make them twelve times as large.
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
