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
from jax import tree_util

from largebatch.optim.soap import scale_by_soap

LAMB_EPSILON = 1e-6  # beside the root of the second moment
LARS_TRUST = 0.001  # the paper's trust coefficient; a factor of the learning rate
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
