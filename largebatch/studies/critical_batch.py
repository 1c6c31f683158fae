"""Critical batch size: how large a batch saves steps in proportion, measured by sweeps or by branches of a run.

A sweep gives the steps to a target at several batch sizes, to which `fit_steps` fits a curve. Branches start from
checkpoints of one run, with its optimizer's moments, at the rate that it had there, scaled to their own batch. All
see the same number of images. After Merrill et al. 2025, "Critical Batch Size Revisited".
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from largebatch.runs.load import load, steps_of
from largebatch.runs.reader import BATCH, Run, Study, number
from largebatch.util import UserError, expanded

if TYPE_CHECKING:  # a report does without them
    from ml_collections import config_dict

STEP = "train.init_step"  # field of the step from which a run branches
MOST_POINTS = 6  # checkpoints that are branched from, if the user names none
PARTS = 4  # validations of a branch; its loss is that of the last part
LARGEST_GROWTH = 64  # of the batch, if the user names no sizes
LINEAR = ("sgd", "lars")  # optimizers whose rate follows the batch linearly
NEARLY_ZERO = 0.01  # of the run's highest rate: at this rate or less every batch keeps up
# Relative to the loss of the run's own batch. With it branches of LAMB and Muon are within a factor of 2 of the
# fitted critical batch size, and so are those of SOAP-Muon, which was not used for the choice (LOG.md).
TOLERANCE = 0.15
RESAMPLES = 1000
log = logging.getLogger("largebatch")


# ---- from a sweep: steps to a target over batch sizes -------------------------------------------------------


@dataclass(frozen=True)
class StepsCurve:
    """Fitted steps to a target over the batch size B: S(B) = min_steps (1 + critical_batch_size / B).

    Attributes:
      critical_batch_size: batch size that needs twice the fewest steps and twice the fewest examples. inf if
        steps still fall in proportion at the largest batch measured; 0 if they do not fall at all.
      low, high: ends of its 95 % interval; None if no batch size has two seeds.
      min_steps: the fewest steps to the target, at any batch size; None if critical_batch_size is inf.
      min_examples: the fewest examples to the target; None if critical_batch_size is 0.
    """

    critical_batch_size: float
    low: float | None
    high: float | None
    min_steps: float | None
    min_examples: float | None

    def steps_at(self, batch_size):
        """Return the steps to the target at a batch size, or an array of them."""
        if math.isinf(self.critical_batch_size):
            return self.min_examples / np.asarray(batch_size, np.float64)
        return self.min_steps * (1 + self.critical_batch_size / np.asarray(batch_size, np.float64))


def fit_steps(batch_sizes, steps, *, resamples: int = RESAMPLES, seed: int = 0) -> StepsCurve | None:
    """Fit S(B) = S_min (1 + B_crit / B), that is (S / S_min - 1) (E / E_min - 1) = 1 with E = S B.

    McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", equations 2.11 and 5.1. Least squares in
    log S; the interval is the 2.5 and 97.5 percentile of a bootstrap over the seeds of each batch size.

    Args:
      batch_sizes, steps: batch size and steps to the target, one entry per seed, [N].
    Returns:
      The fit; None with fewer than 3 different batch sizes, since the curve has two parameters.
    """
    batch, steps = np.asarray(batch_sizes, np.float64), np.asarray(steps, np.float64)
    sizes = np.unique(batch)
    if len(sizes) < 3:
        return None
    # For a given B_crit the best log S_min is a mean, so only B_crit is searched. 100 times beyond the measured
    # sizes the curve is a straight line in the logarithms, and B_crit cannot be determined.
    log_critical = np.linspace(math.log(sizes[0] / 100), math.log(sizes[-1] * 100), 1000)  # [G]
    log_min_steps = np.log(steps) - np.log1p(np.exp(log_critical)[:, None] / batch)  # [G, N], by each seed
    critical = float(_best_critical(log_critical, log_min_steps, np.ones((1, len(batch))))[0])
    low = high = None
    if len(sizes) < len(batch):
        weights, rng = np.zeros((resamples, len(batch))), np.random.default_rng(seed)
        for size in sizes:  # seeds are drawn with replacement among those of the same batch size
            seeds = np.flatnonzero(batch == size)
            weights[:, seeds] = rng.multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), size=resamples)
        draws = _best_critical(log_critical, log_min_steps, weights)
        low, high = (float(end) for end in np.quantile(draws, [0.025, 0.975], method="inverted_cdf"))
    if math.isinf(critical):
        min_examples = float(np.exp(np.log(steps * batch).mean()))
        return StepsCurve(critical, low, high, min_steps=None, min_examples=min_examples)
    min_steps = float(np.exp((np.log(steps) - np.log1p(critical / batch)).mean()))
    return StepsCurve(critical, low, high, min_steps, min_examples=min_steps * critical or None)


def _best_critical(log_critical: np.ndarray, log_min_steps: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Find B_crit of least squares by a grid and then a parabola through the best point and its two neighbours.

    Args:
      log_critical: the grid, [G].
      log_min_steps: log S_min by each seed if B_crit is a point of the grid, [G, N].
      weights: how often each seed counts, for each of R fits, [R, N].
    Returns:
      B_crit of each fit, [R]; 0 or inf if the best is at an end of the grid.
    """
    last = len(log_critical) - 1
    # The weighted variance of log S_min over the seeds, times the sum of the weights: [R, G].
    sums = weights @ log_min_steps.T
    losses = weights @ (log_min_steps**2).T - sums**2 / weights.sum(1, keepdims=True)
    best = losses.argmin(1)
    inner = best.clip(1, last - 1)
    fits = np.arange(len(weights))
    left, middle, right = losses[fits, inner - 1], losses[fits, inner], losses[fits, inner + 1]
    curvature = left - 2 * middle + right
    shift = np.divide(left - right, 2 * curvature, out=np.zeros_like(middle), where=curvature > 0)
    spacing = log_critical[1] - log_critical[0]
    critical = np.exp(log_critical[inner] + shift.clip(-1, 1) * spacing)
    return np.select([best == 0, best == last], [0.0, np.inf], critical)


