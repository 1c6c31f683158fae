"""What a report says of a group of runs, as HTML: tables, and the places where page.js draws the panels."""

import functools
import math
import statistics
import time
from collections.abc import Sequence

from largebatch.reports import confusion, panels, studies
from largebatch.reports.labels import plain, short_name
from largebatch.reports.markup import Cell, Html, element, join, page, table
from largebatch.reports.panels import Group
from largebatch.runs.reader import Run, number
from largebatch.studies import analysis

MAX_CONFUSIONS = 4  # of runs outside a study; their pictures are the largest part of a page
MAX_CLASSES = 50  # of a matrix on the page
STOPPED = ("diverged", "interrupted", "failed", "pruned")
MAX_PROBLEMS = 100  # lines of the box at the top
ENVIRONMENT = ("platform", "device_kind", "devices", "hosts", "micro_batch_size", "git_commit")


# ---- texts -------------------------------------------------------------------------------------------


def figure(value: float | None, form: str = ",.0f") -> Cell:
    """A number as a table cell, aligned right and sorted by its value."""
    return Cell("–", "", "num") if value is None else Cell(format(value, form), value, "num")


def with_interval(found: analysis.Estimate, form: str) -> Cell:
    """Mean and half-width of the interval."""
    if found.mean is None or found.low is None:
        return figure(found.mean, form)
    half = element("span", f" ± {format(found.high - found.mean, form)}", cls="pm")
    return Cell(join([format(found.mean, form), half]), found.mean, "num")


def status(name: str, text: str | None = None) -> Html:
    """A status with its sign and colour."""
    return element("span", text or name, cls=f"status {name}")


def counted(statuses: dict[str, int]) -> Html:
    """How many runs are of each status."""
    return element("span", *(status(name, f"{n} {name}") for name, n in statuses.items()), cls="statuses")


def card(panel: dict) -> Html:
    """The place where page.js draws a panel."""
    note = element("p", panel["note"]) if panel["kind"] != "curve" else None
    caption = element("figcaption", element("h3", panel["title"]), note)
    return element(
        "figure", caption, element("div", cls=f"plot {panel['kind']}", data_panel=panel["id"]), cls="card"
    )


# ---- sections ----------------------------------------------------------------------------------------


def count_runs(count: int) -> str:
    """A number of runs in words."""
    return "1 run" if count == 1 else f"{count} runs"


def header(groups: list[Group]) -> Html:
    """What is shown, when the page was made, and what is wrong with any of it."""
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    counts = [("study of " if group.study else "") + count_runs(len(group.runs)) for group in groups]
    theme = element("span", cls="segments", id="theme", role="group", aria_label="colours")
    title = element("h1", " · ".join(group.title for group in groups))
    words = element("div", title, element("p", f"{', '.join(counts)}; made {made}", cls="soft"))
    found = [line for group in groups for line in problems(group)]
    if not found:
        return join(
            [element("div", words, theme, cls="top"), element("p", "Every run is whole and done.", cls="soft")]
        )
    lines = [element("li", element("code", where), " ", what) for where, what in found[:MAX_PROBLEMS]]
    if len(found) > MAX_PROBLEMS:
        lines.append(element("li", f"and {len(found) - MAX_PROBLEMS} more: see the status of each run"))
    said = "Damaged, diverged, failed or unfinished" + (f": {len(found)}" if len(found) > 1 else "")
    box = element("div", element("h3", said), element("ul", *lines), cls="card problems")
    return join([element("div", words, theme, cls="top"), box])


def problems(group: Group) -> list[tuple[str, str]]:
    """Every damaged, unfinished or failed part of a group: where, and what."""
    found = [(str(group.study.path), line) for line in group.study.problems] if group.study else []
    for run in group.runs:
        lines = []
        if run.status in STOPPED and not run.trial_error:
            why = str((run.events[-1].get("reason") if run.events else None) or "")
            lines = [why if why.startswith(run.status) else f"{run.status}{': ' * bool(why)}{why}"]
        found += [(str(run.path), line) for line in [*lines, *run.problems]]
    return found


