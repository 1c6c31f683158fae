"""The devices that a run had over time, and how much of the time brought it on. panels.py says what a panel is."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from largebatch.reports.labels import rounded
from largebatch.reports.study_panels import few_ticks, mark
from largebatch.runs.reader import COUNTED_SECTIONS, ENDED, Run, event_time, process_begin

MAX_RUNS = 8


@dataclass(frozen=True)
class Stay:
    """A process's part of a run: how many devices it had, from when to when, in seconds since the run began."""

    begin: float
    end: float
    devices: float


@dataclass(frozen=True)
class Life:
    """A run from its first start to its last event."""

    stays: list[Stay]
    wall_sec: float
    counted_sec: float  # of the wall time, in which updates and validations were done that were not lost

    @property
    def goodput(self) -> float:
        """The share of the wall time that counted."""
        return self.counted_sec / self.wall_sec if self.wall_sec else 1.0


def life_of(run: Run) -> Life | None:
    """Return a run's life by its events.jsonl and summary.json; None before its first start.

    A process that was killed told no end: it counts until the next one begins.
    """
    starts = [event for event in run.events if event["event"] == "start"]
    if not starts:
        return None
    begins = [process_begin(start) for start in starts]
    last = event_time(run.events[-1])
    ends = [event_time(event) for event in run.events if event["event"] in ENDED]
    stays = []
    for start, begin, latest in zip(starts, begins, [*begins[1:], last], strict=True):
        end = next((end for end in ends if begin <= end <= latest), latest)
        stays.append(Stay(_seconds(begin, begins[0]), _seconds(end, begins[0]), start["devices"]))
    if "seconds" in run.summary:
        counted, until = sum(run.summary["seconds"].get(section, 0.0) for section in COUNTED_SECTIONS), last
    else:  # it still runs, or was killed: what counted is known up to its last start
        counted, until = starts[-1]["counted_sec"], begins[-1]
    return Life(stays, _seconds(until, begins[0]), counted)


def _seconds(time: datetime.datetime, origin: datetime.datetime) -> float:
    return max((time - origin).total_seconds(), 0.0)


def devices_panel(runs: Sequence[Run], labels: Sequence[str]) -> dict | None:
    """The devices of each run over time, where one of them started more than once."""
    lives = [(label, life) for run, label in zip(runs, labels, strict=True) if (life := life_of(run))]
    lives = [(label, life) for label, life in lives if len(life.stays) > 1]
    if not lives or len(lives) > MAX_RUNS:
        return None
    marks, notes = [], []
    for index, (label, life) in enumerate(lives):
        points = []
        for stay in life.stays:
            ends = [(stay.begin, 0), (stay.begin, stay.devices), (stay.end, stay.devices), (stay.end, 0)]
            points += [[rounded(time), devices] for time, devices in ends]
        marks.append(mark("line", label, index, points))
        notes.append(
            f"{label}: {len(life.stays)} starts, {life.goodput:.1%} of {life.wall_sec:,.0f} s brought the run on "
            "(goodput)."
        )
    counts = {stay.devices for _, life in lives for stay in life.stays}
    return {
        "id": "devices",
        "title": "Devices",
        "kind": "xy",
        "note": " ".join([*notes, "A process that was killed is drawn until the next begins."]),
        "x": {"label": "seconds since the first start", "scale": "linear"},
        "y": {
            "label": "devices",
            "scale": "linear",
            "domain": [0, 1.1 * max(counts)],
            "ticks": few_ticks({0, *counts}),
        },
        "marks": marks,
    }
