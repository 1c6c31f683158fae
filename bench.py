"""Throughput beside the hardware limit and beside the plain way, interleaved in one run.

    python bench.py step [--batch_size 512] [--repeats 7] [--json FILE]
    python bench.py input --path EuroSAT.zip [--json FILE]
    python bench.py loop --path runs/eurosat [--json FILE]

Every figure is of synchronised work, as a median over repeats with its spread; contenders take turns
within a repeat, so that a noisy machine is noisy to all. A contender whose work did not happen (its
parameters or update count stand still) is an error, not a figure.
"""

import contextlib
import itertools
import json
import logging
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from absl import flags

import augment
import model as models
import train
from configs import eurosat
from largebatch import UserError, batching, data, devices, metrics
from largebatch.config import EXIT_FAILED, EXIT_USAGE, UsageError, parse_plain_flags
from largebatch.optimizers import create_optimizer
from largebatch.state import create_state
from largebatch.step import make_inner_loop
from peers import host_loop_pmap

IMAGE_SHAPE, NUM_CLASSES, LEARNING_RATE = (64, 64, 3), 10, 1e-3
MATMUL_SIZE = 2048
MIN_TIMED_SEC = 0.5
MAX_ROUNDS = 4096
PLAIN_BATCH_SIZES = (16, 32, 64, 128, 256, 512)
MICRO_BATCH_SIZES = (16, 32, 64, 128, 256)


class Contender(NamedTuple):
    """Something to time: `run(n)` does n rounds and waits; `check` raises if work did not happen."""

    name: str
    run: Callable[[int], None]
    check: Callable[[], None]
    images_per_round: int
    bytes_per_device: int


def seconds_per_round(contender: Contender, rounds: int) -> float:
    """Seconds of one round, over `rounds` rounds in one go."""
    begin = time.perf_counter()
    contender.run(rounds)
    return (time.perf_counter() - begin) / rounds


def interleave(contenders: list[Contender], repeats: int) -> dict[str, list[float]]:
    """Seconds per round of each contender, `repeats` times in turn, after a warm-up of its own."""
    rounds = {}
    for contender in contenders:
        contender.run(1)
        fitting = int(MIN_TIMED_SEC / seconds_per_round(contender, 1))
        rounds[contender.name] = min(max(1, fitting), MAX_ROUNDS)
    times = {contender.name: [] for contender in contenders}
    for _ in range(repeats):
        for contender in contenders:
            times[contender.name].append(seconds_per_round(contender, rounds[contender.name]))
    for contender in contenders:
        contender.check()
    return times


def tree_bytes(tree) -> int:
    """Bytes of a pytree with a leading device axis on one device."""
    return sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(tree))


def matmul_ceiling(dtype: str) -> tuple[Contender, float]:
    """A large matrix product on every device at once; its rate is the ceiling. Also FLOPs per round."""
    shape = (jax.local_device_count(), MATMUL_SIZE, MATMUL_SIZE)
    operand = jax.pmap(lambda x: x.astype(dtype))(np.random.default_rng(0).standard_normal(shape, np.float32))
    product = jax.pmap(lambda a: a @ a)
    last = []

    def run(rounds):
        for _ in range(rounds):
            last[:] = [jax.block_until_ready(product(operand))]

    def check():
        block = np.asarray(operand[0, :8], np.float64) @ np.asarray(operand[0], np.float64)
        if not np.allclose(np.asarray(last[0][0, :8], np.float64), block, rtol=0.1, atol=2):
            raise UserError("matrix product: wrong result")

    return Contender("matrix product", run, check, 0, 2 * operand[0].nbytes), 2.0 * MATMUL_SIZE**3 * shape[0]


def network_and_state(conv: str, dtype: str):
    """The seed network, its parameters and a fresh LAMB state on all devices."""
    network = models.create_model("convnet", NUM_CLASSES, dtype, conv)
    params = train.init_params(network, IMAGE_SHAPE, 0)
    optimizer = create_optimizer("lamb", 0.9, 0.0)
    return network, optimizer, create_state(params, optimizer, 0)


