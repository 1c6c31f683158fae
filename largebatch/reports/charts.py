"""Charts of a report by Altair, which the page draws and vl-convert makes PNGs of.

A chart's specification has no data: its source "rows" is filled from `Chart.rows`, by page.js for what the reader
chose to see. Colours are CSS variables of style.css, so a page changes its scheme without drawing anew.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import altair as alt
import numpy as np
import vl_convert

from largebatch.reports.groups import COLOURS, Group, rounded

AXES = {"step": "steps", "examples_seen": "images", "seconds": "seconds"}  # of training
AXIS = "{axis}"  # in a specification of curves: the unit that the reader chose
MAX_POINTS = 400  # of a curve; more cannot be told apart on a page
MAX_ROWS = 20_000  # of all runs of a group: with 200 runs of 8 curves each a page has 2.8 MB
MAX_TICKS = 12
BAR_HEIGHT = 21
MIN_SPAN = 0.02  # of the values on an axis, in its own units or decades
CROSS = "M-1,-1L1,1M-1,1L1,-1"
ROWS = alt.NamedData("rows")
STYLE = Path(__file__).with_name("style.css")
PNG_WIDTH, PNG_SCALE = 560, 2


@dataclass(frozen=True)
class Chart:
    """Chart with what is said of it.

    Attributes:
      note: what to see in it, in words; a line for each paragraph.
      kind: "curves" (over one of the AXES), "xy" or "bars".
      spec: Vega-Lite specification, without configuration.
      rows: its data. Of curves one row for each run, whose y is a list; `x` is added from the run's axes.
      legend: series that the reader can hide, each with its number, label, colour and style.
    """

    id: str
    title: str
    note: str
    kind: str
    spec: dict
    rows: list[dict]
    legend: list[dict] = field(default_factory=list)


def colour(index: int | None) -> str:
    """Return the CSS colour of a series."""
    return "var(--soft)" if index is None else f"var(--c{index % COLOURS})"


def config() -> dict:
    """Return the configuration that all charts share."""
    text = {"labelColor": "var(--soft)", "titleColor": "var(--soft)", "labelFontSize": 12, "titleFontSize": 12}
    lines = {"gridColor": "var(--grid)", "domainColor": "var(--line)", "tickColor": "var(--line)"}
    axis = {**text, **lines, "titleFontWeight": "normal", "titleFont": "sans-serif"}
    return {"font": "system-ui, sans-serif", "axis": axis, "view": {"stroke": None}, "background": "transparent"}


def _axis(name: str, title: str, scale: str, domain: Sequence | None = None, ticks: list | None = None):
    """Return the encoding of an axis; `scale` is "linear", "log" or "zero" (linear from 0)."""
    is_log = scale == "log"
    options = {"type": "log" if is_log else "linear", "nice": False}
    options |= {"domain": list(domain)} if domain else {}
    options |= {} if is_log else {"zero": scale == "zero"}
    axis = {"title": f"{title} (log)" if is_log else title or None, "grid": name == "y", "labelOverlap": True}
    ticks = ticks or (log_ticks(*domain) if is_log else None)
    axis |= {"values": ticks} if ticks else {"tickCount": 5}
    if name == "y":  # above the axis, where it can be read
        axis |= {"titleAngle": 0, "titleAlign": "left", "titleAnchor": "end", "titleY": -8, "titleX": -30}
    channel = alt.X if name == "x" else alt.Y
    return channel(f"{name}:Q", axis=alt.Axis(**axis), scale=alt.Scale(**options))


def log_ticks(low: float, high: float) -> list[float]:
    """Return ticks of a logarithmic axis: powers of ten, with 2 and 5 times them where these are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(powers) < 7 else (1,)
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]


def _spec(chart: alt.Chart | alt.LayerChart, height: int) -> dict:
    chart = chart.properties(width="container", height=height, padding=2)
    return {name: value for name, value in chart.to_dict(validate=False).items() if name != "config"}


# ---- curves ------------------------------------------------------------------------------------------------


