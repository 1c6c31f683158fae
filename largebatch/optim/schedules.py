"""Learning rate and batch size of every update, as closed forms on the host.

Everything counts updates, never micro-batches. Update `t` is the one after `t` others, so the first is 0.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from largebatch.errors import BadSetting
from largebatch.optim.piecewise import PiecewiseConstant

# How the rate follows the batch size, of which `ratio` is that to the reference batch size. linear: Goyal et
# al. 2017, "Accurate, Large Minibatch SGD", section 2.1; sqrt: Krizhevsky 2014, "One weird trick". With adascale
# (see noise_scale.py) the gain that is measured during training takes the place of a rule.
SCALING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": np.ones_like,
    "linear": lambda ratio: ratio,
    "sqrt": np.sqrt,
    "adascale": np.ones_like,
}
NAMES = ("constant", "linear", "cosine", "step")
WARMUPS = ("warmup_updates", "warmup_epochs", "warmup_examples")
MOST_EXAMPLES = 2**62


class Schedule(NamedTuple):
    """A run's updates: how many, how large, at which rate.

    `rates` maps int64 updates to float64 learning rates; `text` explains them to the user. With AdaScale, that is
    `scale_invariant`, `rates` is over scale-invariant steps, of which there are `num_updates`.
    """

    num_updates: int
    batch_sizes: PiecewiseConstant
    rates: Callable[[np.ndarray], np.ndarray]
    text: str
    scale_invariant: bool

    def examples_before(self, update: int) -> int:
        """Examples visited by the updates before `update`."""
        return int(self.batch_sizes.sum_before(np.int64(update)))

    @property
    def max_batch_size(self) -> int:
        """The largest batch of the run."""
        return int(self.batch_sizes.cut(self.num_updates).values.max())


def problems(fields: dict, num_updates: int) -> list[str]:
    """What is contradictory in the fields of a config's `schedule`, each of which is allowed by itself."""
    found, name, steps = [], fields["name"], fields["decay_steps"]
    given = [f"schedule.{field}" for field in WARMUPS if fields[field] is not None]
    if len(given) > 1:
        found.append(f"{' and '.join(given)}: both given; allowed: one of them")
    updates = fields["warmup_updates"]
    if updates is not None and updates >= num_updates:
        found.append(f"schedule.warmup_updates: {updates}; allowed: fewer than the run's {num_updates} updates")
    if name == "step" and not steps:
        found.append("schedule.decay_steps: (); allowed: with schedule.name 'step', the updates at which to decay")
    if name != "step" and steps:
        found.append(f"schedule.decay_steps: {steps}; allowed: () with schedule.name {name!r}")
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        found.append(f"schedule.decay_steps: {steps}; allowed: ascending")
    elif steps and not 0 < steps[0] <= steps[-1] < num_updates:
        found.append(f"schedule.decay_steps: {steps}; allowed: within the run's {num_updates} updates")
    elif steps and updates is not None and updates > steps[0]:
        found.append(f"schedule.warmup_updates: {updates}; allowed: up to the first decay, at {steps[0]}")
    if fields["decay_by"] == "batch" and name != "step":
        found.append(f"schedule.decay_by: 'batch'; allowed: 'rate' with schedule.name {name!r}")
    if fields["decay_by"] == "batch" and fields["scaling"] == "adascale":
        found.append("schedule.decay_by: 'batch'; allowed: 'rate' with schedule.scaling 'adascale'")
    return found


