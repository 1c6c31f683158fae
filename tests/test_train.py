import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import ROOT, assert_one_line_error, make_folder, on_devices, run_script

import train
from build import ProgramCache
from largebatch.config import dicts
from largebatch.hosts import replicas
from largebatch.runs.folder import jsonable
from largebatch.runs.lifecycle import Diverged
from largebatch.training import trainer
from largebatch.training.trainer import Trainer

ROW = [
    "step",
    "outer",
    "examples_seen",
    "epoch",
    "global_batch_size",
    "learning_rate",
    "train_loss",
    "train_accuracy",
    "grad_norm",
    "skipped_updates",
    "noise_scale",
    "bytes_sent",
    "val_score",
    "val_loss",
    "val_accuracy",
    "val_accuracy_top5",
    "val_examples",
    "images_per_sec",
    "step_time_ms",
    "train_sec",
    "eval_sec",
    "compile_sec",
    "wall_sec",
    "mfu",
    "device_memory_peak_bytes",
]
SUMMARY = [
    "status",
    "best_val_accuracy",
    "best_step",
    "final_val_accuracy",
    "target_accuracy",
    "steps_to_target",
    "examples_to_target",
    "sec_to_target",
    "images_per_sec",
    "params_sha256",
    "devices",
    "platform",
    "params",
    "flops_per_image",
    "versions",
    "git_commit",
]


def rows_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def small_flags(session_cache, **changed_fields):
    values = {
        "augment.cache_dir": session_cache,
        "dataset.num_examples": 100,
        "dataset.image_size": 16,
        "train.inner_steps": 3,  # one program with the commands of other tests
        "train.outer_steps": 1,
        **changed_fields,
    }
    return [f"--config.{name}={value}" for name, value in values.items()]


def test_a_run_writes_the_folder_that_design_promises(small_config, tmp_path):
    small_config.batch.size = 100
    small_config.augment.storage = "on_device"
    summary = train.train_and_evaluate(small_config, str(tmp_path))
    rows = rows_of(tmp_path)
    assert [list(row) for row in rows] == [ROW, ROW]
    assert [(row["step"], row["outer"], row["examples_seen"]) for row in rows] == [(3, 1, 300), (6, 2, 600)]
    assert rows[1]["epoch"] == 600 / 640
    assert rows[0]["val_examples"] == 10
    assert rows[0]["images_per_sec"] == pytest.approx(300 / rows[0]["train_sec"])
    assert rows[0]["compile_sec"] > 0 == rows[1]["compile_sec"]
    stored = json.loads((tmp_path / "summary.json").read_text())
    assert stored == jsonable(summary)
    assert set(SUMMARY) <= set(stored)
    assert (stored["status"], stored["devices"], stored["platform"]) == ("done", 8, "cpu")
    assert stored["best_val_accuracy"] == max(row["val_accuracy"] for row in rows)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(json.dumps(small_config.to_dict()))
    with np.load(tmp_path / "predictions.npz", allow_pickle=False) as predictions:
        assert np.mean(predictions["logits"].argmax(1) == predictions["labels"]) == stored["best_val_accuracy"]
        assert len(set(predictions["ids"])) == 10
    assert list((tmp_path / "tensorboard").iterdir())


@pytest.mark.full
def test_runs_are_repeatable_and_depend_on_the_seed(small_config, tmp_path):
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 2**32 - 1)):
        small_config.seed = seed
        digests.append(train.train_and_evaluate(small_config, str(tmp_path / name))["params_sha256"])
    assert digests[0] == digests[1] != digests[2]


def test_the_length_of_a_call_changes_nothing(small_config, tmp_path, monkeypatch):
    small_config.train.inner_steps = 4
    small_config.batch.size = 128
    digests = []
    for name, seconds in (("short", 0.0), ("long", 1e9)):
        monkeypatch.setattr(trainer, "SECONDS_PER_CALL", seconds)
        summary = train.train_and_evaluate(small_config, str(tmp_path / name))
        digests.append((summary["params_sha256"], [row["train_loss"] for row in rows_of(tmp_path / name)]))
    assert digests[0] == digests[1]


def test_one_compilation_serves_every_call(small_config, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "SECONDS_PER_CALL", 0.0)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    small_config.optimizer.learning_rate = 0.0123
    calls = []
    run = Trainer.run

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


def test_the_target_stops_the_run_and_is_recorded(small_config, tmp_path):
    small_config.train.target_accuracy = 0.01
    small_config.train.outer_steps = 50
    summary = train.train_and_evaluate(small_config, str(tmp_path))
    first = next(row for row in rows_of(tmp_path) if row["val_accuracy"] >= 0.01)
    assert rows_of(tmp_path)[-1] == first
    assert summary["steps_to_target"] == summary["steps"] == first["step"]
    assert summary["examples_to_target"] == first["examples_seen"]
    assert summary["sec_to_target"] == pytest.approx(sum(row["train_sec"] for row in rows_of(tmp_path)))


