"""Tables of a report: leaderboard, steps to the target, runs, and the differences of their configs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from largebatch.config.dicts import flatten
from largebatch.reports import charts
from largebatch.reports.groups import Group, plain, score_words
from largebatch.reports.run_charts import run_seconds
from largebatch.reports.study_charts import OBJECTIVE_LABELS, Fit
from largebatch.runs import reader
from largebatch.runs.reader import BATCH, SCORES, Run, number
from largebatch.studies import analysis

COLUMN_NAMES = {analysis.OPTIMIZER: "optimizer", BATCH: "batch"}
# What the page says of all runs of a group at once, with the word for it.
COMMON = {
    "dataset.name": "data",
    "model.name": "network",
    "model.dtype": "dtype",
    "device_kind": "on",
    "git_commit": "commit",
    "versions.jax": "jax",
}
ENVIRONMENT = ("platform", "device_kind", "devices", "hosts", "micro_batch_size", "git_commit")
COMMIT_LENGTH = 12
NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
      sort: what its column is sorted by; None for its text, "" for a value that is missing.
      css: class of the cell: num (to the right) or text (in several lines).
      half_width: half of the value's interval, as text.
      statuses: (status, text) of each, in place of the text.
      colour: CSS colour of a dot before it.
    """

    text: str = ""
    sort: object = None
    css: str = ""
    half_width: str = ""
    statuses: Sequence[tuple[str, str]] = ()
    colour: str | None = None


@dataclass(frozen=True)
class Table:
    """A table whose columns the reader can sort by.

    Attributes:
      id: end of the element's id.
      runs: numbers of the runs that its rows are of, which light up in the charts.
      notes: paragraphs below it.
    """

    id: str
    columns: list[str]
    rows: list[list[Cell]]
    runs: list[int] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_numeric(self) -> list[bool]:
        """True for each column whose cells are numbers."""
        return [any(row[index].css == "num" for row in self.rows) for index in range(len(self.columns))]


def number_cell(value: float | None, form: str = ",.0f") -> Cell:
    """Return a number, sorted by its value."""
    return Cell(NOTHING, "", "num") if value is None else Cell(format(value, form), value, "num")


def estimate_cell(estimate: analysis.Estimate, form: str) -> Cell:
    """Return a mean and the half-width of its interval, where there is one."""
    if estimate.mean is None or estimate.low is None:
        return number_cell(estimate.mean, form)
    half = format(estimate.high - estimate.mean, form)
    return Cell(format(estimate.mean, form), estimate.mean, "num", half_width=half)


def value_cell(value: object) -> Cell:
    """Return a config value: numbers to the right."""
    return Cell(plain(value)) if number(value) is None else Cell(plain(value), value, "num")


def column_name(field: str) -> str:
    """Return a config field as the head of a column."""
    return COLUMN_NAMES.get(field, field.rpartition(".")[2].replace("_", " "))


# ---- studies -----------------------------------------------------------------------------------------------


def leaderboard(group: Group, accuracies: Sequence[float]) -> Table:
    """Return the settings of a study, best first, with the steps to some accuracies."""
    study = group.study
    to_target = study.objective not in SCORES
    columns = ["rank", *map(column_name, study.fields)]
    columns += [OBJECTIVE_LABELS[study.objective], "reached"] if to_target else []
    for accuracy in accuracies:
        columns += [f"steps to {accuracy:g}", "reached"]
    columns += [f"best {score_words(study)}", "seeds", "status"]
    rows = []
    for rank, setting in enumerate(analysis.leaderboard(study), 1):
        cells = [number_cell(rank), *(value_cell(setting.values.get(name)) for name in study.fields)]
        if to_target:
            cells.append(estimate_cell(setting.objective, ",.1f" if study.objective == "sec_to_target" else ",.0f"))
            cells.append(Cell(f"{setting.objective.count} of {setting.score.count}"))
        for accuracy in accuracies:
            steps, seeds = analysis.steps_to(setting, accuracy)
            cells += [estimate_cell(steps, ",.0f"), Cell(f"{steps.count} of {seeds}")]
        statuses = [(status, f"{count} {status}") for status, count in setting.statuses.items()]
        cells += [estimate_cell(setting.score, ".4f"), number_cell(len(setting.runs)), Cell(statuses=statuses)]
        rows.append(cells)
    note = (
        "Means over seeds ± half of the 95 % Student-t interval. A diverged or failed seed ranks a setting behind."
    )
    return Table("table", columns, rows, notes=[note])


