"""The rows of `bench.py card` about recipes: train.py over seeds, with accuracies and times."""

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.card_sizes import Size
from benchmarks.card_workers import is_installed
from benchmarks.timing import ROOT
from largebatch.util import UserError

# What trains the recipes, by the data that they take; the seconds without which a seed is not begun, on a card.
EUROSAT = {"eurosat_fast": 30.0, "eurosat_muon": 30.0, "eurosat_full_batch": 60.0, "eurosat_best": 80.0}
CIFAR10 = {"cifar10_speedrun": 30.0}
NEEDED = ("ml_collections", "PIL", "tifffile", "orbax")  # by train.py, beside what the step needs


def rows(make_row: Callable, size: Size, data: dict[str, str | None], folder: str) -> list:
    """Seed 0 of all recipes, then seed 1 and so on.

    Args:
      make_row: `card.Row`.
      data: "eurosat" and "cifar10", the files that were given.
      folder: for run folders and caches.
    """
    recipes = [("eurosat", "path", EUROSAT), ("cifar10", "cifar10", CIFAR10)]
    made = []
    for seed in range(size.seeds):
        for set_name, flag, configs in recipes:
            for config, least_sec in configs.items():
                skip = why_not(config, flag, data[set_name])
                if skip and seed:
                    continue  # seed 0 says so
                name, measure = (
                    f"{config} seed {seed}",
                    functools.partial(train, size, config, seed, data[set_name], folder),
                )
                made.append(make_row("recipes", name, measure, size.patience * least_sec, skip))
    return made


def why_not(config: str, flag: str, path: str | None) -> str | None:
    """Return the reason why a recipe cannot be trained, or None where it can."""
    if path is None:
        return f"--{flag} is not given"
    if not (ROOT / "configs" / f"{config}.py").exists():
        return f"there is no configs/{config}.py"
    if missing := [name for name in NEEDED if not is_installed(name)]:
        return f"train.py needs {', '.join(missing)}, not installed here"
    return None


def train(size: Size, config: str, seed: int, path: str, folder: str, deadline: float) -> dict:
    """A run of train.py: its score after the last update, and its times.

    Raises:
      UserError: it failed, with its last line; or did not end by the deadline.
    """
    workdir = Path(folder) / f"{config}_{seed}"
    command = [
        sys.executable,
        "train.py",
        f"--config=configs/{config}.py",
        f"--config.seed={seed}",
        f"--config.dataset.path={Path(path).resolve()}",
        f"--config.augment.cache_dir={Path(folder) / 'cache'}",
        f"--workdir={workdir}",
        *size.train,
    ]
    begin = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(0.0, deadline - begin))
    except subprocess.TimeoutExpired as error:
        raise UserError("train.py did not end in the time that was left") from error
    total_sec = time.monotonic() - begin
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"train.py ended with status {done.returncode}"]
        raise UserError(lines[-1])
    summary = json.loads((workdir / "summary.json").read_text())
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        "config": config,
        "seed": seed,
        **figures_of_run(lines),
        "total_sec": total_sec,
        "dtype": dtype_of(workdir),
    } | {
        "others": summary["final_others"],
        "status_of_run": summary["status"],
    }


def dtype_of(workdir: Path) -> str:
    """The dtype that a run's network computes in."""
    return json.loads((workdir / "config.json").read_text())["model"]["dtype"]


def figures_of_run(lines: list[dict]) -> dict:
    """Scores and times of a run, by the rows of its metrics.jsonl."""
    last = lines[-1]
    train_sec = sum(line["train_sec"] for line in lines)
    return {
        "updates": last["step"],
        "images": last["examples_seen"],
        "batch_size": last["global_batch_size"],
        "final_score": last["val_score"],
        "best_score": max(line["val_score"] for line in lines),
        "train_sec": train_sec,
        "compile_sec": sum(line["compile_sec"] for line in lines),
        "images_per_sec": last["examples_seen"] / train_sec,
    }
