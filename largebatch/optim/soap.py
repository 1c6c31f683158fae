"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax

from largebatch.optim.adam import Average

SOAP_EVERY = 10  # steps between two refreshes of the eigenbases, the paper's own choice
# Sides above this size have no eigenbasis, which would cost too much; the paper allows it.
SOAP_MAX_SIDE = 1024


@struct.dataclass
class Side:
    """Statistics of the n rows or of the n columns of a matrix."""

    covariance: jax.Array  # float32 [n, n], moving average of the gradients' G G^T (of columns: G^T G)
    basis: jax.Array  # float32 [n, n], an orthonormal basis of it; vectors are columns


@struct.dataclass
class Moments:
    """The moments of one parameter, as a matrix [inputs, outputs]."""

    first: Average  # float32 [inputs, outputs], in the parameter's own basis
    second: Average  # float32 [inputs, outputs], in the bases of `sides`
    sides: tuple[Side | None, Side | None]  # rows and columns; None where a side is too large


@struct.dataclass
class SoapState:
    """The state of `scale_by_soap`."""

    count: jax.Array  # int32, steps done
    moments: tuple[Moments, ...]  # moments of all parameters, leaf by leaf


@struct.dataclass
class DecayState:
    """The state of `add_decayed_weights`."""

    count: jax.Array  # int32, steps done


@dataclasses.dataclass(frozen=True)
class _Soap:
    """The hyper-parameters of algorithm 3; both decays may be traced."""

    b1: jax.Array | float  # decay of first moments
    b2: jax.Array | float  # decay of second moments and covariances
    eps: float
    every: int  # steps between two refreshes of the bases


def scale_by_soap(
    b1, b2, eps: float = 1e-8, every: int = SOAP_EVERY, max_side: int = SOAP_MAX_SIDE
) -> optax.GradientTransformation:
    """Create Adam in the eigenbasis of Shampoo's preconditioner.

    Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam", algorithm 3: a kernel's gradient is
    the matrix G [inputs, output channels]; L and R are moving averages, with decay `b2`, of G G^T and G^T G.
    Adam's second moment is kept in their eigenbases, its first moment in the parameters' own. The bases come from
    an eigendecomposition at the first step, whose direction is zero, and from one step of power iteration and a
    QR decomposition every `every` steps, columns in falling order as in the authors' program. A parameter
    without such a side gets plain Adam.

    Args:
      b1, b2: decays of first moments, and of second moments and covariances; may be traced.
      max_side: sides above it, and those of parameters with one dimension, have no eigenbasis.
    """
    soap = _Soap(b1, b2, eps, every)

    def init_leaf(p):
        def side(size, has_basis):
            return Side(jnp.zeros((size, size)), jnp.eye(size)) if has_basis else None

        matrix = _matrix(p)
        sides = tuple(map(side, matrix.shape, _with_basis(p, max_side)))
        return Moments(Average.start(matrix), Average.start(matrix), sides)

    def init(params):
        return SoapState(jnp.zeros((), jnp.int32), tuple(map(init_leaf, jax.tree.leaves(params))))

    def update(grads, state, params=None):
        del params
        count = state.count + 1
        leaves, structure = jax.tree.flatten(grads)
        directions, moments = _update(soap, tuple(map(_matrix, leaves)), state.moments, count)
        shaped = [direction.reshape(grad.shape) for direction, grad in zip(directions, leaves, strict=True)]
        return structure.unflatten(shaped), SoapState(count, moments)

    return optax.GradientTransformation(init, update)


def add_decayed_weights(weight_decay, mask: Callable, waits: Callable) -> optax.GradientTransformation:
    """Create weight decay that starts at the second step for parameters that SOAP does not move at the first.

    The authors' program skips its first step wholly, too.

    Args:
      weight_decay: may be traced.
      mask: params -> a pytree of bools alike: the parameters that decay.
      waits: params -> a pytree of bools alike: those that decay only from the second step on.
    """

    def init(params):
        del params
        return DecayState(jnp.zeros((), jnp.int32))

    def update(directions, state, params):
        after_first = jnp.where(state.count == 0, 0.0, weight_decay)

        def decayed(direction, p, decays, waits):
            return direction + (after_first if waits else weight_decay) * p if decays else direction

        decayed_directions = jax.tree.map(decayed, directions, params, mask(params), waits(params))
        return decayed_directions, DecayState(state.count + 1)

    return optax.GradientTransformation(init, update)


def has_bases(params, max_side: int = SOAP_MAX_SIDE):
    """Return a pytree of bools like `params`: those that `scale_by_soap` does not move at the first step."""
    return jax.tree.map(lambda p: any(_with_basis(p, max_side)), params)


