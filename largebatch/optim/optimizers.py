"""Optimizers by name, as optax transformations whose hyper-parameters are data, not code.

`optax.inject_hyperparams` keeps every hyper-parameter in the optimizer state, so the compiled program holds none of
them and serves every setting; `optax.tree.set(state, learning_rate=..., b2=...)` sets those of the next step.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import tree_util

from largebatch.config.fields import OptimizerConfig
from largebatch.optim.averages import Average
from largebatch.optim.muon import orthogonalize, scale_by_muon
from largebatch.optim.soap import soap

LAMB_EPSILON = 1e-6  # added to the root of the second moment
LARS_TRUST = 0.001  # the paper's trust coefficient; a factor of the learning rate
HEAD = "head"  # the name of a network's last layer
# The fields of a config's section that are code: another value is another compiled program.
CODE_FIELDS = ("name", "nesterov", "momentum_correction", "exclude_biases", "soap_every")


@struct.dataclass
class Hyperparams:
    """The hyper-parameters that are data: any value serves the same compiled program. All are float32 scalars."""

    momentum: jax.Array | float = 0.9  # b1 of the Adam family
    b2: jax.Array | float = 0.999  # decay of the Adam family's second moment
    weight_decay: jax.Array | float = 0.0
    clip_norm: jax.Array | float = jnp.inf  # largest global norm of the gradient; infinite for no clipping
    bias_multiplier: jax.Array | float = 1.0  # of the rate: Page 2018, "How to train your ResNet", part 7
    adamw_multiplier: jax.Array | float = 1.0  # of the rate of Muon's AdamW part, but not of its weight decay

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig) -> "Hyperparams":
        """Take the hyper-parameters from a config's section, whose clip_norm is None for no clipping."""
        values = {field.name: getattr(optimizer, field.name) for field in dataclasses.fields(cls)}
        return cls(**values | {"clip_norm": np.inf if optimizer.clip_norm is None else optimizer.clip_norm})


# Masks of parameters: kernels are those with more than one dimension, the others biases and normalisation scales.
_kernels = partial(jax.tree.map, lambda p: p.ndim > 1)
_biases = partial(jax.tree.map, lambda p: p.ndim <= 1)
_all = partial(jax.tree.map, lambda p: True)


def scale_by_adam(b1, b2, eps: float = 1e-8, *, nesterov: bool = False) -> optax.GradientTransformation:
    """Create Adam (Kingma and Ba 2015, "Adam", algorithm 1), with `nesterov` NAdam.

    Unlike in optax's, decays may change from step to step; see `Average`, of which the state holds a pair.

    Args:
      b1, b2: decays of the moments at the next step; may be traced.
      nesterov: Dozat 2016, "Incorporating Nesterov Momentum".
    """

    def init(params):
        return Average.start(params), Average.start(params)

    def update(grads, state, params=None):
        del params
        first, second = state[0].add(grads, b1), state[1].add(jax.tree.map(jnp.square, grads), b2)
        directions = first.nesterov(grads, b1) if nesterov else first.corrected
        directions = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), directions, second.corrected)
        return directions, (first, second)

    return optax.GradientTransformation(init, update)


def _decay(hyperparams: Hyperparams, mask: Callable) -> optax.GradientTransformation:
    return optax.add_decayed_weights(hyperparams.weight_decay, mask=mask)


def _with_momentum(direction, rate, hyperparams: Hyperparams, options: OptimizerConfig):
    # Goyal et al. 2017, eq. 9: u <- m u + g, w <- w - rate u. Eq. 10 has the rate inside, v <- m v + rate g, and
    # after a change of the rate needs v scaled by it, which makes it eq. 9 again.
    momentum = optax.trace(hyperparams.momentum, nesterov=options.nesterov)
    if options.momentum_correction:
        return optax.chain(direction, momentum, rate)
    return optax.chain(direction, rate, momentum)


def _sgd(rate, hyperparams, options, mask):
    # Decay is added to the gradient of the mean loss: no scaling of the loss scales it (Goyal et al., section 3).
    return _with_momentum(_decay(hyperparams, mask), rate, hyperparams, options)


def _lars(rate, hyperparams, options, mask):
    # You et al. 2017, "Large Batch Training of Convolutional Networks"; with the norm of the decayed gradient in
    # place of the sum of both norms, as optax.lars, which is eq. 10 above. Where a norm is zero the ratio is 1.
    # The coefficient is scaled separately, since optax would drop it with the ratio where a norm is zero.
    trust = optax.masked(optax.chain(optax.scale_by_trust_ratio(), optax.scale(LARS_TRUST)), mask)
    return _with_momentum(optax.chain(_decay(hyperparams, mask), trust), rate, hyperparams, options)