def create(
    fields: dict,
    learning_rate: float,
    num_updates: int,
    batch_sizes: PiecewiseConstant,
    epoch_size: int,
    *,
    grows: bool = False,
) -> Schedule:
    """The schedule that a config's `schedule` asks for.

    Warm-up (Goyal et al. 2017, section 2.2) raises the rate linearly to its peak, which its last update has; it
    starts from the unscaled rate where the scaling rule raises that of any batch, else from zero. Then, with `p`
    the part of the remaining updates that are done and `f` the final fraction, the rate is the peak times 1
    (constant), 1 - (1 - f) p (linear), f + (1 - f) (1 + cos(pi p)) / 2 (cosine: Loshchilov and Hutter 2017), or
    decay_factor to the number of decay steps reached (step).

    With decay_by "batch" a step that would have cut the rate grows the batch by as much, with the same examples
    between two steps and so fewer updates (Smith et al. 2018, "Don't Decay the Learning Rate, Increase the
    Batch Size"). What the data set is too small for is cut from the rate.

    Where the batch changes otherwise, the scaling rule gives every update the peak of its own batch. With adascale
    all of this is in scale-invariant steps, each of which is worth an update of the reference batch.

    A batch that training grows itself (`grows`) changes neither the length of the warm-up nor where it started:
    both follow from the first batch. From the update with which the batch grows, the rate goes on from where it is,
    linearly to the peak of the new batch, which it reaches with the last update of the warm-up.

    Args:
      fields: of `schedule`, without `problems`.
      learning_rate: at the reference batch size.
      num_updates: of the run; with decay_by "batch", of one that keeps its first batch size, as decay steps are.
      batch_sizes: one stage only, with decay_by "batch"; those so far, with `grows`.
      epoch_size: examples in an epoch, which no batch exceeds.
    Raises:
      BadSetting: the warm-up is as long as training.
    """
    known = PiecewiseConstant.constant(batch_sizes.values[0]) if grows else batch_sizes
    if fields["scaling"] == "adascale":
        known = PiecewiseConstant.constant(fields["reference_batch_size"])
    warmup = _warmup_updates(fields, known, epoch_size)
    limit = fields["decay_steps"][0] if fields["decay_steps"] else num_updates - 1
    if warmup > limit:
        field = next(field for field in WARMUPS if fields[field] is not None)
        until = "the first decay" if fields["decay_steps"] else "the last update"
        raise BadSetting(
            f"schedule.{field}: {fields[field]} is {warmup} updates; allowed: up to {limit}, before {until}"
        )
    scaled, cuts = batch_sizes, None
    if fields["name"] == "step":
        batch_sizes, cuts, num_updates = _steps(fields, num_updates, batch_sizes, epoch_size)
        scaled = scaled if fields["decay_by"] == "rate" else PiecewiseConstant.constant(scaled.values[0])

    peaks = peak_rates(fields, learning_rate, scaled.cut(num_updates).values)
    start = learning_rate if (peaks[0] if grows else peaks.max()) > learning_rate else 0.0
    ramps = _ramps(start, warmup, peaks, scaled.starts) if grows else PiecewiseConstant.constant(start)

    def rates(updates):
        updates = np.asarray(updates, np.int64)
        peak = peak_rates(fields, learning_rate, scaled.at(updates))
        low = np.minimum(ramps.at(updates), peak)  # of a batch below the reference
        first = ramps.start_of(updates)
        warming = low + (peak - low) * (updates + 1 - first) / np.maximum(warmup - first, 1)
        part = np.clip((updates - warmup) / (num_updates - warmup), 0, 1)
        final = fields["final_fraction"]
        shape = {
            "constant": lambda: np.ones(updates.shape),
            "linear": lambda: 1 - (1 - final) * part,
            "cosine": lambda: final + (1 - final) * (1 + np.cos(np.pi * part)) / 2,
            "step": lambda: cuts.at(updates),
        }[fields["name"]]()
        return np.where(updates < warmup, warming, peak * shape)

    text = _explain(fields, learning_rate, scaled.cut(num_updates).values, start, warmup, num_updates)
    if fields["decay_by"] == "batch":
        grown = zip(batch_sizes.starts, batch_sizes.values, peaks[0] * cuts.values, strict=True)
        changes = [f"{size:,} from update {first:,} at {rate:g}" for first, size, rate in grown]
        text += f": batch {', '.join(changes)}"
    return Schedule(num_updates, batch_sizes, rates, text, fields["scaling"] == "adascale")


def _ramps(start: float, warmup: int, peaks: np.ndarray, grown_at: np.ndarray) -> PiecewiseConstant:
    """From which rate the warm-up goes to the peak of each batch size, of those that begin within it.

    Args:
      peaks: of each batch size, which is in use from update `grown_at` on.
    """
    starts, rates = [0], [start]
    for first, peak_before in zip(grown_at[1:].tolist(), peaks, strict=False):
        if first < warmup:
            done = (first - starts[-1]) / (warmup - starts[-1])
            rates.append(rates[-1] + (peak_before - rates[-1]) * done)
            starts.append(first)
    return PiecewiseConstant(np.array(starts, np.int64), np.array(rates))