def _with_basis(p, max_side: int) -> tuple[bool, bool]:
    """Tell whether the rows and the columns of a parameter have a basis."""
    rows, columns = _matrix_shape(p)
    return p.ndim > 1 and rows <= max_side, p.ndim > 1 and columns <= max_side


def _matrix_shape(p) -> tuple[int, int]:
    columns = p.shape[-1] if p.ndim else 1
    return p.size // columns, columns


def _matrix(p):
    """Reshape [..., output channels] to [inputs, output channels]; a vector becomes one row."""
    return p.reshape(_matrix_shape(p))


def _update(soap: _Soap, grads, moments, count) -> tuple[tuple[jax.Array, ...], tuple[Moments, ...]]:
    """Return the directions of all parameters, and their moments after step number `count`, from 1.

    All parameters that have bases share their conditions, since a GPU pays for each of them.
    """
    moments = [
        one.replace(sides=_add_to_covariances(soap, grad, one.sides))
        for grad, one in zip(grads, moments, strict=True)
    ]
    with_bases = [number for number, one in enumerate(moments) if one.sides != (None, None)]
    updated = [
        None if number in with_bases else _adam(soap, grad, one)
        for number, (grad, one) in enumerate(zip(grads, moments, strict=True))
    ]

    def only_look():
        return [(jnp.zeros_like(grads[number]), moments[number]) for number in with_bases]

    def move():
        return [_adam(soap, grads[number], moments[number]) for number in with_bases]

    moved = lax.cond(count == 1, only_look, move)
    is_due = jnp.where(count == 1, 1, jnp.where(count % soap.every == 0, 2, 0))
    branches = [_for_each(step) for step in (_keep_bases, _start_bases, _refresh_bases)]
    turned = lax.switch(is_due, branches, [one for _, one in moved])
    for number, (direction, _), one in zip(with_bases, moved, turned, strict=True):
        updated[number] = direction, one
    directions, moments = zip(*updated, strict=True)
    return directions, moments


def _add_to_covariances(soap: _Soap, grad, sides):
    rows, columns = sides
    if rows is not None:
        rows = rows.replace(covariance=soap.b2 * rows.covariance + (1 - soap.b2) * _product(grad, grad.T))
    if columns is not None:
        columns = columns.replace(covariance=soap.b2 * columns.covariance + (1 - soap.b2) * _product(grad.T, grad))
    return rows, columns


def _for_each(step: Callable) -> Callable:
    return lambda all_moments: [step(moments) for moments in all_moments]


def _keep_bases(moments: Moments) -> Moments:
    return moments


def _start_bases(moments: Moments) -> Moments:
    def start(side):
        return side and side.replace(basis=jnp.linalg.eigh(side.covariance)[1])

    return moments.replace(sides=tuple(map(start, moments.sides)))


def _refresh_bases(moments: Moments) -> Moments:
    """Take a step of power iteration from the columns in falling order, along which second moments go.

    QR turns power iteration's columns towards that order; in any other order they would wander.
    """
    second, sides = moments.second.value, []
    for axis, side in enumerate(moments.sides):
        if side is not None:
            turned = _product(side.covariance, side.basis)
            order = jnp.argsort(-jnp.sum(side.basis * turned, axis=0))
            second = jnp.take(second, order, axis=axis)
            side = side.replace(basis=jnp.linalg.qr(turned[:, order])[0])
        sides.append(side)
    return moments.replace(second=moments.second.replace(value=second), sides=tuple(sides))


def _product(one, other):
    """Multiply matrices in full float32, which TPUs and GPUs do not do unasked: bases have to stay orthogonal."""
    return jnp.matmul(one, other, precision=lax.Precision.HIGHEST)


def _adam(soap: _Soap, grad, moments: Moments) -> tuple[jax.Array, Moments]:
    """Return Adam's direction, with its second moment in the bases of the sides, and the moments after it."""
    first = moments.first.add(grad, soap.b1)
    second = moments.second.add(jnp.square(_into_bases(grad, moments.sides)), soap.b2)
    direction = _into_bases(first.corrected, moments.sides) / (jnp.sqrt(second.corrected) + soap.eps)
    return _out_of_bases(direction, moments.sides), moments.replace(first=first, second=second)


def _into_bases(matrix, sides):
    rows, columns = sides
    if rows is not None:
        matrix = _product(rows.basis.T, matrix)
    if columns is not None:
        matrix = _product(matrix, columns.basis)
    return matrix


def _out_of_bases(matrix, sides):
    rows, columns = sides
    if rows is not None:
        matrix = _product(rows.basis, matrix)
    if columns is not None:
        matrix = _product(matrix, columns.basis.T)
    return matrix
