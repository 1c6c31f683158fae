"""Runs of train.py whose batch changes, and whose devices take local steps."""

import contextlib
import json

import pytest
from conftest import run_script
from test_resume import rows_of

import evaluate
import train
from largebatch.hosts import preemption
from largebatch.optim import noise_scale
from largebatch.util import UserError


def run(config, workdir, **fields):
    """A run with some fields changed: its rows, and its summary."""
    config = config.copy_and_resolve_references()
    with config.ignore_type():
        config.update_from_flattened_dict({name.replace("__", "."): value for name, value in fields.items()})
    summary = train.train_and_evaluate(config, str(workdir))
    return rows_of(workdir), summary


# ---- traces -----------------------------------------------------------------------------------------------


def test_a_trace_file_drives_a_run(small_config, tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text("step,batchsize\n0,64\n1,96\n3,7\n5,640\n")
    fields = {"schedule__scaling": "linear", "schedule__reference_batch_size": 64}
    rows, _ = run(small_config, tmp_path / "run", batch__trace=str(path), **fields)
    assert [row["global_batch_size"] for row in rows] == [96, 640]
    assert [row["examples_seen"] for row in rows] == [64 + 2 * 96, 64 + 2 * 96 + 2 * 7 + 640]
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.015, 0.1])
    path.unlink()  # a run is evaluated without it
    assert evaluate.load_run(tmp_path / "run").config.batch.trace is None
    told = capsys.readouterr().out
    assert f"batch 7 to 640 = 1 to 80 a device in micro-batches of up to 16, from {path}, 4 rows" in told
    assert "learning rate 0.00109375 to 0.1 = 0.01 x 0.1094 to 10 (linear: batch 7 to 640 / reference 64)" in told


def test_a_trace_that_changed_is_refused(small_config, tmp_path, monkeypatch):
    path = tmp_path / "trace.csv"
    path.write_text("step,batchsize\n0,64\n5,128\n")
    monkeypatch.setattr(preemption, "agree", lambda vote=0: (15, vote))
    with pytest.raises(preemption.Stopped):
        run(small_config, tmp_path / "run", batch__trace=str(path))
    path.write_text("step,batchsize\n0,64\n5,129\n")
    with pytest.raises(UserError, match=r"batch.trace: its file changed since the checkpoint was saved"):
        run(small_config, tmp_path / "run", batch__trace=str(path))


# ---- AdaScale and batches that follow the noise -------------------------------------------------------------


@pytest.mark.full
def test_adascale_ends_with_its_scale_invariant_steps(small_config, tmp_path):
    fields = {"schedule__scaling": "adascale", "schedule__reference_batch_size": 80, "optimizer__name": "sgd"}
    # As long as test_resume's run, with which it shares its program.
    rows, summary = run(
        small_config, tmp_path, batch__size=320, optimizer__learning_rate=0.01, train__outer_steps=4, **fields
    )
    assert 3 <= summary["steps"] < 12
    assert all(1 <= row["gain"] <= 4 for row in rows)
    assert rows[-1]["scale_invariant_steps"] >= 12
    total = sum(row["gain"] * (row["step"] - before) for row, before in zip(rows, [0, 3, 6, 9], strict=False))
    assert rows[-1]["scale_invariant_steps"] == pytest.approx(total, rel=1e-5)
    assert rows[-1]["learning_rate"] == pytest.approx(0.01 * rows[-1]["gain"], rel=0.2)  # the last, and a mean
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "done"


@pytest.fixture
def noise_of(monkeypatch):
    """noise_of(f): the noise scale that runs measure is f(measurements)."""

    def arm(function):
        monkeypatch.setattr(noise_scale, "noise_scale", lambda noise: function(int(noise.count)))

    return arm


def test_a_batch_grows_with_the_noise_scale_within_its_limits(small_config, tmp_path, noise_of, capsys):
    noise_of(lambda count: {3: None, 6: 500, 9: 150, 12: 1e9, 15: 1e9, 18: 1e9}.get(count))
    fields = {"batch__auto": True, "batch__size": 80, "batch__max_size": 500, "train__outer_steps": 7}
    rows, _ = run(small_config, tmp_path, **fields)
    assert [row["global_batch_size"] for row in rows] == [80, 80, 160, 160, 320, 500, 500]
    assert rows[-1]["examples_seen"] == 3 * (80 + 80 + 160 + 160 + 320 + 500 + 500)
    assert [row["noise_scale"] for row in rows][1:4] == [500, 150, 1e9]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("outer")]
    assert lines[0].endswith("ms/step")
    assert lines[1].endswith("  noise scale 500")


