"""Learning rate and batch size of every step, as closed forms on the host.

Everything counts steps of the optimizer, never micro-batches. Step `t` comes after `t` others: the first is 0.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from flax import struct

from largebatch.config.fields import ScheduleConfig
from largebatch.optim.batch_schedule import BatchSchedule, DecayPlan, given_steps, plan_decay, steps_along
from largebatch.optim.traces import PiecewiseConstant
from largebatch.util import BadSetting

# Factor on the learning rate, by the ratio of the batch size to the reference batch size. linear: Goyal et
# al. 2017, "Accurate, Large Minibatch SGD", section 2.1; sqrt: Krizhevsky 2014, "One weird trick". With adascale
# (see noise_scale.py) the gain that is measured during training takes the place of a rule.
SCALING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": np.ones_like,
    "linear": lambda ratio: ratio,
    "sqrt": np.sqrt,
    "adascale": np.ones_like,
}
# Power to which b2 is taken, by the ratio of the batch sizes. half_life: as many examples as before halve the
# weight of a gradient in the second moment: Marek et al. 2025, "Small Batch Size Training for Language Models".
B2_SCALING: dict[str, Callable[[np.ndarray], np.ndarray]] = {"none": np.ones_like, "half_life": lambda ratio: ratio}
WARMUPS = ("warmup_updates", "warmup_epochs", "warmup_examples")  # a config gives one, or none
MOST_ROUNDING = 0.1  # largest relative error of 1 - b2 in float32
MOST_EXAMPLES = 2**62  # more examples than any run has; fits 64 bits


# ---- the shape of the rate after warm-up ------------------------------------------------------------


def constant(done: np.ndarray, final_fraction: float) -> np.ndarray:
    """Stay at the peak, to the end."""
    return np.ones(done.shape)


def linear(done: np.ndarray, final_fraction: float) -> np.ndarray:
    """Fall in a line from the peak to `final_fraction` of it."""
    return 1 - (1 - final_fraction) * done


def cosine(done: np.ndarray, final_fraction: float) -> np.ndarray:
    """Fall along half a cosine from the peak to `final_fraction` of it: Loshchilov and Hutter 2017, "SGDR"."""
    return final_fraction + (1 - final_fraction) * (1 + np.cos(np.pi * done)) / 2


# (part of the run after warm-up that is done, final fraction) -> part of the peak rate. "step", which counts decay
# steps, is not among them.
SHAPES = {"constant": constant, "linear": linear, "cosine": cosine}


# ---- the schedule --------------------------------------------------------------------------------------


@struct.dataclass
class UpdateInputs:
    """Inputs of the compiled loop for each step, as NumPy arrays [updates]; scalars for a single step."""

    epoch: np.ndarray  # int32, epoch in which the batch begins
    offset: np.ndarray  # int32, examples of that epoch before the batch
    batch_size: np.ndarray  # int32, examples over all devices
    # float32. With AdaScale it is a table of the whole run by scale-invariant step, below 0 beyond its end.
    learning_rate: np.ndarray
    b2: np.ndarray  # float32, decay of the optimizer's second moment


def epoch_and_offset(examples_before: np.ndarray, examples_per_epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return epoch and position in it, int32, of steps that start after `examples_before` (int64) examples.

    This is done on the host: the number of examples of a run does not fit 32 bits, an epoch does.
    """
    epoch, offset = np.divmod(np.asarray(examples_before, np.int64), examples_per_epoch)
    return epoch.astype(np.int32), offset.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The number of a run's steps, and their batch sizes and rates; made by `create_schedule`.

    With AdaScale (`scale_invariant`) rates go by scale-invariant step, of which there are `num_updates`.
    """

    options: ScheduleConfig
    base_learning_rate: float  # at the reference batch size
    base_b2: float  # at the reference batch size
    num_updates: int
    examples_per_epoch: int
    batch_sizes: BatchSchedule
    rate_batch_sizes: PiecewiseConstant  # batch sizes by which the scaling rule sets the peak rate
    decay_factors: PiecewiseConstant | None  # factors on the peak rate, where it falls by decay steps
    warmup_updates: int
    # The rate from which warm-up goes to the peak. More than one stage where the batch grows within it.
    warmup_starts: PiecewiseConstant

    @property
    def scale_invariant(self) -> bool:
        """True where rates go by AdaScale's scale-invariant steps, not by plain ones."""
        return self.options.scaling == "adascale"

    @property
    def max_batch_size(self) -> int:
        """The largest batch size of the run."""
        return int(self.batch_sizes.first(self.num_updates).values.max())

    def batch_size_at(self, update: int) -> int:
        """Return the batch size of one step."""
        return int(self.batch_sizes.at(update))

    def examples_before(self, update: int) -> int:
        """Return the number of examples that the steps before step `update` visit."""
        return int(self.batch_sizes.total_before(update))

    def learning_rates(self, updates: np.ndarray) -> np.ndarray:
        """Return the float64 rates of the int64 steps `updates` (scale-invariant steps with AdaScale)."""
        updates = np.asarray(updates, np.int64)
        peak = peak_rates(self.options, self.base_learning_rate, self.rate_batch_sizes.at(updates))

        start = np.minimum(self.warmup_starts.at(updates), peak)  # the peak is lower below the reference
        first = self.warmup_starts.start_of(updates)
        warmup = start + (peak - start) * (updates + 1 - first) / np.maximum(self.warmup_updates - first, 1)

        if self.decay_factors is not None:
            after_warmup = peak * self.decay_factors.at(updates)
        else:
            done, first, end = map(self._progress, (updates, self.warmup_updates, self.num_updates))
            after_warmup = peak * _shape_at(self.options, done, first, end)
        return np.where(updates < self.warmup_updates, warmup, after_warmup)

    def _progress(self, updates: np.ndarray | int) -> np.ndarray | int:
        """Return the steps or the images before the steps `updates`, by `decay_over`."""
        is_by_images = self.options.decay_over == "images"
        return self.batch_sizes.total_before(np.asarray(updates, np.int64)) if is_by_images else updates

    def learning_rate_at(self, update: int) -> float:
        """Return the rate of one step (scale-invariant step with AdaScale)."""
        return float(self.learning_rates(np.int64(update)))

    def b2s(self, batch_sizes: np.ndarray) -> np.ndarray:
        """Return the decay of the second moment, float32, for steps of these batch sizes."""
        ratio = batch_sizes / self.options.reference_batch_size
        return np.float32(self.base_b2 ** B2_SCALING[self.options.b2_scaling](ratio))

    def inputs(self, first_update: int, length: int) -> UpdateInputs:
        """Return the inputs of the compiled loop for `length` steps from `first_update` on."""
        updates = np.arange(first_update, first_update + length, dtype=np.int64)
        epoch, offset = epoch_and_offset(self.batch_sizes.total_before(updates), self.examples_per_epoch)
        rates = self.rate_table if self.scale_invariant else self.learning_rates(updates).astype(np.float32)
        batch_size = self.batch_sizes.at(updates).astype(np.int32)
        return UpdateInputs(epoch, offset, batch_size, learning_rate=rates, b2=self.b2s(batch_size))

    @functools.cached_property
    def rate_table(self) -> np.ndarray:
        """The float32 rates of all scale-invariant steps, and -1 beyond the last.

        It is a power of two long, so that runs of other lengths share programs. Every call of the loop takes it.
        """
        table = np.full(1 << self.num_updates.bit_length(), -1, np.float32)
        table[: self.num_updates] = self.learning_rates(np.arange(self.num_updates))
        return table


