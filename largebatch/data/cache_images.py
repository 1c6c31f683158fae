"""Images files of a cache: the images of a data set decoded and written, with bounded memory.

All cores decode blocks of rows, which are written in order to images files. A file gets its name when it is whole,
with a *part record* beside it: CRCs and sums of its rows. So a build that was killed resumes after the files that
are there, and several hosts or processes can build one cache together. An unfinished cache is kept in .NAME.build
beside the cache's own folder.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from largebatch import util
from largebatch.data.cache import RowLayout, images_file
from largebatch.data.dataset import SPLITS, Dataset
from largebatch.util import UserError

log = logging.getLogger("largebatch")

PARTS = "parts"  # folder of the part records
# Bytes that one thread decodes before they are written. From 4 MiB on, NumPy asks for huge pages, which are faster.
BLOCK_BYTES = 2**23
SECONDS_BETWEEN_REPORTS = 10.0
SAMPLED_IMAGES, SAMPLE_SEC = 4096, 4.0  # the sample of an estimate ends at either
OTHER_BYTES = 4 + 4 + 4 * 24  # of an image's CRC, label and id, beside its pixels
MOST_LINES = (2**32 - 1) // 255**2  # so many squares of uint8 add up to what fits into uint32


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """Content and folder of a cache that is to be built."""

    folder: Path  # of the finished cache
    dataset: Dataset
    splits: dict[str, np.ndarray]  # indices into the data set's examples, by split

    @functools.cached_property
    def layout(self) -> RowLayout:
        """Layout of the rows."""
        counts = {split: len(self.splits[split]) for split in SPLITS}
        return RowLayout.of(counts, self.dataset.image_shape, self.dataset.dtype)

    @functools.cached_property
    def examples(self) -> np.ndarray:
        """Index into the data set's examples of each row."""
        return np.concatenate([self.splits[split] for split in SPLITS])

    @property
    def build_folder(self) -> Path:
        """Folder of the cache while it is not whole."""
        return self.folder.parent / f".{self.folder.name}.build"

    @property
    def missing(self) -> list[int]:
        """Numbers of the images files that are not whole, as this host sees it."""
        every = range(self.layout.num_files)
        return [n for n in every if not (self.images_path(n).exists() and self.record_path(n).exists())]

    def images_path(self, number: int) -> Path:
        """Return the path of an images file in the build folder."""
        return self.build_folder / images_file(number)

    def record_path(self, number: int) -> Path:
        """Return the path of its part record."""
        return self.build_folder / PARTS / f"{number:05d}.json"


# ---- decoding and writing ------------------------------------------------------------------------------


def build_files(plan: CachePlan, rank: int = 0, num_builders: int = 1) -> None:
    """Write those images files of a cache that are assigned to this host and do not exist yet.

    Args:
      rank: rank of this host among the `num_builders` hosts that build this cache together, on one file system.
    Raises:
      UserError: a damaged or unfitting image, or a failing or full disk; finished files are kept.
    """
    if plan.folder.exists():  # another process was first, with the same content
        return
    try:
        (plan.build_folder / PARTS).mkdir(parents=True, exist_ok=True)
        util.remove_stale_in(plan.folder.parent)
        util.remove_stale_in(plan.build_folder)
        missing, num_files = plan.missing, plan.layout.num_files
        _refuse_small_disk(plan, missing)
        if missing:
            kept = f", after {num_files - len(missing)} of {num_files} files of a build before"
            log.info("decoding %s%s", plan.dataset.description, kept if len(missing) < num_files else "")
            _write_files(plan, [number for number in missing if number % num_builders == rank])
    except OSError as error:
        if not plan.folder.exists():
            raise cannot_write(plan, error) from error
    except UserError:
        _remove_if_empty(plan.build_folder)
        raise


