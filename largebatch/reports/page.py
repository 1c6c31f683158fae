"""The page of a report: what is shown of each group of runs, rendered by template.html.jinja."""

import base64
import hashlib
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
import vl_convert

from largebatch.predictions import cases as case_files
from largebatch.predictions import files as prediction_files
from largebatch.reports import charts, examples, run_charts, study_charts, tables
from largebatch.reports.charts import Chart
from largebatch.reports.examples import Confusion, MapExamples
from largebatch.reports.groups import Group, plain, score_words
from largebatch.reports.study_charts import Fit
from largebatch.reports.tables import Table
from largebatch.runs.reader import number

FOLDER = Path(__file__).parent
STOPPED = ("diverged", "interrupted", "failed")  # a pruned run ended as its study wants
MAX_PROBLEMS = 100  # lines of the box at the top
MAX_MATRIX = 50  # classes of a confusion matrix; of more there is a table of recalls


@dataclass(frozen=True)
class Part:
    """A part of a group's section: its anchor and heading, and what is below, in the order of the fields."""

    anchor: str
    heading: str
    charts: Sequence[Chart] = ()
    table: Table | None = None
    text: str = ""
    curves: Sequence[Chart] = ()
    folded: Table | None = None
    confusions: Sequence[Confusion] = ()
    maps: Sequence[MapExamples] = ()


@dataclass(frozen=True)
class GroupReport:
    """All that is shown of a group, in its order on the page; charts have an id of their own within it."""

    group: Group
    common: str  # what all of its runs have in common
    fits: list[Fit]
    parts: list[Part]

    @property
    def charts(self) -> list[Chart]:
        """All charts."""
        return [chart for part in self.parts for chart in (*part.charts, *part.curves)]


def report_groups(groups: list[Group], accuracies: Sequence[float]) -> list[GroupReport]:
    """Read predictions and prepare charts and tables; what is damaged is added to the problems of its run.

    Args:
      accuracies: leaderboards show the steps to each of them.
    """
    fits = [study_charts.fits(group.study) if group.study else [] for group in groups]
    swept = {
        f"{group.title} {fit.optimizer}".strip(): fit.curve.critical_batch_size
        for group, of_group in zip(groups, fits, strict=True)
        for fit in of_group
        if fit.is_resolved
    }
    return [
        GroupReport(
            group,
            tables.in_common(tables.origins(group)),
            of_group,
            list(parts_of(group, of_group, swept, accuracies)),
        )
        for group, of_group in zip(groups, fits, strict=True)
    ]


def parts_of(group: Group, fits: list[Fit], swept: dict[str, float], accuracies: Sequence[float]) -> Iterator[Part]:
    """Yield the parts that have something to show.

    Args:
      swept: critical batch sizes that the sweeps of all groups found, by title.
    """
    if group.study:
        yield Part("leaderboard", "Leaderboard", table=tables.leaderboard(group, accuracies))
        if steps := tables.steps_table(group, fits):
            chart = study_charts.steps_chart(group, fits)
            yield Part("target", "Steps to the target", [chart] if chart else [], steps)
        if chart := study_charts.rate_chart(group):
            yield Part("rates", "Learning rates", [chart])
        if chart := study_charts.branch_chart(group.study, swept):
            yield Part("branches", "Critical batch", [chart])
    if curves := list(run_charts.curve_charts(group)):
        yield Part("curves", "Curves", curves=curves)
    yield Part("runs", "Runs", table=tables.run_table(group))
    times = [run_charts.time_chart(group), run_charts.devices_chart(group)]
    if any(times):
        yield Part("time", "Time", [chart for chart in times if chart])
    if confusions := examples.read_examples(group, prediction_files.FILE, examples.read_confusion):
        yield Part("confusions", "Confusions", confusions=confusions)
    if maps := examples.read_examples(group, case_files.FILE, examples.read_maps):
        yield Part("maps", "Worst and best maps", maps=maps)
    origins = tables.origins(group)
    if len(origins) == 1:
        yield Part("config", "Config", folded=tables.whole_config(origins[0]))
    elif differing := tables.differences(origins):
        yield Part("config", "Differences between configs", table=differing)
    else:
        text = "The runs do not differ." if origins else "No run has a config."
        yield Part("config", "Differences between configs", text=text)


# ---- the page ------------------------------------------------------------------------------------------------


