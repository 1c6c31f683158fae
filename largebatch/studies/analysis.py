"""Analysis of the runs of a study: ranks, intervals over seeds, steps to a target.

study = reader.read("studies/optimizers")
for setting in analysis.leaderboard(study):
    print(setting.values, setting.score.mean, setting.statuses)
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from largebatch.runs.reader import BATCH, SCORES, Run, Study, number, setting_of

OPTIMIZER = "optimizer.name"
UNFINISHED = frozenset({"running", "interrupted", "pruned"})
BROKEN = frozenset({"diverged", "failed"})


# ---- statistics over seeds ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """Statistics of the values of several seeds; mean is None without values, the rest also with one value."""

    mean: float | None
    std: float | None  # standard deviation of the sample
    low: float | None  # ends of the 95 % interval of the mean
    high: float | None
    count: int  # number of values


def estimate(values: Iterable[float | None]) -> Estimate:
    """Compute the mean and its 95 % Student-t interval; leave out None among the values."""
    from scipy.special import stdtrit  # not scipy.stats, whose import takes a second

    known = np.array([value for value in values if value is not None], np.float64)
    count = len(known)
    if count == 0:
        return Estimate(mean=None, std=None, low=None, high=None, count=0)
    mean = float(known.mean())
    if count == 1:
        return Estimate(mean, std=None, low=None, high=None, count=1)
    std = float(known.std(ddof=1))
    half_width = float(stdtrit(count - 1, 0.975)) * std / math.sqrt(count)
    return Estimate(mean, std, mean - half_width, mean + half_width, count)


# ---- ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """All seeds of one setting, with estimates over its finished seeds, or the unfinished ones if none is.

    Attributes:
      values: {dotted field: value}.
      runs: one per seed.
      objective: estimate of the study's objective, over the seeds that have one.
      score: estimate of the best score.
      statuses: {status: number of runs}.
    """

    values: dict
    runs: list[Run]
    objective: Estimate
    score: Estimate
    statuses: dict[str, int]


def leaderboard(study: Study) -> list[Setting]:
    """Rank the settings of a study, best first.

    Settings come in four groups: with a finished seed and no diverged or failed one; with a finished seed; with a
    seed that runs, was stopped or pruned; the rest. Within a group come first the settings whose seeds all reached
    the target, ranked by the objective, and then the others, ranked by their score.
    """
    settings = []
    for runs in _runs_by_setting(study):
        counted = _runs_that_count(runs)
        setting = Setting(
            values=setting_of(runs[0], study.description.get("fields") or []),
            runs=runs,
            objective=estimate(run.value(study.objective) for run in counted),
            score=estimate(run.best_score for run in counted),
            statuses=dict(Counter(run.status for run in runs)),
        )
        settings.append(setting)
    return sorted(settings, key=lambda setting: _rank(setting, study))


def steps_to(setting: Setting, accuracy: float) -> tuple[Estimate, int]:
    """Estimate the steps to a validation accuracy over the seeds that reached it; return also the number of seeds.

    Steps are known at validations only: each seed's number is too high by at most one interval between two.
    """
    runs = _runs_that_count(setting.runs)
    return estimate(run.steps_to(accuracy) for run in runs), len(runs)


def leaderboard_rows(study: Study, accuracies: Sequence[float] = ()) -> tuple[list[str], list[list[str]]]:
    """Return the leaderboard as text for a terminal or CSV file: (header, rows), with steps to `accuracies`."""
    has_target = study.objective not in SCORES
    header = ["rank", *study.fields, study.objective, "low", "high", "std"]
    header += ["reached", f"best_{study.kind.score_column}"] if has_target else []
    for accuracy in accuracies:
        header += [f"steps_to_{accuracy:g}", f"reached_{accuracy:g}"]
    header += ["seeds", "status"]
    rows = []
    for rank, setting in enumerate(leaderboard(study), 1):
        objective, values = setting.objective, setting.values
        row = [str(rank), *(_config_value(values[field]) if field in values else "" for field in study.fields)]
        figures = (objective.mean, objective.low, objective.high, objective.std)
        row += [_rounded(figure, 1 if has_target else 4) for figure in figures]
        if has_target:
            row += [f"{objective.count}/{setting.score.count}", _rounded(setting.score.mean, 4)]
        for accuracy in accuracies:
            steps, count = steps_to(setting, accuracy)
            row += [_rounded(steps.mean, 1), f"{steps.count}/{count}"]
        statuses = ", ".join(f"{count} {status}" for status, count in setting.statuses.items())
        rows.append([*row, str(len(setting.runs)), statuses])
    return header, rows


def _runs_by_setting(study: Study) -> list[list[Run]]:
    """Return the runs of each setting, in the order in which settings first appear."""
    fields = study.description.get("fields") or []
    runs_by_values: dict[str, list[Run]] = {}
    for run in study.runs:
        values = json.dumps(setting_of(run, fields), sort_keys=True)
        runs_by_values.setdefault(values, []).append(run)
    return list(runs_by_values.values())


def _runs_that_count(runs: list[Run]) -> list[Run]:
    """Return the finished runs of a setting; if there are none, the unfinished ones, or else all."""
    finished = [run for run in runs if run.status == "done"]
    unfinished = [run for run in runs if run.status in UNFINISHED]
    return finished or unfinished or runs


def _rank(setting: Setting, study: Study) -> tuple:
    """Return a sort key of settings, best first; see `leaderboard`."""
    statuses = setting.statuses.keys()
    tier = 3
    if "done" in statuses:
        tier = 1 if statuses & BROKEN else 0
    elif statuses & UNFINISHED:
        tier = 2
    rank = study.kind.rank(setting.score.mean)
    if study.objective in SCORES:
        return (tier, rank)
    all_reached = setting.objective.count == setting.score.count
    if all_reached and setting.objective.mean is not None:
        return (tier, 0, setting.objective.mean, rank)
    return (tier, 1, 0.0, rank)


def _rounded(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _config_value(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- steps to target over batch size -----------------------------------------------------------------


def tuned_apart(study: Study) -> dict[str, Study]:
    """Split a study by optimizer, if each has best settings of its own (GROUPS of the space file).

    Without such groups the result is the whole study under the name "".
    """
    if OPTIMIZER not in (study.description.get("groups") or []):
        return {"": study}
    runs: dict[str, list[Run]] = {}
    for run in study.runs:
        runs.setdefault(str(run.field(OPTIMIZER)), []).append(run)
    return {name: dataclasses.replace(study, runs=of_optimizer) for name, of_optimizer in runs.items()}


@dataclass(frozen=True)
class BatchPoint:
    """Best-tuned setting at one batch size.

    Attributes:
      values: {dotted field: value} of the setting.
      runs: its runs, which all reached the target.
      edges: a line for each field whose best value is on the edge of those tried: a better one may lie beyond.
    """

    batch_size: int
    values: dict
    runs: list[Run]
    edges: list[str]

    @property
    def steps(self) -> list[int]:
        """Steps to the target of each run."""
        return [run.value("steps_to_target") for run in self.runs]

    def estimate(self, objective: str = "steps_to_target") -> Estimate:
        """Estimate the steps, examples or seconds to the target over the runs."""
        return estimate(run.value(objective) for run in self.runs)


def steps_to_target(study: Study) -> list[BatchPoint]:
    """Find, for each batch size, the setting with the fewest mean steps to the target that all its seeds reached.

    If some settings have more seeds, it is one of them. They were chosen as the best by their first seed, and a
    single lucky seed of another is weaker evidence than their mean.
    Seeds that still run or were interrupted do not count yet; diverged, failed and pruned ones did not reach it.
    Batch sizes without such a setting are left out. Tuning at each batch size by itself follows Shallue et al.
    2019, "Measuring the Effects of Data Parallelism on Neural Network Training".
    """
    best: dict[int, list[Run]] = {}  # runs of the best setting of each batch size
    for runs in _runs_by_setting(study):
        counted = [run for run in runs if run.status not in ("running", "interrupted", "unreadable")]
        for batch_size in {run.batch_size for run in counted} - {None}:  # None if a run never recorded it
            at_size = [run for run in counted if run.batch_size == batch_size]
            if any(run.value("steps_to_target") is None for run in at_size):
                continue
            if batch_size not in best or _cost(at_size) < _cost(best[batch_size]):
                best[batch_size] = at_size
    points = []
    for batch_size, runs in sorted(best.items()):
        values = setting_of(runs[0], study.fields)
        points.append(BatchPoint(batch_size, values, runs, edge_flags(study, values, batch_size)))
    return points


def _cost(runs: list[Run]) -> tuple[int, float]:
    """Return a sort key of settings, best first: more seeds, then fewer steps to the target."""
    return -len(runs), estimate(run.value("steps_to_target") for run in runs).mean


def noise_scales(study: Study) -> list[float]:
    """Return the gradient noise scale, in examples, of each run that reached the target, at that step."""
    scales = []
    for run in study.runs:
        steps = run.value("steps_to_target")
        for row in run.rows:
            scale = number(row.get("noise_scale")) or 0.0
            if steps is not None and row.get("step") == steps and scale > 0:
                scales.append(scale)
    return scales


def edge_flags(study: Study, values: dict, batch_size: int) -> list[str]:
    """Describe the numeric fields of `values` that are on the edge of the values tried with the same optimizer.

    Args:
      batch_size: only runs at it count. A field with one value in the whole study is skipped.
    """
    settings = [(run.batch_size, setting_of(run, study.fields)) for run in study.runs]
    edges = []
    for field in study.fields:
        value = number(values.get(field))
        in_study = {number(setting.get(field)) for _, setting in settings} - {None}
        if field == BATCH or value is None or len(in_study) < 2:
            continue
        tried = {value}
        for size, setting in settings:
            if size == batch_size and setting.get(OPTIMIZER) == values.get(OPTIMIZER):
                tried |= {number(setting.get(field))} - {None}
        if len(tried) == 1:
            edges.append(f"{field} {value:g} is the only value tried")
        elif value in (min(tried), max(tried)):
            side = "lowest" if value == min(tried) else "highest"
            edges.append(f"{field} {value:g} is the {side} of {len(tried)} tried")
    return edges
