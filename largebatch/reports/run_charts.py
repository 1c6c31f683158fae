"""Charts of any runs: a curve of every column of metrics.jsonl, where the time went, and devices over time."""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass

from largebatch.reports import charts
from largebatch.reports.charts import Chart, Mark, few_ticks, thinned
from largebatch.reports.groups import Group, rounded
from largebatch.runs.reader import COUNTED_SECTIONS, ENDED, Run, event_time, number, process_begin

# ---- curves ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Style of a column of metrics.jsonl; scale is linear, log, zero (linear from 0), or None, by the values."""

    title: str
    unit: str
    scale: str | None = None


CURVES = {
    "val_accuracy": Curve("Validation accuracy", "accuracy", "linear"),
    "val_accuracy_top5": Curve("Validation accuracy among the first five", "accuracy", "linear"),
    "val_mean_iou": Curve("Mean intersection over union", "mean IoU", "linear"),
    "val_depth_rmse": Curve("Error of depths", "root mean square", "zero"),
    "val_depth_relative_error": Curve("Relative error of depths", "mean of |error| / depth", "zero"),
    "val_depth_near": Curve("Depths within a factor of 1.25", "share of pixels", "linear"),
    "val_loss": Curve("Validation loss", "loss"),
    "train_loss": Curve("Training loss", "loss"),
    "train_accuracy": Curve("Training accuracy", "accuracy", "linear"),
    "train_pixel_accuracy": Curve("Training accuracy of pixels", "share of pixels", "linear"),
    "train_depth_error": Curve("Training error of depths", "mean of |error|", "zero"),
    "images_per_sec": Curve("Throughput", "training images / s", "zero"),
    "mfu": Curve("Model FLOPs utilisation", "share of the devices' peak", "zero"),
    "device_memory_peak_bytes": Curve("Peak of a device's memory", "bytes", "zero"),
    "grad_norm": Curve("Gradient norm", "L2 norm"),
    "noise_scale": Curve("Gradient noise scale", "examples", "log"),
    "replica_drift": Curve("Drift between replicas", "distance from their mean, relative"),
    "bytes_sent": Curve("Sent by each device", "bytes per step", "zero"),
    "gain": Curve("AdaScale's gain", "reference steps per step", "zero"),
    "skipped_steps": Curve("Steps passed over", "steps", "linear"),
    "learning_rate": Curve("Learning rate", "learning rate"),
    "global_batch_size": Curve("Batch size", "examples per step, mean"),
}
IOU = "val_iou_"  # and the name of a class
MAX_CLASSES = 12  # that have curves of their own
# Where a row is, which is not measured; and times, which throughput and the bars tell.
PLACES = ("step", "outer", "examples_seen", "epoch", "val_examples", "val_score", "scale_invariant_steps")
TIMES = ("step_time_ms", "train_sec", "eval_sec", "compile_sec", "wall_sec")
ONLY_IF_VARYING = ("learning_rate", "global_batch_size", "bytes_sent")
ALSO_IF_ZERO = ("val_accuracy", "val_loss", "train_loss", "train_accuracy", "images_per_sec")
WIDE = 30  # largest value over smallest, from which on a logarithmic scale shows more


def curve_charts(group: Group) -> Iterator[Chart]:
    """Yield a chart of every column that has a value anywhere, except times and places."""
    rows = [[run.rows[i] for i in thinned(len(run.rows), len(group.runs))] for run in group.runs]
    others = sorted({name for run in rows for row in run for name in row})
    of_classes = [name for name in others if name.startswith(IOU)]
    if len(of_classes) > MAX_CLASSES:  # evaluate.py prints all of them
        others = [name for name in others if name not in of_classes]
    for name in dict.fromkeys([*CURVES, *others]):
        if name in PLACES or name in TIMES:
            continue
        values = [[number(value) for value in _column(run, name)] for run in rows]
        known = [value for run in values for value in run if value is not None]
        if not known or (not any(known) and name not in ALSO_IF_ZERO):
            continue
        if name in ONLY_IF_VARYING and not any(len(set(run) - {None}) > 1 for run in values):
            continue
        curve = CURVES.get(name) or Curve(name.replace("_", " ").capitalize(), name)
        if name.startswith(IOU):
            curve = Curve(f"Intersection over union of {name.removeprefix(IOU)}", "IoU", "linear")
        yield charts.curves(f"curve-{name}", curve.title, curve.unit, _scale(curve.scale, known), values)


def _scale(wanted: str | None, values: list[float]) -> str:
    if wanted in ("linear", "zero"):
        return wanted
    if min(values) <= 0:  # as an estimated noise scale may be
        return "linear"
    return "log" if wanted == "log" or max(values) / min(values) > WIDE else "linear"


