"""Training sets that do not fit on the devices: the images of the next steps are read while others run.

Batches take the positions of a run one after the other, over epochs too; see `batching`. So the steps of any
stretch of a run are one long batch, whose examples follow from (seed, first position, last position). Of a *chunk*,
the longest stretch of steps that fits, every device has in its *buffer* each original that it visits there, once,
and in "rows" where it lies. While the steps of one chunk run, a thread reads and verifies the next one.

A chunk is a range of positions: it serves any steps that lie in it, however calls, batch sizes or a resumed run
cut it. Other steps are read anew.
"""

import bisect
import concurrent.futures
import dataclasses
import functools
import math
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import ClassVar, NamedTuple

import jax
import numpy as np

from largebatch.data import batching
from largebatch.data.batching import DataSharding, DeviceBatch, Grouping
from largebatch.data.cache import Cache, DamagedCache, discard_cache
from largebatch.hosts import collectives, memory, replicas
from largebatch.util import UserError

# Bytes of images in each of a device's two buffers, unless the examples of one step need more.
BUFFER_BYTES = 2**28
PLANNED = Grouping(4096, 4096)  # visits planned at once; a fixed number, so that the order is compiled once
READING_THREADS = max(1, (os.cpu_count() or 1) // 4)  # on a CPU, training has the others


def buffer_rows(sharding: DataSharding, row_bytes: int, batch_size: int) -> int:
    """Return the number of originals in a buffer: those in BUFFER_BYTES, at least one step's, at most all.

    Args:
      row_bytes: bytes of one original.
      batch_size: size of the largest batch, over all devices.
    """
    of_one_step = sharding.share_bounds(min(batch_size, sharding.num_examples))[1]
    return min(max(BUFFER_BYTES // row_bytes, of_one_step), sharding.max_originals)


@dataclasses.dataclass(frozen=True)
class Upcoming:
    """The steps that training is about to take."""

    seed: int  # seed of the order of examples
    first: int  # number of the next step
    end: int  # number after the last step that is planned
    examples_before: Callable[[int], int]  # examples over all devices before a step, since the start of the run

    @property
    def begin(self) -> int:
        """Examples before the first step."""
        return self.examples_before(self.first)


class LoadedSteps(NamedTuple):
    """The data for the next steps of one call, and the number of steps that they serve, at least one."""

    arrays: dict
    num_steps: int


@dataclasses.dataclass(frozen=True)
class Resident:
    """Training data that stay on the devices, and serve all steps."""

    # "images" uint8 [local devices, originals or examples, H * W * C], "labels" int32 [local devices, originals]
    arrays: dict
    is_sound: ClassVar = True

    def for_steps(self, upcoming: Upcoming, wanted: int) -> LoadedSteps:
        """Return the data for the next steps, `wanted` at most."""
        return LoadedSteps(self.arrays, wanted)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A stretch of a run, and the data that are being read for it."""

    seed: int
    begin: int  # examples before it, since the start of the run
    end: int
    arrays: Future

    def steps_in(self, upcoming: Upcoming) -> int:
        """Count the next steps that the chunk serves."""
        if upcoming.seed != self.seed or upcoming.begin < self.begin:
            return 0
        steps = range(upcoming.first + 1, upcoming.end + 1)
        return bisect.bisect_right(steps, self.end, key=upcoming.examples_before)


class Stream:
    """Training data that are read from the cache as steps need them.

    All hosts call it together. The steps of a chunk follow from the shares of all devices: all hosts compute the
    same chunks without communication.

    Args:
      seed: seed of the sharding, as for `placement.place`.
      num_rows: originals in a buffer; see `buffer_rows`.
    """

    def __init__(self, cache: Cache, sharding: DataSharding, seed: int, num_rows: int):
        self._cache, self._sharding, self._num_rows = cache, sharding, num_rows
        self._train = cache.split("train")
        self._devices = dict(zip(replicas.local_indices(), jax.local_devices(), strict=True))
        self._originals = {index: sharding.originals_of(index, seed) for index in self._devices}
        self._labels = replicas.stack([self._place_labels(index) for index in self._devices])
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "stream")
        nothing = {index: np.empty(0, np.int64) for index in self._devices}
        self.arrays = self._read(nothing)  # data of the chunk in use, whose shapes programs are compiled for
        self.is_sound = True  # False once damage was found and its cache removed
        self._chunk: _Chunk | None = None
        self._next: _Chunk | None = None

    def for_steps(self, upcoming: Upcoming, wanted: int) -> LoadedSteps:
        """Return the data for the next steps: `wanted`, or as many as the buffer holds. Collective.

        The data of the steps after them are then being read.

        Raises:
          UserError: on every host, if one of them read other bytes than were written; no step used them. The
            damaged cache is removed.
        """
        if self._chunk is None or not self._chunk.steps_in(upcoming):
            self._advance(upcoming)
        num_steps = self._chunk.steps_in(upcoming)
        following = dataclasses.replace(upcoming, first=upcoming.first + num_steps)
        is_planned = following.first < following.end
        if is_planned and (self._next is None or not self._next.steps_in(following)):
            self._next = self._start_reading(following)
        return LoadedSteps(self.arrays, min(wanted, num_steps))

    def _advance(self, upcoming: Upcoming) -> None:
        """Switch to the chunk that contains the next step; wait until it is there on all hosts."""
        chunk, self._chunk, self._next = self._next, None, None
        self.arrays = None  # its memory is needed
        if chunk is None or not chunk.steps_in(upcoming):
            chunk = self._start_reading(upcoming)
        arrays = error = None
        try:
            arrays = chunk.arrays.result()
        except DamagedCache as damage:
            error = damage
        damages = [text for text in collectives.gather_text(str(error or "")) if text]
        if damages:
            self.is_sound = False
            collectives.agreed(lambda: discard_cache(self._cache, error), error is not None)
            raise UserError(
                f"augment.cache_dir: {damages[0]}; no step was made with it: "
                "start again to build the cache anew and go on from the last checkpoint"
            ) from error
        self._chunk, self.arrays = chunk, arrays

    def _start_reading(self, upcoming: Upcoming) -> _Chunk:
        """Plan the next chunk here, before devices are busy, and read it in the background."""
        begin, end = upcoming.begin, self._end_of_chunk(upcoming)
        needed = {index: self._needed(index, upcoming.seed, begin, end) for index in self._devices}
        return _Chunk(upcoming.seed, begin, end, self._reader.submit(self._read, needed))

    def _end_of_chunk(self, upcoming: Upcoming) -> int:
        """Return the examples before the first step that no longer fits; at least one step does."""
        sharding, begin = self._sharding, upcoming.begin
        every_device = np.arange(sharding.num_devices)
        before = sharding.count_before(begin, every_device)

        def rows_needed(step: int) -> float:
            end = upcoming.examples_before(step)
            if end - begin > sharding.num_examples:  # more than `batching.device_batch` takes
                return math.inf
            return int((sharding.count_before(end, every_device) - before).max())

        steps = range(upcoming.first + 1, upcoming.end + 1)
        num_fitting = bisect.bisect_right(steps, self._num_rows, key=rows_needed)
        return upcoming.examples_before(upcoming.first + max(num_fitting, 1))

    def _needed(self, device: int, seed: int, begin: int, end: int) -> np.ndarray:
        """Return the originals that `device` visits between two positions, by its own numbering; ascending."""
        epoch, offset = divmod(begin, self._sharding.num_examples)
        visits = int(self._sharding.count_before(end, device) - self._sharding.count_before(begin, device))
        if not visits:
            return np.empty(0, np.int64)
        with jax.default_device(_host_cpu()):
            batch = batching.device_batch(self._sharding, device, epoch, offset, end - begin)
            parts = [
                _visited_examples(self._sharding, batch, part, np.uint32(seed))
                for part in range(PLANNED.num_micro_batches(visits))
            ]
        originals = np.unique(np.concatenate(parts) // self._sharding.views)  # padding is one of them
        assert len(originals) <= self._num_rows, f"{len(originals)} originals for a buffer of {self._num_rows}"
        return originals

    def _read(self, needed: dict[int, np.ndarray]) -> dict:
        """Read and verify these originals of each device, and put them there.

        Each call fills new memory: a CPU device takes it over, and may still be reading what it had before.
        """
        placed = []
        for index, device in self._devices.items():
            originals, count = needed[index], len(needed[index])
            images = memory.aligned_empty((self._num_rows, *self._train.image_shape), self._train.dtype)
            self._train.fill(self._originals[index][originals], images[:count], READING_THREADS)
            rows = np.zeros((1, self._sharding.max_originals), np.int32)
            rows[0, originals] = np.arange(count)
            of_device = {"images": images.reshape(1, self._num_rows, -1), "rows": rows}
            placed.append(jax.block_until_ready(jax.device_put(of_device, device)))
        return {**replicas.stack(placed), "labels": self._labels}

    def _place_labels(self, index: int) -> jax.Array:
        """Place the labels of a device's originals: int32 [1, originals]."""
        labels = self._train.labels[self._originals[index]]
        padding = self._sharding.max_originals - len(labels)
        return jax.device_put(np.pad(labels, (0, padding))[None], self._devices[index])


def load_inputs(data: Resident | Stream, sharding: DataSharding, seed, inputs) -> LoadedSteps:
    """Return the data for as many of some consecutive steps as can be had at once.

    Args:
      seed: seed of the order of examples.
      inputs: StepInputs of the steps, each [steps].
    """
    first = int(inputs.epoch[0]) * sharding.num_examples + int(inputs.offset[0])
    examples_before = first + np.append(0, np.cumsum(inputs.batch_size, dtype=np.int64))
    num_steps = len(inputs.batch_size)
    upcoming = Upcoming(int(seed), 0, num_steps, lambda step: int(examples_before[step]))
    return data.for_steps(upcoming, num_steps)


@functools.partial(jax.jit, static_argnames="sharding")
def _visited_examples(sharding: DataSharding, batch: DeviceBatch, part, seed) -> jax.Array:
    """Return a part of the examples that a device visits in a batch, padded: int32 [4096]."""
    return batching.micro_batch(sharding, batch, part, PLANNED, seed).examples


@functools.cache
def _host_cpu() -> jax.Device | None:
    """Return a CPU device of this host, if JAX has any; else None, the default device."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
