"""Checks a batch-size trace and shows what a run would make of it.

python -m largebatch.trace_check TRACE.csv --dataset-size 172800 --devices 8
"""

import argparse
import dataclasses
import math
import sys
from pathlib import Path

import numpy as np

from largebatch import terminal
from largebatch.errors import BadSetting, UserError, printable
from largebatch.optim import traces
from largebatch.optim.piecewise import PiecewiseConstant
from largebatch.optim.schedule_text import format_range
from largebatch.optim.schedules import SCALING
from largebatch.paths import address_argument, path_argument

RULES = ("none", "linear", "sqrt")  # whose rates follow from the batch sizes alone
SHOWN = 24  # rows of a table


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m largebatch.trace_check", description="Checks a batch-size trace.", allow_abbrev=False
    )
    parser.add_argument("trace", type=address_argument, metavar="TRACE.csv")
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
    parser.add_argument("--plot", type=path_argument, metavar="FILE.png", help="a picture of batch sizes and rates")
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
    batch_sizes = trace.batch_sizes.first(updates)
    total = int(batch_sizes.total_before(np.int64(updates)))
    print(
        f"{trace.text}: {updates:,} updates, batch {format_range(batch_sizes.values)}, {total:,} examples, "
        f"{total / options.dataset_size:,.2f} epochs"
    )
    chosen = _spread(batch_sizes.starts)
    header = ["update", "batch", "micro-batches a device", *(f"rate, {rule}" for rule in RULES), "examples before"]
    terminal.print_table([*header, "epoch"], [_row(batch_sizes, int(update), options) for update in chosen])
    if len(chosen) < len(batch_sizes.starts):
        print(f"{len(chosen)} of the {len(batch_sizes.starts):,} updates at which the batch changes")
    ends = _epoch_ends(batch_sizes, updates, options.dataset_size)
    if not ends:
        print("no epoch ends in the run")
        return
    rows, first = [], 0
    for number, end in enumerate(ends):
        num_updates, of_next = (
            end.updates_before - first,
            f"{end.examples_of_next:,}" if end.examples_of_next else "none",
        )
        rows.append([f"{number}", f"{num_updates:,}", f"{end.updates_before - 1:,}", of_next])
        first = end.updates_before
    terminal.print_table(
        ["epoch", "updates", "ends in update", "examples of it in the next epoch"],
        [rows[k] for k in _spread(range(len(rows)))],
    )


def _spread(values) -> np.ndarray:
    """At most SHOWN of the values, first and last among them."""
    places = np.linspace(0, len(values) - 1, min(len(values), SHOWN)).astype(int)
    return np.asarray(values)[places]


def _row(batch_sizes: PiecewiseConstant, update: int, options) -> list[str]:
    size, before = int(batch_sizes.value_at(np.int64(update))), int(batch_sizes.total_before(np.int64(update)))
    shares = {size // options.devices, -(-size // options.devices)}
    counts = sorted({-(-share // options.micro_batch_size) for share in shares})
    rates = [f"{_rates(rule, np.float64(size), options):.4g}" for rule in RULES]
    micro_batches = " or ".join(map(str, counts))
    return [f"{update}", f"{size}", micro_batches, *rates, f"{before}", f"{before / options.dataset_size:.2f}"]


def _rates(rule: str, batch_sizes: np.ndarray, options) -> np.ndarray:
    return options.learning_rate * SCALING[rule](batch_sizes / options.reference_batch_size)


@dataclasses.dataclass(frozen=True)
class _EpochEnd:
    """Where an epoch ends within a run."""

    updates_before: int  # of the run, the one that ends the epoch among them
    examples_of_next: int  # that this last update takes from the next epoch


def _epoch_ends(batch_sizes: PiecewiseConstant, updates: int, dataset_size: int) -> list[_EpochEnd]:
    examples = int(batch_sizes.total_before(np.int64(updates)))
    multiples = np.arange(1, examples // dataset_size + 1) * dataset_size
    ends = batch_sizes.updates_to(multiples)
    of_next = batch_sizes.total_before(ends) - multiples
    return [_EpochEnd(*end) for end in zip(ends.tolist(), of_next.tolist(), strict=True)]


def plot_trace(options: argparse.Namespace) -> None:
    """Draws batch sizes and rates over updates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trace = traces.read(options.trace, options.per_device_batch_size, options.time_per_update)
    updates = options.updates or trace.length
    batch_sizes = trace.batch_sizes.first(updates)
    edges = np.append(batch_sizes.starts, updates)
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(8, 5), layout="constrained", dpi=150)
    above.stairs(batch_sizes.values, edges, color="#0072b2", lw=1.4)
    above.set_ylabel("batch size")
    above.set_ylim(bottom=0)
    for rule, colour in zip(RULES, ("#6b6f76", "#d55e00", "#009e73"), strict=True):
        below.stairs(
            _rates(rule, batch_sizes.values.astype(float), options), edges, label=rule, color=colour, lw=1.4
        )
    below.set_ylabel("learning rate")
    below.set_xlabel("update")
    below.set_ylim(bottom=0)
    below.legend(frameon=False, ncols=len(RULES), loc="lower left", bbox_to_anchor=(0, 1))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    above.set_title(Path(options.trace).name, loc="left", weight="bold", parse_math=False)
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
        print(f"trace_check: error: {printable(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
