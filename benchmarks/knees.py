"""The knee of each optimizer, from the studies that tuned it at each batch size: tables and a picture."""

import dataclasses
import math
import statistics

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

from largebatch.studies import analysis
from largebatch.studies.critical_batch import StepsCurve, fit_steps

TABLES = ("knees", "knees_lamb", "cifar10_knees")  # of docs/results.md


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The best setting of an optimizer at a batch size.

    Attributes:
      planned_images: of a run that does not reach the target.
      updates: to the target, of each seed; None where it was not reached.
    """

    optimizer: str
    batch_size: int
    learning_rate: float
    planned_images: int
    updates: list[int | None]

    @property
    def reached(self) -> bool:
        """Whether every seed got there."""
        return None not in self.updates


def tuned_of(rows: list[dict]) -> list[Tuned]:
    """The best setting of each optimizer and batch size, by name and size, from the rows of studies."""
    best: dict[tuple[str, int], dict] = {}
    for row in sorted(rows, key=_rank):
        best.setdefault((row["values"]["optimizer.name"], row["values"]["batch.size"]), row)
    return [
        Tuned(
            optimizer=optimizer,
            batch_size=size,
            learning_rate=row["values"]["optimizer.learning_rate"],
            planned_images=row["planned_updates"] * size,
            updates=row["updates_to_target"],
        )
        for (optimizer, size), row in sorted(best.items())
    ]


def _rank(row: dict) -> tuple:
    """First settings whose seeds all got there; of these the ones with more seeds, then with fewer updates.

    The best of the search have more seeds than the others, and a lucky seed of another says less than their mean.
    Of those that did not get there the most accurate comes first.
    """
    updates = row["updates_to_target"]
    if None in updates:
        accuracies = [accuracy for accuracy in row["best_val_score"] if accuracy is not None]
        return 1, 0, -max(accuracies, default=0.0)
    return 0, -len(updates), statistics.mean(updates)


def knees_of(tuned: list[Tuned]) -> dict[str, StepsCurve | None]:
    """The knee of each optimizer; None with fewer than 3 batch sizes that reached the target."""
    knees = {}
    for optimizer in dict.fromkeys(one.optimizer for one in tuned):
        reached = [one for one in tuned if one.optimizer == optimizer and one.reached]
        sizes = [one.batch_size for one in reached for _ in one.updates]
        knees[optimizer] = fit_steps(sizes, [updates for one in reached for updates in one.updates])
    return knees


def knee_cells(knees: dict[str, StepsCurve | None]) -> tuple[list[str], list[list[str]]]:
    """(header, cells): a row for each optimizer."""
    header = ["optimizer", "knee", "95% interval", "fewest updates", "fewest images"]
    cells = []
    for optimizer, knee in knees.items():
        if knee is None:
            cells.append([optimizer, "fewer than 3 batch sizes reached the target", "", "", ""])
            continue
        interval = "" if knee.low is None else f"{knee.low:,.0f} to {knee.high:,.0f}"
        critical = f"{knee.critical_batch_size:,.0f}"
        steps = "larger batches still save updates" if knee.min_steps is None else f"{knee.min_steps:,.0f}"
        examples = "smaller batches still save images" if knee.min_examples is None else f"{knee.min_examples:,.0f}"
        cells.append([optimizer, critical, interval, steps, examples])
    return header, cells


def _half_width(updates: list[int]) -> float:
    """Of the 95% interval of the mean; 0 of a single seed."""
    estimate = analysis.estimate(updates)
    return 0.0 if estimate.high is None else estimate.high - estimate.mean


def plot_knees(tuned: list[Tuned], path: str) -> None:
    """Updates to the target over batch size: points with 95% intervals, and the fitted curves with their knees."""
    figure, axes = pyplot.subplots(figsize=(7, 4.4), layout="constrained")
    for number, (optimizer, knee) in enumerate(knees_of(tuned).items()):
        reached = [one for one in tuned if one.optimizer == optimizer and one.reached]
        if not reached:
            continue
        colour, sizes = f"C{number}", [one.batch_size for one in reached]
        means = [statistics.mean(one.updates) for one in reached]
        errors = [_half_width(one.updates) for one in reached]
        label = f"{optimizer}, knee {knee.critical_batch_size:,.0f}" if knee else optimizer
        axes.errorbar(sizes, means, yerr=errors, fmt="o", color=colour, label=label, capsize=2)
        if knee:
            along = np.geomspace(sizes[0], sizes[-1])
            axes.plot(along, knee.steps_at(along), color=colour, lw=1.2)
        if knee and 0 < knee.critical_batch_size < math.inf:
            axes.axvline(knee.critical_batch_size, color=colour, lw=0.8, ls=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    every_size = sorted({one.batch_size for one in tuned if one.reached})
    axes.set_xticks(every_size, [f"{size:,}" for size in every_size])
    axes.set_xlabel("batch size")
    axes.set_ylabel("updates to the target")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
