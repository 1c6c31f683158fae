"""Caches of images that follow from their numbers, which note what is decoded; for builds in several processes.

    python tests/data/numbered.py FOLDER LOG

builds the cache of 120 images in FOLDER, in files of 6, and notes in LOG what it decodes.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from largebatch.data import cache, cache_build
from largebatch.data.cache_build import CachePlan
from largebatch.data.dataset import SPLITS, dataset_of_files


def plan_of(folder: Path, num: int, size: int, decoded: Callable[[int], None]) -> CachePlan:
    """Return the plan of a cache of images; `decoded` is called with the number of each that is decoded."""

    def decode(examples):
        for example in examples:
            decoded(int(example))
            yield np.random.default_rng(example).integers(0, 256, (size, size, 3), np.uint8)

    ids = [f"{number:06d}" for number in range(num)]
    dataset = dataset_of_files("numbers", ids, np.arange(num) % 2, ["a", "b"], decode)
    parts = np.split(np.arange(num), [num * 8 // 10, num * 9 // 10])
    return CachePlan.of(folder, dataset, dict(zip(SPLITS, parts, strict=True)))


def build(plan: CachePlan) -> cache.Cache:
    """Return the cache of a plan, built by this process alone."""
    cache_build.build_files(plan)
    cache_build.finish_cache(plan)
    return cache.open_cache(plan.folder)


def main() -> None:
    """Build a cache slowly."""
    folder, log = map(Path, sys.argv[1:])
    cache.MIN_FILE_BYTES = 6 * 8 * 8 * 3
    file = log.open("a")

    def decoded(number: int) -> None:
        time.sleep(0.01)
        file.write(f"{number}\n")
        file.flush()

    build(plan_of(folder, 120, 8, decoded))


if __name__ == "__main__":
    main()
