"""What the two JAX peers share: how a batch is split, and replicas."""

import jax
import numpy as np

DEFAULTS = {"batch_size": 512, "micro_batch_size": 0, "devices": 0, "dtype": "float32"}


def split(options: dict) -> tuple[list[jax.Device], int, int]:
    """Devices (0: all), micro-batches per device and their size (0: the whole share).

    Raises:
      ValueError: the batch is not a whole number of them.
    """
    devices = jax.local_devices()[: options["devices"] or None]
    size = options["micro_batch_size"] or options["batch_size"] // len(devices)
    count = options["batch_size"] // (len(devices) * max(size, 1))
    if count * size * len(devices) != options["batch_size"] or not size:
        raise ValueError(
            f"{options['batch_size']} images are not whole micro-batches of {size} on {len(devices)} devices"
        )
    return devices, count, size


def replicate(tree, devices: list[jax.Device]):
    """`tree` with a leading device axis."""
    stacked = jax.tree.map(lambda x: np.stack([np.asarray(x)] * len(devices)), tree)
    return jax.pmap(lambda x: x, devices=devices)(stacked)


def replica(x: jax.Array) -> np.ndarray:
    """What the first device holds."""
    return np.asarray(x.addressable_shards[0].data)[0]
