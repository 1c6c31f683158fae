"""bench.py noise: what measuring the gradient's noise scale costs."""

import dataclasses
import statistics

import jax

from benchmarks.ours import auto_options, our_step
from benchmarks.timing import about_machine, interleave, ratio
from largebatch.hosts.start import start_jax

DTYPES = ("float32", "bfloat16")


def bench_noise(batch_size: int, repeats: int) -> dict:
    """The step with a measurement in every update and without one, in turns."""
    start_jax()
    num_devices = jax.device_count()
    rows = []
    for dtype in DTYPES:
        options = auto_options(batch_size, dtype, num_devices=num_devices)
        measuring = our_step(f"{dtype}, measuring", dataclasses.replace(options, noise_every=1))
        plain = our_step(f"{dtype}, plain", dataclasses.replace(options, noise_every=0))
        times = interleave([measuring, plain], repeats)
        rates = {c.name: c.images / statistics.median(times[c.name]) for c in (measuring, plain)}
        rows.append({"dtype": dtype, "images_per_sec": rates, "cost": ratio(plain, measuring, times)})
    return {
        "command": "noise",
        "batch_size": batch_size,
        "micro_batch_size": options.micro_batch_size,
        "devices": num_devices,
        "repeats": repeats,
        "rows": rows,
        **about_machine(),
    }


def print_noise(result: dict) -> None:
    """The result of `bench_noise`, a line per dtype."""
    for row in result["rows"]:
        dtype, rates, cost = row["dtype"], row["images_per_sec"], row["cost"]
        print(
            f"{dtype:8}  {result['devices']} devices, batch {result['batch_size']:,}: "
            f"{rates[f'{dtype}, measuring']:7,.0f} images/s measuring, {rates[f'{dtype}, plain']:7,.0f} without: "
            f"an update takes {cost['median']:.3f} x as long ({cost['min']:.3f}-{cost['max']:.3f})"
        )
