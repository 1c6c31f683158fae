"""The panels of a study: its objective over the learning rate, and updates to the target over batch size.

See panels.py for what a panel is.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from largebatch.reports.labels import RATE, rounded, sort_key, value_label, values_label
from largebatch.runs.reader import BATCH, SCORES, Study, number
from largebatch.studies import analysis
from largebatch.studies.analysis import BatchPoint, Setting
from largebatch.studies.critical_batch import StepsCurve, fit_steps

OBJECTIVE_LABELS = {
    "best_val_accuracy": "best validation accuracy",
    "best_score": "best score",
    "steps_to_target": "updates to the target",
    "examples_to_target": "images to the target",
    "sec_to_target": "training seconds to the target",
}
MAX_TICKS = 12
MIN_SPAN = 0.02  # of the values on an axis, in its own units or decades
CURVE_POINTS = 60


def mark(
    kind: str, label: str | None, colour: int | None, points: list[list], tips: list[str] | None = None
) -> dict:
    """A mark of an "xy" panel; `tips` are what is said of each point."""
    drawn = {"kind": kind, "label": label, "colour": colour, "points": points}
    if tips is not None:
        drawn["tips"] = tips
    return drawn


def few_ticks(values: Iterable[float]) -> list[float] | None:
    """The values themselves as ticks, where they are few."""
    ticks = sorted(values)
    return ticks if len(ticks) <= MAX_TICKS else None


def y_domain(marks: list[dict], scale: str) -> list[float]:
    """Range of y that shows all values, and of their intervals as much again: two seeds can span everything."""
    points = [point for mark in marks for point in mark["points"] if point[1] is not None]
    if not points:
        return [0.1, 1.0]
    log = scale == "log"
    values = np.asarray([point[1] for point in points])
    ends = [end for point in points for end in point[2:] if end is not None and (end > 0 or not log)]
    if log:
        values, ends = np.log10(values), np.log10(ends)
    span = max(float(np.ptp(values)), MIN_SPAN)
    inside = np.clip(ends, values.min() - span / 2, values.max() + span / 2) if len(ends) else values
    low = min(values.min(), inside.min()) - span / 12
    high = max(values.max(), inside.max()) + span / 12
    if log:
        low, high = 10.0**low, 10.0**high
    return [float(f"{low:.6g}"), float(f"{high:.6g}")]


# ---- the objective over the learning rate ------------------------------------------------------------


@dataclass(frozen=True)
class RatedSetting:
    """A setting on the axis of learning rates, and the line that it belongs to."""

    line: object  # the optimizer, or the batch size
    rate: float
    setting: Setting


def rate_panel(study: Study, legend: list) -> dict | None:
    """The objective over the learning rate, a line per optimizer (or batch size), where rates were searched.

    `legend` gives a line the colour that its runs have in the curves.
    """
    ranked = [s for s in analysis.leaderboard(study) if (number(s.values.get(RATE)) or 0) > 0]
    rates = {setting.values[RATE] for setting in ranked}
    if len(rates) < 2:
        return None
    field = _field_of_lines(ranked)
    names = sorted({setting.values.get(field) for setting in ranked}, key=sort_key)
    colours = {name: legend.index(name) if name in legend else index for index, name in enumerate(names)}

    lines = {name: {} for name in names}  # the best setting at each rate
    others, crosses = [], []
    for setting in ranked:
        rated = RatedSetting(setting.values.get(field), float(setting.values[RATE]), setting)
        if setting.objective.mean is None or setting.statuses.keys() <= {"diverged", "failed"}:
            crosses.append(rated)
        elif rated.rate in lines[rated.line]:
            others.append(rated)
        else:
            lines[rated.line][rated.rate] = rated
            if "diverged" in setting.statuses:
                crosses.append(rated)

    is_score = study.objective in SCORES
    marks = []
    for name in names:
        along = [lines[name][rate] for rate in sorted(lines[name])]
        label = value_label(field, name) if field in ranked[0].values else "all"
        marks.append(_rate_mark("line", label, colours[name], along, is_score))
    marks += [_rate_mark("points", None, colours[rated.line], [rated], is_score) for rated in others]
    marks += [_rate_mark("cross", None, colours[rated.line], [rated], is_score) for rated in crosses]

    label = OBJECTIVE_LABELS[study.objective]
    by = "optimizer" if field == analysis.OPTIMIZER else "batch size"
    scale = "linear" if is_score else "log"
    return {
        "id": "learning_rate_study",
        "title": f"{label[0].upper()}{label[1:]} over learning rate, by {by}",
        "kind": "xy",
        "note": _rate_note(others, crosses),
        "x": {"label": "learning rate", "scale": "log", "ticks": few_ticks(rates)},
        "y": {"label": label, "scale": scale, "domain": y_domain(marks, scale)},
        "marks": marks,
    }


def _field_of_lines(settings: list[Setting]) -> str:
    """What a line stands for: the optimizer, or the batch size where there is but one optimizer."""
    optimizers = {setting.values.get(analysis.OPTIMIZER) for setting in settings}
    if len(optimizers) < 2 and any(BATCH in setting.values for setting in settings):
        return BATCH
    return analysis.OPTIMIZER


def _rate_mark(kind: str, label: str | None, colour: int, settings: list[RatedSetting], is_score: bool) -> dict:
    """A mark of some settings; an interval of scores is drawn as far as they go, from 0 to 1."""
    points, tips = [], []
    for rated in settings:
        objective, statuses = rated.setting.objective, rated.setting.statuses
        low, high = objective.low, objective.high
        if is_score and low is not None:
            low, high = max(low, 0.0), min(high, 1.0)
        if kind == "cross":
            points.append([rated.rate, None, None, None])
        else:
            points.append([rated.rate, rounded(objective.mean), rounded(low), rounded(high)])
        counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
        tips.append(f"{values_label(rated.setting.values)}\n{counts}")
    return mark(kind, label, colour, points, tips)


def _rate_note(others: list, crosses: list) -> str:
    notes = ["Means over seeds with 95 % intervals; the best of all other fields at each rate."]
    if others:
        notes.append("Pale points are the others.")
    if crosses:
        notes.append("A cross stands where seeds diverged, failed or missed the target.")
    return " ".join(notes)


# ---- updates to the target over batch size -----------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """The best-tuned point of each batch size, and the curve through their seeds.

    Attributes:
      optimizer: whose; "" where optimizers were not tuned apart.
      noise_scales: see `analysis.noise_scales`.
    """

    optimizer: str
    points: list[BatchPoint]
    knee: StepsCurve | None
    noise_scales: list[float]

    @property
    def has_knee(self) -> bool:
        """Whether the knee is within what can be told."""
        return self.knee is not None and 0 < self.knee.critical_batch_size < math.inf


def fits(study: Study) -> list[Fit]:
    """The curve of the study, or of each of its optimizers."""
    found = []
    for name, part in analysis.tuned_apart(study).items():
        points = analysis.steps_to_target(part)
        batch_sizes = [point.batch_size for point in points for _ in point.steps]
        knee = fit_steps(batch_sizes, [steps for point in points for steps in point.steps])
        found.append(Fit(name, points, knee, analysis.noise_scales(part)))
    return found


def steps_panel(study: Study, legend: list) -> dict | None:
    """Updates to the target over batch size, where at least two batch sizes reached it.

    `legend` gives an optimizer the colour that its runs have in the curves.
    """
    drawn = [fit for fit in fits(study) if len(fit.points) > 1]
    if not drawn:
        return None
    marks = _marks_of_one(drawn[0]) if not drawn[0].optimizer else [_perfect_scaling(drawn[0].points)]
    for place, fit in enumerate(drawn):
        if fit.optimizer:
            colour = legend.index(fit.optimizer) if fit.optimizer in legend else place
            marks += _marks_of_optimizer(fit, colour)
    sizes = {point.batch_size for fit in drawn for point in fit.points}
    return {
        "id": "steps_to_target",
        "title": "Updates to the target over batch size",
        "kind": "xy",
        "note": "\n".join(map(fit_note, drawn)),
        "x": {"label": "batch size", "scale": "log", "ticks": few_ticks(sizes)},
        "y": {"label": "updates to the target", "scale": "log", "domain": y_domain(marks, "log")},
        "marks": marks,
    }


def _marks_of_one(fit: Fit) -> list[dict]:
    """The only curve, with its knee's interval and the noise scale."""
    marks = [_perfect_scaling(fit.points)]
    if fit.knee:
        marks = [*_knee_interval(fit.knee), *marks, _knee_curve(fit, "fit", 1)]
    if fit.has_knee:
        knee = fit.knee.critical_batch_size
        marks.append(mark("rule", f"knee {knee:,.0f}", 1, [[rounded(knee), None]]))
    if fit.noise_scales:
        scale = float(np.median(fit.noise_scales))
        marks.append(mark("rule", f"noise scale {scale:,.0f}", 2, [[rounded(scale), None]]))
    return marks + _points_marks(fit, 0, "best-tuned setting", "best value at the edge of those tried")


