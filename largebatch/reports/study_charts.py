"""Charts of a study: its objective over the learning rate, steps to a target over batch size, critical batch."""

import math
from dataclasses import dataclass

import numpy as np

from largebatch.reports import charts
from largebatch.reports.charts import Chart, Mark, few_ticks
from largebatch.reports.groups import RATE, Group, rounded, sort_key, value_label, values_label
from largebatch.runs.reader import BATCH, SCORES, Study, number
from largebatch.studies import analysis
from largebatch.studies.analysis import BatchPoint, Setting
from largebatch.studies.critical_batch import TOLERANCE, CriticalBatch, StepsCurve, critical_batches, fit_steps

OBJECTIVE_LABELS = {
    "best_val_accuracy": "best validation accuracy",
    "best_score": "best score",
    "steps_to_target": "steps to the target",
    "examples_to_target": "images to the target",
    "sec_to_target": "training seconds to the target",
}
CURVE_POINTS = 60


# ---- the objective over the learning rate ------------------------------------------------------------------


def rate_chart(group: Group) -> Chart | None:
    """Return the objective over the learning rate, a line per optimizer (or batch size), where rates were searched.

    A line is in the colour that its runs have in the curves.
    """
    study = group.study
    ranked = [s for s in analysis.leaderboard(study) if (number(s.values.get(RATE)) or 0) > 0]
    rates = {setting.values[RATE] for setting in ranked}
    if len(rates) < 2:
        return None
    optimizers = {setting.values.get(analysis.OPTIMIZER) for setting in ranked}
    by_batch = len(optimizers) < 2 and any(BATCH in setting.values for setting in ranked)
    field = BATCH if by_batch else analysis.OPTIMIZER
    names = sorted({setting.values.get(field) for setting in ranked}, key=sort_key)
    is_score, marks, has_others, has_crosses = study.objective in SCORES, [], False, False
    for index, name in enumerate(names):
        colour = group.legend.index(name) if name in group.legend else index
        line: dict[float, Setting] = {}  # the best setting at each rate
        others, crosses = [], []
        for setting in (setting for setting in ranked if setting.values.get(field) == name):
            rate, failed = float(setting.values[RATE]), setting.statuses.keys() <= {"diverged", "failed"}
            if setting.objective.mean is None or failed:
                crosses.append(setting)
            elif rate in line:
                others.append(setting)
            else:
                line[rate] = setting
                crosses += [setting] if "diverged" in setting.statuses else []
        label = value_label(field, name) if field in ranked[0].values else "all"
        marks.append(_rate_mark("line", label, colour, [line[rate] for rate in sorted(line)], is_score))
        marks.append(_rate_mark("points", None, colour, others, is_score))
        marks.append(_rate_mark("cross", None, colour, crosses, is_score))
        has_others, has_crosses = has_others or bool(others), has_crosses or bool(crosses)
    notes = ["Means over seeds with 95 % intervals; the best of all other fields at each rate."]
    notes += ["Pale points are the others."] if has_others else []
    notes += ["A cross stands where seeds diverged, failed or missed the target."] if has_crosses else []
    label = OBJECTIVE_LABELS[study.objective]
    title = f"{label[0].upper()}{label[1:]} over learning rate, by {'batch size' if by_batch else 'optimizer'}"
    x, y = ("learning rate", "log", few_ticks(rates)), (label, "linear" if is_score else "log", None)
    marks = [mark for mark in marks if mark.points]
    return charts.xy("learning_rate_study", title, " ".join(notes), marks, x=x, y=y)


def _rate_mark(kind: str, label: str | None, colour: int, settings: list[Setting], is_score: bool) -> Mark:
    """Return a mark of some settings; an interval of scores is drawn as far as they go, from 0 to 1."""
    points, tips = [], []
    for setting in settings:
        objective, rate = setting.objective, float(setting.values[RATE])
        low, high = objective.low, objective.high
        if is_score and low is not None:
            low, high = max(low, 0.0), min(high, 1.0)
        values = [None] if kind == "cross" else [rounded(objective.mean), rounded(low), rounded(high)]
        points.append([rate, *values])
        counts = ", ".join(f"{count} {status}" for status, count in setting.statuses.items())
        tips.append(f"{values_label(setting.values)}\n{counts}")
    return Mark(kind, label, colour, points, tips)


