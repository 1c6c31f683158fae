"""bench.py memory: what a step needs on one device, beside the estimate that train.py refuses by."""

import jax

import model as models
from benchmarks.ours import OurStep
from benchmarks.peers import serve
from experiment import bytes_beside_images
from largebatch.hosts.start import start_jax
from largebatch.runs.provenance import git_commit, versions

BATCH_SIZE = 4096


def bench_memory(micro_batch_sizes: list[int] | None = None) -> dict:
    """Compiles the step for each micro-batch size, in both dtypes, and runs one update of it
    where the device tells what it allocates.

    "compiled" is what the compiler says the program allocates on one device: images, state and work space.
    "peak" is what the device's allocator saw, where it tells; it only ever grows, so sizes ascend.
    """
    start_jax()
    conv = models.resolve_conv("auto", jax.default_backend())
    first = 16 if jax.default_backend() == "cpu" else 256
    rows = []
    for size in micro_batch_sizes or [first * 2**n for n in range(6)]:
        for dtype in ("bfloat16", "float32"):
            options = {"batch_size": BATCH_SIZE, "micro_batch_size": size, "dtype": dtype, "conv": conv}
            ours = OurStep(options)
            parts = bytes_beside_images(ours.network, ours.one_state(), serve.IMAGE_SHAPE, size)
            parts = {"images": ours.shard_bytes()} | parts
            analysis = ours.compiled().memory_analysis()
            stats = jax.local_devices()[0].memory_stats()
            if stats:
                ours.run(1)
                stats = jax.local_devices()[0].memory_stats()
            compiled = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
            compiled += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
            rows.append(
                {
                    "micro_batch_size": size,
                    "dtype": dtype,
                    "estimate": sum(parts.values()),
                    "estimate_parts": parts,
                    "compiled": compiled,
                    "work_space": analysis.temp_size_in_bytes,
                    "peak": stats and stats["peak_bytes_in_use"],
                }
            )
    return {
        "command": "memory",
        "batch_size": BATCH_SIZE,
        "conv": conv,
        "rows": rows,
        "devices": jax.device_count(),
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "versions": versions(),
        "git_commit": git_commit(),
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