def _adam(rate, hyperparams, options, mask):
    # Kingma and Ba 2015, with L2 regularisation in the gradient.
    return optax.chain(_decay(hyperparams, mask), scale_by_adam(hyperparams.momentum, hyperparams.b2), rate)


def _adamw(rate, hyperparams, options, mask, *, nesterov=False):
    # Loshchilov and Hutter 2019; with Nesterov's momentum Dozat 2016.
    adam = scale_by_adam(hyperparams.momentum, hyperparams.b2, nesterov=nesterov)
    return optax.chain(adam, _decay(hyperparams, mask), rate)


def _lamb(rate, hyperparams, options, mask):
    # You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2.
    adam = scale_by_adam(hyperparams.momentum, hyperparams.b2, LAMB_EPSILON)
    trust = optax.masked(optax.scale_by_trust_ratio(), mask)
    return optax.chain(adam, _decay(hyperparams, mask), trust, rate)


def _soap(rate, hyperparams, options, mask):
    decay = {"weight_decay": hyperparams.weight_decay, "mask": mask}
    return optax.chain(soap(hyperparams.momentum, hyperparams.b2, every=options.soap_every, **decay), rate)


def _muon(rate, hyperparams, options, mask):
    momentum = scale_by_muon(hyperparams.momentum, nesterov=options.nesterov)
    muon = optax.chain(momentum, _decay(hyperparams, mask))
    return optax.chain(_beside_adamw(muon, hyperparams, options, mask), rate)


def _soap_muon(rate, hyperparams, options, mask):
    # "SOAP-Muon" of modded-nanogpt, track 3, 2026.
    decay = {"weight_decay": hyperparams.weight_decay, "mask": mask}
    orthogonal = soap(hyperparams.momentum, hyperparams.b2, every=options.soap_every, finish=orthogonalize, **decay)
    return optax.chain(_beside_adamw(orthogonal, hyperparams, options, mask), rate)


def _parts(params):
    """Return the part of each parameter: "adamw" for the head, biases and norms, "muon" for the rest."""

    def part(path, p):
        is_head = any(getattr(key, "key", None) == HEAD for key in path)
        return "adamw" if p.ndim < 2 or is_head else "muon"

    return tree_util.tree_map_with_path(part, params)


def _beside_adamw(muon, hyperparams: Hyperparams, options: OptimizerConfig, mask: Callable):
    adam = scale_by_adam(hyperparams.momentum, hyperparams.b2, nesterov=options.nesterov)
    adamw = optax.chain(adam, optax.scale(hyperparams.adamw_multiplier), _decay(hyperparams, mask))
    return optax.partition({"muon": muon, "adamw": adamw}, _parts)


# (transformation by the learning rate, hyper-parameters, a config's section, mask of the parameters that decay)
OPTIMIZERS: dict[str, Callable] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "nadamw": partial(_adamw, nesterov=True),
    "lamb": _lamb,
    "lars": _lars,
    "muon": _muon,
    "soap": _soap,
    "soap_muon": _soap_muon,
}
WITH_BASES = ("soap", "soap_muon")  # bases cannot be averaged over devices; the first step only finds them


def create_optimizer(
    options: OptimizerConfig, hyperparams: Hyperparams | None = None
) -> optax.GradientTransformation:
    """Create the optimizer of a config's section.

    The gradient is clipped to the global norm `clip_norm` first. Weight decay is part of the gradient for SGD, LARS
    and Adam, and beside it for the others; only kernels have it, unless `exclude_biases` is off.

    Args:
      options: a config's section; the optimizer itself depends on its CODE_FIELDS alone.
      hyperparams: initial values, which may be traced; None for those of `options`.
    Returns:
      A transformation whose state has `hyperparams["learning_rate"]`, zero until set.
    """

    # `inject_hyperparams` takes hyper-parameters one by one.
    def make(*, learning_rate, momentum, b2, weight_decay, clip_norm, bias_multiplier, adamw_multiplier):
        injected = Hyperparams(momentum, b2, weight_decay, clip_norm, bias_multiplier, adamw_multiplier)
        rate, mask = optax.scale_by_learning_rate(learning_rate), _kernels if options.exclude_biases else _all
        return optax.chain(
            optax.clip_by_global_norm(clip_norm),
            OPTIMIZERS[options.name](rate, injected, options, mask),
            optax.masked(optax.scale(bias_multiplier), _biases),
        )

    values = vars(hyperparams or Hyperparams.from_config(options))
    return optax.inject_hyperparams(make)(learning_rate=0.0, **values)
