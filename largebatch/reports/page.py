"""The page of a report, part by part. Tables are HTML; page.js draws the panels in the places made for them."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from largebatch.reports import cases_section, confusion_section, panels, study_panels, tables
from largebatch.reports.cases_section import RunCases
from largebatch.reports.confusion_section import RunConfusion
from largebatch.reports.labels import count_runs, plain, score_words
from largebatch.reports.markup import Html, document, element, join
from largebatch.reports.panels import Group
from largebatch.runs.reader import Run, number
from largebatch.studies import analysis, critical_batch

STOPPED = ("diverged", "interrupted", "failed")  # a pruned run ended as its study wants
MAX_PROBLEMS = 100  # lines of the box at the top


@dataclass(frozen=True)
class GroupReport:
    """All that is shown of a group: its runs, what `panels.describe` says of them, and what they predicted."""

    group: Group
    described: dict
    confusions: list[RunConfusion]
    cases: list[RunCases]

    @property
    def panels(self) -> dict[str, dict]:
        """The panels by their id."""
        return {panel["id"]: panel for panel in self.described["panels"]}


def report_groups(groups: list[Group]) -> list[GroupReport]:
    """Reads predictions and prepares panels; what is damaged is added to the problems of its run."""
    knees = {}
    for group in groups:
        for fit in study_panels.fits(group.study) if group.study else ():
            if fit.has_knee:
                knees[f"{group.title} {fit.optimizer}".strip()] = fit.knee
    return [
        GroupReport(
            group,
            panels.describe(group, knees),
            confusion_section.read_confusions(group),
            cases_section.read_cases(group),
        )
        for group in groups
    ]


def make_page(reports: list[GroupReport], accuracies: Sequence[float]) -> str:
    """The whole document.

    Args:
      accuracies: leaderboards show the updates to each of them.
    """
    groups = [report.group for report in reports]
    no_script = element("p", "The pictures are drawn by JavaScript, which is off. The tables are whole.")
    pieces = [header(groups), element("noscript", no_script)]
    for index, report in enumerate(reports):
        pieces.append(section(report, f"group-{index}", accuracies, titled=len(reports) > 1))
    pieces.append(element("footer", f"Made by report.py. Curves show at most {panels.MAX_POINTS} rows of a run."))
    title = " · ".join(group.title for group in groups)
    return document(title, join(pieces), [report.described for report in reports])


# ---- the top -----------------------------------------------------------------------------------------


def header(groups: list[Group]) -> Html:
    """What is shown, when the page was made, and what is wrong with any of it."""
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    counts = [("study of " if group.study else "") + count_runs(len(group.runs)) for group in groups]
    title = element("h1", " · ".join(group.title for group in groups))
    words = element("div", title, element("p", f"{', '.join(counts)}; made {made}", cls="soft"))
    theme = element("span", cls="segments", id="theme", role="group", aria_label="colours")
    return join([element("div", words, theme, cls="top"), problem_box(groups)])


@dataclass(frozen=True)
class Problem:
    """Something damaged, unfinished or failed: the path of the run or study, and what is wrong."""

    path: str
    text: str


def problem_box(groups: list[Group]) -> Html:
    """Every problem, a line each."""
    problems = [problem for group in groups for problem in problems_of(group)]
    if not problems:
        has_pruned = any(run.status == "pruned" for group in groups for run in group.runs)
        ends = "whole, and done or pruned" if has_pruned else "whole and done"
        return element("p", f"Every run is {ends}.", cls="soft")
    lines = [element("li", element("code", p.path), " ", p.text) for p in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(element("li", f"and {len(problems) - MAX_PROBLEMS} more: see the status of each run"))
    heading = "Damaged, diverged, failed or unfinished"
    if len(problems) > 1:
        heading += f": {len(problems)}"
    return element("div", element("h3", heading), element("ul", *lines), cls="card problems")


def problems_of(group: Group) -> list[Problem]:
    """Every problem of a group: those of its study, then run by run."""
    problems = []
    if group.study:
        problems += [Problem(str(group.study.path), text) for text in group.study.problems]
        problems += [
            Problem(str(run.path), critical_batch.LEFT_OUT) for run in critical_batch.left_out(group.study)
        ]
    for run in group.runs:
        if run.status in STOPPED and not run.trial_error:
            problems.append(Problem(str(run.path), why_stopped(run)))
        problems += [Problem(str(run.path), text) for text in run.problems]
    return problems


def why_stopped(run: Run) -> str:
    """The status of a run that stopped, and the reason in its last event if there is one."""
    reason = str((run.events[-1].get("reason") if run.events else None) or "")
    if not reason:
        return run.status
    return reason if reason.startswith(run.status) else f"{run.status}: {reason}"


# ---- a group -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of a group's section: its anchor, its name in the navigation, its heading and what is below."""

    anchor: str
    link: str
    heading: str
    content: Html


