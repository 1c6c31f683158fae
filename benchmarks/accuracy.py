"""bench.py accuracy: seconds, images and updates to a target score, over seeds.

Each seed is a run of train.py like any other; a run that is there already is not run again.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.timing import ROOT
from largebatch.runs.summary import versions
from largebatch.util import UserError

COLUMNS = {"steps_to_target": "updates", "examples_to_target": "images", "sec_to_target": "seconds of training"}


def bench_accuracy(arguments: list[str], seeds: int, target: float, path: str) -> dict:
    """Trains with the arguments of train.py and seeds 0 .. seeds - 1 until `target`, into `path`/seed_N.

    Raises:
      UserError: a run failed; its message.
    """
    folder = Path(path).resolve()
    summaries = [train(arguments, seed, target, folder / f"seed_{seed}") for seed in range(seeds)]
    return {
        "command": "accuracy",
        "arguments": arguments,
        "target_score": target,
        "seeds": seeds,
        "reached": sum(summary["steps_to_target"] is not None for summary in summaries),
        "to_target": {name: [summary[name] for summary in summaries] for name in COLUMNS},
        "final_score": [summary["final_score"] for summary in summaries],
        "best_score": [summary["best_score"] for summary in summaries],
        "images_per_sec": [summary["images_per_sec"] for summary in summaries],
        "devices": summaries[0]["devices"],
        "platform": summaries[0]["platform"],
        "versions": versions(),
        "git_commit": summaries[0]["git_commit"],
    }


def train(arguments: list[str], seed: int, target: float, workdir: Path) -> dict:
    """The summary of a run with this seed, which stops at `target`.

    Raises:
      UserError: it failed; its message.
    """
    options = [f"--config.seed={seed}", f"--config.train.target_score={target}", f"--workdir={workdir}"]
    command = [sys.executable, "train.py", *arguments, *options]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"train.py ended with status {done.returncode}"]
        raise UserError(f"seed {seed}: {lines[-1]}")
    return json.loads((workdir / "summary.json").read_text())


def print_accuracy(result: dict) -> None:
    """Medians with their range over the seeds that reached the target, and how many did."""
    print(f"{result['reached']} of {result['seeds']} seeds reached {result['target_score']}")
    for name, label in COLUMNS.items():
        costs = [cost for cost in result["to_target"][name] if cost is not None]
        if costs:
            print(f"{label:22} {statistics.median(costs):12,.1f} ({min(costs):,.1f} to {max(costs):,.1f})")
    final = result["final_score"]
    spread = f" ± {statistics.stdev(final):.4f}" if len(final) > 1 else ""
    print(f"{'final score':22} {statistics.mean(final):12.4f}{spread} (n = {len(final)})")
