"""Branches of a run, which measure how large a batch keeps up with its own: a study of sweep.py --branch.

Each branch starts from a checkpoint of the run, with its optimizer's moments. It trains at the rate that the run
had there, with a batch of its own. All see the same number of images. The rate is scaled by the square root of the
batch, with SGD and LARS linearly. After Merrill et al. 2025, "Critical Batch Size Revisited". The losses are
analysed in `critical_batch`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ml_collections import config_dict
from optuna.distributions import CategoricalDistribution

from largebatch.runs.load import load, steps_of
from largebatch.runs.reader import BATCH, number
from largebatch.studies.critical_batch import STEP
from largebatch.studies.space import SpaceFile
from largebatch.util import UserError, expanded

MOST_POINTS = 6  # checkpoints that are branched from, if the user names none
PARTS = 4  # validations of a branch; its loss is that of the last part
LARGEST_GROWTH = 64  # of the batch, if the user names no sizes
LINEAR = ("sgd", "lars")  # optimizers whose rate follows the batch linearly
NEARLY_ZERO = 0.01  # of the run's highest rate: at this rate or less every batch keeps up

log = logging.getLogger("largebatch")


@dataclass(frozen=True)
class BranchOptions:
    """Flags of sweep.py for branches.

    Attributes:
      run: folder of the run that is branched.
      images: number of images that a branch trains on.
      sizes: batch sizes; None for the run's own times powers of two.
      steps: steps after which branches begin; None for up to MOST_POINTS that the run has checkpoints of.
    """

    run: str
    images: int
    sizes: list[int] | None = None
    steps: list[int] | None = None


@dataclass(frozen=True)
class BranchPoint:
    """Validation of a run whose checkpoint still exists, with the values of its row."""

    step: int
    examples_seen: int
    batch_size: int
    learning_rate: float
    noise_scale: float | None


def branch_points(run: Path) -> list[BranchPoint]:
    """Return the points where branches of a run may begin; warn of those with a learning rate of nearly 0.

    Raises:
      UserError: there is no such point, or this is no run folder.
    """
    rows = load(run).rows
    saved = set(steps_of(run))
    points = [
        BranchPoint(
            step=row["step"],
            examples_seen=row["examples_seen"],
            batch_size=row["global_batch_size"],
            learning_rate=row["learning_rate"],
            noise_scale=number(row.get("noise_scale")),
        )
        for row in rows
        if row.get("step") in saved
    ]
    if not points:
        raise UserError(
            f"--branch: {run} has no checkpoint of a validation; allowed: a run with checkpoint.keep as large as "
            "train.outer_steps"
        )
    least = NEARLY_ZERO * max(number(row.get("learning_rate")) or 0.0 for row in rows)
    still = [point for point in points if point.learning_rate <= least]
    if still:
        updates = ", ".join(str(point.step) for point in still)
        problem = f"--branch: the learning rate of {run} is nearly 0 at update {updates}: branches tell nothing"
        if len(still) == len(points):
            raise UserError(f"{problem}; allowed: a run at a constant rate")
        log.warning("%s; none begins there", problem)
    return [point for point in points if point.learning_rate > least]


def recorded_points(description: dict) -> list[BranchPoint]:
    """Return the points in a study.json, since the run may have trained further; empty without branches.

    Raises:
      UserError: the points are damaged.
    """
    try:
        return [BranchPoint(**point) for point in description.get("branch_points") or []]
    except TypeError as error:
        raise UserError("--study: branch_points in its study.json: damaged") from error


def chosen_points(options: BranchOptions) -> list[BranchPoint]:
    """Return the points of the chosen steps; without chosen steps a few, spread evenly up to the last.

    Raises:
      UserError: the run has no checkpoint of a chosen step.
    """
    points, steps = branch_points(Path(expanded(options.run, "--branch"))), options.steps
    if steps is None:
        count = min(MOST_POINTS, len(points))
        return [points[-(-number * len(points) // count) - 1] for number in range(1, count + 1)]
    by_step = {point.step: point for point in points}
    missing = [step for step in steps if step not in by_step]
    if missing:
        raise UserError(
            f"--branch_steps: {', '.join(map(str, missing))}; allowed: validations with a checkpoint, "
            f"{', '.join(map(str, by_step))}"
        )
    return [by_step[step] for step in steps]


def branch_space(options: BranchOptions, points: Sequence[BranchPoint]) -> SpaceFile:
    """Create the space of a study of branches from these points.

    Raises:
      UserError: a branch would have too few steps, or none has the run's own batch.
    """
    own = sorted({point.batch_size for point in points})
    part, too_many = divmod(options.images, PARTS)
    if too_many or part % own[0]:
        raise UserError(f"--branch_images: {options.images}; allowed: multiples of {PARTS} updates of {own[0]}")
    sizes = options.sizes
    if sizes is None:
        doubled = [own[0] << power for power in range(LARGEST_GROWTH.bit_length())]
        sizes = sorted({*own, *(size for size in doubled if part % size == 0)})
    for size in sizes:
        if part % size:
            raise UserError(
                f"--branch_sizes: {size}; allowed: divisors of {part}, a part of --branch_images {options.images}"
            )
    for size in own:
        if size not in sizes:
            raise UserError(f"--branch_sizes: {sizes}; allowed: with the run's own, {size}")
    space = {
        STEP: CategoricalDistribution([point.step for point in points]),
        BATCH: CategoricalDistribution(list(sizes)),
    }

    def derive(config: config_dict.ConfigDict) -> None:
        point = next(point for point in points if point.step == config.train.init_step)
        _become_branch(config, options, point)

    return SpaceFile(space, derive, includes=None, sha256=None)


def _become_branch(config: config_dict.ConfigDict, options: BranchOptions, point: BranchPoint) -> None:
    """Change a run's config to that of a branch from `point`, with its own batch.size."""
    config.train.init_from = options.run
    config.train.target_accuracy = config.train.target_score = None
    config.train.inner_steps, config.train.outer_steps = options.images // PARTS // config.batch.size, PARTS
    fixed = {"trace": None, "hold_last": False, "per_device_batch_size": None, "auto": False, "max_size": "full"}
    config.batch.update(fixed)
    if config.sync.mode == "post_local":
        config.sync.mode = "local" if point.step >= config.sync.start_step else "every_step"
        config.sync.start_step = 0
    if config.sync.mode == "every_step":
        config.sync.update({"every": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0})
    config.optimizer.learning_rate = point.learning_rate
    if config.schedule.b2_scaling == "half_life":  # its value at that batch
        config.optimizer.b2 **= point.batch_size / config.schedule.reference_batch_size
    scaling = "linear" if config.optimizer.name in LINEAR else "sqrt"
    b2_scaling = "none" if config.optimizer.name in LINEAR else "half_life"
    config.schedule.update(
        {
            "name": "constant",
            "scaling": scaling,
            "b2_scaling": b2_scaling,
            "reference_batch_size": point.batch_size,
            "warmup_updates": None,
            "warmup_epochs": None,
            "warmup_examples": None,
            "decay_steps": (),
            "decay_by": "rate",
            "decay_over": "updates",
        }
    )
    config.checkpoint.keep = 2
