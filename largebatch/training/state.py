"""The training state: whatever must survive a restart is in this one pytree."""

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
    """What a device that takes local steps remembers since the last synchronisation; see local_sgd.py."""

    anchor: Any  # like the parameters: what they were then, the same on every device
    velocity: Any  # like the parameters: the outer momentum
    examples: jax.Array  # float32, that this device has trained on since
    updates: jax.Array  # int32, of all devices since
    drift: jax.Array  # float32, the distance of the replicas from their mean then, as a part of the mean's norm


@struct.dataclass
class TrainState:
    """Replicated over devices; devices that take local steps have one each."""

    step: jax.Array  # int32, updates done; never micro-batches
    seed: jax.Array  # uint32, orders the examples; as data, so that seeds share one compiled program
    params: Any  # pytree of float32
    model_state: Any  # what the network has beside parameters: statistics of batch normalisation, a frozen stem
    ema: Any  # moving average {"params": ..., "model_state": ...}, or None
    opt_state: Any  # of optax
    nonfinite: jax.Array  # int32, the latest updates in a row that were not applied, since they were not finite
    learning_rate_scale: jax.Array  # float32, what rollbacks left of the planned rate
    num_averaged: jax.Array  # int32, updates that the moving averages of `model_state` and `ema` hold
    noise: Noise  # of the gradient
    scale_invariant_steps: jax.Array  # float32, sum of AdaScale's gains; without AdaScale the updates applied
    local: LocalState | None  # None where every update is synchronous

    @property
    def variables(self) -> dict:
        """What the network is applied to."""
        return {"params": self.params, **self.model_state}

    @property
    def ema_variables(self) -> dict:
        """The same, averaged over updates."""
        return {"params": self.ema["params"], **self.ema["model_state"]}


def create_train_state(
    params,
    optimizer: optax.GradientTransformation,
    seed: int,
    model_state=None,
    *,
    ema: bool = False,
    local: bool = False,
) -> TrainState:
    """The state before the first update.

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
    """Number of trained numbers."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def params_sha256(params) -> str:
    """SHA-256 over names, shapes and bytes of all parameters (arrays on this host), to compare runs bitwise."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaf = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()
