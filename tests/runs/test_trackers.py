"""Trackers get every row, and none of them can hold up or change a run."""

import gc
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT, run_script

import train
from largebatch.runs import trackers
from largebatch.runs.display import Reporter
from largebatch.runs.trackers import TrackedRun, Trackers
from largebatch.util import UserError


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    """No key and no network, whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


@pytest.fixture
def config(small_config):
    small_config.log.tensorboard = False
    small_config.log.wandb = True
    return small_config


def records_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))


def assert_has(record: Path, *texts: str) -> None:
    """Wait until these texts are in the file that W&B keeps of a run, which may still be written at its end."""
    deadline = time.monotonic() + 30
    while not all(text.encode() in record.read_bytes() for text in texts):
        assert time.monotonic() < deadline, record
        time.sleep(0.1)


class Fails:
    """A tracker whose every call fails."""

    def __init__(self, run):
        pass

    def row(self, row):
        raise OSError(28, "No space left on device")

    finish = row


class Breaks:
    """A tracker that cannot be made."""

    def __init__(self, run):
        raise ValueError("no\nsuch server")


def test_one_that_fails_is_named_once_and_the_others_go_on(tmp_path, monkeypatch, caplog):
    classes = {"fails": Fails, "tensorboard": trackers.TensorBoard, "new": Breaks}
    monkeypatch.setattr(trackers, "TRACKERS", classes)
    tracked = Trackers(TrackedRun(tmp_path, "abc", "run", {"log": dict.fromkeys(classes, True)}))
    for step in (3, 7, 7):  # it rolled back
        tracked.row({"step": step, "loss": 0.5, "noise_scale": None})
    tracked.finish({"status": "done"})
    assert [record.getMessage() for record in caplog.records] == [
        "log.new: no such server; the run goes on without it",
        "log.fails: No space left on device; the run goes on without it",
    ]
    contents = [path.read_bytes() for path in sorted((tmp_path / "tensorboard").iterdir())]
    assert [content.count(b"loss") for content in contents] == [2, 1]  # a new file hides the old rows
    assert not any(b"noise_scale" in content for content in contents)


def test_what_is_not_installed_is_refused_before_the_run(config, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"log\.wandb: wandb is not installed"):
        train.train_and_evaluate(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# ---- Weights & Biases ---------------------------------------------------------------------------------


def services() -> list[int]:
    """Return the pids of wandb's own processes, once there is one."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
        pids = [int(pid) for pid in itertools.chain.from_iterable(children)]
        if found := [pid for pid in pids if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()]:
            return found
        time.sleep(0.05)
    raise AssertionError("there is no process of wandb's")


def test_wandb_gets_the_whole_run_and_resumes_in_the_same_record(config, tmp_path, caplog):
    class Stops(Reporter):
        def row(self, row, outer_steps):
            raise KeyboardInterrupt

    run = tmp_path / "first_run"
    with pytest.raises(KeyboardInterrupt):
        train.train_and_evaluate(config, str(run), report=Stops(enabled=False))
    time.sleep(1)  # the names of W&B's folders have the second
    train.train_and_evaluate(config, str(run))
    records = records_of(run)
    run_id = json.loads((run / "run.json").read_text())["id"]
    assert [path.name for path in records] == [f"run-{run_id}.wandb"] * 2
    losses = [json.loads(line)["val_loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record, loss in zip(records, losses, strict=True):
        assert_has(record, "first_run", "largebatch", '"num_examples":', json.dumps(loss))
    told = [message for message in caplog.messages if "log.wandb" in message]
    line = f"log.wandb: no API key is configured; offline: wandb sync {run}/wandb/offline-run-* sends it"
    assert told == [line] * 2


def test_its_process_killed_changes_no_bit_of_a_run(config, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trackers, "FINISH_SEC", 1.0)

    class Kills(Reporter):
        def row(self, row, outer_steps):
            if row["outer"] == 1:
                for pid in services():
                    os.kill(pid, signal.SIGKILL)

    summary = train.train_and_evaluate(config, str(tmp_path / "run"), report=Kills(enabled=False))
    config.log.wandb = False
    alone = train.train_and_evaluate(config, str(tmp_path / "alone"))
    assert (summary["params_sha256"], summary["status"]) == (alone["params_sha256"], "done")
    told = [message for message in caplog.messages if message.startswith("log.wandb") and "offline" not in message]
    assert len(told) == 1
    for process in gc.get_objects():  # wandb does not wait for a killed one, of which Python warns at exit
        if isinstance(process, subprocess.Popen):
            process.wait(10)


FROZEN = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, "tests/runs")
from largebatch.runs import trackers
from test_trackers import services
trackers.FINISH_SEC = 1.0
run = trackers.TrackedRun(Path(sys.argv[1]), "abc", "run", {"log": {"wandb": True, "wandb_project": "p"}})
tracked = trackers.Trackers(run)
tracked.row({"step": 0})
time.sleep(5)
for pid in services():
    os.kill(pid, signal.SIGSTOP)
begin = time.monotonic()
for step in range(100):
    tracked.row({"step": step, "text": "x" * 100_000})
assert time.monotonic() - begin < 5
tracked.finish({"status": "done"})
"""


@pytest.mark.full
def test_a_frozen_process_holds_up_neither_the_run_nor_its_exit(tmp_path):
    result = run_script("-c", FROZEN, tmp_path, env={"PYTHONPATH": str(ROOT / "tests")}, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "still sends after 1 s" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.full
def test_wandb_is_offline_where_its_server_is_not_reached(tmp_path, config, monkeypatch, caplog, capfd):
    """And the trials of a study are a group."""
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(trackers, "INIT_SEC", 10.0)  # of a busy machine's wandb without a server, too
    monkeypatch.setattr(trackers, "FINISH_SEC", 120.0)
    trial = tmp_path / "my_study" / "trials" / "0000"
    trial.mkdir(parents=True)
    (trial / "trial.json").write_text("{}")
    tracked = Trackers(TrackedRun(trial, "abc", "0000", config.to_dict()))
    tracked.row({"step": 1, "val_loss": 0.59375})
    tracked.finish({"status": "done"})
    (record,) = records_of(trial)
    assert_has(record, "my_study", "0.59375")
    (told,) = [message for message in caplog.messages if "log.wandb" in message]
    assert "offline: wandb sync" in told
    assert "Traceback" not in capfd.readouterr().err
