"""Contenders that take turns on the clock, each in a child process, and the proof that each of them did its work.

A module of contenders has a function `build(options)`. It returns a step, which is an object with the methods
`run(count)`, which does so many steps and waits for them, `steps()`, the number of steps so far as the optimizer
counts them, and `params()`, all arrays that every step changes. As a child the module answers lines of JSON:

    python -m benchmarks.timing benchmarks.peers.torch_step
    {"name": "a", "build": {"batch_size": 512}}     {}
    {"name": "a", "run": 10}                        {"seconds": 1.2, "steps": 10, "sums": [[0.1, 3.2], ...]}
    {"name": "a", "ask": "facts"}                   what its method `facts` returns
"""

import contextlib
import functools
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from largebatch.cli import ROOT
from largebatch.util import UserError

MIN_TIMED_SEC, MAX_STEPS = 0.5, 4096  # of a turn
# The images of every contender are random: the cost of a step does not depend on them.
IMAGE_SHAPE, NUM_CLASSES, NUM_IMAGES = (64, 64, 3), 10, 4096
MEAN, STD, LEARNING_RATE = 127.5, 64.0, 1e-3


def random_images() -> tuple[np.ndarray, np.ndarray]:
    """Draw uint8 images [NUM_IMAGES, H, W, C] and their int32 labels."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (NUM_IMAGES, *IMAGE_SHAPE), np.uint8)
    return images, rng.integers(0, NUM_CLASSES, NUM_IMAGES, np.int32)


# ---- in the child ------------------------------------------------------------------------------------


def serve(module: str) -> None:
    """Answer the requests on stdin until it ends."""
    steps, out = {}, sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is no answer
    for line in sys.stdin:
        try:
            reply = _answer(importlib.import_module(module).build, steps, json.loads(line))
        except Exception as error:  # a package or options that do not work here are the parent's to report
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
        print(json.dumps(reply), file=out, flush=True)


def _answer(build: Callable, steps: dict, request: dict) -> dict:
    """Answer one request, as in the module's docstring; `steps` are those that have been built, by name."""
    name = request["name"]
    if "build" in request:
        steps.pop(name, None)  # first, so that there is memory for the new one
        steps[name] = build(request["build"])
        return {}
    step = steps[name]
    if "ask" in request:
        return getattr(step, request["ask"])()
    started = time.perf_counter()
    step.run(request["run"])
    seconds = time.perf_counter() - started
    arrays = [np.asarray(array, np.float64) for array in step.params()]
    sums = [[float(array.sum()), float(np.square(array).sum())] for array in arrays]
    return {"seconds": seconds, "steps": step.steps(), "sums": sums}


# ---- in the parent -----------------------------------------------------------------------------------


class Child:
    """A process with the contenders of a module; a context manager."""

    def __init__(self, module: str, **environment: str):
        self._module = module
        # Children share a card: none may take all of its memory.
        variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ | environment
        command = [sys.executable, "-m", "benchmarks.timing", module]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=ROOT, env=variables, **pipes)

    def ask(self, **request) -> dict:
        """Return the answer to a request.

        Raises:
          UserError: the child says that it failed, or is gone.
        """
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        reply = json.loads(line) if line else {"error": f"ended with status {self._process.wait()}"}
        if "error" in reply:
            raise UserError(f"{self._module}: {reply['error']}")
        return reply

    def build(self, name: str, options: dict) -> "Contender":
        """Build a step of options["batch_size"] images, in place of the one of that name."""
        self.ask(name=name, build=options)
        return Contender(name, options, functools.partial(self.ask, name=name))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()


@dataclass
class Contender:
    """A step under a name.

    Attributes:
      ask: function of a request, as `run=10` or `ask="facts"`, that returns the answer.
      seconds: of a step, in each turn.
    """

    name: str
    options: dict
    ask: Callable[..., dict]
    seconds: list[float] = field(default_factory=list)
    _last: dict | None = None

    def run(self, count: int) -> float:
        """Return the seconds of a step, over `count` steps at a time.

        Raises:
          UserError: steps were not counted, or an array did not move to finite numbers: nothing was timed.
        """
        before, reply = self._last, self.ask(run=count)
        self._last = reply
        if before and reply["steps"] - before["steps"] != count:
            raise UserError(f"{self.name}: {reply['steps'] - before['steps']} steps happened, {count} were timed")
        for old, new in zip(before["sums"] if before else [], reply["sums"], strict=bool(before)):
            if old == new or not all(map(math.isfinite, new)):
                raise UserError(f"{self.name}: parameters did not change to finite numbers; nothing was timed")
        return reply["seconds"] / count

    def figures(self) -> dict:
        """Return milliseconds of a step and images/s."""
        rates = [self.options.get("batch_size", 0) / seconds for seconds in self.seconds]
        return {"ms": spread([1e3 * seconds for seconds in self.seconds]), "images_per_sec": spread(rates)}

    def ratio(self, other: "Contender") -> dict:
        """Return (images/s of this) / (images/s of the other), turn by turn, for batches of one size."""
        return spread([theirs / mine for mine, theirs in zip(self.seconds, other.seconds, strict=True)])


def spread(values: list[float]) -> dict:
    """Return median, lowest and highest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def interleave(contenders: list[Contender], turns: int) -> None:
    """Time all contenders in turn, after a warm-up of each."""
    counts = []
    for one in contenders:
        one.run(1)  # compiles
        counts.append(min(max(1, int(MIN_TIMED_SEC / one.run(1))), MAX_STEPS))
        one.seconds = []
    for _ in range(turns):
        for one, count in zip(contenders, counts, strict=True):
            one.seconds.append(one.run(count))


def try_each(child: Child, choices: list[dict], deadline: float) -> tuple[Contender | None, list[dict]]:
    """Time each choice of options until the deadline by `time.monotonic`.

    Returns:
      The fastest, if any works, ready to be timed again; and the figures of each, or its "error".
    """
    best, tried = None, []
    for options in choices:
        if tried and time.monotonic() > deadline:
            break
        name = "second" if best and best.name == "first" else "first"  # in place of one that was slower
        try:
            contender = child.build(name, options)
            interleave([contender], 3)
        except UserError as error:
            tried.append({"options": options, "error": str(error)})
            continue
        tried.append({"options": options, **contender.figures()})
        if best is None or statistics.median(contender.seconds) < statistics.median(best.seconds):
            best = contender
    return best, tried


if __name__ == "__main__":
    serve(sys.argv[1])
