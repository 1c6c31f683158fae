"""Learning rate and batch size of every step, as closed forms on the host.

Everything counts steps of the optimizer, never micro-batches. Step `t` comes after `t` others: the first is 0.
"""

import bisect
import dataclasses
import functools

import numpy as np
from flax import struct

from largebatch.config.fields import ScheduleConfig
from largebatch.optim.batch_schedule import BatchSchedule, PiecewiseConstant, grow_at_decays
from largebatch.util import BadSetting

# Factor on the learning rate, by the ratio of the batch size to the reference batch size. linear: Goyal et
# al. 2017, "Accurate, Large Minibatch SGD", section 2.1; sqrt: Krizhevsky 2014, "One weird trick". With adascale
# (see noise_scale.py) the gain that is measured during training takes the place of a rule.
SCALING = {"none": np.ones_like, "linear": lambda ratio: ratio, "sqrt": np.sqrt, "adascale": np.ones_like}
# Power to which b2 is taken, by the ratio of the batch sizes. half_life: as many examples as before halve the
# weight of a gradient in the second moment: Marek et al. 2025, "Small Batch Size Training for Language Models".
B2_SCALING = {"none": np.ones_like, "half_life": lambda ratio: ratio}
# Part of the peak rate, by the part of the run after warm-up that is done and by the part of the peak at its end.
# cosine: Loshchilov and Hutter 2017, "SGDR". "step", which counts decay steps, is not among them.
SHAPES = {
    "constant": lambda done, end: np.ones_like(done),
    "linear": lambda done, end: 1 - (1 - end) * done,
    "cosine": lambda done, end: end + (1 - end) * (1 + np.cos(np.pi * done)) / 2,
}
WARMUPS = ("warmup_steps", "warmup_epochs", "warmup_examples")  # a config gives one, or none
MOST_ROUNDING = 0.1  # largest relative error of 1 - b2 in float32
MOST_EXAMPLES = 2**62  # more examples than any run has; fits 64 bits