# ---- branches of a run: where they begin, and their configs ----------------------------------------------------


@dataclass(frozen=True)
class Branches:
    """Branches of a run, as study.json records them.

    Attributes:
      run: folder of the run that is branched.
      images: number of images that a branch trains on.
      sizes: batch sizes.
      points: rows of the run (step, examples_seen, batch_size, learning_rate, noise_scale) where branches begin.
    """

    run: str
    images: int
    sizes: list[int]
    points: list[dict]

    @classmethod
    def of_run(cls, run: str, images: int, sizes: list[int] | None, steps: list[int] | None) -> "Branches":
        """Choose the branches of a run.

        Args:
          sizes: batch sizes; None for the run's own times powers of two.
          steps: steps after which branches begin; None for a few, spread evenly up to the last.
        Raises:
          UserError: the run has no checkpoint of a chosen step, a branch would have too few steps, or none would
            have the run's own batch.
        """
        points = _chosen_points(_points_of(Path(expanded(run, "--branch"))), steps)
        own = sorted({point["batch_size"] for point in points})
        part, too_many = divmod(images, PARTS)
        if too_many or part % own[0]:
            raise UserError(f"--branch_images: {images}; allowed: multiples of {PARTS} steps of {own[0]}")
        if sizes is None:
            doubled = [own[0] << power for power in range(LARGEST_GROWTH.bit_length())]
            sizes = sorted({*own, *(size for size in doubled if part % size == 0)})
        for size in sizes:
            if part % size:
                raise UserError(
                    f"--branch_sizes: {size}; allowed: divisors of {part}, a part of --branch_images {images}"
                )
        for size in own:
            if size not in sizes:
                raise UserError(f"--branch_sizes: {sizes}; allowed: with the run's own, {size}")
        return cls(run, images, list(sizes), points)

    def suggest(self, trial) -> None:
        """Suggest every batch size at every point; see `space.Space`."""
        trial.suggest_categorical(STEP, [point["step"] for point in self.points])
        trial.suggest_categorical(BATCH, self.sizes)

    def derive(self, config: "config_dict.ConfigDict") -> None:
        """Change a run's config to that of the branch with its init_step and batch.size."""
        point = next(point for point in self.points if point["step"] == config.train.init_step)
        config.train.init_from = self.run
        config.train.target_accuracy = config.train.target_score = None
        config.train.inner_steps, config.train.outer_steps = self.images // PARTS // config.batch.size, PARTS
        config.batch.update(trace=None, hold_last=False, per_device_batch_size=None, auto=False, max_size="full")
        if config.sync.mode == "post_local":
            config.sync.mode = "local" if point["step"] >= config.sync.start_step else "every_step"
            config.sync.start_step = 0
        if config.sync.mode == "every_step":
            config.sync.update(every=1, outer_learning_rate=1.0, outer_momentum=0.0)
        config.optimizer.learning_rate = point["learning_rate"]
        if config.schedule.b2_scaling == "half_life":  # its value at that batch
            config.optimizer.b2 **= point["batch_size"] / config.schedule.reference_batch_size
        is_linear = config.optimizer.name in LINEAR
        config.schedule.update(name="constant", scaling="linear" if is_linear else "sqrt")
        config.schedule.update(b2_scaling="none" if is_linear else "half_life")
        config.schedule.update(reference_batch_size=point["batch_size"], decay_steps=())
        config.schedule.update(warmup_steps=None, warmup_epochs=None, warmup_examples=None)
        config.schedule.update(decay_by="rate", decay_over="steps")
        config.checkpoint.keep = 2


