"""Clock of a run, which continues over restarts."""

import contextlib
import time


class Clock:
    """Clock of the seconds since the start of a run, and in named sections that never overlap.

    `seconds` holds the seconds of each section by its name.
    """

    def __init__(self):
        self._made = self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def saved(self) -> dict:
        """Return the times so far as plain JSON, for `add` after a restart."""
        return {"seconds": dict(self.seconds), "total": self.total()}

    def add(self, saved: dict) -> None:
        """Add the time that an earlier process spent on the same run."""
        self._started -= saved["total"]
        for section, seconds in saved["seconds"].items():
            self._add_to(section, seconds)

    @contextlib.contextmanager
    def measure(self, section: str):
        """Add the time of the block to `section`; the block must wait for its device work."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._add_to(section, time.perf_counter() - begin)

    def total(self) -> float:
        """Return the seconds since the clock was made, plus those of earlier processes."""
        return time.perf_counter() - self._started

    def since_made(self) -> float:
        """Return the seconds since the clock was made, of this process alone."""
        return time.perf_counter() - self._made

    def _add_to(self, section: str, seconds: float) -> None:
        self.seconds[section] = self.seconds.get(section, 0.0) + seconds