def tiles(group: Group) -> Html:
    """The few figures that matter most."""
    found = []
    best = max(group.runs, key=lambda run: run.best_val_accuracy or -1.0, default=None)
    if best and best.best_val_accuracy is not None:
        label = group.labels[group.runs.index(best)]
        found.append((f"{best.best_val_accuracy:.4f}", f"best validation accuracy: {label}"))
    rates = [rate for run in group.runs if (rate := number(run.summary.get("images_per_sec")))]
    if rates:
        which = ", median of the runs" if len(rates) > 1 else ""
        found.append((f"{statistics.median(rates):,.0f}", f"training images / s{which}"))
    if group.study:
        knee = studies.fit(group.study)[1]
        if knee and 0 < knee.critical_batch_size < math.inf:
            found.append((f"{knee.critical_batch_size:,.0f}", "examples per update at the knee"))
        if scales := analysis.noise_scales(group.study):
            found.append((f"{statistics.median(scales):,.0f}", "examples: median noise scale at the target"))
    elif len(group.runs) == 1 and (steps := group.runs[0].value("steps_to_target")) is not None:
        found.append(
            (
                f"{steps:,.0f}",
                f"updates to {plain(group.runs[0].summary.get('target_accuracy'))} validation accuracy",
            )
        )
    seconds = sum(sum(panels.run_seconds(run).values()) for run in group.runs)
    found.append((f"{seconds:,.0f} s" if seconds < 7200 else f"{seconds / 3600:,.1f} h", "of work in all"))
    names = [run.status for run in group.runs]
    found.append((f"{names.count('done')} of {len(names)}", "runs done"))
    return element(
        "div", *(element("div", element("b", a), element("span", b), cls="tile") for a, b in found), cls="tiles"
    )


def leaderboard(group: Group, key: str, accuracies: Sequence[float]) -> Html:
    """The settings of a study, best first, with the updates to some accuracies."""
    study, fields = group.study, group.study.fields
    to_target = study.objective != "best_val_accuracy"
    names = ["rank", *map(short_name, fields)]
    names += [studies.OBJECTIVE_LABELS[study.objective], "reached"] * to_target
    rows = []
    for rank, setting in enumerate(analysis.leaderboard(study), 1):
        cells = [figure(rank), *(value_cell(setting.values.get(name)) for name in fields)]
        if to_target:
            reached = f"{setting.objective.count} of {setting.accuracy.count}"
            cells += [
                with_interval(setting.objective, ",.1f" if study.objective == "sec_to_target" else ",.0f"),
                reached,
            ]
        for accuracy in accuracies:
            updates, count = analysis.updates_to(setting, accuracy)
            cells += [with_interval(updates, ",.0f"), f"{updates.count} of {count}"]
        cells += [with_interval(setting.accuracy, ".4f"), figure(len(setting.runs)), counted(setting.statuses)]
        rows.append(({}, cells))
    names += [name for accuracy in accuracies for name in (f"updates to {accuracy:g}", "reached")]
    names += ["best validation accuracy", "seeds", "status"]
    note = (
        "Means over seeds ± half of the 95 % Student-t interval. A diverged or failed seed ranks a setting behind."
    )
    heading = element("h2", "Leaderboard", id=f"{key}-leaderboard")
    return join([heading, table(names, rows, cls="sortable", id=f"{key}-table"), element("p", note, cls="soft")])


def value_cell(value) -> Cell:
    """A config value: numbers to the right."""
    return Cell(plain(value), value, "num") if number(value) is not None else Cell(plain(value))