def steps_table(group: Group, fits: list[Fit]) -> Table | None:
    """Return steps, examples and seconds to the target at each batch size, with edge flags.

    Where optimizers were tuned apart, each has its rows.
    """
    notes = []
    for fit in fits:
        if fit.unreached:
            batches, whose = (
                ", ".join(f"{size:,}" for size in fit.unreached),
                f" of {fit.optimizer}" * bool(fit.optimizer),
            )
            notes.append(f"No setting{whose} took all of its seeds to the target at batch {batches}.")
    points = [point for fit in fits for point in fit.points]
    if not points and not notes:
        return None
    fields = [name for name in group.study.fields if name != BATCH]
    columns = ["batch", *map(column_name, fields), "steps", "images", "seconds", "seeds"]
    columns.append("best value at an edge of those tried?")
    rows = [
        [
            number_cell(point.batch_size),
            *(value_cell(point.values.get(name)) for name in fields),
            estimate_cell(point.estimate(), ",.0f"),
            estimate_cell(point.estimate("examples_to_target"), ",.0f"),
            estimate_cell(point.estimate("sec_to_target"), ",.1f"),
            number_cell(len(point.runs)),
            Cell("; ".join(point.edges) or "no", css="text"),
        ]
        for point in points
    ]
    return Table("steps", columns, rows, notes=notes)


# ---- runs --------------------------------------------------------------------------------------------------


def run_table(group: Group) -> Table:
    """Return every run with its status; pointing at one lights its curves up."""
    with_target = any(run.target is not None for run in group.runs)
    kinds = {score_words(run).removeprefix("validation ") for run in group.runs}
    score = kinds.pop() if len(kinds) == 1 else "score"
    columns = ["run", "status", f"best {score}", f"final {score}", "steps", "images seen", "batch", "images / s"]
    columns += ["steps to target", "seconds to target"] if with_target else []
    columns.append("training s")
    rows = []
    for run, label, colour in zip(group.runs, group.labels, group.colours, strict=True):
        last = run.rows[-1] if run.rows else {}
        sign = f", {reader.last_sign_of_life(run.path)}" if run.status == "running" else ""
        cells = [
            Cell(label, colour=charts.colour(colour)),
            Cell(statuses=[(run.status, run.status + sign)]),
            number_cell(run.best_score, ".4f"),
            number_cell(last.get("val_score"), ".4f"),
            number_cell(last.get("step")),
            number_cell(last.get("examples_seen")),
            number_cell(run.batch_size),
            number_cell(number(run.summary.get("images_per_sec")) or last.get("images_per_sec")),
        ]
        if with_target:
            cells.append(number_cell(run.value("steps_to_target")))
            cells.append(number_cell(run.value("sec_to_target"), ",.1f"))
        rows.append([*cells, number_cell(run_seconds(run)["train"] or None, ",.1f")])
    return Table("runtable", columns, rows, runs=list(range(len(rows))))


# ---- configs -----------------------------------------------------------------------------------------------


class Origin(NamedTuple):
    """Origin of a run: its config by dotted field, and where and by what code it was made."""

    label: str
    config: dict
    environment: dict[str, str]


def origins(group: Group) -> list[Origin]:
    """Return the origins of the runs that have a config."""
    pairs = zip(group.labels, group.runs, strict=True)
    return [Origin(label, flatten(run.config), environment(run)) for label, run in pairs if run.config]


def environment(run: Run) -> dict[str, str]:
    """Return where and by what code a run was made; of one that has not ended nothing is known."""
    known = {name: plain(run.summary[name]) for name in ENVIRONMENT if name in run.summary}
    if "git_commit" in known:
        known["git_commit"] = known["git_commit"][:COMMIT_LENGTH]
    versions = run.summary.get("versions")
    if isinstance(versions, dict):
        known |= {f"versions.{name}": plain(version) for name, version in versions.items()}
    return known


def in_common(runs: list[Origin]) -> str:
    """Return the data, network, device and code that all runs which record them share."""
    texts, known = [], [run.config | run.environment for run in runs]
    for name, word in COMMON.items():
        values = {plain(of_run[name]) for of_run in known if of_run.get(name) is not None}
        texts += [f"{word} {value}" for value in values if len(values) == 1]
    return ", ".join(texts)


def whole_config(origin: Origin) -> Table:
    """Return all fields and the environment of a run."""
    values = [*sorted(origin.config.items()), *origin.environment.items()]
    return Table(
        "all-fields", ["field", "value"], [[Cell(name), Cell(plain(value), css="text")] for name, value in values]
    )


def differences(runs: list[Origin]) -> Table | None:
    """Return the config fields, and parts of the environment, in which runs differ; None where they do not."""
    names = sorted({name for run in runs for name in run.config})
    names = [name for name in names if _differ(plain(run.config.get(name)) for run in runs)]
    # A run that has not ended does not tell its environment: that is no difference.
    parts = list(dict.fromkeys(part for run in runs for part in run.environment))
    parts = [part for part in parts if _differ(run.environment[part] for run in runs if part in run.environment)]
    if not names and not parts:
        return None
    rows = []
    for run in runs:
        cells = [value_cell(run.config.get(name)) for name in names]
        around = [Cell(run.environment.get(part, NOTHING)) for part in parts]
        rows.append([Cell(run.label), *cells, *around])
    return Table("differences", ["run", *names, *parts], rows)


def _differ(values: Iterable[str]) -> bool:
    return len(set(values)) > 1
