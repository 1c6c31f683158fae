"""bench.py growth: step time of full-batch training on TPU v3 slices, from FLOPs, bytes and link speeds.

With --targets the same updates are compiled for those slices, as a check of the model. No device is touched.
docs/batches.md has the assumptions, the table and what it says.
"""

import math
from dataclasses import dataclass

import jax

import examine
import model
from benchmarks.compile import Case
from benchmarks.peers import serve
from largebatch.config import rules
from largebatch.hardware.targets import find_target
from largebatch.training.costs import training_costs
from largebatch.util import UserError

IMAGES = 172_800
PARAMS_BYTES = 4 * 422_602  # float32
FEATURES = (32, 64, 128, 256)  # of the network's convolutions
BATCH_SIZES = (512, 4096, 32768, IMAGES)
COMPILED = Case("eurosat_v3_32", (("batch.virtual_shards", 2160),))  # at least a shard for every core
DEVICE_COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Core:
    """One TPU v3 core; two of them are a chip.

    Jouppi et al., "A domain-specific supercomputer for training deep neural networks", CACM 2020: 123 TFLOP/s
    bfloat16 and 900 GB/s of memory a chip, four links of 656 Gbit/s to its neighbours on a 2-D torus.
    """

    flops: float = 61.5e12
    memory_bytes_per_sec: float = 450e9
    link_bytes_per_sec: float = 656e9 / 8
    # Not in the paper; the order of magnitude of a message to a neighbour, and of one turn of a device loop.
    hop_sec: float = 1e-6
    overhead_sec: float = 20e-6


TPU_V3 = Core()


def memory_bytes_per_image() -> int:
    """Bytes that an image's gradient moves through memory in bfloat16.

    Each product reads its operands and writes its result once; everything else is fused into a neighbour. An output
    is written, read by its activation's gradient, and its gradient is written, read, written once more behind the
    activation and read by two products: 6 times. An input is read twice, its gradient written once; the
    image itself needs no gradient.
    """
    side, _, channels = serve.IMAGE_SHAPE
    numbers = 0
    for layer, features in enumerate(FEATURES):
        inputs = side * side * channels
        side, channels = side // 2, features
        outputs = side * side * channels
        numbers += 6 * outputs + (2 if layer == 0 else 3) * inputs
    return 2 * numbers


def step_time(num_devices: int, images: int = IMAGES, core: Core = TPU_V3) -> dict[str, float]:
    """Seconds of the parts of one update on `num_devices` cores.

    Compute and memory traffic overlap; the all-reduce waits for both and the optimizer for it. The
    all-reduce goes along both axes of the torus, in both directions, over chips.
    """
    network = model.create_model("convnet", serve.NUM_CLASSES, "bfloat16", "lax")
    share = math.ceil(images / num_devices)
    arithmetic = share * training_costs(network, serve.IMAGE_SHAPE).flops / core.flops
    memory = share * memory_bytes_per_image() / core.memory_bytes_per_sec
    chips = max(1, num_devices // 2)
    hops = 4 * (math.sqrt(chips) - 1)
    sent = 2 * (chips - 1) / chips * PARAMS_BYTES
    all_reduce = sent / (4 * core.link_bytes_per_sec) + hops * core.hop_sec
    # LAMB reads parameters, gradients and two moments, writes three of them, and reads once more for its norms.
    optimizer = 9 * PARAMS_BYTES / core.memory_bytes_per_sec
    return {
        "flops": arithmetic,
        "memory": memory,
        "all_reduce": all_reduce,
        "optimizer": optimizer,
        "total": max(arithmetic, memory) + all_reduce + optimizer + core.overhead_sec,
    }


def efficiency(num_devices: int, images: int) -> float:
    """Share of the cores' time that one core would have needed for the same update."""
    return step_time(1, images)["total"] / (num_devices * step_time(num_devices, images)["total"])


def compiled_times(targets: str) -> dict[int, float]:
    """Seconds of a full-batch update without its all-reduce, by the compiler's cycles, by number of cores.

    Args:
      targets: TPU v3 slices, as train.py --compile_for names them, with commas between.
    """
    times = {}
    for name in targets.split(","):
        target = find_target(name)
        if target.hardware.device_kind != "TPU v3":
            raise UserError(f"--targets: {name!r}; allowed with growth: v3 slices")
        config = rules.check(COMPILED.load().to_dict(), model.MODELS)
        update = examine.compile_for(config, target).programs["update"]
        times[target.hardware.num_devices] = update.cycles / target.chip.clock_hz
        jax.clear_caches()
    return times


def bench_growth(targets: str | None = None) -> dict:
    """The model over device counts at the full batch, and how many cores each batch size keeps busy.

    Args:
      targets: slices to compile for, see `compiled_times`.
    """
    compiled = compiled_times(targets) if targets else {}
    rows = []
    for count in DEVICE_COUNTS:
        row = {"devices": count, **step_time(count), "efficiency": efficiency(count, IMAGES)}
        row["images_per_sec"] = IMAGES / row["total"]
        if targets:
            row["compiled"] = compiled.get(count)
        rows.append(row)
    limits = []
    for batch_size in BATCH_SIZES:
        count = max(2**n for n in range(12) if efficiency(2**n, batch_size) >= 0.5)
        limits.append({"batch_size": batch_size, "devices": count, "total": step_time(count, batch_size)["total"]})
    return {
        "command": "growth",
        "images": IMAGES,
        "memory_bytes_per_image": memory_bytes_per_image(),
        "rows": rows,
        "limits": limits,
    }


def print_growth(result: dict) -> None:
    """The result of `bench_growth` as Markdown tables."""
    columns = ("cores", "images per core", "arithmetic ms", "memory ms", "all-reduce ms", "update ms", "M images/s")
    checked = any("compiled" in row for row in result["rows"])
    columns += ("efficiency", "compiled, without all-reduce, ms") if checked else ("efficiency",)
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for row in result["rows"]:
        parts = (f"{row[name] * 1e3:.3f}" for name in ("flops", "memory", "all_reduce", "total"))
        line = (
            f"| {row['devices']:,} | {math.ceil(result['images'] / row['devices']):,} | {' | '.join(parts)} "
            f"| {row['images_per_sec'] / 1e6:.1f} | {row['efficiency']:.2f} |"
        )
        if checked:
            line += f" {row['compiled'] * 1e3:.3f} |" if row["compiled"] else " |"
        print(line)
    print("\n| batch | cores that are at least half used | update ms |")
    print("|---|---|---|")
    for row in result["limits"]:
        print(f"| {row['batch_size']:,} | {row['devices']:,} | {row['total'] * 1e3:.3f} |")