@dataclasses.dataclass(frozen=True)
class Block:
    """Decoded rows, their CRCs, and the sums of those that are training images."""

    pixels: np.ndarray  # [rows, H, W, C]
    crcs: list[int]  # CRC-32 of each row
    sums: list[int]  # sums of the pixels, by channel
    square_sums: list[int]  # sums of their squares, by channel


def decode_block(plan: CachePlan, rows: range) -> Block:
    """Decode some rows in this thread.

    Raises:
      UserError: an image is damaged, or not like the first one.
    """
    pixels = np.empty((len(rows), *plan.layout.image_shape), plan.layout.dtype)
    plan.dataset.fill(plan.examples[rows.start : rows.stop], pixels, num_threads=1)
    num_train = max(plan.layout.counts["train"] - rows.start, 0)
    return Block(pixels, [zlib.crc32(image) for image in pixels], *channel_sums(pixels[:num_train]))


def channel_sums(pixels: np.ndarray) -> tuple[list[int], list[int]]:
    """Return exact sums of the pixels [N, H, W, C] and of their squares, by channel.

    Lines are added first, all channels at once, which is much quicker than channel by channel.
    """
    num_images, height, width, channels = pixels.shape
    lines = pixels.reshape(num_images, height, width * channels)
    number_type = np.uint32 if pixels.dtype == np.uint8 and height <= MOST_LINES else np.uint64
    sums = np.add.reduce(lines, axis=1, dtype=number_type)
    square_sums = np.einsum("nlx,nlx->nx", lines, lines, dtype=number_type)
    return _by_channel(sums, channels), _by_channel(square_sums, channels)


def _by_channel(sums: np.ndarray, channels: int) -> list[int]:
    return sums.reshape(-1, channels).sum(axis=0, dtype=np.uint64).tolist()


