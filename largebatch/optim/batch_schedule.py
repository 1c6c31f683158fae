"""The batch size of every step: fixed, by a trace, by the devices, or grown where a rate would decay."""

import bisect
import dataclasses
from collections.abc import Callable

import numpy as np

from largebatch.config.fields import BatchConfig
from largebatch.optim import traces
from largebatch.optim.traces import PiecewiseConstant
from largebatch.util import BadSetting


@dataclasses.dataclass(frozen=True)
class BatchSchedule(PiecewiseConstant):
    """The batch size of every step.

    Attributes:
      source: where sizes come from: "config", all of them; "noise", the batch grows with the measured noise scale;
        "devices", every device takes as many examples.
    """

    source: str = "config"

    @classmethod
    def from_config(cls, batch: BatchConfig, num_examples: int, num_devices: int) -> "BatchSchedule":
        """Return the sizes that a config asks for, before a decay step or training changes them.

        Args:
          num_examples: examples in an epoch, which no batch exceeds.
          num_devices: devices that share a batch.
        Raises:
          BadSetting: a size is too large, or the trace is bad.
        """
        if batch.trace is not None:
            sizes = read_trace(batch, num_examples).batch_sizes
            return cls(sizes.starts, sizes.values)
        if batch.per_device_batch_size is None:
            size = resolve_batch_size(batch.size, num_examples)
            return dataclasses.replace(cls.constant(size), source="noise" if batch.auto else "config")
        size = batch.per_device_batch_size * num_devices
        if size > num_examples:
            raise BadSetting(
                f"batch.per_device_batch_size: {batch.per_device_batch_size} on {num_devices} devices; allowed: "
                f"{num_examples} examples in all (all views of the training images)"
            )
        return dataclasses.replace(cls.constant(size), source="devices")

    @property
    def found_in_training(self) -> bool:
        """True where training finds the later sizes, so that they are not known before the first step."""
        return self.source != "config"

    def state(self) -> list[list[int]] | None:
        """Return the sizes so far, for a checkpoint; None where the config says them all."""
        return [self.starts.tolist(), self.values.tolist()] if self.found_in_training else None

    def restored(self, state: list[list[int]] | None, step: int) -> "BatchSchedule":
        """Return the sizes of a checkpoint, followed from `step` on by the size for these devices."""
        if state is None:
            return self
        starts, values = (np.array(part, np.int64) for part in state)
        restored, size = dataclasses.replace(self, starts=starts, values=values), int(self.at(0))
        if self.source == "devices" and restored.at(step) != size:
            return restored.changed_from(step, size)
        return restored


def read_trace(batch: BatchConfig, largest: int = traces.LARGEST) -> traces.Trace:
    """Read the trace that a config names, of batches of at most `largest` examples.

    Raises:
      BadSetting: the trace is bad.
    """
    if isinstance(batch.trace, str):
        return traces.read_once(batch.trace, batch.per_device_batch_size, batch.time_per_update, largest)
    return traces.from_list(tuple(batch.trace), largest)


def resolve_batch_size(size: int | str, num_examples: int, field: str = "batch.size") -> int:
    """Return the number of examples that a field means for a training set of `num_examples` views."""
    if size == "full":
        return num_examples
    if size > num_examples:
        raise BadSetting(
            f"{field}: {size}; allowed: an integer from 1 to {num_examples} (all views of the training images), or "
            "'full'"
        )
    return size