def make_page(reports: list[GroupReport]) -> str:
    """Return the whole document, which needs neither a server nor a network."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True
    )
    scripts = [vega_bundle(), (FOLDER / "page.js").read_text()]
    return environment.get_template("template.html.jinja").render(
        title=" · ".join(report.group.title for report in reports),
        made=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        style=(FOLDER / "style.css").read_text(),
        scripts=scripts,
        hashes=[base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts],
        # Inside <script> only "<" could end it; JSON may write it as an escape.
        data=json.dumps(data_of(reports), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        problems=[problem for report in reports for problem in problems_of(report.group)],
        max_problems=MAX_PROBLEMS,
        has_pruned=any(run.status == "pruned" for report in reports for run in report.group.runs),
        max_points=min(charts.most_points(len(report.group.runs)) for report in reports),
        max_matrix=MAX_MATRIX,
        reports=reports,
        tiles=tiles,
    )


@cache
def vega_bundle() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")


def data_of(reports: list[GroupReport]) -> dict:
    """Return what page.js draws from."""
    return {
        "config": charts.config(),
        "axes": charts.AXES,
        "groups": [
            {
                "runs": runs_of(report.group),
                "axes": charts.axes_of(report.group),
                "legend": [plain(value) for value in report.group.legend],
                "charts": {
                    chart.id: {name: getattr(chart, name) for name in ("kind", "spec", "rows", "legend")}
                    for chart in report.charts
                },
            }
            for report in reports
        ],
    }


def runs_of(group: Group) -> list[dict]:
    """Return what the curves of each run share: colour, the number of the colour, label, and how it ended."""
    runs = []
    for run, label, index in zip(group.runs, group.labels, group.colours, strict=True):
        ends = {"diverged": "cross", "running": "hollow"}
        end = ends.get(run.status) or ("hollow" if len(run.rows) == 1 else None)
        runs.append(
            {"colour": charts.colour(index), "series": index, "label": f"{label} ({run.status})", "end": end}
        )
    return runs


# ---- problems and figures ------------------------------------------------------------------------------------


def problems_of(group: Group) -> Iterator[tuple[str, str]]:
    """Yield everything damaged, unfinished or failed: the path of the run or study, and what is wrong."""
    if group.study:
        yield from ((str(group.study.path), text) for text in group.study.problems)
    for run in group.runs:
        if run.status in STOPPED and not run.trial_error:
            reason = str((run.events[-1].get("reason") if run.events else None) or "")
            yield str(run.path), reason if reason.startswith(run.status) else f"{run.status}: {reason}".rstrip(": ")
        yield from ((str(run.path), text) for text in run.problems)


def tiles(report: GroupReport) -> Iterator[tuple[str, str]]:
    """Yield the few figures that matter most, and what they are of."""
    group = report.group
    best = min(group.runs, key=lambda run: run.kind.rank(run.best_score), default=None)
    if best and best.best_score is not None:
        yield f"{best.best_score:.4f}", f"best {score_words(best)}: {group.labels[group.runs.index(best)]}"
    rates = [rate for run in group.runs if (rate := number(run.summary.get("images_per_sec")))]
    if rates:
        of_several = ", median of the runs" if len(rates) > 1 else ""
        yield f"{statistics.median(rates):,.0f}", f"training images / s{of_several}"
    for fit in report.fits:
        if fit.is_resolved:
            whose = f" of {fit.optimizer}" if fit.optimizer else ""
            yield f"{fit.curve.critical_batch_size:,.0f}", f"examples: critical batch size{whose}"
    if scales := [scale for fit in report.fits for scale in fit.noise_scales]:
        yield f"{statistics.median(scales):,.0f}", "examples: median noise scale at the target"
    if not group.study and len(group.runs) == 1 and (steps := group.runs[0].value("steps_to_target")) is not None:
        yield f"{steps:,.0f}", f"steps to {plain(group.runs[0].target)} {score_words(group.runs[0])}"
    seconds = sum(sum(run_charts.run_seconds(run).values()) for run in group.runs)
    yield f"{seconds:,.0f} s" if seconds < 7200 else f"{seconds / 3600:,.1f} h", "of work in all"
    done = sum(run.status == "done" for run in group.runs)
    pruned = sum(run.status == "pruned" for run in group.runs)
    yield f"{done} of {len(group.runs)}", f"runs done, {pruned} pruned" if pruned else "runs done"
