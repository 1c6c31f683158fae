"""What follows from the runs of a study: ranks, intervals over seeds, steps to a target, the knee.

study = runs.read("studies/optimizers")
for setting in analysis.leaderboard(study):
    print(setting.values, setting.accuracy.mean, setting.statuses)
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from largebatch.runs.reader import BATCH, OBJECTIVES, Run, Study, number, setting_of

OPTIMIZER = "optimizer.name"
UNFINISHED = ("running", "interrupted", "pruned")


# ---- statistics over seeds ---------------------------------------------------------------------------


class Estimate(NamedTuple):
    """Mean over `count` seeds, sample standard deviation, and the two ends of the 95 % interval of the mean.

    Without values the mean is None; with one, so are the deviation and the interval.
    """

    mean: float | None
    std: float | None
    low: float | None
    high: float | None
    count: int


def estimate(values: Iterable[float | None]) -> Estimate:
    """Mean and its 95 % Student-t interval; None among the values is left out."""
    from scipy.special import stdtrit  # not scipy.stats, whose import takes a second

    found = np.array([value for value in values if value is not None], np.float64)
    if not len(found):
        return Estimate(None, None, None, None, 0)
    mean = float(found.mean())
    if len(found) == 1:
        return Estimate(mean, None, None, None, 1)
    std = float(found.std(ddof=1))
    half = float(stdtrit(len(found) - 1, 0.975)) * std / math.sqrt(len(found))
    return Estimate(mean, std, mean - half, mean + half, len(found))


# ---- ranks -------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """All seeds of one setting. The estimates are over its finished seeds, or the unfinished where none is.

    Attributes:
      values: {dotted field: value}.
      objective: of the study's objective, over the seeds that have one.
      accuracy: of the best validation accuracy.
      statuses: how many runs are of each status.
    """

    values: dict
    runs: list[Run]
    objective: Estimate
    accuracy: Estimate
    statuses: dict[str, int]


def group(study: Study) -> list[tuple[dict, list[Run]]]:
    """The runs of each setting, in the order in which settings first came."""
    fields = list(study.description.get("space") or {})
    groups: dict[str, tuple[dict, list[Run]]] = {}
    for run in study.runs:
        values = setting_of(run, fields)
        groups.setdefault(json.dumps(values, sort_keys=True), (values, []))[1].append(run)
    return list(groups.values())


def leaderboard(study: Study) -> list[Setting]:
    """Settings, best first.

    Settings with a finished seed come first, those without a diverged or failed one among them before the
    rest; then those that go on, were stopped or pruned; last what only diverged or failed. Within these a
    target that all seeds reached comes before one that some or none did, and those are ranked by accuracy.
    """
    settings = [_setting(values, runs, study.objective) for values, runs in group(study)]
    return sorted(settings, key=lambda setting: _rank(setting, study.objective))


def _setting(values: dict, runs: list[Run], objective: str) -> Setting:
    names = [run.status for run in runs]
    statuses = {name: names.count(name) for name in dict.fromkeys(names)}
    counted = _counted(runs)
    accuracy = estimate(run.best_val_accuracy for run in counted)
    return Setting(values, runs, estimate(run.value(objective) for run in counted), accuracy, statuses)


def _counted(runs: list[Run]) -> list[Run]:
    finished = [run for run in runs if run.status == "done"]
    return finished or [run for run in runs if run.status in UNFINISHED] or runs


def updates_to(setting: Setting, accuracy: float) -> tuple[Estimate, int]:
    """Updates to a validation accuracy, over the seeds that reached it, and of how many seeds that is.

    What is between two validations is not seen: each seed's figure is at most that much too high.
    """
    runs = _counted(setting.runs)
    return estimate(run.updates_to(accuracy) for run in runs), len(runs)


def _rank(setting: Setting, objective: str) -> tuple:
    bad = bool({"diverged", "failed"} & setting.statuses.keys())
    alive = bool(set(UNFINISHED) & setting.statuses.keys())
    tier = int(bad) if "done" in setting.statuses else 3 - alive
    accuracy = -math.inf if setting.accuracy.mean is None else setting.accuracy.mean
    if objective == "best_val_accuracy":
        return (tier, -accuracy)
    missed = setting.accuracy.count - setting.objective.count
    value = setting.objective.mean
    return (tier, 0, value, -accuracy) if value is not None and not missed else (tier, 1, 0.0, -accuracy)


def leaderboard_rows(study: Study, accuracies: Sequence[float] = ()) -> tuple[list[str], list[list[str]]]:
    """The leaderboard as text, for a terminal or a CSV file: (header, rows), with the updates to `accuracies`."""
    objective, fields = study.objective, study.fields
    to_target = objective != "best_val_accuracy"
    header = ["rank", *fields, objective, "low", "high", "std", *(["reached", "best_val_accuracy"] * to_target)]
    header += [name for a in accuracies for name in (f"updates_to_{a:g}", f"reached_{a:g}")]
    rows = []
    for rank, setting in enumerate(leaderboard(study), 1):
        figures = [_text(value, objective) for value in setting.objective[:4]]
        mean, std, low, high = figures
        row = [str(rank), *(_plain(setting.values.get(name)) for name in fields), mean, low, high, std]
        if to_target:
            row += [f"{setting.objective.count}/{setting.accuracy.count}", _text(setting.accuracy.mean)]
        for accuracy in accuracies:
            updates, count = updates_to(setting, accuracy)
            row += [_text(updates.mean, "updates"), f"{updates.count}/{count}"]
        row += [str(len(setting.runs)), ", ".join(f"{n} {name}" for name, n in setting.statuses.items())]
        rows.append(row)
    return [*header, "seeds", "status"], rows


def _text(value: float | None, objective: str = "best_val_accuracy") -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if objective == "best_val_accuracy" else f"{value:.1f}"


def _plain(value) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- steps to target over batch size -----------------------------------------------------------------


class Edge(NamedTuple):
    """The best value of a searched field is the lowest, highest or only one of `count` tried."""

    field: str
    value: float
    side: str
    count: int

    def __str__(self):
        if self.side == "only":
            return f"{self.field} {self.value:g} is the only value tried"
        return f"{self.field} {self.value:g} is the {self.side} of {self.count} tried"


class BatchPoint(NamedTuple):
    """The best-tuned setting at one batch size, and what its seeds took to the target.

    Attributes:
      values: {dotted field: value} of the setting.
      updates, examples, seconds: to the target, over the seeds.
      seeds: how many there are.
      steps: updates to the target of each seed.
      edges: fields whose best value lies on the edge of those tried, so that a better one may lie beyond.
    """

    batch_size: int
    values: dict
    updates: Estimate
    examples: Estimate
    seconds: Estimate
    seeds: int
    steps: list[int]
    edges: list[Edge]


def steps_to_target(study: Study) -> list[BatchPoint]:
    """Per batch size the setting with the fewest mean updates to the target, among those whose seeds all got there.

    Where some settings have more seeds, it is one of them: they were chosen as the best by their first seed, and
    a single lucky seed of another says less than their mean.
    Seeds that go on or were interrupted do not count yet; diverged, failed and pruned ones did not get there.
    Batch sizes without such a setting are left out: see `unreached_batch_sizes`. Tuning at each batch size
    by itself follows Shallue et al. 2019, "Measuring the Effects of Data Parallelism on Neural Network Training".
    """
    points: dict[int, BatchPoint] = {}
    for (batch_size, _), runs in sorted(_by_batch_size(study).items()):
        counted = [run for run in runs if run.status not in ("running", "interrupted", "unreadable")]
        steps = [run.value("steps_to_target") for run in counted]
        if not steps or None in steps:
            continue
        updates, best = estimate(steps), points.get(batch_size)
        if best is None or (-len(steps), updates.mean) < (-best.seeds, best.updates.mean):
            others = [estimate(run.value(name) for run in counted) for name in OBJECTIVES[2:]]
            values = setting_of(counted[0], study.fields)
            edges = edge_flags(study, values, batch_size)
            points[batch_size] = BatchPoint(batch_size, values, updates, *others, len(steps), steps, edges)
    return list(points.values())


def noise_scales(study: Study) -> list[float]:
    """The gradient noise scale, in examples, of each run that reached the target, when it did."""
    found = []
    for run in study.runs:
        steps = run.value("steps_to_target")
        rows = [row for row in run.rows if row.get("step") == steps] if steps is not None else []
        found += [scale for row in rows if (scale := number(row.get("noise_scale"))) is not None and scale > 0]
    return found


def unreached_batch_sizes(study: Study) -> list[int]:
    """Batch sizes that ran with a target, at which no setting took all of its seeds there."""
    reached = {point.batch_size for point in steps_to_target(study)}
    aimed = {run.batch_size for run in study.runs if run.field("train.target_accuracy") is not None}
    return sorted(aimed - reached - {None})


def _by_batch_size(study: Study) -> dict[tuple[int, int], list[Run]]:
    """Runs by (batch size, number of the setting); those that never said their batch size are left out."""
    found: dict[tuple[int, int], list[Run]] = {}
    for index, (_, runs) in enumerate(group(study)):
        for run in runs:
            if run.batch_size is not None:
                found.setdefault((run.batch_size, index), []).append(run)
    return found


def edge_flags(study: Study, values: dict, batch_size: int | None = None) -> list[Edge]:
    """Which numeric fields of the setting `values` lie on the edge of what was tried with the same optimizer.

    Args:
      batch_size: only runs at it count; None counts all. A field with one value in the whole study is not searched.
    """
    settings = [(run, setting_of(run, study.fields)) for run in study.runs]
    alike = [
        setting
        for run, setting in settings
        if setting.get(OPTIMIZER) == values.get(OPTIMIZER) and batch_size in (None, run.batch_size)
    ]
    edges = []
    for name in study.fields:
        value, everywhere = number(values.get(name)), {number(setting.get(name)) for _, setting in settings}
        if name == BATCH or value is None or len(everywhere - {None}) < 2:
            continue
        tried = {number(setting.get(name)) for setting in alike} - {None} | {value}
        sides = [side for side, end in (("lowest", min(tried)), ("highest", max(tried))) if end == value]
        if sides:
            edges.append(Edge(name, value, "only" if len(sides) == 2 else sides[0], len(tried)))
    return edges


class Knee(NamedTuple):
    """Where larger batches stop paying: S(B) = min_steps (1 + critical_batch_size / B).

    At the critical batch size twice the fewest updates and twice the fewest examples are needed. It is inf
    where updates still fall in proportion at the largest batch measured, 0 where they do not fall at all.
    low and high are the ends of its 95 % interval, None where no batch size has two seeds.
    """

    critical_batch_size: float
    low: float | None
    high: float | None
    min_steps: float
    min_examples: float

    def steps_at(self, batch_size):
        """Updates to the target at a batch size, or an array of them."""
        if math.isinf(self.critical_batch_size):
            return self.min_examples / np.asarray(batch_size, np.float64)
        return self.min_steps * (1 + self.critical_batch_size / np.asarray(batch_size, np.float64))


def fit_knee(batch_sizes, steps, *, resamples: int = 1000, seed: int = 0) -> Knee | None:
    """Fits S(B) = S_min (1 + B_crit / B), that is (S / S_min - 1) (E / E_min - 1) = 1 with E = S B.

    McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", equations 2.11 and 5.1. Least squares in
    log S; the interval is the 2.5 and 97.5 percentile of a bootstrap over the seeds of each batch size.

    Args:
      batch_sizes, steps: one entry per seed, [N].
    Returns:
      None with fewer than 3 different batch sizes: the curve has two parameters.
    """
    batch, steps = np.asarray(batch_sizes, np.float64), np.asarray(steps, np.float64)
    sizes = np.unique(batch)
    if len(sizes) < 3:
        return None
    # One parameter is left to search, since the best log S_min is a mean. 100 times beyond what was measured
    # the curve is a straight line in the logarithms, and its bend cannot be told.
    grid = np.linspace(math.log(sizes[0] / 100), math.log(sizes[-1] * 100), 1000)
    residuals = np.log(steps) - np.log1p(np.exp(grid)[:, None] / batch)  # [grid, N], + log S_min
    critical = float(_best_critical(grid, residuals, np.ones((1, len(batch))))[0])
    low = high = None
    if len(sizes) < len(batch):
        weights = _resample(batch, resamples, np.random.default_rng(seed))
        draws = _best_critical(grid, residuals, weights)
        low, high = (float(end) for end in np.quantile(draws, [0.025, 0.975], method="inverted_cdf"))
    if math.isinf(critical):
        return Knee(critical, low, high, 0.0, float(np.exp(np.log(steps * batch).mean())))
    min_steps = float(np.exp((np.log(steps) - np.log1p(critical / batch)).mean()))
    return Knee(critical, low, high, min_steps, min_steps * critical)


def _best_critical(grid: np.ndarray, residuals: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """B_crit of least squares: residuals [G, N], weights [R, N] -> [R]; 0 or inf at an end of the grid."""
    losses = weights @ (residuals**2).T - (weights @ residuals.T) ** 2 / weights.sum(1, keepdims=True)
    best = losses.argmin(1)
    inner = best.clip(1, len(grid) - 2)
    left, middle, right = (np.take_along_axis(losses, (inner + k)[:, None], 1)[:, 0] for k in (-1, 0, 1))
    curvature = left - 2 * middle + right
    shift = np.divide(left - right, 2 * curvature, out=np.zeros_like(middle), where=curvature > 0)
    found = np.exp(grid[inner] + shift.clip(-1, 1) * (grid[1] - grid[0]))
    return np.where(best == 0, 0.0, np.where(best == len(grid) - 1, np.inf, found))


def _resample(batch: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """How often each seed is drawn, with replacement among those of its batch size: [count, N]."""
    weights = np.zeros((count, len(batch)))
    for size in np.unique(batch):
        seeds = np.flatnonzero(batch == size)
        weights[:, seeds] = rng.multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), size=count)
    return weights
