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


@pytest.fixture
def small_images(monkeypatch):
    monkeypatch.setattr(bench, "IMAGE_SHAPE", (16, 16, 3))
    monkeypatch.setattr(bench, "MIN_TIMED_SEC", 0.0)


def test_real_contenders_do_their_work(small_images, monkeypatch):
    monkeypatch.setattr(bench, "MATMUL_SIZE", 64)
    ceiling, flops = bench.matmul_ceiling("float32")
    ours, plain = bench.our_step("ours", "dot", "float32", 16, 2), bench.plain_step(16, "float32")
    times = bench.interleave([ours, plain, ceiling], repeats=1)
    assert list(times) == ["ours", "plain host loop, batch 16", "matrix product"]
    assert flops == 8 * 2 * 64**3
    # 4,096 uint8 images over 8 devices against two float32 images on each of them.
    images = 16 * 16 * 3
    state = 3 * 4 * 422_602  # parameters and two moments
    assert 512 * images + 64 * 4 < ours.bytes_per_device - state < 512 * images + 64 * 4 + 100
    assert 2 * 4 * images < plain.bytes_per_device - state < 2 * 4 * images + 100


def test_step_reports_every_contender(small_images, monkeypatch):
    def contender(name, images):
        made, _ = fake(name, changes=True)
        return made._replace(images_per_round=images)

    monkeypatch.setattr(bench, "our_step", lambda name, conv, dtype, batch, *_: contender(name, batch))
    monkeypatch.setattr(bench, "plain_step", lambda batch, _: contender(f"plain host loop, batch {batch}", batch))
    monkeypatch.setattr(bench, "MATMUL_SIZE", 64)
    result = bench.bench_step(512, 2, "float32")
    names = [row["name"] for row in result["rows"]]
    assert [name for name in names if "micro-batch" in name][1] == "ours, micro-batch 32 (auto)"
    assert "ours, lax convolution, batch 64" in names
    assert "plain host loop, batch 512" in names
    assert names[-1] == "matrix product"
    assert all(np.isfinite(row["gflops"]) and row["gflops"] > 0 for row in result["rows"])
    assert result["rows"][-1]["share_of_ceiling"] == 1.0
    assert result["devices"] == jax.device_count() == 8
    bench.print_step(json.loads(json.dumps(result)))


def test_loop_reads_the_overhead_off_a_run(tmp_path):
    rows = [(10.0, 8.0, 1.0), (20.0, 9.0, 0.9), (40.0, 15.0, 1.0)]
    lines = [{"wall_sec": w, "train_sec": t, "eval_sec": e, "images_per_sec": 100 * w} for w, t, e in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = bench.bench_loop(str(tmp_path))
    assert result["overhead_median"] == pytest.approx((0.01 + 0.2) / 2)
    assert result["overhead_max"] == pytest.approx(0.2)
    assert result["evaluation_share"] == pytest.approx(1.9 / 30)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[0]))
    with pytest.raises(UserError, match="has 1 outer loops; at least 2"):
        bench.bench_loop(str(tmp_path))
    with pytest.raises(UserError, match=r"holds no readable metrics.jsonl"):
        bench.bench_loop(str(tmp_path / "nowhere"))
