"""What building the cache of a data set will take, told from a sample before anything is built."""

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
FIRST_IMAGES = 64  # that are not timed
# Beside the pixels, of an image: its digest, label and id.
OTHER_BYTES = 32 + 4 + 4 * 24


@dataclass(frozen=True)
class BuildEstimate:
    """What a cache will be.

    Attributes:
      layout: of its rows; num_classes: that it has; targets: see `Source`.
      disk_bytes: that it takes; free_disk_bytes: that there are, None for a bucket.
      images_per_sec: decoded and written by all cores of this host.
      sampled: images that were decoded for it.
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
        """Images of all splits."""
        return sum(self.layout.counts.values())

    @property
    def seconds(self) -> float:
        """That one host takes."""
        return self.num_images / self.images_per_sec


def estimate_build(plan: CachePlan, seed: int = 0) -> BuildEstimate:
    """Decodes, digests and writes some images on all cores, as the build does, for a few seconds at most.

    They are written to a file without a name, which leaves nothing behind.

    Raises:
      UserError: one of them is damaged or unlike the first.
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
        decode_block(plan, layout, every[:FIRST_IMAGES], read)  # whatever the first images take longer
        begin, done = time.perf_counter(), 0
        with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
            for start in starts:
                chosen = every[start : start + images_at_once]  # side by side, as the build reads them
                parts = np.array_split(chosen, min(num_workers, len(chosen)))
                for block in pool.map(lambda part: decode_block(plan, layout, part, read), parts):
                    with contextlib.suppress(OSError):  # a full disk, which free_disk_bytes tells
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
    """A file without a name in a folder; where none can be, as in a bucket, what takes no time to write."""
    try:
        return open(os.devnull, "wb") if folder is None else tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError:  # no right to write there: the build will say so
        return open(os.devnull, "wb")


def _existing(folder):
    """The folder, or the nearest around it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder
