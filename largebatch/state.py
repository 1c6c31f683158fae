"""The training state: whatever must survive a restart is in this one pytree."""

import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class TrainState(NamedTuple):
    """Replicated over devices.

    `step` (int32) counts updates, never micro-batches; `seed` (uint32) orders the examples, and is data
    so that runs that differ by seed share one compiled program. `nonfinite` (int32) counts the latest
    updates in a row that were not applied since their loss or gradient was not finite, and
    `learning_rate_scale` (float32) is what rollbacks left of the planned rate.
    """

    step: jax.Array
    seed: jax.Array
    params: Any
    opt_state: Any
    nonfinite: jax.Array
    learning_rate_scale: jax.Array


def create_state(params, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first update."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, jnp.uint32(seed), params, optimizer.init(params), zero, jnp.float32(1))


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
