"""bench.py memory: what a step needs on one device, beside the estimate that train.py refuses by."""

import jax

from benchmarks.ours import OurStep, StepOptions, auto_conv
from benchmarks.peers import serve
from benchmarks.timing import about_machine
from largebatch.hosts.start import start_jax
from largebatch.training.costs import bytes_beside_images

BATCH_SIZE = 4096
DTYPES = ("bfloat16", "float32")


def bench_memory(micro_batch_sizes: list[int] | None = None) -> dict:
    """Measures the step for each micro-batch size, in both dtypes.

    "compiled" is what the compiler says the program allocates on one device: images, state and work space.
    "peak" is what the device's allocator saw, where it tells; it only ever grows, so sizes ascend.
    """
    start_jax()
    smallest = 16 if jax.default_backend() == "cpu" else 256
    sizes = micro_batch_sizes or [smallest * 2**n for n in range(6)]
    return {
        "command": "memory",
        "batch_size": BATCH_SIZE,
        "conv": auto_conv(),
        "rows": [measure(size, dtype) for size in sizes for dtype in DTYPES],
        "devices": jax.device_count(),
        **about_machine(),
    }


def measure(micro_batch_size: int, dtype: str) -> dict:
    """Compiles the step, and runs one update of it where the device tells what it allocates."""
    step = OurStep(StepOptions(BATCH_SIZE, micro_batch_size, dtype, auto_conv()))
    parts = {"images": step.data_bytes()}
    platform = jax.default_backend()
    parts.update(
        bytes_beside_images(step.network, step.state_shapes(), serve.IMAGE_SHAPE, micro_batch_size, platform)
    )
    analysis = step.compiled().memory_analysis()
    compiled = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    compiled += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    peak = None
    if jax.local_devices()[0].memory_stats():
        step.run(1)
        peak = jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]
    return {
        "micro_batch_size": micro_batch_size,
        "dtype": dtype,
        "estimate": sum(parts.values()),
        "estimate_parts": parts,
        "compiled": compiled,
        "work_space": analysis.temp_size_in_bytes,
        "peak": peak,
    }


def print_memory(result: dict) -> None:
    """The result of `bench_memory`, a line per micro-batch size and dtype."""
    for row in result["rows"]:
        peak = f"{row['peak'] / 1e6:10,.1f} MB peak" if row["peak"] else ""
        print(
            f"micro-batch {row['micro_batch_size']:>6}, {row['dtype']:8}  "
            f"{row['compiled'] / 1e6:10,.1f} MB compiled "
            f"{row['estimate'] / 1e6:10,.1f} MB estimated  ({row['estimate'] / row['compiled']:.2f}){peak}"
        )
