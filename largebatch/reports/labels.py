"""How values are written in a report."""

from largebatch.runs.reader import BATCH, number
from largebatch.studies import analysis

RATE = "optimizer.learning_rate"


def value_label(name: str, value) -> str:
    """A setting's value with a short name before it."""
    text = "full" if value == "full" else plain(value)
    short = {RATE: "lr ", BATCH: "batch ", analysis.OPTIMIZER: ""}
    return short.get(name, f"{name.rpartition('.')[2]} ") + text


def values_label(values: dict) -> str:
    """All values of a setting."""
    return " · ".join(value_label(*item) for item in values.items())


def short_name(field: str) -> str:
    """A config field as the head of a column."""
    return {analysis.OPTIMIZER: "optimizer", BATCH: "batch"}.get(field, field.rpartition(".")[2].replace("_", " "))


def plain(value) -> str:
    """A config value as text."""
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def rounded(value) -> float | int | None:
    """A number with the six digits that a picture can show."""
    value = number(value)
    return float(f"{value:.6g}") if isinstance(value, float) else value


def sortable(value) -> tuple:
    """What to sort values of any kind by."""
    return (0, value, "") if number(value) is not None else (1, 0, plain(value))
