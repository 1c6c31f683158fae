"""Clock of a run, which continues over restarts."""

import collections
import contextlib
import time


class Clock:
    """Clock of the seconds since the start of a run, and in named sections that never overlap.

    `seconds` holds the seconds of each section by its name.
    """

    def __init__(self):
        self._made = self._started = time.perf_counter()
        self.seconds: collections.Counter[str] = collections.Counter()

    def saved(self) -> dict:
        """Return the times so far as plain JSON, for `add` after a restart."""
        return {"seconds": dict(self.seconds), "total": self.total()}

    def add(self, saved: dict) -> None:
        """Add the time that an earlier process spent on the same run."""
        self._started -= saved["total"]
        self.seconds.update(saved["seconds"])

    @contextlib.contextmanager
    def measure(self, section: str):
        """Add the time of the block to `section`; the block must wait for its device work."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[section] += time.perf_counter() - begin

    def total(self) -> float:
        """Return the seconds since the clock was made, plus those of earlier processes."""
        return time.perf_counter() - self._started

    def since_made(self) -> float:
        """Return the seconds since the clock was made, of this process alone."""
        return time.perf_counter() - self._made
