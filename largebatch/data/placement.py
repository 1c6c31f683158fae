"""Placement of a cache's examples on the devices, and the taking of rows of arrays there."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax import lax

from largebatch.data.batching import DataSharding
from largebatch.data.cache import Cache, RowLayout
from largebatch.data.dataset import Dataset
from largebatch.data.sharded_split import ShardedSplit, bytes_on_device, shard_split
from largebatch.data.streaming import Resident, Stream
from largebatch.hosts import memory, replicas
from largebatch.util import iterate_batches, run_ranges

# Originals [n, H, W, C] -> all their views [n, views, H, W, C].
Expand = Callable[[np.ndarray], np.ndarray]
BUFFERS = "training images in two buffers"  # a key of `bytes_per_device`
ORIGINALS_AT_ONCE = 4096  # originals that are read before they are expanded
ORIGINALS_PER_EXPANSION = 64  # originals that a thread expands at once: more would not stay in its cache


@dataclasses.dataclass(frozen=True)
class DeviceData:
    """The training data on the devices of this host, and the validation split, which may be there too.

    Images are rows of uint8 or uint16, as in the cache.
    """

    cache: Cache  # the cache that they were read from
    train: Resident | Stream
    validation: ShardedSplit


def bytes_per_device(
    layout: RowLayout,
    sharding: DataSharding,
    views: int,
    *,
    buffer_rows: int | None = None,
    free_bytes: int | None = None,
) -> dict[str, int]:
    """Return the bytes that `place` needs on the fullest device, by part.

    Args:
      views: views of each original that are kept.
      buffer_rows: originals in each of the two buffers of a stream; None where nothing is streamed.
      free_bytes: free bytes on a device; None asks this host's devices.
    """
    val_bytes = bytes_on_device(layout.counts["val"], sharding.num_devices, layout.row_bytes, free_bytes=free_bytes)
    shapes = train_shapes(layout, sharding, views, buffer_rows)
    sizes = {name: shape.size * shape.dtype.itemsize for name, shape in shapes.items()}
    if buffer_rows is None:
        return {"training images": sizes["images"], "validation images": val_bytes}
    of_rows = 2 * sizes["rows"] + sizes["labels"]  # labels serve both buffers
    return {BUFFERS: 2 * sizes["images"], "their rows and labels": of_rows, "validation images": val_bytes}


def train_shapes(
    layout: RowLayout, sharding: DataSharding, views: int, buffer_rows: int | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the training data that `place` puts on a device; see `bytes_per_device`."""
    num_rows = sharding.max_originals * views if buffer_rows is None else buffer_rows
    labels = jax.ShapeDtypeStruct((sharding.max_originals,), np.int32)
    shapes = {"images": jax.ShapeDtypeStruct((num_rows, int(np.prod(layout.image_shape))), layout.dtype)}
    return shapes | ({} if buffer_rows is None else {"rows": labels}) | {"labels": labels}


def place(
    cache: Cache,
    sharding: DataSharding,
    seed: int,
    expand: Expand | None = None,
    *,
    buffer_rows: int | None = None,
) -> DeviceData:
    """Place this host's rows of the cache on its devices, one by one, so that no second copy is held. Collective.

    Args:
      sharding: the sharding of training examples over devices.
      seed: seed of the sharding; not the run's, so that runs that differ by seed share what is placed.
      expand: function that makes the views that are kept; None keeps the originals.
      buffer_rows: originals in a buffer, where training images are streamed; nothing of them is read yet.
    Raises:
      DamagedCache: what is read is not what was written.
    """
    validation, train = shard_split(cache.split("val"), sharding.num_devices, verify=True), cache.split("train")
    if buffer_rows is not None:
        return DeviceData(cache, Stream(cache, sharding, seed, buffer_rows), validation)
    placed = [
        jax.device_put(_read_device(train, sharding, sharding.originals_of(index, seed), expand), device)
        for index, device in zip(replicas.local_indices(), jax.local_devices(), strict=True)
    ]
    return DeviceData(cache, Resident(replicas.stack(placed)), validation)


def _read_device(train: Dataset, sharding: DataSharding, originals: np.ndarray, expand: Expand | None) -> dict:
    """Read the training set of one device, padded, with a leading axis of 1."""
    count, padding = len(originals), sharding.max_originals - len(originals)
    views = () if expand is None else (sharding.views,)
    images = memory.aligned_empty((sharding.max_originals, *views, *train.image_shape), train.dtype)
    images[count:] = 0
    if expand is None:
        train.fill(originals, images[:count])
    else:
        _fill_expanded(train, originals, images, expand)
    rows = images.reshape(1, -1, np.prod(train.image_shape))
    return {"images": rows, "labels": np.pad(train.labels[originals], (0, padding))[None]}


def _fill_expanded(train: Dataset, originals: np.ndarray, out: np.ndarray, expand: Expand) -> None:
    """Read all views of training originals into `out` [originals or more, views, H, W, C]."""
    buffer = memory.aligned_empty((min(len(originals), ORIGINALS_AT_ONCE), *train.image_shape), train.dtype)
    for part in iterate_batches(len(originals), ORIGINALS_AT_ONCE):
        images, out_of_part = buffer[: part.stop - part.start], out[part]
        train.fill(originals[part], images)

        def fill(begin: int, end: int, images=images, out_of_part=out_of_part) -> None:
            for some in iterate_batches(end - begin, ORIGINALS_PER_EXPANSION):
                chosen = slice(begin + some.start, begin + some.stop)
                out_of_part[chosen] = expand(images[chosen])

        run_ranges(fill, len(images))


# The compiler of a TPU v3 has no good gather for wider rows: for 64 rows of 150,528 it plans 48 million cycles
# and 4.7 GB, and 1.3 million for a loop. For rows of 12,288 its gather is the better (LOG.md).
WIDEST_GATHERED = 2**14  # numbers per row


def take_rows(array: jax.Array, index: jax.Array) -> jax.Array:
    """Take rows [M, ...] of an array [n, ...]; all numbers in `index`, int32 [M], are below n."""
    width = array.size // len(array)
    if width <= WIDEST_GATHERED:
        return _gather(array, index)
    return lax.platform_dependent(array, index, tpu=_take_in_turn, default=_gather)


def _gather(array, index):
    return array.at[index].get(mode="promise_in_bounds")


def _take_in_turn(array, index):
    return lax.map(lambda row: lax.dynamic_index_in_dim(array, row, keepdims=False), index)
