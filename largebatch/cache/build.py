"""Builds a cache: decodes the examples of a source and writes them to shards on disk, with bounded memory.

All cores decode blocks of rows; one thread writes them, in order, to images files. A file gets its name when it is
whole, with a *part record* beside it: digests and sums of its rows. So a build that was killed goes on after the
files that are there, and several hosts or processes can build one cache together. What is unfinished is kept in
.NAME.build beside the cache's own folder.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import io
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

from largebatch import files
from largebatch.cache.cache import (
    CACHE_VERSION,
    MANIFEST,
    RowLayout,
    images_file,
    seal_of,
)
from largebatch.errors import UserError
from largebatch.hosts import collectives
from largebatch.sources.source import ReadPixels, Source
from largebatch.sources.split import SPLITS

log = logging.getLogger("largebatch")

# A cache has up to MOST_FILES of images, of at least MIN_FILE_BYTES: a build that is killed does one of them again.
MOST_FILES, MIN_FILE_BYTES = 128, 2**24
BLOCK_BYTES = 2**22  # that one thread decodes before they are written
PIXEL_TYPES = (np.dtype(np.uint8), np.dtype(np.uint16))
LINES_AT_ONCE = 256  # of which statistics are taken: 256 * 255**2 < 2**24
SECONDS_BETWEEN_REPORTS = 10.0
PARTS = "parts"  # folder of the part records
OLD_BUILD_SEC = 7 * 24 * 3600


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """What is to be built, and where."""

    folder: epath.Path  # the finished cache's
    source: Source
    splits: dict[str, np.ndarray]  # indices into the source's examples, by split

    @property
    def build_folder(self) -> epath.Path:
        """Where the cache is while it is not whole."""
        return self.folder.parent / f".{self.folder.name}.build"


@dataclasses.dataclass(frozen=True)
class FileTask:
    """An images file that is to be written."""

    split: str
    number: int

    @property
    def images(self) -> str:
        """Its name in the build folder."""
        return images_file(self.split, self.number)

    @property
    def record(self) -> str:
        """The name of its part record in the build folder."""
        return f"{PARTS}/{self.split}-{self.number:05d}.npz"


@dataclasses.dataclass(frozen=True)
class Block:
    """Decoded rows, and what a part record says of them."""

    pixels: np.ndarray  # [rows, H, W, C]
    digests: np.ndarray  # uint8 [rows, 32]
    sums: np.ndarray  # uint64 [C]: of the pixels
    square_sums: np.ndarray  # uint64 [C]: of their squares


def build_together(plan: CachePlan, needed: bool) -> None:
    """Builds a cache on the hosts that need it; those that share a file system share the work.

    Every host calls it.

    Args:
      needed: whether this host has no such cache.
    Raises:
      UserError: on every host, if one of them fails; see `build_cache`.
    """
    meeting = collectives.gather_text(uuid.uuid4().hex)[0]
    collectives.agreed(functools.partial(_leave_mark, plan, meeting), needed)
    sharing = _hosts_sharing(plan, meeting) if needed else []
    rank = sharing.index(jax.process_index()) if needed else 0
    collectives.agreed(functools.partial(build_cache, plan, rank, len(sharing)), needed)
    collectives.agreed(functools.partial(_complete, plan), needed and rank == 0)


def _complete(plan: CachePlan) -> None:
    if not is_whole(plan):  # a network file system showed the hosts' marks to some of them only
        build_cache(plan)
    finish_cache(plan)


def _leave_mark(plan: CachePlan, meeting: str) -> None:
    try:
        (plan.build_folder / PARTS).mkdir(parents=True, exist_ok=True)
        (plan.build_folder / PARTS / f"{meeting}-{jax.process_index()}").touch()
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"augment.cache_dir: cannot write {plan.folder} ({reason})") from error


def _hosts_sharing(plan: CachePlan, meeting: str) -> list[int]:
    """The hosts whose marks this host sees, in order; itself among them."""
    marks = (plan.build_folder / PARTS).glob(f"{meeting}-*")
    return sorted(int(mark.name.removeprefix(f"{meeting}-")) for mark in marks)


def build_cache(plan: CachePlan, host: int = 0, num_hosts: int = 1) -> None:
    """Writes those images files of a cache that fall to this host and are not there yet.

    Args:
      host, num_hosts: of the hosts that build this cache together, on one file system.
    Raises:
      UserError: a damaged or unfitting image, or a failing or full disk; what is finished is kept.
    """
    if plan.folder.exists():  # another process was first, with the same content
        return
    layout = plan_layout(plan)
    tasks = [task for task in all_tasks(layout) if task.number % num_hosts == host]
    try:
        (plan.build_folder / PARTS).mkdir(parents=True, exist_ok=True)
        _remove_leftovers(plan)
        left = [task for task in tasks if not _is_written(plan.build_folder, task)]
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


def finish_cache(plan: CachePlan) -> None:
    """Puts the written parts together and gives the cache its name.

    Raises:
      UserError: a failing disk.
    """
    build = plan.build_folder
    layout = plan_layout(plan)
    try:
        manifest = _write_small_arrays(plan, layout)
        manifest["manifest_sha256"] = seal_of(manifest)
        _write_whole(build / MANIFEST, json.dumps(manifest, indent=1).encode())
        build.rename(plan.folder)
        files.remove(plan.folder / PARTS)
        for path in plan.folder.glob(".*"):  # of processes that were killed, or build the same and come second
            files.remove(path)
    except OSError as error:
        if not plan.folder.exists():
            raise _cannot_write(plan, layout, error) from error
        with contextlib.suppress(OSError):  # another process was first, with the same content
            files.remove(build)
    log.info("cached in %s", plan.folder)


def is_whole(plan: CachePlan) -> bool:
    """Whether all images files of a build are there, as this host sees it."""
    return all(_is_written(plan.build_folder, task) for task in all_tasks(plan_layout(plan)))


# ---- the layout -------------------------------------------------------------------------------------


def plan_layout(plan: CachePlan) -> RowLayout:
    """The layout of the rows; decodes the first training image, which all others must be like.

    Raises:
      UserError: the image is damaged, or of pixels that cannot be stored.
    """
    first = plan.splits["train"][0]
    with plan.source.open() as read:
        (pixels,) = read([first])
    if pixels.dtype not in PIXEL_TYPES:
        raise UserError(f"dataset: {plan.source.ids[first]} has {pixels.dtype} pixels; allowed: uint8 | uint16")
    counts = {split: len(plan.splits[split]) for split in SPLITS}
    return make_layout(counts, pixels.shape, pixels.dtype)


def make_layout(counts: dict[str, int], image_shape: tuple[int, int, int], dtype: np.dtype) -> RowLayout:
    """The layout for so many rows of a split."""
    row_bytes = int(np.prod(image_shape)) * dtype.itemsize
    rows_per_file = max(-(-MIN_FILE_BYTES // row_bytes), -(-sum(counts.values()) // MOST_FILES))
    return RowLayout(counts, rows_per_file, tuple(image_shape), dtype)


def all_tasks(layout: RowLayout) -> list[FileTask]:
    """Every images file of a cache."""
    return [FileTask(split, number) for split in SPLITS for number in range(layout.num_files(split))]


def _is_written(build: epath.Path, task: FileTask) -> bool:
    return (build / task.images).exists() and (build / task.record).exists()


def _remove_leftovers(plan: CachePlan) -> None:
    """Removes what killed processes left of this cache, and builds of older content that nobody goes on with.

    Those have other names, since the source changed. One younger than `OLD_BUILD_SEC` is only named.
    """
    files.remove_stale(plan.folder)
    files.remove_stale_in(plan.build_folder)
    name, _, _ = plan.folder.name.rpartition("-")
    of_this_set = re.compile(rf"\.{re.escape(name)}-[0-9a-f]{{16}}\.build")
    for other in plan.folder.parent.iterdir():
        if other == plan.build_folder or not of_this_set.fullmatch(other.name):
            continue
        with contextlib.suppress(OSError):  # another process removes it too, or goes on with it after all
            if files.seconds_untouched(other) < OLD_BUILD_SEC:
                num_bytes = files.num_bytes(other)
                log.info("%s is an unfinished cache of other content, %.2f GB", other, num_bytes / 1e9)
            else:
                files.remove(other)
                log.info("removed %s, an unfinished cache of other content", other)


def _remove_if_empty(build: epath.Path) -> None:
    """Removes the folder of a build that has not finished a file, unless another process has one there."""
    with contextlib.suppress(OSError):
        if not any(build.glob("*.npy")) and not any(build.glob(".*.tmp")):
            files.remove(build)


def _refuse_small_disk(plan: CachePlan, layout: RowLayout) -> None:
    """Before hours of work: the disk has no room for the files that are left, of all hosts that share it."""
    if "://" in os.fspath(plan.folder):
        return
    left = [task for task in all_tasks(layout) if not _is_written(plan.build_folder, task)]
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
        written = sum(_is_written(plan.build_folder, task) for task in tasks)
        if written:
            text += f"; {written} of {len(tasks)} files are kept in {plan.build_folder}: start again to go on"
        else:
            _remove_if_empty(plan.build_folder)
    return UserError(text)


# ---- decoding and writing ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _BlockTask:
    """Rows of an images file that one thread decodes."""

    file: FileTask
    rows: range
    ends_file: bool

    def examples(self, plan: CachePlan) -> np.ndarray:
        """Indices of the rows in the source."""
        return plan.splits[self.file.split][self.rows.start : self.rows.stop]


def _block_tasks(layout: RowLayout, tasks: list[FileTask]) -> Iterator[_BlockTask]:
    rows_per_block = max(1, BLOCK_BYTES // layout.row_bytes)
    for task in tasks:
        rows = layout.rows_of_file(task.split, task.number)
        for begin in range(rows.start, rows.stop, rows_per_block):
            end = min(begin + rows_per_block, rows.stop)
            yield _BlockTask(task, range(begin, end), ends_file=end == rows.stop)


def _write_files(
    plan: CachePlan, layout: RowLayout, tasks: list[FileTask], read: ReadPixels, progress: "_Progress"
) -> None:
    """Decodes on all cores, a few blocks ahead of the one that is written."""
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
    """Decodes examples of the source.

    Raises:
      UserError: one is damaged, or not like the first training image.
    """
    decoded = read(examples.tolist())
    for example, image in zip(examples, decoded, strict=True):
        if image.shape != layout.image_shape or image.dtype != layout.dtype:
            raise _unlike_first(plan, layout, example, image)
    pixels = np.stack(decoded)
    digests = np.array([np.frombuffer(hashlib.sha256(image).digest(), np.uint8) for image in pixels])
    return Block(pixels, digests, *channel_sums(pixels))


def _unlike_first(plan: CachePlan, layout: RowLayout, example: int, image: np.ndarray) -> UserError:
    """An image that differs from the first training image, by which the rows are laid out."""
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
    """Writes blocks to the images file that they belong to, one after the other."""

    def __init__(self, plan: CachePlan):
        self._build = plan.build_folder
        self._file, self._temporary, self._blocks = None, None, []

    def write(self, task: FileTask, layout: RowLayout, block: Block, *, ends_file: bool) -> None:
        """Appends a block; the last one of a file gives the file its name."""
        if self._file is None:
            self._temporary = files.beside(self._build / task.images)
            self._file = self._temporary.open("wb")
            self._file.write(layout.header(task.split, task.number))
        self._file.write(block.pixels.data)
        self._blocks.append(dataclasses.replace(block, pixels=block.pixels[:0]))
        if ends_file:
            self._file.close()
            _write_whole(self._build / task.record, _part_record(self._blocks))
            self._temporary.replace(self._build / task.images)
            self._file, self._temporary, self._blocks = None, None, []

    def close(self) -> None:
        """Removes a file that is not finished."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the disk is in trouble: it is stale one day
                self._file.close()
                self._temporary.unlink(missing_ok=True)