def run_list(group: Group, described: dict, key: str) -> Html:
    """Every run with its status; pointing at one lights its curves up."""
    names = ["run", "status", "best accuracy", "final accuracy", "updates", "images seen", "batch", "images / s"]
    aimed = any(run.summary.get("target_accuracy") is not None for run in group.runs)
    names += [*["updates to target", "seconds to target"] * aimed, "training s"]
    rows = []
    for index, (run, entry) in enumerate(zip(group.runs, described["runs"], strict=True)):
        last = run.rows[-1] if run.rows else {}
        swatch = element("span", cls="swatch", style=f"--c: var(--c{entry['colour'] % 8})")
        cells = [Cell(join([swatch, entry["label"]]), entry["label"]), status(run.status)]
        cells += [figure(run.best_val_accuracy, ".4f"), figure(last.get("val_accuracy"), ".4f")]
        cells += [figure(last.get("step")), figure(last.get("examples_seen")), figure(run.batch_size)]
        cells.append(figure(number(run.summary.get("images_per_sec")) or last.get("images_per_sec")))
        if aimed:
            cells += [figure(run.value("steps_to_target")), figure(run.value("sec_to_target"), ",.1f")]
        cells.append(figure(panels.run_seconds(run)["train"] or None, ",.1f"))
        rows.append(({"data_run": index}, cells))
    return join([element("h2", "Runs", id=f"{key}-runs"), table(names, rows, cls="sortable", id=f"{key}-runtable")])


def steps_table(group: Group, key: str) -> Html | None:
    """Updates, examples and seconds to the target at each batch size, with edge flags."""
    points, unreached = analysis.steps_to_target(group.study), analysis.unreached_batch_sizes(group.study)
    if not points and not unreached:
        return None
    fields = [name for name in group.study.fields if name != "batch.size"]
    rows = []
    for p in points:
        flags = "; ".join(map(str, p.edges))
        cells = [figure(p.batch_size), *(value_cell(p.values.get(name)) for name in fields)]
        cells += [
            with_interval(p.updates, ",.0f"),
            with_interval(p.examples, ",.0f"),
            with_interval(p.seconds, ",.1f"),
        ]
        rows.append(({}, [*cells, figure(p.seeds), Cell(flags or "no", cls="text")]))
    names = [
        "batch",
        *map(short_name, fields),
        "updates",
        "images",
        "seconds",
        "seeds",
        "best value at an edge of those tried?",
    ]
    sizes = ", ".join(f"{size:,}" for size in unreached)
    missed = (
        element("p", f"No setting took all of its seeds to the target at batch {sizes}.") if unreached else None
    )
    return join([table(names, rows, cls="sortable", id=f"{key}-steps") if points else None, missed])


def flat(config: dict, prefix: str = "") -> dict:
    """Nested fields by their dotted names."""
    found = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def differences(group: Group, key: str) -> Html:
    """Only the config fields, and parts of the environment, in which runs differ; of one run its whole config."""
    known = [(label, run) for label, run in zip(group.labels, group.runs, strict=True) if run.config]
    found = [(label, flat(run.config), environment(run)) for label, run in known]
    if len(found) == 1:
        ((_, config, around),) = found
        rows = [
            ({}, [name, Cell(plain(value), cls="text")])
            for name, value in [*sorted(config.items()), *around.items()]
        ]
        whole = element(
            "details", element("summary", "All fields and the environment"), table(["field", "value"], rows)
        )
        return join([element("h2", "Config", id=f"{key}-config"), whole])
    names = sorted({name for _, config, _ in found for name in config})
    names = [name for name in names if len({plain(config.get(name)) for _, config, _ in found}) > 1]
    # A run that has not ended does not tell its environment: that is no difference.
    places = list(dict.fromkeys(name for *_, around in found for name in around))
    places = [name for name in places if len({around[name] for *_, around in found if name in around}) > 1]
    heading = element("h2", "Differences between configs", id=f"{key}-config")
    if not names and not places:
        return join([heading, element("p", "The runs do not differ." if found else "No run has a config.")])
    rows = []
    for label, config, around in found:
        cells = [value_cell(config.get(name)) for name in names]
        rows.append(({}, [label, *cells, *(around.get(name, "–") for name in places)]))
    return join([heading, table(["run", *names, *places], rows, cls="sortable", id=f"{key}-differences")])