def _marks_of_optimizer(fit: Fit, colour: int) -> list[dict]:
    """One of several curves; its label says the knee."""
    name = value_label(analysis.OPTIMIZER, fit.optimizer)
    if fit.has_knee:
        name += f", knee {fit.knee.critical_batch_size:,.0f}"
    if not fit.knee:
        return _points_marks(fit, colour, name, name)
    return [_knee_curve(fit, name, colour), *_points_marks(fit, colour, None, None)]


def _points_marks(fit: Fit, colour: int, label: str | None, label_at_edge: str | None) -> list[dict]:
    inner, at_edge = [p for p in fit.points if not p.edges], [p for p in fit.points if p.edges]
    marks = [_steps_mark("points", label, colour, inner)] if inner else []
    if at_edge:
        marks.append(_steps_mark("hollow", label_at_edge, colour, at_edge))
    return marks


def _steps_mark(kind: str, label: str | None, colour: int, points: list[BatchPoint]) -> dict:
    places, tips = [], []
    for point in points:
        updates = point.updates
        places.append([point.batch_size, rounded(updates.mean), rounded(updates.low), rounded(updates.high)])
        tips.append("\n".join([values_label(point.values), f"{point.seeds} seeds", *map(str, point.edges)]))
    return mark(kind, label, colour, places, tips)


