"""The tables of a report: leaderboard, updates to the target, runs, and what their configs differ in."""

from collections.abc import Sequence
from dataclasses import dataclass

from largebatch.config.dicts import flatten
from largebatch.reports import panels, study_panels
from largebatch.reports.labels import (
    NOTHING,
    column_name,
    estimate_cell,
    number_cell,
    plain,
    score_words,
    status_counts,
    status_text,
    value_cell,
)
from largebatch.reports.markup import Cell, Html, element, join, table
from largebatch.reports.panels import Group
from largebatch.runs import reader
from largebatch.runs.reader import BATCH, SCORES, Run, number
from largebatch.studies import analysis

ENVIRONMENT = ("platform", "device_kind", "devices", "hosts", "micro_batch_size", "git_commit")
COMMIT_LENGTH = 12


# ---- studies -----------------------------------------------------------------------------------------


def leaderboard(group: Group, key: str, accuracies: Sequence[float]) -> Html:
    """The settings of a study, best first, with the updates to some accuracies."""
    study = group.study
    to_target = study.objective not in SCORES
    names = ["rank", *map(column_name, study.fields)]
    if to_target:
        names += [study_panels.OBJECTIVE_LABELS[study.objective], "reached"]
    for accuracy in accuracies:
        names += [f"updates to {accuracy:g}", "reached"]
    names += [f"best {score_words(study)}", "seeds", "status"]

    rows = []
    for rank, setting in enumerate(analysis.leaderboard(study), 1):
        cells = [number_cell(rank)]
        cells += [value_cell(setting.values.get(name)) for name in study.fields]
        if to_target:
            form = ",.1f" if study.objective == "sec_to_target" else ",.0f"
            cells += [
                estimate_cell(setting.objective, form),
                f"{setting.objective.count} of {setting.score.count}",
            ]
        for accuracy in accuracies:
            updates, seeds = analysis.updates_to(setting, accuracy)
            cells += [estimate_cell(updates, ",.0f"), f"{updates.count} of {seeds}"]
        cells.append(estimate_cell(setting.score, ".4f"))
        cells.append(number_cell(len(setting.runs)))
        cells.append(status_counts(setting.statuses))
        rows.append(cells)
    note = (
        "Means over seeds ± half of the 95 % Student-t interval. A diverged or failed seed ranks a setting behind."
    )
    return join([table(names, rows, cls="sortable", id=f"{key}-table"), element("p", note, cls="soft")])


def steps_table(group: Group, key: str) -> Html | None:
    """Updates, examples and seconds to the target at each batch size, with edge flags.

    Where optimizers were tuned apart, each has its rows.
    """
    parts = analysis.tuned_apart(group.study)
    points = [point for part in parts.values() for point in analysis.steps_to_target(part)]
    unreached = {name: sizes for name, part in parts.items() if (sizes := analysis.unreached_batch_sizes(part))}
    if not points and not unreached:
        return None
    other_fields = [name for name in group.study.fields if name != BATCH]
    names = ["batch", *map(column_name, other_fields), "updates", "images", "seconds", "seeds"]
    names.append("best value at an edge of those tried?")
    rows = []
    for point in points:
        edges = "; ".join(map(str, point.edges)) or "no"
        cells = [number_cell(point.batch_size)]
        cells += [value_cell(point.values.get(name)) for name in other_fields]
        cells.append(estimate_cell(point.updates, ",.0f"))
        cells.append(estimate_cell(point.examples, ",.0f"))
        cells.append(estimate_cell(point.seconds, ",.1f"))
        cells.append(number_cell(point.seeds))
        cells.append(Cell(edges, css_class="text"))
        rows.append(cells)
    reached = table(names, rows, cls="sortable", id=f"{key}-steps") if points else None
    missed = []
    for name, sizes in unreached.items():
        batches, whose = ", ".join(f"{size:,}" for size in sizes), f" of {name}" if name else ""
        missed.append(element("p", f"No setting{whose} took all of its seeds to the target at batch {batches}."))
    return join([reached, *missed])


# ---- runs --------------------------------------------------------------------------------------------


def run_table(group: Group, described: dict, key: str) -> Html:
    """Every run with its status; pointing at one lights its curves up.

    Args:
      described: see `panels.describe`.
    """
    with_target = any(run.target is not None for run in group.runs)
    kinds = {score_words(run).removeprefix("validation ") for run in group.runs}
    score = kinds.pop() if len(kinds) == 1 else "score"
    names = ["run", "status", f"best {score}", f"final {score}", "updates", "images seen", "batch", "images / s"]
    if with_target:
        names += ["updates to target", "seconds to target"]
    names.append("training s")
    rows = []
    for run, of_run in zip(group.runs, described["runs"], strict=True):
        last = run.rows[-1] if run.rows else {}
        swatch = element("span", cls="swatch", style=f"--c: var(--c{of_run['colour'] % panels.MAX_COLOURS})")
        cells = [
            Cell(join([swatch, of_run["label"]]), sort_by=of_run["label"]),
            status_text(
                run.status, f"running, {reader.last_sign_of_life(run.path)}" if run.status == "running" else None
            ),
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
        cells.append(number_cell(panels.run_seconds(run)["train"] or None, ",.1f"))
        rows.append(cells)
    indices = [{"data_run": index} for index in range(len(rows))]
    return table(names, rows, row_attributes=indices, cls="sortable", id=f"{key}-runtable")


# ---- configs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """How a run was made: its config by dotted field, and where and by what code (see `environment`)."""

    label: str
    config: dict
    environment: dict[str, str]


def origins(group: Group) -> list[Origin]:
    """Those of the runs that have a config."""
    return [
        Origin(label, flatten(run.config), environment(run))
        for label, run in zip(group.labels, group.runs, strict=True)
        if run.config
    ]


def environment(run: Run) -> dict[str, str]:
    """Where and by what code a run was made; of one that has not ended nothing is known."""
    known = {name: plain(run.summary[name]) for name in ENVIRONMENT if name in run.summary}
    if "git_commit" in known:
        known["git_commit"] = known["git_commit"][:COMMIT_LENGTH]
    versions = run.summary.get("versions")
    if isinstance(versions, dict):
        known.update({f"versions.{name}": plain(version) for name, version in versions.items()})
    return known


def whole_config(origin: Origin) -> Html:
    """All fields and the environment of a run, folded up."""
    values = [*sorted(origin.config.items()), *origin.environment.items()]
    rows = [[name, Cell(plain(value), css_class="text")] for name, value in values]
    summary = element("summary", "All fields and the environment")
    return element("details", summary, table(["field", "value"], rows))


def differences(runs: list[Origin], key: str) -> Html:
    """Only the config fields, and parts of the environment, in which runs differ."""
    names = sorted({name for run in runs for name in run.config})
    names = [name for name in names if len({plain(run.config.get(name)) for run in runs}) > 1]
    # A run that has not ended does not tell its environment: that is no difference.
    parts = list(dict.fromkeys(part for run in runs for part in run.environment))
    parts = [part for part in parts if len({r.environment[part] for r in runs if part in r.environment}) > 1]
    if not names and not parts:
        return element("p", "The runs do not differ." if runs else "No run has a config.")
    rows = []
    for run in runs:
        cells = [value_cell(run.config.get(name)) for name in names]
        around = [run.environment.get(part, NOTHING) for part in parts]
        rows.append([run.label, *cells, *around])
    return table(["run", *names, *parts], rows, cls="sortable", id=f"{key}-differences")
