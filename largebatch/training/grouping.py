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
    single: bool  # see `has_one_micro_batch`
    by_slices: bool  # whether steps read slices of the rows on a device, see `step.SliceReader`
    predicted_at_once: int  # images per forward pass of validation


@dataclasses.dataclass(frozen=True)
class MicroBatchOptions:
    """Options that determine the micro-batches of a run, as fields of its config.

    Attributes:
      micro_batch_size, ghost_size: batch.micro_batch_size and batch.ghost_size.
      network, norm: model.name and model.norm.
      noise_every, noise_decay: log.noise_every and schedule.noise_decay.
      needs_noise: whether training depends on the noise: with batch.auto or AdaScale.
    """

    micro_batch_size: int | str
    ghost_size: int | None
    network: str
    norm: str
    noise_every: int | str
    noise_decay: float
    needs_noise: bool

    @classmethod
    def from_config(
        cls, batch: BatchConfig, model: ModelConfig, schedule: ScheduleConfig, log: LogConfig
    ) -> "MicroBatchOptions":
        """Take the options from the sections of a config."""
        return cls(
            micro_batch_size=batch.micro_batch_size,
            ghost_size=batch.ghost_size,
            network=model.name,
            norm=model.norm,
            noise_every=log.noise_every,
            noise_decay=schedule.noise_decay,
            needs_noise=batch.auto or schedule.scaling == "adascale",
        )


def plan_micro_batches(
    options: MicroBatchOptions,
    batch_sizes: np.ndarray,
    sharding: DataSharding,
    hardware: Hardware,
    activation_bytes: Callable[[], int],
    *,
    in_any_order: bool,
) -> MicroBatchPlan:
    """Plan the micro-batches of a run.

    Args:
      batch_sizes: all batch sizes that the run may come to, ascending.
      activation_bytes: returns the bytes of an image's activations; called on GPUs.
      in_any_order: whether every step takes every example on a device once, and all of them lie there as rows.
    Raises:
      BadSetting: batch normalisation would see single images, or noise that is needed could not be measured.
    """
    wanted, platform = options.micro_batch_size, hardware.platform
    if wanted == "auto":
        wanted = auto_micro_batch_size(hardware, options.network, activation_bytes)
    grouping = choose_grouping(options, batch_sizes, sharding, wanted)
    noise = plan_noise(options, batch_sizes, sharding, grouping, platform)
    # On CPUs reading costs next to nothing, and all storages give the same bits.
    by_slices = in_any_order and platform != "cpu" and noise is None and options.norm != "batch"
    single = has_one_micro_batch(batch_sizes, grouping, sharding, platform)
    return MicroBatchPlan(grouping, noise, single, by_slices, wanted)


# ---- micro-batches and ghost batches ------------------------------------------------------------------


