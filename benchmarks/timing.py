"""Contenders that take turns on the clock, and the proof that each of them did its work."""

import contextlib
import json
import math
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jax

from benchmarks.peers import serve
from benchmarks.peers.serve import Progress
from largebatch.runs.summary import git_commit, versions
from largebatch.util import UserError

MIN_TIMED_SEC = 0.5
MAX_ROUNDS = 4096
ROOT = Path(__file__).resolve().parent.parent


class Work(Protocol):
    """What can be timed, such as a `serve.Step`."""

    def run(self, rounds: int) -> None:
        """Does so many rounds and waits for them."""

    def progress(self) -> Progress:
        """What has been done so far; an update is a round."""


@dataclass(frozen=True)
class Contender:
    """Work under a name. A round of it handles `images`, and does `flops` or moves `bytes` where that is known."""

    name: str
    work: Work
    images: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    bytes_per_device: int | None = None


# ---- the clock ---------------------------------------------------------------------------------------


def interleave(
    contenders: list[Contender], repeats: int, min_timed_sec: float | None = None
) -> dict[str, list[float]]:
    """Seconds per round of each contender, `repeats` times in turn, after a warm-up of its own.

    Args:
      min_timed_sec: that a contender takes for one of its turns; None for MIN_TIMED_SEC.
    Raises:
      UserError: the work of one of them did not happen.
    """
    rounds, min_timed_sec = {}, MIN_TIMED_SEC if min_timed_sec is None else min_timed_sec
    for contender in contenders:
        contender.work.run(1)
        fitting = int(min_timed_sec / seconds_per_round(contender, 1))
        rounds[contender.name] = min(max(1, fitting), MAX_ROUNDS)
    before = {contender.name: contender.work.progress() for contender in contenders}
    times = {contender.name: [] for contender in contenders}
    for _ in range(repeats):
        for contender in contenders:
            times[contender.name].append(seconds_per_round(contender, rounds[contender.name]))
    for contender in contenders:
        timed = repeats * rounds[contender.name]
        check_happened(contender.name, before[contender.name], contender.work.progress(), timed)
    return times


def seconds_per_round(contender: Contender, rounds: int) -> float:
    """Seconds of one round, over `rounds` rounds in one go."""
    begin = time.perf_counter()
    contender.work.run(rounds)
    return (time.perf_counter() - begin) / rounds


def check_happened(name: str, before: Progress, after: Progress, rounds: int) -> None:
    """Every array must have moved to finite numbers, and the update count by `rounds`.

    Raises:
      UserError: it did not; then nothing of it was timed.
    """
    if after.updates - before.updates != rounds:
        raise UserError(f"{name}: {after.updates - before.updates} updates happened, {rounds} were timed")
    for old, new in zip(before.sums, after.sums, strict=True):
        if old == new or not all(map(math.isfinite, new)):
            raise UserError(f"{name}: parameters did not change to finite numbers; nothing was timed")


def ratio(ours: Contender, other: Contender, times: dict[str, list[float]]) -> dict[str, float]:
    """(images/s of ours) / (images/s of the other), repeat by repeat: median, least and most."""
    scale = ours.images / other.images
    pairs = zip(times[ours.name], times[other.name], strict=True)
    ratios = [scale * theirs / mine for mine, theirs in pairs]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


@dataclass(frozen=True)
class Tried:
    """Options and the images/s that they gave; None where they do not work here."""

    options: dict
    images_per_sec: float | None


def try_each(choices: list[dict], build: Callable[[dict], Contender], repeats: int = 3) -> list[Tried]:
    """Times what `build` makes of each choice, one by itself after the other.

    Raises:
      UserError: nothing works.
    """
    tried, errors = [], []
    for options in choices:
        try:
            contender = build(options)
            times = interleave([contender], repeats)[contender.name]
        except (UserError, ValueError, RuntimeError) as error:  # JAX out of memory is a RuntimeError
            errors.append(error)
            tried.append(Tried(options, None))
            continue
        tried.append(Tried(options, contender.images / statistics.median(times)))
    if len(errors) == len(choices):
        raise UserError(f"no configuration works: {errors[0]}")
    return tried


def fastest(tried: list[Tried]) -> list[dict]:
    """The options that work, fastest first."""
    working = [one for one in tried if one.images_per_sec is not None]
    return [one.options for one in sorted(working, key=lambda one: -one.images_per_sec)]


def about_machine() -> dict:
    """What figures depend on beside the code's options."""
    return {
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "versions": versions(),
        "git_commit": git_commit(),
    }


# ---- peers -------------------------------------------------------------------------------------------


def in_process(name: str, build: Callable[[dict], serve.Step], options: dict) -> Contender:
    """A peer that shares this process and its devices."""
    return Contender(name, build(options), options["batch_size"])


class Child:
    """A peer in its own process, driven over lines of JSON (peers/serve.py); a context manager.

    Attributes:
      deadline: by the clock of `time.monotonic`; if it has not answered by then it is killed. None waits for ever.
    """

    def __init__(self, module: str, env: dict[str, str] | None = None):
        self._module = module
        self.deadline: float | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=env,
        )

    def ask(self, **request) -> dict:
        """The answer to one request.

        Raises:
          UserError: the peer says that it failed, or is gone, or has not answered by the deadline.
        """
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            self._wait_for_answer()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise UserError(f"{self._module}: ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(f"{self._module}: {answer['error']}")
        return answer

    def _wait_for_answer(self) -> None:
        if self.deadline is None:
            return
        left = max(0.0, self.deadline - time.monotonic())
        if not select.select([self._process.stdout], [], [], left)[0]:
            self._process.kill()
            self._process.wait()
            raise UserError(f"{self._module}: did not answer in the time that was left")

    @property
    def is_running(self) -> bool:
        """Tell whether the process can be asked."""
        return self._process.poll() is None

    def contender(self, name: str, options: dict) -> Contender:
        """Builds what `options` say, in place of what was built under this name before."""
        self.ask(build=options, name=name)
        return Contender(name, ChildStep(self, name), options["batch_size"])

    def contender_of(self, title: str, name: str, images: int) -> Contender:
        """Return what was built under `name`, as a contender with another title."""
        return Contender(title, ChildStep(self, name), images)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class ChildStep:
    """A step that a child has built."""

    def __init__(self, child: Child, name: str):
        self._child, self._name = child, name

    def run(self, rounds: int) -> None:
        """See `Work`."""
        self._child.ask(run=rounds, name=self._name)

    def progress(self) -> Progress:
        """See `Work`."""
        return Progress(**self._child.ask(progress=True, name=self._name))

    def facts(self) -> dict:
        """See `serve.Step`."""
        return self._child.ask(facts=True, name=self._name)