def our_step(
    name: str, conv: str, dtype: str, batch_size: int, micro_batch_size: int, storage: str = "expanded"
) -> Contender:
    """Our inner loop: uint8 images resident, `rounds` updates in one call."""
    network, optimizer, state = network_and_state(conv, dtype)
    num_originals = -(-max(batch_size, 4096) // augment.NUM_VIEWS)
    deal = batching.Deal(num_originals, jax.device_count(), augment.NUM_VIEWS)
    image = int(np.prod(IMAGE_SHAPE))
    rng = np.random.default_rng(0)
    views = augment.NUM_VIEWS if storage == "expanded" else 1
    shards = [
        {
            "images": rng.integers(0, 256, (1, deal.max_originals * views, image), np.uint8),
            "labels": rng.integers(0, NUM_CLASSES, (1, deal.max_originals), np.int32),
        }
        for _ in jax.local_devices()
    ]
    shards = devices.stack([jax.device_put(s, d) for s, d in zip(shards, jax.local_devices(), strict=True)])
    logits_fn = train.make_logits_fn(network, IMAGE_SHAPE, (127.5,) * 3, (64.0,) * 3)
    inner_loop = make_inner_loop(
        train.cross_entropy(logits_fn), optimizer, augment.make_read(storage, IMAGE_SHAPE), deal, micro_batch_size
    )
    length = MAX_ROUNDS
    held = {"state": devices.replicate(state), "updates": 0}
    before = devices.first_replica(held["state"].params)

    def run(rounds):
        steps = np.arange(held["updates"], held["updates"] + length) * batch_size
        plan = train.Plan(
            *batching.epoch_and_offset(deal, steps),
            np.full(length, batch_size, np.int32),
            np.full(length, LEARNING_RATE, np.float32),
        )
        held["state"], values = inner_loop(held["state"], shards, plan, np.int32(rounds))
        jax.block_until_ready((held["state"], values))
        held["updates"] += rounds

    def check():
        after = devices.first_replica(held["state"])
        if int(after.step) != held["updates"]:
            raise UserError(f"{name}: {after.step} updates happened, {held['updates']} were timed")
        check_changed(name, before, after.params)

    return Contender(name, run, check, batch_size, tree_bytes(shards) + tree_bytes(held["state"]))


def check_changed(name: str, before, after) -> None:
    """Every parameter array must have moved, to finite numbers."""
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if np.array_equal(old, new) or not np.isfinite(new).all():
            raise UserError(f"{name}: parameters did not change to finite numbers; nothing was timed")


def plain_step(batch_size: int, dtype: str) -> Contender:
    """The host loop over pmap that the seed runs: float32 images, one gradient evaluation a device."""
    network, _, state = network_and_state("lax", dtype)
    optimizer = optax.lamb(LEARNING_RATE)
    count, per_device = jax.local_device_count(), max(1, batch_size // jax.device_count())
    rng = np.random.default_rng(0)
    images = jax.pmap(lambda x: x)(rng.standard_normal((count, per_device, *IMAGE_SHAPE), np.float32))
    labels = jax.pmap(lambda x: x)(rng.integers(0, NUM_CLASSES, (count, per_device), np.int32))
    update = host_loop_pmap.make_update(lambda params, x: network.apply({"params": params}, x), optimizer)
    held = {"params": devices.replicate(state.params), "opt": devices.replicate(optimizer.init(state.params))}
    before = devices.first_replica(held["params"])
    name = f"plain host loop, batch {batch_size}"

    def run(rounds):
        for _ in range(rounds):
            held["params"], held["opt"] = jax.block_until_ready(update(held["params"], held["opt"], images, labels))

    def check():
        check_changed(name, before, devices.first_replica(held["params"]))

    size = tree_bytes((images, labels, held["params"], held["opt"]))
    return Contender(name, run, check, per_device * jax.device_count(), size)


def bench_step(batch_size: int, repeats: int, dtype: str) -> dict:
    """Our step, ours with lax.conv, the plain host loop at its best batch size, and the ceiling."""
    devices.start()
    conv = models.resolve_conv("auto", jax.default_backend())
    other = "lax" if conv == "dot" else "dot"
    share = -(-batch_size // jax.device_count())
    auto = min(share, train.resolve_micro_batch_size("auto", jax.default_backend()))
    few = min(batch_size, 64)  # the slow convolution would take minutes on the whole batch
    probes = [plain_step(size, dtype) for size in PLAIN_BATCH_SIZES if size >= jax.device_count()]
    rates = {
        p.name: p.images_per_round / statistics.median(t)
        for p, t in zip(probes, interleave(probes, 3).values(), strict=True)
    }
    best_plain = max(probes, key=lambda probe: rates[probe.name])
    same = plain_step(batch_size, dtype)
    ceiling, matmul_flops = matmul_ceiling(dtype)
    contenders = [
        *(
            our_step(
                f"ours, micro-batch {size}" + (" (auto)" if size == auto else ""), conv, dtype, batch_size, size
            )
            for size in sorted({*(s for s in MICRO_BATCH_SIZES if s <= share), auto})
        ),
        our_step("ours, on_device views", conv, dtype, batch_size, auto, "on_device"),
        our_step(f"ours, {other} convolution, batch {few}", other, dtype, few, min(auto, few)),
        same,
        *([] if best_plain.name == same.name else [best_plain]),
        ceiling,
    ]
    times = interleave(contenders, repeats)
    network, _, _ = network_and_state("dot", dtype)
    flops = models.training_costs(network, IMAGE_SHAPE).flops
    ceiling_rate = matmul_flops / statistics.median(times[ceiling.name]) / 1e9
    rows = []
    for contender in contenders:
        seconds = statistics.median(times[contender.name])
        low, high = min(times[contender.name]), max(times[contender.name])
        images = contender.images_per_round
        gflops = (images * flops if images else matmul_flops) / seconds / 1e9
        rows.append(
            {
                "name": contender.name,
                "images_per_sec": images / seconds if images else None,
                "images_per_sec_range": [images / high, images / low] if images else None,
                "gflops": gflops,
                "share_of_ceiling": gflops / ceiling_rate,
                "bytes_per_device": contender.bytes_per_device,
                "seconds": times[contender.name],
            }
        )
    return {
        "command": "step",
        "batch_size": batch_size,
        "dtype": dtype,
        "repeats": repeats,
        "flops_per_image": flops,
        "devices": jax.device_count(),
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "versions": metrics.versions(),
        "git_commit": metrics.git_commit(),
        "plain_images_per_sec_by_batch": rates,
        "rows": rows,
        "ratio_to_plain_same_batch": ratio(times, contenders, "(auto)", same.name),
        "ratio_to_plain_best_batch": ratio(times, contenders, "(auto)", best_plain.name),
    }


def ratio(times: dict, contenders: list[Contender], ours: str, other: str) -> float:
    """Median over repeats of (images/s of ours) / (images/s of the other), repeat by repeat."""
    by_name = {c.name: c for c in contenders}
    ours = next(name for name in by_name if ours in name)
    scale = by_name[ours].images_per_round / by_name[other].images_per_round
    return statistics.median(scale * b / a for a, b in zip(times[ours], times[other], strict=True))


def print_step(result: dict) -> None:
    """The result of `bench_step` as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in ("", "images/s", "range", "GFLOP/s", "of ceiling", "MB/device"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for row in result["rows"]:
        images, span = row["images_per_sec"], row["images_per_sec_range"]
        table.add_row(
            row["name"],
            f"{images:,.0f}" if images else "",
            f"{span[0]:,.0f}-{span[1]:,.0f}" if images else "",
            f"{row['gflops']:,.0f}",
            f"{row['share_of_ceiling']:.2f}",
            f"{row['bytes_per_device'] / 1e6:,.1f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(
        f"batch {result['batch_size']}, {result['dtype']}, {result['devices']} {result['platform']} devices, "
        f"{result['flops_per_image'] / 1e6:.1f} MFLOP per image, median of {result['repeats']} interleaved repeats"
    )
    console.print(table)
    console.print(
        f"ours / plain host loop: {result['ratio_to_plain_same_batch']:.2f} at the same batch, "
        f"{result['ratio_to_plain_best_batch']:.2f} against its best batch"
    )


def bench_input(path: str) -> dict:
    """Seconds of each part of bringing the zip or folder `path` onto the devices, in a fresh cache."""
    devices.start()
    config = eurosat.get_config()
    config.dataset.path = path
    clock = metrics.Clock()
    with tempfile.TemporaryDirectory() as folder:
        config.augment.cache_dir = folder
        with clock.measure("decode"):
            dataset = data.find_source(config.dataset.name, path=path).load()
        num_images, num_bytes = len(dataset.labels), dataset.images.nbytes
        del dataset
        with clock.measure("decode, expand and cache"):
            augment.prepare_cache(config)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        with clock.measure("open a sound cache"):
            cache = augment.prepare_cache(config)
        with clock.measure("read, verify and place"):
            placed = augment.place(cache, config.seed)
            jax.block_until_ready((placed.train, placed.val_images))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = dict(clock.seconds)
    seconds["expand and cache"] = seconds["decode, expand and cache"] - seconds["decode"]
    on_devices = placed.train["images"].nbytes + placed.val_images.nbytes
    return {
        "command": "input",
        "images": num_images,
        "decoded_bytes": num_bytes,
        "seconds": seconds,
        "training_image_bytes_on_devices": placed.train["images"].nbytes,
        "expected_training_image_bytes": cache.count("train") * augment.NUM_VIEWS * int(np.prod(cache.image_shape)),
        "place_gb_per_sec": on_devices / seconds["read, verify and place"] / 1e9,
        "peak_resident_bytes": peak,
        "peak_resident_bytes_before_placing": before,
        "devices": jax.device_count(),
        "platform": jax.default_backend(),
        "versions": metrics.versions(),
        "git_commit": metrics.git_commit(),
    }


def print_input(result: dict) -> None:
    """The result of `bench_input`, a line each."""
    for name, value in result["seconds"].items():
        print(f"{name:28} {value:8.2f} s")
    print(f"{'place':28} {result['place_gb_per_sec']:8.2f} GB/s")
    for name in ("training_image_bytes_on_devices", "expected_training_image_bytes", "peak_resident_bytes"):
        print(f"{name.replace('_', ' '):36} {result[name] / 1e9:.4f} GB")


def bench_loop(path: str) -> dict:
    """What a finished run spent outside its devices: the share of each outer loop but the first that was
    neither training nor evaluation, from the wall clock of its metrics."""
    try:
        rows = [json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text().splitlines()]
        walls = [after["wall_sec"] - before["wall_sec"] for before, after in itertools.pairwise(rows)]
        busy = [row["train_sec"] + row["eval_sec"] for row in rows[1:]]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--path: {path} holds no readable metrics.jsonl ({error})") from error
    if not walls:
        raise UserError(f"--path: {path} has {len(rows)} outer loops; at least 2 are needed")
    shares = [1 - device / wall for device, wall in zip(busy, walls, strict=True)]
    return {
        "command": "loop",
        "run": path,
        "outer_loops": len(shares),
        "overhead_median": statistics.median(shares),
        "overhead_max": max(shares),
        "evaluation_share": sum(row["eval_sec"] for row in rows[1:]) / sum(walls),
        "images_per_sec": statistics.median(row["images_per_sec"] for row in rows),
    }


def print_loop(result: dict) -> None:
    """The result of `bench_loop`, a line."""
    print(
        f"{result['outer_loops']} outer loops: {result['overhead_median']:.2%} outside the devices "
        f"({result['overhead_max']:.2%} at most), {result['evaluation_share']:.1%} evaluation, "
        f"{result['images_per_sec']:,.0f} images/s"
    )


def main() -> int:
    """Runs one command; returns the exit code."""
    logging.basicConfig(format="%(message)s")
    flags.DEFINE_integer("batch_size", 512, "step: examples per update over all devices.", lower_bound=1)
    flags.DEFINE_integer("repeats", 7, "step: interleaved repeats.", lower_bound=1)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "step: arithmetic of all contenders.")
    flags.DEFINE_string("path", None, "input: EuroSAT.zip or its folder; loop: a run folder.")
    flags.DEFINE_string("json", None, "Write all figures to this file.")
    values = flags.FLAGS
    commands = {
        "step": (lambda: bench_step(values.batch_size, values.repeats, values.dtype), print_step),
        "input": (lambda: bench_input(values.path), print_input),
        "loop": (lambda: bench_loop(values.path), print_loop),
    }
    try:
        given = parse_plain_flags(sys.argv)
        if len(given) != 1 or given[0] not in commands:
            raise UsageError(f"give one command: {' | '.join(commands)}; found {' '.join(given) or 'none'}")
        if given != ["step"] and not values.path:
            raise UsageError("--path: not given; input needs EuroSAT.zip or its folder, loop a run folder")
    except UsageError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        with contextlib.ExitStack() as stack:  # a file that cannot be written is found before the work
            file = stack.enter_context(open(values.json, "w")) if values.json else None
            bench, show = commands[given[0]]
            result = bench()
            show(result)
            if file:
                json.dump(result, file, indent=1)
    except (UserError, OSError) as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
