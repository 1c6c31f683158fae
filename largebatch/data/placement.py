"""Puts a cache's examples on the devices."""

import dataclasses

import jax
import numpy as np
from flax import struct

from largebatch.data.batching import DataSharding
from largebatch.data.cache import Cache
from largebatch.hosts import memory, replicas


@dataclasses.dataclass(frozen=True)
class DeviceData:
    """What is on the devices of this host, and the labels and ids of the validation split."""

    train: dict  # "images" uint8 [local devices, examples, H * W * C], "labels" int32 [local devices, originals]
    val_images: jax.Array  # uint8 [local devices, examples, H * W * C]
    val_labels: np.ndarray  # int32 [val examples], in the split's order
    val_ids: np.ndarray  # str [val examples]


def bytes_per_device(cache: Cache, sharding: DataSharding) -> dict[str, int]:
    """Bytes of images that `place` needs on the fullest device, by part."""
    image = int(np.prod(cache.image_shape))
    return {
        "training images": sharding.max_originals * cache.num_views * image,
        "validation images": -(-cache.count("val") // sharding.num_devices) * image,
    }


def rows_of_device(num_examples: int, num_devices: int, device: int) -> np.ndarray:
    """Rows of a split that `device` holds: dealt round-robin, so devices differ by one at most.

    Where a device has one less, row 0 fills its place, so that all devices hold equally many;
    `evaluation.in_split_order` drops the fillers.
    """
    rows = np.arange(device, num_examples, num_devices)
    return np.pad(rows, (0, -(-num_examples // num_devices) - len(rows)))


def place(cache: Cache, sharding: DataSharding, seed: int, *, packed: bool = False) -> DeviceData:
    """Reads this host's rows of the cache, device by device, so that no second copy is held.

    Args:
      sharding: the deal of training examples to devices.
      seed: of the deal. Not the run's, so that runs that differ by seed share what is placed.
      packed: all of the set on each device, as if it were the only one.
    Raises:
      DamagedCache: what is read is not what was written.
    """
    local_devices = jax.local_devices()
    if packed:
        # CPU devices share one copy, which `aligned_empty` makes possible.
        rows = _DeviceRows.read(cache, sharding, seed, device=0)
        rows_by_device = [rows] * len(local_devices)
    else:
        rows_by_device = (_DeviceRows.read(cache, sharding, seed, index) for index in replicas.local_indices())
    placed = [jax.device_put(rows, device) for rows, device in zip(rows_by_device, local_devices, strict=True)]
    return DeviceData(
        train=replicas.stack([rows.train for rows in placed]),
        val_images=replicas.stack([rows.val_images for rows in placed]),
        val_labels=cache.small_array("val_labels"),
        val_ids=cache.small_array("val_ids"),
    )


@struct.dataclass
class _DeviceRows:
    """What one device holds, with a leading axis of 1."""

    train: dict
    val_images: np.ndarray

    @classmethod
    def read(cls, cache: Cache, sharding: DataSharding, seed: int, device: int) -> "_DeviceRows":
        originals = sharding.originals_of(device, seed)
        padding = sharding.max_originals - len(originals)
        labels = cache.small_array("train_labels")[originals]
        train = {
            "images": _read_images(cache, "train", originals, padding, cache.num_views),
            "labels": np.pad(labels, (0, padding))[None],
        }
        val_rows = rows_of_device(cache.count("val"), sharding.num_devices, device)
        return cls(train, _read_images(cache, "val", val_rows, padding=0, views=1))


def _read_images(cache: Cache, split: str, examples: np.ndarray, padding: int, views: int) -> np.ndarray:
    """uint8 [1, (examples + padding) * views, H * W * C]; padding is zeros."""
    image = int(np.prod(cache.image_shape))
    out = memory.aligned_empty((len(examples) + padding, views * image), np.uint8)
    cache.read_images(split, examples, out[: len(examples)])
    out[len(examples) :] = 0
    return out.reshape(1, -1, image)


def read_originals(cache: Cache, rows: np.ndarray) -> np.ndarray:
    """Training images as they were read, without their other views: uint8 [rows, H, W, C]."""
    images = np.empty((len(rows), cache.num_views * int(np.prod(cache.image_shape))), np.uint8)
    cache.read_images("train", rows, images)
    return images.reshape(len(rows), cache.num_views, *cache.image_shape)[:, 0]
