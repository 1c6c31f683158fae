"""Optimizers by name, as optax transformations whose numbers are data, not code.

`optax.inject_hyperparams` keeps every hyper-parameter in the optimizer state, so the compiled program
holds none of them and serves every setting; `with_learning_rate` sets the rate of the next update.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax, tree_util

LAMB_EPSILON = 1e-6  # beside the root of the second moment
LARS_TRUST = 0.001  # the paper's trust coefficient; a factor of the learning rate
SOAP_EVERY = 10  # updates between two refreshes of the eigenbases, the paper's own choice
# A larger side keeps the basis it has, which the paper allows: its eigenbasis would cost too much.
SOAP_MAX_SIDE = 1024
HEAD = "head"  # the name of a network's last layer


class Numbers(NamedTuple):
    """The hyper-parameters that are data: any value serves the same compiled program.

    `momentum` is b1 of the Adam family, `b2` its second decay; `clip_norm` is infinite where nothing is clipped;
    `bias_multiplier` multiplies the rate of biases and norms (Page 2018, "How to train your ResNet", part 7),
    `adamw_multiplier` that of Muon's AdamW part, whose weight decay stays that of the rest.
    """

    momentum: float = 0.9
    b2: float = 0.999
    weight_decay: float = 0.0
    clip_norm: float = jnp.inf
    bias_multiplier: float = 1.0
    adamw_multiplier: float = 1.0


class Switches(NamedTuple):
    """The options that are code.

    `momentum_correction` keeps the rate out of the momentum buffer of SGD and LARS: Goyal et al. 2017, section 3.
    `exclude_biases` keeps weight decay, trust ratios and preconditioning off biases and norms.
    """

    nesterov: bool = False
    momentum_correction: bool = True
    exclude_biases: bool = True


DEFAULT_NUMBERS, DEFAULT_SWITCHES = Numbers(), Switches()


def _kernels(params):
    """Mask: kernels, not biases or normalisation scales."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _biases(params):
    return jax.tree.map(lambda p: p.ndim <= 1, params)


def _with_momentum(direction, learning_rate, numbers: Numbers, switches: Switches):
    # Goyal et al., eq. 9: u <- m u + g, w <- w - rate u. Eq. 10 has the rate inside, v <- m v + rate g, and after a
    # change of the rate needs v scaled by it, which makes it eq. 9 again.
    momentum = optax.trace(numbers.momentum, nesterov=switches.nesterov)
    rate = optax.scale_by_learning_rate(learning_rate)
    return optax.chain(direction, *((momentum, rate) if switches.momentum_correction else (rate, momentum)))


def _sgd(learning_rate, numbers, switches, mask):
    # Decay is added to the gradient of the mean loss: no scaling of the loss scales it (Goyal et al., section 3).
    decay = optax.add_decayed_weights(numbers.weight_decay, mask=mask)
    return _with_momentum(decay, learning_rate, numbers, switches)


def _lars(learning_rate, numbers, switches, mask):
    # You et al. 2017, "Large Batch Training of Convolutional Networks"; with the norm of the decayed gradient in
    # place of the sum of both norms, as optax.lars, which is eq. 10 above. What has no norm moves as if it had 1.
    decay = optax.add_decayed_weights(numbers.weight_decay, mask=mask)
    # The coefficient for itself: beside a zero norm optax would drop it with the ratio.
    trust = optax.masked(optax.chain(optax.scale_by_trust_ratio(), optax.scale(LARS_TRUST)), mask)
    return _with_momentum(optax.chain(decay, trust), learning_rate, numbers, switches)


def _adam(learning_rate, numbers, switches, mask):
    # Kingma and Ba 2015, with L2 regularisation in the gradient.
    decay = optax.add_decayed_weights(numbers.weight_decay, mask=mask)
    return optax.chain(decay, optax.adam(learning_rate, b1=numbers.momentum, b2=numbers.b2))


def _adamw(learning_rate, numbers, switches, mask, *, nesterov=False):
    # Loshchilov and Hutter 2019; with Nesterov's momentum Dozat 2016.
    return optax.adamw(
        learning_rate, numbers.momentum, numbers.b2, weight_decay=numbers.weight_decay, mask=mask, nesterov=nesterov
    )


