"""Runs whose hosts die and whose layout changes again and again end as if nobody had disturbed them."""

import contextlib
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

from largebatch.runs.checkpoints import path_of, read_arrays, saved_steps

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
STEPS_PER_EPOCH = visits.NUM_TRAIN * visits.VIEWS // visits.BATCH_SIZE


class Disturber:
    """Starts a run on pods, disturbs it, and starts it again, as a scheduler would.

    Args:
      command: of one host, without --workdir.
    """

    def __init__(self, folder: Path, command: list[str], rng: random.Random):
        self.folder, self.command, self.rng = folder, command, rng
        self.counts: dict[str, int] = {}  # of faults by kind

    def start(self, workdir: Path) -> subprocess.Popen:
        """The run on a layout drawn by lot."""
        hosts, devices = self.rng.choice(LAYOUTS)
        pod = ["-m", "largebatch.pod", f"--hosts={hosts}", f"--devices={devices}", "--"]
        with (self.folder / "log").open("a") as log:
            command = [sys.executable, *pod, *self.command, f"--workdir={workdir}"]
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def run(self, workdir: Path, num_faults: int) -> int:
        """Takes a run to its end through at most `num_faults` faults; returns how many came before it was done."""
        num_done, process = 0, self.start(workdir)
        try:
            while num_done < num_faults and self._wait_for_training(workdir, process):
                num_done += 1
                self._disturb(workdir, process)
                process.wait(LIMIT_SEC)
                while processes_with(f"--workdir={workdir}"):
                    time.sleep(0.05)
                check_visits(workdir)
                process = self.start(workdir)
            assert process.wait(LIMIT_SEC) == 0, (self.folder / "log").read_text()[-4000:]
            check_visits(workdir)
        finally:
            for pid in processes_with(f"--workdir={workdir}"):
                os.kill(pid, signal.SIGKILL)
        return num_done

    def _wait_for_training(self, workdir: Path, process) -> bool:
        """Waits for a moment after training has begun. False if it ended."""
        before = starts_of(workdir)
        while process.poll() is None and starts_of(workdir) == before:
            time.sleep(0.01)
        time.sleep(self.rng.uniform(0, 1))
        return process.poll() is None

    def _disturb(self, workdir: Path, process) -> None:
        kind = self.rng.choice(["host", "host", "pod", "stop"])
        self.counts[kind] = self.counts.get(kind, 0) + 1
        with contextlib.suppress(OSError):  # gone
            if kind == "stop":
                process.terminate()
            elif kind == "pod":
                os.killpg(process.pid, signal.SIGKILL)
            else:
                hosts = [pid for pid in processes_with(f"--workdir={workdir}") if host_of(pid) is not None]
                os.kill(self.rng.choice(hosts or [process.pid]), signal.SIGKILL)


def starts_of(workdir: Path) -> int:
    path = workdir / "events.jsonl"
    return path.read_text().count('"event": "start"') if path.exists() else 0


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
    fields = VISITS | {"train.outer_steps": epochs * STEPS_PER_EPOCH // VISITS["train.inner_steps"]}
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
        assert (of_training == epochs).all(), (of_training.min(), of_training.max())
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
