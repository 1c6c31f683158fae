import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import ROOT, assert_one_line_error, make_folder, on_devices, run_script, small_flags

import train
from build import ProgramCache
from largebatch.config import dicts
from largebatch.hosts import replicas
from largebatch.runs.folder import jsonable
from largebatch.runs.lifecycle import Diverged
from largebatch.training import trainer
from largebatch.training.trainer import Trainer
from largebatch.util import UserError

ROW = """
    step outer examples_seen epoch global_batch_size learning_rate train_loss train_accuracy grad_norm
    skipped_steps noise_scale bytes_sent val_score val_loss val_accuracy val_accuracy_top5 val_examples
    images_per_sec step_time_ms train_sec eval_sec compile_sec wall_sec mfu device_memory_peak_bytes
"""
SUMMARY = """
    status best_val_accuracy best_step final_val_accuracy target_accuracy steps_to_target examples_to_target
    sec_to_target images_per_sec params_sha256 devices platform params flops_per_image versions git_commit
"""


def rows_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def start(*arguments, **options) -> subprocess.Popen:
    """Starts train.py; its output goes to pipes."""
    command = [sys.executable, "train.py", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": on_devices(2)}
    return subprocess.Popen(command, cwd=ROOT, **(pipes | options))


# ---- runs of this process ---------------------------------------------------------------------------


def test_a_run_writes_the_folder_that_design_promises(small_config, tmp_path):
    summary = train.train_and_evaluate(small_config, str(tmp_path))
    rows = rows_of(tmp_path)
    assert [list(row) for row in rows] == [ROW.split(), ROW.split()]
    assert [(row["step"], row["outer"], row["examples_seen"]) for row in rows] == [(3, 1, 1920), (6, 2, 3840)]
    assert rows[1]["epoch"] == 3840 / 640
    assert rows[0]["val_examples"] == 10
    assert rows[0]["images_per_sec"] == pytest.approx(1920 / rows[0]["train_sec"])
    assert rows[0]["compile_sec"] > 0 == rows[1]["compile_sec"]
    stored = json.loads((tmp_path / "summary.json").read_text())
    assert stored == jsonable(summary)
    assert set(SUMMARY.split()) <= set(stored)
    assert (stored["status"], stored["devices"], stored["platform"]) == ("done", 8, "cpu")
    assert stored["best_val_accuracy"] == max(row["val_accuracy"] for row in rows)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(json.dumps(small_config.to_dict()))
    with np.load(tmp_path / "predictions.npz", allow_pickle=False) as predictions:
        assert np.mean(predictions["logits"].argmax(1) == predictions["labels"]) == stored["best_val_accuracy"]
        assert len(set(predictions["ids"])) == 10
    assert list((tmp_path / "tensorboard").iterdir())


def test_runs_are_repeatable_and_depend_on_the_seed_and_not_on_the_length_of_calls(
    small_config, tmp_path, monkeypatch
):
    found, small_config.batch.size = [], 128
    for number, (seed, seconds_per_call) in enumerate(((0, 0.0), (0, 1e9), (2**32 - 1, 1e9))):
        monkeypatch.setattr(trainer, "SECONDS_PER_CALL", seconds_per_call)
        small_config.seed = seed
        summary = train.train_and_evaluate(small_config, str(tmp_path / str(number)))
        found.append((summary["params_sha256"], [row["train_loss"] for row in rows_of(tmp_path / str(number))]))
    assert found[0] == found[1] != found[2]


def test_one_compilation_serves_every_call(small_config, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "SECONDS_PER_CALL", 0.0)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    small_config.optimizer.learning_rate = 0.0123
    calls, run = [], Trainer.run

    def counted(self, count):
        before = len(compiled)
        result = run(self, count)
        calls.append(len(compiled) - before)
        return result

    monkeypatch.setattr(Trainer, "run", counted)
    train.train_and_evaluate(small_config, str(tmp_path), shared=ProgramCache())
    jax.monitoring.clear_event_listeners()
    assert len(compiled) > 0
    assert calls == [0] * 6


@pytest.mark.full
def test_runs_of_other_virtual_shards_share_no_data(small_config, tmp_path):
    shared = ProgramCache()
    train.train_and_evaluate(small_config, str(tmp_path / "before"), shared=shared)
    small_config.batch.virtual_shards = 11  # which 8 devices hold unequally
    alone = train.train_and_evaluate(small_config, str(tmp_path / "alone"), shared=ProgramCache())
    after = train.train_and_evaluate(small_config, str(tmp_path / "after"), shared=shared)
    assert after["params_sha256"] == alone["params_sha256"]


def test_the_target_stops_the_run_and_is_recorded(small_config, tmp_path):
    small_config.train.target_accuracy = 0.01
    small_config.train.outer_steps = 50
    summary = train.train_and_evaluate(small_config, str(tmp_path))
    rows = rows_of(tmp_path)
    first = next(row for row in rows if row["val_accuracy"] >= 0.01)
    assert rows[-1] == first
    assert summary["steps_to_target"] == summary["steps"] == first["step"]
    assert summary["examples_to_target"] == first["examples_seen"]
    assert summary["sec_to_target"] == pytest.approx(sum(row["train_sec"] for row in rows))


@pytest.mark.full
def test_a_loss_that_is_no_number_ends_the_run_as_diverged(small_config, tmp_path):
    small_config.optimizer.name = "sgd"
    small_config.optimizer.learning_rate = 1e30
    small_config.train.outer_steps = 1
    layer = r"loss of step 2 is (nan|inf) \(learning rate 1e\+30\); first in the output of layer Conv_[1-3]$"
    with pytest.raises(Diverged, match=layer):
        train.train_and_evaluate(small_config, str(tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["best_step"]) == ("diverged", None)
    with pytest.raises(Diverged, match="that diverged; change the config and give a new folder"):
        train.train_and_evaluate(small_config, str(tmp_path / "run"))
    small_config.train.inner_steps = 1  # of which the loss itself says nothing
    with pytest.raises(Diverged, match="the validation loss after step 1 is"):
        train.train_and_evaluate(small_config, str(tmp_path / "one"))


def test_replicas_that_differ_stop_the_run(small_config, tmp_path, monkeypatch):
    run = Trainer.run

    def corrupt_one_replica(self, count):
        result = run(self, count)
        bias = self.state.params["Dense_0"]["bias"]
        shards = [shard.data for shard in bias.addressable_shards]
        shards[5] = shards[5].at[0, 3].add(1e-7)
        self.state.params["Dense_0"]["bias"] = replicas.stack(shards)
        return result

    monkeypatch.setattr(Trainer, "run", corrupt_one_replica)
    with pytest.raises(RuntimeError, match=r"parameters differ between replicas: devices \[5\]"):
        train.train_and_evaluate(small_config, str(tmp_path))
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_another_cache_or_coordinator_is_still_the_same_run(small_config):
    one = dicts.identity(small_config.to_dict())
    small_config.augment.cache_dir, small_config.augment.storage = "/elsewhere", "streamed"
    small_config.dataset.max_image_pixels += 1
    small_config.devices.coordinator_address = "a:1"
    small_config.log.tensorboard = False
    assert dicts.identity(small_config.to_dict()) == one
    small_config.augment.shift = 1
    assert dicts.identity(small_config.to_dict()) != one


def test_a_folder_that_is_not_given_is_a_new_one(small_config):
    """Also in the same second."""
    folders = {train.new_workdir(small_config) for _ in range(2)}
    assert len(folders) == 2
    assert all(folder.startswith("runs/synthetic-") for folder in folders)


# ---- the command ------------------------------------------------------------------------------------


@pytest.mark.full
def test_what_a_run_prints_and_that_it_is_not_repeated(tmp_path, session_cache):
    flags = [*small_flags(session_cache, **{"train.inner_steps": 4}), "--workdir", tmp_path / "run"]
    first = run_script("train.py", *flags, "--profile")
    assert first.returncode == 0, first.stderr
    shown = run_script("train.py", "--help").stdout
    assert all(words in shown for words in ("python train.py", "--workdir", "--config.FIELD"))
    assert [line.split()[0] for line in first.stdout.splitlines() if "train loss" in line] == ["outer"]
    for words in (str(tmp_path / "run"), "best val accuracy", "images/s"):
        assert words in first.stdout
    assert "\x1b" not in first.stdout  # it is not a terminal
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    again = run_script("train.py", *flags)
    assert again.returncode == 0
    assert "finished" in again.stderr
    other = run_script("train.py", *flags, "--config.seed=3", "--config.optimizer.name=sgd")
    differences = "optimizer.name: 'sgd' here, 'lamb' there", "seed: 3 here, 0 there"
    assert_one_line_error(other, "another config", *differences)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("fields", "workdir", "message"),
    [
        ({"batch.size": 641}, "run", "batch.size: 641; allowed: an integer from 1 to 640"),
        ({"dataset.name": "x", "dataset.path": "/nowhere.zip"}, "run", "dataset.path: /nowhere.zip does not exist"),
        ({}, "file/run", "--workdir: cannot write .*Not a directory"),
    ],
)
def test_bad_input_is_named_and_writes_no_run(small_config, fields, workdir, message, tmp_path):
    (tmp_path / "file").write_text("")
    small_config.update_from_flattened_dict(fields)
    with pytest.raises(UserError, match=rf"^{message}[^\n]*$"):
        train.train_and_evaluate(small_config, str(tmp_path / workdir))
    assert not (tmp_path / "run").exists()


def test_a_corrupt_image_stops_before_anything_is_written(tmp_path):
    folder = make_folder(tmp_path / "images", {"a": 10, "b": 10})
    (folder / "a" / "a_7.png").write_bytes(b"\x89PNG broken")
    flags = [f"--config.dataset.path={folder}", "--config.dataset.name=mine", "--workdir", tmp_path / "run"]
    result = run_script("train.py", *flags, f"--config.augment.cache_dir={tmp_path / 'cache'}")
    assert result.returncode == 1
    assert "a/a_7.png: damaged image" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()
    assert not [path for path in tmp_path.glob("cache/*") if path.name != "xla"]


@pytest.mark.full
def test_nobody_reading_the_output_is_no_reason_to_stop(tmp_path, session_cache):
    flags = small_flags(session_cache, **{"train.outer_steps": 6})
    process = start(*flags, "--workdir", tmp_path / "run")
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(120) == 0, stderr
    assert "BrokenPipe" not in stderr
    assert len(rows_of(tmp_path / "run")) == 6


# ---- signals ----------------------------------------------------------------------------------------


def test_a_signal_saves_and_a_start_with_the_folder_alone_resumes(tmp_path, session_cache):
    flags, reached = small_flags(session_cache, **{"train.outer_steps": 100_000}), 0
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = start(*([] if reached else flags), "--workdir", tmp_path / "run")  # then by its own config
        for line in process.stdout:
            if line.startswith("outer ") and int(line.split()[1].split("/")[0]) >= reached + 2:
                break
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == code, stderr
        assert "Traceback" not in stderr
        assert ("resuming at step" in stderr) == (reached > 0)
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
        rows = rows_of(tmp_path / "run")
        assert [row["outer"] for row in rows] == list(range(1, len(rows) + 1))
        assert len(rows) >= reached + 2
        reached = len(rows)


def test_a_signal_before_training_has_begun_leaves_at_once(tmp_path, session_cache):
    run = tmp_path / "run"
    process = start(*small_flags(session_cache), "--workdir", run)
    while not (run / "lock").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=2)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "SIGINT: leaving; training had not begun"
    assert not (run / "events.jsonl").exists()


@pytest.mark.full
def test_a_second_signal_leaves_at_once(tmp_path, session_cache):
    # One step takes a minute, so nothing but the watching thread can answer.
    flags = small_flags(session_cache, **{"dataset.num_examples": 2000, "dataset.image_size": 96})
    process = start(*flags, "--workdir", tmp_path / "run", env=os.environ)
    while not (tmp_path / "run" / "events.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=5)
    assert process.returncode == 143
    assert "a second signal leaves at once" in stderr
