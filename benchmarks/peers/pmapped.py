"""What the two JAX peers share: their options, how a batch is split, and replicas."""

from dataclasses import dataclass

import jax
import numpy as np

# micro_batch_size is per device, 0 the whole share; devices 0 is all.
DEFAULTS = {"batch_size": 512, "micro_batch_size": 0, "devices": 0, "dtype": "float32"}


@dataclass(frozen=True)
class BatchSplit:
    """A batch over some devices, in micro-batches on each."""

    devices: list[jax.Device]
    num_micro_batches: int  # of a device
    micro_batch_size: int


def split_batch(options: dict) -> BatchSplit:
    """How the batch of `options`, which are those of DEFAULTS, is split.

    Raises:
      ValueError: the batch is not a whole number of micro-batches.
    """
    devices = jax.local_devices()[: options["devices"] or None]
    size = options["micro_batch_size"] or options["batch_size"] // len(devices)
    count = options["batch_size"] // (len(devices) * max(size, 1))
    if count * size * len(devices) != options["batch_size"] or not size:
        raise ValueError(
            f"{options['batch_size']} images are not whole micro-batches of {size} on {len(devices)} devices"
        )
    return BatchSplit(devices, count, size)


def replicate(tree, devices: list[jax.Device]):
    """`tree` with a leading device axis."""
    stacked = jax.tree.map(lambda x: np.stack([np.asarray(x)] * len(devices)), tree)
    return jax.pmap(lambda x: x, devices=devices)(stacked)


def first_replica(x: jax.Array) -> np.ndarray:
    """What the first device holds."""
    return np.asarray(x.addressable_shards[0].data)[0]