def _lamb(learning_rate, numbers, switches, mask):
    # You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2.
    return optax.chain(
        optax.scale_by_adam(b1=numbers.momentum, b2=numbers.b2, eps=LAMB_EPSILON),
        optax.add_decayed_weights(numbers.weight_decay, mask=mask),
        optax.masked(optax.scale_by_trust_ratio(), mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _muon(learning_rate, numbers, switches, mask):
    # Jordan et al. 2024, "Muon": momentum, orthogonalised by Newton-Schulz. A convolution is the matrix of its
    # output channels; the head, biases and norms are AdamW's.
    def dimensions(params):
        def of(path, p):
            head = any(getattr(key, "key", None) == HEAD for key in path)
            inputs = optax.contrib.MuonDimensionNumbers(tuple(range(p.ndim - 1)), p.ndim - 1)
            return None if p.ndim < 2 or head else inputs

        return tree_util.tree_map_with_path(of, params)

    direction = optax.contrib.muon(
        1.0,
        beta=numbers.momentum,
        nesterov=switches.nesterov,
        adam_b1=numbers.momentum,
        adam_b2=numbers.b2,
        adam_learning_rate=numbers.adamw_multiplier,
        muon_weight_dimension_numbers=dimensions,
    )
    decay = optax.add_decayed_weights(-numbers.weight_decay, mask=mask)  # the direction is downhill already
    return optax.chain(direction, decay, optax.scale(learning_rate))


def _soap(learning_rate, numbers, switches, mask):
    return optax.chain(
        scale_by_soap(numbers.momentum, numbers.b2),
        optax.add_decayed_weights(numbers.weight_decay, mask=mask),
        optax.scale_by_learning_rate(learning_rate),
    )


OPTIMIZERS: dict[str, Callable] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "nadamw": partial(_adamw, nesterov=True),
    "lamb": _lamb,
    "lars": _lars,
    "muon": _muon,
    "soap": _soap,
}


def create_optimizer(
    name: str, numbers: Numbers = DEFAULT_NUMBERS, switches: Switches = DEFAULT_SWITCHES
) -> optax.GradientTransformation:
    """The optimizer called `name`, a key of OPTIMIZERS.

    The gradient is clipped to the global norm `clip_norm` first. Weight decay is part of the gradient for SGD, LARS
    and Adam, and beside it for the others; only kernels have it, unless `switches` say otherwise.

    Returns:
      A transformation whose state has `hyperparams["learning_rate"]`, zero until set.
    """

    # `inject_hyperparams` wants them one by one.
    def make(learning_rate, momentum, b2, weight_decay, clip_norm, bias_multiplier, adamw_multiplier):
        numbers = Numbers(momentum, b2, weight_decay, clip_norm, bias_multiplier, adamw_multiplier)
        mask = _kernels if switches.exclude_biases else lambda params: jax.tree.map(lambda p: True, params)
        return optax.chain(
            optax.clip_by_global_norm(numbers.clip_norm),
            OPTIMIZERS[name](learning_rate, numbers, switches, mask),
            optax.masked(optax.scale(numbers.bias_multiplier), _biases),
        )

    return optax.inject_hyperparams(make)(learning_rate=0.0, **numbers._asdict())


def with_learning_rate(opt_state, learning_rate):
    """`opt_state` with the rate of the next update."""
    hyperparams = {**opt_state.hyperparams, "learning_rate": jnp.asarray(learning_rate, jnp.float32)}
    return opt_state._replace(hyperparams=hyperparams)


def trust_ratios(grads, params, weight_decay: float):
    """LAMB's trust ratio of every parameter at the first update: ||p|| / ||Adam's direction + decay * p||.

    You et al. 2020, algorithm 2. The momentum cancels, since the first moments are corrected for their bias.

    Args:
      grads, params: pytrees alike.
      weight_decay: on kernels only.
    Returns:
      A pytree alike of float32 scalars; inf where the gradient is zero, whatever the decay.
    """
    adam = optax.scale_by_adam(eps=LAMB_EPSILON)
    lamb = optax.chain(adam, optax.add_decayed_weights(weight_decay, mask=_kernels))
    updates, _ = lamb.update(grads, lamb.init(params), params)

    def ratio(grad, param, update):
        return jnp.where(jnp.any(grad != 0), optax.tree.norm(param) / optax.tree.norm(update), jnp.inf)

    return jax.tree.map(ratio, grads, params, updates)


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
