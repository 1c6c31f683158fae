"""Runs whose hosts die and whose layout changes again and again end as if nobody had disturbed them."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import visits
from conftest import ROOT
from figures import record
from test_pod import host_of, processes_with

from largebatch.runs.checkpoints import UNFINISHED, path_of, read_arrays, saved_steps

LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2)]  # hosts, devices of each
LIMIT_SEC = 300
VISITS = {
    "dataset.name": "visits",
    "model.name": "visits",
    "model.dtype": "float32",
    "optimizer.name": "sgd",
    "optimizer.momentum": 0,
    "optimizer.learning_rate": visits.BATCH_SIZE,
    "batch.size": visits.BATCH_SIZE,
    "batch.micro_batch_size": 4,
    "train.inner_steps": 8,
    "checkpoint.every_sec": 0,
    "log.tensorboard": False,
}
UPDATES_PER_EPOCH = visits.NUM_TRAIN * visits.VIEWS // visits.BATCH_SIZE


@dataclasses.dataclass
class Disturber:
    """Starts a run on pods, disturbs it, and starts it again, as a scheduler would.

    command: of one host, without --workdir.
    """

    folder: Path
    command: list[str]
    rng: random.Random
    counts: dict[str, int] = dataclasses.field(default_factory=dict)  # of faults by kind

    def start(self, workdir: Path) -> subprocess.Popen:
        """The run on a layout drawn by lot."""
        hosts, devices = self.rng.choice(LAYOUTS)
        pod = ["-m", "largebatch.pod", f"--hosts={hosts}", f"--devices={devices}", "--"]
        with (self.folder / "log").open("a") as log:
            command = [sys.executable, *pod, *self.command, f"--workdir={workdir}"]
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def run(self, workdir: Path, num_faults: int) -> int:
        """Takes a run to its end through at most `num_faults` faults; returns how many came before it was done."""
        try:
            return self._run(workdir, self.start(workdir), num_faults)
        finally:
            for pid in processes_with(f"--workdir={workdir}"):
                os.kill(pid, signal.SIGKILL)

    def _run(self, workdir: Path, process: subprocess.Popen, num_faults: int) -> int:
        num_done = 0
        while num_done < num_faults and process.poll() is None:
            if not self._wait_for_moment(workdir, process):
                break
            kind = self.rng.choice(["host", "host", "pod", "stop"])
            if kind == "host" and not self._kill_a_host(workdir):
                continue
            num_done += 1
            self.counts[kind] = self.counts.get(kind, 0) + 1
            if kind != "host" and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL) if kind == "pod" else process.terminate()
            process.wait(LIMIT_SEC)
            while processes_with(f"--workdir={workdir}"):
                time.sleep(0.05)
            check_visits(workdir)
            process = self.start(workdir)
        assert process.wait(LIMIT_SEC) == 0, self.log()
        check_visits(workdir)
        return num_done

    def log(self) -> str:
        return (self.folder / "log").read_text()[-4000:]

    def _wait_for_moment(self, workdir: Path, process) -> bool:
        """Waits for a moment: any, after training goes on, or while a checkpoint is written. False if it ended."""
        before = len(events_of(workdir))
        kind, begin = self.rng.choice(["any time", "training", "training", "save"]), time.monotonic()
        delay = self.rng.uniform(0, 12)
        while process.poll() is None and time.monotonic() - begin < LIMIT_SEC:
            if kind == "any time" and time.monotonic() - begin > delay:
                return True
            is_training = "start" in [event["event"] for event in events_of(workdir)[before:]]
            if is_training and kind == "training":
                time.sleep(self.rng.uniform(0, 1))
                return True
            if is_training and kind == "save" and list((workdir / "checkpoints").glob(UNFINISHED)):
                time.sleep(self.rng.uniform(0, 0.02))
                return True
            time.sleep(0.002 if is_training else 0.05)
        return False

    def _kill_a_host(self, workdir: Path) -> bool:
        hosts = [pid for pid in processes_with(f"--workdir={workdir}") if _host_of(pid) is not None]
        if not hosts:
            return False
        try:
            os.kill(self.rng.choice(hosts), signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


def _host_of(pid: int) -> str | None:
    try:
        return host_of(pid)
    except OSError:  # gone
        return None


def events_of(workdir: Path) -> list[dict]:
    path = workdir / "events.jsonl"
    events = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            events.append(json.loads(line))
        except ValueError:  # torn by a kill
            continue
    return events


def visits_at(workdir: Path, step: int) -> np.ndarray:
    """Return how often each [image, view] was visited before a checkpoint."""
    return -read_arrays(path_of(workdir / "checkpoints", step)).arrays["state.params.visits"]


def check_visits(workdir: Path) -> None:
    """Check that in all checkpoints every example was visited once an epoch, except in the last."""
    for step in saved_steps(workdir / "checkpoints"):
        visited = visits_at(workdir, step)
        examples = step * visits.BATCH_SIZE
        epochs, in_this_epoch = divmod(examples, visits.NUM_TRAIN * visits.VIEWS)
        assert visited.sum() == examples
        assert (visited == epochs + 1).sum() == in_this_epoch


def count_visits(folder: Path, rng: random.Random, num_faults: int, faults_per_run: int, epochs: int) -> None:
    """Disturbs runs `num_faults` times; every example of each was visited exactly once an epoch."""
    fields = VISITS | {"train.outer_steps": epochs * UPDATES_PER_EPOCH // VISITS["train.inner_steps"]}
    fields |= {"dataset.path": folder / "images", "augment.cache_dir": folder / "cache"}
    script = [sys.executable, str(Path(visits.__file__)), str(folder / "images")]
    command = [*script, *(f"--config.{name}={value}" for name, value in fields.items())]
    disturber = Disturber(folder, command, rng)
    done = runs = 0
    while done < num_faults:
        workdir = folder / f"run_{runs}"
        done += disturber.run(workdir, min(faults_per_run, num_faults - done))
        visited = visits_at(workdir, fields["train.outer_steps"] * VISITS["train.inner_steps"])
        of_training = visited[visited.any(axis=1)]
        assert of_training.shape == (visits.NUM_TRAIN, visits.VIEWS)
        assert (of_training == epochs).all(), (of_training.min(), of_training.max(), disturber.log())
        runs += 1
    record("visits through faults", {"runs": runs, "epochs": epochs} | disturber.counts)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_few_faults_lose_and_double_no_visit(tmp_path):
    count_visits(tmp_path, random.Random(0), num_faults=3, faults_per_run=3, epochs=16)


@pytest.mark.faults
@pytest.mark.timeout(7200)
def test_60_faults_lose_and_double_no_visit(tmp_path):
    count_visits(tmp_path, random.Random(1), num_faults=60, faults_per_run=12, epochs=64)
