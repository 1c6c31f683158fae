import datetime
import math

import numpy as np
import pytest

from largebatch.runs import cadence
from largebatch.runs.cadence import Cadence, Failures
from largebatch.runs.folder import RunFolder


def simulated_goodput(interval, save_sec, failures, needed_sec=2e5) -> float:
    """Training that counts over wall time, with failures drawn one by one, also while a process starts."""
    rng = np.random.default_rng(0)
    wall = done = 0.0
    until_failure = rng.exponential(failures.mean_sec)
    while done < needed_sec:
        if until_failure >= interval + save_sec:
            done += interval
            wall += interval + save_sec
            until_failure -= interval + save_sec
            continue
        wall += until_failure
        until_failure = rng.exponential(failures.mean_sec)
        while until_failure < failures.restart_sec:
            wall += until_failure
            until_failure = rng.exponential(failures.mean_sec)
        wall += failures.restart_sec
        until_failure -= failures.restart_sec
    return done / wall


@pytest.mark.parametrize(("save_sec", "mean_sec", "restart_sec"), [(0.5, 200.0, 20.0), (5.0, 400.0, 0.0)])
def test_the_interval_is_the_best_of_the_model_and_the_model_that_of_a_simulation(save_sec, mean_sec, restart_sec):
    failures = Failures(3, mean_sec, restart_sec)
    best = cadence.best_interval(save_sec, mean_sec)
    assert best == pytest.approx(math.sqrt(2 * save_sec * mean_sec), rel=0.1)  # Young's
    grid = np.geomspace(best / 10, best * 10, 2001)
    goodput = [cadence.expected_goodput(interval, save_sec, failures) for interval in grid]
    assert grid[np.argmax(goodput)] == pytest.approx(best, rel=0.02)
    for interval in (best / 3, best, best * 3):
        expected = cadence.expected_goodput(interval, save_sec, failures)
        assert simulated_goodput(interval, save_sec, failures) == pytest.approx(expected, rel=0.03)


def at(second: float, event: str, **fields) -> dict:
    time = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=second)
    return {"time": time.isoformat(timespec="milliseconds"), "event": event, "start_sec": 0.0, **fields}


def test_failures_are_read_from_events():
    events = [
        *(at(0, "start"), at(10, "training"), at(50, "rollback")),  # killed
        *(at(115, "start", start_sec=15), at(120, "training"), at(130, "failed")),
        *(at(140, "start"), at(170, "training"), at(180, "interrupted")),
        at(190, "start"),
        at(200, "start"),  # after one that was killed; runs
    ]
    assert Failures.of(events, 300.0) == Failures(3, 100.0, 20.0)
    assert Failures.of([], 300.0) == Failures(0, cadence.SEC_WITHOUT_FAILURE, 0.0)


def test_a_run_saves_more_often_once_it_has_failed(tmp_path, caplog):
    run = RunFolder(tmp_path)
    run.log_event("start", step=0)
    calm = Cadence("auto")
    for seconds in (0.5, 0.1, 0.1):
        calm.note_save(seconds)
    with caplog.at_level("INFO", "largebatch"):
        assert calm.interval(run.events, 2.0) == pytest.approx(math.sqrt(2 * 0.1 * 86_400), rel=0.01)
        run.log_event("start", step=0)
        assert calm.interval(run.events, 2.0) > 100  # until the next save
        assert caplog.text == ""  # such saves cost 0.1% of the time
        calm.note_save(0.1)
        assert calm.interval(run.events, 2.0) < 1
        calm.note_save(0.1)
        calm.interval(run.events, 2.0)
    assert caplog.text.count("a save takes 0.10 s, a failure every 2 s: saving every 1 s; 71.6% of the time") == 1


def test_a_given_interval_is_kept():
    assert Cadence(7.5).interval(lambda: pytest.fail("reads events"), 2.0) == 7.5


def test_saves_that_cost_more_than_there_is_between_failures():
    assert cadence.best_interval(30.0, 10.0) == 10.0
    assert cadence.best_interval(100.0, 1e9) == cadence.LONGEST_SEC


def test_failures_without_end_are_no_arithmetic_error():
    assert cadence.expected_goodput(1.0, 1.0, Failures(9, 0.001, 100.0)) == 0


def test_events_that_cannot_be_read_end_no_run(caplog):
    def read():
        raise OSError(5, "Input/output error")

    told = Cadence("auto")
    told.note_save(0.1)
    assert told.interval(read, 2.0) > 100
    assert "events.jsonl cannot be read (Input/output error)" in caplog.text