def create_schedule(
    options: ScheduleConfig,
    learning_rate: float,
    num_updates: int,
    batch_sizes: BatchSchedule,
    examples_per_epoch: int,
    b2: float = 0.999,
) -> Schedule:
    """Create the schedule that a config's `schedule` asks for.

    Warm-up (Goyal et al. 2017, section 2.2) raises the rate linearly to its peak, which its last step has; it
    starts from the unscaled rate where the scaling rule raises that of any batch, else from zero. After warm-up the
    rate follows one of SHAPES, or is the peak times decay_factor to the number of decay steps reached (step).

    With decay_by "batch" or "seesaw" a decay step grows the batch where it would have cut the rate, so that fewer
    steps see the same examples; see `plan_decay`. Seesaw puts decay steps in place of the other shapes, too.

    Where the batch changes otherwise, the scaling rule gives every step the peak of its own batch. With adascale
    all of this is in scale-invariant steps, each of which is worth a step of the reference batch.

    Batch sizes found in training change neither the length of the warm-up nor where it started: both follow
    from the first batch. From the step at which the batch changes, the rate goes on from where it is, linearly
    to the peak of the new batch, which it reaches at the last step of the warm-up; a peak below the rate is its
    value at once.

    Args:
      options: options that passed the rules of a config.
      learning_rate: rate at the reference batch size.
      num_updates: steps of the run if it keeps its first batch size; decay steps count in these, too.
      batch_sizes: one stage only, where the schedule grows the batch; those so far, where training finds them.
      examples_per_epoch: examples in an epoch, which no batch exceeds.
      b2: decay of the second moment, at the reference batch size.
    Raises:
      BadSetting: the warm-up is as long as training; float32 does not hold the b2 of a batch.
    """
    counted_by = _warmup_batch_sizes(options, batch_sizes)
    warmup = _warmup_updates(options, counted_by, examples_per_epoch)
    _refuse_long_warmup(options, warmup, num_updates)
    _refuse_b2_that_rounds(options, b2, batch_sizes)
    plan = _plan(options, warmup, num_updates, batch_sizes, examples_per_epoch)
    peaks = peak_rates(options, learning_rate, plan.rate_batch_sizes.first(plan.num_updates).values)
    highest_known_peak = peaks[0] if batch_sizes.found_in_training else peaks.max()
    start = learning_rate if highest_known_peak > learning_rate else 0.0
    warmup_starts = PiecewiseConstant.constant(start)
    if batch_sizes.found_in_training:
        warmup_starts = _warmup_starts_of_changing_batch(start, warmup, peaks, batch_sizes.starts)
    return Schedule(
        options=options,
        base_learning_rate=learning_rate,
        base_b2=b2,
        num_updates=plan.num_updates,
        examples_per_epoch=examples_per_epoch,
        batch_sizes=plan.batch_sizes,
        rate_batch_sizes=plan.rate_batch_sizes,
        decay_factors=plan.decay_factors,
        warmup_updates=warmup,
        warmup_starts=warmup_starts,
    )