def _points_of(run: Path) -> list[dict]:
    """Return the rows of a run where branches may begin; warn of those with a learning rate of nearly 0.

    Raises:
      UserError: there is no such row, or this is no run folder.
    """
    rows, saved = load(run).rows, set(steps_of(run))
    points = [
        {
            "step": row["step"],
            "examples_seen": row["examples_seen"],
            "batch_size": row["global_batch_size"],
            "learning_rate": row["learning_rate"],
            "noise_scale": number(row.get("noise_scale")),
        }
        for row in rows
        if row.get("step") in saved
    ]
    if not points:
        allowed = "a run with checkpoint.keep as large as train.outer_steps"
        raise UserError(f"--branch: {run} has no checkpoint of a validation; allowed: {allowed}")
    least = NEARLY_ZERO * max(number(row.get("learning_rate")) or 0.0 for row in rows)
    moving = [point for point in points if point["learning_rate"] > least]
    still = ", ".join(str(point["step"]) for point in points if point not in moving)
    problem = f"--branch: the learning rate of {run} is nearly 0 at step {still}: branches tell nothing"
    if not moving:
        raise UserError(f"{problem}; allowed: a run at a constant rate")
    if still:
        log.warning("%s; none begins there", problem)
    return moving


def _chosen_points(points: list[dict], steps: list[int] | None) -> list[dict]:
    """Return the points of these steps; without steps up to MOST_POINTS, spread evenly up to the last."""
    if steps is None:
        count = min(MOST_POINTS, len(points))
        return [points[-(-index * len(points) // count) - 1] for index in range(1, count + 1)]
    by_step = {point["step"]: point for point in points}
    missing = [str(step) for step in steps if step not in by_step]
    if missing:
        raise UserError(
            f"--branch_steps: {', '.join(missing)}; allowed: validations with a checkpoint, "
            f"{', '.join(map(str, by_step))}"
        )
    return [by_step[step] for step in steps]


# ---- branches of a run: their losses ---------------------------------------------------------------------------


@dataclass(frozen=True)
class CriticalBatch:
    """Critical batch size at one point of a run, above which larger batches do not keep up.

    It is the largest batch size whose branch keeps up: its training loss over the last part of its images is at
    most TOLERANCE above that of the run's own batch. Between two sizes the loss is interpolated linearly in the
    logarithm of the size.

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
    for point in (study.description.get("branches") or {}).get("points", []):
        own, (sizes, losses) = point["batch_size"], _losses_at(study, point)
        if len(sizes) < 2 or own not in sizes or not np.isfinite(losses[:, sizes.index(own)]).all():
            continue
        base, num_seeds, mean = sizes.index(own), len(losses), losses.mean(0)
        low = high = None
        if num_seeds > 1:
            drawn = np.random.default_rng(0).integers(num_seeds, size=(RESAMPLES, num_seeds))
            ends = [largest_that_keeps_up(sizes, losses[rows].mean(0), base) for rows in drawn]
            low, high = (float(end) for end in np.quantile(ends, [0.025, 0.975], method="inverted_cdf"))
        critical = CriticalBatch(
            step=point["step"],
            examples_seen=point["examples_seen"],
            base=own,
            size=largest_that_keeps_up(sizes, mean, base),
            low=low,
            high=high,
            noise_scale=number(point.get("noise_scale")),
            losses=dict(zip(sizes, mean.tolist(), strict=True)),
            seeds=num_seeds,
        )
        found.append(critical)
    return found


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


def largest_that_keeps_up(
    sizes: Sequence[int], losses: np.ndarray, base: int, tolerance: float = TOLERANCE
) -> float:
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
    header = ["step", "images_seen", "batch", "critical_batch", "low", "high", "seeds", "noise_scale"]
    lines = []
    for critical in found:
        size = f"above {max(critical.losses)}" if math.isinf(critical.size) else f"{critical.size:.0f}"
        figures = [critical.low, critical.high, critical.seeds, critical.noise_scale]
        shown = ["" if figure is None else f"{figure:.0f}" for figure in figures]
        lines.append([str(critical.step), str(critical.examples_seen), str(critical.base), size, *shown])
    return header, lines


def batch_warmup(found: list[CriticalBatch]) -> list[tuple[int, int]]:
    """Return a batch schedule, (first step, batch size) of each stage, whose branches lost nothing by it.

    The batch starts with the run's own, and doubles once it has seen as many images as a point from which a branch
    of the doubled batch lost nothing: without tolerance, since small losses add up over a run. It never shrinks.
    """
    size, step, seen = found[0].base, 0, 0
    stages = [(0, size)]
    for critical in found:
        steps = -(-max(critical.examples_seen - seen, 0) // size)
        step, seen = step + steps, seen + steps * size
        sizes, losses = list(critical.losses), np.array(list(critical.losses.values()))
        largest = largest_that_keeps_up(sizes, losses, sizes.index(critical.base), tolerance=0.0)
        while 2 * size <= min(largest, max(sizes)):
            size *= 2
        if size > stages[-1][1]:
            stages.append((step, size))
    return stages