def peak_rates(fields: dict, learning_rate: float, batch_sizes: np.ndarray) -> np.ndarray:
    """The rates of batch sizes once warm-up is over."""
    return learning_rate * SCALING[fields["scaling"]](batch_sizes / fields["reference_batch_size"])


def _warmup_updates(fields: dict, batch_sizes: PiecewiseConstant, epoch_size: int) -> int:
    if fields["warmup_updates"] is not None:
        return fields["warmup_updates"]
    if fields["warmup_epochs"] is not None:
        examples = fields["warmup_epochs"] * epoch_size
    else:
        examples = fields["warmup_examples"] or 0
    # What does not fit 64 bits is longer than any run.
    return int(batch_sizes.updates_to(min(examples, MOST_EXAMPLES))) if examples else 0


def _steps(
    fields: dict, num_updates: int, batch_sizes: PiecewiseConstant, epoch_size: int
) -> tuple[PiecewiseConstant, PiecewiseConstant, int]:
    """Batch sizes and rate factors by stage, and the number of updates."""
    bounds = np.array([0, *fields["decay_steps"], num_updates], np.int64)
    # Python's power: NumPy's last digit is another on another CPU.
    wanted = np.array([fields["decay_factor"] ** step for step in range(len(bounds) - 1)])
    if fields["decay_by"] == "rate":
        starts = bounds[:-1]
        return batch_sizes, PiecewiseConstant(starts, wanted), num_updates
    batch_size = int(batch_sizes.values[0])
    sizes = np.minimum(np.rint(batch_size / wanted), epoch_size).astype(np.int64)
    lengths = np.ceil(np.diff(bounds) * batch_size / sizes).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    # rate / batch, which Smith et al. keep, has to fall by `wanted`.
    return (
        PiecewiseConstant(starts[:-1], sizes),
        PiecewiseConstant(starts[:-1], wanted * sizes / batch_size),
        int(starts[-1]),
    )


def _explain(fields, learning_rate, batch_sizes, start, warmup, num_updates) -> str:
    rule, reference = fields["scaling"], fields["reference_batch_size"]
    peaks = peak_rates(fields, learning_rate, batch_sizes)
    text = f"learning rate {format_range(peaks)}"
    if rule == "adascale":
        text += f" at batch {reference:,}, times the measured gain of a larger batch (AdaScale)"
    elif rule != "none":
        ratio = (
            f"{'the root of ' if rule == 'sqrt' else ''}batch {format_range(batch_sizes)} / reference {reference:,}"
        )
        text += f" = {learning_rate:g} x {format_range(peaks / learning_rate, '.4g')} ({rule}: {ratio})"
    unit = "scale-invariant steps" if rule == "adascale" else "updates"
    if warmup:
        text += f", reached from {format_range(np.minimum(start, peaks))} in {warmup:,} {unit}"
    final = format_range(peaks * fields["final_fraction"])
    after = {
        "constant": f"constant over {num_updates:,} {unit}",
        "linear": f"linear to {final} at {unit[:-1]} {num_updates:,}",
        "cosine": f"cosine to {final} at {unit[:-1]} {num_updates:,}",
        "step": f"{num_updates:,} {unit}"
        + (
            f" with a growing batch for a decay of x {fields['decay_factor']:g}"
            if fields["decay_by"] == "batch"
            else f", x {fields['decay_factor']:g} at {', '.join(map(str, fields['decay_steps']))}"
        ),
    }[fields["name"]]
    return f"{text}, {'then ' if warmup else ''}{after}"


def format_range(values: np.ndarray, form: str | None = None) -> str:
    """One value, or the lowest and the highest."""
    form = form or ("," if values.dtype.kind == "i" else "g")
    low, high = values.min(), values.max()
    return f"{low:{form}}" if low == high else f"{low:{form}} to {high:{form}}"