def possible_batch_sizes(batch: BatchConfig, schedule) -> np.ndarray:
    """Return all batch sizes that a run may come to, int64, ascending.

    Args:
      schedule: a `schedules.Schedule`, as it is when the run starts.
    Raises:
      BadSetting: with batch.auto, the largest is below the smallest.
    """
    if not batch.auto:
        sizes = schedule.batch_sizes
        # With AdaScale a run may have more steps than its schedule has scale-invariant ones.
        return np.unique(sizes.values if schedule.scale_invariant else sizes.first(schedule.num_updates).values)
    smallest = schedule.max_batch_size
    largest = resolve_batch_size(batch.max_size, schedule.examples_per_epoch, field="batch.max_size")
    if largest < smallest:
        raise BadSetting(f"batch.max_size: {largest}; allowed: at least batch.size, {smallest}")
    doublings = smallest * 2 ** np.arange((largest // smallest).bit_length())
    return np.unique([*doublings, largest])


# Power of the batch's growth that multiplies the rate at a decay step, by schedule.decay_by. "rate": the batch
# does not grow. "batch": rate / batch falls as it would have, Smith et al. 2018, "Don't Decay the Learning Rate,
# Increase the Batch Size". "seesaw": rate / sqrt(batch) does, Meterez et al. 2025, "Seesaw".
DECAY_BY = {"rate": 0.0, "batch": 1.0, "seesaw": 0.5}


@dataclasses.dataclass(frozen=True)
class DecayPlan:
    """The part of a Schedule that decay steps shape."""

    num_updates: int
    batch_sizes: BatchSchedule
    rate_batch_sizes: PiecewiseConstant  # batch sizes by which the scaling rule sets the peak rate
    decay_factors: PiecewiseConstant | None  # factors on the peak rate; None where a shape gives the rate


@dataclasses.dataclass(frozen=True)
class Steps:
    """The stages of a decaying rate, counted in steps of the first batch size."""

    starts: np.ndarray  # int64 [stages], the first step of each stage, ascending from 0
    factors: np.ndarray  # float64 [stages], factors on the peak rate; 1 in the first stage
    end: int  # the number of steps


def given_steps(decay_steps: tuple[int, ...], factor: float, num_updates: int) -> Steps:
    """Return a decay by `factor` at each of `decay_steps`."""
    starts = np.array([0, *decay_steps], np.int64)
    # Python's power, since the last digit of NumPy's depends on the CPU.
    return Steps(starts, np.array([factor**step for step in range(len(starts))]), num_updates)


def steps_along(shape: Callable[[int], float], factor: float, num_updates: int) -> Steps:
    """Return stages in place of a falling shape: the rate decays by `factor` whenever the shape has fallen by it.

    At the last stage, a batch that grows by 1 / `factor` at each stage would next have a stage without a step, or
    fewer than two steps to the end of the run.

    Args:
      shape: step -> part of the peak rate; never rises.
    """
    starts, factors = [0], [1.0]
    while True:
        next_factor = factors[-1] * factor
        start = bisect.bisect_left(range(num_updates), -next_factor, key=lambda update: -shape(update))
        if (start - starts[-1]) * factors[-1] < 1 or (num_updates - start) * next_factor < 2:
            return Steps(np.array(starts, np.int64), np.array(factors), num_updates)
        starts.append(start)
        factors.append(next_factor)


def plan_decay(steps: Steps, decay_by: str, batch_sizes: BatchSchedule, examples_per_epoch: int) -> DecayPlan:
    """Plan decaying stages: the rate falls, or the batch grows and fewer steps see as many examples.

    Where the data set is too small for the batch to grow so far, the rate falls for the rest.

    Args:
      decay_by: a key of DECAY_BY.
      batch_sizes: one stage only, where the batch grows.
    """
    if decay_by == "rate":
        return DecayPlan(steps.end, batch_sizes, batch_sizes, PiecewiseConstant(steps.starts, steps.factors))
    batch_size = int(batch_sizes.values[0])
    sizes = np.minimum(np.rint(batch_size / steps.factors), examples_per_epoch).astype(np.int64)
    starts, seen = [0], 0
    for end, size in zip([*steps.starts[1:].tolist(), steps.end], sizes.tolist(), strict=True):
        left = max(end * batch_size - seen, 0)  # the stage before may have seen more than its part
        updates = -(-left // size)
        starts.append(starts[-1] + updates)
        seen += updates * size
    factors = steps.factors * (sizes / batch_size) ** DECAY_BY[decay_by]
    has_updates = np.diff(starts) > 0
    starts, num_updates = np.array(starts[:-1], np.int64)[has_updates], starts[-1]
    return DecayPlan(
        num_updates=num_updates,
        batch_sizes=BatchSchedule(starts, sizes[has_updates]),
        rate_batch_sizes=PiecewiseConstant.constant(batch_size),
        decay_factors=PiecewiseConstant(starts, factors[has_updates]),
    )
