"""What a report shows of a group of runs, as plain data that page.js and figures.py both draw.

A panel is a dict with id, title, note (what to see in it, in words, a line for each paragraph) and kind:
  curve  values [runs][rows] over one of the AXES of each run
  xy     marks with points [x, y, low, high] of their own; kind line | points | hollow | cross | rule | band
  bars   rows [label, run, values] in named sections
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from largebatch.reports import study_panels
from largebatch.reports.branch_panel import branch_panel
from largebatch.reports.devices_panel import devices_panel
from largebatch.reports.labels import RATE, plain, rounded, sort_key, value_label, values_label
from largebatch.runs import reader
from largebatch.runs.reader import Run, Study, number
from largebatch.studies import analysis
from largebatch.studies.critical_batch import StepsCurve

AXES = {"step": "updates", "examples_seen": "training images seen", "seconds": "seconds of training"}
MAX_COLOURS = 8
MAX_RUNS_BY_NAME = 6  # that are told apart by a colour each
MAX_POINTS = 400  # of a curve; more cannot be told apart on a page


@dataclass(frozen=True)
class Group:
    """Runs that are shown together: those of a study, or those given one by one."""

    title: str
    study: Study | None
    runs: list[Run]
    labels: list[str]


def group_study(study: Study) -> Group:
    """All trials of a study."""
    several_seeds = len({seed_of(run) for run in study.runs}) > 1
    labels = []
    for run in study.runs:
        words = [run.path.name]
        words += [value_label(field, value) for field, value in reader.setting_of(run, study.fields).items()]
        if several_seeds and run.trial:
            words.append(f"seed {seed_of(run)}")
        labels.append(" · ".join(words))
    return Group(study.path.resolve().name, study, study.runs, labels)


def seed_of(run: Run) -> int | None:
    """The seed of a trial."""
    return number(run.trial.get("seed")) if run.trial else None


def group_runs(runs: list[Run]) -> Group:
    """Runs outside any study, by the name of their folder, or by their whole path where names are alike."""
    labels = [run.path.resolve().name for run in runs]
    if len(set(labels)) < len(labels):
        labels = [str(run.path) for run in runs]
    title = labels[0] if len(runs) == 1 else f"{len(runs)} runs"
    return Group(title, None, runs, labels)


def describe(group: Group, knees: dict[str, StepsCurve] | None = None) -> dict:
    """The whole group: runs with their axes and colours, the legend, and all panels that have something to show.

    Args:
      knees: of the other studies of the report, by title.
    """
    colours = colour_runs(group)
    legend = list(dict.fromkeys(colours.values))
    if colours.title != "run":
        legend.sort(key=sort_key)
    shown_rows = [_thin(run.rows) for run in group.runs]
    runs = [
        {
            "name": run.path.name,
            "label": label,
            "status": run.status,
            "colour": legend.index(value),
            "axes": _axes(run, rows),
        }
        for run, label, value, rows in zip(group.runs, group.labels, colours.values, shown_rows, strict=True)
    ]
    panels = []
    if group.study:
        panels += [study_panels.rate_panel(group.study, legend), study_panels.steps_panel(group.study, legend)]
        panels.append(branch_panel(group.study, knees or {}))
    panels += curve_panels([[run.rows[i] for i in rows] for run, rows in zip(group.runs, shown_rows, strict=True)])
    panels += [time_panel(group), devices_panel(group.runs, group.labels)]
    return {
        "title": group.title,
        "runs": runs,
        "legend": {"title": colours.title, "labels": [plain(value) for value in legend]},
        # A foreign column may have the name of a panel.
        "panels": list({panel["id"]: panel for panel in panels if panel}.values()),
    }


def _thin(rows: list[dict]) -> list[int]:
    """Indices of at most MAX_POINTS rows, first and last among them."""
    if not rows:
        return []
    return np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MAX_POINTS)).astype(int)).tolist()


def _axes(run: Run, rows: list[int]) -> dict:
    seconds = np.cumsum([row.get("train_sec") or 0.0 for row in run.rows])
    return {
        "step": [run.rows[i].get("step") for i in rows],
        "examples_seen": [run.rows[i].get("examples_seen") for i in rows],
        "seconds": [rounded(float(seconds[i])) for i in rows],
    }


# ---- colours -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Colours:
    """What tells runs apart by colour: a value per run, alike where the colour is, and what the values are of."""

    title: str
    values: list


def colour_runs(group: Group) -> Colours:
    """Runs or settings have a colour each where they are few; else the values of the first field with a few."""
    if group.study is None and len(group.runs) <= MAX_RUNS_BY_NAME:
        return Colours("run", list(group.labels))
    optimizers = Colours("optimizer", [plain(_optimizer_of(run)) for run in group.runs])
    if len(set(optimizers.values)) > 1:
        return optimizers
    candidates = []
    if group.study:
        settings = [values_label(reader.setting_of(run, group.study.fields)) for run in group.runs]
        candidates.append(Colours("setting", settings))
    candidates.append(Colours("batch size", [run.batch_size for run in group.runs]))
    candidates.append(Colours("learning rate", [number(run.field(RATE)) for run in group.runs]))
    for field in group.study.fields if group.study else []:
        candidates.append(Colours(field, [plain(run.field(field)) for run in group.runs]))
    few = (colours for colours in candidates if 2 <= len(set(colours.values)) <= MAX_COLOURS)
    return next(few, optimizers)


def _optimizer_of(run: Run) -> str | None:
    return run.field(analysis.OPTIMIZER) or reader.setting_of(run, ()).get(analysis.OPTIMIZER)


# ---- curves ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """How a column of metrics.jsonl is drawn; scale "linear", "log", "zero" (linear from 0), or None: as fits."""

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
    "bytes_sent": Curve("Sent by each device", "bytes per update", "zero"),
    "gain": Curve("AdaScale's gain", "reference updates per update", "zero"),
    "skipped_updates": Curve("Updates passed over", "updates", "linear"),
    "learning_rate": Curve("Learning rate", "learning rate"),
    "global_batch_size": Curve("Batch size", "examples per update, mean"),
}
IOU = "val_iou_"  # and the name of a class
MAX_CLASSES = 12  # that have curves of their own
# Where a row is, which is not measured; and times, which throughput and the bars tell.
PLACES = ("step", "outer", "examples_seen", "epoch", "val_examples", "val_score", "scale_invariant_steps")
TIMES = ("step_time_ms", "train_sec", "eval_sec", "compile_sec", "wall_sec")
ONLY_IF_VARYING = ("learning_rate", "global_batch_size", "bytes_sent")
ALSO_IF_ZERO = ("val_accuracy", "val_loss", "train_loss", "train_accuracy", "images_per_sec")
WIDE = 30  # largest value over smallest, from which on a logarithmic scale shows more


def curve_panels(rows: list[list[dict]]) -> Iterator[dict]:
    """A panel of every column that has a value anywhere, except times and places; rows [runs][rows]."""
    others = sorted({name for run in rows for row in run for name in row})
    of_classes = [name for name in others if name.startswith(IOU)]
    if len(of_classes) > MAX_CLASSES:  # evaluate.py prints all of them
        others = [name for name in others if name not in of_classes]
    for name in dict.fromkeys([*CURVES, *others]):
        if name not in PLACES and name not in TIMES:
            panel = _curve_panel(name, [[rounded(value) for value in _column(run, name)] for run in rows])
            if panel:
                yield panel


def _curve_panel(name: str, values: list[list]) -> dict | None:
    """The panel of a column, values [runs][rows]; None where there is nothing to see."""
    known = [value for run in values for value in run if value is not None]
    if not known or (not any(known) and name not in ALSO_IF_ZERO):
        return None
    if name in ONLY_IF_VARYING and not any(len(set(run) - {None}) > 1 for run in values):
        return None
    curve = CURVES.get(name)
    if curve is None and name.startswith(IOU):
        curve = Curve(f"Intersection over union of {name.removeprefix(IOU)}", "IoU", "linear")
    curve = curve or Curve(name.replace("_", " ").capitalize(), name)
    return {
        "id": name,
        "title": curve.title,
        "kind": "curve",
        "note": f"{curve.unit[:1].upper()}{curve.unit[1:]} from {min(known):,.4g} to {max(known):,.4g}.",
        "values": values,
        "y": {"label": curve.unit, "scale": _scale(curve.scale, known)},
    }


def _scale(wanted: str | None, values: list[float]) -> str:
    if wanted in ("linear", "zero"):
        return wanted
    if min(values) <= 0:  # as an estimated noise scale may be
        return "linear"
    return "log" if wanted == "log" or max(values) / min(values) > WIDE else "linear"


def _column(rows: list[dict], name: str) -> list:
    """A column of one run; of batch sizes, which may change from update to update, the means between rows."""
    if name == "global_batch_size":
        return _mean_batch_sizes(rows)
    return [row.get(name) for row in rows]


def _mean_batch_sizes(rows: list[dict]) -> list[float | None]:
    means, step, examples = [], 0, 0
    for row in rows:
        step_before, examples_before = step, examples
        step, examples = number(row.get("step")), number(row.get("examples_seen"))
        known = None not in (step_before, examples_before, step, examples) and step > step_before
        means.append((examples - examples_before) / (step - step_before) if known else None)
    return means


# ---- time --------------------------------------------------------------------------------------------


SECTIONS = ("train", "evaluation", "checkpoint", "compile", "data", "other")


def time_panel(group: Group) -> dict | None:
    """Where the seconds of each run went."""
    rows, total, training = [], 0.0, 0.0
    for index, (run, label) in enumerate(zip(group.runs, group.labels, strict=True)):
        seconds = run_seconds(run)
        if any(seconds.values()):
            shown = [rounded(seconds[name]) for name in SECTIONS]
            rows.append([label, index, shown])
            total += sum(shown)
            training += shown[0]
    if not rows:
        return None
    return {
        "id": "time",
        "title": "Where the time went",
        "kind": "bars",
        "note": (
            f"{total:,.0f} s in all, {training / total:.1%} of it training. "
            "Hide a section to see the others larger."
        ),
        "sections": [{"label": name, "colour": index} for index, name in enumerate(SECTIONS)],
        "rows": rows,
        "x": {"label": "seconds", "scale": "zero"},
    }


def run_seconds(run: Run) -> dict[str, float]:
    """Seconds by section; of a run without a summary, what its rows tell."""
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
