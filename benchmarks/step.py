"""bench.py step: our training step beside the peers and the ceilings of the machine, in one interleaved run."""

import contextlib
import importlib.util
import json
import statistics

import jax

import model as models
from benchmarks import ours
from benchmarks.peers import flax_loop, seed_loop, serve
from benchmarks.timing import Child, Contender, best_of, in_process, interleave, ratio
from experiment import resolve_micro_batch_size
from largebatch.hosts.start import start_jax
from largebatch.nn import convolution
from largebatch.runs.provenance import git_commit, versions
from largebatch.training.costs import training_costs

SLOW_CONV_BATCH = 64


def micro_batch_sizes(share: int, platform: str) -> list[int]:
    """Divisors of `share` worth trying, each at least twice the one before; the share itself if it has none."""
    sizes = []
    for size in range(8 if platform == "cpu" else 256, share):
        if share % size == 0 and (not sizes or size >= 2 * sizes[-1]):
            sizes.append(size)
    return sizes or [share]


def bench_step(batch_size: int, repeats: int, peers: bool = True) -> dict:
    """Finds the best configuration of each peer, then times all of them, ours and the ceilings in turn."""
    start_jax()
    platform, count = jax.default_backend(), jax.device_count()
    share = -(-batch_size // count)
    tried, notes = {}, []
    with contextlib.ExitStack() as stack:
        contenders = our_contenders(batch_size, share, platform)
        if peers:
            for module, label in ((seed_loop, "seed's loop"), (flax_loop, "flax-style loop")):
                contenders += _jax_peer(module, label, batch_size, platform, tried)
            if importlib.util.find_spec("torch"):
                child = stack.enter_context(Child("benchmarks.peers.torch_step"))
                contenders += _torch_peer(child, batch_size, platform, tried)
            else:
                notes.append("PyTorch is not installed: pip install -r benchmarks/peers/torch_requirements.txt")
        ceilings = [ours.matmul_ceiling("float32"), ours.matmul_ceiling("bfloat16"), ours.copy_ceiling()]
        times = interleave([*contenders, *ceilings], repeats)
    flops = training_costs(models.create_model("convnet", serve.NUM_CLASSES, "float32", "dot"), serve.IMAGE_SHAPE)
    ours_by_dtype = {dtype: _auto_ours(contenders, dtype) for dtype in ("float32", "bfloat16")}
    return {
        "command": "step",
        "batch_size": batch_size,
        "repeats": repeats,
        "flops_per_image": flops.flops,
        "counted_by_xla": {d: ours.count_by_xla(d, *_auto(share, platform)) for d in ("float32", "bfloat16")},
        "devices": count,
        "platform": platform,
        "device_kind": jax.devices()[0].device_kind,
        "versions": versions(),
        "git_commit": git_commit(),
        "peers_tried": tried,
        "notes": notes,
        "rows": [_row(c, times, flops.flops, ceilings) for c in (*contenders, *ceilings)],
        "ratios": {
            contender.name: {dtype: ratio(mine, contender, times) for dtype, mine in ours_by_dtype.items()}
            for contender in contenders
            if not contender.name.startswith("ours")
        },
    }


def _auto(share: int, platform: str) -> tuple[str, int]:
    """Convolution and micro-batch size that train.py takes by itself."""
    return models.resolve_conv("auto", platform), min(share, resolve_micro_batch_size("auto"))


def our_contenders(batch_size: int, share: int, platform: str) -> list[Contender]:
    """Ours with every dtype and micro-batch size, and what was not chosen: the other storage and convolutions."""
    conv, auto = _auto(share, platform)
    sizes = sorted({*micro_batch_sizes(share, platform)[:6], auto})
    made = []
    for dtype in ("float32", "bfloat16"):
        for size in sizes:
            name = f"ours, {dtype}, micro-batch {size}" + (" (auto)" if size == auto else "")
            options = {"batch_size": batch_size, "micro_batch_size": size, "dtype": dtype, "conv": conv}
            made.append(ours.our_step(name, options))
    options = {"batch_size": batch_size, "micro_batch_size": auto, "dtype": "bfloat16", "conv": conv}
    made.append(ours.our_step("ours, bfloat16, on_device views", options | {"storage": "on_device"}))
    for other in ("lax",) if platform == "cpu" else sorted(convolution.CONVS.keys() - {conv}):
        few = min(batch_size, SLOW_CONV_BATCH) if platform == "cpu" else batch_size  # minutes on the whole batch
        options |= {"conv": other, "dtype": "float32" if platform == "cpu" else "bfloat16", "batch_size": few}
        made.append(ours.our_step(f"ours, {options['dtype']}, {other} convolution, batch {few}", options))
    return made


def _auto_ours(contenders: list[Contender], dtype: str) -> Contender:
    """Ours as train.py runs it: with the automatic micro-batch size."""
    return next(c for c in contenders if c.name.startswith(f"ours, {dtype}") and c.name.endswith("(auto)"))


def _jax_peer(module, label: str, batch_size: int, platform: str, tried: dict) -> list[Contender]:
    """The peer as it is written, and at its best: devices, micro-batch size and dtype."""
    count = jax.local_device_count()
    options = []
    for used in sorted({1, count}):
        for size in (0, *micro_batch_sizes(batch_size // used, platform)):
            # bfloat16 `lax.conv` has no fast path on CPU.
            for dtype in ("float32",) if platform == "cpu" else ("float32", "bfloat16"):
                options.append(
                    {"batch_size": batch_size, "micro_batch_size": size, "devices": used, "dtype": dtype}
                )
    best, rates = best_of(options, lambda choice: in_process(label, module.build, choice))
    tried[label] = rates
    # As the peer is written, where that works at all: on a GPU a whole share may not fit.
    works = [choice for choice in options if not choice["micro_batch_size"] and rates[json.dumps(choice)]]
    whole = [max(works, key=lambda choice: rates[json.dumps(choice)])] if works else []
    names = {f"{label}, {_say(choice)}": choice for choice in (*whole, best)}
    return [in_process(name, module.build, choice) for name, choice in names.items()]


def _torch_peer(child: Child, batch_size: int, platform: str, tried: dict) -> list[Contender]:
    """PyTorch at its best of memory layout x autocast x compiler, with its two best micro-batch sizes."""

    def build(choice):
        return child.contender("PyTorch", choice)

    sizes = [0, *micro_batch_sizes(batch_size, platform)]
    middle = min(128, batch_size) if platform == "cpu" else sizes[len(sizes) // 2]
    switches = [
        {"batch_size": batch_size, "micro_batch_size": middle}
        | {"channels_last": layout, "autocast": autocast, "compile": compiled}
        for layout in (False, True)
        for autocast in (False, True)
        for compiled in (False, True)
    ]
    best, tried["PyTorch"] = best_of(switches, build)
    _, rates = best_of([best | {"micro_batch_size": size} for size in sizes], build)
    tried["PyTorch"] |= rates
    # Neighbouring sizes are within noise of each other: the two best of the trial race in earnest.
    order = sorted((choice for choice in rates if rates[choice]), key=rates.get, reverse=True)
    finalists = [json.loads(choice) for choice in order[:2]]
    return [child.contender(f"PyTorch, {_say(choice)}", choice) for choice in finalists]


def _say(options: dict) -> str:
    """Options as a reader wants them."""
    parts = [f"micro-batch {options['micro_batch_size']}" if options["micro_batch_size"] else "whole share at once"]
    if "devices" in options:
        parts.append(f"{options['devices']} device{'s' * (options['devices'] > 1)}")
    if options.get("dtype", "float32") != "float32":
        parts.append(options["dtype"])
    parts += [name for name in ("channels_last", "autocast", "compile") if options.get(name)]
    return ", ".join(parts)


def _row(contender: Contender, times: dict, flops_per_image: float, ceilings: list[Contender]) -> dict:
    seconds = sorted(times[contender.name])
    median = statistics.median(seconds)
    flops = contender.images * flops_per_image or contender.flops
    peak = ceilings[0].flops / statistics.median(times[ceilings[0].name])
    row = {"name": contender.name, "seconds": times[contender.name], "bytes_per_device": contender.bytes_per_device}
    if contender.images:
        row |= {
            "images_per_sec": contender.images / median,
            "images_per_sec_range": [contender.images / seconds[-1], contender.images / seconds[0]],
        }
    if flops:
        row |= {"gflops": flops / median / 1e9, "share_of_ceiling": flops / median / peak}
    if contender.bytes:
        row |= {"gb_per_sec": contender.bytes / median / 1e9}
    return row


def print_step(result: dict) -> None:
    """The result of `bench_step` as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in ("", "images/s", "range", "GFLOP/s", "of ceiling", "MB/device"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for row in result["rows"]:
        span = row.get("images_per_sec_range")
        table.add_row(
            row["name"] + (f": {row['gb_per_sec']:,.1f} GB/s" if "gb_per_sec" in row else ""),
            f"{row['images_per_sec']:,.0f}" if span else "",
            f"{span[0]:,.0f}-{span[1]:,.0f}" if span else "",
            f"{row['gflops']:,.0f}" if "gflops" in row else "",
            f"{row['share_of_ceiling']:.2f}" if "gflops" in row else "",
            f"{row['bytes_per_device'] / 1e6:,.1f}" if row["bytes_per_device"] else "",
        )
    console = Console(width=max(120, Console().width), highlight=False)
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
