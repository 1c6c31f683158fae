"""Sweeps: trials are runs, share programs, fail each by itself; and the command, on one host and on pods."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import optuna
import pytest
from conftest import ROOT, assert_one_line_error, on_devices, run_script, small_flags
from made_studies import databases_in_memory, make_study, space_of, train_study

import build
import train
from build import ProgramCache
from largebatch.hosts import preemption
from largebatch.runs import reader
from largebatch.runs.folder import RunFolder
from largebatch.runs.progress import RunProgress
from largebatch.studies.queue import PRUNERS, Counts, TrialQueue
from largebatch.studies.space import Space
from largebatch.studies.workers import environments
from largebatch.util import UserError

RATE = "optimizer.learning_rate"
SPACE_FILE = """
def suggest(trial):
    trial.suggest_categorical("optimizer.name", ["lamb", "sgd"])
    trial.suggest_categorical("optimizer.learning_rate", [0.003, 0.01])
"""


@pytest.fixture
def config(small_config):
    small_config.train.outer_steps = 2
    small_config.batch.size = 128  # 16 a device, as in other tests, which so share their programs
    with databases_in_memory():
        yield small_config


@pytest.fixture
def compilations():
    """Counts the programs that are compiled, or read from the cache of compiled programs."""
    events = []

    def listen(name, *_, **__):
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax._src.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.full
def test_trials_of_one_shape_share_one_compilation_and_are_the_runs_that_train_would_do(
    config, tmp_path, compilations
):
    cache = ProgramCache()
    train_study(make_study(config, tmp_path / "first", space_of({RATE: [0.01]})), cache)
    assert len(compilations) > 2  # at least the inner loop, the predictions and the initial state
    compilations.clear()
    others = {
        RATE: [0.02],
        "optimizer.momentum": [0.5],
        "batch.size": [200, 640],
        "train.inner_steps": [4],  # 3 before; both are done by a program for 4
    }

    def derive(config):
        config.train.outer_steps = 1 if config.batch.size == 200 else 2

    runs = train_study(make_study(config, tmp_path / "s", space_of(others, derive=derive), seeds=2), cache)
    assert compilations == []
    found = [(run.batch_size, run.field("seed"), run.summary["steps"]) for run in runs]
    assert found == [(200, 0, 4), (200, 1, 4), (640, 0, 8), (640, 1, 8)]
    assert len({run.summary["params_sha256"] for run in runs}) == 4
    config.update_from_flattened_dict({RATE: 0.02, "optimizer.momentum": 0.5, "batch.size": 200, "seed": 1})
    config.train.inner_steps, config.train.outer_steps = 4, 1
    alone = train.train_and_evaluate(config, str(tmp_path / "alone"))
    assert runs[1].summary["params_sha256"] == alone["params_sha256"]


@pytest.mark.full
def test_a_diverged_or_failing_trial_is_listed_and_the_others_go_on(config, tmp_path, monkeypatch, capsys):
    # 10,000 examples are more than there are; a rate of 1e38 does not stay finite.
    monkeypatch.setattr(build, "MAX_PROGRAMS", 1)
    config.optimizer.name, cache = "sgd", ProgramCache()
    study = make_study(config, tmp_path, space_of({RATE: [0.01, 1e38], "batch.size": [128, 10_000]}))
    runs = train_study(study, cache)
    shown = capsys.readouterr().out
    assert "4 of 4 trials ended" in shown
    assert shown.count("  failed  ") == 2
    assert shown.count("  diverged  ") == 1
    assert [run.status for run in runs] == ["done", "failed", "diverged", "failed"]
    assert "batch.size: 10000; allowed: an integer from 1 to 640" in runs[1].trial_error
    assert "batch.size: 10000" in shown
    assert len(cache._programs) == 1  # programs are let go before there are too many


def train_at_once(config, folder, shared, report):
    """Stands for `train_and_evaluate`: one of two validations, then what the hosts agree on."""
    with RunFolder(folder) as run:
        run.lock()
        report.start(6, 0, "")
        report.row({"val_score": 0.5, "outer": 1}, 2)
        if number := preemption.agree()[0]:
            raise preemption.Stopped(number)
        run.write_json("summary.json", {"status": "done", "best_score": 0.5, "best_val_accuracy": 0.5})


def test_trials_whose_programs_do_not_fit_fail_each_by_itself(config, tmp_path):
    def train(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    runs = train_study(make_study(config, tmp_path, space_of({RATE: [0.01, 0.02]})), train=train)
    assert [run.trial_error for run in runs] == ["RESOURCE_EXHAUSTED: out of memory"] * 2


def test_several_failures_in_a_row_end_the_sweep(config, tmp_path):
    study = make_study(config, tmp_path, space_of({"batch.size": [1000, 2000, 3000, 4000]}))
    with pytest.raises(UserError, match=r"3 trials in a row failed, the last one: batch\.size: 3000"):
        train_study(study)


def test_a_trial_that_another_process_trains_comes_again(config, tmp_path, monkeypatch, caplog):
    study = make_study(config, tmp_path, space_of({RATE: [0.01]}))
    other = RunFolder(study.folder_of({RATE: 0.01}, 0))
    monkeypatch.setattr(RunFolder, "is_in_use", lambda _: False)  # as where it takes the folder right after
    other.lock()
    monkeypatch.setattr("largebatch.studies.worker.time.sleep", lambda seconds: other.close())
    with caplog.at_level("INFO", "largebatch"):
        (run,) = train_study(study, train=train_at_once)
    assert "it comes again later" in caplog.text
    assert run.status == "done"


@pytest.mark.full
def test_an_error_that_is_not_the_settings_own_ends_the_sweep_and_its_trial_is_resumed(
    config, tmp_path, monkeypatch
):
    study, record = make_study(config, tmp_path, space_of({"optimizer.name": ["lamb", "sgd"]})), RunProgress.record

    def find_the_disk_full(progress, row, *arguments, **options):
        if row["outer"] == 2:
            raise UserError("disk full")
        return record(progress, row, *arguments, **options)

    monkeypatch.setattr(RunProgress, "record", find_the_disk_full)
    with pytest.raises(UserError, match="disk full"):
        train_study(study)
    assert TrialQueue(study).fill() == Counts(2, 0, 0)
    monkeypatch.setattr(RunProgress, "record", record)
    runs = train_study(study)
    assert [run.status for run in runs] == ["done", "done"]
    starts = [[event["step"] for event in run.events if event["event"] == "start"] for run in runs]
    assert starts == [[0, 3], [0]]


def test_a_signal_puts_the_claimed_trial_back(config, tmp_path, monkeypatch):
    study = make_study(config, tmp_path, space_of({"optimizer.name": ["lamb", "adam", "sgd"]}))
    monkeypatch.setattr(preemption, "_first_signal", 15)
    with pytest.raises(preemption.Stopped):
        train_study(study)
    assert TrialQueue(study).fill() == Counts(3, 0, 0)


@pytest.mark.parametrize("call", ["fill", "report", "end", "put_back"])
def test_a_signal_while_the_database_is_away_stops_all_hosts_together(config, tmp_path, monkeypatch, call):
    study = make_study(config, tmp_path, space_of({"optimizer.name": ["lamb", "adam"]}), pruner="median")
    agree, agreed = preemption.agree, []

    def away(*_):
        monkeypatch.setattr(preemption, "_first_signal", 15)
        raise preemption.Stopped(15)

    def note(vote=0):
        found = agree(vote)
        agreed.append(found[0])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(TrialQueue, call, away)
        patch.setattr(preemption, "agree", note)
        with pytest.raises(preemption.Stopped):
            train_study(study, train=train_at_once)
    assert agreed[-1] == 15  # a host alone would have left without asking the others
    assert TrialQueue(study).fill().running == (call == "put_back")  # else it is put back


@pytest.mark.full
def test_pruned_trials_of_tpe_end_early_and_are_kept(config, tmp_path, monkeypatch):
    config.train.outer_steps = 4

    class Second(optuna.pruners.BasePruner):
        """Prunes every trial but the first, at the second validation."""

        def prune(self, study, trial):
            return trial.number > 0 and trial.last_step == 2

    monkeypatch.setitem(PRUNERS, "median", Second)
    space = Space(lambda trial: trial.suggest_float(RATE, 1e-4, 0.1, log=True), space_of({}).rules)
    study = make_study(config, tmp_path, space, sampler="tpe", trials=2, pruner="median")
    good, bad = train_study(study)
    assert good.field(RATE) != bad.field(RATE)
    assert (good.status, bad.status) == ("done", "pruned")
    assert (bad.summary["steps"], good.summary["steps"]) == (6, 12)
    rows = optuna.load_study(study_name=None, storage=study.storage).get_trials()
    assert [row.state.name for row in rows] == ["COMPLETE", "PRUNED"]


def test_workers_share_the_accelerators_of_a_machine():
    assert environments(2, "cpu", []) == [{}, {}]
    own = environments(2, "gpu", ["0", "1", "2", "3"])
    assert own == [{"CUDA_VISIBLE_DEVICES": "0,2"}, {"CUDA_VISIBLE_DEVICES": "1,3"}]
    shared = environments(3, "gpu", ["5"])
    assert shared == [{"CUDA_VISIBLE_DEVICES": "5", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.300"}] * 3
    chips = environments(2, "tpu", ["0", "1"])
    assert [chip["TPU_VISIBLE_CHIPS"] for chip in chips] == ["0", "1"]
    assert len({chip["TPU_PROCESS_PORT"] for chip in chips}) == 2
    with pytest.raises(UserError, match=r"--workers: 3; allowed: up to 2, the TPU chips of this machine"):
        environments(3, "tpu", ["0", "1"])


# ---- the command ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command(tmp_path_factory, session_cache):
    """A function that runs sweep.py on a small study, or starts it."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "space.py").write_text(SPACE_FILE)
    given = small_flags(session_cache, **{"train.outer_steps": 2})

    def options(*arguments, study="study", space="space.py", config=given):
        return [f"--study={folder / study}", *([f"--space={folder / space}"] if space else []), *config, *arguments]

    def run(*arguments, **changes):
        return run_script(ROOT / "sweep.py", *options(*arguments, **changes), cwd=folder)

    def start(*arguments, **changes):
        words = [sys.executable, "sweep.py", *options(*arguments, **changes)]
        pipe = subprocess.PIPE
        return subprocess.Popen(words, cwd=ROOT, env=on_devices(1), stdout=pipe, stderr=pipe, text=True)

    run.folder, run.options, run.start = folder, options, start
    return run