def _perfect_scaling(points: list[BatchPoint]) -> dict:
    """Twice the batch, half the updates, from the smallest batch on."""
    first, last = points[0].batch_size, points[-1].batch_size
    updates = points[0].updates.mean
    line = [[first, rounded(updates)], [last, rounded(updates * first / last)]]
    return {"kind": "line", "style": "dashed", "label": "perfect scaling", "colour": None, "points": line}


def _knee_interval(knee: StepsCurve) -> list[dict]:
    """The band of the knee's interval, where both ends are known."""
    if knee.low is None or knee.low <= 0 or not math.isfinite(knee.high):
        return []
    return [mark("band", None, None, [[rounded(knee.low), None], [rounded(knee.high), None]])]


def _knee_curve(fit: Fit, label: str, colour: int) -> dict:
    """The fitted curve."""
    sizes = np.geomspace(fit.points[0].batch_size, fit.points[-1].batch_size, CURVE_POINTS)
    steps = fit.knee.steps_at(sizes)
    curve = [[rounded(float(x)), rounded(float(y))] for x, y in zip(sizes, steps, strict=True)]
    return mark("line", label, colour, curve)


def fit_note(fit: Fit) -> str:
    """What a curve and the noise scales say, in words."""
    text = knee_note(fit.points, fit.knee)
    if fit.optimizer:
        text = f"{value_label(analysis.OPTIMIZER, fit.optimizer)}: {text[0].lower()}{text[1:]}"
    return f"{text} {noise_note(fit.noise_scales)}" if fit.noise_scales else text


def knee_note(points: list[BatchPoint], knee: StepsCurve | None) -> str:
    """What the curve says, in words."""
    if knee is None:
        return "A knee needs at least 3 batch sizes that reached the target."
    if math.isinf(knee.critical_batch_size):
        return (
            f"No knee up to batch {points[-1].batch_size:,}: twice the batch still halves the updates, and no "
            "smaller batch saves images."
        )
    if knee.critical_batch_size == 0:
        first = points[0]
        return (
            f"The knee lies below batch {first.batch_size:,}: larger batches save no updates. The fewest images "
            f"that were seen, {first.updates.mean * first.batch_size:,.0f}, are those of the smallest batch."
        )
    interval = ""
    if knee.low is not None:
        high = f"{knee.high:,.0f}" if math.isfinite(knee.high) else "beyond what was measured"
        interval = f" (95 % interval {knee.low:,.0f} to {high})"
    return (
        f"The knee is at batch {knee.critical_batch_size:,.0f}{interval}: there a run needs twice the fewest "
        f"updates, {knee.min_steps:,.0f}, and twice the fewest images, {knee.min_examples:,.0f}. "
        "Fitted: updates = fewest updates × (1 + knee / batch)."
    )


def noise_note(scales: list[float]) -> str:
    """What the measured noise scales say, in words."""
    return (
        f"The gradient's noise scale at the target was {np.median(scales):,.0f} (median of {len(scales)} runs, "
        f"{min(scales):,.0f} to {max(scales):,.0f}). Larger batches may pay far beyond it: with LAMB, Muon and "
        "SOAP-Muon measured critical batches were about 2 to 20 times as large."
    )
