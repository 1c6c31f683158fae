"""What trackers are told, and that none of them can hold up or change a run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, run_script
from optuna.distributions import CategoricalDistribution
from test_sweep import make_study, run_study
from wandb_records import exit_code_of, rows_of, run_of

import train
from largebatch.runs.display import Reporter
from largebatch.tracking import trackers
from largebatch.tracking.trackers import TrackedRun, Trackers
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
    small_config.batch.size = 128
    small_config.log.tensorboard = False
    small_config.log.wandb = True
    return small_config


def records_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))


def written_rows(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def child() -> int:
    """The process that writes the record of a run in this process."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if b"wandb_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    raise AssertionError("there is no process of wandb's")


# ---- one that fails -----------------------------------------------------------------------------------


class Fails:
    def __init__(self, run):
        self.rows = 0

    def row(self, row):
        self.rows += 1
        raise OSError(28, "No space left on device")

    def went_back(self):
        raise RuntimeError("never reached")

    end = row


def test_one_that_fails_is_named_once_and_the_others_go_on(tmp_path, monkeypatch, caplog):
    class Breaks:
        def __init__(self, run):
            raise ValueError("no\nsuch server")

    monkeypatch.setattr(trackers, "TRACKERS", {"fails": Fails, "tensorboard": trackers.TensorBoard, "new": Breaks})
    config = {"log": {"fails": True, "tensorboard": True, "new": True}}
    tracked = Trackers(TrackedRun(tmp_path, "run", None, config))
    for step in (1, 2):
        tracked.row({"step": step, "loss": 0.5})
    tracked.went_back()
    tracked.end({"status": "done"})
    assert [record.getMessage() for record in caplog.records] == [
        "log.new: no such server; the run goes on without it",
        "log.fails: No space left on device; the run goes on without it",
    ]
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.read_bytes().count(b"loss") == 2


def test_what_is_not_installed_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(trackers, "wandb_is_installed", lambda: False)
    trackers.check_installed({"wandb": False})
    with pytest.raises(UserError, match=r"log\.wandb: wandb is not installed"):
        trackers.check_installed({"wandb": True})


# ---- TensorBoard --------------------------------------------------------------------------------------


def test_tensorboard_events_are_written_without_tensorflow(tmp_path):
    code = (
        "import sys; from pathlib import Path; from largebatch.tracking.trackers import TensorBoard;"
        "from largebatch.tracking.trackers import TrackedRun;"
        "board = TensorBoard(TrackedRun(Path(sys.argv[1]), 'run', None, {}));"
        "board.row({'step': 7, 'val_accuracy': 0.25, 'noise_scale': None}); board.end({});"
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True)
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"val_accuracy" in content
    assert b"noise_scale" not in content


def test_tensorboard_begins_a_file_where_a_run_went_back(tmp_path):
    board = trackers.TensorBoard(TrackedRun(tmp_path, "run", None, {}))
    board.row({"step": 7, "loss": 0.5})
    board.went_back()
    board.row({"step": 3, "loss": 0.6})
    board.end({})
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


# ---- Weights & Biases ---------------------------------------------------------------------------------


def test_wandb_gets_the_whole_run_and_goes_on_in_the_same_record(config, tmp_path, capfd):
    class Stops(Reporter):
        def row(self, row, outer_steps):
            raise KeyboardInterrupt

    run = tmp_path / "first_run"
    with pytest.raises(KeyboardInterrupt):
        train.train_and_evaluate(config, str(run), report=Stops(enabled=False))
    train.train_and_evaluate(config, str(run))
    first, second = records_of(run)
    assert rows_of(first) + rows_of(second) == written_rows(run)
    assert len(written_rows(run)) == config.train.outer_steps
    record = run_of(first)
    assert record.run_id == run_of(second).run_id == json.loads((run / "wandb.json").read_text())["id"]
    assert (record.project, record.display_name, record.run_group) == ("largebatch", "first_run", "")
    settings = {item.key: json.loads(item.value_json) for item in record.config.update}
    assert settings["batch"]["size"] == 128
    assert (exit_code_of(first), exit_code_of(second)) == (1, 0)
    told = [line for line in capfd.readouterr().err.splitlines() if "log.wandb" in line]
    assert len(told) == 2
    assert "No API key configured" in told[0]
    assert f"offline: wandb sync {run}/wandb" in told[0]


