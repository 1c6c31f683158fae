"""Where the time of a run goes."""

import contextlib
import time


class Clock:
    """Seconds spent in named sections, which never overlap, and since the start; goes on after a restart."""

    def __init__(self):
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def saved(self) -> dict:
        """What `add` takes."""
        return {"seconds": dict(self.seconds), "total": self.total()}

    def add(self, saved: dict) -> None:
        """Adds the time that another process spent on the same run."""
        self._started -= saved["total"]
        for section, seconds in saved["seconds"].items():
            self.seconds[section] = self.seconds.get(section, 0.0) + seconds

    @contextlib.contextmanager
    def measure(self, section: str):
        """Adds the time of the block to `section`; the block must wait for its device work."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[section] = self.seconds.get(section, 0.0) + time.perf_counter() - begin

    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started
