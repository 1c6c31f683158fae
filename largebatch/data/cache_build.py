"""Build of a cache: images decoded and written with bounded memory, by one process or by hosts together.

All cores decode blocks of rows, which are written in order to images files. A file gets its name when it is whole,
after its *part record*, a hidden file with the CRCs and sums of its rows. So a build that was killed resumes after
the files that are there, and several hosts or processes can build one cache together. An unfinished cache is kept
in .NAME.build beside the cache's own folder.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import io
import itertools
import json
import logging
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from largebatch import util
from largebatch.data.cache import (
    CACHE_VERSION,
    MANIFEST,
    Cache,
    DamagedCache,
    RowLayout,
    images_file,
    open_cache,
    seal,
)
from largebatch.data.dataset import SPLITS, Dataset
from largebatch.hosts import collectives
from largebatch.util import UserError

log = logging.getLogger("largebatch")

# Bytes that one thread decodes before they are written. From 4 MiB on, NumPy asks for huge pages, which are faster.
BLOCK_BYTES = 2**23
SECONDS_BETWEEN_REPORTS = 10.0
OTHER_BYTES = 4 + 4 + 4 * 24  # of an image's CRC, label and id, beside its pixels
SHOWN_PAIRS = 3


class Block(NamedTuple):
    """Consecutive decoded rows."""

    pixels: np.ndarray  # [rows, H, W, C]
    crcs: list[int]  # CRC-32 of each row
    sums: list[int]  # `channel_sums` of the training images


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """Content and folder of a cache that is to be built."""

    folder: Path  # of the finished cache
    dataset: Dataset  # the examples of all rows
    layout: RowLayout

    @classmethod
    def of(cls, folder: Path, dataset: Dataset, splits: dict[str, np.ndarray]) -> "CachePlan":
        """Plan the cache of a data set.

        Args:
          splits: indices into the data set's examples, for each of SPLITS; examples may be left out.
        """
        dataset = dataset.take(np.concatenate([splits[split] for split in SPLITS]))
        counts = {split: len(splits[split]) for split in SPLITS}
        return cls(folder, dataset, RowLayout.of(counts, dataset.image_shape, dataset.dtype))

    @property
    def disk_bytes(self) -> int:
        """Size of the cache on disk, nearly."""
        return self.layout.num_rows * (self.layout.row_bytes + OTHER_BYTES)

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
        return self.build_folder / f".{images_file(number)}.json"


# ---- on all hosts ------------------------------------------------------------------------------------


def build_together(plan: CachePlan | None) -> None:
    """Build a cache where it is missing; hosts share the work if all of them see the same folder. Collective.

    Args:
      plan: plan of the cache; None on a host that has it.
    Raises:
      UserError: on every host, if one of them fails; see `build_files`.
    """
    rank, num_builders = (jax.process_index(), jax.process_count()) if _all_see_one_folder(plan) else (0, 1)
    collectives.agreed(lambda: build_files(plan, rank, num_builders), plan is not None)
    collectives.agreed(lambda: finish_cache(plan), plan is not None and rank == 0)


def _all_see_one_folder(plan: CachePlan | None) -> bool:
    """Return True if all hosts are to build a cache, and find the mark that host 0 leaves. Collective."""
    token, is_marked = collectives.gather_text(uuid.uuid4().hex)[0], plan is not None and collectives.is_primary()
    mark = plan and plan.folder.parent / f".{plan.folder.name}.{token}.tmp"  # which `util.remove_stale_in` removes

    def leave_mark() -> None:
        with util.writing(plan.folder, "augment.cache_dir"):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    collectives.agreed(leave_mark, is_marked)
    seen = collectives.gather_text(str(plan is not None and mark.exists()))
    if is_marked:
        util.remove(mark)
    return set(seen) == {"True"}


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
        plan.build_folder.mkdir(parents=True, exist_ok=True)
        util.remove_stale_in(plan.folder.parent)
        util.remove_stale_in(plan.build_folder)
        missing, num_files = plan.missing, plan.layout.num_files
        _refuse_small_disk(plan, missing)
        if missing:
            kept = f", after {num_files - len(missing)} of {num_files} files of a build before"
            log.info("decoding %s%s", plan.dataset.description, kept if len(missing) < num_files else "")
            _write_files(plan, [number for number in missing if number % num_builders == rank])
    except (OSError, UserError) as error:
        with contextlib.suppress(OSError):  # it has files, also those that another process is writing
            plan.build_folder.rmdir()
        if isinstance(error, UserError):
            raise
        if not plan.folder.exists():
            raise _cannot_write(plan, error) from error


def decode_block(plan: CachePlan, rows: range) -> Block:
    """Decode some rows in this thread; the sums are those of training images.

    Raises:
      UserError: an image is damaged, or not like the first one.
    """
    pixels = np.empty((len(rows), *plan.layout.image_shape), plan.layout.dtype)
    plan.dataset.fill(np.arange(rows.start, rows.stop), pixels, num_threads=1)
    num_train = max(plan.layout.counts["train"] - rows.start, 0)
    return Block(pixels, [zlib.crc32(image) for image in pixels], channel_sums(pixels[:num_train]))


def channel_sums(pixels: np.ndarray) -> list[int]:
    """Return exact sums of the pixels [N, H, W, C] by channel, and behind them those of their squares.

    Lines are added first, all channels at once, which is much quicker than channel by channel.
    """
    num_images, height, width, channels = pixels.shape
    lines = pixels.reshape(num_images, height, width * channels)
    number_type = np.uint32 if pixels.dtype == np.uint8 and height <= 2**16 else np.uint64
    sums = np.add.reduce(lines, axis=1, dtype=number_type)
    square_sums = np.einsum("nlx,nlx->nx", lines, lines, dtype=number_type)
    return np.stack([sums, square_sums]).reshape(2, -1, channels).sum(axis=1, dtype=np.uint64).ravel().tolist()


def _write_files(plan: CachePlan, numbers: list[int]) -> None:
    """Decode on all cores, a few blocks ahead of the one that is written; log the progress now and then."""
    num_workers, size = os.cpu_count() or 1, max(1, BLOCK_BYTES // plan.layout.row_bytes)
    rows_of = {number: plan.layout.rows_of_file(number) for number in numbers}
    done, total, started = 0, sum(map(len, rows_of.values())), time.monotonic()
    reported = started
    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        blocks = (rows[begin : begin + size] for rows in rows_of.values() for begin in range(0, len(rows), size))
        decoded = _in_order(pool, functools.partial(decode_block, plan), blocks, ahead=2 * num_workers)
        try:
            for number, rows in rows_of.items():
                _write_file(plan, number, itertools.islice(decoded, -(-len(rows) // size)))
                done, now = done + len(rows), time.monotonic()
                if done == total or now - reported > SECONDS_BETWEEN_REPORTS:
                    reported, rate = now, done / max(now - started, 1e-9)
                    left = f", {(total - done) / rate:,.0f} s left" if done < total else ""
                    log.info("decoded %s", f"{done:,} of {total:,} images, {rate:,.0f} a second{left}")
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


def _write_file(plan: CachePlan, number: int, blocks: Iterator[Block]) -> None:
    """Write an images file and its part record; it gets its name last."""
    all_crcs, all_sums = [], []
    with util.replacing(plan.images_path(number)) as temporary:
        with temporary.open("wb") as file:
            for block in blocks:
                file.write(block.pixels.data)
                all_crcs += block.crcs
                all_sums.append(block.sums)
        record = {"crcs": all_crcs, "sums": np.sum(np.array(all_sums, object), axis=0).tolist()}
        _write_whole(plan.record_path(number), json.dumps(record).encode())


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: it appears whole or not at all."""
    with util.replacing(path) as temporary:
        temporary.write_bytes(content)


