"""The pictures of a study: its objective over the learning rate, and updates to the target over batch size."""

import math
from collections.abc import Iterable

import numpy as np

from largebatch.reports.labels import RATE, rounded, sortable, value_label, values_label
from largebatch.runs.reader import BATCH, Study, number
from largebatch.studies import analysis

OBJECTIVE_LABELS = {
    "best_val_accuracy": "best validation accuracy",
    "steps_to_target": "updates to the target",
    "examples_to_target": "images to the target",
    "sec_to_target": "training seconds to the target",
}


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
    keys = sorted({setting.values.get(by) for setting in ranked}, key=sortable)
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
            value_label(by, key) if by in ranked[0].values else "all",
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


def _mark(kind: str, label: str | None, colour: int, found: list, accuracy: bool) -> dict:
    """A mark of (rate, setting) pairs; an interval of accuracies is drawn as far as accuracies go."""
    points = []
    for x, setting in found:
        mean, _, low, high, _ = setting.objective
        if accuracy and low is not None:
            low, high = max(low, 0.0), min(high, 1.0)
        points.append([x, None, None, None] if kind == "cross" else [x, *map(rounded, (mean, low, high))])
    tips = [
        values_label(setting.values) + "\n" + ", ".join(f"{n} {name}" for name, n in setting.statuses.items())
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
                "points": [[rounded(knee.low), None], [rounded(knee.high), None]],
            }
        )
    first = points[0]
    perfect = [[size, rounded(first.updates.mean * sizes[0] / size)] for size in (sizes[0], sizes[-1])]
    marks.append({"kind": "line", "style": "dashed", "label": "perfect scaling", "colour": None, "points": perfect})
    if knee:
        at = np.geomspace(sizes[0], sizes[-1], 60)
        curve = [[rounded(float(x)), rounded(float(y))] for x, y in zip(at, knee.steps_at(at), strict=True)]
        marks.append({"kind": "line", "label": "fit", "colour": 1, "points": curve})
    if knee and 0 < knee.critical_batch_size < math.inf:
        label = f"knee {knee.critical_batch_size:,.0f}"
        marks.append(
            {"kind": "rule", "label": label, "colour": 1, "points": [[rounded(knee.critical_batch_size), None]]}
        )
    scales = analysis.noise_scales(study)
    if scales:
        scale = float(np.median(scales))
        marks.append(
            {"kind": "rule", "label": f"noise scale {scale:,.0f}", "colour": 2, "points": [[rounded(scale), None]]}
        )
    for kind, label, chosen in (
        ("points", "best-tuned setting", [point for point in points if not point.edges]),
        ("hollow", "best value at the edge of those tried", [point for point in points if point.edges]),
    ):
        found = [[p.batch_size, *map(rounded, (p.updates.mean, p.updates.low, p.updates.high))] for p in chosen]
        tips = ["\n".join([values_label(p.values), f"{p.seeds} seeds", *map(str, p.edges)]) for p in chosen]
        if found:
            marks.append({"kind": kind, "label": label, "colour": 0, "points": found, "tips": tips})
    return {
        "id": "steps_to_target",
        "title": "Updates to the target over batch size",
        "kind": "xy",
        "note": " ".join(filter(None, [knee_note(points, knee), noise_note(scales)])),
        "x": {"label": "batch size", "scale": "log", "ticks": _few(sizes)},
        "y": {"label": "updates to the target", "scale": "log", "domain": _domain(marks, "log")},
        "marks": marks,
    }


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


def noise_note(scales: list[float]) -> str | None:
    """What the measured noise scales say, in words."""
    if not scales:
        return None
    return (
        f"The gradient's noise scale at the target was {np.median(scales):,.0f} (median of {len(scales)} runs, "
        f"{min(scales):,.0f} to {max(scales):,.0f}): larger batches should pay up to about there."
    )