@pytest.mark.full
def test_the_command_its_leaderboard_and_going_on_with_workers(command):
    result = command("--trials=2")
    assert result.returncode == 0, result.stderr
    assert "2 of 2 trials ended" in result.stdout
    assert "best_val_accuracy" in result.stdout
    assert "warning" not in result.stderr.lower()
    study = command.folder / "study"
    assert (study / "space.py").read_text() == SPACE_FILE
    (command.folder / "other.py").write_text(SPACE_FILE.replace("0.01", "0.02"))
    assert_one_line_error(command(space="other.py"), "other.py is not", "study/space.py", "allowed: the same")
    more = command("--trials=4", "--workers=2", space=None, config=[])
    assert more.returncode == 0, more.stderr
    assert more.stdout.count("started at step 0") == 2
    assert more.stdout.count("rank") == 1
    described = json.loads((study / "study.json").read_text())
    assert described["config"]["dataset"]["num_examples"] == 100
    assert described["trials"] == 4
    assert [run.status for run in reader.read_study(study).runs] == ["done"] * 4


@pytest.mark.full
def test_a_signal_stops_all_workers_and_a_killed_one_is_named(command):
    process = command.start("--workers=2", "--config.train.outer_steps=200", "--heartbeat_sec=1", study="w")
    deadline = time.monotonic() + 240
    while len(list((command.folder / "w").glob("trials/*/metrics.jsonl"))) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        workers = [int(pid) for pid in file.read().split()]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    process.send_signal(signal.SIGTERM)
    shown = process.communicate(timeout=120)
    assert process.returncode in (128 + signal.SIGTERM, 128 + signal.SIGKILL), shown
    assert "worker 1 was killed by SIGKILL; start again with --study" in shown[1]
    assert "stopped by SIGTERM" in shown[1]
    assert "rank" not in shown[0]


@pytest.mark.parametrize(
    ("arguments", "space", "words"),
    [
        ([], None, ["--study: no study in", "give --space"]),
        (["--study=gs://bucket/study"], "space.py", ["--study: gs://bucket/study"]),
        (["--config.dataset.name=mine", "--config.dataset.path=/no"], "space.py", ["dataset.path: /no"]),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(command, arguments, space, words):
    assert_one_line_error(command(*arguments, study="x", space=space), *words)
    assert not (command.folder / "x").exists()


@pytest.mark.full
def test_every_host_of_a_pod_joins_the_same_trial(command):
    pod = ("-m", "largebatch.pod", "--hosts", "2", "--devices", "2", "--", sys.executable, "sweep.py")
    result = run_script(*pod, *command.options("--trials=2", study="pod"))
    assert result.returncode == 0, result.stderr + result.stdout
    assert "2 of 2 trials ended" in result.stdout
    runs = reader.read_study(command.folder / "pod").runs
    assert [(run.summary["hosts"], run.summary["devices"], run.status) for run in runs] == [(2, 4, "done")] * 2