def peak_rates(options: ScheduleConfig, learning_rate: float, batch_sizes: np.ndarray) -> np.ndarray:
    """Return the rates of batch sizes once warm-up is over."""
    return learning_rate * SCALING[options.scaling](batch_sizes / options.reference_batch_size)


def _warmup_batch_sizes(options: ScheduleConfig, batch_sizes: BatchSchedule) -> PiecewiseConstant:
    """Return the batch sizes by which a warm-up that is given in examples or epochs is counted."""
    if options.scaling == "adascale":
        return PiecewiseConstant.constant(options.reference_batch_size)
    if batch_sizes.found_in_training:
        return PiecewiseConstant.constant(batch_sizes.values[0])
    return batch_sizes


def _warmup_updates(options: ScheduleConfig, batch_sizes: PiecewiseConstant, examples_per_epoch: int) -> int:
    if options.warmup_updates is not None:
        return options.warmup_updates
    if options.warmup_epochs is not None:
        examples = options.warmup_epochs * examples_per_epoch
    else:
        examples = options.warmup_examples or 0
    return int(batch_sizes.steps_to(min(examples, MOST_EXAMPLES))) if examples else 0


def _refuse_long_warmup(options: ScheduleConfig, warmup: int, num_updates: int) -> None:
    limit, end = num_updates - 1, "the last update"
    if options.decay_steps:
        limit, end = options.decay_steps[0], "the first decay"
    if warmup > limit:
        field = next(field for field in WARMUPS if getattr(options, field) is not None)
        raise BadSetting(
            f"schedule.{field}: {getattr(options, field)} is {warmup} updates; allowed: up to {limit}, before {end}"
        )


def _refuse_b2_that_rounds(options: ScheduleConfig, b2: float, batch_sizes: PiecewiseConstant) -> None:
    """Refuse a b2 so near to 1, at a small batch, that float32 makes another half-life of it, or none."""
    if options.b2_scaling == "none":
        return
    exact = b2 ** B2_SCALING[options.b2_scaling](batch_sizes.values / options.reference_batch_size)
    off = np.abs((1.0 - np.float64(np.float32(exact))) / (1.0 - exact) - 1)
    if off.max() > MOST_ROUNDING:
        size, value = batch_sizes.values[off.argmax()], exact[off.argmax()]
        raise BadSetting(
            f"schedule.b2_scaling: {options.b2_scaling!r} makes b2 {value:.10g} at batch {size}, which float32 "
            "rounds; allowed: a smaller optimizer.b2, or a smaller schedule.reference_batch_size"
        )


def _warmup_starts_of_changing_batch(
    start: float, warmup: int, peaks: np.ndarray, changed_at: np.ndarray
) -> PiecewiseConstant:
    """Return the rates from which warm-up goes to the peaks of the batch sizes that begin within it.

    Args:
      peaks: peak rate of each batch size, which is in use from step `changed_at` on.
    """
    starts, rates = [0], [start]
    for first, peak_before in zip(changed_at[1:].tolist(), peaks, strict=False):
        if first < warmup:
            done = (first - starts[-1]) / (warmup - starts[-1])
            rate_before = min(rates[-1], peak_before)
            rates.append(rate_before + (peak_before - rate_before) * done)
            starts.append(first)
    return PiecewiseConstant(np.array(starts, np.int64), np.array(rates))


def _shape_at(options: ScheduleConfig, done, first, end):
    """Return the part of the peak rate that a shape between `first` and `end` leaves once `done` is done."""
    return SHAPES[options.name](np.clip((done - first) / (end - first), 0, 1), options.final_fraction)


def _plan(
    options: ScheduleConfig, warmup: int, num_updates: int, batch_sizes: BatchSchedule, examples_per_epoch: int
) -> DecayPlan:
    """Plan the decay at the given steps, or at those that seesaw puts in place of a shape."""
    if options.name == "step":
        steps = given_steps(options.decay_steps, options.decay_factor, num_updates)
    elif options.decay_by == "seesaw":
        shape = functools.partial(_shape_at, options, first=warmup, end=num_updates)
        steps = steps_along(shape, options.decay_factor, num_updates)
    else:
        return DecayPlan(num_updates, batch_sizes, rate_batch_sizes=batch_sizes, decay_factors=None)
    return plan_decay(steps, options.decay_by, batch_sizes, examples_per_epoch)