def environment(run: Run) -> dict[str, str]:
    """Where and by what code a run was made; of one that has not ended nothing is known."""
    versions = run.summary.get("versions")
    named = {f"versions.{name}": text for name, text in versions.items()} if isinstance(versions, dict) else {}
    found = {name: run.summary[name] for name in ENVIRONMENT if name in run.summary} | named
    return {name: plain(value)[:12] if name == "git_commit" else plain(value) for name, value in found.items()}


# ---- confusions --------------------------------------------------------------------------------------


def confusion_runs(group: Group) -> list[Run]:
    """Whose confusions are shown: the best run of a study, the best few of single runs."""
    runs = [run for run in group.runs if (run.path / "predictions.npz").exists()]
    if group.study:
        for setting in analysis.leaderboard(group.study):
            if own := [run for run in setting.runs if run in runs]:
                return [max(own, key=lambda run: run.best_val_accuracy or 0.0)]
    return sorted(runs, key=lambda run: -(run.best_val_accuracy or 0.0))[:MAX_CONFUSIONS]


def read_confusions(group: Group) -> list[tuple[Run, confusion.Confusion]]:
    """The confusions to show; damaged predictions are added to the problems of their run."""
    found = []
    for run in confusion_runs(group):
        result, problem = confusion.read_confusion(run)
        if problem:
            run.problems.append(problem)
        else:
            found.append((run, result))
    return found


def confusions(group: Group, found: list[tuple[Run, confusion.Confusion]], key: str) -> Html | None:
    """Matrix, recall and the worst mistakes of each."""
    if not found:
        return None
    pieces = [element("h2", "Confusions", id=f"{key}-confusions")]
    if not group.study and len(group.runs) > MAX_CONFUSIONS:
        pieces.append(element("p", f"Of the {MAX_CONFUSIONS} most accurate runs.", cls="soft"))
    for run, c in found:
        label = group.labels[group.runs.index(run)]
        said = f"{label}: {c.accuracy:.4f} right of {c.matrix.sum():,} validation examples, at the best step"
        shown = matrix(c) if len(c.names) <= MAX_CLASSES else recall_table(c, f"{key}-{run.path.name}-recall")
        both = element("div", element("div", shown, cls="scroll"), element("div", *mistakes(c)), cls="both")
        pieces.append(element("div", element("h3", said), both, cls="card"))
    return join(pieces)


def shade(total: int, count: int, right: bool) -> float:
    """How dark a count is, 0..1: by its share of the class, mistakes by the root of it, for they are few."""
    part = count / max(total, 1)
    return part if right else math.sqrt(part)


def matrix(c: confusion.Confusion) -> Html:
    """Counts, shaded by their share of the true class, and the recall."""
    up = "up" if max(map(len, c.names)) > 3 else "num"
    heads = [element("th", element("span", name), cls=up, scope="col") for name in c.names]
    head = element("tr", element("th", "true ↓  predicted →"), *heads, element("th", "recall", cls="num"))
    rows = []
    for i, (name, counts) in enumerate(zip(c.names, c.matrix.tolist(), strict=True)):
        share = functools.partial(shade, sum(counts))
        cells = []
        for j, count in enumerate(counts):
            cls = "right" if i == j else "zero" if not count else None
            said = f"{count} of {name} taken for {c.names[j]}"
            cells.append(element("td", f"{count:,}", cls=cls, style=f"--v: {share(count, i == j):.3f}", title=said))
        recall = "–" if math.isnan(c.recall[i]) else f"{c.recall[i]:.1%}"
        rows.append(element("tr", element("th", name, scope="row"), *cells, element("td", recall, cls="recall")))
    return element("table", element("thead", head), element("tbody", *rows), cls="confusion")


