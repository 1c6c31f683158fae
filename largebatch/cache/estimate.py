"""Estimate, from a sample of images, of the time and disk that building a cache will take."""

import concurrent.futures
import contextlib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from largebatch.cache.build import decode_block, rows_per_block
from largebatch.cache.cache import RowLayout
from largebatch.cache.plan import CachePlan, plan_layout
from largebatch.sources.split import SPLITS
from largebatch.tasks.planes import NO_TARGETS, PixelTargets

SAMPLED_IMAGES, SAMPLE_SEC = 4096, 4.0  # the sample ends at either
FIRST_IMAGES = 64  # images of the warm-up, which are not timed
# Bytes of an image's digest, label and id, beside its pixels.
OTHER_BYTES = 32 + 4 + 4 * 24


@dataclass(frozen=True)
class BuildEstimate:
    """Predicted size and build time of a cache.

    Attributes:
      layout: layout of the rows; num_classes: number of classes; targets: see `Source`.
      disk_bytes: size of the cache; free_disk_bytes: free bytes of the disk, None for a bucket.
      images_per_sec: images decoded and written per second by all cores of this host.
      sampled: number of images that were decoded for the estimate.
    """

    layout: RowLayout
    num_classes: int
    disk_bytes: int
    free_disk_bytes: int | None
    images_per_sec: float
    sampled: int
    targets: PixelTargets = NO_TARGETS

    @property
    def num_images(self) -> int:
        """Number of images of all splits."""
        return sum(self.layout.counts.values())

    @property
    def seconds(self) -> float:
        """Seconds that one host takes to build the cache."""
        return self.num_images / self.images_per_sec


def estimate_build(plan: CachePlan, seed: int = 0) -> BuildEstimate:
    """Estimate a build: decode, hash and write some images on all cores as it does, for a few seconds at most.

    The images are written to a file without a name, which leaves nothing behind.

    Raises:
      UserError: an image is damaged or unlike the first.
    """
    layout = plan_layout(plan)
    every = np.concatenate([plan.splits[split] for split in SPLITS])
    num_workers = os.cpu_count() or 1
    images_at_once = num_workers * min(rows_per_block(layout), -(-SAMPLED_IMAGES // num_workers))
    starts = np.random.default_rng(seed).permutation(range(0, len(every), images_at_once))
    parent = plan.folder.parent
    is_local = "://" not in os.fspath(parent)
    scratch_folder = _existing(parent) if is_local else None
    with plan.source.open() as read, _scratch_file(scratch_folder) as scratch:
        decode_block(plan, layout, every[:FIRST_IMAGES], read)  # warm-up: the first images take longer
        begin, done = time.perf_counter(), 0
        with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
            for start in starts:
                chosen = every[start : start + images_at_once]  # consecutive, as the build reads them
                parts = np.array_split(chosen, min(num_workers, len(chosen)))
                for block in pool.map(lambda part: decode_block(plan, layout, part, read), parts):
                    with contextlib.suppress(OSError):  # a full disk, which free_disk_bytes reports
                        scratch.write(block.pixels.data)
                done += len(chosen)
                if done >= SAMPLED_IMAGES or time.perf_counter() - begin > SAMPLE_SEC:
                    break
        seconds = time.perf_counter() - begin
    return BuildEstimate(
        layout=layout,
        num_classes=len(plan.source.class_names),
        targets=plan.source.targets,
        disk_bytes=len(every) * (layout.row_bytes + OTHER_BYTES),
        free_disk_bytes=shutil.disk_usage(scratch_folder).free if is_local else None,
        images_per_sec=done / seconds,
        sampled=done,
    )


def _scratch_file(folder) -> BinaryIO:
    """Open a file without a name in a folder, or the null device where that is impossible, as in a bucket."""
    try:
        return open(os.devnull, "wb") if folder is None else tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError:  # no right to write there: the build will say so
        return open(os.devnull, "wb")


def _existing(folder):
    """Return the folder, or its nearest ancestor that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder
