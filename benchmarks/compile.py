"""bench.py compile: seconds to the first step of train.py, with empty and filled caches of data and programs."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from largebatch.cli import ROOT
from largebatch.runs.summary import git_commit, versions
from largebatch.util import UserError

CONFIGS = "eurosat_muon,eurosat_v3_32"
PARTS = ("data", "compile", "train", "evaluation")  # of a run's seconds
IMAGES = ("--config.dataset.name=synthetic", "--config.dataset.num_examples=1000", "--config.dataset.image_size=64")
ONE_STEP = ("--config.train.inner_steps=1", "--config.train.outer_steps=1", "--config.schedule.warmup_steps=None")


def bench_compile(configs: str | None) -> dict:
    """Start configs twice each, on synthetic images.

    Args:
      configs: names of files of configs/, with commas between; None for CONFIGS.
    """
    rows = [row for config in (configs or CONFIGS).split(",") for row in starts(config)]
    return {"command": "compile", "starts": rows, "versions": versions(), "commit": git_commit()}


def starts(config: str) -> list[dict]:
    """Return the seconds of two runs of one step, the second with what the first left in the caches.

    Raises:
      UserError: a run failed.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", f"--config=configs/{config}.py", *IMAGES, *ONE_STEP]
        environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        for state in ("cold", "warm"):
            run, began = Path(folder) / state, time.time()
            places = [f"--config.augment.cache_dir={folder}/cache", f"--workdir={run}"]
            done = subprocess.run([*command, *places], cwd=ROOT, env=environment, capture_output=True, text=True)
            to_exit = time.time() - began
            if done.returncode:
                raise UserError(f"train.py: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
            seconds = json.loads((run / "summary.json").read_text())["seconds"]
            # The first line of metrics.jsonl is written when the first step has been validated.
            to_first = (run / "metrics.jsonl").stat().st_mtime - began - seconds["evaluation"]
            row = {"config": config, "state": state, "to_first_step": to_first, "to_exit": to_exit}
            rows.append(row | {name: seconds[name] for name in PARTS})
    return rows


def print_compile(result: dict) -> None:
    """Print a line for each start."""
    for row in result["starts"]:
        parts = ", ".join(f"{name} {row[name]:.2f}" for name in PARTS)
        shown = f"{row['to_first_step']:.2f} s to the first step, {row['to_exit']:.2f} to exit ({parts})"
        print(f"{row['config']}, {row['state']} caches: {shown}")
