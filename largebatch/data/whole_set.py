"""Training sets for batches that are the whole set: normalised once, in the order in which they are read.

If every update takes every example, nothing has to be drawn. So each device keeps its examples as the network
takes them, normalised and in its dtype, in the micro-batches that an update reads. Otherwise the gather of rows,
their conversion and their transposition are 9 to 20% of an update on a TPU, by its compiler's estimate.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from largebatch.data import batching
from largebatch.data.batching import DataSharding, Grouping
from largebatch.hosts.replicas import AXIS, pmap


def normalise_whole_set(
    rows: dict, sharding: DataSharding, grouping: Grouping, normalise: Callable, seed: int
) -> dict:
    """The data of this host's devices, which replace the rows that they are made of.

    They lie in the micro-batches of an epoch, so that each is as good a sample of the set as a batch: it has an
    original at most once or twice, in views that were drawn. A micro-batch that is read as a whole needs no other
    layout; slices at any row would have to be shifted along a TPU's lanes.

    Args:
      rows: "images" uint8 or uint16 [local devices, examples, H * W * C], and "labels" int32 [local devices,
        originals].
      grouping: of what is read in an update.
      normalise: (rows [M, H * W * C]) -> images [M, H, W, C], as the network takes them.
      seed: of the order.
    Returns:
      "images" [local devices, micro-batches, M, H, W, C], "labels" int32 [local devices, micro-batches, M].
    """
    count = num_micro_batches(sharding, grouping)

    def normalise_share(share, seed):
        epoch = batching.device_batch(sharding, lax.axis_index(AXIS), 0, 0, sharding.num_examples)

        def convert(index):
            examples = batching.micro_batch(sharding, epoch, index, grouping, seed).examples
            return normalise(share["images"][examples]), share["labels"][examples // sharding.views]

        images, labels = lax.map(convert, jnp.arange(count))
        return {"images": images, "labels": labels}

    return pmap(normalise_share, in_axes=(0, None))(rows, np.uint32(seed))


def num_micro_batches(sharding: DataSharding, grouping: Grouping) -> int:
    """That the device with the most examples keeps."""
    return grouping.num_micro_batches(sharding.max_originals * sharding.views)


def read(share: dict, rows: jax.Array, visit_keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Images and labels of any rows of a device's share; see `step.MicroBatchReader.read`."""
    images, labels = share["images"], share["labels"]
    return images.reshape(-1, *images.shape[2:])[rows], labels.ravel()[rows]
