import datetime
from pathlib import Path

import pytest

from largebatch.reports.groups import group_runs
from largebatch.reports.run_charts import devices_chart, life_of
from largebatch.runs.reader import Run

BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def at(second: float, event: str, **fields) -> dict:
    return {"time": (BEGIN + datetime.timedelta(seconds=second)).isoformat(), "event": event, **fields}


# Killed on 8 devices at some time before 100, asked to stop on 4 at 180, done on 2 at 300.
EVENTS = [
    at(10, "start", devices=8, start_sec=10, counted_sec=0),
    at(110, "start", devices=4, start_sec=10, counted_sec=60),
    at(180, "interrupted"),
    at(210, "start", devices=2, start_sec=5, counted_sec=110),
    at(300, "done"),
]


def make_run(events, **summary) -> Run:
    return Run(Path("run"), {}, summary, [], events, None, [])


def stays_of(run: Run) -> list[tuple]:
    return [(stay.begin, stay.end, stay.devices) for stay in life_of(run).stays]


def test_the_life_of_a_run_that_is_done():
    run = make_run(EVENTS, seconds={"train": 150.0, "evaluation": 30.0, "compile": 40.0})
    assert stays_of(run) == [(0, 100, 8), (100, 180, 4), (205, 300, 2)]
    assert life_of(run).wall_sec == 300
    assert life_of(run).goodput == pytest.approx(0.6)


def test_of_a_run_that_is_not_done_what_counted_is_known_up_to_its_last_start():
    life = life_of(make_run(EVENTS[:-1]))
    assert (life.wall_sec, life.counted_sec) == (205, 110)


def test_a_run_without_events_has_no_life():
    assert life_of(make_run([])) is None


def test_the_chart_draws_devices_over_time_and_tells_the_goodput():
    run = make_run(EVENTS, seconds={"train": 150.0, "evaluation": 30.0})
    chart = devices_chart(group_runs([run]))
    assert "run: 3 starts, 60.0% of 300 s brought the run on (goodput)." in chart.note
    points = [(row["x"], row["y"]) for row in chart.rows]
    assert points[:5] == [(0, 0), (0, 8), (100, 8), (100, 0), (100, 0)]
    assert points[-3:] == [(205, 2), (300, 2), (300, 0)]


def test_runs_that_started_once_need_no_chart():
    assert devices_chart(group_runs([make_run(EVENTS[:1])])) is None
