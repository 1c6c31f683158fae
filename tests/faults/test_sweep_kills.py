"""SIGKILL of sweep.py at any moment: no finished trial is lost, none is doubled, and grid and random search end
with the trials and the leaderboard of a study that nobody disturbed.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from conftest import EUROSAT, ROOT, on_devices
from figures import record
from optuna.trial import TrialState
from test_postgres import server  # noqa: F401
from test_resume import assert_same_run

from largebatch.runs import reader
from largebatch.studies import analysis

CRASH = Path(__file__).with_name("crash.py")
LIMIT_SEC = 300
SPACE = """
def suggest(trial):
    trial.suggest_categorical("optimizer.name", ["lamb", "sgd"])
    trial.{rates}
"""


class Killed:
    """One study's command, and the study that it makes when nobody disturbs it."""

    def __init__(self, folder: Path, sampler: str, pruner: str, trials: int, storage=None, **fields):
        self.folder, self.trials, self.storage = folder, trials, storage
        rates = 'suggest_float("optimizer.learning_rate", 1e-3, 0.03, log=True)'
        if sampler == "grid":
            rates = 'suggest_categorical("optimizer.learning_rate", [0.003, 0.01, 0.03])'
        (folder / "space.py").write_text(SPACE.format(rates=rates))
        self.options = [f"--space={folder / 'space.py'}", f"--sampler={sampler}", f"--pruner={pruner}"]
        self.options += [f"--trials={trials}", "--heartbeat_sec=1"]
        self.options += [f"--storage={storage}"] if storage else []
        fields |= {"augment.cache_dir": folder / "cache", "checkpoint.every_sec": 0}
        self.options += [f"--config.{name}={value}" for name, value in fields.items()]
        assert self._start(folder / "first").wait(1800) == 0, self._log()  # compiles, for all that come after it
        begin = time.monotonic()
        assert self._start(folder / "whole").wait(1800) == 0, self._log()
        self.seconds = time.monotonic() - begin
        self.changes = int((folder / "changes").read_text())

    def _start(self, study: Path, number: int = 10**9, workers: int = 1) -> subprocess.Popen:
        crash = [str(CRASH), str(number), str(study), "--"] if workers == 1 else []
        command = [sys.executable, *crash, str(ROOT / "sweep.py"), f"--study={study}", f"--workers={workers}"]
        environment = on_devices(2)
        # Of its own: a kill may leave half a program there, which others would warn of.
        environment["JAX_COMPILATION_CACHE_DIR"] = str(self.folder / "compiled")
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
                [*command, *self.options], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def _log(self) -> str:
        return (self.folder / "log").read_text()[-3000:]

    def kill_until_done(self, study: Path, kills: int, workers: int, rng: random.Random) -> int:
        """Kills a process up to `kills` times, and starts again until the study ends; how often it did."""
        count, code = 0, None
        while code != 0:
            by_change = workers == 1 and rng.random() < 0.5 and count < kills
            number = 1 + int(self.changes / 3 * rng.random()) if by_change else 10**9
            process = self._start(study, number, workers)
            deadline = time.monotonic() + (LIMIT_SEC if by_change else workers * self.seconds * rng.random())
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            family = [process.pid, *children_of(process.pid)]
            if process.poll() is None and count < kills and len(family) >= workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(family), signal.SIGKILL)
            code = process.wait()
            wait_for_exit(family[1:])  # workers whose parent was killed save, and put their trials back
            assert code in (0, -9, 137, 143), f"ended with {code}\n{self._log()}"
            count += code != 0
        return count

    def states(self, study: Path) -> dict[str, int]:
        """How many trials of each end the database has, having checked that each run ended there once."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        storage = self.storage or f"sqlite:///{study / 'study.db'}"
        trials = optuna.load_study(study_name=study.name, storage=storage).get_trials()
        ended = [trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        runs = reader.read_study(study).runs
        by_number = {(run.trial["index"], run.trial["seed"]): run for run in runs}
        numbers = [(trial.user_attrs["index"], trial.user_attrs["seed"]) for trial in ended]
        assert sorted(numbers) == sorted(by_number)
        assert len(runs) == len(numbers) == len(set(numbers)) == self.trials
        for trial, number in zip(ended, numbers, strict=True):
            assert trial.user_attrs["setting"] == by_number[number].trial["setting"]
            assert (by_number[number].status == "pruned") == (trial.state == TrialState.PRUNED), number
        states = [trial.state.name for trial in trials]
        return {state: states.count(state) for state in dict.fromkeys(states)}


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def wait_for_exit(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT_SEC
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


SMALL = {
    "dataset.num_examples": 100,
    "dataset.image_size": 16,
    "train.inner_steps": 3,
    "train.outer_steps": 3,
    "batch.size": 100,
}


ON_EUROSAT = {
    "dataset.name": "eurosat",
    "dataset.path": EUROSAT,
    "dataset.image_size": 32,
    "train.inner_steps": 8,
    "train.outer_steps": 3,
    "batch.size": 512,
}


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kills", "sampler", "pruner", "workers", "database", "fields"),
    [
        (20, "grid", "none", 1, "SQLite", ON_EUROSAT),
        (20, "random", "none", 1, "SQLite", ON_EUROSAT),
        (10, "tpe", "none", 1, "SQLite", SMALL | {"train.outer_steps": 5}),
        (10, "tpe", "median", 1, "SQLite", SMALL | {"train.outer_steps": 5}),
        (10, "random", "hyperband", 1, "SQLite", SMALL | {"train.outer_steps": 5}),
        (20, "grid", "none", 2, "SQLite", SMALL),
        (20, "grid", "none", 2, "PostgreSQL", SMALL),
    ],
)
def test_kills_of_a_sweep(tmp_path, request, kills, sampler, pruner, workers, database, fields):
    if fields is ON_EUROSAT and not EUROSAT.exists():
        pytest.skip(f"the real data set is not at {EUROSAT}")
    storage = request.getfixturevalue("server").url if database == "PostgreSQL" else None
    killed = Killed(tmp_path, sampler, pruner, 6, storage, **fields)
    rng, count, studies, begun_again = random.Random(0), 0, 0, 0
    while count < kills:
        study = tmp_path / f"cut_{studies}"
        count += killed.kill_until_done(study, kills - count, workers, rng)
        begun_again += killed.states(study).get("FAIL", 0)
        if sampler != "tpe" and pruner == "none":
            for folder in (study / "trials").iterdir():
                assert_same_run(folder, tmp_path / "whole" / "trials" / folder.name)
            cut, whole = (analysis.leaderboard_rows(reader.read(path)) for path in (study, tmp_path / "whole"))
            assert cut == whole
        studies += 1
        shutil.rmtree(study)
    what = {"sampler": sampler, "pruner": pruner, "workers": workers, "database": database}
    what |= {"data": fields.get("dataset.name", "synthetic"), "kills": count, "studies": studies}
    record("sweep kills", what | {"trials of each": killed.trials, "begun again": begun_again})