@struct.dataclass
class StepInputs:
    """Inputs of the compiled loop for each step, as NumPy arrays [steps]; scalars for a single step."""

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

    With AdaScale (`scale_invariant`) rates go by scale-invariant step, of which there are `num_steps`.
    """

    options: ScheduleConfig
    base_learning_rate: float  # at the reference batch size
    base_b2: float  # at the reference batch size
    num_steps: int
    examples_per_epoch: int
    batch_sizes: BatchSchedule
    decay: PiecewiseConstant | None  # factors on the peak rate, where it falls by decay steps
    warmup_steps: int

    @property
    def scale_invariant(self) -> bool:
        """True where rates go by AdaScale's scale-invariant steps, not by plain ones."""
        return self.options.scaling == "adascale"

    @property
    def max_batch_size(self) -> int:
        """The largest batch size of the run."""
        return int(self.batch_sizes.first(self.num_steps).values.max())

    def batch_size_at(self, step: int) -> int:
        """Return the batch size of one step."""
        return int(self.batch_sizes.at(step))

    def examples_before(self, step: int) -> int:
        """Return the number of examples that the steps before `step` visit."""
        return int(self.batch_sizes.total_before(step))

    @property
    def rate_batch_sizes(self) -> PiecewiseConstant:
        """Batch sizes by which the scaling rule sets the peak rate: the first alone where decay steps grow it."""
        if self.options.decay_by == "rate":
            return self.batch_sizes
        return PiecewiseConstant.constant(self.batch_sizes.values[0])

    def peak_rates(self, batch_sizes: np.ndarray) -> np.ndarray:
        """Return the rates of batch sizes once warm-up is over, without decay."""
        ratio = batch_sizes / self.options.reference_batch_size
        return self.base_learning_rate * SCALING[self.options.scaling](ratio)

    @functools.cached_property
    def warmup_starts(self) -> PiecewiseConstant:
        """The rate from which warm-up goes to the peak, in stages where training changes the batch within it."""
        peaks = self.peak_rates(self.rate_batch_sizes.first(self.num_steps).values)
        changes = self.batch_sizes.starts[1:].tolist() if self.batch_sizes.found_in_training else []
        highest_known_peak = peaks[0] if self.batch_sizes.found_in_training else peaks.max()
        starts, rates = [0], [self.base_learning_rate if highest_known_peak > self.base_learning_rate else 0.0]
        for first, peak_before in zip(changes, peaks, strict=False):
            if first < self.warmup_steps:
                done = (first - starts[-1]) / (self.warmup_steps - starts[-1])
                rate_before = min(rates[-1], peak_before)
                rates.append(rate_before + (peak_before - rate_before) * done)
                starts.append(first)
        return PiecewiseConstant(np.array(starts, np.int64), np.array(rates))

    def learning_rates(self, steps: np.ndarray) -> np.ndarray:
        """Return the float64 rates of `steps`, int64 (scale-invariant steps with AdaScale)."""
        steps = np.asarray(steps, np.int64)
        peak = self.peak_rates(self.rate_batch_sizes.at(steps))

        start = np.minimum(self.warmup_starts.at(steps), peak)  # the peak is lower below the reference
        first = self.warmup_starts.start_of(steps)
        warmup = start + (peak - start) * (steps + 1 - first) / np.maximum(self.warmup_steps - first, 1)

        if self.decay is not None:
            after_warmup = peak * self.decay.at(steps)
        else:
            done = (steps, self.warmup_steps, self.num_steps)
            if self.options.decay_over == "images":
                done = (self.batch_sizes.total_before(np.int64(count)) for count in done)
            after_warmup = peak * _shape_at(self.options, *done)
        return np.where(steps < self.warmup_steps, warmup, after_warmup)

    def learning_rate_at(self, step: int) -> float:
        """Return the rate of one step (scale-invariant step with AdaScale)."""
        return float(self.learning_rates(np.int64(step)))

    def b2s(self, batch_sizes: np.ndarray) -> np.ndarray:
        """Return the decay of the second moment, float64, for steps of these batch sizes."""
        ratio = batch_sizes / self.options.reference_batch_size
        return self.base_b2 ** B2_SCALING[self.options.b2_scaling](ratio)

    def inputs(self, first_step: int, length: int) -> StepInputs:
        """Return the inputs of the compiled loop for `length` steps from `first_step` on."""
        steps = np.arange(first_step, first_step + length, dtype=np.int64)
        epoch, offset = epoch_and_offset(self.batch_sizes.total_before(steps), self.examples_per_epoch)
        rates = self.rate_table if self.scale_invariant else np.float32(self.learning_rates(steps))
        sizes = self.batch_sizes.at(steps).astype(np.int32)
        return StepInputs(epoch, offset, sizes, learning_rate=rates, b2=np.float32(self.b2s(sizes)))

    @functools.cached_property
    def rate_table(self) -> np.ndarray:
        """The float32 rates of all scale-invariant steps, and -1 beyond the last.

        It is a power of two long, so that runs of other lengths share programs. Every call of the loop takes it.
        """
        table = np.full(1 << self.num_steps.bit_length(), -1, np.float32)
        table[: self.num_steps] = self.learning_rates(np.arange(self.num_steps))
        return table

    def with_batch_sizes(self, batch_sizes: BatchSchedule) -> "Schedule":
        """Return the schedule of the same run after training has found other batch sizes."""
        number, epoch = self.num_steps, self.examples_per_epoch
        return create_schedule(self.options, self.base_learning_rate, number, batch_sizes, epoch, self.base_b2)


