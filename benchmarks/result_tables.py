"""The tables of docs/results.md, from the rows that bench.py results keeps."""

import statistics

from benchmarks import knees, pages

MAP_STUDIES = ("maps_losses", "maps_optimizers")


def table_of(name: str, rows: list[dict]) -> str:
    """The table of this name. Above that of studies is a line for each with what its rows have in common."""
    if name == "recipes":
        return pages.markdown_table(*recipe_cells(rows))
    if name == "maps":
        return pages.markdown_table(*map_recipe_cells(rows))
    if name in knees.TABLES:
        table = knee_tables(rows)
    elif name == "rates":
        table = pages.markdown_table(*setting_cells(list(best_of(rows, "optimizer.name").values())))
    elif name in MAP_STUDIES:
        table = pages.markdown_table(*map_setting_cells(rows))
    else:
        table = pages.markdown_table(*setting_cells(rows))
    first_of_jobs = {row["job"]: row for row in reversed(rows)}
    above = [
        f"`{row['command']}`, {row['dtype']}, {row['device']}, {row['date']}, {row['commit'][:7]}"
        for row in reversed(first_of_jobs.values())
    ]
    return "\n\n".join([*above, table])


def best_of(rows: list[dict], *fields: str) -> dict[tuple, dict]:
    """The first setting of each combination of the values of some fields; `rows` are of a study, best first."""
    best: dict[tuple, dict] = {}
    for row in rows:
        best.setdefault(tuple(row["values"][field] for field in fields), row)
    return best


def recipe_cells(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """(header, cells): a row for each recipe."""
    header = ["config", "dtype", "images", "updates", "PFLOP", "validation accuracy at the last update"]
    header += ["test accuracy", "seconds of training", "date, commit"]
    return header, [
        [
            f"`{row['job']}.py`",
            row["dtype"],
            between(row["images"]),
            between(row["updates"]),
            f"{max(row['images']) * row['flops_per_image'] / 1e15:.3f}",
            f"{each(row['val_score'])}; {with_averaged(row['val_score'], row['val_score_averaged'])}",
            with_averaged(row["test_score"], row["test_score_averaged"]),
            f"{statistics.median(row['train_sec']):,.0f}",
            f"{row['date']}, {row['commit'][:7]}",
        ]
        for row in rows
    ]


def map_recipe_cells(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """The same of runs of a mask and a depth."""
    header = ["command", "dtype", "updates", "mean IoU of validation at the last update", "depth RMSE"]
    header += ["mean IoU of the test split", "seconds of training", "date, commit"]
    return header, [
        [
            f"`{row['command']}`",
            row["dtype"],
            between(row["updates"]),
            f"{each(row['val_score'])}; {spread(row['val_score'])}",
            f"{each(row['val_depth_rmse'])}; {spread(row['val_depth_rmse'])}",
            spread(row["test_score"]),
            f"{statistics.median(row['train_sec']):,.0f}",
            f"{row['date']}, {row['commit'][:7]}",
        ]
        for row in rows
    ]


def map_setting_cells(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """A row for each setting of a study of masks and depths, best first."""
    fields = list(rows[0]["values"])
    return [*fields, "updates", "mean IoU at the last update", "depth RMSE"], [
        [
            *(str(row["values"][field]) for field in fields),
            between(row["updates"]),
            spread(row["val_score"]),
            spread(row["val_depth_rmse"]),
        ]
        for row in rows
    ]


def setting_cells(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """A row for each setting of a study, best first."""
    fields = list(rows[0]["values"])
    header = [*fields, "updates", "best validation accuracy", "at the last update", "updates to 0.90"]
    return header, [
        [
            *(str(row["values"][field]) for field in fields),
            between(row["updates"]),
            spread(row["best_val_score"]),
            spread(row["val_score"]),
            reached(row["updates_to_0.9"]),
        ]
        for row in rows
    ]


def knee_tables(rows: list[dict]) -> str:
    """A row for each optimizer and batch size: its best setting, or that none got there. Then the knees."""
    tuned = knees.tuned_of(rows)
    header = ["optimizer", "batch", "rate", "images of a whole run", "updates to the target", "images to it"]
    cells = [
        [
            one.optimizer,
            f"{one.batch_size:,}",
            f"{one.learning_rate:g}",
            f"{one.planned_images:,}",
            reached(one.updates),
            f"{statistics.mean(one.updates) * one.batch_size:,.0f}" if one.reached else "",
        ]
        for one in tuned
    ]
    of_knees = pages.markdown_table(*knees.knee_cells(knees.knees_of(tuned)))
    return f"{pages.markdown_table(header, cells)}\n{of_knees}"


def between(counts: list[int | None]) -> str:
    """The lowest and the highest of some numbers, or the only one."""
    known = sorted({count for count in counts if count is not None})
    if not known:
        return ""
    return f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"


def spread(values: list[float | None]) -> str:
    """Mean and standard deviation, or the only value."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return f"{known[0]:.4f} (1 seed)" if known else "none ended"
    return f"{statistics.mean(known):.4f} ± {statistics.stdev(known):.4f} (n = {len(known)})"


def each(values: list[float | None]) -> str:
    """All values that there are."""
    return " ".join(f"{value:.4f}" for value in values if value is not None)


def with_averaged(plain: list[float | None], averaged: list[float | None]) -> str:
    """The spread of plain accuracies, and of those that are averaged over copies of an image."""
    return f"{spread(plain)}; averaged over copies {spread(averaged)}" if any(averaged) else spread(plain)


def reached(updates: list[int | None]) -> str:
    """Mean updates to an accuracy, and how many seeds got there."""
    known = [value for value in updates if value is not None]
    if not known:
        return "not reached"
    deviation = f" ± {statistics.stdev(known):,.0f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):,.0f}{deviation} ({len(known)} of {len(updates)})"
