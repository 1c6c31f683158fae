"""Rows of arrays on a device, by their numbers."""

import jax
from jax import lax

# The compiler of a TPU v3 has no good gather for wider ones: for 64 rows of 150,528 it plans 48 million cycles
# and 4.7 GB, and 1.3 million for a loop. For rows of 12,288 its gather is the better (LOG.md).
WIDEST_GATHERED = 2**14  # numbers


def take_rows(array: jax.Array, index: jax.Array) -> jax.Array:
    """Rows [M, ...] of an array [n, ...]; all numbers in `index`, int32 [M], are below n."""
    width = array.size // len(array)
    if width <= WIDEST_GATHERED:
        return _gather(array, index)
    return lax.platform_dependent(array, index, tpu=_take_in_turn, default=_gather)


def split_planes(images: jax.Array, num_planes: int) -> tuple[jax.Array, jax.Array]:
    """Stored images [M, H, W, C + planes] -> images [M, H, W, C], and what is to be predicted of them."""
    channels = images.shape[-1] - num_planes
    return images[..., :channels], images[..., channels:]


def _gather(array, index):
    return array.at[index].get(mode="promise_in_bounds")


def _take_in_turn(array, index):
    return lax.map(lambda row: lax.dynamic_index_in_dim(array, row, keepdims=False), index)
