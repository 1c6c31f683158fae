"""The batch size of every step: fixed, by a trace, by the devices, or grown where a rate would decay."""

import dataclasses
from typing import Self

import numpy as np

from largebatch.config.fields import BatchConfig
from largebatch.optim.traces import read_trace
from largebatch.util import BadSetting


@dataclasses.dataclass(frozen=True)
class PiecewiseConstant:
    """A value that holds from one step to another; the last one holds for ever."""

    starts: np.ndarray  # int64 [stages], the first step of each stage, ascending from 0
    values: np.ndarray  # [stages], int64 or float64

    @classmethod
    def constant(cls, value) -> Self:
        """Return a constant value."""
        return cls(np.zeros(1, np.int64), np.array([value]))

    def at(self, steps: np.ndarray | int) -> np.ndarray:
        """Return the values at `steps`."""
        return self.values[self._stage_of(steps)]

    def start_of(self, steps: np.ndarray) -> np.ndarray:
        """Return the first step of the stage that each of `steps` is in, int64."""
        return self.starts[self._stage_of(steps)]

    def total_before(self, steps: np.ndarray | int) -> np.ndarray:
        """Return the sum of the values of all steps before `steps`, int64, in closed form."""
        stage = self._stage_of(steps)
        return self._totals_at_starts()[stage] + (steps - self.starts[stage]) * self.values[stage]

    def steps_to(self, total: np.ndarray | int) -> np.ndarray:
        """Return how many steps it takes to reach the sum `total`, which is above 0; int64."""
        totals = self._totals_at_starts()
        stage = np.searchsorted(totals, total, side="left") - 1
        return (self.starts[stage] + -(-(total - totals[stage]) // self.values[stage])).astype(np.int64)

    def first(self, num_steps: int) -> Self:
        """Return the stages that begin within the first `num_steps` steps."""
        count = np.searchsorted(self.starts, num_steps)
        return dataclasses.replace(self, starts=self.starts[:count], values=self.values[:count])

    def changed_from(self, step: int, value) -> Self:
        """Return the same values up to `step`, and `value` from there on."""
        before = self.first(step)
        return dataclasses.replace(
            self, starts=np.append(before.starts, step), values=np.append(before.values, value)
        )

    def _stage_of(self, steps: np.ndarray | int) -> np.ndarray:
        return np.searchsorted(self.starts, steps, side="right") - 1

    def _totals_at_starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(np.diff(self.starts) * self.values[:-1])])


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
            trace = read_trace(batch, num_examples)
            return cls(trace.starts, trace.sizes)
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

    def restored(self, state: list[list[int]], step: int) -> "BatchSchedule":
        """Return the sizes of a checkpoint, followed from `step` on by the size for these devices."""
        starts, values = np.array(state, np.int64)
        restored, size = dataclasses.replace(self, starts=starts, values=values), int(self.at(0))
        if self.source == "devices" and restored.at(step) != size:
            return restored.changed_from(step, size)
        return restored


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
        return np.unique(sizes.values if schedule.scale_invariant else sizes.first(schedule.num_steps).values)
    smallest = schedule.max_batch_size
    largest = resolve_batch_size(batch.max_size, schedule.examples_per_epoch, field="batch.max_size")
    if largest < smallest:
        raise BadSetting(f"batch.max_size: {largest}; allowed: at least batch.size, {smallest}")
    return np.unique([*smallest * 2 ** np.arange((largest // smallest).bit_length()), largest])


# Power of the batch's growth that multiplies the rate at a decay step, by schedule.decay_by. "rate": the batch
# does not grow. "batch": rate / batch falls as it would have, Smith et al. 2018, "Don't Decay the Learning Rate,
# Increase the Batch Size". "seesaw": rate / sqrt(batch) does, Meterez et al. 2025, "Seesaw".
DECAY_BY = {"rate": 0.0, "batch": 1.0, "seesaw": 0.5}


def grow_at_decays(
    decay: PiecewiseConstant, decay_by: str, num_steps: int, batch_size: int, largest: int
) -> tuple[int, BatchSchedule, PiecewiseConstant]:
    """Let the batch grow where the rate would decay, so that fewer steps see as many examples.

    Where the data set is too small for the batch to grow so far, the rate falls for the rest.

    Args:
      decay: factors on the peak rate, by step of the first batch size.
      decay_by: a key of DECAY_BY.
      num_steps: steps of a run that keeps the first batch size.
      largest: examples in an epoch, which no batch exceeds.
    Returns:
      The number of steps, their batch sizes, and the factors on the peak rate that are left.
    """
    sizes = np.minimum(np.rint(batch_size / decay.values), largest).astype(np.int64)
    starts, seen = [0], 0
    for end, size in zip([*decay.starts[1:].tolist(), num_steps], sizes.tolist(), strict=True):
        left = max(end * batch_size - seen, 0)  # the stage before may have seen more than its part
        steps = -(-left // size)
        starts.append(starts[-1] + steps)
        seen += steps * size
    factors = decay.values * (sizes / batch_size) ** DECAY_BY[decay_by]
    has_steps = np.diff(starts) > 0
    num_steps, starts = starts[-1], np.array(starts[:-1], np.int64)[has_steps]
    return num_steps, BatchSchedule(starts, sizes[has_steps]), PiecewiseConstant(starts, factors[has_steps])
