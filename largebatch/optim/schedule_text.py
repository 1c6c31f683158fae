"""Batch sizes and learning rates in words, for the lines before the first step."""

import numpy as np

from largebatch.config.fields import BatchConfig, SyncConfig
from largebatch.optim.schedules import Schedule
from largebatch.optim.traces import read_trace


def describe_schedule(schedule: Schedule) -> str:
    """Describe in one line how the learning rate goes, and the batch where the schedule grows it."""
    sizes = schedule.rate_batch_sizes.first(schedule.num_steps).values
    peaks = schedule.peak_rates(sizes)
    unit = "scale-invariant steps" if schedule.scale_invariant else "steps"
    text = f"learning rate {format_range(peaks)}{_scaling(schedule, sizes, peaks)},"
    if schedule.warmup_steps:
        starts = np.minimum(schedule.warmup_starts.values[0], peaks)
        text += f" reached from {format_range(starts)} in {schedule.warmup_steps:,} {unit}, then"
    return f"{text} {_shape(schedule, peaks, unit)}{_b2(schedule)}"


def describe_batches(batch: BatchConfig, sync: SyncConfig) -> str:
    """Describe how batches change and when devices synchronise, where either differs from the default."""
    text = ""
    if batch.trace is not None:
        text += f", from {read_trace(batch).text}"
    elif batch.per_device_batch_size is not None:
        text += ", following the devices"
    if batch.auto:
        text += f", growing with the noise scale up to {batch.max_size}"
    if sync.mode != "every_step":
        first = f" from step {sync.start_step}" if sync.start_step else ""
        text += f"; local steps{first}, averaged every {sync.every} steps"
    return text


def _scaling(schedule: Schedule, sizes: np.ndarray, peaks: np.ndarray) -> str:
    options, base = schedule.options, schedule.base_learning_rate
    rule, reference = options.scaling, options.reference_batch_size
    if rule == "none":
        return ""
    if rule == "adascale":
        return f" at batch {reference:,}, times the measured gain of a larger batch (AdaScale)"
    root = "the root of " if rule == "sqrt" else ""
    ratio = f"{root}batch {format_range(sizes)} / reference {reference:,}"
    return f" = {base:g} x {format_range(peaks / base, '.4g')} ({rule}: {ratio})"


def _shape(schedule: Schedule, peaks: np.ndarray, unit: str) -> str:
    options, length = schedule.options, f"{schedule.num_steps:,} {unit}"
    if options.decay_by != "rate":
        shape = "a decay" if options.name == "step" else f"a {options.name} decay by steps"
        stages = zip(schedule.batch_sizes.starts, schedule.batch_sizes.values, schedule.decay.values, strict=True)
        batches = ", ".join(f"{size:,} from step {first:,} at {peaks[0] * left:g}" for first, size, left in stages)
        return f"{length} with a growing batch for {shape} of x {options.decay_factor:g}: batch {batches}"
    if options.name == "constant":
        return f"constant over {length}"
    if options.name == "step":
        return f"{length}, x {options.decay_factor:g} at {', '.join(map(str, options.decay_steps))}"
    final_rate = format_range(peaks * options.final_fraction)
    over_images = " over images" if options.decay_over == "images" else ""
    return f"{options.name}{over_images} to {final_rate} at {unit[:-1]} {schedule.num_steps:,}"


def _b2(schedule: Schedule) -> str:
    if schedule.options.b2_scaling == "none":
        return ""
    b2s = schedule.b2s(schedule.batch_sizes.first(schedule.num_steps).values)
    half_life = schedule.options.reference_batch_size * np.log(0.5) / np.log(schedule.base_b2)
    return f"; b2 {format_range(b2s)}: half of the second moment is of the last {half_life:,.0f} images"


def format_range(values: np.ndarray, form: str | None = None) -> str:
    """Format the lowest and the highest value, or the only one."""
    form = form or ("," if values.dtype.kind == "i" else "g")
    low, high = values.min(), values.max()
    return f"{low:{form}}" if low == high else f"{low:{form}} to {high:{form}}"
