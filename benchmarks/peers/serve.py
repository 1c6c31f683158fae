"""What every peer offers: by hand it times itself; bench.py drives it, as a child or in its own process.

python -m benchmarks.peers.torch_step --batch_size 512 --micro_batch_size 128 --autocast --compile
"""

import abc
import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

IMAGE_SHAPE, NUM_CLASSES, NUM_IMAGES = (64, 64, 3), 10, 4096
MEAN, STD = 127.5, 64.0
LEARNING_RATE = 1e-3
REPEATS = 5  # when a peer times itself


@dataclasses.dataclass(frozen=True)
class Progress:
    """What shows that work happened.

    Attributes:
      updates: done so far, as the work itself counts them.
      sums: a few sums of each array that every update changes.
    """

    updates: int
    sums: list[list[float]]


class Step(abc.ABC):
    """A training step that is ready to be timed."""

    @abc.abstractmethod
    def run(self, updates: int) -> None:
        """Does so many updates and waits for them."""

    @abc.abstractmethod
    def updates(self) -> int:
        """Updates so far, as the optimizer counts them."""

    @abc.abstractmethod
    def params(self) -> list[np.ndarray]:
        """All parameters."""

    def facts(self) -> dict:
        """Whatever else can be said of it, as JSON."""
        return {}

    def progress(self) -> Progress:
        """Two sums of each parameter array: enough to see whether each of them moved."""
        sums = []
        for array in self.params():
            total = np.sum(array, dtype=np.float64)
            squares = np.sum(np.square(array, dtype=np.float64))
            sums.append([float(total), float(squares)])
        return Progress(self.updates(), sums)


# ---- the images of every peer ------------------------------------------------------------------------


def random_images(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """uint8 images [NUM_IMAGES, H, W, C] and int32 labels: what a step costs does not depend on them."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (NUM_IMAGES, *IMAGE_SHAPE), np.uint8)
    return images, rng.integers(0, NUM_CLASSES, NUM_IMAGES, np.int32)


def normalise(images: np.ndarray) -> np.ndarray:
    """uint8 images as float32, on the host."""
    return (images.astype(np.float32) - MEAN) / STD


def batches(batch_size: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Endless index arrays [batch_size], each image once per pass (several passes where a batch needs them)."""
    rng, left = np.random.default_rng(seed), np.empty(0, np.int64)
    while True:
        while len(left) < batch_size:
            left = np.concatenate([left, rng.permutation(NUM_IMAGES)])
        yield left[:batch_size]
        left = left[batch_size:]


# ---- the command of a peer ---------------------------------------------------------------------------


def main(build: Callable[[dict], Step], defaults: dict) -> None:
    """The command of a peer: an option per entry of `defaults`; --serve answers lines of JSON instead."""
    parser = argparse.ArgumentParser()
    for name, value in defaults.items():
        if isinstance(value, bool):
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--serve", action="store_true")
    options = vars(parser.parse_args())
    if options.pop("serve"):
        serve(build)
    else:
        time_by_hand(build(options), options["batch_size"])


def time_by_hand(step: Step, batch_size: int) -> None:
    """Prints the median rate of a few updates."""
    step.run(2)
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        step.run(1)
        seconds.append(time.perf_counter() - begin)
    print(f"{batch_size / statistics.median(seconds):,.0f} images/s")


def serve(build: Callable[[dict], Step]) -> None:
    """Answers the requests on stdin, a line each, on stdout until stdin ends; see `answer`."""
    steps, out = {}, sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is not an answer
    for line in sys.stdin:
        try:
            reply = answer(build, json.loads(line), steps)
        except Exception as error:  # an option that does not work here is the parent's to report
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=out, flush=True)


def answer(build: Callable[[dict], Step], request: dict, steps: dict[str, Step]) -> dict:
    """One request of a parent: {"build": options} | {"run": n} | {"progress": true} | {"facts": true}.

    Each is of the step called request["name"]. A step that is built under a name that is taken replaces the other.
    """
    name = request.get("name", "")
    if "build" in request:
        steps.pop(name, None)  # first, so that there is memory for the new one
        steps[name] = build(request["build"])
    elif "run" in request:
        steps[name].run(request["run"])
    elif "progress" in request:
        return dataclasses.asdict(steps[name].progress())
    elif "facts" in request:
        return steps[name].facts()
    else:
        raise ValueError(f"unknown request {request}")
    return {}