def _column(rows: list[dict], name: str) -> list:
    """Return a column of one run; of batch sizes, which may change at any step, the means between rows."""
    if name != "global_batch_size":
        return [row.get(name) for row in rows]
    means, step, examples = [], 0, 0
    for row in rows:
        step_before, examples_before = step, examples
        step, examples = number(row.get("step")), number(row.get("examples_seen"))
        known = None not in (step_before, examples_before, step, examples) and step > step_before
        means.append((examples - examples_before) / (step - step_before) if known else None)
    return means


# ---- time --------------------------------------------------------------------------------------------------


SECTIONS = ("train", "evaluation", "checkpoint", "compile", "data", "other")


def time_chart(group: Group) -> Chart | None:
    """Return where the time of each run went; None where nothing is known."""
    seconds = {label: run_seconds(run) for label, run in zip(group.labels, group.runs, strict=True)}
    values = {label: list(known.values()) for label, known in seconds.items() if any(known.values())}
    if not values:
        return None
    total = sum(map(sum, values.values()))
    share = sum(of_run[0] for of_run in values.values()) / total
    note = f"{total:,.0f} s in all, {share:.1%} of it training. Of runs that have not ended, what their rows tell."
    return charts.bars("time", "Where the time went", note, "seconds", SECTIONS, values)


def run_seconds(run: Run) -> dict[str, float]:
    """Return seconds by section; of a run without a summary, what its rows tell."""
    recorded = run.summary.get("seconds")
    if isinstance(recorded, dict):
        seconds = {name: float(number(recorded.get(name)) or 0) for name in SECTIONS}
        total = float(number(recorded.get("total")) or 0)
    else:
        seconds = dict.fromkeys(SECTIONS, 0.0)
        for name, column in (("train", "train_sec"), ("evaluation", "eval_sec"), ("compile", "compile_sec")):
            seconds[name] = sum(row.get(column) or 0.0 for row in run.rows)
        total = (run.rows[-1].get("wall_sec") or 0.0) if run.rows else 0.0
    seconds["other"] = max(total - sum(seconds[name] for name in SECTIONS if name != "other"), 0.0)
    return seconds


# ---- devices -----------------------------------------------------------------------------------------------

MAX_LIVES = 8  # most runs in one chart


@dataclass(frozen=True)
class Life:
    """A run from its first start to its last event.

    Attributes:
      stays: (begin, end, devices) of each of its processes, in seconds since the run began.
      counted_sec: wall time in which steps and validations were done that were not lost.
    """

    stays: list[tuple[float, float, int]]
    wall_sec: float
    counted_sec: float


def life_of(run: Run) -> Life | None:
    """Return a run's life by its events.jsonl and summary.json; None before its first start.

    A process that was killed told no end: it counts until the next one begins.
    """
    starts = [event for event in run.events if event["event"] == "start"]
    if not starts:
        return None
    begins = [process_begin(start) for start in starts]

    def seconds(time: datetime.datetime) -> float:
        return max((time - begins[0]).total_seconds(), 0.0)

    last = event_time(run.events[-1])
    ends = [event_time(event) for event in run.events if event["event"] in ENDED]
    stays = []
    for start, begin, latest in zip(starts, begins, [*begins[1:], last], strict=True):
        end = next((end for end in ends if begin <= end <= latest), latest)
        stays.append((seconds(begin), seconds(end), start["devices"]))
    if "seconds" in run.summary:
        counted, until = sum(run.summary["seconds"].get(section, 0.0) for section in COUNTED_SECTIONS), last
    else:  # it still runs, or was killed: what counted is known up to its last start
        counted, until = starts[-1]["counted_sec"], begins[-1]
    return Life(stays, seconds(until), counted)


def devices_chart(group: Group) -> Chart | None:
    """Return the devices of each run over time, where one of them started more than once."""
    lives = [(label, life_of(run)) for run, label in zip(group.runs, group.labels, strict=True)]
    lives = [(label, life) for label, life in lives if life and len(life.stays) > 1]
    if not lives or len(lives) > MAX_LIVES:
        return None
    marks, notes = [], []
    for index, (label, life) in enumerate(lives):
        points = []
        for begin, end, devices in life.stays:
            corners = [(begin, 0), (begin, devices), (end, devices), (end, 0)]
            points += [[rounded(time), count] for time, count in corners]
        marks.append(Mark("line", label, index, points))
        goodput = life.counted_sec / life.wall_sec if life.wall_sec else 1.0
        share = f"{goodput:.1%} of {life.wall_sec:,.0f} s brought the run on (goodput)"
        notes.append(f"{label}: {len(life.stays)} starts, {share}.")
    counts = {devices for _, life in lives for *_, devices in life.stays}
    note = " ".join([*notes, "A process that was killed is drawn until the next begins."])
    x, y = ("seconds since the first start", "linear", None), ("devices", "linear", few_ticks({0, *counts}))
    return charts.xy("devices", "Devices", note, marks, x=x, y=y, domain=[0, 1.1 * max(counts)])
