"""Pictures of what bench.py measured."""

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

OURS, THEIRS, CEILING = "#1f5aa6", "#b0b7c3", "#c2410c"


def plot_step(result: dict, path: str) -> None:
    """Images per second of every contender as bars with their range, the float32 ceiling as a line."""
    rows = [row for row in reversed(result["rows"]) if "images_per_sec" in row]
    rates = [row["images_per_sec"] for row in rows]
    ranges = [row["images_per_sec_range"] for row in rows]
    colours = [OURS if row["name"].startswith("ours") else THEIRS for row in rows]
    figure, axes = pyplot.subplots(figsize=(9, 0.9 + 0.32 * len(rows)), layout="constrained")
    bars = {"xerr": _errors(rates, ranges), "color": colours, "ecolor": "#444", "capsize": 2, "height": 0.7}
    axes.barh([row["name"] for row in rows], rates, **bars)
    for index, (rate, (_, most)) in enumerate(zip(rates, ranges, strict=True)):
        end = most + 0.012 * max(rates)
        axes.text(end, index, f"{rate:,.0f}", va="center", fontsize=8, backgroundcolor="white")
    axes.margins(x=0.12, y=0.01)
    ceiling = next(row for row in result["rows"] if row["name"].startswith("matrix product, float32"))
    limit = ceiling["gflops"] * 1e9 / result["flops_per_image"]
    axes.axvline(limit, color=CEILING, lw=1.5)
    axes.text(limit, len(rows) - 0.4, "float32 matrix product", color=CEILING, ha="right", va="bottom", fontsize=8)
    axes.set_xlabel(
        f"training images per second; batch {result['batch_size']:,}, {result['devices']} {result['platform']} "
        f"devices, median and range of {result['repeats']}"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", labelsize=8, length=0)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_scaling(result: dict, path: str) -> None:
    """Images per second over batch sizes, and over simulated devices."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    over_sizes, over_devices = result["batch_sizes"], result["devices"]
    _draw_line(left, [row["batch_size"] for row in over_sizes], over_sizes, "one program", OURS)
    left.set_xlabel("global batch size")
    left.set_ylabel("training images per second")
    counts = [row["devices"] for row in over_devices]
    _draw_line(right, counts, [row["strong"] for row in over_devices], "strong: batch 2,048", OURS)
    _draw_line(right, counts, [row["weak"] for row in over_devices], "weak: 64 per device", CEILING)
    right.set_xlabel(f"simulated devices on {result['local_devices']} cores")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_line(axes, x: list[int], rows: list[dict], label: str, colour: str) -> None:
    """Rates with their ranges; see `scaling.measure_rates`."""
    rates = [row["images_per_sec"] for row in rows]
    errors = _errors(rates, [row["range"] for row in rows])
    axes.errorbar(x, rates, yerr=errors, marker="o", color=colour, label=label, capsize=2)


def _errors(rates: list[float], ranges: list[list[float]]) -> list[list[float]]:
    """How far each range reaches below and above its rate, as matplotlib takes it: [2][N]."""
    below = [rate - least for rate, (least, _) in zip(rates, ranges, strict=True)]
    above = [most - rate for rate, (_, most) in zip(rates, ranges, strict=True)]
    return [below, above]
