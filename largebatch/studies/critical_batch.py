"""Critical batch size over a run, from the losses of its branches (see `branching`).

At each point of the run it is the largest batch size whose branch keeps up: its training loss over the last part
of its images is at most TOLERANCE above that of the run's own batch. Between two batch sizes that were tried, the
loss is interpolated linearly in the logarithm of the batch size.
"""

import math
from dataclasses import dataclass

import numpy as np

from largebatch.runs.reader import BATCH, Run, Study, number

STEP = "train.init_step"  # field of the step from which a run branches
# Relative to the loss of the run's own batch. With it branches of LAMB and Muon are within a factor of 2 of the
# fitted critical batch size, and so are those of SOAP-Muon, which was not used for the choice (LOG.md).
TOLERANCE = 0.15
RESAMPLES = 1000
LEFT_OUT = "no training loss in its last row: left out of the critical batch"


@dataclass(frozen=True)
class CriticalBatch:
    """Critical batch size at one point of a run, above which larger batches do not keep up.

    Attributes:
      size: the critical batch size; inf if the largest that was tried keeps up.
      low, high: ends of its 95 % interval, a bootstrap over seeds; None with one seed.
      noise_scale: gradient noise scale of the run at this point; None if not measured.
      losses: mean loss over seeds, by batch size.
      seeds: number of those seeds; they ended at each of these sizes.
    """

    step: int
    examples_seen: int
    base: int
    size: float
    low: float | None
    high: float | None
    noise_scale: float | None
    losses: dict[int, float]
    seeds: int


def critical_batches(study: Study) -> list[CriticalBatch]:
    """Return the critical batch sizes of a study of branches, along the run.

    Points where the run's own batch has not ended, or diverged, are left out: nothing can be compared with it.
    """
    found = []
    for point in study.description.get("branch_points") or []:
        sizes, losses = _losses_at(study, point)
        has_base = point["batch_size"] in sizes and np.isfinite(losses[:, sizes.index(point["batch_size"])]).all()
        if has_base and len(sizes) > 1:
            found.append(_critical_batch(point, sizes, losses))
    return found


def left_out(study: Study) -> list[Run]:
    """Return the branches that are done but have no training loss, the problem that LEFT_OUT describes."""
    has_points = bool(study.description.get("branch_points"))
    return [run for run in study.runs if has_points and run.status == "done" and _last_loss(run) is None]


def _last_loss(run: Run) -> float | None:
    """Return the training loss of a branch's last row, inf if it diverged; None if it is not known."""
    if run.status == "diverged":
        return math.inf
    return number(run.rows[-1].get("train_loss")) if run.status == "done" and run.rows else None


def _losses_at(study: Study, point: dict) -> tuple[list[int], np.ndarray]:
    """Return the batch sizes that can be compared at a point, and their losses [seeds, sizes].

    Sizes are compared on the seeds that ended at all of them, since another seed sees other images. Sizes with more
    seeds of the run's own size come first; a size that would leave no seed is left out.
    """
    by_size: dict[int, dict[int, float]] = {}
    for run in study.runs:
        loss, size, seed = _last_loss(run), number(run.field(BATCH)), number(run.field("seed"))
        if run.field(STEP) == point["step"] and None not in (loss, size, seed):
            by_size.setdefault(size, {})[seed] = loss
    seeds = set(by_size.get(point["batch_size"], ()))
    sizes = []
    for size in sorted(by_size, key=lambda size: (-len(seeds & by_size[size].keys()), size)):
        common = seeds & by_size[size].keys()
        if common:
            seeds, sizes = common, sorted([*sizes, size])
    return sizes, np.array([[by_size[size][seed] for size in sizes] for seed in sorted(seeds)])


def _critical_batch(point: dict, sizes: list[int], losses: np.ndarray) -> CriticalBatch:
    base, num_seeds = sizes.index(point["batch_size"]), len(losses)
    low = high = None
    if num_seeds > 1:
        rng = np.random.default_rng(0)
        drawn = rng.integers(num_seeds, size=(RESAMPLES, num_seeds))
        ends = [largest_that_keeps_up(sizes, losses[rows].mean(0), base) for rows in drawn]
        low, high = (float(end) for end in np.quantile(ends, [0.025, 0.975], method="inverted_cdf"))
    mean = losses.mean(0)
    return CriticalBatch(
        step=point["step"],
        examples_seen=point["examples_seen"],
        base=point["batch_size"],
        size=largest_that_keeps_up(sizes, mean, base),
        low=low,
        high=high,
        noise_scale=number(point.get("noise_scale")),
        losses=dict(zip(sizes, mean.tolist(), strict=True)),
        seeds=num_seeds,
    )


def largest_that_keeps_up(sizes: list[int], losses: np.ndarray, base: int, tolerance: float = TOLERANCE) -> float:
    """Interpolate the batch size at which losses rise above the tolerance; inf if they do not.

    Args:
      sizes: batch sizes, ascending.
      losses: loss of each size.
      base: index of the run's own size.
      tolerance: allowed excess, relative to the loss of the run's own size.
    """
    limit = losses[base] * (1 + tolerance)
    for index in range(base + 1, len(sizes)):
        if losses[index] > limit:
            before, after = losses[index - 1], losses[index]
            part = (limit - before) / (after - before) if math.isfinite(after) else 0.0
            return sizes[index - 1] * (sizes[index] / sizes[index - 1]) ** part
    return math.inf


def rows(found: list[CriticalBatch]) -> tuple[list[str], list[list[str]]]:
    """Return a table of critical batch sizes for a terminal: (header, rows)."""
    header = ["update", "images_seen", "batch", "critical_batch", "low", "high", "seeds", "noise_scale"]
    return header, [
        [
            str(critical.step),
            str(critical.examples_seen),
            str(critical.base),
            f"above {max(critical.losses)}" if math.isinf(critical.size) else _rounded(critical.size),
            _rounded(critical.low),
            _rounded(critical.high),
            str(critical.seeds),
            _rounded(critical.noise_scale),
        ]
        for critical in found
    ]


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


@dataclass(frozen=True)
class Stage:
    """Batch size, and the first step that has it."""

    first_update: int
    batch_size: int


def batch_warmup(found: list[CriticalBatch]) -> list[Stage]:
    """Return batch sizes for a run whose branches lost nothing by them.

    The batch starts with the run's own, and doubles once it has seen as many images as a point from which a branch
    of the doubled batch lost nothing: without tolerance, since small losses add up over a run. It never shrinks.
    """
    size, update, seen = found[0].base, 0, 0
    stages = [Stage(0, size)]
    for critical in found:
        updates = -(-max(critical.examples_seen - seen, 0) // size)
        update, seen = update + updates, seen + updates * size
        sizes, losses = list(critical.losses), np.array(list(critical.losses.values()))
        largest = largest_that_keeps_up(sizes, losses, sizes.index(critical.base), tolerance=0.0)
        while 2 * size <= min(largest, max(sizes)):
            size *= 2
        if size > stages[-1].batch_size:
            stages.append(Stage(update, size))
    return stages
