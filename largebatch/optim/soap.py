"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

SOAP_EVERY = 10  # updates between two refreshes of the eigenbases, the paper's own choice
# A larger side keeps the basis it has, which the paper allows: its eigenbasis would cost too much.
SOAP_MAX_SIDE = 1024


# ---- SOAP -------------------------------------------------------------------------------------------


class Side(NamedTuple):
    """One side of a matrix: the average of its gradients' G G^T (or G^T G), and an orthonormal basis of it."""

    covariance: jax.Array
    basis: jax.Array


class Soap(NamedTuple):
    """Of one parameter: both moments, and a Side (None where it is too large) for rows and columns."""

    first: jax.Array
    second: jax.Array
    sides: tuple[Side | None, ...]


class SoapState(NamedTuple):
    """`count` updates so far; `moments` is a tuple of Soap, leaf by leaf."""

    count: jax.Array
    moments: tuple[Soap, ...]


def scale_by_soap(
    b1, b2, eps: float = 1e-8, every: int = SOAP_EVERY, max_side: int = SOAP_MAX_SIDE
) -> optax.GradientTransformation:
    """Adam in the eigenbasis of Shampoo's preconditioner.

    Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam", algorithm 3: a kernel's gradient is
    the matrix G [inputs, output channels]; L and R are moving averages, with decay `b2`, of G G^T and G^T G.
    Adam's second moment is kept in their eigenbases, its first moment in the parameters' own. The bases come from
    an eigendecomposition at the first update, whose direction is zero, and from one step of power iteration and a
    QR decomposition every `every` updates, columns in falling order as in the authors' program. A parameter
    without such a side gets plain Adam.

    Args:
      b1, b2: may be traced.
      max_side: sides above it, and those of parameters with one dimension, keep the basis they have.
    """

    def init_leaf(p):
        def side(size):
            return None if size > max_side else Side(jnp.zeros((size, size)), jnp.eye(size))

        shape = _matrix(p).shape
        sides = tuple(map(side, shape)) if p.ndim > 1 else (None, None)
        return Soap(jnp.zeros(shape), jnp.zeros(shape), sides)

    def init(params):
        return SoapState(jnp.zeros((), jnp.int32), tuple(map(init_leaf, jax.tree.leaves(params))))

    def update(grads, state, params=None):
        del params
        count = state.count + 1
        leaves, structure = jax.tree.flatten(grads)
        done = [
            _soap_leaf(_matrix(g), moments, count, b1, b2, eps, every)
            for g, moments in zip(leaves, state.moments, strict=True)
        ]
        updates = [move.reshape(g.shape) for (move, _), g in zip(done, leaves, strict=True)]
        return structure.unflatten(updates), SoapState(count, tuple(moments for _, moments in done))

    return optax.GradientTransformation(init, update)


def _matrix(p):
    """[..., output channels] -> [inputs, output channels]; a vector is one row."""
    return p.reshape(-1, p.shape[-1]) if p.ndim else p.reshape(1, 1)


def _soap_leaf(grad, moments: Soap, count, b1, b2, eps, every):
    covariance_of = (lambda: _product(grad, grad.T), lambda: _product(grad.T, grad))
    sides = tuple(
        side and side._replace(covariance=b2 * side.covariance + (1 - b2) * of())
        for side, of in zip(moments.sides, covariance_of, strict=True)
    )
    if sides == (None, None):
        direction, first, second = _adam_in(sides, grad, moments, count, b1, b2, eps)
        return direction, Soap(first, second, sides)

    def stay():
        return jnp.zeros_like(grad), moments.first, moments.second

    move = partial(_adam_in, sides, grad, moments, count - 1, b1, b2, eps)
    direction, first, second = lax.cond(count == 1, stay, move)
    due = jnp.where(count == 1, 1, jnp.where(count % every == 0, 2, 0))
    sides, second = lax.switch(due, (_keep_bases, _start_bases, _refresh_bases), sides, second)
    return direction, Soap(first, second, sides)


def _keep_bases(sides, second):
    return sides, second


def _start_bases(sides, second):
    bases = (side and jnp.linalg.eigh(side.covariance)[1] for side in sides)
    return tuple(side and side._replace(basis=basis) for side, basis in zip(sides, bases, strict=True)), second


def _refresh_bases(sides, second):
    """One step of power iteration from the columns in falling order, along which the second moments go.

    QR turns power iteration's columns towards that order; from any other they would wander.
    """
    new = []
    for axis, side in enumerate(sides):
        if side is not None:
            turned = _product(side.covariance, side.basis)
            order = jnp.argsort(-jnp.sum(side.basis * turned, axis=0))
            second = jnp.take(second, order, axis=axis)
            side = side._replace(basis=jnp.linalg.qr(turned[:, order])[0])
        new.append(side)
    return tuple(new), second


def _product(one, other):
    """A matrix product in full float32, which TPUs and GPUs do not do unasked: bases have to stay orthogonal."""
    return jnp.matmul(one, other, precision=lax.Precision.HIGHEST)


def _adam_in(sides, grad, moments: Soap, count, b1, b2, eps):
    """Adam's direction, with its second moment in the bases of `sides`, and both moments."""
    count = count.astype(jnp.float32)
    first = b1 * moments.first + (1 - b1) * grad
    second = b2 * moments.second + (1 - b2) * jnp.square(_rotate(grad, sides))
    direction = _rotate(first, sides) / (1 - b1**count) / (jnp.sqrt(second / (1 - b2**count)) + eps)
    return _rotate(direction, sides, back=True), first, second


def _rotate(matrix, sides, *, back: bool = False):
    """`matrix` in the bases of its sides, or back."""
    rows, columns = (side and (side.basis if back else side.basis.T) for side in sides)
    matrix = matrix if rows is None else _product(rows, matrix)
    return matrix if columns is None else _product(matrix, columns.T)
