"""Build of a cache: the examples of a source decoded and written to images files, with bounded memory.

All cores decode blocks of rows; one thread writes them, in order, to images files. A file gets its name when it is
whole, with a *part record* beside it: digests and sums of its rows. So a build that was killed resumes after the
files that are there, and several hosts or processes can build one cache together. An unfinished cache is kept in
.NAME.build beside the cache's own folder.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator

import jax
import numpy as np
from etils import epath

from largebatch import util
from largebatch.cache.cache import RowLayout, open_cache
from largebatch.cache.finish import (
    Block,
    TrainSums,
    channel_sums,
    finish_cache,
    part_record,
    read_sums,
    write_whole,
)
from largebatch.cache.plan import PARTS, CachePlan, FileTask, all_tasks, plan_layout
from largebatch.hosts import collectives
from largebatch.sources.source import ReadPixels
from largebatch.util import UserError

log = logging.getLogger("largebatch")

# Bytes that one thread decodes before they are written. From 4 MiB on, NumPy asks for huge pages, which are faster.
BLOCK_BYTES = 2**23
SECONDS_BETWEEN_REPORTS = 10.0
OLD_BUILD_SEC = 7 * 24 * 3600


def hosts_sharing(folder: epath.Path) -> list[int]:
    """Return the sorted indices of the hosts that share a folder with this host, itself included. Collective.

    Raises:
      UserError: on every host, if one of them cannot write there.
    """
    meeting = collectives.gather_text(uuid.uuid4().hex)[0]
    mark = folder / f".meeting-{jax.process_index()}.{meeting}.tmp"  # a name that `util.remove_stale_in` removes
    collectives.agreed(functools.partial(_leave_mark, mark))
    seen = [int(other.name.split(".")[1].split("-")[1]) for other in folder.glob(f".meeting-*.{meeting}.tmp")]
    collectives.barrier()  # all hosts have listed the folder
    util.remove(mark)
    return sorted({*seen, jax.process_index()})


def _leave_mark(mark: epath.Path) -> None:
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        util.remove_stale_in(mark.parent)
        mark.touch()
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"augment.cache_dir: cannot write {mark.parent} ({reason})") from error


def build_together(plan: CachePlan, sharing: list[int], missing: bool) -> None:
    """Build a cache where it is missing; hosts that share a file system share the work. Collective.

    Where each host has a part of the images, the statistics are those of all parts.

    Args:
      sharing: the result of `hosts_sharing`.
      missing: True if this host sees no such cache.
    Raises:
      UserError: on every host, if one of them fails; see `build_cache`.
    """
    missing_on = [json.loads(text) for text in collectives.gather_text(json.dumps(missing))]
    needed = any(missing_on[host] for host in sharing)
    rank = sharing.index(jax.process_index())
    collectives.agreed(functools.partial(build_cache, plan, rank, len(sharing)), needed)
    is_first = rank == 0
    is_part = plan.own_rows is not None
    own_sums = collectives.agreed(functools.partial(_sums_of_host, plan), is_first and (needed or is_part))
    all_sums = None
    if is_part:
        of_hosts = collectives.gather_text(json.dumps(own_sums and dataclasses.asdict(own_sums)))
        all_sums = TrainSums.total([TrainSums(**fields) for fields in map(json.loads, of_hosts) if fields])
    collectives.agreed(functools.partial(finish_cache, plan, own_sums, all_sums), needed and is_first)


def _sums_of_host(plan: CachePlan) -> TrainSums | None:
    """Return the sums of the training rows that this host counts, or None if a whole cache exists already."""
    try:
        if not plan.folder.exists():
            if not all(plan.is_written(task) for task in all_tasks(plan_layout(plan))):
                build_cache(plan)  # a network file system showed the hosts' marks to some of them only
            return read_sums(plan)
    except OSError as error:
        if not plan.folder.exists():
            raise UserError(
                f"augment.cache_dir: cannot read {plan.build_folder} ({error.strerror or error})"
            ) from error
    # The cache was built before, or by another process that was first, with the same content.
    return TrainSums(**open_cache(plan.folder).manifest["part"]["sums"]) if plan.own_rows is not None else None


def build_cache(plan: CachePlan, host: int = 0, num_hosts: int = 1) -> None:
    """Write those images files of a cache that are assigned to this host and do not exist yet.

    Args:
      host: index of this host among the `num_hosts` hosts that build this cache together, on one file system.
    Raises:
      UserError: a damaged or unfitting image, or a failing or full disk; finished files are kept.
    """
    if plan.folder.exists():  # another process was first, with the same content
        return
    layout = plan_layout(plan)
    tasks = [task for task in all_tasks(layout) if task.number % num_hosts == host]
    try:
        (plan.build_folder / PARTS).mkdir(parents=True, exist_ok=True)
        _remove_leftovers(plan)
        left = [task for task in tasks if not plan.is_written(task)]
        _refuse_small_disk(plan, layout)
        rows_left = sum(len(layout.rows_of_file(task.split, task.number)) for task in left)
        progress = _Progress(rows_left)
        kept = f", after {len(tasks) - len(left)} of {len(tasks)} files of a build before" if left != tasks else ""
        log.info("decoding %s%s", plan.source.description, kept)
        with plan.source.open() as read:
            _write_files(plan, layout, left, read, progress)
    except OSError as error:
        if plan.folder.exists():  # another process was first, with the same content
            return
        raise _cannot_write(plan, layout, error) from error
    except UserError:
        _remove_if_empty(plan.build_folder)
        raise


# ---- the disk ---------------------------------------------------------------------------------------


def _remove_leftovers(plan: CachePlan) -> None:
    """Remove what killed processes left of this cache, and abandoned builds of older content.

    Builds of older content have other names, since the source changed. Those younger than `OLD_BUILD_SEC` stay.
    """
    util.remove_stale(plan.folder)
    util.remove_stale_in(plan.build_folder)
    name, _, _ = plan.folder.name.rpartition("-")
    of_this_set = re.compile(rf"\.{re.escape(name)}-[0-9a-f]{{16}}\.build")
    for other in plan.folder.parent.iterdir():
        if other == plan.build_folder or not of_this_set.fullmatch(other.name):
            continue
        with contextlib.suppress(OSError):  # another process removes it too, or resumes it after all
            if util.seconds_untouched(other) < OLD_BUILD_SEC:
                num_bytes = util.num_bytes(other)
                log.info("%s is an unfinished cache of other content, %.2f GB", other, num_bytes / 1e9)
            else:
                util.remove(other)
                log.info("removed %s, an unfinished cache of other content", other)


def _remove_if_empty(build: epath.Path) -> None:
    """Remove the folder of a build without a finished file, unless another process is writing one there."""
    with contextlib.suppress(OSError):
        if not any(build.glob("*.npy")) and not any(build.glob(".*.tmp")):
            util.remove(build)


def _refuse_small_disk(plan: CachePlan, layout: RowLayout) -> None:
    """Raise UserError, before hours of work, if the disk lacks room for the missing files of all its hosts."""
    if "://" in os.fspath(plan.folder):
        return
    left = [task for task in all_tasks(layout) if not plan.is_written(task)]
    needed = sum(len(layout.rows_of_file(task.split, task.number)) for task in left) * layout.row_bytes
    free = shutil.disk_usage(plan.build_folder).free
    if needed > free:
        raise UserError(
            f"augment.cache_dir: {plan.folder.parent} has {free / 1e9:,.2f} GB free; the cache needs "
            f"{needed / 1e9:,.2f} GB more: make room, or give another folder"
        )


def _cannot_write(plan: CachePlan, layout: RowLayout, error: OSError) -> UserError:
    text = f"augment.cache_dir: cannot write {plan.folder} ({error.strerror or error})"
    tasks = all_tasks(layout)
    with contextlib.suppress(OSError):
        written = sum(plan.is_written(task) for task in tasks)
        if written:
            text += f"; {written} of {len(tasks)} files are kept in {plan.build_folder}: start again to go on"
        else:
            _remove_if_empty(plan.build_folder)
    return UserError(text)


# ---- decoding and writing ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _BlockTask:
    """Block of rows of an images file, decoded by one thread."""

    file: FileTask
    rows: range
    ends_file: bool

    def examples(self, plan: CachePlan) -> np.ndarray:
        """Return the indices of the rows in the source."""
        return plan.stored_examples[self.file.split][self.rows.start : self.rows.stop]


def rows_per_block(layout: RowLayout) -> int:
    """Return the number of images that one thread decodes at a time."""
    return max(1, BLOCK_BYTES // layout.row_bytes)


def _block_tasks(layout: RowLayout, tasks: list[FileTask]) -> Iterator[_BlockTask]:
    block_rows = rows_per_block(layout)
    for task in tasks:
        rows = layout.rows_of_file(task.split, task.number)
        for begin in range(rows.start, rows.stop, block_rows):
            end = min(begin + block_rows, rows.stop)
            yield _BlockTask(task, range(begin, end), ends_file=end == rows.stop)


def _write_files(
    plan: CachePlan, layout: RowLayout, tasks: list[FileTask], read: ReadPixels, progress: "_Progress"
) -> None:
    """Decode on all cores, a few blocks ahead of the one that is written."""
    num_workers = os.cpu_count() or 1
    waiting = collections.deque()  # pairs of a block's task and its future
    block_tasks = _block_tasks(layout, tasks)
    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool, contextlib.closing(_Writer(plan)) as writer:
        try:
            for task in block_tasks:
                waiting.append((task, pool.submit(decode_block, plan, layout, task.examples(plan), read)))
                if len(waiting) > 2 * num_workers:
                    _write_next(waiting, layout, writer, progress)
            while waiting:
                _write_next(waiting, layout, writer, progress)
        finally:
            pool.shutdown(cancel_futures=True)


def _write_next(waiting: collections.deque, layout: RowLayout, writer: "_Writer", progress: "_Progress") -> None:
    task, future = waiting.popleft()
    writer.write(task.file, layout, future.result(), ends_file=task.ends_file)
    progress.add(len(task.rows))


def decode_block(plan: CachePlan, layout: RowLayout, examples: np.ndarray, read: ReadPixels) -> Block:
    """Decode examples of the source.

    Raises:
      UserError: an image is damaged, or not like the first training image.
    """
    pixels = np.empty((len(examples), *layout.image_shape), layout.dtype)
    decoded = read(examples.tolist(), pixels)
    for place, example, image in zip(pixels, examples, decoded, strict=True):
        if image.shape != layout.image_shape or image.dtype != layout.dtype:
            raise _unlike_first(plan, layout, example, image)
        place[...] = image  # the image may be there already
    digests = np.array([np.frombuffer(hashlib.sha256(image).digest(), np.uint8) for image in pixels])
    return Block(pixels, digests, *channel_sums(pixels))


def _unlike_first(plan: CachePlan, layout: RowLayout, example: int, image: np.ndarray) -> UserError:
    """Return the error for an image that differs from the first training image, which sets the row layout."""
    this, first = plan.source.ids[example], plan.source.ids[plan.splits["train"][0]]
    (height, width, channels), (first_height, first_width, first_channels) = image.shape, layout.image_shape
    if image.dtype != layout.dtype:
        return UserError(
            f"dataset: {this} has {8 * image.dtype.itemsize} bits a channel, {first} has "
            f"{8 * layout.dtype.itemsize}; allowed: the same in all images"
        )
    if channels != first_channels:
        return UserError(
            f"dataset.channels: {this} has {channels} channels, {first} has {first_channels}; allowed: the same in "
            "all images, or dataset.channels 1 or 3 to convert grey and colour"
        )
    return UserError(
        f"dataset.image_size: {this} is {width}x{height} pixels, {first} is {first_width}x{first_height}; "
        "set a size to resize to"
    )


class _Writer:
    """Writer of blocks, in order, to the images file that they belong to."""

    def __init__(self, plan: CachePlan):
        self._build = plan.build_folder
        self._file, self._temporary, self._blocks = None, None, []

    def write(self, task: FileTask, layout: RowLayout, block: Block, *, ends_file: bool) -> None:
        """Append a block; after the last block of a file, give the file its name."""
        if self._file is None:
            self._temporary = util.beside(self._build / task.images)
            self._file = self._temporary.open("wb")
            self._file.write(layout.header(task.split, task.number))
        self._file.write(block.pixels.data)
        self._blocks.append(dataclasses.replace(block, pixels=block.pixels[:0]))
        if ends_file:
            self._file.close()
            write_whole(self._build / task.record, part_record(self._blocks))
            self._temporary.replace(self._build / task.images)
            self._file, self._temporary, self._blocks = None, None, []

    def close(self) -> None:
        """Remove a file that is not finished."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk refuses the buffered bytes once more
                self._file.close()
            with contextlib.suppress(OSError):  # a failing disk: the file is removed as stale later
                self._temporary.unlink(missing_ok=True)


class _Progress:
    """Periodic log of the progress, throughput and remaining time of a build."""

    def __init__(self, num_rows: int):
        self._num_rows, self._done = num_rows, 0
        self._begin = self._reported = time.monotonic()

    def add(self, num_rows: int) -> None:
        """Count rows as written, and log the progress if it is due."""
        self._done += num_rows
        now = time.monotonic()
        is_end = self._done == self._num_rows
        if not is_end and now - self._reported < SECONDS_BETWEEN_REPORTS:
            return
        self._reported = now
        rate = self._done / max(now - self._begin, 1e-9)
        text = f"decoded {self._done:,} of {self._num_rows:,} images, {rate:,.0f} a second"
        if not is_end:
            text += f", {(self._num_rows - self._done) / rate:,.0f} s left"
        log.info("%s", text)
