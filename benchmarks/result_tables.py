"""The tables of docs/results.md, from the rows that bench.py results keeps."""

import statistics

from largebatch.studies.critical_batch import fit_steps

CRITICAL_BATCH = ("critical_batch", "critical_batch_lamb", "cifar10_critical_batch")


def table_of(name: str, rows: list[dict]) -> str:
    """Return the table of this name. Above that of studies is a line for each with what its rows have in common."""
    if name in ("recipes", "maps"):
        return from_columns(RECIPES if name == "recipes" else MAPS, rows)
    table = steps_tables(rows) if name in CRITICAL_BATCH else setting_table(rows, of_maps=name.startswith("maps"))
    jobs = {row["job"]: row for row in reversed(rows)}
    above = [
        f"`{row['command']}`, {row['dtype']}, {row['device']}, {row['date']}, {row['commit'][:7]}"
        for row in reversed(jobs.values())
    ]
    return "\n\n".join([*above, table])


def markdown_table(header, rows) -> str:
    """Make a table of cells, each a string."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)]) + "\n"


def from_columns(columns: dict, rows: list[dict]) -> str:
    """Make a table of columns: a heading, and a function of a row that returns its cell."""
    return markdown_table(columns, [[cell(row) for cell in columns.values()] for row in rows])


def setting_table(rows: list[dict], *, of_maps: bool) -> str:
    """Make a row for each setting of a study, best first."""
    columns = {field: lambda row, field=field: str(row["values"][field]) for field in rows[0]["values"]}
    return from_columns(columns | STEPS | (MAP_SCORES if of_maps else SCORES), rows)


# ---- cells -------------------------------------------------------------------------------------------


def between(counts: list[int | None]) -> str:
    """Return the lowest and the highest of some numbers, or the only one."""
    known = sorted({count for count in counts if count is not None})
    return " to ".join(f"{count:,}" for count in dict.fromkeys([*known[:1], *known[-1:]]))


def spread(values: list[float | None]) -> str:
    """Return mean and standard deviation, or the only value."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return f"{known[0]:.4f} (1 seed)" if known else "none ended"
    return f"{statistics.mean(known):.4f} ± {statistics.stdev(known):.4f} (n = {len(known)})"


def each(values: list[float | None]) -> str:
    """Return all values that there are, and their spread."""
    return f"{' '.join(f'{value:.4f}' for value in values if value is not None)}; {spread(values)}"


def averaged(values: list[float | None]) -> str:
    """Return the spread of scores that are averaged over copies of an image, if there are any."""
    return f"; averaged over copies {spread(values)}" if any(values) else ""


def reached(steps: list[int | None]) -> str:
    """Return mean steps to an accuracy, and how many seeds got there."""
    known = [value for value in steps if value is not None]
    if not known:
        return "not reached"
    deviation = f" ± {statistics.stdev(known):,.0f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):,.0f}{deviation} ({len(known)} of {len(steps)})"


STEPS = {"steps": lambda row: between(row["steps"])}
TIMES = {
    "seconds of training": lambda row: f"{statistics.median(row['train_sec']):,.0f}",
    "date, commit": lambda row: f"{row['date']}, {row['commit'][:7]}",
}
RECIPES = {
    "config": lambda row: f"`{row['job']}.py`",
    "dtype": lambda row: row["dtype"],
    "images": lambda row: between(row["images"]),
    **STEPS,
    "PFLOP": lambda row: f"{max(row['images']) * row['flops_per_image'] / 1e15:.3f}",
    "validation accuracy at the last step": lambda row: (
        each(row["val_score"]) + averaged(row["val_score_averaged"])
    ),
    "test accuracy": lambda row: spread(row["test_score"]) + averaged(row["test_score_averaged"]),
    **TIMES,
}
MAPS = {
    "command": lambda row: f"`{row['command']}`",
    "dtype": lambda row: row["dtype"],
    **STEPS,
    "mean IoU of validation at the last step": lambda row: each(row["val_score"]),
    "depth RMSE": lambda row: each(row["val_depth_rmse"]),
    "mean IoU of the test split": lambda row: spread(row["test_score"]),
    **TIMES,
}
SCORES = {
    "best validation accuracy": lambda row: spread(row["best_val_score"]),
    "at the last step": lambda row: spread(row["val_score"]),
    "steps to 0.90": lambda row: reached(row["steps_to_0.9"]),
}
MAP_SCORES = {
    "mean IoU at the last step": lambda row: spread(row["val_score"]),
    "depth RMSE": lambda row: spread(row["val_depth_rmse"]),
}


# ---- critical batch sizes ----------------------------------------------------------------------------


def steps_tables(rows: list[dict]) -> str:
    """Make a row for the best setting of each optimizer and batch size, and a row for the fit of each optimizer."""
    best = {}
    for row in sorted(rows, key=_rank):
        best.setdefault((row["values"]["optimizer.name"], row["values"]["batch.size"]), row)
    cells, points = [], {}
    for (optimizer, size), row in sorted(best.items()):
        steps, of_optimizer = row["steps_to_target"], points.setdefault(optimizer, [])
        setting = [optimizer, f"{size:,}", f"{row['values']['optimizer.learning_rate']:g}"]
        images = "" if None in steps else f"{statistics.mean(steps) * size:,.0f}"
        cells.append([*setting, f"{row['planned_steps'] * size:,}", reached(steps), images])
        of_optimizer += [] if None in steps else [(size, number) for number in steps]
    header = ["optimizer", "batch", "rate", "images of a whole run", "steps to the target", "images to it"]
    fits = [[optimizer, *fit_cells(found)] for optimizer, found in points.items()]
    fitted = ["optimizer", "critical batch size", "95% interval", "fewest steps", "fewest images"]
    return f"{markdown_table(header, cells)}\n{markdown_table(fitted, fits)}"


def _rank(row: dict) -> tuple:
    """Order settings: first those whose seeds all got there, with more seeds, then with fewer steps.

    The best of the search have more seeds than the others, and a lucky seed of another says less than their mean.
    Of those that did not get there the most accurate comes first.
    """
    steps = row["steps_to_target"]
    if None in steps:
        return 1, 0, -max((score for score in row["best_val_score"] if score is not None), default=0.0)
    return 0, -len(steps), statistics.mean(steps)


def fit_cells(points: list[tuple[int, int]]) -> list[str]:
    """Return the critical batch size fitted to batch sizes with the steps of a seed to the target."""
    fit = fit_steps(*zip(*points, strict=True)) if points else None
    if fit is None:
        return ["fewer than 3 batch sizes reached the target", "", "", ""]
    return [
        f"{fit.critical_batch_size:,.0f}",
        "" if fit.low is None else f"{fit.low:,.0f} to {fit.high:,.0f}",
        "larger batches still save steps" if fit.min_steps is None else f"{fit.min_steps:,.0f}",
        "smaller batches still save images" if fit.min_examples is None else f"{fit.min_examples:,.0f}",
    ]