def choose_grouping(
    options: MicroBatchOptions, batch_sizes: np.ndarray, sharding: DataSharding, wanted: int
) -> Grouping:
    """Choose the micro-batches and ghost batches of a run.

    Args:
      batch_sizes: all batch sizes that the run may come to, ascending.
      wanted: images of a gradient evaluation.
    Raises:
      BadSetting: batch normalisation would see single images.
    """
    most_per_device = sharding.share_bounds(int(batch_sizes[-1]))[1]
    # A device's only group may be smaller than a ghost batch; it needs no place for more images than it has.
    unit = min(options.ghost_size or 1, most_per_device)
    most_units = -(-most_per_device // unit)
    units = min(max(wanted // unit, 1), most_units)
    if options.micro_batch_size == "auto":
        units = _even_size(units, most_units)
    size = units * unit
    grouping = Grouping(size, unit if options.ghost_size else size)
    if options.norm == "batch":
        _refuse_single_images(batch_sizes, grouping.group_size, sharding)
    return grouping


def has_one_micro_batch(batch_sizes: np.ndarray, grouping: Grouping, sharding: DataSharding, platform: str) -> bool:
    """Tell whether programs are to know that every device has one micro-batch in every step of a run.

    On a GPU each iteration of a loop costs launches. Elsewhere a loop costs next to nothing, and serves more runs.

    Args:
      batch_sizes: all batch sizes that the run may come to, ascending.
      platform: cpu | gpu | tpu
    """
    fewest, most = sharding.share_bounds(int(batch_sizes[0]))[0], sharding.share_bounds(int(batch_sizes[-1]))[1]
    return platform == "gpu" and fewest > 0 and most <= grouping.micro_batch_size


def _even_size(size: int, count: int) -> int:
    """Return about `size`, at most a sixteenth more, so that `count` examples fill the fewest micro-batches evenly.

    For example, 5,400 examples in 6 parts of 1,024 would be padded by a seventh; 5 parts of 1,080 have no padding.
    """
    if count % size == 0:
        return size
    fewest = -(-count // (size + size // 16))
    return -(-count // fewest)


def _refuse_single_images(batch_sizes: np.ndarray, size: int, sharding: DataSharding) -> None:
    for batch_size in batch_sizes:
        if _smallest_group(*sharding.share_bounds(int(batch_size)), size) < 2:
            raise BadSetting(
                f"model.norm: 'batch' with batches of {batch_size} in ghost batches of up to {size} on "
                f"{sharding.num_devices} devices; allowed: at least 2 images in each, or 'group' or 'none'"
            )


def _smallest_group(fewest: int, most: int, size: int) -> int:
    """Return the size of the smallest group of a device that has `fewest` to `most` of a batch, split evenly."""
    if fewest == 0:
        return 0
    return min(count // -(-count // size) for count in range(fewest, most + 1))


# ---- the noise of the gradient ------------------------------------------------------------------------


def resolve_noise_every(options: MicroBatchOptions, platform: str) -> int:
    """Return the steps from one measurement of the noise to the next by log.noise_every; 0 measures none."""
    if options.noise_every != "auto":
        return options.noise_every
    if platform == "cpu":
        return 1
    return NOISE_EVERY if options.needs_noise else 0


def plan_noise(
    options: MicroBatchOptions,
    batch_sizes: np.ndarray,
    sharding: DataSharding,
    grouping: Grouping,
    platform: str,
) -> NoisePlan | None:
    """Plan how a run measures the noise of its gradient; return None where it does not.

    Where every step measures, micro-batches keep their size as long as there are two of them: smaller ones would
    make all of training slower. Where few steps measure, each device's part is cut into 8 groups or more. Ghost
    batches are never cut, which would change the step.

    Args:
      batch_sizes: all batch sizes that the run may come to, ascending.
      platform: cpu | gpu | tpu
    Raises:
      BadSetting: the run needs the noise, and there are no two groups between which to measure it.
    """
    every = resolve_noise_every(options, platform)
    if not every:
        return None
    unit = grouping.group_size if options.norm == "batch" else 1
    smallest_batch = int(batch_sizes[0])
    if options.needs_noise:
        _refuse_a_single_group(smallest_batch, unit, sharding)
    least_groups = NOISE_GROUPS if every > 1 else 2 if sharding.num_devices == 1 else 1
    # The fewest units that a device has of the largest batch and of the smallest.
    of_largest, of_smallest = (
        -(-sharding.share_bounds(batch_size)[0] // unit) for batch_size in (int(batch_sizes[-1]), smallest_batch)
    )
    sizes = [grouping.micro_batch_size // unit]
    if least_groups > 1:
        if -(-of_largest // sizes[0]) < least_groups:
            sizes = [max(of_largest // least_groups, 1)]
        while -(-of_smallest // sizes[-1]) < least_groups and sizes[-1] > 1:
            sizes.append(max(sizes[-1] // NOISE_GROUPS, 1))
    return NoisePlan(options.noise_decay, every, tuple(size * unit for size in sizes), least_groups)


def _refuse_a_single_group(smallest_batch: int, unit: int, sharding: DataSharding) -> None:
    needed = "since noise is measured between them with batch.auto and AdaScale"
    if smallest_batch == 1:
        raise BadSetting(f"batch.size: batches from 1 on; allowed: at least 2 images, {needed}")
    if sharding.num_devices == 1 and smallest_batch <= unit:
        raise BadSetting(
            f"batch.ghost_size: ghost batches of up to {unit} in batches from {smallest_batch} on; "
            f"allowed: at least two in each, {needed}"
        )
