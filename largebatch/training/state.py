"""The training state: whatever must survive a restart is in this one pytree."""

import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from largebatch.optim.noise_scale import Noise


class LocalState(NamedTuple):
    """What a device that takes local steps remembers since the last synchronisation; see local_sgd.py.

    `anchor` are the parameters then, the same on every device, and `velocity` is the outer momentum. `examples`
    (float32) is what this device has trained on since, in `updates` (int32) of all devices. `drift` (float32) is
    the replicas' distance from their mean then.
    """

    anchor: Any
    velocity: Any
    examples: jax.Array
    updates: jax.Array
    drift: jax.Array


class TrainState(NamedTuple):
    """Replicated over devices; devices that take local steps have one each.

    `model_state` holds what the network has beside parameters: smoothed statistics of batch normalisation, and a
    frozen stem. `ema` is a moving average of both, {"params": ..., "model_state": ...}, or None.

    `step` (int32) counts updates, never micro-batches; `seed` (uint32) orders the examples, and is data
    so that runs that differ by seed share one compiled program. `nonfinite` (int32) counts the latest
    updates in a row that were not applied since their loss or gradient was not finite, and
    `learning_rate_scale` (float32) is what rollbacks left of the planned rate. `averaged` (int32) counts the
    updates that the moving averages hold. `noise` is the gradient's; `progress` (float32) counts AdaScale's
    scale-invariant steps; `local` is None where every update is synchronous.
    """

    step: jax.Array
    seed: jax.Array
    params: Any
    model_state: Any
    ema: Any
    opt_state: Any
    nonfinite: jax.Array
    learning_rate_scale: jax.Array
    averaged: jax.Array
    noise: Noise
    progress: jax.Array
    local: LocalState | None

    @property
    def variables(self) -> dict:
        """What the network is applied to."""
        return {"params": self.params, **self.model_state}

    @property
    def ema_variables(self) -> dict:
        """The same, averaged over updates."""
        return {"params": self.ema["params"], **self.ema["model_state"]}


def create_state(
    params,
    optimizer: optax.GradientTransformation,
    seed: int,
    model_state=None,
    *,
    ema: bool = False,
    local: bool = False,
) -> TrainState:
    """The state before the first update; `ema`: keeps a moving average; `local`: devices will take local steps."""
    count, number, model_state = jnp.zeros((), jnp.int32), jnp.zeros(()), model_state or {}
    still = jax.tree.map(jnp.zeros_like, params)
    return TrainState(
        step=count,
        seed=jnp.uint32(seed),
        params=params,
        model_state=model_state,
        ema={"params": params, "model_state": model_state} if ema else None,
        opt_state=optimizer.init(params),
        nonfinite=count,
        learning_rate_scale=jnp.float32(1),
        averaged=count,
        noise=Noise(number, number, count),
        progress=number,
        local=LocalState(params, still, number, count, number) if local else None,
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