# ---- steps to the target over batch size -------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """The best-tuned point of each batch size, and the curve through their seeds.

    Attributes:
      optimizer: whose; "" where optimizers were not tuned apart.
      noise_scales: see `analysis.noise_scales`.
      unreached: batch sizes that ran with a target that no setting reached with all of its seeds.
    """

    optimizer: str
    points: list[BatchPoint]
    curve: StepsCurve | None
    noise_scales: list[float]
    unreached: list[int]

    @property
    def is_resolved(self) -> bool:
        """True if the critical batch size is within what can be told."""
        return self.curve is not None and 0 < self.curve.critical_batch_size < math.inf


def fits(study: Study) -> list[Fit]:
    """Return the curve of the study, or of each of its optimizers."""
    found = []
    for name, part in analysis.tuned_apart(study).items():
        points = analysis.steps_to_target(part)
        batch_sizes = [point.batch_size for point in points for _ in point.steps]
        curve = fit_steps(batch_sizes, [steps for point in points for steps in point.steps])
        with_target = {run.batch_size for run in part.runs if run.target is not None}
        unreached = sorted(with_target - {None, *batch_sizes})
        found.append(Fit(name, points, curve, analysis.noise_scales(part), unreached))
    return found


def steps_chart(group: Group, found: list[Fit]) -> Chart | None:
    """Return steps to the target over batch size, where at least two batch sizes reached it."""
    drawn = [fit for fit in found if len(fit.points) > 1]
    if not drawn:
        return None
    first = drawn[0].points[0]
    last, steps = drawn[0].points[-1].batch_size, first.estimate().mean
    perfect = [[first.batch_size, rounded(steps)], [last, rounded(steps * first.batch_size / last)]]
    marks = [Mark("dashed", "perfect scaling", None, perfect)]
    for place, fit in enumerate(drawn):
        if not fit.optimizer:
            marks += _marks_of_one(fit)
        else:
            colour = group.legend.index(fit.optimizer) if fit.optimizer in group.legend else place
            marks += _marks_of_optimizer(fit, colour)
    sizes = {point.batch_size for fit in drawn for point in fit.points}
    x, y = ("batch size", "log", few_ticks(sizes)), ("steps to the target", "log", None)
    note = "\n".join(map(fit_note, drawn))
    return charts.xy("steps_to_target", "Steps to the target over batch size", note, marks, x=x, y=y)


def _marks_of_one(fit: Fit) -> list[Mark]:
    """Return the marks of the only curve, with its critical batch size and the noise scale."""
    marks = [_curve(fit, "fit", 1)] if fit.curve else []
    low, high = (fit.curve.low, fit.curve.high) if fit.curve else (None, None)
    if low and math.isfinite(high):
        marks.insert(0, Mark("band", None, 1, [[rounded(low), None], [rounded(high), None]]))
    if fit.is_resolved:
        size = fit.curve.critical_batch_size
        marks.append(Mark("rule", f"critical batch {size:,.0f}", 1, [[rounded(size), None]]))
    if fit.noise_scales:
        scale = float(np.median(fit.noise_scales))
        marks.append(Mark("rule", f"noise scale {scale:,.0f}", 2, [[rounded(scale), None]]))
    return marks + _points(fit, 0, "best-tuned setting", "best value at the edge of those tried")


def _marks_of_optimizer(fit: Fit, colour: int) -> list[Mark]:
    """Return the marks of one of several curves; its label has the critical batch size."""
    name = value_label(analysis.OPTIMIZER, fit.optimizer)
    if fit.is_resolved:
        name += f", critical batch {fit.curve.critical_batch_size:,.0f}"
    if not fit.curve:
        return _points(fit, colour, name, name)
    return [_curve(fit, name, colour), *_points(fit, colour, None, None)]


def _points(fit: Fit, colour: int, label: str | None, label_at_edge: str | None) -> list[Mark]:
    marks = []
    for kind, name, at_edge in (("points", label, False), ("hollow", label_at_edge, True)):
        points, tips = [], []
        for point in (point for point in fit.points if bool(point.edges) == at_edge):
            steps = point.estimate()
            points.append([point.batch_size, rounded(steps.mean), rounded(steps.low), rounded(steps.high)])
            tips.append("\n".join([values_label(point.values), f"{len(point.steps)} seeds", *point.edges]))
        marks += [Mark(kind, name, colour, points, tips)] if points else []
    return marks


def _curve(fit: Fit, label: str, colour: int) -> Mark:
    sizes = np.geomspace(fit.points[0].batch_size, fit.points[-1].batch_size, CURVE_POINTS)
    steps = fit.curve.steps_at(sizes)
    points = [[rounded(float(x)), rounded(float(y))] for x, y in zip(sizes, steps, strict=True)]
    return Mark("line", label, colour, points)


def fit_note(fit: Fit) -> str:
    """Return what a curve and the noise scales say, in words."""
    text, scales = curve_note(fit.points, fit.curve), fit.noise_scales
    if fit.optimizer:
        text = f"{value_label(analysis.OPTIMIZER, fit.optimizer)}: {text[0].lower()}{text[1:]}"
    if not scales:
        return text
    return (
        f"{text} The gradient's noise scale at the target was {np.median(scales):,.0f} (median of {len(scales)} "
        f"runs, {min(scales):,.0f} to {max(scales):,.0f}). Larger batches may pay far beyond it: with LAMB, Muon "
        "and SOAP-Muon measured critical batches were about 2 to 20 times as large."
    )


def curve_note(points: list[BatchPoint], curve: StepsCurve | None) -> str:
    """Return what the fitted curve says, in words."""
    if curve is None:
        return "A critical batch size needs at least 3 batch sizes that reached the target."
    if math.isinf(curve.critical_batch_size):
        return (
            f"No critical batch size up to {points[-1].batch_size:,}: twice the batch still halves the steps, and "
            "no smaller batch saves images."
        )
    if curve.critical_batch_size == 0:
        size = points[0].batch_size
        return (
            f"The critical batch size lies below {size:,}: larger batches save no steps. The fewest images that "
            f"were seen, {points[0].estimate().mean * size:,.0f}, are those of the smallest batch."
        )
    size = f"{curve.critical_batch_size:,.0f}"
    if curve.low is not None:
        high = f"{curve.high:,.0f}" if math.isfinite(curve.high) else "beyond what was measured"
        size += f" (95 % interval {curve.low:,.0f} to {high})"
    return (
        f"The critical batch size is {size}: there a run needs twice the fewest "
        f"steps, {curve.min_steps:,.0f}, and twice the fewest images, {curve.min_examples:,.0f}. "
        "Fitted: steps = fewest steps × (1 + critical batch size / batch)."
    )


# ---- branches of a run -------------------------------------------------------------------------------------


def branch_chart(study: Study, swept: dict[str, float]) -> Chart | None:
    """Return the critical batch size by branches, over the images that their run had seen.

    Args:
      swept: critical batch sizes that sweeps found, by the title of the study.
    """
    found = critical_batches(study)
    if not found:
        return None
    within = [point for point in found if math.isfinite(point.size)]
    beyond = [point for point in found if not math.isfinite(point.size)]
    marks = []
    if within:
        points = [[c.examples_seen, rounded(c.size), rounded(c.low), _finite(c.high)] for c in within]
        marks.append(Mark("line", "critical batch, by branches", 0, points, [_tip(c) for c in within]))
    if beyond:
        points = [[c.examples_seen, max(c.losses), rounded(c.low), None] for c in beyond]
        marks.append(Mark("hollow", "above the largest batch that was tried", 0, points, [_tip(c) for c in beyond]))
    scales = [[c.examples_seen, rounded(c.noise_scale)] for c in found if (c.noise_scale or 0) > 0]
    if scales:
        marks.append(Mark("points", "noise scale of the gradient", 2, scales))
    ends = [found[0].examples_seen, found[-1].examples_seen]
    if ends[0] == ends[1]:  # a line of no length would not be seen
        ends = [ends[0] / 1.2, ends[1] * 1.2]
    for index, (title, size) in enumerate(swept.items()):
        line = [[end, rounded(size)] for end in ends]
        marks.append(Mark("dashed", f"critical batch of {title}", 3 + index, line))
    x = ("training images seen", "linear", few_ticks(c.examples_seen for c in found))
    title = "Critical batch over the run, by branches"
    return charts.xy("critical_batch", title, _branch_note(found), marks, x=x, y=("batch size", "log", None))


def _finite(value: float | None) -> float | None:
    return rounded(value) if value is not None and math.isfinite(value) else None


def _tip(critical: CriticalBatch) -> str:
    losses = "\n".join(f"batch {size:,}: loss {loss:.4f}" for size, loss in critical.losses.items())
    return f"step {critical.step:,} of batch {critical.base:,}, {_seeds({critical.seeds})}\n{losses}"


def _seeds(counts: set[int]) -> str:
    fewest, most = min(counts), max(counts)
    return "1 seed" if most == 1 else f"{most} seeds" if fewest == most else f"{fewest} to {most} seeds"


def _branch_note(found: list[CriticalBatch]) -> str:
    text = (
        "From each point, branches of several batch sizes trained on. The critical batch is the largest whose "
        f"training loss over the last quarter of its images is at most {TOLERANCE:.0%} above that of the run's "
        f"own. Sizes are compared on {_seeds({critical.seeds for critical in found})} that ended at all of them."
    )
    has_intervals = any(critical.low is not None for critical in found)
    return f"{text} Bars are 95 % intervals over seeds." if has_intervals else text
