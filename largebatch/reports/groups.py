"""Groups of runs that a report shows together, and the words and colours that tell their runs apart."""

from dataclasses import dataclass

from largebatch.runs import reader
from largebatch.runs.reader import BATCH, Run, Study, number
from largebatch.studies import analysis

RATE = "optimizer.learning_rate"
# What stands before the values of these fields in a label. Before others it is the last part of their name.
PREFIXES = {RATE: "lr ", BATCH: "batch ", analysis.OPTIMIZER: ""}
COLOURS = 8  # --c0 to --c7 of style.css
MAX_RUNS_BY_NAME = 6  # runs that are told apart by a colour each


@dataclass(frozen=True)
class Group:
    """Runs that are shown together: those of a study, or those given one by one.

    Attributes:
      colours: index of each run's value in `legend`.
      legend: values that have a colour each, and in `legend_title` what they are.
    """

    title: str
    study: Study | None
    runs: list[Run]
    labels: list[str]
    legend_title: str
    legend: list
    colours: list[int]


def group_study(study: Study) -> Group:
    """Group all trials of a study."""
    seeds = [run.trial and run.trial.get("seed") for run in study.runs]
    labels = []
    for run, seed in zip(study.runs, seeds, strict=True):
        words = [value_label(field, value) for field, value in reader.setting_of(run, study.fields).items()]
        words += [f"seed {seed}"] if len(set(seeds)) > 1 else []
        labels.append(" · ".join(words) or run.path.name)
    return _coloured(study.path.resolve().name, study, study.runs, labels)


def group_runs(runs: list[Run]) -> Group:
    """Group runs outside any study, by the name of their folder, or by their path where names are alike."""
    labels = [run.path.resolve().name for run in runs]
    if len(set(labels)) < len(labels):
        labels = [str(run.path) for run in runs]
    return _coloured(labels[0] if len(runs) == 1 else f"{len(runs)} runs", None, runs, labels)


def _coloured(title: str, study: Study | None, runs: list[Run], labels: list[str]) -> Group:
    name, values = _values_by_colour(study, runs, labels)
    legend = list(dict.fromkeys(values))
    if name != "run":
        legend.sort(key=sort_key)
    return Group(title, study, runs, labels, name, legend, [legend.index(value) for value in values])


def _values_by_colour(study: Study | None, runs: list[Run], labels: list[str]) -> tuple[str, list]:
    """Return what tells runs apart by colour, and its value for each run.

    Runs or settings have a colour each where they are few; else the values of the first field with a few.
    """
    if study is None and len(runs) <= MAX_RUNS_BY_NAME:
        return "run", labels
    optimizers = [plain(_optimizer_of(run)) for run in runs]
    if len(set(optimizers)) > 1:
        return "optimizer", optimizers
    candidates: list[tuple[str, list]] = []
    if study:
        candidates.append(("setting", [values_label(reader.setting_of(run, study.fields)) for run in runs]))
    candidates.append(("batch size", [run.batch_size for run in runs]))
    candidates.append(("learning rate", [number(run.field(RATE)) for run in runs]))
    candidates += [(field, [plain(run.field(field)) for run in runs]) for field in (study.fields if study else [])]
    few = (candidate for candidate in candidates if 2 <= len(set(candidate[1])) <= COLOURS)
    return next(few, ("optimizer", optimizers))


def _optimizer_of(run: Run) -> str | None:
    return run.field(analysis.OPTIMIZER) or reader.setting_of(run, ()).get(analysis.OPTIMIZER)


# ---- words ---------------------------------------------------------------------------------------------------


def plain(value: object) -> str:
    """Return a config value as text."""
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def value_label(field: str, value: object) -> str:
    """Return a setting's value with a short name before it."""
    return PREFIXES.get(field, f"{field.rpartition('.')[2]} ") + plain(value)


def values_label(values: dict) -> str:
    """Return all values of a setting with short names."""
    return " · ".join(value_label(field, value) for field, value in values.items())


def score_words(of: Run | Study) -> str:
    """Return what the score of a run, or of the runs of a study, is called."""
    return f"validation {of.kind.score_words}"


def rounded(value: object) -> float | int | None:
    """Return a number with the six digits that a picture can show; None for what is no number."""
    value = number(value)
    return float(f"{value:.6g}") if isinstance(value, float) else value


def sort_key(value: object) -> tuple:
    """Return a sort key of values of any kind: numbers first, then the others by their text."""
    return (0, value, "") if number(value) is not None else (1, 0, plain(value))
