import json
import subprocess

import numpy as np
import pytest

from largebatch.hosts.clock import Clock
from largebatch.predictions.files import Predictions
from largebatch.runs import reader
from largebatch.runs.folder import RunFolder
from largebatch.runs.summary import add_to_summary, empty_summary, timings
from largebatch.tasks.kinds import CLASSIFICATION, KINDS
from largebatch.util import UserError


def row(step, accuracy, train_sec=2.0, **more):
    return {
        "step": step, "examples_seen": step * 10, "val_score": accuracy, "val_accuracy": accuracy,
        "images_per_sec": 5.0 * step, "train_sec": train_sec,
    } | more  # fmt: skip


def test_summary_follows_the_rows():
    summary = empty_summary() | {"target_score": 0.8}
    rows = row(1, 0.5), row(2, 0.85), row(3, 0.84), row(4, 0.85)
    improved = [add_to_summary(summary, r, CLASSIFICATION) for r in rows]
    assert improved == [True, True, False, False]
    expected = {
        "best_score": 0.85, "best_val_accuracy": 0.85, "best_step": 2, "final_score": 0.85,
        "final_val_accuracy": 0.85, "steps": 4, "examples_seen": 40,
        "steps_to_target": 2, "examples_to_target": 20, "sec_to_target": 4.0, "images_per_sec": 12.5,
    }  # fmt: skip
    assert {key: summary[key] for key in expected} == expected


def test_no_number_is_written_as_nan(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.write_json("config.json", {"a": 1})
    run.append_row({"step": 1, "train_loss": np.float32("nan"), "grad_norm": float("inf"), "n": np.int64(3)})
    run.append_row({"step": 2, "train_loss": np.float32(0.5), "grad_norm": 1.0, "n": 4})
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0] == {"step": 1, "train_loss": None, "grad_norm": None, "n": 3}
    assert rows[1]["train_loss"] == 0.5


def test_the_clock_adds_sections_up():
    clock = Clock()
    for _ in range(2):
        with clock.measure("train"):
            sum(range(1000))
    with clock.measure("evaluation"):
        pass
    with clock.measure("compile"):
        pass
    assert clock.total() >= clock.seconds["train"] + clock.seconds["evaluation"] > 0
    times = timings(clock, {}, updates=4, examples=40)
    assert times["images_per_sec"] == pytest.approx(40 / clock.seconds["train"])
    assert times["step_time_ms"] == pytest.approx(250 * clock.seconds["train"])
    assert times["compile_sec"] == clock.seconds["compile"]
    before = {"train": 0.0, "evaluation": 0.0, "compile": clock.seconds["compile"]}
    assert timings(clock, before, 4, 40)["compile_sec"] == 0


def test_the_clock_goes_on_after_a_restart():
    clock = Clock()
    with clock.measure("train"):
        pass
    seconds_here = clock.seconds["train"]
    clock.add({"seconds": {"train": 10.0, "evaluation": 2.0}, "total": 15.0})
    assert clock.seconds == {"train": 10.0 + seconds_here, "evaluation": 2.0}
    assert 15 < clock.total() < 16
    again = Clock()
    again.add(clock.saved())
    assert again.seconds == clock.seconds
    assert again.total() >= clock.saved()["total"] - 1e-3


def test_a_damaged_json_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"a": ')
    with pytest.raises(UserError, match=r"config.json cannot be read"):
        RunFolder(tmp_path).read("config.json")


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


def test_a_full_disk_is_named_and_leaves_the_old_file(full_disk):
    run = RunFolder(full_disk / "run")
    run.write_json("config.json", {"a": 1})
    run.append_row({"step": 1})
    (full_disk / "ballast").write_bytes(bytes(200_000))
    with pytest.raises(UserError, match=r"cannot write .*config.json \(No space left on device\)"):
        run.write_json("config.json", {"a": "x" * 300_000})
    assert run.read("config.json") == {"a": 1}
    predictions = Predictions(np.zeros(9), np.random.default_rng(0).random((9, 5000)), np.arange(9))
    with pytest.raises(UserError, match=r"cannot write .*predictions.npz \(No space left on device\)"):
        run.write_outcome(predictions, predictions.parts())

    def fill():
        for step in range(2, 10_000):
            run.append_row({"step": step, "val_loss": 0.5} | {f"metric_{i}": i for i in range(50)})

    with pytest.raises(UserError, match=r"cannot write .* \(No space left on device\)"):
        fill()
    (full_disk / "ballast").unlink()
    run.close()
    rows = reader.read_lines(full_disk / "run" / "metrics.jsonl", [])
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) > 1
    names = sorted(path.name for path in (full_disk / "run").iterdir())
    assert names == ["config.json", "metrics.jsonl"]


def test_only_one_process_trains_in_a_folder(tmp_path):
    first = RunFolder(tmp_path)
    first.lock()
    with pytest.raises(UserError, match="another process is training in"):
        RunFolder(tmp_path).lock()
    first.close()
    assert not list(tmp_path.iterdir())
    with RunFolder(tmp_path) as second:
        second.lock()


def test_rows_are_cut_back_to_a_mark(tmp_path):
    run = RunFolder(tmp_path)
    run.cut_rows(0)
    run.append_row({"step": 1})
    mark = run.rows_bytes()
    run.append_row({"step": 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "tor')
    again = RunFolder(tmp_path)
    again.cut_rows(mark)
    again.append_row({"step": 2})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="has 0 bytes, where the checkpoint's rows have"):
        again.cut_rows(mark)


def test_an_event_after_a_torn_line_stands_on_its_own(tmp_path):
    run = RunFolder(tmp_path)
    run.log_event("start", step=3)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "sto')
    assert reader.read_lines(tmp_path / "events.jsonl", [])[-1]["event"] == "start"
    run.log_event("done")
    assert reader.read_lines(tmp_path / "events.jsonl", [])[-1]["event"] == "done"
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 3


def test_a_score_that_should_be_low():
    summary = empty_summary() | {"target_score": 0.1}
    rows = [row(step, None) | {"val_score": score} for step, score in ((1, 0.3), (2, 0.2), (3, 0.25), (4, 0.05))]
    assert [add_to_summary(summary, r, KINDS["depth"]) for r in rows] == [True, True, False, True]
    found = [summary[name] for name in ("best_score", "best_step", "steps_to_target", "best_val_accuracy")]
    assert found == [0.05, 4, 4, None]
