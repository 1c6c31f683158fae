"""The micro-batches and ghost batches of a run, and the groups between which it measures its gradient's noise."""

import dataclasses
from collections.abc import Callable

import numpy as np

from largebatch.config.fields import BatchConfig, LogConfig, ModelConfig, ScheduleConfig
from largebatch.data.batching import DataSharding, Grouping
from largebatch.hardware.chips import Hardware, auto_micro_batch_size
from largebatch.optim.noise_scale import NoisePlan
from largebatch.util import BadSetting

# Fewest groups of a device in a step that measures the noise, where most steps do not; also the factor between two
# sizes of groups.
NOISE_GROUPS = 8
NOISE_EVERY = 10  # steps from one measurement to the next on accelerators, where the noise is needed


@dataclasses.dataclass(frozen=True)
class MicroBatchPlan:
    """The micro-batches in which a device computes its part of a batch."""

    grouping: Grouping
    noise: NoisePlan | None  # how the gradient's noise is measured; None where it is not
    single: bool  # whether programs are to know that every device has one micro-batch in every step
    by_slices: bool  # whether steps read slices of the rows on a device, see `step.MicroBatchReader`
    predicted_at_once: int  # images per forward pass of validation


def plan_micro_batches(
    batch_sizes: np.ndarray,
    sharding: DataSharding,
    hardware: Hardware,
    activation_bytes: Callable[[], int],
    *,
    batch: BatchConfig,
    model: ModelConfig,
    schedule: ScheduleConfig,
    log: LogConfig,
    in_any_order: bool,
) -> MicroBatchPlan:
    """Plan the micro-batches of a run.

    Args:
      batch_sizes: all batch sizes that the run may come to, ascending.
      activation_bytes: returns the bytes of an image's activations; called on GPUs.
      batch, model, schedule, log: sections of the config.
      in_any_order: whether every step takes every example on a device once, and all of them lie there as rows.
    Raises:
      BadSetting: batch normalisation would see single images, or noise that is needed could not be measured.
    """
    wanted, platform = batch.micro_batch_size, hardware.platform
    if wanted == "auto":
        wanted = auto_micro_batch_size(hardware, model.name, activation_bytes)
    grouping = choose_grouping(batch, batch_sizes, sharding, wanted)
    size = grouping.micro_batch_size
    if model.norm == "batch":
        _refuse_single_images(batch_sizes, grouping.group_size, sharding)
    needs_noise = batch.auto or schedule.scaling == "adascale"
    every = log.noise_every
    if every == "auto":
        every = 1 if platform == "cpu" else NOISE_EVERY if needs_noise else 0
    unit = grouping.group_size if model.norm == "batch" else 1
    if every and needs_noise:
        _refuse_a_single_group(int(batch_sizes[0]), unit, sharding)
    # On CPUs reading costs next to nothing, and all storages give the same bits.
    by_slices = in_any_order and platform != "cpu" and not every and model.norm != "batch"
    # On a GPU each iteration of a loop costs launches. Elsewhere it costs next to nothing, and serves more runs.
    fewest, most = sharding.share_bounds(int(batch_sizes[0]))[0], sharding.share_bounds(int(batch_sizes[-1]))[1]
    return MicroBatchPlan(
        grouping=grouping,
        noise=plan_noise(every, schedule.noise_decay, batch_sizes, sharding, size, unit) if every else None,
        single=platform == "gpu" and fewest > 0 and most <= size,
        by_slices=by_slices,
        predicted_at_once=wanted,
    )


def choose_grouping(batch: BatchConfig, batch_sizes: np.ndarray, sharding: DataSharding, wanted: int) -> Grouping:
    """Choose the micro-batches and ghost batches of a run.

    Args:
      batch_sizes: all batch sizes that the run may come to, ascending.
      wanted: images of a gradient evaluation.
    """
    most_per_device = sharding.share_bounds(int(batch_sizes[-1]))[1]
    # A device's only group may be smaller than a ghost batch; it needs no place for more images than it has.
    unit = min(batch.ghost_size or 1, most_per_device)
    most_units = -(-most_per_device // unit)
    units = min(max(wanted // unit, 1), most_units)
    if batch.micro_batch_size == "auto" and most_units % units:
        # About as many, at most a sixteenth more, so that all fill the fewest micro-batches evenly. For example,
        # 5,400 in 6 parts of 1,024 would be padded by a seventh; 5 parts of 1,080 have no padding.
        fewest = -(-most_units // (units + units // 16))
        units = -(-most_units // fewest)
    size = units * unit
    return Grouping(size, unit if batch.ghost_size else size)


def _refuse_single_images(batch_sizes: np.ndarray, size: int, sharding: DataSharding) -> None:
    """Refuse batches in which a group of some device, whose part is split evenly, would have a single image."""
    for batch_size in batch_sizes:
        fewest, most = sharding.share_bounds(int(batch_size))
        if fewest == 0 or min(count // -(-count // size) for count in range(fewest, most + 1)) < 2:
            raise BadSetting(
                f"model.norm: 'batch' with batches of {batch_size} in ghost batches of up to {size} on "
                f"{sharding.num_devices} devices; allowed: at least 2 images in each, or 'group' or 'none'"
            )


def plan_noise(
    every: int, decay: float, batch_sizes: np.ndarray, sharding: DataSharding, micro_batch_size: int, unit: int
) -> NoisePlan:
    """Plan how a run measures the noise of its gradient.

    Where every step measures, micro-batches keep their size as long as there are two of them: smaller ones would
    make all of training slower. Where few steps measure, each device's part is cut into 8 groups or more. Ghost
    batches are never cut, which would change the step.

    Args:
      every: steps from one measurement to the next.
      decay: decay of the moving averages, per measurement.
      batch_sizes: all batch sizes that the run may come to, ascending.
      unit: images that are never cut: those of a ghost batch with batch normalisation, else 1.
    """
    least_groups = NOISE_GROUPS if every > 1 else 2 if sharding.num_devices == 1 else 1
    # The fewest units that a device has of the largest batch and of the smallest.
    largest, smallest = (-(-sharding.share_bounds(int(batch_sizes[end]))[0] // unit) for end in (-1, 0))
    sizes = [micro_batch_size // unit]
    if least_groups > 1:
        if -(-largest // sizes[0]) < least_groups:
            sizes = [max(largest // least_groups, 1)]
        while -(-smallest // sizes[-1]) < least_groups and sizes[-1] > 1:
            sizes.append(max(sizes[-1] // NOISE_GROUPS, 1))
    return NoisePlan(decay, every, tuple(size * unit for size in sizes), least_groups)


def _refuse_a_single_group(smallest_batch: int, unit: int, sharding: DataSharding) -> None:
    """Refuse batches in which there are no two groups between which to measure the noise."""
    needed = "since noise is measured between them with batch.auto and AdaScale"
    if smallest_batch == 1:
        raise BadSetting(f"batch.size: batches from 1 on; allowed: at least 2 images, {needed}")
    if sharding.num_devices == 1 and smallest_batch <= unit:
        raise BadSetting(
            f"batch.ghost_size: ghost batches of up to {unit} in batches from {smallest_batch} on; "
            f"allowed: at least two in each, {needed}"
        )