def section(report: GroupReport, key: str, accuracies: Sequence[float], *, titled: bool) -> Html:
    """Return all of one group.

    Args:
      key: begins the ids of the elements.
      titled: put the group's title above.
    Raises:
      ValueError: a panel has no place, or two: page.js could not draw it.
    """
    parts = list(make_parts(report, key, accuracies))
    pieces = [element("nav", *(element("a", part.link, href=f"#{key}-{part.anchor}") for part in parts))]
    if titled:
        pieces.append(element("h2", report.group.title, id=f"{key}-title"))
    pieces.append(element("div", *tiles(report.group), cls="tiles"))
    for part in parts:
        pieces += [element("h2", part.heading, id=f"{key}-{part.anchor}"), part.content]
    html = element("section", *pieces, id=key)
    for panel in report.described["panels"]:
        places = html.count(place(panel))
        if places != 1:
            raise ValueError(f"panel {panel['id']!r} has {places} places on the page; allowed: 1")
    return html


def make_parts(report: GroupReport, key: str, accuracies: Sequence[float]) -> Iterator[Part]:
    """The parts that have something to show, in their order on the page."""
    group, drawn = report.group, report.panels
    if group.study:
        yield Part("leaderboard", "Leaderboard", "Leaderboard", tables.leaderboard(group, key, accuracies))
        steps = tables.steps_table(group, key)
        if steps:
            curve = card(drawn["steps_to_target"]) if "steps_to_target" in drawn else None
            yield Part("target", "Updates to the target", "Updates to the target", join([curve, steps]))
    if "learning_rate_study" in drawn:
        yield Part("rates", "Learning rates", "Learning rates", card(drawn["learning_rate_study"]))
    if "critical_batch" in drawn:
        yield Part("branches", "Critical batch", "Critical batch", card(drawn["critical_batch"]))
    curves = [panel for panel in report.described["panels"] if panel["kind"] == "curve"]
    if curves:
        charts = element("div", *map(card, curves), cls="charts")
        yield Part("curves", "Curves", "Curves", join([element("div", cls="controls"), charts]))
    yield Part("runs", "Runs", "Runs", tables.run_table(group, report.described, key))
    times = [card(drawn[name]) for name in ("time", "devices") if name in drawn]
    if times:
        yield Part("time", "Time", "Time", join(times))
    if report.confusions:
        cards = confusion_section.confusion_cards(group, report.confusions, key)
        yield Part("confusions", "Confusions", "Confusions", cards)
    if report.cases:
        pictures = cases_section.case_cards(group, report.cases)
        yield Part("cases", "Cases", "Worst and best cases", pictures)
    yield config_part(group, key)


def config_part(group: Group, key: str) -> Part:
    """What the configs of the runs differ in; of one run its whole config."""
    origins = tables.origins(group)
    if len(origins) == 1:
        return Part("config", "Configs", "Config", tables.whole_config(origins[0]))
    return Part("config", "Configs", "Differences between configs", tables.differences(origins, key))


def card(panel: dict) -> Html:
    """Return a panel's title and notes above its place."""
    notes = [] if panel["kind"] == "curve" else [element("p", line) for line in panel["note"].splitlines()]
    caption = element("figcaption", element("h3", panel["title"]), *notes)
    return element("figure", caption, place(panel), cls="card")


def place(panel: dict) -> Html:
    """Return the empty element that page.js fills with a panel."""
    return element("div", cls=f"plot {panel['kind']}", data_panel=panel["id"])


# ---- tiles -------------------------------------------------------------------------------------------


def tiles(group: Group) -> Iterator[Html]:
    """The few figures that matter most."""
    best = min(group.runs, key=lambda run: run.kind.rank(run.best_score), default=None)
    if best and best.best_score is not None:
        label = group.labels[group.runs.index(best)]
        yield tile(f"{best.best_score:.4f}", f"best {score_words(best)}: {label}")
    rates = [rate for run in group.runs if (rate := number(run.summary.get("images_per_sec")))]
    if rates:
        of_several = ", median of the runs" if len(rates) > 1 else ""
        yield tile(f"{statistics.median(rates):,.0f}", f"training images / s{of_several}")
    if group.study:
        yield from study_tiles(group)
    elif len(group.runs) == 1:
        (run,) = group.runs
        steps = run.value("steps_to_target")
        if steps is not None:
            target = plain(run.target)
            yield tile(f"{steps:,.0f}", f"updates to {target} {score_words(run)}")
    seconds = sum(sum(panels.run_seconds(run).values()) for run in group.runs)
    yield tile(f"{seconds:,.0f} s" if seconds < 7200 else f"{seconds / 3600:,.1f} h", "of work in all")
    done = sum(run.status == "done" for run in group.runs)
    pruned = sum(run.status == "pruned" for run in group.runs)
    yield tile(f"{done} of {len(group.runs)}", f"runs done, {pruned} pruned" if pruned else "runs done")


def study_tiles(group: Group) -> Iterator[Html]:
    """What the batch sizes of a study tell."""
    for fit in study_panels.fits(group.study):
        if fit.has_knee:
            whose = f" of {fit.optimizer}" if fit.optimizer else ""
            yield tile(f"{fit.knee.critical_batch_size:,.0f}", f"examples per update at the knee{whose}")
    scales = analysis.noise_scales(group.study)
    if scales:
        yield tile(f"{statistics.median(scales):,.0f}", "examples: median noise scale at the target")


def tile(value: str, label: str) -> Html:
    """A figure and what it is of."""
    return element("div", element("b", value), element("span", label), cls="tile")
