"""A run that is stopped anywhere ends with the numbers of one that was not."""

import json
import signal

import numpy as np
import pytest

import train
from largebatch import preemption, trainer

WALL_CLOCK = {"images_per_sec", "step_time_ms", "train_sec", "eval_sec", "compile_sec", "wall_sec"}
SUMMARY_WALL_CLOCK = {"images_per_sec", "images_per_sec_by_outer", "train_sec", "sec_to_target", "seconds"}


def rows_of(workdir) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in WALL_CLOCK} for row in rows]


def summary_of(workdir) -> dict:
    """summary.json without what depends on the clock."""
    summary = json.loads((workdir / "summary.json").read_text())
    return {k: v for k, v in summary.items() if k not in SUMMARY_WALL_CLOCK}


def predictions_of(workdir) -> dict:
    with np.load(workdir / "predictions.npz", allow_pickle=False) as file:
        return {name: file[name].tolist() for name in file}


def assert_same_run(one, other):
    assert rows_of(one) == rows_of(other)
    assert summary_of(one) == summary_of(other)
    assert predictions_of(one) == predictions_of(other)


@pytest.fixture
def config(small_config, monkeypatch):
    """A call per update; mini-batches that cross the epoch; everything that has a state."""
    monkeypatch.setattr(trainer, "SECONDS_PER_CALL", 0.0)
    small_config.batch.size = 150
    small_config.train.inner_steps = 4
    small_config.train.outer_steps = 3
    return small_config


@pytest.fixture
def stop_at(monkeypatch):
    """stop_at(n, number): the n-th call of the inner loop from now on ends with a signal."""

    def arm(calls, number=signal.SIGTERM):
        left = [calls]

        def agree(vote=0):
            left[0] -= 1
            return (int(number) if left[0] == 0 else 0), vote

        monkeypatch.setattr(preemption, "agree", agree)

    return arm


@pytest.mark.parametrize("batch_size", [150, "full"])
def test_a_run_stopped_after_every_call_is_bitwise_the_same(config, tmp_path, stop_at, batch_size):
    config.batch.size = batch_size
    whole = train.train_and_evaluate(config, str(tmp_path / "whole"))
    stops = 0
    while True:
        stop_at(2)
        try:
            summary = train.train_and_evaluate(config, str(tmp_path / "cut"))
            break
        except preemption.Stopped as stopped:
            assert stopped.exit_code == 143
            assert json.loads((tmp_path / "cut" / "summary.json").read_text())["status"] == "interrupted"
            stops += 1
    assert stops >= 5
    assert summary["params_sha256"] == whole["params_sha256"]
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