@pytest.mark.full
def test_wandb_is_offline_where_its_server_is_not_reached(tmp_path, config, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(trackers, "FINISH_SEC", 120.0)
    tracked = Trackers(TrackedRun(tmp_path, "run", None, config.to_dict()))
    tracked.row({"step": 1, "loss": 0.5})
    tracked.end({"status": "done"})
    (record,) = records_of(tmp_path)
    assert rows_of(record) == [{"step": 1, "loss": 0.5}]
    error = capfd.readouterr().err
    assert "offline: wandb sync" in error
    assert "Traceback" not in error


def test_a_damaged_id_is_named(tmp_path, config, caplog):
    (tmp_path / "wandb.json").write_text("[")
    Trackers(TrackedRun(tmp_path, "run", None, config.to_dict()))
    assert f"log.wandb: {tmp_path}/wandb.json is damaged; the run goes on without it" in caplog.text


@pytest.mark.full
def test_wandb_groups_the_trials_of_a_study(config, tmp_path):
    config.train.outer_steps = 1
    rates = CategoricalDistribution([0.003, 0.01])
    study = tmp_path / "my_study"
    run_study(make_study(config, study, {"optimizer.learning_rate": rates}))
    found = {}
    for trial in ("0000-0", "0001-0"):
        (record,) = records_of(study / "trials" / trial)
        assert rows_of(record) == written_rows(study / "trials" / trial)
        found[trial] = (run_of(record).display_name, run_of(record).run_group)
    assert found == {"0000-0": ("0000-0", "my_study"), "0001-0": ("0001-0", "my_study")}


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # it is left to itself
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_killing_its_process_changes_no_bit_of_a_run(config, tmp_path, monkeypatch, caplog, number):
    monkeypatch.setattr(trackers, "FINISH_SEC", 1.0)

    class Kills(Reporter):
        def row(self, row, outer_steps):
            if row["outer"] == 1:
                self.pid = child()
                os.kill(self.pid, number)

    report = Kills(enabled=False)
    summary = train.train_and_evaluate(config, str(tmp_path / "run"), report=report)
    if number == signal.SIGSTOP:
        os.kill(report.pid, signal.SIGKILL)
    config.log.wandb = False
    alone = train.train_and_evaluate(config, str(tmp_path / "alone"))
    assert summary["params_sha256"] == alone["params_sha256"]
    assert summary["status"] == "done"
    (told,) = [record.getMessage() for record in caplog.records if "log.wandb" in record.getMessage()]
    assert ("exit code -9" if number == signal.SIGKILL else "still sends after 1 s") in told


def test_a_process_that_does_not_read_holds_nothing_up(config, tmp_path):
    run = TrackedRun(tmp_path, "run", None, config.to_dict())
    tracker = trackers.WeightsAndBiases(run)
    os.kill(child(), signal.SIGSTOP)
    begin = time.monotonic()

    def send_rows():
        for step in range(100):
            tracker.row({"step": step, "text": "x" * 100_000})

    with pytest.raises(OSError, match="does not read"):
        send_rows()
    assert time.monotonic() - begin < 5


def test_a_project_that_is_refused_is_named_before_the_run(tmp_path):
    result = run_script(
        "train.py", "--config.log.wandb", "--config.log.wandb_project=a/b", f"--workdir={tmp_path}/run"
    )
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "train.py: error: log.wandb_project: 'a/b'; allowed: 1 to 128 characters, none of / \\ # ? % :"
    ]
    assert not (tmp_path / "run").exists()
