"""Placement of a cache's examples on the devices, and the taking of rows of arrays there."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax import lax

from largebatch.cache.cache import Cache, RowLayout
from largebatch.data.batching import DataSharding
from largebatch.data.streaming import Resident, Stream
from largebatch.data.validation import DealtSplit, bytes_on_device, place_validation
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
    validation: DealtSplit
    val_ids: np.ndarray  # str [val examples], in the split's order


def originals_of_hosts(sharding: DataSharding, hosts: list[int], seed: int) -> np.ndarray:
    """Return the training originals that `place` reads on some hosts, ascending."""
    devices = [device for host in hosts for device in replicas.indices_of(host)]
    return np.sort(np.concatenate([sharding.originals_of(device, seed) for device in devices]))


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
    row_bytes, num_val = layout.row_bytes, layout.counts["val"]
    val_bytes = bytes_on_device(num_val, sharding.num_devices, row_bytes, free_bytes=free_bytes)
    if buffer_rows is None:
        num_bytes = sharding.max_originals * views * row_bytes
        return {"training images": num_bytes, "validation images": val_bytes}
    return {
        BUFFERS: 2 * buffer_rows * row_bytes,
        "their rows and labels": 3 * 4 * sharding.max_originals,  # two int32 arrays of rows, one of labels
        "validation images": val_bytes,
    }


def train_shapes(
    layout: RowLayout, sharding: DataSharding, views: int, buffer_rows: int | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the training data that `place` puts on a device; see `bytes_per_device`."""
    labels = jax.ShapeDtypeStruct((sharding.max_originals,), np.int32)
    pixels = int(np.prod(layout.image_shape))
    if buffer_rows is not None:
        images = jax.ShapeDtypeStruct((buffer_rows, pixels), layout.dtype)
        return {"images": images, "rows": labels, "labels": labels}
    images = jax.ShapeDtypeStruct((sharding.max_originals * views, pixels), layout.dtype)
    return {"images": images, "labels": labels}


def place(
    cache: Cache,
    sharding: DataSharding,
    seed: int,
    expand: Expand | None = None,
    *,
    buffer_rows: int | None = None,
) -> DeviceData:
    """Place this host's rows of the cache on its devices, one by one, so that no second copy is held.

    Args:
      sharding: the sharding of training examples over devices.
      seed: seed of the sharding; not the run's, so that runs that differ by seed share what is placed.
      expand: function that makes the views that are kept; None keeps the originals.
      buffer_rows: originals in a buffer, where training images are streamed; nothing of them is read yet.
    Raises:
      DamagedCache: what is read is not what was written.
    """
    local_devices = jax.local_devices()
    device_numbers = replicas.local_indices()
    validation = place_validation(cache, sharding.num_devices, device_numbers)
    val_ids = cache.small_array("val_ids")
    if buffer_rows is not None:
        return DeviceData(cache, Stream(cache, sharding, seed, buffer_rows), validation, val_ids)
    rows_by_device = (_read_train(cache, sharding, seed, index, expand) for index in device_numbers)
    placed = [jax.device_put(rows, device) for rows, device in zip(rows_by_device, local_devices, strict=True)]
    return DeviceData(cache, Resident(replicas.stack(placed)), validation, val_ids)


def _read_train(cache: Cache, sharding: DataSharding, seed: int, device: int, expand: Expand | None) -> dict:
    """Read the training set of one device, with a leading axis of 1."""
    originals = sharding.originals_of(device, seed)
    padding = sharding.max_originals - len(originals)
    labels = cache.small_array("train_labels")[originals]
    if expand is None:
        images = cache.read_rows("train", originals, padding)
    else:
        images = _read_expanded(cache, originals, padding, expand)
    return {"images": images[None], "labels": np.pad(labels, (0, padding))[None]}


def _read_expanded(cache: Cache, originals: np.ndarray, padding: int, expand: Expand) -> np.ndarray:
    """Read all views of training originals: [(originals + padding) * views, H * W * C]; padding is zeros."""
    views = expand(np.zeros((1, *cache.image_shape), cache.image_dtype)).shape[1]
    shape = (len(originals) + padding, views, *cache.image_shape)
    out = memory.aligned_empty(shape, cache.image_dtype)
    for part in iterate_batches(len(originals), ORIGINALS_AT_ONCE):
        images = cache.read_rows("train", originals[part]).reshape(-1, *cache.image_shape)
        out_of_part = out[part]

        def fill(begin: int, end: int, images=images, out_of_part=out_of_part) -> None:
            for some in iterate_batches(end - begin, ORIGINALS_PER_EXPANSION):
                chosen = slice(begin + some.start, begin + some.stop)
                out_of_part[chosen] = expand(images[chosen])

        run_ranges(fill, len(images))
    out[len(originals) :] = 0
    return out.reshape(len(out) * views, -1)


# The compiler of a TPU v3 has no good gather for wider rows: for 64 rows of 150,528 it plans 48 million cycles
# and 4.7 GB, and 1.3 million for a loop. For rows of 12,288 its gather is the better (LOG.md).
WIDEST_GATHERED = 2**14  # numbers per row


def take_rows(array: jax.Array, index: jax.Array) -> jax.Array:
    """Take rows [M, ...] of an array [n, ...]; all numbers in `index`, int32 [M], are below n."""
    width = array.size // len(array)
    if width <= WIDEST_GATHERED:
        return _gather(array, index)
    return lax.platform_dependent(array, index, tpu=_take_in_turn, default=_gather)


def split_planes(images: jax.Array, num_planes: int) -> tuple[jax.Array, jax.Array]:
    """Split stored images [M, H, W, C + planes] into images [M, H, W, C] and their dense targets."""
    channels = images.shape[-1] - num_planes
    return images[..., :channels], images[..., channels:]


def _gather(array, index):
    return array.at[index].get(mode="promise_in_bounds")


def _take_in_turn(array, index):
    return lax.map(lambda row: lax.dynamic_index_in_dim(array, row, keepdims=False), index)
