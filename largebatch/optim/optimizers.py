"""Optimizers by name, as optax transformations whose hyper-parameters are data, not code.

`optax.inject_hyperparams` keeps every hyper-parameter in the optimizer state, so the compiled program
holds none of them and serves every setting; `with_hyperparams` sets those of the next step.
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
from largebatch.optim.adam import scale_by_adam
from largebatch.optim.muon import orthogonalize_directions, scale_by_muon
from largebatch.optim.soap import SOAP_EVERY, add_decayed_weights, has_bases, scale_by_soap

LAMB_EPSILON = 1e-6  # added to the root of the second moment
LARS_TRUST = 0.001  # the paper's trust coefficient; a factor of the learning rate
HEAD = "head"  # the name of a network's last layer


@struct.dataclass
class Hyperparams:
    """The hyper-parameters that are data: any value serves the same compiled program. All are float32 scalars."""

    momentum: jax.Array | float = 0.9  # b1 of the Adam family
    b2: jax.Array | float = 0.999  # decay of the Adam family's second moment
    weight_decay: jax.Array | float = 0.0
    clip_norm: jax.Array | float = jnp.inf  # largest global norm of the gradient; infinite for no clipping
    # Multiplies the rate of biases and norms: Page 2018, "How to train your ResNet", part 7.
    bias_multiplier: jax.Array | float = 1.0
    # Multiplies the rate of Muon's AdamW part, whose weight decay stays that of the rest.
    adamw_multiplier: jax.Array | float = 1.0

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig) -> "Hyperparams":
        """Take the hyper-parameters from a config's section, whose clip_norm is None for no clipping."""
        values = {field.name: getattr(optimizer, field.name) for field in dataclasses.fields(cls)}
        if values["clip_norm"] is None:
            values["clip_norm"] = np.inf
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """The options that are code: another value is another compiled program."""

    nesterov: bool = False
    momentum_correction: bool = True  # keeps the rate out of SGD's and LARS' momentum: Goyal et al. 2017, section 3
    exclude_biases: bool = True  # keeps weight decay, trust ratios and preconditioning off biases and norms
    soap_every: int = SOAP_EVERY  # steps between two refreshes of SOAP's bases

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig) -> "OptimizerOptions":
        """Take the options from a config's section."""
        return cls(**{field.name: getattr(optimizer, field.name) for field in dataclasses.fields(cls)})


DEFAULT_HYPERPARAMS, DEFAULT_OPTIONS = Hyperparams(), OptimizerOptions()