def block_rows(layout: RowLayout) -> int:
    """Return the number of images that one thread decodes at a time."""
    return max(1, BLOCK_BYTES // layout.row_bytes)


def _write_files(plan: CachePlan, numbers: list[int]) -> None:
    """Decode on all cores, a few blocks ahead of the one that is written."""
    num_workers, size = os.cpu_count() or 1, block_rows(plan.layout)
    rows_of = {number: plan.layout.rows_of_file(number) for number in numbers}
    report = _progress(sum(map(len, rows_of.values())))
    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        blocks = (rows[begin : begin + size] for rows in rows_of.values() for begin in range(0, len(rows), size))
        decoded = _in_order(pool, functools.partial(decode_block, plan), blocks, ahead=2 * num_workers)
        try:
            for number, rows in rows_of.items():
                _write_file(plan, number, itertools.islice(decoded, -(-len(rows) // size)), report)
        finally:
            pool.shutdown(cancel_futures=True)


def _in_order(pool, work: Callable, items: Iterator, ahead: int) -> Iterator:
    """Yield `work(item)` for each item in order, while a pool works on up to `ahead` further ones."""
    waiting = collections.deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _write_file(plan: CachePlan, number: int, blocks: Iterator[Block], report: Callable[[int], None]) -> None:
    """Write an images file and its part record; it gets its name last."""
    crcs, sums, square_sums = [], [], []
    with util.replacing(plan.images_path(number)) as temporary:
        with temporary.open("wb") as file:
            for block in blocks:
                file.write(block.pixels.data)
                crcs += block.crcs
                sums.append(block.sums)
                square_sums.append(block.square_sums)
                report(len(block.crcs))
        record = {"crcs": crcs, "sums": total(sums), "square_sums": total(square_sums)}
        write_whole(plan.record_path(number), json.dumps(record).encode())


def total(sums: list[list[int]]) -> list[int]:
    """Add sums by channel."""
    return [sum(of_channel) for of_channel in zip(*sums, strict=True)]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: it appears whole or not at all."""
    with util.replacing(path) as temporary:
        temporary.write_bytes(content)


def _progress(num_rows: int) -> Callable[[int], None]:
    """Return a function that counts rows as written and logs progress, rate and remaining time now and then."""
    done, begin = 0, time.monotonic()
    reported = begin

    def report(count: int) -> None:
        nonlocal done, reported
        done, now = done + count, time.monotonic()
        if done < num_rows and now - reported < SECONDS_BETWEEN_REPORTS:
            return
        reported, rate = now, done / max(now - begin, 1e-9)
        left = f", {(num_rows - done) / rate:,.0f} s left" if done < num_rows else ""
        log.info("decoded %s", f"{done:,} of {num_rows:,} images, {rate:,.0f} a second{left}")

    return report


# ---- the disk -----------------------------------------------------------------------------------------


def _remove_if_empty(build: Path) -> None:
    """Remove the folder of a build without a finished file, unless another process is writing one there."""
    with contextlib.suppress(OSError):
        if not any(build.glob("images-*")) and not any(build.glob(".*.tmp")):
            util.remove(build)


def _refuse_small_disk(plan: CachePlan, missing: list[int]) -> None:
    """Raise UserError, before hours of work, if the disk lacks room for the missing files of all hosts."""
    needed = sum(len(plan.layout.rows_of_file(number)) for number in missing) * plan.layout.row_bytes
    free = shutil.disk_usage(plan.build_folder).free
    if needed > free:
        raise UserError(
            f"augment.cache_dir: {plan.folder.parent} has {free / 1e9:,.2f} GB free; the cache needs "
            f"{needed / 1e9:,.2f} GB more: make room, or give another folder"
        )


def cannot_write(plan: CachePlan, error: OSError) -> UserError:
    """Return the error for a disk that fails or is full; it names what is kept."""
    text = f"augment.cache_dir: cannot write {plan.folder} ({error.strerror or error})"
    with contextlib.suppress(OSError):
        num_files = plan.layout.num_files
        written = num_files - len(plan.missing)
        if written:
            text += f"; {written} of {num_files} files are kept in {plan.build_folder}: start again to go on"
        else:
            _remove_if_empty(plan.build_folder)
    return UserError(text)


# ---- an estimate ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BuildEstimate:
    """Predicted size and build time of a cache."""

    plan: CachePlan
    disk_bytes: int  # size of the cache
    free_disk_bytes: int
    images_per_sec: float  # images that all cores of this host decode per second
    sampled: int  # images that were decoded for the estimate

    @property
    def seconds(self) -> float:
        """Seconds that one host takes to build the cache."""
        return self.plan.layout.num_rows / self.images_per_sec


def estimate_build(plan: CachePlan, seed: int = 0) -> BuildEstimate:
    """Estimate a build: decode some images on all cores as it does, for a few seconds at most, and write nothing.

    Raises:
      UserError: an image is damaged or unlike the first.
    """
    num_rows, num_workers = plan.layout.num_rows, os.cpu_count() or 1
    # Consecutive images, as in a build, from places spread over the set.
    size = min(block_rows(plan.layout), -(-min(SAMPLED_IMAGES, num_rows) // num_workers))
    starts = np.random.default_rng(seed).permutation(range(0, num_rows, size)).tolist()
    blocks = [range(start, min(start + size, num_rows)) for start in starts]
    decode_block(plan, blocks[0])  # the first images take longer
    begin, done = time.perf_counter(), 0
    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        for first in range(0, len(blocks), num_workers):
            some = blocks[first : first + num_workers]
            done += sum(len(block.crcs) for block in pool.map(lambda rows: decode_block(plan, rows), some))
            if done >= SAMPLED_IMAGES or time.perf_counter() - begin > SAMPLE_SEC:
                break
    disk_bytes = num_rows * (plan.layout.row_bytes + OTHER_BYTES)
    parent = next(folder for folder in plan.folder.parents if folder.exists())
    rate = done / (time.perf_counter() - begin)
    return BuildEstimate(plan, disk_bytes, shutil.disk_usage(parent).free, rate, done)
