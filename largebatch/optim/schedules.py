"""Learning rate and batch size of every update, as closed forms on the host.

    python -m largebatch.schedules TRACE.csv --dataset-size 172800 --devices 8

checks a batch-size trace and shows what a run would make of it.

Everything counts updates, never micro-batches. Update `t` is the one after `t` others, so the first is 0.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from largebatch.errors import BadSetting, UserError
from largebatch.optim import traces
from largebatch.optim.traces import Stages
from largebatch.runs import display

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
    batch_sizes: Stages
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
    batch_sizes: Stages,
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
    known = Stages.constant(batch_sizes.values[0]) if grows else batch_sizes
    if fields["scaling"] == "adascale":
        known = Stages.constant(fields["reference_batch_size"])
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
        scaled = scaled if fields["decay_by"] == "rate" else Stages.constant(scaled.values[0])

    peaks = _peaks(fields, learning_rate, scaled.cut(num_updates).values)
    start = learning_rate if (peaks[0] if grows else peaks.max()) > learning_rate else 0.0
    ramps = _ramps(start, warmup, peaks, scaled.starts) if grows else Stages.constant(start)

    def rates(updates):
        updates = np.asarray(updates, np.int64)
        peak = _peaks(fields, learning_rate, scaled.at(updates))
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


def _ramps(start: float, warmup: int, peaks: np.ndarray, grown_at: np.ndarray) -> Stages:
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
    return Stages(np.array(starts, np.int64), np.array(rates))


def _peaks(fields: dict, learning_rate: float, batch_sizes: np.ndarray) -> np.ndarray:
    """The rates of batch sizes once warm-up is over."""
    return learning_rate * SCALING[fields["scaling"]](batch_sizes / fields["reference_batch_size"])


def _warmup_updates(fields: dict, batch_sizes: Stages, epoch_size: int) -> int:
    if fields["warmup_updates"] is not None:
        return fields["warmup_updates"]
    if fields["warmup_epochs"] is not None:
        examples = fields["warmup_epochs"] * epoch_size
    else:
        examples = fields["warmup_examples"] or 0
    # What does not fit 64 bits is longer than any run.
    return int(batch_sizes.updates_to(min(examples, MOST_EXAMPLES))) if examples else 0


def _steps(fields: dict, num_updates: int, batch_sizes: Stages, epoch_size: int) -> tuple[Stages, Stages, int]:
    """Batch sizes and rate factors by stage, and the number of updates."""
    bounds = np.array([0, *fields["decay_steps"], num_updates], np.int64)
    # Python's power: NumPy's last digit is another on another CPU.
    wanted = np.array([fields["decay_factor"] ** step for step in range(len(bounds) - 1)])
    if fields["decay_by"] == "rate":
        starts = bounds[:-1]
        return batch_sizes, Stages(starts, wanted), num_updates
    batch_size = int(batch_sizes.values[0])
    sizes = np.minimum(np.rint(batch_size / wanted), epoch_size).astype(np.int64)
    lengths = np.ceil(np.diff(bounds) * batch_size / sizes).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    # rate / batch, which Smith et al. keep, has to fall by `wanted`.
    return Stages(starts[:-1], sizes), Stages(starts[:-1], wanted * sizes / batch_size), int(starts[-1])


def _explain(fields, learning_rate, batch_sizes, start, warmup, num_updates) -> str:
    rule, reference = fields["scaling"], fields["reference_batch_size"]
    peaks = _peaks(fields, learning_rate, batch_sizes)
    text = f"learning rate {_range(peaks)}"
    if rule == "adascale":
        text += f" at batch {reference:,}, times the measured gain of a larger batch (AdaScale)"
    elif rule != "none":
        ratio = f"{'the root of ' if rule == 'sqrt' else ''}batch {_range(batch_sizes)} / reference {reference:,}"
        text += f" = {learning_rate:g} x {_range(peaks / learning_rate, '.4g')} ({rule}: {ratio})"
    unit = "scale-invariant steps" if rule == "adascale" else "updates"
    if warmup:
        text += f", reached from {_range(np.minimum(start, peaks))} in {warmup:,} {unit}"
    final = _range(peaks * fields["final_fraction"])
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


def _range(values: np.ndarray, form: str | None = None) -> str:
    """One value, or the lowest and the highest."""
    form = form or ("," if values.dtype.kind == "i" else "g")
    low, high = values.min(), values.max()
    return f"{low:{form}}" if low == high else f"{low:{form}} to {high:{form}}"


# ---- the command: what a run makes of a trace -----------------------------------------------------------

RULES = ("none", "linear", "sqrt")  # whose rates follow from the batch sizes alone
SHOWN = 24  # rows of a table


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m largebatch.schedules", description="Checks a batch-size trace.", allow_abbrev=False
    )
    parser.add_argument("trace", metavar="TRACE.csv")
    parser.add_argument("--dataset-size", type=_positive, required=True, help="examples in an epoch, views counted")
    parser.add_argument("--devices", type=_positive, required=True, help="devices of all hosts")
    parser.add_argument("--micro-batch-size", type=_positive, default=16, help="default 16")
    parser.add_argument("--updates", type=_positive, help="of the run; default: as many as the trace has")
    parser.add_argument("--hold-last", action="store_true", help="the last batch size goes on to the run's end")
    parser.add_argument("--per-device-batch-size", type=_positive, help="of a trace of available devices")
    parser.add_argument("--time-per-update", type=_positive_number, default=1.0, help="of such a trace; default 1")
    parser.add_argument(
        "--learning-rate", type=_positive_number, default=0.01, help="at the reference batch; default 0.01"
    )
    parser.add_argument("--reference-batch-size", type=_positive, default=512, help="default 512")
    parser.add_argument("--plot", metavar="FILE.png", help="a picture of batch sizes and rates")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number > 0")
    return value


def check_trace(options: argparse.Namespace) -> None:
    """Prints what a run makes of a trace.

    Raises:
      BadSetting: the trace is bad, or ends before the run does.
    """
    trace = traces.read(options.trace, options.per_device_batch_size, options.time_per_update, options.dataset_size)
    updates = options.updates or trace.length
    if trace.length < updates and not options.hold_last:
        raise BadSetting(
            f"batch.trace: {trace.text}, ends with update {trace.length - 1:,}; allowed: up to {updates - 1:,}, "
            "or --hold-last"
        )
    stages = trace.batch_sizes.cut(updates)
    total = int(stages.sum_before(np.int64(updates)))
    print(
        f"{trace.text}: {updates:,} updates, batch {_range(stages.values)}, {total:,} examples, "
        f"{total / options.dataset_size:,.2f} epochs"
    )
    chosen = _spread(stages.starts)
    header = ["update", "batch", "micro-batches a device", *(f"rate, {rule}" for rule in RULES), "examples before"]
    display.print_table([*header, "epoch"], [_row(stages, int(update), options) for update in chosen])
    if len(chosen) < len(stages.starts):
        print(f"{len(chosen)} of the {len(stages.starts):,} updates at which the batch changes")
    ends = _epoch_ends(stages, updates, options.dataset_size)
    if not ends:
        print("no epoch ends in the run")
        return
    before = [0, *(end for end, _ in ends)]
    rows = [
        [f"{number}", f"{end - first:,}", f"{end - 1:,}", f"{rest:,}" if rest else "none"]
        for number, (first, (end, rest)) in enumerate(zip(before, ends, strict=False))
    ]
    display.print_table(
        ["epoch", "updates", "ends in update", "examples of it in the next epoch"],
        [rows[k] for k in _spread(range(len(rows)))],
    )


def _spread(values) -> np.ndarray:
    """At most SHOWN of the values, first and last among them."""
    places = np.linspace(0, len(values) - 1, min(len(values), SHOWN)).astype(int)
    return np.asarray(values)[places]


def _row(stages: Stages, update: int, options) -> list[str]:
    size, before = int(stages.at(np.int64(update))), int(stages.sum_before(np.int64(update)))
    shares = {size // options.devices, -(-size // options.devices)}
    counts = sorted({-(-share // options.micro_batch_size) for share in shares})
    rates = [f"{_rates(rule, np.float64(size), options):.4g}" for rule in RULES]
    micro_batches = " or ".join(map(str, counts))
    return [f"{update}", f"{size}", micro_batches, *rates, f"{before}", f"{before / options.dataset_size:.2f}"]


def _rates(rule: str, batch_sizes: np.ndarray, options) -> np.ndarray:
    fields = {"scaling": rule, "reference_batch_size": options.reference_batch_size}
    return _peaks(fields, options.learning_rate, batch_sizes)


def _epoch_ends(stages: Stages, updates: int, dataset_size: int) -> list[tuple[int, int]]:
    """Of every epoch that ends: the updates until then, and how many examples of the last belong to the next."""
    sums = np.arange(1, int(stages.sum_before(np.int64(updates))) // dataset_size + 1) * dataset_size
    ends = stages.updates_to(sums)
    return list(zip(ends.tolist(), (stages.sum_before(ends) - sums).tolist(), strict=True))


def plot_trace(options: argparse.Namespace) -> None:
    """Draws batch sizes and rates over updates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trace = traces.read(options.trace, options.per_device_batch_size, options.time_per_update)
    updates = options.updates or trace.length
    stages = trace.batch_sizes.cut(updates)
    edges = np.append(stages.starts, updates)
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(8, 5), layout="constrained", dpi=150)
    above.stairs(stages.values, edges, color="#0072b2", lw=1.4)
    above.set_ylabel("batch size")
    above.set_ylim(bottom=0)
    for rule, colour in zip(RULES, ("#6b6f76", "#d55e00", "#009e73"), strict=True):
        below.stairs(_rates(rule, stages.values.astype(float), options), edges, label=rule, color=colour, lw=1.4)
    below.set_ylabel("learning rate")
    below.set_xlabel("update")
    below.set_ylim(bottom=0)
    below.legend(frameon=False, ncols=len(RULES), loc="lower left", bbox_to_anchor=(0, 1))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    above.set_title(Path(options.trace).name, loc="left", weight="bold")
    try:
        figure.savefig(options.plot)
    except (OSError, ValueError) as error:  # ValueError: the name's end is no kind of picture
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--plot: cannot write {options.plot} ({reason})") from error


def main(argv: list[str]) -> int:
    """Checks a trace; returns the exit code."""
    options = _parse(argv)
    try:
        check_trace(options)
        if options.plot:
            plot_trace(options)
    except UserError as error:
        print(f"schedules: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
