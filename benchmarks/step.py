"""bench.py step: our training step beside the peers and the ceilings of the machine, in one interleaved run."""

import contextlib
import dataclasses
import importlib.util
import json
import statistics

import jax

from benchmarks import ceilings, ours
from benchmarks.peers import serve
from benchmarks.peers.flax_loop import FlaxLoop
from benchmarks.peers.minimal_loop import MinimalLoop
from benchmarks.timing import (
    Child,
    Contender,
    Tried,
    about_machine,
    fastest,
    in_process,
    interleave,
    ratio,
    try_each,
)
from largebatch.hosts.start import start_jax
from largebatch.nn import convolution
from largebatch.terminal import Console
from largebatch.training.costs import training_costs

DTYPES = ("float32", "bfloat16")
SLOW_CONV_BATCH = 64
MAX_MICRO_BATCH_SIZES = 6  # of ours
JAX_PEERS = {"minimal.py": MinimalLoop, "flax-style loop": FlaxLoop}
TORCH = "PyTorch"


@dataclasses.dataclass(frozen=True)
class Finalists:
    """A peer as it runs best here, and what was tried to find that."""

    contenders: list[Contender]
    tried: list[Tried]


def bench_step(batch_size: int, repeats: int, peers: bool = True) -> dict:
    """Finds the best configuration of each peer, then times all of them, ours and the ceilings in turn."""
    start_jax()
    contenders, tried, notes = our_contenders(batch_size), {}, []
    with contextlib.ExitStack() as stack:
        finalists = {}
        if peers:
            for label, build in JAX_PEERS.items():
                finalists[label] = jax_finalists(label, build, batch_size)
            if importlib.util.find_spec("torch"):
                child = stack.enter_context(Child("benchmarks.peers.torch_step"))
                finalists[TORCH] = torch_finalists(child, batch_size)
            else:
                notes.append("PyTorch is not installed: pip install -r benchmarks/peers/torch_requirements.txt")
        for label, of_peer in finalists.items():
            contenders += of_peer.contenders
            tried[label] = {json.dumps(one.options): one.images_per_sec for one in of_peer.tried}
        limits = [ceilings.matmul_ceiling("float32"), ceilings.matmul_ceiling("bfloat16"), ceilings.copy_ceiling()]
        times = interleave([*contenders, *limits], repeats)
    costs = training_costs(ours.make_network("float32", "dot"), serve.IMAGE_SHAPE)
    peak_flops_per_sec = limits[0].flops / statistics.median(times[limits[0].name])
    return {
        "command": "step",
        "batch_size": batch_size,
        "repeats": repeats,
        "flops_per_image": costs.flops,
        "counted_by_xla": {dtype: _count_by_xla(batch_size, dtype) for dtype in DTYPES},
        "devices": jax.device_count(),
        **about_machine(),
        "peers_tried": tried,
        "notes": notes,
        "rows": [_row(c, times[c.name], costs.flops, peak_flops_per_sec) for c in (*contenders, *limits)],
        "ratios": _ratios(contenders, times),
    }


# ---- ours --------------------------------------------------------------------------------------------


