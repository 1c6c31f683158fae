"""What a report shows of a group of runs, as plain data that page.js and figures.py both draw.

A panel is a dict with id, title, note (what to see in it, in words) and kind:
  curve  values [runs][rows] over one of the AXES of each run
  xy     marks with points [x, y, low, high] of their own; kind line | points | hollow | cross | rule | band
  bars   rows [label, run, values] in named sections
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from largebatch import analysis, runs
from largebatch.runs import BATCH, Run, Study, number

RATE = "optimizer.learning_rate"
AXES = {"step": "updates", "examples_seen": "training images seen", "seconds": "seconds of training"}
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
    "skipped_updates": ("Updates passed over", "updates", "linear"),
    "learning_rate": ("Learning rate", "learning rate", None),
    "global_batch_size": ("Batch size", "examples per update", None),
}
PLACES = ("step", "outer", "examples_seen", "epoch", "val_examples")  # where a row is, not what was measured
TIMES = ("step_time_ms", "train_sec", "eval_sec", "compile_sec", "wall_sec")  # told by throughput and the bars
ONLY_IF_VARYING = ("learning_rate", "global_batch_size")
SECTIONS = ("train", "evaluation", "checkpoint", "compile", "data", "other")
OBJECTIVE_LABELS = {
    "best_val_accuracy": "best validation accuracy",
    "steps_to_target": "updates to the target",
    "examples_to_target": "images to the target",
    "sec_to_target": "training seconds to the target",
}


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
        words = [_value_label(*item) for item in runs.setting_of(run, study.fields).items()]
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


def _value_label(name: str, value) -> str:
    text = "full" if value == "full" else plain(value)
    short = {RATE: "lr ", BATCH: "batch ", analysis.OPTIMIZER: ""}
    return short.get(name, f"{name.rpartition('.')[2]} ") + text


def short_name(field: str) -> str:
    """A config field as the head of a column."""
    return {analysis.OPTIMIZER: "optimizer", BATCH: "batch"}.get(field, field.rpartition(".")[2].replace("_", " "))


def plain(value) -> str:
    """A config value as text."""
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def describe(group: Group) -> dict:
    """The whole group: runs with their axes and colours, the legend, and all panels that have something to show."""
    keys, title = colour_keys(group)
    legend = list(dict.fromkeys(keys))
    if title != "run":
        legend.sort(key=_sortable)
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
    panels = [rate_panel(group.study, legend), steps_panel(group.study)] if group.study else []
    panels += [*curve_panels([[run.rows[i] for i in rows] for run, rows in zip(group.runs, chosen, strict=True)])]
    panels.append(time_panel(group))
    return {
        "title": group.title,
        "runs": runs,
        "legend": {"title": title, "labels": [plain(key) for key in legend]},
        "panels": [panel for panel in panels if panel],
    }


def colour_keys(group: Group) -> tuple[list, str]:
    """What tells runs apart by colour, per run, and its name: themselves where few, else a config field."""
    optimizers = [
        plain(run.field(analysis.OPTIMIZER) or runs.setting_of(run, ()).get(analysis.OPTIMIZER))
        for run in group.runs
    ]
    if group.study is None and len(group.runs) <= 6:
        return list(group.labels), "run"
    if len(set(optimizers)) > 1:
        return optimizers, "optimizer"
    for name, values in (
        ("batch size", [run.batch_size for run in group.runs]),
        ("learning rate", [number(run.field(RATE)) for run in group.runs]),
        *(
            (field, [plain(run.field(field)) for run in group.runs])
            for field in (group.study.fields if group.study else [])
        ),
    ):
        if 2 <= len(set(values)) <= 8:
            return values, name
    return optimizers, "optimizer"


def _rounded(value) -> float | int | None:
    value = number(value)
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _thin(rows: list[dict]) -> list[int]:
    """Indices of at most MAX_POINTS rows, first and last among them."""
    return np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MAX_POINTS)).astype(int)).tolist() if rows else []


def _axes(run: Run, rows: list[int]) -> dict:
    seconds = np.cumsum([row.get("train_sec") or 0.0 for row in run.rows])
    axes = {name: [run.rows[i].get(name) for i in rows] for name in ("step", "examples_seen")}
    return axes | {"seconds": [_rounded(float(seconds[i])) for i in rows]}


# ---- curves ------------------------------------------------------------------------------------------


def curve_panels(rows: list[list[dict]]) -> Iterable[dict]:
    """A picture of every column that has a value anywhere, except times and places; rows [runs][rows]."""
    names = dict.fromkeys([*CURVES, *sorted({name for run in rows for row in run for name in row})])
    for name in names:
        if name in PLACES or name in TIMES:
            continue
        values = [[_rounded(row.get(name)) for row in run] for run in rows]
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


# ---- time --------------------------------------------------------------------------------------------


def time_panel(group: Group) -> dict | None:
    """Where the seconds of each run went."""
    rows = []
    for index, (run, label) in enumerate(zip(group.runs, group.labels, strict=True)):
        seconds = run_seconds(run)
        if any(seconds.values()):
            rows.append([label, index, [_rounded(seconds[name]) for name in SECTIONS]])
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


# ---- study pictures ----------------------------------------------------------------------------------


def rate_panel(study: Study, legend: list) -> dict | None:
    """The objective over the learning rate, a line per optimizer (or batch size), where rates were searched.

    `legend` gives a line the colour that its runs have in the curves.
    """
    ranked = [s for s in analysis.leaderboard(study) if (number(s.values.get(RATE)) or 0) > 0]
    if len({setting.values[RATE] for setting in ranked}) < 2:
        return None
    by = analysis.OPTIMIZER
    if len({setting.values.get(by) for setting in ranked}) < 2 and any(BATCH in s.values for s in ranked):
        by = BATCH
    keys = sorted({setting.values.get(by) for setting in ranked}, key=_sortable)
    colours = {key: legend.index(key) if key in legend else index for index, key in enumerate(keys)}
    lines = {key: {} for key in keys}
    others, crosses = [], []
    for setting in ranked:
        key, rate = setting.values.get(by), float(setting.values[RATE])
        colour = colours[key]
        if setting.objective.mean is None or setting.statuses.keys() <= {"diverged", "failed"}:
            crosses.append((colour, rate, setting))
        elif rate in lines[key]:
            others.append((colour, rate, setting))
        else:
            lines[key][rate] = setting
            if "diverged" in setting.statuses:
                crosses.append((colour, rate, setting))
    accuracy = study.objective == "best_val_accuracy"
    marks = [
        _mark(
            "line",
            _value_label(by, key) if by in ranked[0].values else "all",
            colours[key],
            sorted(lines[key].items()),
            accuracy,
        )
        for key in keys
    ]
    marks += [_mark("points", None, colour, [(rate, setting)], accuracy) for colour, rate, setting in others]
    marks += [_mark("cross", None, colour, [(rate, setting)], accuracy) for colour, rate, setting in crosses]
    label = OBJECTIVE_LABELS[study.objective]
    scale = "linear" if accuracy else "log"
    note = "Means over seeds with 95 % intervals; the best of all other fields at each rate."
    note += " Pale points are the others." if others else ""
    note += " A cross stands where seeds diverged, failed or missed the target." if crosses else ""
    by_name = "optimizer" if by == analysis.OPTIMIZER else "batch size"
    return {
        "id": "learning_rate_study",
        "title": f"{label[0].upper()}{label[1:]} over learning rate, by {by_name}",
        "kind": "xy",
        "note": note,
        "x": {
            "label": "learning rate",
            "scale": "log",
            "ticks": _few({setting.values[RATE] for setting in ranked}),
        },
        "y": {"label": label, "scale": scale, "domain": _domain(marks, scale)},
        "marks": [mark for mark in marks if mark["points"] or mark["label"]],
    }


def _few(values: Iterable[float]) -> list[float] | None:
    """The values themselves as ticks, where they are few."""
    ticks = sorted(values)
    return ticks if len(ticks) <= 12 else None


def _sortable(value) -> tuple:
    return (0, value, "") if number(value) is not None else (1, 0, plain(value))


def _mark(kind: str, label: str | None, colour: int, found: list, accuracy: bool) -> dict:
    """A mark of (rate, setting) pairs; an interval of accuracies is drawn as far as accuracies go."""
    points = []
    for x, setting in found:
        mean, _, low, high, _ = setting.objective
        if accuracy and low is not None:
            low, high = max(low, 0.0), min(high, 1.0)
        points.append([x, None, None, None] if kind == "cross" else [x, *map(_rounded, (mean, low, high))])
    tips = [
        _values_label(setting.values) + "\n" + ", ".join(f"{n} {name}" for name, n in setting.statuses.items())
        for _, setting in found
    ]
    return {"kind": kind, "label": label, "colour": colour, "points": points, "tips": tips}


def _domain(marks: list[dict], scale: str) -> list[float]:
    """Range of y that shows all values, and of their intervals as much again: two seeds can span everything."""
    points = [point for mark in marks for point in mark["points"] if point[1] is not None]
    if not points:
        return [0.1, 1.0]
    to, back = (np.log10, lambda v: 10.0**v) if scale == "log" else (np.asarray, float)
    values = to([point[1] for point in points])
    ends = [end for point in points for end in point[2:] if end is not None and (scale != "log" or end > 0)]
    span = max(float(np.ptp(values)), 0.02)
    low, high = values.min() - span / 2, values.max() + span / 2
    inside = np.clip(to(ends), low, high) if ends else values
    low, high = min(values.min(), inside.min()) - span / 12, max(values.max(), inside.max()) + span / 12
    return [float(f"{back(end):.6g}") for end in (low, high)]


def fit(study: Study) -> tuple[list[analysis.BatchPoint], analysis.Knee | None]:
    """The best-tuned point of each batch size, and the curve through their seeds."""
    points = analysis.steps_to_target(study)
    batch_sizes = [point.batch_size for point in points for _ in point.steps]
    return points, analysis.fit_knee(batch_sizes, [steps for point in points for steps in point.steps])


def steps_panel(study: Study) -> dict | None:
    """Updates to the target over batch size, where at least two batch sizes reached it."""
    points, knee = fit(study)
    if len(points) < 2:
        return None
    sizes = [point.batch_size for point in points]
    marks = []
    if knee and knee.low is not None and knee.low > 0 and math.isfinite(knee.high):
        marks.append(
            {
                "kind": "band",
                "label": None,
                "colour": None,
                "points": [[_rounded(knee.low), None], [_rounded(knee.high), None]],
            }
        )
    first = points[0]
    perfect = [[size, _rounded(first.updates.mean * sizes[0] / size)] for size in (sizes[0], sizes[-1])]
    marks.append({"kind": "line", "style": "dashed", "label": "perfect scaling", "colour": None, "points": perfect})
    if knee:
        at = np.geomspace(sizes[0], sizes[-1], 60)
        curve = [[_rounded(float(x)), _rounded(float(y))] for x, y in zip(at, knee.steps_at(at), strict=True)]
        marks.append({"kind": "line", "label": "fit", "colour": 1, "points": curve})
    if knee and 0 < knee.critical_batch_size < math.inf:
        label = f"knee {knee.critical_batch_size:,.0f}"
        marks.append(
            {"kind": "rule", "label": label, "colour": 1, "points": [[_rounded(knee.critical_batch_size), None]]}
        )
    for kind, label, chosen in (
        ("points", "best-tuned setting", [point for point in points if not point.edges]),
        ("hollow", "best value at the edge of those tried", [point for point in points if point.edges]),
    ):
        found = [[p.batch_size, *map(_rounded, (p.updates.mean, p.updates.low, p.updates.high))] for p in chosen]
        tips = ["\n".join([_values_label(p.values), f"{p.seeds} seeds", *map(str, p.edges)]) for p in chosen]
        if found:
            marks.append({"kind": kind, "label": label, "colour": 0, "points": found, "tips": tips})
    return {
        "id": "steps_to_target",
        "title": "Updates to the target over batch size",
        "kind": "xy",
        "note": knee_note(points, knee),
        "x": {"label": "batch size", "scale": "log", "ticks": _few(sizes)},
        "y": {"label": "updates to the target", "scale": "log", "domain": _domain(marks, "log")},
        "marks": marks,
    }


def _values_label(values: dict) -> str:
    return " · ".join(_value_label(*item) for item in values.items())


def knee_note(points: list[analysis.BatchPoint], knee: analysis.Knee | None) -> str:
    """What the curve says, in words."""
    if knee is None:
        return "A knee needs at least 3 batch sizes that reached the target."
    if math.isinf(knee.critical_batch_size):
        return f"No knee up to batch {points[-1].batch_size:,}: twice the batch still halves the updates."
    if knee.critical_batch_size == 0:
        return f"The knee lies below batch {points[0].batch_size:,}: larger batches save no updates."
    ends = ""
    if knee.low is not None:
        high = f"{knee.high:,.0f}" if math.isfinite(knee.high) else "beyond what was measured"
        ends = f" (95 % interval {knee.low:,.0f} to {high})"
    return (
        f"The knee is at batch {knee.critical_batch_size:,.0f}{ends}: there a run needs twice the fewest updates, "
        f"{knee.min_steps:,.0f}, and twice the fewest images, {knee.min_examples:,.0f}. "
        "Fitted: updates = fewest updates × (1 + knee / batch)."
    )
