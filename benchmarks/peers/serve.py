"""What every peer offers: by hand it times itself; bench.py drives it, as a child or in its own process.

python -m benchmarks.peers.torch_step --batch_size 512 --micro_batch_size 128 --autocast --compile
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

IMAGE_SHAPE, NUM_CLASSES, NUM_IMAGES = (64, 64, 3), 10, 4096
MEAN, STD = 127.5, 64.0
LEARNING_RATE = 1e-3


class Step(NamedTuple):
    """A training step that is ready: `run(n)` does n updates and waits for them; `updates` is the
    optimizer's own count; `params` are all parameters as NumPy arrays; `facts` is whatever else can be
    said of it as JSON."""

    run: Callable[[int], None]
    updates: Callable[[], int]
    params: Callable[[], list[np.ndarray]]
    facts: Callable[[], dict] = dict


def random_images(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """uint8 images [NUM_IMAGES, H, W, C] and int32 labels: what a step costs does not depend on them."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (NUM_IMAGES, *IMAGE_SHAPE), np.uint8)
    return images, rng.integers(0, NUM_CLASSES, NUM_IMAGES, np.int32)


def batches(batch_size: int, seed: int = 0):
    """Endless index arrays [batch_size], each image once per pass (several passes where a batch needs them)."""
    rng, left = np.random.default_rng(seed), np.empty(0, np.int64)
    while True:
        while len(left) < batch_size:
            left = np.concatenate([left, rng.permutation(NUM_IMAGES)])
        yield left[:batch_size]
        left = left[batch_size:]


def digest(step: Step) -> dict:
    """The update count, and two sums of each parameter array: enough to see whether each of them moved."""
    sums = [
        [float(np.sum(p, dtype=np.float64)), float(np.sum(np.square(p, dtype=np.float64)))] for p in step.params()
    ]
    return {"updates": step.updates(), "sums": sums}


def _answer(build, request: dict, held: dict[str, Step]) -> dict:
    """One request of a parent: {"build": options} | {"run": n} | {"digest": true} | {"facts": true}, of the
    step called "name"; building under a name that is taken drops what it named."""
    name = request.get("name", "")
    if "build" in request:
        held.pop(name, None)
        held[name] = build(request["build"])
    elif "run" in request:
        held[name].run(request["run"])
    elif "digest" in request:
        return digest(held[name])
    elif "facts" in request:
        return held[name].facts()
    else:
        raise ValueError(f"unknown request {request}")
    return {}


def main(build: Callable[[dict], Step], defaults: dict) -> None:
    """The command of a peer: an option per entry of `defaults`; --serve answers lines of JSON instead."""
    parser = argparse.ArgumentParser()
    for name, value in defaults.items():
        kind = {"action": "store_true"} if isinstance(value, bool) else {"type": type(value), "default": value}
        parser.add_argument(f"--{name}", **kind)
    parser.add_argument("--serve", action="store_true")
    options = vars(parser.parse_args())
    if options.pop("serve"):
        held, out = {}, sys.stdout
        sys.stdout = sys.stderr  # whatever a library prints is not an answer
        for line in sys.stdin:
            try:
                answer = _answer(build, json.loads(line), held)
            except Exception as error:  # an option that does not work here is the parent's to report
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=out, flush=True)
        return
    step = build(options)
    step.run(2)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        step.run(1)
        seconds.append(time.perf_counter() - begin)
    print(f"{options['batch_size'] / statistics.median(seconds):,.0f} images/s")
