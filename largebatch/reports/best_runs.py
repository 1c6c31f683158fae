"""Whose predictions a report shows."""

from collections.abc import Callable
from pathlib import Path

from largebatch.reports.panels import Group
from largebatch.runs.reader import Run
from largebatch.studies import analysis

MAX_RUNS = 4  # outside a study; their pictures are the largest part of a page


def best_runs(group: Group, has_predictions: Callable[[Path], bool]) -> list[Run]:
    """The best run of a study, the best few of single runs, among those whose folders have predictions."""
    runs = [run for run in group.runs if has_predictions(run.path)]
    if group.study:
        for setting in analysis.leaderboard(group.study):
            of_setting = [run for run in setting.runs if run in runs]
            if of_setting:
                return [min(of_setting, key=_rank)]
    return sorted(runs, key=_rank)[:MAX_RUNS]


def _rank(run: Run) -> float:
    return run.kind.rank(run.best_score)
