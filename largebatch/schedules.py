"""Learning rate and batch size of every update, as closed forms on the host.

Everything counts updates, never micro-batches. Update `t` is the one after `t` others, so the first is 0.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from largebatch import BadSetting

# How the rate follows the batch size, of which `ratio` is that to the reference batch size. linear: Goyal et
# al. 2017, "Accurate, Large Minibatch SGD", section 2.1; sqrt: Krizhevsky 2014, "One weird trick".
SCALING: dict[str, Callable[[float], float]] = {
    "none": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
}
NAMES = ("constant", "linear", "cosine", "step")
WARMUPS = ("warmup_updates", "warmup_epochs", "warmup_examples")


class Stages(NamedTuple):
    """A value that holds from one update to another: int64 first updates (ascending from 0), and the values."""

    starts: np.ndarray
    values: np.ndarray

    def at(self, updates: np.ndarray) -> np.ndarray:
        """The values at `updates`; the last one holds for ever."""
        return self.values[np.searchsorted(self.starts, updates, side="right") - 1]

    def sum_before(self, updates: np.ndarray) -> np.ndarray:
        """Sum of the values of all updates before `updates`, int64, in closed form."""
        stage = np.searchsorted(self.starts, updates, side="right") - 1
        before = np.concatenate([[0], np.cumsum(np.diff(self.starts) * self.values[:-1])])
        return before[stage] + (updates - self.starts[stage]) * self.values[stage]


class Schedule(NamedTuple):
    """A run's updates: how many, how large, at which rate.

    `rates` maps int64 updates to float64 learning rates; `text` explains them to the user.
    """

    num_updates: int
    batch_sizes: Stages
    rates: Callable[[np.ndarray], np.ndarray]
    text: str

    def examples_before(self, update: int) -> int:
        """Examples visited by the updates before `update`."""
        return int(self.batch_sizes.sum_before(np.int64(update)))

    @property
    def max_batch_size(self) -> int:
        """The largest batch of the run."""
        return int(self.batch_sizes.values.max())


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
    return found


def create(fields: dict, learning_rate: float, num_updates: int, batch_size: int, epoch_size: int) -> Schedule:
    """The schedule that a config's `schedule` asks for.

    Warm-up (Goyal et al. 2017, section 2.2) raises the rate linearly to its peak, which its last update has; it
    starts from the unscaled rate where a scaling rule raised it, else from zero. Then, with `p` the part of the
    remaining updates that are done and `f` the final fraction, the rate is the peak times 1 (constant),
    1 - (1 - f) p (linear), f + (1 - f) (1 + cos(pi p)) / 2 (cosine: Loshchilov and Hutter 2017), or
    decay_factor to the number of decay steps reached (step).

    With decay_by "batch" a step that would have cut the rate grows the batch by as much, with the same examples
    between two steps and so fewer updates (Smith et al. 2018, "Don't Decay the Learning Rate, Increase the
    Batch Size"). What the data set is too small for is cut from the rate.

    Args:
      fields: of `schedule`, without `problems`.
      learning_rate: at the reference batch size.
      num_updates: of the run at `batch_size`; decay steps count such updates too.
      epoch_size: examples in an epoch, which no batch exceeds.
    Raises:
      BadSetting: the warm-up is as long as training.
    """
    ratio = batch_size / fields["reference_batch_size"]
    factor = SCALING[fields["scaling"]](ratio)
    peak = learning_rate * factor
    warmup = _warmup_updates(fields, batch_size, epoch_size)
    limit = fields["decay_steps"][0] if fields["decay_steps"] else num_updates - 1
    if warmup > limit:
        field = next(field for field in WARMUPS if fields[field] is not None)
        until = "the first decay" if fields["decay_steps"] else "the last update"
        raise BadSetting(
            f"schedule.{field}: {fields[field]} is {warmup} updates; allowed: up to {limit}, before {until}"
        )
    start = min(learning_rate, peak) if factor > 1 else 0.0
    if fields["name"] == "step":
        batch_sizes, cuts, num_updates = _steps(fields, num_updates, batch_size, epoch_size)
    else:
        batch_sizes, cuts = Stages(np.zeros(1, np.int64), np.array([batch_size])), None

    def rates(updates):
        updates = np.asarray(updates, np.int64)
        warming = start + (peak - start) * (updates + 1) / max(warmup, 1)
        part = np.clip((updates - warmup) / (num_updates - warmup), 0, 1)
        final = fields["final_fraction"]
        shape = {
            "constant": lambda: np.ones(updates.shape),
            "linear": lambda: 1 - (1 - final) * part,
            "cosine": lambda: final + (1 - final) * (1 + np.cos(np.pi * part)) / 2,
            "step": lambda: cuts.at(updates),
        }[fields["name"]]()
        return np.where(updates < warmup, warming, peak * shape)

    text = _explain(fields, learning_rate, factor, batch_size, peak, start, warmup, num_updates)
    if fields["decay_by"] == "batch":
        grown = zip(batch_sizes.starts, batch_sizes.values, peak * cuts.values, strict=True)
        changes = [f"{size:,} from update {first:,} at {rate:g}" for first, size, rate in grown]
        text += f": batch {', '.join(changes)}"
    return Schedule(num_updates, batch_sizes, rates, text)


def _warmup_updates(fields: dict, batch_size: int, epoch_size: int) -> int:
    if fields["warmup_epochs"] is not None:
        return math.ceil(fields["warmup_epochs"] * epoch_size / batch_size)
    if fields["warmup_examples"] is not None:
        return math.ceil(fields["warmup_examples"] / batch_size)
    return fields["warmup_updates"] or 0


def _steps(fields: dict, num_updates: int, batch_size: int, epoch_size: int) -> tuple[Stages, Stages, int]:
    """Batch sizes and rate factors by stage, and the number of updates."""
    bounds = np.array([0, *fields["decay_steps"], num_updates], np.int64)
    wanted = fields["decay_factor"] ** np.arange(len(bounds) - 1, dtype=np.float64)
    if fields["decay_by"] == "rate":
        starts = bounds[:-1]
        return Stages(np.zeros(1, np.int64), np.array([batch_size])), Stages(starts, wanted), num_updates
    sizes = np.minimum(np.rint(batch_size / wanted), epoch_size).astype(np.int64)
    lengths = np.ceil(np.diff(bounds) * batch_size / sizes).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    # rate / batch, which Smith et al. keep, has to fall by `wanted`.
    return Stages(starts[:-1], sizes), Stages(starts[:-1], wanted * sizes / batch_size), int(starts[-1])


def _explain(fields, learning_rate, factor, batch_size, peak, start, warmup, num_updates) -> str:
    rule, reference = fields["scaling"], fields["reference_batch_size"]
    text = f"learning rate {peak:g}"
    if rule != "none":
        ratio = f"{'the root of ' if rule == 'sqrt' else ''}batch {batch_size:,} / reference {reference:,}"
        text += f" = {learning_rate:g} x {factor:.4g} ({rule}: {ratio})"
    if warmup:
        text += f", reached from {start:g} in {warmup:,} updates"
    after = {
        "constant": f"constant over {num_updates:,} updates",
        "linear": f"linear to {peak * fields['final_fraction']:g} at update {num_updates:,}",
        "cosine": f"cosine to {peak * fields['final_fraction']:g} at update {num_updates:,}",
        "step": f"{num_updates:,} updates"
        + (
            f" with a growing batch for a decay of x {fields['decay_factor']:g}"
            if fields["decay_by"] == "batch"
            else f", x {fields['decay_factor']:g} at {', '.join(map(str, fields['decay_steps']))}"
        ),
    }[fields["name"]]
    return f"{text}, {'then ' if warmup else ''}{after}"
