"""Work on ranges of examples, by all cores."""

import concurrent.futures
import itertools
import os
from collections.abc import Callable, Iterator

import numpy as np


def run_ranges(work: Callable[[int, int], None], length: int, num_threads: int | None = None) -> None:
    """Runs `work(begin, end)` over pieces of range(length); first error wins.

    Args:
      num_threads: how many at once; None takes one per core.
    """
    num_workers = num_threads or os.cpu_count() or 1
    edges = np.linspace(0, length, 4 * num_workers + 1).astype(int).tolist()
    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        futures = [pool.submit(work, a, b) for a, b in itertools.pairwise(edges) if a < b]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def iterate_batches(length: int, size: int) -> Iterator[slice]:
    """Consecutive slices that cover range(length)."""
    for begin in range(0, length, size):
        yield slice(begin, min(begin + size, length))
