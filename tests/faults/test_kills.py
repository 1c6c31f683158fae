"""SIGKILL at any moment: the run resumes and ends bitwise as if nothing had happened.

Moments are drawn at random: a time, a change of a file (crash.py), or right after something appeared in
the run folder (a checkpoint being written, a row).
"""

import contextlib
import datetime
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ROOT, on_devices, small_flags
from figures import record
from test_pod import host_of, processes_with
from test_resume import assert_same_run, events_of, rows_of

from largebatch.runs.checkpoints import UNFINISHED

CRASH = Path(__file__).with_name("crash.py")
KILLS_PER_RUN = 5
TORN_ROW = b'{"step": 7, "outer'


def num_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class Layout(NamedTuple):
    hosts: int
    devices: int
    fields: dict  # of the config
    limit_sec: float  # an end that takes longer is a hang


ADASCALE = {  # on a trace that changes within outer loops and between
    "batch.trace": str((*[200] * 8, *[500] * 8, 37, 37, 900)),
    "batch.hold_last": True,
    "schedule.scaling": "adascale",
    "schedule.reference_batch_size": 400,
    "optimizer.name": "sgd",
}
GROWING = {"batch.size": 100, "batch.auto": True, "batch.max_size": 800, "optimizer.name": "sgd"}
LOCAL = {  # averages after steps 8, 12, 16, ...: in the middle of outer loops and between
    "batch.size": 500,
    "sync.mode": "post_local",
    "sync.start_step": 4,
    "sync.every": 4,
    "sync.optimizer_state": "keep",
    "sync.outer_learning_rate": 0.7,
    "sync.outer_momentum": 0.9,
}
LAYOUTS = {
    "1 device": Layout(1, 1, {"batch.size": 500}, 120),
    "8 devices, AdaScale on a trace": Layout(1, 8, ADASCALE, 120),
    "8 devices, batch by noise": Layout(1, 8, GROWING, 120),
    "8 devices, local steps": Layout(1, 8, LOCAL, 120),
    "4 hosts x 8 devices, local steps": Layout(4, 8, LOCAL, 400),
}


class Job:
    """One small training command on a layout, with its data cache and the uninterrupted run."""

    def __init__(self, folder: Path, layout: Layout):
        self.folder, self.layout = folder, layout
        self.whole = folder / "whole"
        assert self.start(self.whole).wait() == 0, self.log()
        events = events_of(self.whole)
        begin, end = (datetime.datetime.fromisoformat(events[place]["time"]) for place in (0, -1))
        self.seconds = (end - begin).total_seconds()  # of training
        self.changes = int((folder / "changes").read_text())
        sizes = {row["global_batch_size"] for row in rows_of(self.whole)}
        assert (len(sizes) > 1) == ("batch.auto" in layout.fields or "batch.trace" in layout.fields), sizes

    def start(self, workdir: Path, number: int = 10**9) -> subprocess.Popen:
        """Starts train.py, as a group of its own, to die before change `number` of a file in the run folder."""
        fields = {"dataset.num_examples": 400, "train.inner_steps": 6, "train.outer_steps": 5}
        flags = small_flags(self.folder / "cache", **fields, **{"checkpoint.every_sec": 0}, **self.layout.fields)
        script = [str(ROOT / "train.py"), *flags, f"--workdir={workdir}"]
        command = [sys.executable, str(CRASH), str(number), str(workdir), "--", *script]
        if self.layout.hosts > 1:
            pod = ["-m", "largebatch.pod", f"--hosts={self.layout.hosts}", f"--devices={self.layout.devices}"]
            command = [sys.executable, *pod, "--", *command]
        environment = on_devices(self.layout.devices)
        # Of its own: a kill may leave half a program there, which others would warn of.
        environment["JAX_COMPILATION_CACHE_DIR"] = str(self.folder / "compiled")
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def log(self) -> str:
        return (self.folder / "log").read_text()[-3000:]

    def run_and_kill(self, workdir: Path, rng: random.Random) -> bool:
        """One start with one kill; False if the run was at its end before."""
        kind = rng.choice(("time", "change", "checkpoint", "row"))
        if kind == "change":  # it dies by itself; squared, since a run that resumes has fewer changes left
            process = self.start(workdir, 1 + int(self.changes * rng.random() ** 2))
        else:
            process = self.start(workdir)
            self._wait_for(kind, workdir, process, rng)
            self._kill(process, rng)
        code = self._wait(process)
        assert code in (0, -9, 137), f"{kind}: ended with {code}\n{self.log()}"
        return code != 0

    def _wait_for(self, kind: str, workdir: Path, process, rng) -> None:
        """Wait until something appeared in the folder for the first to third time, or the process ended."""
        watched = {
            "time": lambda: num_bytes(workdir / "events.jsonl"),
            "checkpoint": lambda: len(list((workdir / "checkpoints").glob(UNFINISHED))),
            "row": lambda: num_bytes(workdir / "metrics.jsonl"),
        }
        count = 1 if kind == "time" else 1 + int(3 * rng.random() ** 2)
        before = watched[kind]()
        while process.poll() is None and count:
            now = watched[kind]()
            count -= now > before
            before = now
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, self.seconds if kind == "time" else 0.05))

    def _kill(self, process, rng) -> None:
        """Everything at once, or one host of a pod."""
        hosts = {}
        if self.layout.hosts > 1 and rng.random() < 0.7:
            hosts = {host_of(pid): pid for pid in processes_with(f"{CRASH} ") if pid != process.pid}
        with contextlib.suppress(ProcessLookupError):
            if hosts:
                os.kill(rng.choice(sorted(hosts.values())), signal.SIGKILL)
            else:
                os.killpg(process.pid, signal.SIGKILL)

    def _wait(self, process) -> int:
        try:
            return process.wait(self.layout.limit_sec)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"hangs\n{self.log()}")

    def survive(self, kills: int, rng: random.Random, name: str) -> None:
        """Kill runs until there were `kills`; take each to its end, and compare it with the uninterrupted one."""
        count = runs = 0
        while count < kills:
            workdir, ended = self.folder / f"cut_{runs}", False
            for _ in range(min(KILLS_PER_RUN, kills - count)):
                ended = not self.run_and_kill(workdir, rng)
                if ended:
                    break
                count += 1
                rows = workdir / "metrics.jsonl"
                if rows.exists() and not (workdir / "summary.json").exists() and rng.random() < 0.3:
                    with rows.open("ab") as file:
                        file.write(TORN_ROW)
            assert ended or self._wait(self.start(workdir)) == 0, self.log()
            assert_same_run(workdir, self.whole)
            outer_loops = len(rows_of(self.whole))  # fewer than 5 with AdaScale
            assert [row["outer"] for row in rows_of(workdir)] == list(range(1, outer_loops + 1))
            shutil.rmtree(workdir)
            runs += 1
        record("kills", {"layout": name, "kills": count, "runs that are the same": runs})


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_few_kills(tmp_path):
    layout = Layout(1, 2, LOCAL, 120)  # which has the most to lose
    Job(tmp_path, layout).survive(2, random.Random(0), "2 devices")


@pytest.mark.faults
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_many_kills(name, seed, tmp_path):
    kills = 15 if LAYOUTS[name].hosts > 1 else 30
    Job(tmp_path, LAYOUTS[name]).survive(kills, random.Random(f"{name} {seed}"), name)
