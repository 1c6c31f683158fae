"""bench.py input: seconds of each part of bringing images onto the devices, and from start to first update."""

import concurrent.futures
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import augment
from benchmarks.timing import ROOT
from configs import eurosat
from largebatch.data import sources
from largebatch.errors import UserError
from largebatch.hosts.clock import Clock
from largebatch.hosts.start import start_jax
from largebatch.runs.provenance import git_commit, versions

PLACES = 3


def bench_input(path: str) -> dict:
    """Decodes, expands, caches and places the zip or folder `path`, in a fresh cache."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = _config(path, folder)
        with clock.measure("decode"):
            dataset = sources.find_source(config.dataset.name, path=path).load()
        num_images, num_bytes = len(dataset.labels), dataset.images.nbytes
        del dataset
        with clock.measure("decode, expand and cache"):
            cache = augment.prepare_cache(config)
        with clock.measure("open a sound cache"):
            augment.prepare_cache(config)
        places = [_alone(_place, path, folder) for _ in range(PLACES)]
        starts = [_start(path, folder) for _ in range(2)]
    seconds = dict(clock.seconds)
    seconds["expand and cache"] = seconds["decode, expand and cache"] - seconds["decode"]
    seconds["read, verify and place"] = statistics.median(place["seconds"] for place in places)
    return {
        "command": "input",
        "images": num_images,
        "decoded_bytes": num_bytes,
        "seconds": seconds,
        "place_seconds": [place["seconds"] for place in places],
        "place_gb_per_sec": places[0]["bytes"] / seconds["read, verify and place"] / 1e9,
        "training_image_bytes_on_devices": places[0]["training_bytes"],
        "expected_training_image_bytes": cache.count("train") * augment.NUM_VIEWS * int(np.prod(cache.image_shape)),
        "peak_resident_bytes": max(place["peak"] for place in places),
        "start": {"cold": starts[0], "warm": starts[1]},
        "devices": jax.device_count(),
        "platform": jax.default_backend(),
        "versions": versions(),
        "git_commit": git_commit(),
    }


def _config(path: str, folder: str):
    config = eurosat.get_config()
    config.dataset.path, config.augment.cache_dir = path, folder
    return config


def _alone(function, *arguments):
    """Runs it in a process of its own, so that no page or buffer of an earlier turn helps or hinders."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def _place(path: str, folder: str) -> dict:
    start_jax()
    config = _config(path, folder)
    cache = augment.prepare_cache(config)
    begin = time.perf_counter()
    placed = augment.place(cache, config.dataset.split_seed)
    jax.block_until_ready((placed.train, placed.val_images))
    return {
        "seconds": time.perf_counter() - begin,
        "bytes": placed.train["images"].nbytes + placed.val_images.nbytes,
        "training_bytes": placed.train["images"].nbytes,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _start(path: str, folder: str) -> dict:
    """A whole run of one update: seconds of its parts, and from the start of the process to its first update.

    The first line of metrics.jsonl is written when the first update is validated.
    """
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "train.py", "--config=configs/eurosat.py", f"--config.dataset.path={path}"]
        command += [f"--config.augment.cache_dir={folder}", f"--workdir={runs}/run"]
        command += ["--config.train.inner_steps=1", "--config.train.outer_steps=1"]
        begin = time.time()
        environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        total = time.time() - begin
        if done.returncode:
            raise UserError(f"train.py ended with status {done.returncode}: {done.stderr.strip()}")
        parts = json.loads((Path(runs) / "run" / "summary.json").read_text())["seconds"]
        validated = (Path(runs) / "run" / "metrics.jsonl").stat().st_mtime - begin
    sections = {name: parts[name] for name in ("data", "compile", "train", "evaluation")}
    return {"to_first_update": validated - parts["evaluation"], "to_exit": total, **sections}


def print_input(result: dict) -> None:
    """The result of `bench_input`, a line each."""
    for name, value in result["seconds"].items():
        print(f"{name:28} {value:8.2f} s")
    print(f"{'place':28} {result['place_gb_per_sec']:8.2f} GB/s")
    for cache, start in result["start"].items():
        parts = ", ".join(f"{name} {start[name]:.2f}" for name in ("data", "compile", "train", "evaluation"))
        name = f"to first update, {cache}"
        print(f"{name:28} {start['to_first_update']:8.2f} s, of {start['to_exit']:.2f} to exit ({parts})")
    for name in ("training_image_bytes_on_devices", "expected_training_image_bytes", "peak_resident_bytes"):
        print(f"{name.replace('_', ' '):36} {result[name] / 1e9:.4f} GB")