def _kernels(params):
    """Return a mask that is True for kernels, False for biases and normalisation scales."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _biases(params):
    return jax.tree.map(lambda p: p.ndim <= 1, params)


def _all(params):
    return jax.tree.map(lambda p: True, params)


def _with_momentum(direction, learning_rate, hyperparams: Hyperparams, options: OptimizerOptions):
    # Goyal et al., eq. 9: u <- m u + g, w <- w - rate u. Eq. 10 has the rate inside, v <- m v + rate g, and after a
    # change of the rate needs v scaled by it, which makes it eq. 9 again.
    momentum = optax.trace(hyperparams.momentum, nesterov=options.nesterov)
    rate = optax.scale_by_learning_rate(learning_rate)
    if options.momentum_correction:
        return optax.chain(direction, momentum, rate)
    return optax.chain(direction, rate, momentum)


def _sgd(learning_rate, hyperparams, options, mask):
    # Decay is added to the gradient of the mean loss: no scaling of the loss scales it (Goyal et al., section 3).
    decay = optax.add_decayed_weights(hyperparams.weight_decay, mask=mask)
    return _with_momentum(decay, learning_rate, hyperparams, options)


def _lars(learning_rate, hyperparams, options, mask):
    # You et al. 2017, "Large Batch Training of Convolutional Networks"; with the norm of the decayed gradient in
    # place of the sum of both norms, as optax.lars, which is eq. 10 above. Where a norm is zero the ratio is 1.
    decay = optax.add_decayed_weights(hyperparams.weight_decay, mask=mask)
    # The coefficient is scaled separately, since optax would drop it with the ratio where a norm is zero.
    trust = optax.masked(optax.chain(optax.scale_by_trust_ratio(), optax.scale(LARS_TRUST)), mask)
    return _with_momentum(optax.chain(decay, trust), learning_rate, hyperparams, options)


def _adam(learning_rate, hyperparams, options, mask):
    # Kingma and Ba 2015, with L2 regularisation in the gradient.
    decay = optax.add_decayed_weights(hyperparams.weight_decay, mask=mask)
    adam = scale_by_adam(hyperparams.momentum, hyperparams.b2)
    return optax.chain(decay, adam, optax.scale_by_learning_rate(learning_rate))


def _adamw(learning_rate, hyperparams, options, mask, *, nesterov=False):
    # Loshchilov and Hutter 2019; with Nesterov's momentum Dozat 2016.
    return optax.chain(
        scale_by_adam(hyperparams.momentum, hyperparams.b2, nesterov=nesterov),
        optax.add_decayed_weights(hyperparams.weight_decay, mask=mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _lamb(learning_rate, hyperparams, options, mask):
    # You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2.
    return optax.chain(
        scale_by_adam(hyperparams.momentum, hyperparams.b2, LAMB_EPSILON),
        optax.add_decayed_weights(hyperparams.weight_decay, mask=mask),
        optax.masked(optax.scale_by_trust_ratio(), mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _muon(learning_rate, hyperparams, options, mask):
    momentum = scale_by_muon(hyperparams.momentum, nesterov=options.nesterov)
    decay = optax.add_decayed_weights(hyperparams.weight_decay, mask=mask)
    return _beside_adamw(momentum, decay, learning_rate, hyperparams, options)


def _soap_muon(learning_rate, hyperparams, options, mask):
    # "SOAP-Muon" of modded-nanogpt, track 3, 2026.
    soap = scale_by_soap(hyperparams.momentum, hyperparams.b2, every=options.soap_every)
    of_kernels = optax.chain(soap, orthogonalize_directions())

    def waits(params):  # AdamW's part moves at the first step, and decays at it
        return jax.tree.map(lambda part, has_basis: part == "muon" and has_basis, _parts(params), has_bases(params))

    decay = add_decayed_weights(hyperparams.weight_decay, mask, waits)
    return _beside_adamw(of_kernels, decay, learning_rate, hyperparams, options)


def _parts(params):
    """Return the part of each parameter: "adamw" for the head, biases and norms, "muon" for the rest."""

    def of(path, p):
        is_head = any(getattr(key, "key", None) == HEAD for key in path)
        return "adamw" if p.ndim < 2 or is_head else "muon"

    return tree_util.tree_map_with_path(of, params)


def _beside_adamw(of_kernels, decay, learning_rate, hyperparams: Hyperparams, options: OptimizerOptions):
    adam = scale_by_adam(hyperparams.momentum, hyperparams.b2, nesterov=options.nesterov)
    directions = {
        "muon": of_kernels,  # a name in checkpoints
        "adamw": optax.chain(adam, optax.scale(hyperparams.adamw_multiplier)),
    }
    return optax.chain(
        optax.partition(directions, _parts),
        decay,
        optax.scale_by_learning_rate(learning_rate),
    )


def _soap(learning_rate, hyperparams, options, mask):
    return optax.chain(
        scale_by_soap(hyperparams.momentum, hyperparams.b2, every=options.soap_every),
        add_decayed_weights(hyperparams.weight_decay, mask, has_bases),
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
    "soap_muon": _soap_muon,
}
WITH_BASES = ("soap", "soap_muon")  # bases cannot be averaged over devices; the first step only finds them


def create_optimizer(
    name: str, hyperparams: Hyperparams = DEFAULT_HYPERPARAMS, options: OptimizerOptions = DEFAULT_OPTIONS
) -> optax.GradientTransformation:
    """Create the optimizer called `name`, a key of OPTIMIZERS.

    The gradient is clipped to the global norm `clip_norm` first. Weight decay is part of the gradient for SGD, LARS
    and Adam, and beside it for the others; only kernels have it, unless `options` say otherwise.

    Returns:
      A transformation whose state has `hyperparams["learning_rate"]`, zero until set.
    """

    # `inject_hyperparams` takes hyper-parameters one by one.
    def make(*, learning_rate, momentum, b2, weight_decay, clip_norm, bias_multiplier, adamw_multiplier):
        hyperparams = Hyperparams(
            momentum=momentum,
            b2=b2,
            weight_decay=weight_decay,
            clip_norm=clip_norm,
            bias_multiplier=bias_multiplier,
            adamw_multiplier=adamw_multiplier,
        )
        return optax.chain(
            optax.clip_by_global_norm(clip_norm),
            OPTIMIZERS[name](learning_rate, hyperparams, options, _kernels if options.exclude_biases else _all),
            optax.masked(optax.scale(bias_multiplier), _biases),
        )

    values = {field.name: getattr(hyperparams, field.name) for field in dataclasses.fields(hyperparams)}
    return optax.inject_hyperparams(make)(learning_rate=0.0, **values)


def with_hyperparams(opt_state, **values):
    """Return `opt_state` with these hyper-parameters of the next step: learning_rate, b2."""
    hyperparams = {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
    return opt_state._replace(hyperparams={**opt_state.hyperparams, **hyperparams})


def trust_ratios(grads, params, weight_decay: float):
    """Return LAMB's trust ratio of every parameter at the first step: ||p|| / ||Adam's direction + decay * p||.

    You et al. 2020, algorithm 2. The momentum cancels, since the first moments are corrected for their bias.

    Args:
      grads, params: pytrees alike.
      weight_decay: on kernels only.
    Returns:
      A pytree alike of float32 scalars; inf where the gradient is zero, whatever the decay.
    """
    adam = scale_by_adam(b1=0.9, b2=0.999, eps=LAMB_EPSILON)
    lamb = optax.chain(adam, optax.add_decayed_weights(weight_decay, mask=_kernels))
    updates, _ = lamb.update(grads, lamb.init(params), params)

    def ratio(grad, param, update):
        return jnp.where(jnp.any(grad != 0), optax.tree.norm(param) / optax.tree.norm(update), jnp.inf)

    return jax.tree.map(ratio, grads, params, updates)