def _refuse_small_disk(plan: CachePlan, missing: list[int]) -> None:
    """Raise UserError, before hours of work, if the disk lacks room for the missing files of all hosts."""
    needed = sum(len(plan.layout.rows_of_file(number)) for number in missing) * plan.layout.row_bytes
    free = shutil.disk_usage(plan.build_folder).free
    if needed > free:
        raise UserError(
            f"augment.cache_dir: {plan.folder.parent} has {free / 1e9:,.2f} GB free; the cache needs "
            f"{needed / 1e9:,.2f} GB more: make room, or give another folder"
        )


def _cannot_write(plan: CachePlan, error: OSError) -> UserError:
    """Return the error for a disk that fails or is full; it names what is kept."""
    text = f"augment.cache_dir: cannot write {plan.folder} ({error.strerror or error})"
    with contextlib.suppress(OSError):
        num_files = plan.layout.num_files
        if written := num_files - len(plan.missing):
            text += f"; {written} of {num_files} files are kept in {plan.build_folder}: start again to go on"
    return UserError(text)


# ---- the last stage ------------------------------------------------------------------------------------


def finish_cache(plan: CachePlan) -> None:
    """Write labels, ids, CRCs and the manifest of a cache whose images files are there, and give it its name.

    Raises:
      UserError: all masks are of one class; a failing disk.
    """
    if plan.folder.exists():  # another process was first, with the same content
        return
    if plan.missing:  # a network file system is late to show the files of other hosts
        build_files(plan)
    try:
        manifest = _write_arrays(plan)
        _write_whole(plan.build_folder / MANIFEST, seal(manifest))
        plan.build_folder.rename(plan.folder)
        for path in plan.folder.glob(".*"):  # part records, and files of killed processes or slower ones
            util.remove(path)
    except OSError as error:
        if not plan.folder.exists():
            raise _cannot_write(plan, error) from error
        with contextlib.suppress(OSError):  # another process was first, with the same content
            util.remove(plan.build_folder)
    log.info("cached in %s", plan.folder)
    with contextlib.suppress(DamagedCache):  # which whoever reads the images will report
        _warn_of_equal_images(open_cache(plan.folder))