def recall_table(c: confusion.Confusion, key: str) -> Html:
    """Recall of each class, where a matrix would be too large."""
    rows = [
        ({}, [name, figure(int(count)), figure(None if math.isnan(recall) else recall, ".1%")])
        for name, count, recall in zip(c.names, c.matrix.sum(1), c.recall.tolist(), strict=True)
    ]
    return table(["class", "examples", "recall"], rows, cls="sortable", id=key)


def picture(example: confusion.Example) -> Html:
    """One mistake, and how sure the network was of it."""
    name = example.example_id
    image = element("img", src=example.picture, alt=name, title=name, width=64, height=64)
    return element("figure", image, element("figcaption", f"{example.probability:.0%} sure"))


def mistakes(c: confusion.Confusion) -> list[Html]:
    """The worst confusions with their pictures, or why there are none."""
    if not c.worst:
        return [element("p", "No mistakes.")]
    blocks = []
    for m in c.worst:
        shown = [picture(example) for example in m.examples if example.picture]
        title = element("h4", f"{c.names[m.true]} taken for {c.names[m.predicted]}: {m.count:,}")
        blocks.append(element("div", title, element("div", *shown, cls="pictures")))
    why = element("p", f"No example pictures: {c.missing}.", cls="soft") if c.missing else None
    return [element("div", *blocks, cls="mistakes"), *([why] if why else [])]


# ---- the page ----------------------------------------------------------------------------------------


def section(
    group: Group, described: dict, found: list, index: int, alone: bool, accuracies: Sequence[float]
) -> Html:
    """All of one group."""
    key = f"group-{index}"
    drawn = {panel["id"]: panel for panel in described["panels"]}
    pieces = [None if alone else element("h2", group.title, id=f"{key}-title"), tiles(group)]
    links = {"leaderboard": "Leaderboard"} if group.study else {}
    if group.study:
        pieces.append(leaderboard(group, key, accuracies))
    if group.study and (table_of_steps := steps_table(group, key)):
        pieces += [element("h2", "Updates to the target", id=f"{key}-target")]
        pieces += [card(drawn["steps_to_target"]) if "steps_to_target" in drawn else None, table_of_steps]
        links["target"] = "Updates to the target"
    if "learning_rate_study" in drawn:
        pieces += [element("h2", "Learning rates", id=f"{key}-rates"), card(drawn["learning_rate_study"])]
        links["rates"] = "Learning rates"
    curves = [panel for panel in described["panels"] if panel["kind"] == "curve"]
    if curves:
        pieces += [element("h2", "Curves", id=f"{key}-curves"), element("div", cls="controls")]
        pieces.append(element("div", *map(card, curves), cls="charts"))
        links["curves"] = "Curves"
    pieces.append(run_list(group, described, key))
    links["runs"] = "Runs"
    if "time" in drawn:
        pieces += [element("h2", "Time", id=f"{key}-time"), card(drawn["time"])]
        links["time"] = "Time"
    if shown := confusions(group, found, key):
        pieces.append(shown)
        links["confusions"] = "Confusions"
    pieces.append(differences(group, key))
    links["config"] = "Configs"
    nav = element("nav", *(element("a", text, href=f"#{key}-{name}") for name, text in links.items()))
    return element("section", nav, *pieces, id=key)


def make_page(
    groups: list[Group],
    described: list[dict],
    found: list[list],
    refresh_sec: float | None,
    accuracies: Sequence[float],
) -> str:
    """The whole document, from `panels.describe` and `read_confusions` of each group.

    Leaderboards show the updates to each of `accuracies`.
    """
    parts = enumerate(zip(groups, described, found, strict=True))
    pieces = [section(*part, index, len(groups) == 1, accuracies) for index, part in parts]
    off = element("p", "The pictures are drawn by JavaScript, which is off. The tables are whole.")
    foot = element("footer", f"Made by report.py. Curves show at most {panels.MAX_POINTS} rows of a run.")
    body = join([header(groups), element("noscript", off), *pieces, foot])
    return page(" · ".join(group.title for group in groups), body, described, refresh_sec)