@pytest.mark.full
def test_damage_by_the_last_update_is_seen_in_validation(small_config, tmp_path):
    small_config.optimizer.name = "sgd"
    small_config.optimizer.learning_rate = 1e30
    small_config.train.inner_steps = small_config.train.outer_steps = 1
    with pytest.raises(Diverged, match="the validation loss after update 1 is"):
        train.train_and_evaluate(small_config, str(tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["best_step"]) == ("diverged", None)


@pytest.mark.full
def test_a_loss_that_is_no_number_ends_the_run_as_diverged(small_config, tmp_path):
    small_config.optimizer.name = "sgd"
    small_config.optimizer.learning_rate = 1e30
    message = r"loss of update 2 is (nan|inf) \(learning rate 1e\+30\); first in the output of layer Conv_[1-3]$"
    with pytest.raises(Diverged, match=message):
        train.train_and_evaluate(small_config, str(tmp_path))
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "diverged"
    with pytest.raises(Diverged, match="that diverged; change the config and give a new folder"):
        train.train_and_evaluate(small_config, str(tmp_path))


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


@pytest.mark.full
def test_a_finished_run_says_so_and_another_config_is_refused(tmp_path, session_cache):
    flags = [*small_flags(session_cache), "--workdir", tmp_path / "run"]
    first = run_script("train.py", *flags)
    assert first.returncode == 0, first.stderr
    assert str(tmp_path / "run") in first.stdout
    assert "best val accuracy" in first.stdout
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    again = run_script("train.py", *flags)
    assert again.returncode == 0
    assert "finished" in again.stderr + again.stdout
    other = run_script("train.py", *flags, "--config.seed=3", "--config.optimizer.name=sgd")
    assert_one_line_error(
        other, "another config", "optimizer.name: 'sgd' here, 'lamb' there", "seed: 3 here, 0 there"
    )
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


BAD_RUNS = {
    "batch above 8N": ({"batch.size": 641}, ["batch.size: 641", "from 1 to 640"]),
    "batch 0": ({"batch.size": 0}, ["batch.size: 0", "an integer >= 1"]),
    "negative batch": ({"batch.size": -5}, ["batch.size: -5"]),
    "unknown optimizer": ({"optimizer.name": "lamp"}, ["optimizer.name: 'lamp'", "did you mean 'lamb'?"]),
    "no such path": ({"dataset.name": "x", "dataset.path": "/nowhere.zip"}, ["/nowhere.zip does not exist"]),
    "platform that is not here": ({"devices.platform": "tpu"}, ["devices.platform: 'tpu' has no device"]),
    "platform without a plugin": ({"devices.platform": "gpu"}, ["devices.platform: 'gpu' has no device"]),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_bad_input_is_one_line_and_writes_no_run(name, tmp_path, session_cache):
    fields, words = BAD_RUNS[name]
    result = run_script("train.py", *small_flags(session_cache, **fields), "--workdir", tmp_path / "run")
    lines = [line for line in result.stderr.splitlines() if line.startswith("train.py: error:")]
    assert result.returncode == 1, result.stderr
    assert len(lines) == 1
    assert all(word in lines[0] for word in words), lines[0]
    assert "Traceback" not in result.stderr
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


def test_a_workdir_that_cannot_be_written(tmp_path, session_cache):
    (tmp_path / "file").write_text("")
    result = run_script("train.py", *small_flags(session_cache), "--workdir", tmp_path / "file" / "run")
    assert_one_line_error(result, "--workdir: cannot write", "Not a directory")


@pytest.mark.full
def test_profile_writes_a_trace(tmp_path, session_cache):
    flags = small_flags(session_cache, **{"train.inner_steps": 4})
    result = run_script("train.py", *flags, "--workdir", tmp_path / "run", "--profile")
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


@pytest.mark.full
def test_plain_lines_when_not_on_a_terminal(tmp_path, session_cache):
    result = run_script("train.py", *small_flags(session_cache), "--workdir", tmp_path / "run")
    lines = result.stdout.splitlines()
    assert sum(line.startswith("outer ") for line in lines) == 1
    assert "\x1b" not in result.stdout
    assert "images/s" in result.stdout


FROZEN = "20240101-000000"
STARTED_IN_ONE_SECOND = f"""
import runpy, sys, time
time.strftime = lambda *_: "{FROZEN}"
sys.path.insert(0, {str(ROOT)!r})
sys.argv[0] = {str(ROOT / "train.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.full
def test_runs_started_in_the_same_second_have_folders_of_their_own(tmp_path, session_cache):
    command = [sys.executable, "-c", STARTED_IN_ONE_SECOND, *small_flags(session_cache)]
    both = [
        subprocess.Popen(
            command, cwd=tmp_path, env=on_devices(2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    shown = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], shown
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert folder.name.startswith(f"synthetic-{FROZEN}-")
        assert sum(f"runs/{folder.name}" in out for out, _ in shown) == 1
        assert json.loads((folder / "summary.json").read_text())["status"] == "done"


@pytest.mark.full
def test_nobody_reading_the_output_is_no_reason_to_stop(tmp_path, session_cache):
    flags = small_flags(session_cache, **{"train.outer_steps": 6})
    command = [sys.executable, "train.py", *flags, "--workdir", str(tmp_path / "run")]
    process = subprocess.Popen(
        command, cwd=ROOT, env=on_devices(2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(120) == 0, stderr
    assert "BrokenPipe" not in stderr
    assert len(rows_of(tmp_path / "run")) == 6


@pytest.mark.full
def test_a_progress_bar_on_a_terminal(tmp_path, session_cache):
    parent, child = pty.openpty()
    command = [sys.executable, "train.py", *small_flags(session_cache), "--workdir", str(tmp_path / "run")]
    environment = on_devices(2) | {"TERM": "xterm", "COLUMNS": "150"}
    process = subprocess.Popen(command, cwd=ROOT, stdout=child, stderr=child, stdin=child, env=environment)
    os.close(child)
    shown = b""
    try:
        while block := os.read(parent, 4096):
            shown += block
    except OSError:
        pass  # what Linux answers when the other side has closed
    os.close(parent)
    assert process.wait() == 0, shown
    assert b"3/3 updates" in shown
    assert b"outer    1/1" in shown
    assert b"best val accuracy" in shown


def test_another_cache_or_coordinator_is_still_the_same_run(small_config, tmp_path):
    plain = small_config.to_dict()
    one, other = dicts.identity(plain), dicts.identity(plain)
    other["augment.shift"] = 1
    assert dicts.difference(one, other, ("here", "there"))
    small_config.augment.cache_dir, small_config.augment.storage = "/elsewhere", "streamed"
    small_config.dataset.max_image_pixels += 1
    small_config.devices.coordinator_address = "a:1"
    small_config.log.tensorboard = False
    assert dicts.identity(small_config.to_dict()) == one


@pytest.mark.full
def test_one_host_given_by_config(tmp_path, session_cache):
    fields = {"devices.coordinator_address": "127.0.0.1:29517", "devices.num_hosts": 1, "devices.host_index": 0}
    result = run_script("train.py", *small_flags(session_cache, **fields), "--workdir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    fields["devices.host_index"] = 1
    result = run_script("train.py", *small_flags(session_cache, **fields), "--workdir", tmp_path / "other")
    assert_one_line_error(result, "devices.host_index: 1; allowed: 0 to devices.num_hosts - 1")


def test_processes_that_jax_does_not_join_are_stopped(tmp_path, session_cache):
    flags = [*small_flags(session_cache), "--workdir", tmp_path / "run"]
    result = run_script("train.py", *flags, env={"OMPI_COMM_WORLD_SIZE": "4"})
    assert_one_line_error(result, "one of 4 processes", "OMPI_COMM_WORLD_SIZE=4", "devices.coordinator_address")


def test_help():
    result = run_script("train.py", "--help")
    assert result.returncode == 0
    assert "python train.py" in result.stdout
    assert "--workdir" in result.stdout
    assert "--config.FIELD" in result.stdout


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.full), (signal.SIGTERM, 143)]
)
def test_a_signal_saves_and_a_start_goes_on(number, code, tmp_path, session_cache):
    flags = small_flags(session_cache, **{"train.outer_steps": 100_000})
    command = [sys.executable, "train.py", *flags, "--workdir", str(tmp_path / "run")]
    reached = 0
    for start in range(2):
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=on_devices(2),
        )  # fmt: skip
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("outer ") and int(line.split()[1].split("/")[0]) >= reached + 2:
                break
        (how_long,) = (number for number, line in enumerate(lines) if " of training, at " in line)
        assert re.fullmatch(r"about [\d.]+ (min|h) of training, at [\d,]+ images/s\n", lines[how_long])
        assert lines[how_long + 1].startswith("outer ")  # the first row comes after it
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == code, stderr
        assert "Traceback" not in stderr
        assert ("resuming at update" in stderr) == (start == 1)
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["status"] == "interrupted"
        rows = rows_of(tmp_path / "run")
        assert [row["outer"] for row in rows] == list(range(1, len(rows) + 1))
        assert len(rows) >= reached + 2
        reached = len(rows)


@pytest.mark.full
def test_runs_of_other_virtual_shards_share_no_data(small_config, tmp_path):
    shared = ProgramCache()
    train.train_and_evaluate(small_config, str(tmp_path / "before"), shared=shared)
    small_config.batch.virtual_shards = 11  # which 8 devices hold unequally
    alone = train.train_and_evaluate(small_config, str(tmp_path / "alone"), shared=ProgramCache())
    after = train.train_and_evaluate(small_config, str(tmp_path / "after"), shared=shared)
    assert after["params_sha256"] == alone["params_sha256"]


def test_a_signal_before_training_has_begun_leaves_at_once(tmp_path, session_cache):
    flags = small_flags(session_cache)
    run, output = tmp_path / "run", {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "train.py", *flags, "--workdir", str(run)]
    process = subprocess.Popen(command, cwd=ROOT, **output)
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
    # One update takes a minute, so nothing but the watching thread can answer.
    flags = small_flags(session_cache, **{"dataset.num_examples": 2000, "dataset.image_size": 96})
    process = subprocess.Popen(
        [sys.executable, "train.py", *flags, "--workdir", str(tmp_path / "run")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    events = tmp_path / "run" / "events.jsonl"
    while not events.exists():
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
