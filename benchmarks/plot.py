"""Pictures of what bench.py measured."""

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

OURS, THEIRS, CEILING = "#1f5aa6", "#b0b7c3", "#c2410c"


def plot_step(result: dict, path: str) -> None:
    """Images per second of every contender as bars with their range, the float32 ceiling as a line."""
    rows = [row for row in result["rows"] if "images_per_sec" in row][::-1]
    ceiling = next(row for row in result["rows"] if row["name"].startswith("matrix product, float32"))
    figure, axes = pyplot.subplots(figsize=(9, 0.9 + 0.32 * len(rows)), layout="constrained")
    rates = [row["images_per_sec"] for row in rows]
    spans = [[r["images_per_sec"] - r["images_per_sec_range"][0] for r in rows]]
    spans += [[r["images_per_sec_range"][1] - r["images_per_sec"] for r in rows]]
    colours = [OURS if row["name"].startswith("ours") else THEIRS for row in rows]
    axes.barh([row["name"] for row in rows], rates, xerr=spans, color=colours, ecolor="#444", capsize=2, height=0.7)
    for index, row in enumerate(rows):
        end = row["images_per_sec_range"][1] + 0.012 * max(rates)
        axes.text(end, index, f"{row['images_per_sec']:,.0f}", va="center", fontsize=8, backgroundcolor="white")
    axes.margins(x=0.12, y=0.01)
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
    _line(left, result["batch_sizes"], "batch_size", lambda row: row, "one program", OURS)
    left.set_xlabel("global batch size")
    left.set_ylabel("training images per second")
    _line(right, result["devices"], "devices", lambda row: row["strong"], "strong: batch 2,048", OURS)
    _line(right, result["devices"], "devices", lambda row: row["weak"], "weak: 64 per device", CEILING)
    right.set_xlabel(f"simulated devices on {result['local_devices']} cores")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _line(axes, rows, x, pick, label, colour) -> None:
    rates = [pick(row)["images_per_sec"] for row in rows]
    spans = [
        [rate - pick(row)["range"][0] for rate, row in zip(rates, rows, strict=True)],
        [pick(row)["range"][1] - rate for rate, row in zip(rates, rows, strict=True)],
    ]
    axes.errorbar([row[x] for row in rows], rates, yerr=spans, marker="o", color=colour, label=label, capsize=2)
