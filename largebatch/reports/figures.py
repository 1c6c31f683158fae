"""The panels of a report as PNG files, for a README or a paper."""

import io
import re

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot, ticker

# Okabe and Ito's colours, as on the page.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0568f", "#a87a00", "#3aa0d8", "#6b6f76", "#5b4bb7")
INK, SOFT, GRID = "#1c1e21", "#5c6168", "#e9e7e2"
STYLE = {
    "figure.figsize": (8, 4.4), "figure.dpi": 150, "figure.constrained_layout.use": True, "font.size": 11,
    "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#c9c6bf", "axes.labelcolor": SOFT,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": GRID, "text.color": INK,
    "xtick.color": SOFT, "ytick.color": SOFT, "xtick.minor.size": 0, "ytick.minor.size": 0, "ytick.major.size": 0,
    "legend.frameon": False, "legend.fontsize": 9.5, "lines.solid_capstyle": "round",
}  # fmt: skip


def draw_all(described: list[dict], axis: str = "step", axis_label: str = "updates") -> dict[str, bytes]:
    """All panels of all groups as {file name: PNG}; curves over one of the axes of the runs."""
    files = {}
    for number, group in enumerate(described):
        prefix = f"{number}-{re.sub(r'[^A-Za-z0-9_]+', '-', group['title'])[:40]}-" if len(described) > 1 else ""
        for panel in group["panels"]:
            with matplotlib.rc_context(STYLE):
                figure = DRAW[panel["kind"]](group, panel, axis, axis_label)
                files[f"{prefix}{re.sub('[^A-Za-z0-9_]+', '-', panel['id'])}.png"] = _png(figure)
    return files


def draw_confusion(names: list[str], matrix: np.ndarray, title: str) -> bytes:
    """Counts [classes, classes] with true classes in rows, shaded by their share of the true class, as PNG."""
    classes = len(names)
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    side = 2.6 + 0.46 * min(classes, 30)
    with matplotlib.rc_context(STYLE | {"axes.grid": False, "figure.figsize": (side + 0.6, side)}):
        figure, axes = pyplot.subplots()
        axes.imshow(_shaded(shares))
        if classes <= 30:
            for i, j in np.ndindex(matrix.shape):
                colour = INK if matrix[i, j] else "#b9bdc3"
                axes.text(j, i, f"{matrix[i, j]}", ha="center", va="center", fontsize=8.5, color=colour)
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
    hue = np.where(right[..., None], *(np.array(matplotlib.colors.to_rgb(COLOURS[k])) for k in (0, 1)))
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


def _scale(axis, spec: dict) -> None:
    """Sets scale, ticks and label of an axis of a plot."""
    name = axis.axis_name
    getattr(axis.axes, f"set_{name}scale")("log" if spec["scale"] == "log" else "linear")
    log = spec["scale"] == "log"
    if log:
        low, high = sorted(axis.get_view_interval())
        wide = high > 300 * low
        axis.set_major_locator(ticker.LogLocator(10, subs=(1, 3) if wide else (1, 2, 5), numticks=12))
        axis.set_minor_locator(ticker.NullLocator())
    if spec.get("ticks"):
        axis.set_major_locator(ticker.FixedLocator(spec["ticks"]))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}")
    axis.set_label_text(spec["label"] + " (log)" * log)
    if spec["scale"] == "zero":
        getattr(axis.axes, f"set_{name}lim")(**{"bottom" if name == "y" else "left": 0})


def _curve(group: dict, panel: dict, axis: str, axis_label: str):
    figure, axes = pyplot.subplots()
    many, lines = len(group["runs"]) > 8, {}
    for run, values in zip(group["runs"], panel["values"], strict=True):
        points = [(x, y) for x, y in zip(run["axes"][axis], values, strict=True) if None not in (x, y)]
        if not points:
            continue
        colour, index = _colour(run["colour"]), run["colour"]
        label = _plain(group["legend"]["labels"][index])
        marker = "o" if len(points) == 1 else None
        x, y = zip(*points, strict=True)
        style = {"lw": 1.1 if many else 1.8, "alpha": 0.8, "marker": marker, "ms": 4}
        lines[index] = axes.plot(x, y, color=colour, label=label, **style)[0]
        if run["status"] == "diverged":
            axes.plot(x[-1:], y[-1:], "x", color=colour, ms=7, mew=2)
    axes.set_xlim(left=0)
    axes.set_title(panel["title"])
    _scale(axes.xaxis, {"label": axis_label, "scale": "linear"})
    _scale(axes.yaxis, panel["y"])
    if len(lines) > 1:
        handles = [lines[index] for index in sorted(lines)]
        axes.legend(handles=handles, title=_plain(group["legend"]["title"]), title_fontsize=9.5)
    return figure


def _xy(group: dict, panel: dict, *_):
    figure, axes = pyplot.subplots()
    axes.set_ylim(*panel["y"]["domain"])
    bottom = axes.get_xaxis_transform()
    for mark in panel["marks"]:
        colour, label = _colour(mark["colour"]), _plain(mark["label"]) if mark["label"] else None
        x, kind = [point[0] for point in mark["points"]], mark["kind"]
        if kind == "band":
            axes.axvspan(*x, color=COLOURS[1], alpha=0.13, lw=0)
        elif kind == "rule":
            axes.axvline(x[0], color=colour, lw=1.3, ls=":")
            axes.text(x[0], 0.97, f" {label}", color=colour, transform=bottom, va="top", weight="bold")
        elif kind == "cross":
            axes.plot(x, [0.035] * len(x), "x", color=colour, ms=7, mew=2, transform=bottom)
        else:
            y = [point[1] for point in mark["points"]]
            line = {"marker": None if kind == "line" and "tips" not in mark else "o", "ms": 6.5, "color": colour}
            line |= {"ls": {"line": "--" if mark.get("style") else "-"}.get(kind, ""), "lw": 1.7, "label": label}
            line |= {"mfc": "white", "mew": 1.8} if kind == "hollow" else {}
            axes.plot(x, y, alpha=0.4 if kind == "points" and label is None else 1, **line)
            spans = [(p[0], p[2], p[3]) for p in mark["points"] if len(p) > 2 and p[2] is not None]
            for at, low, high in spans:
                axes.errorbar(at, (low + high) / 2, (high - low) / 2, color=colour, capsize=3, lw=1.3, alpha=0.65)
    axes.set_title(panel["title"])
    _scale(axes.xaxis, panel["x"])
    _scale(axes.yaxis, panel["y"])
    axes.set_ylim(*panel["y"]["domain"])
    axes.legend()
    return figure


def _bars(group: dict, panel: dict, *_):
    rows = panel["rows"]
    figure, axes = pyplot.subplots(figsize=(8, 1.4 + 0.24 * len(rows)))
    labels, left = [_plain(label) for label, *_ in rows], np.zeros(len(rows))
    for k, part in enumerate(panel["sections"]):
        values = np.array([values[k] for *_, values in rows])
        axes.barh(
            range(len(rows)), values, left=left, color=_colour(part["colour"]), label=part["label"], height=0.72
        )
        left += values
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")
    axes.set_title(panel["title"])
    _scale(axes.xaxis, panel["x"])
    figure.legend(loc="outside lower center", ncols=len(panel["sections"]))
    return figure


DRAW = {"curve": _curve, "xy": _xy, "bars": _bars}
