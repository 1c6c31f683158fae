"""A split that is only predicted: sharded over the devices, and kept there or read again for every pass."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator

import jax
import numpy as np
from flax import struct

from largebatch.cache.cache import Cache, DamagedCache, RowLayout
from largebatch.hosts import collectives, memory, replicas
from largebatch.util import UserError

log = logging.getLogger("largebatch")

UNKNOWN = -1  # the label of an example without a label, and of a row without an example; neither counts
# A split stays on the devices if it takes at most this share of what is free there before anything is placed.
RESIDENT_SHARE = 1 / 8
BLOCK_BYTES = 64 * 2**20  # bytes of a block's images on a device; two blocks are there at a time

# Reads examples [n] of a split into uint8 [n, bytes of an image].
Read = Callable[[np.ndarray, np.ndarray], None]


@struct.dataclass
class Block:
    """Consecutive rows of every device."""

    images: jax.Array  # uint8 or uint16 [local devices, rows, H * W * C]
    labels: jax.Array  # int32 [local devices, rows]; UNKNOWN where a row holds no example


@dataclasses.dataclass(frozen=True)
class DealtSplit:
    """Examples sharded round-robin: example e is row e // num_devices of device e % num_devices.

    So devices differ by one row at most. Those with one less hold a filler there, as does every device behind
    its last row where the rows are cut into blocks.

    Attributes:
      labels: int32 [examples], in the split's order.
      read: function that reads examples, in any order.
      image_bytes: bytes of one image; dtype: dtype of its pixels.
      num_devices: devices of all hosts, which share the split.
      device_numbers: numbers of this host's devices among them, in the order of `jax.local_devices()`.
      resident: the whole split as one block; None where it is read for every pass.
    """

    labels: np.ndarray
    read: Read
    image_bytes: int
    dtype: np.dtype
    num_devices: int
    device_numbers: list[int]
    resident: Block | None = None

    @property
    def rows(self) -> int:
        """Number of rows of each device."""
        return -(-len(self.labels) // self.num_devices)

    def rows_per_block(self, micro_batch_size: int) -> int:
        """Return the rows of a device in each block: whole micro-batches, so that blocks change no results."""
        if self.resident is not None:
            return self.rows
        return rows_per_block(self.rows, self.image_bytes, micro_batch_size)

    def blocks(self, micro_batch_size: int) -> Iterator[Block]:
        """Yield the split in blocks of one shape, each once it is on the devices. Collective.

        Raises:
          UserError: an image cannot be read, or is not what was written; on every host.
        """
        if self.resident is not None:
            yield self.resident
            return
        size = self.rows_per_block(micro_batch_size)
        for first in range(0, self.rows, size):
            yield collectives.agreed(lambda first=first: self._read_again(first, size))

    def check(self) -> None:
        """Read all rows of this host's devices once, and keep nothing.

        Raises:
          DamagedCache: what is read is not what was written.
        """
        size = max(BLOCK_BYTES // self.image_bytes, 1)
        for first in range(0, self.rows, size):
            for number in sorted(set(self.device_numbers)):
                self._read_rows(number, first, min(size, self.rows - first))

    def placed(self) -> "DealtSplit":
        """Return the same split, resident; raise as `check` does."""
        return dataclasses.replace(self, resident=self._place(0, self.rows))

    def images_of(self, examples: np.ndarray) -> np.ndarray:
        """Read some of the images, on this host: [n, H * W * C].

        Raises:
          UserError: as `blocks`, on this host only.
        """
        out = memory.aligned_empty((len(examples), self.image_bytes), np.uint8)
        with _named_damage():
            self.read(examples, out)
        return out.view(self.dtype)

    def _read_again(self, first: int, size: int) -> Block:
        with _named_damage():
            return self._place(first, size)

    def _place(self, first: int, size: int) -> Block:
        read = {number: self._read_rows(number, first, size) for number in dict.fromkeys(self.device_numbers)}
        devices = zip(self.device_numbers, jax.local_devices(), strict=True)
        return replicas.stack([jax.device_put(read[number], device) for number, device in devices])

    def _read_rows(self, device: int, first: int, size: int) -> Block:
        """Read rows [first, first + size) of a device, on the host, with a leading axis of 1."""
        rows = np.arange(first, first + size)
        examples = rows * self.num_devices + device
        examples = examples[examples < len(self.labels)]
        images = memory.aligned_empty((size, self.image_bytes), np.uint8)
        self.read(examples, images[: len(examples)])
        images[len(examples) :] = 0
        labels = np.full(size, UNKNOWN, np.int32)
        labels[: len(examples)] = self.labels[examples]
        return Block(images.view(self.dtype)[None], labels[None])


@contextlib.contextmanager
def _named_damage():
    """Turn damage that is found in the middle of a run into a line for the user."""
    try:
        yield
    except DamagedCache as damage:
        raise UserError(
            f"damaged cache: {damage}; start again to build it again and go on from the last checkpoint"
        ) from damage


def rows_per_block(rows: int, image_bytes: int, micro_batch_size: int) -> int:
    """Return the rows of a device in a block, where it has `rows` in all that do not stay there."""
    micro_batch_size = min(micro_batch_size, rows)
    wanted = max(BLOCK_BYTES // (image_bytes * micro_batch_size), 1)
    return min(wanted, -(-rows // micro_batch_size)) * micro_batch_size


def stays_on_devices(num_bytes: int, free_bytes: int | None = None) -> bool:
    """Tell whether a split of `num_bytes` on each device is kept there, by the free memory of a device.

    Args:
      free_bytes: free bytes on a device; None asks this host's devices.
    """
    available = memory.available_bytes() if free_bytes is None else free_bytes
    return available is None or num_bytes <= RESIDENT_SHARE * available


def bytes_on_device(num_examples: int, num_devices: int, image_bytes: int, *, free_bytes: int | None = None) -> int:
    """Return the bytes of images that a split needs on a device, by its free memory: all, or two blocks."""
    num_bytes = -(-num_examples // num_devices) * image_bytes
    if stays_on_devices(num_bytes, free_bytes):
        return num_bytes
    return min(num_bytes, 2 * max(BLOCK_BYTES, image_bytes))


def block_shapes(layout: RowLayout, num_devices: int, micro_batch_size: int, free_bytes: int) -> "Block":
    """Return the shapes of the block of the validation split that a device predicts at once."""
    rows = -(-layout.counts["val"] // num_devices)
    if not stays_on_devices(rows * layout.row_bytes, free_bytes):
        rows = rows_per_block(rows, layout.row_bytes, micro_batch_size)
    images = jax.ShapeDtypeStruct((rows, int(np.prod(layout.image_shape))), layout.dtype)
    return Block(images, jax.ShapeDtypeStruct((rows,), np.int32))


def all_stay_on_devices(num_examples: int, num_devices: int, image_bytes: int) -> bool:
    """Tell whether a split is kept on the devices: host 0's answer, on every host. Collective."""
    here = stays_on_devices(-(-num_examples // num_devices) * image_bytes)
    return bool(collectives.from_primary(np.int32(here)))


def place_validation(cache: Cache, num_devices: int, device_numbers: list[int]) -> DealtSplit:
    """Place the validation split of a cache on the devices, or check it, to be read for every validation.

    Args:
      num_devices, device_numbers: see `DealtSplit`.
    Raises:
      DamagedCache: what is read is not what was written.
    """

    def read(examples: np.ndarray, out: np.ndarray) -> None:
        cache.read_images("val", examples, out)

    image_bytes, count = cache.layout.row_bytes, cache.count("val")
    stays = all_stay_on_devices(count, num_devices, image_bytes)  # before a host may find damage
    split = DealtSplit(
        labels=cache.small_array("val_labels"),
        read=read,
        image_bytes=image_bytes,
        dtype=cache.image_dtype,
        num_devices=num_devices,
        device_numbers=device_numbers,
    )
    if stays:
        return split.placed()
    split.check()
    num_bytes = split.rows * image_bytes
    log.info("validation images are read for every validation: %.1f MB a device", num_bytes / 1e6)
    return split


def split_of_images(images: np.ndarray, labels: np.ndarray) -> DealtSplit:
    """Shard images [examples, H, W, C] in this host's memory, the same on every host, over all devices.

    A label is UNKNOWN where there is none.
    """
    flat = np.ascontiguousarray(images).reshape(len(images), -1).view(np.uint8)

    def read(examples: np.ndarray, out: np.ndarray) -> None:
        np.take(flat, examples, axis=0, out=out, mode="clip")  # another mode takes a copy

    num_devices = jax.device_count()
    split = DealtSplit(
        labels=labels,
        read=read,
        image_bytes=flat.shape[1],
        dtype=images.dtype,
        num_devices=num_devices,
        device_numbers=replicas.local_indices(),
    )
    return split.placed() if all_stay_on_devices(len(images), num_devices, flat.shape[1]) else split
