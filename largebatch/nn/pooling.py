"""Max-pooling as maxima of slices."""

import jax.numpy as jnp
from jax import lax


def max_pool(x):
    """The largest of each 2 x 2 pixels: [N, H, W, C] -> [N, H // 2, W // 2, C].

    An odd row or column is left out; a single one stays. `flax.linen.max_pool` gives the same, with a gradient that
    is four to five times slower on CPUs (LOG.md).
    """
    return _halve(_halve(x, axis=1), axis=2)


def _halve(x, axis: int):
    even_size = x.shape[axis] // 2 * 2
    if not even_size:
        return x
    return jnp.maximum(*(lax.slice_in_dim(x, start, even_size, 2, axis) for start in (0, 1)))
