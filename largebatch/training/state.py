"""The training state, one pytree of all that must survive a restart."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from largebatch.optim.noise_scale import Noise


@struct.dataclass
class LocalState:
    """The state that a device with local steps has since the last synchronisation; see local_sgd.py."""

    anchor: Any  # like the parameters: their values then, the same on every device
    velocity: Any  # like the parameters: the outer momentum
    examples: jax.Array  # float32, examples that this device has trained on since
    steps: jax.Array  # int32, steps of all devices since
    drift: jax.Array  # float32, the distance of the replicas from their mean then, as a part of the mean's norm


@struct.dataclass
class TrainState:
    """The state of training, replicated over devices; devices that take local steps have one each."""

    step: jax.Array  # int32, steps done; never micro-batches
    seed: jax.Array  # uint32, orders the examples; as data, so that seeds share one compiled program
    params: Any  # pytree of float32
    model_state: Any  # untrained variables of the network: statistics of batch normalisation, a frozen stem
    ema: Any  # moving average {"params": ..., "model_state": ...}, or None
    opt_state: Any  # state of the optax transformation
    nonfinite: jax.Array  # int32, the latest consecutive steps that were not applied, since they were not finite
    learning_rate_scale: jax.Array  # float32, factor on the learning rate after rollbacks
    num_averaged: jax.Array  # int32, steps that the moving averages of `model_state` and `ema` hold
    noise: Noise  # noise of the gradient
    scale_invariant_steps: jax.Array  # float32, sum of AdaScale's gains; without AdaScale the steps applied
    local: LocalState | None  # None where every step is synchronous

    @property
    def variables(self) -> dict:
        """The variables that the network is applied to."""
        return {"params": self.params, **self.model_state}


def create_train_state(
    params,
    optimizer: optax.GradientTransformation,
    seed: int,
    model_state=None,
    *,
    ema: bool = False,
    local: bool = False,
) -> TrainState:
    """Create the state before the first step.

    Args:
      ema: whether to keep a moving average of parameters and model state.
      local: whether devices will take local steps.
    """
    count, number, model_state = jnp.zeros((), jnp.int32), jnp.zeros(()), model_state or {}
    velocity = jax.tree.map(jnp.zeros_like, params)
    return TrainState(
        step=count,
        seed=jnp.uint32(seed),
        params=params,
        model_state=model_state,
        ema={"params": params, "model_state": model_state} if ema else None,
        opt_state=optimizer.init(params),
        nonfinite=count,
        learning_rate_scale=jnp.float32(1),
        num_averaged=count,
        noise=Noise(number, number, count),
        scale_invariant_steps=number,
        local=LocalState(params, velocity, number, count, number) if local else None,
    )


def count_params(params) -> int:
    """Return the number of trainable parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def params_sha256(params) -> str:
    """Hash names, shapes and bytes of all parameters (arrays on this host) to compare runs bitwise: SHA-256."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaf = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()