def _part_record(blocks: list[Block]) -> bytes:
    buffer = io.BytesIO()
    np.savez(
        buffer,
        digests=np.concatenate([block.digests for block in blocks]),
        sums=np.sum([block.sums for block in blocks], axis=0, dtype=np.uint64),
        square_sums=np.sum([block.square_sums for block in blocks], axis=0, dtype=np.uint64),
    )
    return buffer.getvalue()


def _write_whole(path: epath.Path, content: bytes) -> None:
    with files.replacing(path) as temporary:
        temporary.write_bytes(content)


class _Progress:
    """Says now and then how far a build is, how fast, and how long it will take."""

    def __init__(self, num_rows: int):
        self._num_rows, self._done = num_rows, 0
        self._begin = self._reported = time.monotonic()

    def add(self, num_rows: int) -> None:
        """So many rows more are written."""
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


# ---- statistics, ids, manifest ----------------------------------------------------------------------


def channel_sums(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the pixels [N, H, W, C] and of their squares by channel, exact: uint64 [C] each.

    Whole lines of an image are added at once, which is quicker than channel by channel. Of uint8, so few lines at a
    time that the sums of their squares are whole numbers below 2**24, which float32 holds exactly.
    """
    num_images, height, width, channels = pixels.shape
    lines = pixels.reshape(num_images * height, width * channels)
    number_type = np.float32 if pixels.dtype == np.uint8 else np.uint64
    sums = np.zeros(width * channels, np.uint64)
    square_sums = np.zeros(width * channels, np.uint64)
    for begin in range(0, len(lines), LINES_AT_ONCE):
        some = lines[begin : begin + LINES_AT_ONCE].astype(number_type)
        sums += some.sum(axis=0).astype(np.uint64)
        square_sums += np.square(some, out=some).sum(axis=0).astype(np.uint64)
    by_channel = (width, channels)
    return sums.reshape(by_channel).sum(axis=0), square_sums.reshape(by_channel).sum(axis=0)


def channel_statistics(sums: list[int], square_sums: list[int], num_pixels: int) -> tuple[list, list]:
    """Mean and standard deviation by channel, from exact integer sums over `num_pixels` pixels.

    Python's integers do not overflow, and its division rounds once. The deviation is at least 1.
    """
    mean = [total / num_pixels for total in sums]
    variance = [squares / num_pixels - m**2 for squares, m in zip(square_sums, mean, strict=True)]
    return mean, [float(np.sqrt(max(v, 1.0))) for v in variance]


def _write_small_arrays(plan: CachePlan, layout: RowLayout) -> dict:
    """Writes labels, ids and digests of every split; returns the manifest."""
    source, sha256, digests_of_split = plan.source, {}, {}
    ids = np.array(source.ids)
    channels = layout.image_shape[-1]
    sums, square_sums = [0] * channels, [0] * channels
    for split in SPLITS:
        records = [
            _read_record(plan, FileTask(split, number), len(layout.rows_of_file(split, number)))
            for number in range(layout.num_files(split))
        ]
        if split == "train":
            for channel in range(channels):
                sums[channel] = sum(int(record["sums"][channel]) for record in records)
                square_sums[channel] = sum(int(record["square_sums"][channel]) for record in records)
        digests = np.concatenate([np.empty((0, 32), np.uint8), *(record["digests"] for record in records)])
        digests_of_split[split] = digests
        rows = plan.splits[split]
        for name, array in {"labels": source.labels[rows], "ids": ids[rows], "digests": digests}.items():
            buffer = io.BytesIO()
            np.save(buffer, array, allow_pickle=False)
            path = plan.build_folder / f"{split}_{name}.npy"
            _write_whole(path, buffer.getvalue())
            sha256[path.name] = hashlib.sha256(buffer.getvalue()).hexdigest()
    _warn_of_equal_images(plan, digests_of_split)
    num_pixels = layout.counts["train"] * layout.image_shape[0] * layout.image_shape[1]
    mean, std = channel_statistics(sums, square_sums, num_pixels)
    return {
        "cache_version": CACHE_VERSION,
        "build": uuid.uuid4().hex,  # so that no two builds have the same manifest; see `discard_cache`
        "built": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "source": source.description,
        "counts": layout.counts,
        "class_names": source.class_names,
        "image_shape": list(layout.image_shape),
        "image_dtype": layout.dtype.name,
        "rows_per_file": layout.rows_per_file,
        "mean": mean,
        "std": std,
        "sha256": sha256,
    }


def _read_record(plan: CachePlan, task: FileTask, num_rows: int) -> dict[str, np.ndarray]:
    """Digests and sums; the record of another layout, as other code has it, counts as damaged."""
    path = plan.build_folder / task.record
    content = path.read_bytes()
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            record = {name: arrays[name] for name in ("digests", "sums", "square_sums")}
        if record["digests"].shape != (num_rows, 32):
            raise ValueError(f"{len(record['digests'])} rows, expected {num_rows}")
        return record
    except Exception as error:  # zipfile and NumPy raise a dozen kinds on damaged input
        path.unlink(missing_ok=True)  # so that the next start decodes this part again
        raise UserError(f"augment.cache_dir: {path} is damaged ({error}); start again to build it anew") from error


def _warn_of_equal_images(plan: CachePlan, digests: dict[str, np.ndarray]) -> None:
    """Counts and names images with the same pixels; those in two splits make a validation too good."""
    every = np.ascontiguousarray(np.concatenate([digests[split] for split in SPLITS])).view("V32").ravel()
    examples = np.concatenate([plan.splits[split] for split in SPLITS])
    split_of = np.repeat(np.arange(len(SPLITS)), [len(digests[split]) for split in SPLITS])
    order = np.argsort(every, kind="stable")
    equals_next = every[order[:-1]] == every[order[1:]]
    if not equals_next.any():
        return
    first, second = order[:-1][equals_next], order[1:][equals_next]
    in_two_splits = split_of[first] != split_of[second]
    shown = np.flatnonzero(in_two_splits) if in_two_splits.any() else np.arange(len(first))
    ids = plan.source.ids
    pairs = [f"{ids[examples[first[k]]]} = {ids[examples[second[k]]]}" for k in shown[:3]]
    log.warning(
        "dataset: %d images have the same pixels as another one, %d of them in another split (%s)",
        len(first),
        in_two_splits.sum(),
        ", ".join(pairs) + (", ..." if len(shown) > 3 else ""),
    )
