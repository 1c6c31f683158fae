"""Checkpoint interval, chosen by the cost of a save and the failure rate of the run.

Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17(9); Daly 2006, "A higher order
estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22(3).
"""

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from largebatch.runs.reader import ENDED, event_time, process_begin

log = logging.getLogger("largebatch")

SEC_WITHOUT_FAILURE = 86_400.0  # assumed time between failures before the first: a day
LONGEST_SEC = 3600.0  # longest interval between checkpoints
TOLD_COST = 0.01  # share of the time that saves take, above which it is logged


@dataclass(frozen=True)
class Failures:
    """Failure statistics of the processes of a run, and the time of a restart."""

    count: int
    mean_sec: float  # mean seconds between two failures
    restart_sec: float  # seconds from the start of a process to its first step

    @classmethod
    def of(cls, events: Sequence[dict], run_sec: float) -> "Failures":
        """Compute the statistics from the lines of events.jsonl, in their order.

        A process failed if it recorded a failure, or if another started after it and it had recorded no end.

        Args:
          run_sec: total seconds that processes of the run have run.
        """
        count, is_open = 0, False
        for event in events:
            name = event.get("event")
            if name == "start":
                count += is_open
                is_open = True
            elif name in ENDED:
                count += name == "failed"
                is_open = False
        mean_sec = max(run_sec, 1.0) / count if count else SEC_WITHOUT_FAILURE
        return cls(count, mean_sec, float(np.median(_restart_seconds(events) or [0.0])))


def _readable(read_events: Callable[[], list[dict]]) -> list[dict]:
    """Read the events; return none, with a warning, if they cannot be read, for no run ends for that."""
    try:
        return read_events()
    except OSError as error:
        log.warning("events.jsonl cannot be read (%s): saving as if no process had failed", error.strerror)
        return []


def _restart_seconds(events: Sequence[dict]) -> list[float]:
    seconds = []
    for start, after in itertools.pairwise(events):
        if start.get("event") == "start" and after.get("event") == "training":
            began, trained = process_begin(start), event_time(after)
            if began and trained:
                seconds.append((trained - began).total_seconds())
    return seconds


class Cadence:
    """Schedule of the saves between two validations.

    Args:
      every_sec: a config's checkpoint.every_sec, seconds or "auto".
    """

    def __init__(self, every_sec: float | str):
        self._every_sec = every_sec
        self._save_seconds: list[float] = []  # durations for which saves of this process blocked training
        self._interval: float | None = None  # None if it has to be chosen anew
        self._is_told = False

    @property
    def save_sec(self) -> float | None:
        """Median seconds that a save takes; None before the first."""
        return float(np.median(self._save_seconds)) if self._save_seconds else None

    def note_save(self, seconds: float) -> None:
        """Record the duration of a save."""
        self._save_seconds.append(seconds)
        self._interval = None

    def interval(self, read_events: Callable[[], list[dict]], run_sec: float) -> float:
        """Return the seconds from one save to the next; log the reason once if saves take 1% of the time or more.

        Args:
          read_events: function that returns the lines of events.jsonl.
          run_sec: total seconds that processes of the run have run.
        """
        if self._every_sec != "auto":
            return self._every_sec
        if self.save_sec is None:
            return 0.0  # the first save shows what one costs
        if self._interval is None:
            self._interval = self._choose(self.save_sec, Failures.of(_readable(read_events), run_sec))
        return self._interval

    def _choose(self, save_sec: float, failures: Failures) -> float:
        interval = best_interval(save_sec, failures.mean_sec)
        if not self._is_told and save_sec >= TOLD_COST * (interval + save_sec):
            self._is_told = True
            seen = f"a failure every {failures.mean_sec:,.0f} s" if failures.count else "no failure yet"
            goodput = 100 * expected_goodput(interval, save_sec, failures)
            saving = f"a save takes {save_sec:.2f} s, {seen}: saving every {interval:,.0f} s"
            log.info("%s; %.1f%% of the time should count", saving, goodput)
        return interval


def best_interval(save_sec: float, mean_failure_sec: float) -> float:
    """Return the seconds of training between two saves that lose the least time: Daly 2006, equation 37.

    Args:
      save_sec: seconds for which a save blocks training.
      mean_failure_sec: mean seconds between two failures.
    """
    if save_sec >= 2 * mean_failure_sec:
        return min(mean_failure_sec, LONGEST_SEC)
    ratio = save_sec / (2 * mean_failure_sec)
    interval = math.sqrt(2 * save_sec * mean_failure_sec) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_sec
    return min(interval, LONGEST_SEC)


def expected_goodput(interval: float, save_sec: float, failures: Failures) -> float:
    """Return the share of wall time that is training and not lost, at these rates: Daly 2006, equation 20.

    Args:
      interval: seconds of training between two saves.
    """
    mean = failures.mean_sec
    if max(failures.restart_sec, interval + save_sec) > 100 * mean:
        return 0.0  # beyond e^100
    per_interval = mean * math.exp(failures.restart_sec / mean) * math.expm1((interval + save_sec) / mean)
    return interval / per_interval if per_interval > 0 else 1.0