@pytest.mark.full
def test_a_batch_that_grew_is_resumed_bitwise(small_config, tmp_path, monkeypatch, noise_of):
    noise_of(lambda count: 300 if count else None)
    fields = {"batch__auto": True, "batch__size": 40, "train__outer_steps": 4}
    whole, summary = run(small_config, tmp_path / "whole", **fields)
    assert [row["global_batch_size"] for row in whole] == [40, 80, 160, 160]
    monkeypatch.setattr("largebatch.training.trainer.SECONDS_PER_CALL", 0.0)
    agree, calls = preemption.agree, []

    def stop_every_second_call(vote=0):
        calls.append(1)
        return (15 if len(calls) % 2 == 0 else 0), agree(vote)[1]

    monkeypatch.setattr(preemption, "agree", stop_every_second_call)
    for _ in range(12):
        with contextlib.suppress(preemption.Stopped):
            rows, again = run(small_config, tmp_path / "cut", **fields)
            break
    assert len(calls) > 4
    assert rows == whole
    assert again["params_sha256"] == summary["params_sha256"]


# ---- local steps --------------------------------------------------------------------------------------------

# What they have in common is one program to compile.
LOCAL = {"sync__mode": "local", "sync__every": 3, "sync__optimizer_state": "keep", "train__inner_steps": 4}


@pytest.mark.full
def test_post_local_is_bitwise_synchronous_until_it_starts(small_config, tmp_path):
    small_config.batch.size = 128
    together, _ = run(small_config, tmp_path / "together")
    fields = {"sync__mode": "post_local", "sync__start_step": 3, "sync__every": 2, "train__inner_steps": 3}
    local, summary = run(small_config, tmp_path / "local", **LOCAL | fields)
    assert [local[0][name] for name in together[0]] == list(together[0].values())
    assert local[1]["val_loss"] != together[1]["val_loss"]
    assert [row["noise_scale"] is None for row in local] == [together[0]["noise_scale"] is None, True]
    assert local[0].get("replica_drift") is None
    assert local[1]["replica_drift"] > 0
    assert summary["steps"] == 6
    # By a ring of 8 devices; of the three local steps one is followed by a synchronisation.
    assert together[1]["bytes_sent"] == pytest.approx(2 * 7 / 8 * 4 * summary["params"], rel=1e-4)
    assert together[1]["bytes_sent"] / local[1]["bytes_sent"] == pytest.approx(3, rel=1e-4)


@pytest.mark.full
def test_how_often_one_evaluates_changes_nothing(small_config, tmp_path):
    """Twelve steps with a synchronisation after every fourth: validated after every third or every fourth."""
    fields = LOCAL | {"sync__every": 4, "batch__size": 128}
    shas = set()
    for inner, outer in ((3, 4), (4, 3)):
        times = {"train__inner_steps": inner, "train__outer_steps": outer}
        rows, summary = run(small_config, tmp_path / str(inner), **fields | times)
        shas.add((summary["params_sha256"], rows[-1]["val_loss"]))
    assert len(shas) == 1


@pytest.mark.full
def test_another_number_of_replicas_starts_from_their_mean(small_config, tmp_path, monkeypatch):
    monkeypatch.setattr("largebatch.training.trainer.SECONDS_PER_CALL", 0.0)
    agreed = iter([0, 15])
    monkeypatch.setattr(preemption, "agree", lambda vote=0: (next(agreed), vote))
    with pytest.raises(preemption.Stopped):
        run(small_config, tmp_path, **LOCAL)
    result = run_script("train.py", f"--workdir={tmp_path}")  # by its own config, on two devices
    assert result.returncode == 0, result.stderr
    assert "resuming at step 2" in result.stderr
    assert "devices 2, was 8: the examples come in the same order" in result.stderr
    assert [row["step"] for row in rows_of(tmp_path)] == [4, 8]


@pytest.mark.full
def test_init_from_reaches_every_device_apart(small_config, tmp_path):
    first, _ = run(small_config, tmp_path / "first")
    best = max(first, key=lambda row: row["val_accuracy"])
    fields = {"train__init_from": str(tmp_path / "first"), "optimizer__learning_rate": 1e-30}
    rows, _ = run(small_config, tmp_path / "second", **LOCAL | fields, sync__outer_momentum=0.5)
    assert rows[-1]["val_loss"] == pytest.approx(best["val_loss"], rel=1e-6)