def our_contenders(batch_size: int) -> list[Contender]:
    """Ours with every dtype and micro-batch size, and what was not chosen: the other storage and convolutions."""
    platform, num_devices = jax.default_backend(), jax.device_count()
    auto = {dtype: ours.auto_options(batch_size, dtype, num_devices=num_devices) for dtype in DTYPES}
    contenders = []
    for dtype, options in auto.items():
        sizes = micro_batch_sizes(-(-batch_size // num_devices), platform)[:MAX_MICRO_BATCH_SIZES]
        for size in sorted({*sizes, options.micro_batch_size}):
            name = f"ours, {dtype}, micro-batch {size}"
            if size == options.micro_batch_size:
                name += " (auto)"
            contenders.append(ours.our_step(name, dataclasses.replace(options, micro_batch_size=size)))
    on_device = dataclasses.replace(auto["bfloat16"], storage="on_device")
    contenders.append(ours.our_step("ours, bfloat16, on_device views", on_device))
    if platform == "cpu":  # minutes on the whole batch; and bfloat16 `lax.conv` has no fast path there
        other_convs, dtype, batch_size = ["lax"], "float32", min(batch_size, SLOW_CONV_BATCH)
    else:
        other_convs, dtype = sorted(convolution.CONVS.keys() - {auto["bfloat16"].conv}), "bfloat16"
    for conv in other_convs:
        options = dataclasses.replace(auto["bfloat16"], conv=conv, dtype=dtype, batch_size=batch_size)
        contenders.append(ours.our_step(f"ours, {dtype}, {conv} convolution, batch {batch_size}", options))
    return contenders


def micro_batch_sizes(share: int, platform: str) -> list[int]:
    """Divisors of `share` worth trying, each at least twice the one before; the share itself if it has none."""
    sizes = []
    for size in range(8 if platform == "cpu" else 256, share):
        if share % size == 0 and (not sizes or size >= 2 * sizes[-1]):
            sizes.append(size)
    return sizes or [share]


def _count_by_xla(batch_size: int, dtype: str) -> dict[str, float]:
    auto = ours.auto_options(batch_size, dtype, num_devices=jax.device_count())
    return ours.count_by_xla(dtype, auto.conv, auto.micro_batch_size)


# ---- peers -------------------------------------------------------------------------------------------


def jax_finalists(label: str, build, batch_size: int) -> Finalists:
    """A JAX peer as it is written, and at its best: devices, micro-batch size and dtype."""
    platform, num_devices = jax.default_backend(), jax.local_device_count()
    dtypes = ("float32",) if platform == "cpu" else DTYPES  # bfloat16 `lax.conv` has no fast path on CPU
    choices = []
    for devices in sorted({1, num_devices}):
        for size in (0, *micro_batch_sizes(batch_size // devices, platform)):
            for dtype in dtypes:
                choice = {"batch_size": batch_size, "micro_batch_size": size, "devices": devices, "dtype": dtype}
                choices.append(choice)
    tried = try_each(choices, lambda options: in_process(label, build, options))
    # As the peer is written, where that works at all: on a GPU a whole share may not fit.
    working = fastest(tried)
    whole = [options for options in working if not options["micro_batch_size"]]
    named = {f"{label}, {describe(options)}": options for options in (*whole[:1], working[0])}
    return Finalists([in_process(name, build, options) for name, options in named.items()], tried)


def torch_finalists(child: Child, batch_size: int) -> Finalists:
    """PyTorch at its best of memory layout x autocast x compiler, with its two best micro-batch sizes."""

    def build(options):
        return child.contender(TORCH, options)

    platform = jax.default_backend()
    sizes = [0, *micro_batch_sizes(batch_size, platform)]
    middle = min(128, batch_size) if platform == "cpu" else sizes[len(sizes) // 2]
    choices = []
    for channels_last in (False, True):
        for autocast in (False, True):
            for compiled in (False, True):
                choice = {"batch_size": batch_size, "micro_batch_size": middle, "channels_last": channels_last}
                choices.append({**choice, "autocast": autocast, "compile": compiled})
    by_switches = try_each(choices, build)
    best = fastest(by_switches)[0]
    by_size = try_each([{**best, "micro_batch_size": size} for size in sizes], build)
    # Neighbouring sizes are within noise of each other: the two best of the trial race in earnest.
    finalists = fastest(by_size)[:2]
    contenders = [child.contender(f"{TORCH}, {describe(options)}", options) for options in finalists]
    return Finalists(contenders, [*by_switches, *by_size])


def describe(options: dict) -> str:
    """Options of a peer as a reader wants them."""
    size, devices = options["micro_batch_size"], options.get("devices")
    parts = [f"micro-batch {size}" if size else "whole share at once"]
    if devices is not None:
        parts.append("1 device" if devices == 1 else f"{devices} devices")
    if options.get("dtype", "float32") != "float32":
        parts.append(options["dtype"])
    parts += [name for name in ("channels_last", "autocast", "compile") if options.get(name)]
    return ", ".join(parts)


# ---- the result --------------------------------------------------------------------------------------


def _row(contender: Contender, seconds: list[float], flops_per_image: float, peak_flops_per_sec: float) -> dict:
    median = statistics.median(seconds)
    row = {"name": contender.name, "seconds": seconds, "bytes_per_device": contender.bytes_per_device}
    if contender.images:
        row["images_per_sec"] = contender.images / median
        row["images_per_sec_range"] = [contender.images / max(seconds), contender.images / min(seconds)]
    flops = contender.images * flops_per_image or contender.flops
    if flops:
        row["gflops"] = flops / median / 1e9
        row["share_of_ceiling"] = flops / median / peak_flops_per_sec
    if contender.bytes:
        row["gb_per_sec"] = contender.bytes / median / 1e9
    return row


def _ratios(contenders: list[Contender], times: dict[str, list[float]]) -> dict:
    """Our images/s over those of each peer, by our dtype, with the automatic micro-batch size."""
    auto = {}
    for dtype in DTYPES:
        names = (c for c in contenders if c.name.startswith(f"ours, {dtype}") and c.name.endswith("(auto)"))
        auto[dtype] = next(names)
    return {
        peer.name: {dtype: ratio(mine, peer, times) for dtype, mine in auto.items()}
        for peer in contenders
        if not peer.name.startswith("ours")
    }


def print_step(result: dict) -> None:
    """The result of `bench_step` as a table."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    for column in ("images/s", "range", "GFLOP/s", "of ceiling", "MB/device"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result["rows"]:
        name, span = row["name"], row.get("images_per_sec_range")
        if "gb_per_sec" in row:
            name += f": {row['gb_per_sec']:,.1f} GB/s"
        table.add_row(
            name,
            f"{row['images_per_sec']:,.0f}" if span else "",
            f"{span[0]:,.0f}-{span[1]:,.0f}" if span else "",
            f"{row['gflops']:,.0f}" if "gflops" in row else "",
            f"{row['share_of_ceiling']:.2f}" if "gflops" in row else "",
            f"{row['bytes_per_device'] / 1e6:,.1f}" if row["bytes_per_device"] else "",
        )
    console = Console()
    console.print(
        f"batch {result['batch_size']}, {result['devices']} {result['platform']} devices, "
        f"{result['flops_per_image'] / 1e6:.1f} MFLOP per image, median of {result['repeats']} interleaved "
        "repeats; the ceiling is the float32 matrix product"
    )
    console.print(table)
    for name, by_dtype in result["ratios"].items():
        parts = (f"{r['median']:.2f} in {dtype} ({r['min']:.2f}-{r['max']:.2f})" for dtype, r in by_dtype.items())
        console.print(f"ours / {name}: {', '.join(parts)}")
    for note in result["notes"]:
        console.print(note)
