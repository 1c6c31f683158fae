"""The panel of a study of branches: the critical batch over the run, beside the noise scale and the knee."""

import math

from largebatch.reports.labels import rounded
from largebatch.reports.study_panels import few_ticks, mark, y_domain
from largebatch.runs.reader import Study
from largebatch.studies.critical_batch import TOLERANCE, CriticalBatch, StepsCurve, critical_batches


def branch_panel(study: Study, knees: dict[str, StepsCurve]) -> dict | None:
    """The critical batch over the images that the run had seen.

    Args:
      knees: of the other studies of the report, by their title; each within what can be told.
    """
    found = critical_batches(study)
    if not found:
        return None
    within = [critical for critical in found if math.isfinite(critical.size)]
    beyond = [critical for critical in found if not math.isfinite(critical.size)]
    marks = []
    if within:
        points = [[c.examples_seen, rounded(c.size), rounded(c.low), _finite(c.high)] for c in within]
        marks.append(mark("line", "critical batch, by branches", 0, points, [_tip(c) for c in within]))
    if beyond:
        points = [[c.examples_seen, max(c.losses), rounded(c.low), None] for c in beyond]
        marks.append(mark("hollow", "above the largest batch that was tried", 0, points, [_tip(c) for c in beyond]))
    scales = [[c.examples_seen, rounded(c.noise_scale), None, None] for c in found if (c.noise_scale or 0) > 0]
    if scales:
        marks.append(mark("points", "noise scale of the gradient", 2, scales, ["noise scale"] * len(scales)))
    ends = [found[0].examples_seen, found[-1].examples_seen]
    if ends[0] == ends[1]:  # a line of no length would not be seen
        ends = [ends[0] / 1.2, ends[1] * 1.2]
    for number, (title, knee) in enumerate(knees.items()):
        line = [[end, rounded(knee.critical_batch_size)] for end in ends]
        label = f"knee of {title}"
        marks.append({"kind": "line", "style": "dashed", "label": label, "colour": 3 + number, "points": line})
    return {
        "id": "critical_batch",
        "title": "Critical batch over the run, by branches",
        "kind": "xy",
        "note": _note(found),
        "x": {
            "label": "training images seen",
            "scale": "linear",
            "ticks": few_ticks(c.examples_seen for c in found),
        },
        "y": {"label": "batch size", "scale": "log", "domain": y_domain(marks, "log")},
        "marks": marks,
    }


def _finite(value: float | None) -> float | None:
    return rounded(value) if value is not None and math.isfinite(value) else None


def _tip(critical: CriticalBatch) -> str:
    losses = "\n".join(f"batch {size:,}: loss {loss:.4f}" for size, loss in critical.losses.items())
    return f"update {critical.step:,} of batch {critical.base:,}, {_seeds(critical.seeds)}\n{losses}"


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def _note(found: list[CriticalBatch]) -> str:
    text = (
        "From each point, branches of several batch sizes trained on. The critical batch is the largest whose "
        f"training loss over the last quarter of its images is at most {TOLERANCE:.0%} above that of the run's own."
    )
    fewest, most = (count(critical.seeds for critical in found) for count in (min, max))
    counts = _seeds(most) if fewest == most else f"{fewest} to {most} seeds"
    text += f" Sizes are compared on {counts} that ended at all of them."
    if any(critical.low is not None for critical in found):
        text += " Bars are 95 % intervals over seeds."
    return text