def _write_arrays(plan: CachePlan) -> dict:
    """Write ids, labels and CRCs of all rows; return the manifest."""
    dataset, layout, sha256 = plan.dataset, plan.layout, {}
    records = [_read_record(plan.record_path(number)) for number in range(layout.num_files)]
    arrays = {
        "ids": dataset.ids,
        "labels": dataset.labels,
        "crc32": np.array([crc for record in records for crc in record["crcs"]], np.uint32),
    }
    for name, array in arrays.items():
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        _write_whole(plan.build_folder / f"{name}.npy", buffer.getvalue())
        sha256[name] = hashlib.sha256(buffer.getvalue()).hexdigest()
    height, width, _ = layout.image_shape
    sums = np.sum(np.array([record["sums"] for record in records], object), axis=0)  # Python's integers are exact
    num_pixels = layout.counts["train"] * height * width
    _refuse_one_class(plan, sums, num_pixels)
    mean, mean_square = sums.reshape(2, -1) / num_pixels
    variance = np.maximum(mean_square - mean**2, 1.0).astype(float)
    return {
        "cache_version": CACHE_VERSION,
        "build": uuid.uuid4().hex,  # so that no two builds have the same manifest; see `cache.discard_cache`
        "built": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "source": dataset.description,
        "counts": layout.counts,
        "class_names": dataset.class_names,
        "image_shape": list(layout.image_shape),
        "image_dtype": layout.dtype.name,
        "rows_per_file": layout.rows_per_file,
        "mean": mean.tolist(),
        "std": np.sqrt(variance).tolist(),
        "sha256": sha256,
        **dataset.targets.record(),
    }


def _read_record(path: Path) -> dict:
    """Read a part record; remove a damaged one, so that the next start decodes its images again.

    Raises:
      UserError: it is damaged.
    """
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        path.unlink()
        raise UserError(f"augment.cache_dir: {path} was damaged and is removed; start again to go on") from error


def _refuse_one_class(plan: CachePlan, sums: np.ndarray, num_pixels: int) -> None:
    """Raise UserError if all pixels of the training masks are of one class: then nothing can be learned."""
    targets, channels = plan.dataset.targets, plan.layout.image_shape[-1]
    mask = channels - targets.planes
    if not targets.classes or sums[mask] ** 2 != num_pixels * sums[channels + mask]:
        return
    util.remove(plan.build_folder)
    raise UserError(
        f"dataset: all pixels of the training masks of {plan.dataset.description} are of class "
        f"{targets.classes[sums[mask] // num_pixels]!r}; allowed: two classes or more"
    )


def _warn_of_equal_images(cache: Cache) -> None:
    """Warn of images with the same pixels; a pair in two splits makes the validation too optimistic.

    Only images of equal CRC-32 are read again and compared, so no other hash is kept.
    """
    crcs, layout, pairs, seen = cache.array("crc32"), cache.layout, [], {}
    values, counts = np.unique(crcs, return_counts=True)
    image = np.empty((1, *layout.image_shape), layout.dtype)
    for row in np.flatnonzero(np.isin(crcs, values[counts > 1])):
        cache.fill(np.array([row]), image, num_threads=1)
        before = seen.setdefault(hashlib.sha256(image).digest(), row)
        if before != row:
            pairs.append((before, row))
    if not pairs:
        return
    split_of, ids = np.repeat(SPLITS, list(layout.counts.values())), cache.array("ids")
    across = [pair for pair in pairs if split_of[pair[0]] != split_of[pair[1]]]
    shown = [f"{ids[one]} = {ids[other]}" for one, other in (across or pairs)[:SHOWN_PAIRS]]
    shown += ["..."] * (len(across or pairs) > SHOWN_PAIRS)
    text = "dataset: images with the same pixels as another one: %d, in another split: %d (%s)"
    log.warning(text, len(pairs), len(across), ", ".join(shown))
