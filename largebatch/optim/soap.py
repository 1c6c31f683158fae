"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax

from largebatch.optim.averages import Average, mix

MAX_SIDE = 1024  # larger sides have no eigenbasis, which would cost too much; the paper allows it
EPSILON = 1e-8  # added to the root of the second moment


@struct.dataclass
class Moments:
    """The moments of one parameter, as a matrix [inputs, outputs]; None where it has too many rows or columns."""

    first: Average  # float32 [inputs, outputs], in the parameter's own basis
    second: Average  # float32 [inputs, outputs], in the bases
    # Of rows and columns: float32 [n, n], the moving averages of the gradients' G G^T and G^T G.
    covariances: tuple[jax.Array | None, jax.Array | None]
    bases: tuple[jax.Array | None, jax.Array | None]  # float32 [n, n], their eigenvectors, in columns

    @property
    def has_bases(self) -> bool:
        """True where the rows or the columns have a basis."""
        return any(basis is not None for basis in self.bases)


def soap(
    b1, b2, *, every: int = 10, weight_decay=0.0, mask: Callable | None = None, finish: Callable | None = None
) -> optax.GradientTransformation:
    """Create Adam in the eigenbasis of Shampoo's preconditioner, with decoupled weight decay.

    Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam", algorithm 3: a kernel's gradient is
    the matrix G [inputs, output channels]; L and R are moving averages, with decay `b2`, of G G^T and G^T G.
    Adam's second moment is kept in their eigenbases, its first moment in the parameters' own. The bases come from
    an eigendecomposition at the first step, and from one step of power iteration and a QR decomposition every
    `every` steps, columns in falling order. As in the authors' program the first step moves no parameter with
    bases, and decays none. A parameter without a basis gets plain AdamW.

    Args:
      b1, b2: decays of first moments, and of second moments and covariances; may be traced, as `weight_decay`.
      every: steps between two refreshes of the bases; 10 is the paper's own choice.
      mask: params -> a pytree of bools alike: the parameters that decay; None for none.
      finish: matrices [inputs, output channels] -> matrices alike, applied to the directions before the decay.
    Returns:
      A transformation whose state is the number of steps done, and `Moments` leaf by leaf.
    """

    def init(params):
        return jnp.zeros((), jnp.int32), tuple(map(_no_moments, jax.tree.leaves(params)))

    def update(grads, state, params=None):
        (steps_done, moments), (leaves, structure) = state, jax.tree.flatten(grads)
        count = steps_done + 1
        directions, moments = _update_all(list(map(_matrix, leaves)), moments, count, (b1, b2), every)
        if finish is not None:
            directions = finish(directions)
        directions = [direction.reshape(grad.shape) for direction, grad in zip(directions, leaves, strict=True)]
        if mask is not None:
            after_first = jnp.where(steps_done == 0, 0.0, weight_decay)
            decaying = zip(directions, jax.tree.leaves(params), jax.tree.leaves(mask(params)), moments, strict=True)
            directions = [
                direction + (after_first if one.has_bases else weight_decay) * p if decays else direction
                for direction, p, decays, one in decaying
            ]
        return structure.unflatten(directions), (count, moments)

    return optax.GradientTransformation(init, update)


def _update_all(grads: list, moments: tuple[Moments, ...], count, decays: tuple, every: int):
    """Return the directions of all parameters, and their moments after step number `count`, from 1.

    All parameters that have bases share their conditions, since a GPU pays for each of them.
    """
    moments = [
        one.replace(covariances=_add_to_covariances(one.covariances, grad, decays[1]))
        for grad, one in zip(grads, moments, strict=True)
    ]
    with_bases = [number for number, one in enumerate(moments) if one.has_bases]
    updated = [
        None if one.has_bases else _adam(grad, one, *decays) for grad, one in zip(grads, moments, strict=True)
    ]

    moved = lax.cond(
        count == 1,
        lambda: [(jnp.zeros_like(grads[number]), moments[number]) for number in with_bases],
        lambda: [_adam(grads[number], moments[number], *decays) for number in with_bases],
    )
    is_due = jnp.where(count == 1, 1, jnp.where(count % every == 0, 2, 0))
    branches = [list, lambda some: list(map(_start_bases, some)), lambda some: list(map(_refresh_bases, some))]
    turned = lax.switch(is_due, branches, [one for _, one in moved])
    for number, (direction, _), one in zip(with_bases, moved, turned, strict=True):
        updated[number] = direction, one
    return zip(*updated, strict=True)


def _matrix(p):
    """Reshape [..., output channels] to [inputs, output channels]; a vector becomes one row."""
    return p.reshape(-1, p.shape[-1] if p.ndim else 1)


def _no_moments(p) -> Moments:
    matrix = _matrix(p)
    covariances = tuple(jnp.zeros((n, n)) if p.ndim > 1 and n <= MAX_SIDE else None for n in matrix.shape)
    bases = jax.tree.map(lambda covariance: jnp.eye(len(covariance)), covariances)
    return Moments(Average.start(matrix), Average.start(matrix), covariances, bases)


def _add_to_covariances(covariances, grad, decay):
    products = zip(covariances, (grad, grad.T), strict=True)
    return tuple(old if old is None else mix(old, _product(g, g.T), decay) for old, g in products)


def _adam(grad, moments: Moments, b1, b2) -> tuple[jax.Array, Moments]:
    """Return Adam's direction, with its second moment in the bases, and the moments after it."""
    first = moments.first.add(grad, b1)
    second = moments.second.add(jnp.square(_rotate(grad, moments.bases)), b2)
    direction = _rotate(first.corrected, moments.bases) / (jnp.sqrt(second.corrected) + EPSILON)
    return _rotate(direction, moments.bases, back=True), moments.replace(first=first, second=second)


def _rotate(matrix, bases, *, back: bool = False):
    """Return a matrix in the bases of its rows and columns, or `back` from there."""
    rows, columns = bases
    if rows is not None:
        matrix = _product(rows if back else rows.T, matrix)
    if columns is not None:
        matrix = _product(matrix, columns.T if back else columns)
    return matrix


def _start_bases(moments: Moments) -> Moments:
    return moments.replace(bases=jax.tree.map(lambda one: jnp.linalg.eigh(one)[1], moments.covariances))


def _refresh_bases(moments: Moments) -> Moments:
    """Take a step of power iteration from the columns in falling order, along which second moments go.

    QR turns power iteration's columns towards that order; in any other order they would wander.
    """
    second, bases = moments.second.value, list(moments.bases)
    for axis, (covariance, basis) in enumerate(zip(moments.covariances, moments.bases, strict=True)):
        if basis is not None:
            turned = _product(covariance, basis)
            order = jnp.argsort(-jnp.sum(basis * turned, axis=0))
            second = jnp.take(second, order, axis=axis)
            bases[axis] = jnp.linalg.qr(turned[:, order])[0]
    return moments.replace(second=moments.second.replace(value=second), bases=tuple(bases))


def _product(one, other):
    """Multiply matrices in full float32, which TPUs and GPUs do not do unasked: bases have to stay orthogonal."""
    return jnp.matmul(one, other, precision=lax.Precision.HIGHEST)