def axes_of(group: Group) -> list[dict[str, list]]:
    """Return where the rows of each run lie on the AXES, thinned as `thinned` does."""
    axes = []
    for run in group.runs:
        seconds = np.cumsum([row.get("train_sec") or 0.0 for row in run.rows]).tolist()
        rows = thinned(len(run.rows), len(group.runs))
        axis = {name: [run.rows[i].get(name) for i in rows] for name in ("step", "examples_seen")}
        axes.append(axis | {"seconds": [rounded(seconds[i]) for i in rows]})
    return axes


def thinned(count: int, num_runs: int) -> list[int]:
    """Return the indices of at most `most_points(num_runs)` of the rows of a run, first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most_points(num_runs))).astype(int)).tolist()


def most_points(num_runs: int) -> int:
    """Return the number of rows that the curves of one of so many runs show."""
    return max(2, min(MAX_POINTS, MAX_ROWS // max(num_runs, 1)))


def curves(name: str, title: str, unit: str, scale: str, values: list[list]) -> Chart | None:
    """Return a chart with a line for each run; the point nearest to the pointer tells its values.

    Args:
      values: values of each row of each run, [runs][rows]; None where there is none.
    """
    known = [value for run in values for value in run if value is not None]
    if not known:
        return None
    low, high = min(known), max(known)
    pad = (high - low or abs(high) or 1) * 0.05
    domain = [low / 1.1, high * 1.1] if scale == "log" else [low if 0 <= low < pad else low - pad, high + pad]
    if scale == "zero":
        domain[0] = min(0, low)
    seen = alt.condition("hot < 0 || datum.run === hot", alt.value(1), alt.value(0.12))
    base = alt.Chart(ROWS).transform_flatten(["x", "y"]).transform_filter("isValid(datum.x) && isValid(datum.y)")
    base = base.encode(
        x=_axis("x", AXIS, "zero"),
        y=_axis("y", unit, scale, [rounded(float(end)) for end in domain]),
        detail="run:N",
        stroke=alt.Stroke("colour:N", scale=None),
        opacity=seen,
    )
    width = alt.condition("datum.run === hot", alt.value(2.8), alt.value(1.8))
    last = base.transform_joinaggregate(last="max(x)", groupby=["run"]).transform_filter("datum.x === datum.last")
    crosses = last.transform_filter("datum.end === 'cross'").mark_point(shape=CROSS, size=45, strokeWidth=2.2)
    circles = last.transform_filter("datum.end === 'hollow'").mark_point(size=45, strokeWidth=2)
    near = alt.selection_point(name="near", nearest=True, on="pointerover", clear="pointerout", fields=["run"])
    # Of the cell around a point, whose `datum` holds that of the point. Vega-Lite's own tooltips lose texts there.
    place = f"'at': format(datum.datum.x, ',.6~g'), {json.dumps(unit)}: format(datum.datum.y, ',.4~g')"
    tip = alt.value(alt.expr(f"datum.datum ? {{'run': datum.datum.label, {place}}} : null"))
    points = base.mark_point(size=80).encode(opacity=alt.value(0), tooltip=tip).add_params(near)
    lines = base.mark_line(clip=True).encode(strokeWidth=width)
    chart = alt.layer(lines, crosses, circles, points).add_params(alt.param(name="hot", value=-1))
    rows = [{"run": index, "y": [rounded(value) for value in run]} for index, run in enumerate(values)]
    note = f"{unit[:1].upper()}{unit[1:]} from {low:,.4g} to {high:,.4g}."
    return Chart(name, title, note, "curves", _spec(chart, 220), rows)


# ---- marks over two axes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """Points of an "xy" chart that are drawn alike.

    Attributes:
      kind: line | dashed | points | hollow | cross | rule | band.
      label: its name in the legend; None for none. Points without a name are pale.
      colour: index of its colour; None for grey.
      points: [x, y], or [x, y, low, high] with the ends of an interval. y is None for a rule, a band (two points)
        and a cross at the bottom; high is None where no end was measured.
      tips: what is said of each point.
    """

    kind: str
    label: str | None
    colour: int | None
    points: list[list]
    tips: list[str] | None = None


def few_ticks(values: Iterable[float]) -> list[float] | None:
    """Return the values themselves as ticks, where they are few."""
    ticks = sorted(values)
    return ticks if len(ticks) <= MAX_TICKS else None


def y_domain(marks: Sequence[Mark], scale: str) -> list[float]:
    """Return a range of y that shows all values, and of their intervals as much again: two seeds may span a lot."""
    points = [point for mark in marks for point in mark.points if point[1] is not None]
    if not points:
        return [0.1, 1.0]
    log = scale == "log"
    values = np.asarray([point[1] for point in points])
    ends = [end for point in points for end in point[2:] if end is not None and (end > 0 or not log)]
    if log:
        values, ends = np.log10(values), np.log10(ends)
    span = max(float(np.ptp(values)), MIN_SPAN)
    inside = np.clip(ends, values.min() - span / 2, values.max() + span / 2) if len(ends) else values
    low = min(values.min(), inside.min()) - span / 12
    high = max(values.max(), inside.max()) + span / 12
    if log:
        low, high = 10.0**low, 10.0**high
    return [float(f"{low:.6g}"), float(f"{high:.6g}")]


def xy(
    name: str,
    title: str,
    note: str,
    marks: Sequence[Mark],
    *,
    x: tuple[str, str, list | None],
    y: tuple[str, str, list | None],
    domain: Sequence[float] | None = None,
) -> Chart:
    """Return a chart of marks.

    Args:
      x, y: title, scale ("linear" or "log") and ticks of an axis; None for the usual ticks.
      domain: range of y; None for `y_domain`.
    """
    domain = domain or y_domain(marks, y[1])
    xs = [point[0] for mark in marks for point in mark.points]
    ends = (min(xs) / 1.25, max(xs) * 1.25) if x[1] == "log" else (0, max(xs) * 1.05 or 1)
    rows = [row for index, mark in enumerate(marks) for row in _rows(mark, index, x[0], y[0], domain)]
    names = sorted((row for row in rows if row["mark"] == "after"), key=lambda row: row["x"])
    for row in names[:-1]:  # so that the names of two rules do not cover each other
        row["mark"] = "before"
    base = alt.Chart(ROWS).encode(
        x=_axis("x", x[0], x[1], ends, x[2]),
        y=_axis("y", y[0], y[1], domain, y[2]),
        stroke=alt.Stroke("colour:N", scale=None),
        tooltip="tip:N",
    )
    fill = alt.Fill("colour:N", scale=None)
    whole = {"y": alt.value(0), "y2": alt.value("height")}
    pale = alt.condition("datum.pale", alt.value(0.4), alt.value(1))
    line = {"strokeWidth": 1.8, "clip": True, "tooltip": None}
    label = {"dy": 4, "fontWeight": 600, "baseline": "top"}
    text = {"y": alt.value(0), "text": "label:N", "fill": fill, "stroke": alt.value("transparent")}
    layers = {
        "band": lambda of: of.mark_rect(opacity=0.13, stroke=None).encode(x2="x2:Q", fill=fill, **whole),
        "line": lambda of: of.mark_line(**line).encode(detail="series:N", order="index:Q"),
        "dashed": lambda of: of.mark_line(**line, strokeDash=[6, 5]).encode(detail="series:N", order="index:Q"),
        "rule": lambda of: of.mark_rule(strokeWidth=1.4, strokeDash=[2, 3]).encode(**whole),
        "after": lambda of: of.mark_text(**label, align="left", dx=6).encode(**text),
        "before": lambda of: of.mark_text(**label, align="right", dx=-6).encode(**text),
        "interval": lambda of: of.mark_rule(strokeWidth=1.4, opacity=0.65).encode(y="low:Q", y2="high:Q"),
        "points": lambda of: of.mark_point(size=70, filled=True, stroke=None).encode(fill=fill, opacity=pale),
        "hollow": lambda of: of.mark_point(size=80, strokeWidth=2, fill="var(--card)"),
        "cross": lambda of: of.mark_point(shape=CROSS, size=60, strokeWidth=2.2),
    }
    drawn = {row["mark"] for row in rows}
    shown = [
        make(base.transform_filter(f"datum.mark === '{mark}'")) for mark, make in layers.items() if mark in drawn
    ]
    legend = [
        {"series": index, "label": mark.label, "colour": colour(mark.colour), "style": mark.kind}
        for index, mark in enumerate(marks)
        if mark.label and mark.kind != "rule"
    ]
    return Chart(name, title, note, "xy", _spec(alt.layer(*shown), 340), rows, legend)


def _rows(mark: Mark, series: int, x_title: str, y_title: str, domain: Sequence[float]) -> list[dict]:
    """Return the rows of a mark: one for each thing that is drawn."""
    low, high = domain
    common = {"series": series, "label": mark.label, "colour": colour(mark.colour)}
    if mark.kind == "band":
        (first, *_), (last, *_) = mark.points
        return [common | {"mark": "band", "x": first, "x2": last}]
    rows = []
    for index, (x, y, *ends) in enumerate(mark.points):
        said = mark.tips[index] if mark.tips else mark.label
        tip = f"{said}\n{x_title} {x:,.6g}" + ("" if y is None else f"\n{y_title} {y:,.6g}")
        row = common | {"mark": mark.kind, "index": index, "x": x, "y": low if y is None else y, "tip": tip}
        row["pale"] = mark.kind == "points" and mark.label is None
        if ends and ends[0] is not None:
            interval = {"low": max(ends[0], low), "high": high if ends[1] is None else min(ends[1], high)}
            row["tip"] += (
                f" ({ends[0]:,.6g} to {'beyond what was measured' if ends[1] is None else f'{ends[1]:,.6g}'})"
            )
            rows.append(row | interval | {"mark": "interval"})
        rows.append(row)
        if mark.kind == "line" and mark.tips:
            rows.append(row | {"mark": "points"})
        if mark.kind == "rule":
            rows.append(row | {"mark": "after"})
    return rows


def bars(
    name: str, title: str, note: str, unit: str, sections: Sequence[str], values: dict[str, list[float]]
) -> Chart:
    """Return a chart with a bar for each label of `values`, whose pieces are its values by section."""
    rows = []
    for label, of_label in values.items():
        tip = "\n".join(f"{section} {value:,.1f}" for section, value in zip(sections, of_label, strict=True))
        for index, (section, value) in enumerate(zip(sections, of_label, strict=True)):
            row = {"bar": label, "label": section, "series": index, "x": value, "colour": colour(index)}
            rows.append(row | {"tip": f"{label}\n{tip}"})
    axis = alt.Axis(title=None, labelLimit=240, domain=False, ticks=False)
    chart = (
        alt.Chart(ROWS)
        .mark_bar(height=13)
        .encode(
            x=alt.X("x:Q", stack=True, axis=alt.Axis(title=unit, tickCount=6)),
            y=alt.Y("bar:N", sort=None, axis=axis),
            fill=alt.Fill("colour:N", scale=None),
            order="series:Q",
            tooltip="tip:N",
        )
    )
    legend = [
        {"series": index, "label": section, "colour": colour(index), "style": "points"}
        for index, section in enumerate(sections)
    ]
    return Chart(name, title, note, "bars", _spec(chart, BAR_HEIGHT * len(values)), rows, legend)


# ---- pictures of them ------------------------------------------------------------------------------------------


def png_of(chart: Chart, axes: list[dict[str, list]], runs: list[dict]) -> bytes:
    """Draw a chart on white, curves over steps.

    Args:
      axes, runs: where the rows of each run lie, and its colour and label; see `page.runs_of`.
    """
    rows = chart.rows
    if chart.kind == "curves":
        rows = [runs[row["run"]] | row | {"x": axes[row["run"]]["step"]} for row in rows]
    width = {"width": PNG_WIDTH}
    title = {"title": {"text": chart.title, "anchor": "start", "color": "var(--ink)"}}
    spec = chart.spec | width | title | {"config": config() | {"background": "white"}, "datasets": {"rows": rows}}
    text = json.dumps(spec).replace(AXIS, AXES["step"])
    text = re.sub(r"var\((--\w+)\)", lambda match: light_colours()[match[1]], text)
    return vl_convert.vegalite_to_png(text, scale=PNG_SCALE)


def light_colours() -> dict[str, str]:
    """Return the colours of the light scheme by the names of their CSS variables."""
    return dict(re.findall(r"(--\w+): light-dark\((#\w+),", STYLE.read_text()))
