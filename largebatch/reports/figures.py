"""The panels of a report as PNG files, for a README or a paper."""

import io
import re

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot, ticker

# Okabe and Ito's colours, as on the page.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0568f", "#a87a00", "#3aa0d8", "#6b6f76", "#5b4bb7")
INK, SOFT, PALE, GRID = "#1c1e21", "#5c6168", "#b9bdc3", "#e9e7e2"
MAX_COUNTED_CLASSES = 30  # of a confusion matrix with numbers in it
MANY_RUNS = 8  # whose curves are drawn thin
STYLE = {
    "figure.figsize": (8, 4.4), "figure.dpi": 150, "figure.constrained_layout.use": True, "font.size": 11,
    "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#c9c6bf", "axes.labelcolor": SOFT,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": GRID, "text.color": INK,
    "xtick.color": SOFT, "ytick.color": SOFT, "xtick.minor.size": 0, "ytick.minor.size": 0, "ytick.major.size": 0,
    "legend.frameon": False, "legend.fontsize": 9.5, "lines.solid_capstyle": "round",
}  # fmt: skip


def draw_all(described: list[dict], axis: str = "step", axis_label: str = "updates") -> dict[str, bytes]:
    """All panels of all groups as {file name: PNG}; curves over one of the axes of the runs.

    Args:
      described: see `panels.describe`.
    """
    files = {}
    for number, group in enumerate(described):
        prefix = f"{number}-{_file_name(group['title'])[:40]}-" if len(described) > 1 else ""
        for panel in group["panels"]:
            with matplotlib.rc_context(STYLE):
                if panel["kind"] == "curve":
                    figure = _draw_curves(group, panel, axis, axis_label)
                elif panel["kind"] == "xy":
                    figure = _draw_marks(panel)
                else:
                    figure = _draw_bars(panel)
                files[f"{prefix}{_file_name(panel['id'])}.png"] = _png(figure)
    return files


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", text)


def draw_confusion(names: list[str], matrix: np.ndarray, title: str) -> bytes:
    """Counts [classes, classes] with true classes in rows, shaded by their share of the true class, as PNG."""
    classes = len(names)
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    side = 2.6 + 0.46 * min(classes, MAX_COUNTED_CLASSES)
    with matplotlib.rc_context({**STYLE, "axes.grid": False, "figure.figsize": (side + 0.6, side)}):
        figure, axes = pyplot.subplots()
        axes.imshow(_shaded(shares))
        if classes <= MAX_COUNTED_CLASSES:
            for true, predicted in np.ndindex(matrix.shape):
                count = matrix[true, predicted]
                colour = INK if count else PALE
                axes.text(predicted, true, f"{count}", ha="center", va="center", fontsize=8.5, color=colour)
            recalls = [f"{_plain(name)}  {share:.0%}" for name, share in zip(names, shares.diagonal(), strict=True)]
            axes.set_xticks(range(classes), map(_plain, names), rotation=90)
            axes.set_yticks(range(classes), recalls)
        axes.set_xlabel("predicted")
        axes.set_ylabel("true, with recall")
        axes.spines[:].set_visible(False)
        axes.set_title(_plain(title), x=0, fontsize=11)
        return _png(figure)


def _shaded(shares: np.ndarray) -> np.ndarray:
    """RGB [classes, classes, 3]: what is right in blue by its share, mistakes in orange by the root of theirs."""
    right = np.eye(len(shares), dtype=bool)
    strength = np.where(right, shares, np.sqrt(shares))[..., None] * 0.6
    blue, orange = (np.array(matplotlib.colors.to_rgb(colour)) for colour in COLOURS[:2])
    hue = np.where(right[..., None], blue, orange)
    return 1 - strength * (1 - hue)


def _plain(text: str) -> str:
    """A text in which matplotlib sees no mathematics, short enough for a picture."""
    text = str(text)
    return (text if len(text) <= 60 else f"{text[:59]}…").replace("$", r"\$")


def _png(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    pyplot.close(figure)
    return buffer.getvalue()


def _colour(index: int | None) -> str:
    return SOFT if index is None else COLOURS[index % len(COLOURS)]


def _set_scale(axis, spec: dict) -> None:
    """Sets scale, ticks and label of an axis of a plot, as a panel's "x" or "y" has them."""
    name, log = axis.axis_name, spec["scale"] == "log"
    getattr(axis.axes, f"set_{name}scale")("log" if log else "linear")
    if log:
        low, high = sorted(axis.get_view_interval())
        digits = (1, 3) if high > 300 * low else (1, 2, 5)
        axis.set_major_locator(ticker.LogLocator(10, subs=digits, numticks=12))
        axis.set_minor_locator(ticker.NullLocator())
    if spec.get("ticks"):
        axis.set_major_locator(ticker.FixedLocator(spec["ticks"]))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}")
    axis.set_label_text(f"{spec['label']} (log)" if log else spec["label"])
    if spec["scale"] == "zero":
        if name == "y":
            axis.axes.set_ylim(bottom=0)
        else:
            axis.axes.set_xlim(left=0)


