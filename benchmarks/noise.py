"""bench.py noise: what measuring the gradient's noise scale costs."""

import statistics

import jax

import model as models
from benchmarks.ours import our_step
from benchmarks.timing import about_machine, interleave, ratio
from experiment import resolve_micro_batch_size
from largebatch.hosts.start import start_jax

DTYPES = ("float32", "bfloat16")


def bench_noise(batch_size: int, repeats: int) -> dict:
    """The step with and without the measurement, in turns. On one device it is between micro-batches."""
    start_jax()
    platform, count = jax.default_backend(), jax.device_count()
    size = min(resolve_micro_batch_size("auto"), -(-batch_size // count))
    rows = []
    for dtype in DTYPES:
        options = {
            "batch_size": batch_size,
            "micro_batch_size": size,
            "dtype": dtype,
            "conv": models.resolve_conv("auto", platform),
        }
        measuring = our_step(f"{dtype}, measuring", options)
        plain = our_step(f"{dtype}, plain", options | {"noise_decay": None})
        times = interleave([measuring, plain], repeats)
        rates = {c.name: c.images / statistics.median(times[c.name]) for c in (measuring, plain)}
        rows.append({"dtype": dtype, "images_per_sec": rates, "cost": ratio(plain, measuring, times)})
    return {
        "command": "noise",
        "batch_size": batch_size,
        "micro_batch_size": size,
        "devices": count,
        "repeats": repeats,
        "rows": rows,
    } | about_machine()


def print_noise(result: dict) -> None:
    """The result of `bench_noise`, a line per dtype."""
    for row in result["rows"]:
        dtype, cost = row["dtype"], row["cost"]
        measuring, plain = (row["images_per_sec"][f"{dtype}, {which}"] for which in ("measuring", "plain"))
        print(
            f"{dtype:8}  {result['devices']} devices, batch {result['batch_size']:,}: {measuring:7,.0f} images/s "
            f"measuring, {plain:7,.0f} without: an update takes {cost['median']:.3f} x as long "
            f"({cost['min']:.3f}-{cost['max']:.3f})"
        )
