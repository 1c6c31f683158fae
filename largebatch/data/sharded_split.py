"""A data set that is only predicted: sharded over the devices, and kept there or read again for every pass."""

import dataclasses
import logging
from collections.abc import Iterator

import jax
import numpy as np
from flax import struct

from largebatch.data.cache import DamagedCache, RowLayout
from largebatch.data.dataset import UNKNOWN, Dataset
from largebatch.hosts import collectives, memory, replicas
from largebatch.util import UserError

log = logging.getLogger("largebatch")

# A split stays on the devices if it takes at most this share of what is free there before anything is placed.
RESIDENT_SHARE = 1 / 8
BLOCK_BYTES = 64 * 2**20  # bytes of a block's images on a device; two blocks are there at a time


@struct.dataclass
class Block:
    """Consecutive rows of every device."""

    images: jax.Array  # uint8 or uint16 [local devices, rows, H * W * C]
    labels: jax.Array  # int32 [local devices, rows]; UNKNOWN where a row holds no example


@dataclasses.dataclass(frozen=True)
class ShardedSplit:
    """Examples sharded round-robin: example e is row e // num_devices of device e % num_devices.

    So devices differ by one row at most. Those with one less hold a filler there, as does every device behind
    its last row where the rows are cut into blocks.

    Attributes:
      dataset: the examples, the same on every host.
      num_devices: devices of all hosts, which share the split.
      resident: the whole split as one block; None where it is read for every pass.
    """

    dataset: Dataset
    num_devices: int
    resident: Block | None = None

    @property
    def rows(self) -> int:
        """Number of rows of each device."""
        return -(-len(self.dataset.labels) // self.num_devices)

    @property
    def image_bytes(self) -> int:
        """Bytes of one image."""
        return int(np.prod(self.dataset.image_shape)) * self.dataset.dtype.itemsize

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
            yield collectives.agreed(lambda first=first: self._place(first, size))

    def check(self) -> None:
        """Read all rows of this host's devices once, and keep nothing.

        Raises:
          DamagedCache: what is read is not what was written.
        """
        size = max(BLOCK_BYTES // self.image_bytes, 1)
        for first in range(0, self.rows, size):
            for device in replicas.local_indices():
                self._read_rows(device, first, min(size, self.rows - first))

    def placed(self) -> "ShardedSplit":
        """Return the same split, resident; raise as `check` does."""
        return dataclasses.replace(self, resident=self._place(0, self.rows))

    def _place(self, first: int, size: int) -> Block:
        devices = zip(replicas.local_indices(), jax.local_devices(), strict=True)
        return replicas.stack(
            [jax.device_put(self._read_rows(index, first, size), device) for index, device in devices]
        )

    def _read_rows(self, device: int, first: int, size: int) -> Block:
        """Read rows [first, first + size) of a device, on the host, with a leading axis of 1."""
        examples = np.arange(first, first + size) * self.num_devices + device
        examples = examples[examples < len(self.dataset.labels)]
        images = memory.aligned_empty((size, *self.dataset.image_shape), self.dataset.dtype)
        self.dataset.fill(examples, images[: len(examples)])
        images[len(examples) :] = 0
        labels = np.full(size, UNKNOWN, np.int32)
        labels[: len(examples)] = self.dataset.labels[examples]
        return Block(images.reshape(1, size, -1), labels[None])


def shard_split(dataset: Dataset, num_devices: int, *, verify: bool = False) -> ShardedSplit:
    """Shard a data set, the same on every host, over all devices; place it there if it is small. Collective.

    Args:
      num_devices: devices of all hosts.
      verify: whether to read all of it once where it does not stay on the devices, to find damage early.
    Raises:
      DamagedCache: what is read is not what was written.
      UserError: an image cannot be read.
    """
    split = ShardedSplit(dataset, num_devices)
    num_bytes = split.rows * split.image_bytes
    # Host 0's answer, for free memory may differ; asked before a host may find damage.
    if collectives.from_primary(np.int32(stays_on_devices(num_bytes))):
        split = split.placed()
    elif verify:
        split.check()
        log.info("%s is read anew for every pass: %.1f MB a device", dataset.description, num_bytes / 1e6)
    return dataclasses.replace(split, dataset=naming_damage(dataset))


def naming_damage(dataset: Dataset) -> Dataset:
    """Return a data set whose `fill` raises UserError for damage that is found in the middle of a run."""

    def fill(examples: np.ndarray, out: np.ndarray, num_threads: int | None = None) -> None:
        try:
            dataset.fill(examples, out, num_threads)
        except DamagedCache as damage:
            raise UserError(
                f"damaged cache: {damage}; start again to build it again and go on from the last checkpoint"
            ) from damage

    return dataclasses.replace(dataset, fill=fill)


def rows_per_block(rows: int, image_bytes: int, micro_batch_size: int) -> int:
    """Return the rows of a device in a block, where it has `rows` in all that do not stay there."""
    micro_batch_size = min(micro_batch_size, rows)
    wanted = max(BLOCK_BYTES // (image_bytes * micro_batch_size), 1)
    return min(wanted, -(-rows // micro_batch_size)) * micro_batch_size


def stays_on_devices(num_bytes: int, free_bytes: int | None = None) -> bool:
    """Return True if a split of `num_bytes` on each device is kept there.

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


def block_shapes(layout: RowLayout, num_devices: int, micro_batch_size: int, free_bytes: int) -> Block:
    """Return the shapes of the block of the validation split that a device predicts at once."""
    rows = -(-layout.counts["val"] // num_devices)
    if not stays_on_devices(rows * layout.row_bytes, free_bytes):
        rows = rows_per_block(rows, layout.row_bytes, micro_batch_size)
    images = jax.ShapeDtypeStruct((rows, int(np.prod(layout.image_shape))), layout.dtype)
    return Block(images, jax.ShapeDtypeStruct((rows,), np.int32))