# ---- the kinds of panels -----------------------------------------------------------------------------


def _draw_curves(group: dict, panel: dict, axis: str, axis_label: str):
    figure, axes = pyplot.subplots()
    width = 1.1 if len(group["runs"]) > MANY_RUNS else 1.8
    lines = {}  # the last of each colour, for the legend
    for run, values in zip(group["runs"], panel["values"], strict=True):
        points = [(x, y) for x, y in zip(run["axes"][axis], values, strict=True) if None not in (x, y)]
        if not points:
            continue
        x, y = zip(*points, strict=True)
        colour = _colour(run["colour"])
        (lines[run["colour"]],) = axes.plot(
            x,
            y,
            color=colour,
            label=_plain(group["legend"]["labels"][run["colour"]]),
            linewidth=width,
            alpha=0.8,
            marker="o" if len(points) == 1 else None,
            markersize=4,
        )
        if run["status"] == "diverged":
            axes.plot(x[-1:], y[-1:], "x", color=colour, markersize=7, markeredgewidth=2)
    axes.set_xlim(left=0)
    axes.set_title(panel["title"])
    _set_scale(axes.xaxis, {"label": axis_label, "scale": "linear"})
    _set_scale(axes.yaxis, panel["y"])
    if len(lines) > 1:
        handles = [lines[index] for index in sorted(lines)]
        axes.legend(handles=handles, title=_plain(group["legend"]["title"]), title_fontsize=9.5)
    return figure


def _draw_marks(panel: dict):
    figure, axes = pyplot.subplots()
    axes.set_ylim(*panel["y"]["domain"])
    for mark in panel["marks"]:
        if mark["kind"] == "band":
            (low, _), (high, _) = mark["points"]
            axes.axvspan(low, high, color=COLOURS[1], alpha=0.13, lw=0)
        elif mark["kind"] == "rule":
            _draw_rule(axes, mark)
        elif mark["kind"] == "cross":
            _draw_crosses(axes, mark)
        else:
            _draw_points(axes, mark)
    axes.set_title(panel["title"])
    _set_scale(axes.xaxis, panel["x"])
    _set_scale(axes.yaxis, panel["y"])
    axes.set_ylim(*panel["y"]["domain"])
    axes.legend()
    return figure


def _draw_rule(axes, mark: dict) -> None:
    """A vertical line with its label beside."""
    colour, x = _colour(mark["colour"]), mark["points"][0][0]
    axes.axvline(x, color=colour, lw=1.3, ls=":")
    above = axes.get_xaxis_transform()
    axes.text(x, 0.97, f" {_plain(mark['label'])}", color=colour, transform=above, va="top", weight="bold")


def _draw_crosses(axes, mark: dict) -> None:
    """Crosses at the foot of the picture."""
    x = [point[0] for point in mark["points"]]
    foot = axes.get_xaxis_transform()
    axes.plot(x, [0.035] * len(x), "x", color=_colour(mark["colour"]), ms=7, mew=2, transform=foot)


def _draw_points(axes, mark: dict) -> None:
    """Points with their intervals: alone, hollow or on a line."""
    kind, colour = mark["kind"], _colour(mark["colour"])
    style = {"color": colour, "lw": 1.7, "ls": "", "marker": "o", "ms": 6.5}
    if mark["label"]:
        style["label"] = _plain(mark["label"])
    if kind == "line":
        style["ls"] = "--" if mark.get("style") == "dashed" else "-"
        if "tips" not in mark:  # no measured points
            style["marker"] = None
    if kind == "hollow":
        style.update(mfc="white", mew=1.8)
    if kind == "points" and mark["label"] is None:
        style["alpha"] = 0.4
    axes.plot([point[0] for point in mark["points"]], [point[1] for point in mark["points"]], **style)
    for x, _, *interval in mark["points"]:
        if interval and interval[0] is not None:
            low, high = interval
            high = axes.get_ylim()[1] if high is None else high  # no end was measured
            axes.errorbar(x, (low + high) / 2, (high - low) / 2, color=colour, capsize=3, lw=1.3, alpha=0.65)


def _draw_bars(panel: dict):
    rows = panel["rows"]
    figure, axes = pyplot.subplots(figsize=(8, 1.4 + 0.24 * len(rows)))
    labels = [_plain(label) for label, _, _ in rows]
    seconds = np.array([values for _, _, values in rows])
    left = np.zeros(len(rows))
    for k, section in enumerate(panel["sections"]):
        bars = {"left": left, "color": _colour(section["colour"]), "label": section["label"], "height": 0.72}
        axes.barh(range(len(rows)), seconds[:, k], **bars)
        left += seconds[:, k]
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")
    axes.set_title(panel["title"])
    _set_scale(axes.xaxis, panel["x"])
    figure.legend(loc="outside lower center", ncols=len(panel["sections"]))
    return figure