def create_schedule(
    options: ScheduleConfig,
    learning_rate: float,
    num_steps: int,
    batch_sizes: BatchSchedule,
    examples_per_epoch: int,
    b2: float = 0.999,
) -> Schedule:
    """Create the schedule that a config's `schedule` asks for.

    Warm-up (Goyal et al. 2017, section 2.2) raises the rate linearly to its peak, which its last step has; it
    starts from the unscaled rate where the scaling rule raises that of any batch, else from zero. After warm-up the
    rate follows one of SHAPES, or is the peak times decay_factor to the number of decay steps reached (step).

    With decay_by "batch" or "seesaw" a decay step grows the batch where it would have cut the rate, so that fewer
    steps see the same examples; see `grow_at_decays`. Seesaw puts decay steps in place of the other shapes, too.

    Where the batch changes otherwise, the scaling rule gives every step the peak of its own batch. With adascale
    all of this is in scale-invariant steps, each of which is worth a step of the reference batch. Where training
    finds the batch sizes, length and start of the warm-up follow from the first. When the batch changes within it,
    the rate goes on from where it is, to the new peak at the last step of the warm-up; a lower peak holds at once.

    Args:
      options: options that passed the rules of a config.
      learning_rate: rate at the reference batch size.
      num_steps: steps of the run if it keeps its first batch size; decay steps count in these, too.
      batch_sizes: one stage only, where the schedule grows the batch; those so far, where training finds them.
      examples_per_epoch: examples in an epoch, which no batch exceeds.
      b2: decay of the second moment, at the reference batch size.
    Raises:
      BadSetting: the warm-up is as long as training; float32 does not hold the b2 of a batch.
    """
    warmup = _count_warmup(options, batch_sizes, examples_per_epoch)
    limit, end = num_steps - 1, "the last step"
    if options.decay_steps:
        limit, end = options.decay_steps[0], "the first decay"
    if warmup > limit:
        field = next(field for field in WARMUPS if getattr(options, field) is not None)
        raise BadSetting(
            f"schedule.{field}: {getattr(options, field)} is {warmup} steps; allowed: up to {limit}, before {end}"
        )
    decay = _decay_stages(options, warmup, num_steps)
    if options.decay_by != "rate":
        num_steps, batch_sizes, decay = grow_at_decays(
            decay, options.decay_by, num_steps, int(batch_sizes.values[0]), examples_per_epoch
        )
    schedule = Schedule(options, learning_rate, b2, num_steps, examples_per_epoch, batch_sizes, decay, warmup)
    _refuse_b2_that_rounds(schedule)
    return schedule


def _count_warmup(options: ScheduleConfig, batch_sizes: BatchSchedule, examples_per_epoch: int) -> int:
    """Return the number of steps of warm-up, which a config may give in examples or epochs."""
    if options.warmup_steps is not None:
        return options.warmup_steps
    examples = (options.warmup_epochs or 0) * examples_per_epoch or options.warmup_examples or 0
    counted_by = batch_sizes
    if options.scaling == "adascale":
        counted_by = PiecewiseConstant.constant(options.reference_batch_size)
    elif batch_sizes.found_in_training:
        counted_by = batch_sizes.first(1)
    return int(counted_by.steps_to(min(examples, MOST_EXAMPLES))) if examples else 0


def _refuse_b2_that_rounds(schedule: Schedule) -> None:
    """Refuse a b2 so near to 1, at a small batch, that float32 makes another half-life of it, or none."""
    sizes = schedule.batch_sizes.values
    exact = schedule.b2s(sizes)
    off = np.abs((1.0 - np.float64(np.float32(exact))) / (1.0 - exact) - 1)
    if schedule.options.b2_scaling != "none" and off.max() > MOST_ROUNDING:
        size, value = sizes[off.argmax()], exact[off.argmax()]
        raise BadSetting(
            f"schedule.b2_scaling: {schedule.options.b2_scaling!r} makes b2 {value:.10g} at batch {size}, which "
            "float32 rounds; allowed: a smaller optimizer.b2, or a smaller schedule.reference_batch_size"
        )


def _shape_at(options: ScheduleConfig, done, first, end):
    """Return the part of the peak rate that a shape between `first` and `end` leaves once `done` is done."""
    return SHAPES[options.name](np.clip((done - first) / (end - first), 0, 1), options.final_fraction)


def _decay_stages(options: ScheduleConfig, warmup: int, num_steps: int) -> PiecewiseConstant | None:
    """Return the factors on the peak rate by decay step; None where a shape gives the rate.

    Seesaw puts stages in place of a falling shape: the rate decays by decay_factor whenever the shape has fallen by
    it. At the last stage, a batch that grows by 1 / decay_factor at each stage would next have a stage without a
    step, or fewer than two steps to the end of the run.
    """
    factor = options.decay_factor
    if options.name == "step":
        starts = [0, *options.decay_steps]
        # Python's power, since the last digit of NumPy's depends on the CPU.
        factors = [factor**step for step in range(len(starts))]
        return PiecewiseConstant(np.array(starts, np.int64), np.array(factors))
    if options.decay_by != "seesaw":
        return None
    starts, factors = [0], [1.0]
    while True:
        after = factors[-1] * factor
        start = bisect.bisect_left(
            range(num_steps), -after, key=lambda step: -_shape_at(options, step, warmup, num_steps)
        )
        if (start - starts[-1]) * factors[-1] < 1 or (num_steps - start) * after < 2:
            return PiecewiseConstant(np.array(starts, np.int64), np.array(factors))
        starts.append(start)
        factors.append(after)
