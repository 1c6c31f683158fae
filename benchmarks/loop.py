"""bench.py loop: what a finished run spent outside its devices."""

import itertools
import json
import statistics
from pathlib import Path

from largebatch.util import UserError


def bench_loop(path: str) -> dict:
    """The share of each outer loop but the first that was neither training nor evaluation.

    Raises:
      UserError: the run folder `path` has no readable metrics, or too few.
    """
    try:
        rows = [json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text().splitlines()]
        walls = [after["wall_sec"] - before["wall_sec"] for before, after in itertools.pairwise(rows)]
        busy = [row["train_sec"] + row["eval_sec"] for row in rows[1:]]
        evaluation = sum(row["eval_sec"] for row in rows[1:])
        rates = [row["images_per_sec"] for row in rows]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--path: {path} holds no readable metrics.jsonl ({error})") from error
    if not walls:
        raise UserError(f"--path: {path} has {len(rows)} outer loops; at least 2 are needed")
    shares = [1 - on_devices / wall for on_devices, wall in zip(busy, walls, strict=True)]
    return {
        "command": "loop",
        "run": path,
        "outer_loops": len(shares),
        "overhead_median": statistics.median(shares),
        "overhead_max": max(shares),
        "evaluation_share": evaluation / sum(walls),
        "images_per_sec": statistics.median(rates),
    }


def print_loop(result: dict) -> None:
    """The result of `bench_loop`, a line."""
    print(
        f"{result['outer_loops']} outer loops: {result['overhead_median']:.2%} outside the devices "
        f"({result['overhead_max']:.2%} at most), {result['evaluation_share']:.1%} evaluation, "
        f"{result['images_per_sec']:,.0f} images/s"
    )
