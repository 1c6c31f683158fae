"""What a report shows of a group of runs, as plain data that page.js and figures.py both draw.

A panel is a dict with id, title, note (what to see in it, in words) and kind:
  curve  values [runs][rows] over one of the AXES of each run
  xy     marks with points [x, y, low, high] of their own; kind line | points | hollow | cross | rule | band
  bars   rows [label, run, values] in named sections
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from largebatch.reports import studies
from largebatch.reports.labels import RATE, plain, rounded, sortable, value_label, values_label
from largebatch.runs import reader
from largebatch.runs.reader import Run, Study, number
from largebatch.studies import analysis

AXES = {"step": "updates", "examples_seen": "training images seen", "seconds": "seconds of training"}
MAX_COLOURS = 8
MAX_POINTS = 400  # of a curve; more cannot be told apart on a page
# Title, unit and, where it is fixed, the scale of the columns of metrics.jsonl.
CURVES = {
    "val_accuracy": ("Validation accuracy", "accuracy", "linear"),
    "val_loss": ("Validation loss", "cross-entropy", None),
    "train_loss": ("Training loss", "cross-entropy", None),
    "train_accuracy": ("Training accuracy", "accuracy", "linear"),
    "images_per_sec": ("Throughput", "training images / s", "zero"),
    "grad_norm": ("Gradient norm", "L2 norm", None),
    "noise_scale": ("Gradient noise scale", "examples", "log"),
    "replica_drift": ("Drift between replicas", "distance from their mean, relative", None),
    "bytes_sent": ("Sent by each device", "bytes per update", "zero"),
    "gain": ("AdaScale's gain", "reference updates per update", "zero"),
    "skipped_updates": ("Updates passed over", "updates", "linear"),
    "learning_rate": ("Learning rate", "learning rate", None),
    "global_batch_size": ("Batch size", "examples per update, mean", None),
}
PLACES = (
    "step",
    "outer",
    "examples_seen",
    "epoch",
    "val_examples",
    "scale_invariant_steps",
)  # where a row is, not what was measured
TIMES = ("step_time_ms", "train_sec", "eval_sec", "compile_sec", "wall_sec")  # told by throughput and the bars
ONLY_IF_VARYING = ("learning_rate", "global_batch_size", "bytes_sent")
SECTIONS = ("train", "evaluation", "checkpoint", "compile", "data", "other")


class Group(NamedTuple):
    """Runs that are shown together: those of a study, or those given one by one."""

    title: str
    study: Study | None
    runs: list[Run]
    labels: list[str]


def group_study(study: Study) -> Group:
    """All trials of a study."""
    several = len({seed_of(run) for run in study.runs}) > 1
    labels = []
    for run in study.runs:
        words = [value_label(*item) for item in reader.setting_of(run, study.fields).items()]
        if several and run.trial:
            words.append(f"seed {seed_of(run)}")
        labels.append(" · ".join([run.path.name, *words]))
    return Group(study.path.resolve().name, study, study.runs, labels)


def seed_of(run: Run) -> int | None:
    """The seed of a trial."""
    return number(run.trial.get("seed")) if run.trial else None


def group_runs(runs: list[Run]) -> Group:
    """Runs outside any study, by the name of their folder, or by their whole path where names are alike."""
    names = [run.path.resolve().name for run in runs]
    labels = names if len(set(names)) == len(names) else [str(run.path) for run in runs]
    return Group(labels[0] if len(runs) == 1 else f"{len(runs)} runs", None, runs, labels)


def describe(group: Group) -> dict:
    """The whole group: runs with their axes and colours, the legend, and all panels that have something to show."""
    keys, title = colour_keys(group)
    legend = list(dict.fromkeys(keys))
    if title != "run":
        legend.sort(key=sortable)
    chosen = [_thin(run.rows) for run in group.runs]
    runs = [
        {
            "name": run.path.name,
            "label": label,
            "status": run.status,
            "colour": legend.index(key),
            "axes": _axes(run, rows),
        }
        for run, label, key, rows in zip(group.runs, group.labels, keys, chosen, strict=True)
    ]
    panels = [studies.rate_panel(group.study, legend), studies.steps_panel(group.study)] if group.study else []
    panels += [*curve_panels([[run.rows[i] for i in rows] for run, rows in zip(group.runs, chosen, strict=True)])]
    panels.append(time_panel(group))
    return {
        "title": group.title,
        "runs": runs,
        "legend": {"title": title, "labels": [plain(key) for key in legend]},
        "panels": [panel for panel in panels if panel],
    }


def colour_keys(group: Group) -> tuple[list, str]:
    """What tells runs apart by colour, per run, and its name: themselves or settings where few, else a field."""
    optimizers = [
        plain(run.field(analysis.OPTIMIZER) or reader.setting_of(run, ()).get(analysis.OPTIMIZER))
        for run in group.runs
    ]
    if group.study is None and len(group.runs) <= 6:
        return list(group.labels), "run"
    if len(set(optimizers)) > 1:
        return optimizers, "optimizer"
    if group.study:
        settings = [values_label(reader.setting_of(run, group.study.fields)) for run in group.runs]
        if 2 <= len(set(settings)) <= MAX_COLOURS:
            return settings, "setting"
    for name, values in (
        ("batch size", [run.batch_size for run in group.runs]),
        ("learning rate", [number(run.field(RATE)) for run in group.runs]),
        *(
            (field, [plain(run.field(field)) for run in group.runs])
            for field in (group.study.fields if group.study else [])
        ),
    ):
        if 2 <= len(set(values)) <= MAX_COLOURS:
            return values, name
    return optimizers, "optimizer"


def _thin(rows: list[dict]) -> list[int]:
    """Indices of at most MAX_POINTS rows, first and last among them."""
    return np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MAX_POINTS)).astype(int)).tolist() if rows else []


def _axes(run: Run, rows: list[int]) -> dict:
    seconds = np.cumsum([row.get("train_sec") or 0.0 for row in run.rows])
    axes = {name: [run.rows[i].get(name) for i in rows] for name in ("step", "examples_seen")}
    return axes | {"seconds": [rounded(float(seconds[i])) for i in rows]}


# ---- curves ------------------------------------------------------------------------------------------


def curve_panels(rows: list[list[dict]]) -> Iterable[dict]:
    """A picture of every column that has a value anywhere, except times and places; rows [runs][rows]."""
    names = dict.fromkeys([*CURVES, *sorted({name for run in rows for row in run for name in row})])
    for name in names:
        if name in PLACES or name in TIMES:
            continue
        values = [[rounded(value) for value in _column(run, name)] for run in rows]
        found = [value for run in values for value in run if value is not None]
        if not any(found) and name not in list(CURVES)[:5]:
            continue
        if name in ONLY_IF_VARYING and not any(len(set(run) - {None}) > 1 for run in values):
            continue
        title, unit, scale = CURVES.get(name, (name.replace("_", " ").capitalize(), name, None))
        if found:
            if scale in (None, "log"):  # an estimated noise scale may be negative
                wide = min(found) > 0 and max(found) / min(found) > 30
                scale = "log" if wide or (scale and min(found) > 0) else "linear"
            note = f"{unit[0].upper()}{unit[1:]} from {min(found):,.4g} to {max(found):,.4g}."
            yield {"id": name, "title": title, "kind": "curve", "note": note, "values": values} | {
                "y": {"label": unit, "scale": scale}
            }


def _column(rows: list[dict], name: str) -> list:
    """A column of one run; of batch sizes, which may change from update to update, the means between rows."""
    if name != "global_batch_size":
        return [row.get(name) for row in rows]
    means, places = [], [(0, 0), *((number(row.get("step")), number(row.get("examples_seen"))) for row in rows)]
    for (step, seen), (later, more) in itertools.pairwise(places):
        known = None not in (step, seen, later, more) and later > step
        means.append((more - seen) / (later - step) if known else None)
    return means


# ---- time --------------------------------------------------------------------------------------------


def time_panel(group: Group) -> dict | None:
    """Where the seconds of each run went."""
    rows = []
    for index, (run, label) in enumerate(zip(group.runs, group.labels, strict=True)):
        seconds = run_seconds(run)
        if any(seconds.values()):
            rows.append([label, index, [rounded(seconds[name]) for name in SECTIONS]])
    if not rows:
        return None
    total = sum(sum(values) for *_, values in rows)
    share = sum(values[0] for *_, values in rows) / total
    note = f"{total:,.0f} s in all, {share:.1%} of it training. Hide a section to see the others larger."
    names = [{"label": name, "colour": index} for index, name in enumerate(SECTIONS)]
    return {
        "id": "time",
        "title": "Where the time went",
        "kind": "bars",
        "note": note,
        "sections": names,
        "rows": rows,
    } | {"x": {"label": "seconds", "scale": "zero"}}


def run_seconds(run: Run) -> dict[str, float]:
    """Seconds by section; of a run without a summary, what its rows tell."""
    stored = run.summary.get("seconds")
    if isinstance(stored, dict):
        seconds = {name: float(number(stored.get(name)) or 0) for name in SECTIONS}
        total = float(number(stored.get("total")) or 0)
    else:
        columns = {"train": "train_sec", "evaluation": "eval_sec", "compile": "compile_sec"}
        sums = {name: sum(row.get(column) or 0.0 for row in run.rows) for name, column in columns.items()}
        seconds = dict.fromkeys(SECTIONS, 0.0) | sums
        total = (run.rows[-1].get("wall_sec") or 0.0) if run.rows else 0.0
    seconds["other"] = max(total - sum(seconds[name] for name in SECTIONS if name != "other"), 0.0)
    return seconds
