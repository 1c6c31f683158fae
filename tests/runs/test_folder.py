import fcntl
import json
import subprocess

import numpy as np
import pytest

from largebatch.hosts.clock import Clock
from largebatch.predictions.files import Predictions
from largebatch.runs import reader
from largebatch.runs.folder import InUse, RunFolder
from largebatch.runs.summary import add_to_summary, empty_summary, timings
from largebatch.tasks.kinds import KINDS
from largebatch.util import UserError


def row(step, score, accuracy=None):
    return {
        "step": step,
        "examples_seen": step * 10,
        "val_score": score,
        "val_accuracy": accuracy,
        "images_per_sec": 5.0 * step,
        "train_sec": 2.0,
    }


@pytest.mark.parametrize(
    ("task", "target", "scores", "improved", "best"),
    [
        ("classification", 0.8, (0.5, 0.85, 0.84, 0.85), [True, True, False, False], 2),
        ("depth", 0.1, (0.3, 0.2, 0.25, 0.05), [True, True, False, True], 4),  # low is good
    ],
)
def test_summary_follows_the_rows(task, target, scores, improved, best):
    summary = empty_summary() | {"target_score": target}
    rows = [row(step, score, score) for step, score in enumerate(scores, 1)]
    assert [add_to_summary(summary, one, KINDS[task]) for one in rows] == improved
    expected = {"best_score": scores[best - 1], "best_step": best, "final_score": scores[-1], "steps": 4}
    expected |= {"examples_seen": 40, "images_per_sec": 12.5, "steps_to_target": best}
    expected |= {"examples_to_target": 10 * best, "sec_to_target": 2.0 * best}
    assert {key: summary[key] for key in expected} == expected


def test_the_clock_adds_sections_up_and_resumes_after_a_restart():
    clock = Clock()
    for section in ("train", "train", "evaluation", "compile"):
        with clock.measure(section):
            sum(range(1000))
    assert clock.total() >= clock.seconds["train"] + clock.seconds["evaluation"] > 0
    times = timings(clock, {"compile": clock.seconds["compile"]}, steps=4, examples=40)
    assert times["images_per_sec"] == pytest.approx(40 / clock.seconds["train"])
    assert times["step_time_ms"] == pytest.approx(250 * clock.seconds["train"])
    assert times["compile_sec"] == 0
    seconds_here = clock.seconds["train"]
    clock.add({"seconds": {"train": 10.0, "evaluation": 2.0}, "total": 15.0})
    assert clock.seconds["train"] == 10.0 + seconds_here
    assert 15 < clock.total() < 16


def test_no_number_is_written_as_nan(tmp_path):
    run = RunFolder(tmp_path)
    run.append_row({"step": 1, "train_loss": np.float32("nan"), "grad_norm": float("inf"), "n": np.int64(3)})
    run.append_row({"step": 2, "train_loss": np.float32(0.5)})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, "train_loss": None, "grad_norm": None, "n": 3}, {"step": 2, "train_loss": 0.5}]


@pytest.fixture
def full_disk(tmp_path):
    """A 256 KiB file system."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named_and_leaves_the_old_files(full_disk):
    run = RunFolder(full_disk / "run")
    run.write_json("config.json", {"a": 1})
    (full_disk / "ballast").write_bytes(bytes(200_000))
    with pytest.raises(UserError, match=r"cannot write .*config.json \(No space left on device\)"):
        run.write_json("config.json", {"a": "x" * 300_000})
    assert run.read("config.json") == {"a": 1}
    predictions = Predictions(np.zeros(9), np.random.default_rng(0).random((9, 5000)), np.arange(9))
    with pytest.raises(UserError, match=r"cannot write .*predictions.npz \(No space left on device\)"):
        run.write_outcome(predictions, predictions.parts())

    def fill():
        for step in range(10_000):
            run.append_row({"step": step} | {f"metric_{i}": i for i in range(50)})

    with pytest.raises(UserError, match=r"cannot write .*metrics.jsonl \(No space left on device\)"):
        fill()
    steps = [row["step"] for row in reader.read_lines(full_disk / "run" / "metrics.jsonl", [])]
    assert steps == list(range(len(steps))) != []
    assert sorted(path.name for path in (full_disk / "run").iterdir()) == ["config.json", "metrics.jsonl"]


def test_only_one_process_trains_in_a_folder(tmp_path):
    first = RunFolder(tmp_path)
    first.lock()
    with pytest.raises(InUse, match="another process is training in"):
        RunFolder(tmp_path).lock()
    first.close()
    (tmp_path / f".summary.json.{'0' * 32}.tmp").write_text("")  # left by a killed process
    with RunFolder(tmp_path) as second:
        second.lock()
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert not list(tmp_path.iterdir())


def test_two_processes_try_a_folder_at_the_same_time(tmp_path, monkeypatch):
    """The one that comes second is told so, not that the disk is bad."""
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    flock = fcntl.flock

    def late(*arguments):
        monkeypatch.setattr(fcntl, "flock", flock)
        first.lock()
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(InUse):
        second.lock()
    first.close()


def test_lines_are_cut_back_to_a_mark_and_stand_apart_from_torn_ones(tmp_path):
    run, path = RunFolder(tmp_path), tmp_path / "metrics.jsonl"
    run.cut_rows(0)
    run.append_row({"step": 1})
    mark = run.rows_bytes()
    run.append_row({"step": 2})
    with path.open("a") as file:
        file.write('{"step": 3, "tor')
    run.append_row({"step": 4})
    assert [row["step"] for row in reader.read_lines(path, [])] == [1, 2, 4]
    run.cut_rows(mark)
    assert [row["step"] for row in reader.read_lines(path, [])] == [1]
    path.write_text("")
    with pytest.raises(UserError, match="has 0 bytes, where the checkpoint's rows have"):
        run.cut_rows(mark)


@pytest.mark.parametrize("config", [{"model": {}}, [1]])
def test_a_config_of_no_run_is_named(tmp_path, config):
    run = RunFolder(tmp_path)
    run.begin(config)
    with pytest.raises(UserError, match=r"config\.json is damaged: it is no config of a run$"):
        run.read_config()
