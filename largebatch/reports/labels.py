"""How values are written in a report: as text, and as cells of a table."""

from largebatch.reports.markup import Cell, Html, element, join
from largebatch.runs.reader import BATCH, Run, Study, number
from largebatch.studies import analysis

RATE = "optimizer.learning_rate"
# What stands before the values of these fields in a label. Before others it is the last part of their name.
PREFIXES = {RATE: "lr ", BATCH: "batch ", analysis.OPTIMIZER: ""}
COLUMN_NAMES = {analysis.OPTIMIZER: "optimizer", BATCH: "batch"}
NOTHING = "–"


# ---- text --------------------------------------------------------------------------------------------


def plain(value) -> str:
    """A config value as text."""
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def value_label(field: str, value) -> str:
    """A setting's value with a short name before it."""
    prefix = PREFIXES.get(field, f"{field.rpartition('.')[2]} ")
    return prefix + plain(value)


def values_label(values: dict) -> str:
    """All values of a setting."""
    return " · ".join(value_label(field, value) for field, value in values.items())


def column_name(field: str) -> str:
    """A config field as the head of a column."""
    return COLUMN_NAMES.get(field, field.rpartition(".")[2].replace("_", " "))


def rounded(value) -> float | int | None:
    """A number with the six digits that a picture can show."""
    value = number(value)
    return float(f"{value:.6g}") if isinstance(value, float) else value


def sort_key(value) -> tuple:
    """Sorts values of any kind: numbers first, then the others by their text."""
    return (0, value, "") if number(value) is not None else (1, 0, plain(value))


# ---- cells -------------------------------------------------------------------------------------------


def number_cell(value: float | None, form: str = ",.0f") -> Cell:
    """A number as a table cell, aligned right and sorted by its value."""
    if value is None:
        return Cell(NOTHING, sort_by="", css_class="num")
    return Cell(format(value, form), sort_by=value, css_class="num")


def estimate_cell(estimate: analysis.Estimate, form: str) -> Cell:
    """Mean and half-width of its interval, where there is one."""
    if estimate.mean is None or estimate.low is None:
        return number_cell(estimate.mean, form)
    half = element("span", f" ± {format(estimate.high - estimate.mean, form)}", cls="pm")
    return Cell(join([format(estimate.mean, form), half]), sort_by=estimate.mean, css_class="num")


def value_cell(value) -> Cell:
    """A config value: numbers to the right."""
    if number(value) is None:
        return Cell(plain(value))
    return Cell(plain(value), sort_by=value, css_class="num")


def status_text(status: str, text: str | None = None) -> Html:
    """A status with its sign and colour; `text` instead of its name."""
    return element("span", text or status, cls=f"status {status}")


def status_counts(statuses: dict[str, int]) -> Html:
    """How many runs are of each status."""
    counts = (status_text(status, f"{count} {status}") for status, count in statuses.items())
    return element("span", *counts, cls="statuses")


def score_words(of: Run | Study) -> str:
    """What the score of a run, or of the runs of a study, is called."""
    return f"validation {of.kind.score_words}"


def count_runs(count: int) -> str:
    """A number of runs in words."""
    return "1 run" if count == 1 else f"{count} runs"
