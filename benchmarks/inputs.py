"""bench.py input: seconds of each part of bringing images onto the devices, and from start to first update."""

import concurrent.futures
import json
import math
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax

import augment
import model
from benchmarks.timing import ROOT
from configs import eurosat
from largebatch.config import rules
from largebatch.config.fields import Config
from largebatch.data import placement
from largebatch.data.batching import choose_sharding
from largebatch.hosts.clock import Clock
from largebatch.hosts.start import start_jax
from largebatch.runs.summary import git_commit, versions
from largebatch.training.views import expansion
from largebatch.util import UserError

PLACINGS = 3
STARTS = ("cold", "warm")  # by what is in the cache of compiled programs
PARTS = ("data", "compile", "train", "evaluation")  # of a run's seconds


def bench_input(path: str) -> dict:
    """Decodes, caches, expands and places the zip or folder `path`, in a fresh cache."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as cache_dir:
        config = make_config(path, cache_dir)
        with clock.measure("list, decode and cache"):
            cache = augment.prepare_cache(config)
        num_images = cache.layout.num_rows
        with clock.measure("open a sound cache"):
            augment.prepare_cache(config)
        # Each in a process of its own, so that no page or buffer of an earlier one helps or hinders.
        placings = [in_new_process(place, path, cache_dir) for _ in range(PLACINGS)]
        starts = {name: start(path, cache_dir) for name in STARTS}
    seconds, num_views = dict(clock.seconds), augment.VIEW_COUNTS[config.augment.views]
    seconds["read, verify and place"] = statistics.median(placing.seconds for placing in placings)
    return {
        "command": "input",
        "images": num_images,
        "decoded_bytes": num_images * cache.layout.row_bytes,
        "seconds": seconds,
        "place_seconds": [placing.seconds for placing in placings],
        "place_gb_per_sec": placings[0].all_bytes / seconds["read, verify and place"] / 1e9,
        "training_image_bytes_on_devices": placings[0].training_bytes,
        "expected_training_image_bytes": cache.layout.counts["train"]
        * num_views
        * math.prod(cache.layout.image_shape),
        "peak_resident_bytes": max(placing.peak_resident_bytes for placing in placings),
        "start": starts,
        "devices": jax.device_count(),
        "platform": jax.default_backend(),
        "versions": versions(),
        "git_commit": git_commit(),
    }


def make_config(path: str, cache_dir: str) -> Config:
    """Return the config of EuroSAT with other images and another cache."""
    config = rules.check(eurosat.get_config().to_dict(), model.MODELS)
    return config.replace(dataset={"path": path}, augment={"cache_dir": cache_dir, "storage": "expanded"})


def in_new_process(function, *arguments):
    """What `function` returns in a new process."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


@dataclass(frozen=True)
class Placing:
    """What it took to bring a cache onto the devices; bytes are of images."""

    seconds: float
    all_bytes: int
    training_bytes: int
    peak_resident_bytes: int


def place(path: str, cache_dir: str) -> Placing:
    """Reads, verifies, expands and places a cache that is there."""
    start_jax()
    config = make_config(path, cache_dir)
    cache = augment.prepare_cache(config)
    begin = time.perf_counter()
    views = augment.VIEW_COUNTS[config.augment.views]
    sharding = choose_sharding(None, cache.layout.counts["train"], jax.device_count(), views)
    expand = expansion(config.augment.storage, views)
    data = placement.place(cache, sharding, config.dataset.split_seed, expand)
    validation = data.validation.resident  # none where it does not stay on the devices
    jax.block_until_ready((data.train.arrays, validation))
    seconds = time.perf_counter() - begin
    training_bytes = data.train.arrays["images"].nbytes
    validation_bytes = validation.images.nbytes if validation else 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Placing(seconds, training_bytes + validation_bytes, training_bytes, peak)


def start(path: str, cache_dir: str) -> dict:
    """A whole run of one update: seconds of its parts, and from the start of the process to its first update.

    The first line of metrics.jsonl is written when the first update is validated.

    Raises:
      UserError: the run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable,
            "train.py",
            "--config=configs/eurosat.py",
            f"--config.dataset.path={path}",
            f"--config.augment.cache_dir={cache_dir}",
            f"--workdir={run}",
            "--config.train.inner_steps=1",
            "--config.train.outer_steps=1",
        ]
        environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        begin = time.time()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        to_exit = time.time() - begin
        if done.returncode:
            raise UserError(f"train.py ended with status {done.returncode}: {done.stderr.strip()}")
        seconds = json.loads((run / "summary.json").read_text())["seconds"]
        to_validated = (run / "metrics.jsonl").stat().st_mtime - begin
    parts = {name: seconds[name] for name in PARTS}
    return {"to_first_update": to_validated - seconds["evaluation"], "to_exit": to_exit, **parts}


def print_input(result: dict) -> None:
    """The result of `bench_input`, a line each."""
    for name, value in result["seconds"].items():
        print(f"{name:28} {value:8.2f} s")
    print(f"{'place':28} {result['place_gb_per_sec']:8.2f} GB/s")
    for cache, seconds in result["start"].items():
        parts = ", ".join(f"{name} {seconds[name]:.2f}" for name in PARTS)
        name = f"to first update, {cache}"
        print(f"{name:28} {seconds['to_first_update']:8.2f} s, of {seconds['to_exit']:.2f} to exit ({parts})")
    for name in ("training_image_bytes_on_devices", "expected_training_image_bytes", "peak_resident_bytes"):
        print(f"{name.replace('_', ' '):36} {result[name] / 1e9:.4f} GB")
