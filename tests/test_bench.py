import json

import jax
import numpy as np
import pytest

import bench
from largebatch import UserError


def fake(name, changes):
    state = {"x": np.zeros(3), "rounds": 0}
    before = state["x"].copy()

    def run(rounds):
        state["rounds"] += rounds
        if changes:
            state["x"] = state["x"] + 1

    return bench.Contender(name, run, lambda: bench.check_changed(name, before, state["x"]), 10, 5), state


def test_work_that_did_not_happen_is_not_timed(monkeypatch):
    monkeypatch.setattr(bench, "MIN_TIMED_SEC", 0.0)
    with pytest.raises(UserError, match="idle: parameters did not change"):
        bench.interleave([fake("idle", changes=False)[0]], repeats=1)
    times = bench.interleave([fake("busy", changes=True)[0], fake("other", changes=True)[0]], repeats=4)
    assert {name: len(values) for name, values in times.items()} == {"busy": 4, "other": 4}


def test_ratio_pairs_the_repeats():
    contenders = [
        bench.Contender(name, None, None, images, 0) for name, images in (("ours (auto)", 20), ("plain", 10))
    ]
    times = {"ours (auto)": [1.0, 2.0, 4.0], "plain": [2.0, 2.0, 2.0]}
    assert bench.ratio(times, contenders, "(auto)", "plain") == 2.0


def test_step_reports_every_contender(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "MIN_TIMED_SEC", 0.0)
    monkeypatch.setattr(bench, "IMAGE_SHAPE", (16, 16, 3))
    monkeypatch.setattr(bench, "PLAIN_BATCH_SIZES", (8, 16))
    monkeypatch.setattr(bench, "MICRO_BATCH_SIZES", (2,))
    monkeypatch.setattr(bench, "MATMUL_SIZE", 64)
    result = bench.bench_step(16, 1, "float32")
    names = [row["name"] for row in result["rows"]]
    assert any("(auto)" in name for name in names)
    assert any("lax convolution" in name for name in names)
    assert any("plain host loop, batch 16" in name for name in names)
    assert names[-1] == "matrix product"
    assert all(np.isfinite(row["gflops"]) and row["gflops"] > 0 for row in result["rows"])
    assert result["devices"] == jax.device_count() == 8
    bench.print_step(json.loads(json.dumps(result)))
