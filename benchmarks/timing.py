"""Contenders that take turns on the clock, and the proof that each of them did its work."""

import contextlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks.peers import serve
from largebatch.errors import UserError
from largebatch.runs.provenance import git_commit, versions

MIN_TIMED_SEC = 0.5
MAX_ROUNDS = 4096
ROOT = Path(__file__).resolve().parent.parent


class Contender(NamedTuple):
    """Something to time.

    `run(n)` does n rounds and waits for them; `look()` gives {"updates": rounds done so far, as the work
    itself counts them, "sums": numbers per array that the work changes}; `images` are those of a round.
    """

    name: str
    run: Callable[[int], None]
    look: Callable[[], dict]
    images: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    bytes_per_device: int | None = None


def check_happened(name: str, before: dict, after: dict, rounds: int) -> None:
    """Every array must have moved to finite numbers, and the update count by `rounds`.

    Raises:
      UserError: it did not; then nothing of it was timed.
    """
    if after["updates"] - before["updates"] != rounds:
        raise UserError(f"{name}: {after['updates'] - before['updates']} updates happened, {rounds} were timed")
    for old, new in zip(before["sums"], after["sums"], strict=True):
        if old == new or not all(map(math.isfinite, new)):
            raise UserError(f"{name}: parameters did not change to finite numbers; nothing was timed")


def seconds_per_round(contender: Contender, rounds: int) -> float:
    """Seconds of one round, over `rounds` rounds in one go."""
    begin = time.perf_counter()
    contender.run(rounds)
    return (time.perf_counter() - begin) / rounds


def interleave(contenders: list[Contender], repeats: int) -> dict[str, list[float]]:
    """Seconds per round of each contender, `repeats` times in turn, after a warm-up of its own.

    Raises:
      UserError: the work of one of them did not happen.
    """
    rounds, times = {}, {contender.name: [] for contender in contenders}
    for contender in contenders:
        contender.run(1)
        fitting = int(MIN_TIMED_SEC / seconds_per_round(contender, 1))
        rounds[contender.name] = min(max(1, fitting), MAX_ROUNDS)
    before = {contender.name: contender.look() for contender in contenders}
    for _ in range(repeats):
        for contender in contenders:
            times[contender.name].append(seconds_per_round(contender, rounds[contender.name]))
    for contender in contenders:
        done = repeats * rounds[contender.name]
        check_happened(contender.name, before[contender.name], contender.look(), done)
    return times


def best_of(
    options: list[dict], build: Callable[[dict], Contender], repeats: int = 3
) -> tuple[dict, dict[str, float]]:
    """The options with which `build` gives the most images per second, each tried by itself.

    Returns:
      The best options, and images/s by options; what does not work here has None.
    Raises:
      UserError: nothing works.
    """
    rates, errors = {}, {}
    for index, choice in enumerate(options):
        try:
            contender = build(choice)
            times = interleave([contender], repeats)[contender.name]
        except (UserError, ValueError, RuntimeError) as error:  # JAX out of memory is a RuntimeError
            errors[index] = error
            continue
        rates[index] = contender.images / statistics.median(times)
    if not rates:
        raise UserError(f"no configuration works: {errors[0]}")
    best = max(rates, key=rates.get)
    return options[best], {json.dumps(choice): rates.get(index) for index, choice in enumerate(options)}


def about_machine() -> dict:
    """What figures depend on beside the code's options."""
    return {
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "versions": versions(),
        "git_commit": git_commit(),
    }


def ratio(ours: Contender, other: Contender, times: dict[str, list[float]]) -> dict[str, float]:
    """(images/s of ours) / (images/s of the other), repeat by repeat: median, least and most."""
    scale = ours.images / other.images
    found = [scale * b / a for a, b in zip(times[ours.name], times[other.name], strict=True)]
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


class Child:
    """A peer in its own process, driven over lines of JSON (peers/serve.py); a context manager."""

    def __init__(self, *command: str, env: dict[str, str] | None = None):
        self._name = command[0]
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=env,
        )

    def ask(self, **request) -> dict:
        """The answer to one request.

        Raises:
          UserError: the peer says that it failed, or is gone.
        """
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise UserError(f"{self._name}: ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(f"{self._name}: {answer['error']}")
        return answer

    def contender(self, name: str, options: dict) -> Contender:
        """Builds what `options` say, in place of what was built under this name before."""
        self.ask(build=options, name=name)

        def run(rounds):
            self.ask(run=rounds, name=name)

        return Contender(name, run, lambda: self.ask(digest=True, name=name), options["batch_size"])

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


def in_process(name: str, build: Callable[[dict], serve.Step], options: dict) -> Contender:
    """The same of a peer that shares this process and its devices."""
    step = build(options)
    return Contender(name, step.run, lambda: serve.digest(step), options["batch_size"])
