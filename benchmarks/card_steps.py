"""The rows of `bench.py card` about the step: ceilings, beside PyTorch, variants, starts, kernels.

Each function that measures takes the deadline of its row, by `time.monotonic`, and returns plain JSON.
"""

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import ours
from benchmarks.card_sizes import Size
from benchmarks.card_workers import OURS, TORCH, Workers, environment, is_installed
from benchmarks.timing import Child, ChildStep, Contender, interleave, ratio
from largebatch.hardware.chips import Hardware
from largebatch.nn.convolution import CONVS
from largebatch.training.views import STORAGES
from largebatch.util import UserError

LEAST_SEC = {"ceilings": 10.0, "step": 45.0, "variants": 25.0, "start": 40.0, "profile": 30.0}
STEM_CHANNELS = (4, 8)  # of PyTorch, beside the image's own 3
WARM_UP = 3  # updates: torch.compile compiles in the first, records a CUDA graph in the second
NO_GRAPHS = "--xla_gpu_enable_command_buffer="  # no kernel in a CUDA graph
# What XLA may be told, by platform; each is measured beside the step without it.
XLA_FLAGS = {
    "gpu": (
        NO_GRAPHS,
        "--xla_gpu_enable_command_buffer=+WHILE",  # XLA's own choice, and loops
        "--xla_gpu_experimental_enable_conv_fusion=true",
    ),
    "cpu": ("--xla_cpu_multi_thread_eigen=false",),
}
NO_TORCH = "PyTorch is not installed: pip install -r benchmarks/peers/torch_requirements.txt"


@dataclasses.dataclass(frozen=True)
class Bench:
    """The processes and sizes that all rows share."""

    workers: Workers
    size: Size
    platform: str
    dtype: str

    def auto(self, batch_size: int) -> dict:
        """The options of our step as train.py chooses them."""
        return {
            "batch_size": batch_size,
            "micro_batch_size": "auto",
            "dtype": self.dtype,
            "conv": "auto",
            "storage": "auto",
            "num_images": self.size.num_images,
        }

    def time(self, *contenders: Contender) -> dict[str, list[float]]:
        """Seconds of an update of each, in turn."""
        return interleave(list(contenders), self.size.repeats, self.size.min_timed_sec)


def rows(make_row: Callable, workers: Workers, size: Size, machine: dict, folder: str) -> list:
    """The rows of all sections but the recipes and the profiles.

    Args:
      make_row: `card.Row`.
      machine: as `Workers.machine` says.
      folder: for compilation caches.
    """
    bench = Bench(workers, size, machine["platform"], machine["dtype"])
    make = functools.partial(_row, make_row, size)
    ceilings = [
        make(
            "ceilings", "matrix product, bfloat16", measure_ceiling, bench, {"kind": "matmul", "dtype": "bfloat16"}
        ),
        make("ceilings", "matrix product, float32", measure_ceiling, bench, {"kind": "matmul", "dtype": "float32"}),
        make("ceilings", "memory copy", measure_ceiling, bench, {"kind": "copy"}),
    ]
    steps = [make("step", f"step at {batch:,}", measure_step, bench, batch) for batch in size.batch_sizes]
    variants = [
        make("variants", f"{name} at {batch:,}", measure_variant, bench, bench.auto(batch) | changes, flags)
        for batch in size.variants
        for name, changes, flags in variants_at(batch, size, bench.platform, chosen(bench, batch, machine))
    ]
    starts = [
        make("start", f"start at {batch:,}", measure_start, bench, batch, str(Path(folder) / f"start-{batch}"))
        for batch in size.variants
    ]
    return [*ceilings, *steps, *variants, *starts]


def profile_rows(make_row: Callable, workers: Workers, size: Size, machine: dict) -> list:
    """Return the rows of kernels. On cards without graphs, in which a trace would not tell whose a kernel is."""
    flags = NO_GRAPHS if machine["platform"] == "gpu" else ""
    make = functools.partial(_row, make_row, size)
    return [
        make("profile", f"kernels at {batch:,}", measure_kernels, workers, size, batch, updates, flags)
        for batch, updates in size.profiled_updates.items()
    ]


def _row(make_row, size: Size, section: str, name: str, measure: Callable, *arguments):
    return make_row(section, name, functools.partial(measure, *arguments), size.patience * LEAST_SEC[section])


def chosen(bench: Bench, batch_size: int, machine: dict) -> dict:
    """The options of our step as train.py chooses them, in full."""
    hardware = Hardware(machine["platform"], machine["device_kind"], machine["devices"])
    return dataclasses.asdict(ours.resolve(ours.StepOptions(**bench.auto(batch_size)), hardware))


def variants_at(batch_size: int, size: Size, platform: str, chosen: dict) -> list[tuple[str, dict, str]]:
    """Return the variants of the step that train.py chooses: a name, options that differ, flags of XLA.

    Nothing here is streamed. Convolutions as products are for CPUs, where those by XLA take minutes.
    """
    storages = [name for name in STORAGES if name != "streamed"]
    convs = [name for name in CONVS if (name == "dot") == (platform == "cpu")]
    sizes = size.micro_batch_sizes[batch_size]
    options = [
        *((f"storage {name}", {"storage": name}) for name in storages),
        *((f"convolution {name}", {"conv": name}) for name in convs),
        *((f"micro-batch {number:,}", {"micro_batch_size": number}) for number in sizes),
    ]
    variants = [(name, changes, "") for name, changes in options if chosen | changes != chosen]
    return [*variants, *((flags, {}, flags) for flags in XLA_FLAGS.get(platform, ()))]


# ---- figures --------------------------------------------------------------------------------------------


def figures(contender: Contender, seconds: list[float]) -> dict:
    """Milliseconds of an update, and images/s by their median."""
    ms = [1e3 * of_update for of_update in seconds]
    return {
        "ms": {"median": statistics.median(ms), "min": min(ms), "max": max(ms)},
        "images_per_sec": contender.images / statistics.median(seconds),
    }


def our_figures(contender: Contender, seconds: list[float], xla_flags: str = "") -> dict:
    """The figures of our step, and what it was built with."""
    facts = contender.work.facts()
    return {
        "options": facts["options"] | ({"xla_flags": xla_flags} if xla_flags else {}),
        **figures(contender, seconds),
        "peak_bytes": facts["peak_bytes"],
    }


# ---- rows -----------------------------------------------------------------------------------------------


def measure_ceiling(bench: Bench, options: dict, deadline: float) -> dict:
    """TFLOP/s of a matrix product, or GB/s of a copy."""
    child = bench.workers.child(OURS, deadline)
    child.ask(build=options, name="ceiling")
    ceiling = child.contender_of("ceiling", "ceiling", 0)
    facts, seconds = ceiling.work.facts(), bench.time(ceiling)["ceiling"]
    work, scale, unit = (facts["flops"], 1e12, "TFLOP/s") if facts["flops"] else (facts["bytes"], 1e9, "GB/s")
    rates = [work / scale / of_round for of_round in seconds]
    child.ask(build={"kind": "machine"}, name="ceiling")  # in its place, so that its memory is free
    return {"unit": unit, "rate": work / scale / statistics.median(seconds), "range": [min(rates), max(rates)]}


def measure_step(bench: Bench, batch_size: int, deadline: float) -> dict:
    """Our step as train.py chooses it, beside PyTorch at its best; without it, if it cannot be measured."""
    mine = bench.workers.step(bench.auto(batch_size), deadline, keep=True)
    alone = bench.time(mine)
    found = {"batch_size": batch_size, "ours": our_figures(mine, alone[mine.name])}
    found["flops_per_image"] = mine.work.facts()["flops_per_image"]
    if not is_installed("torch"):
        return found | {"pytorch": None, "note": NO_TORCH}
    tried = []
    try:
        best = best_torch(bench, batch_size, deadline, tried)
        times = bench.time(mine, best)
        theirs = figures(best, times[best.name]) | {"options": json.loads(best.name), **best.work.facts()}
    except UserError as error:
        return found | best_tried(found["ours"], tried) | {"note": str(error)}
    finally:
        bench.workers.stop(TORCH)
    found["ours"] = our_figures(mine, times[mine.name])
    return found | {"pytorch": theirs | {"tried": tried}, "ratio": ratio(mine, best, times)}


def best_tried(ours: dict, tried: list[dict]) -> dict:
    """PyTorch's fastest figures, not in turns with ours, where time was over before it could have any."""
    working = [one for one in tried if "ms" in one]
    if not working:
        return {"pytorch": None}
    best = min(working, key=lambda one: one["ms"]["median"])
    return {
        "pytorch": best | {"tried": tried},
        "ratio": {"median": ours["images_per_sec"] / best["images_per_sec"]},
    }


def best_torch(bench: Bench, batch_size: int, deadline: float, tried: list[dict]) -> Contender:
    """PyTorch's fastest options; `tried` gets the figures of all that were tried, while there is time for another.

    Micro-batches first, then the best of them with a padded stem. Without its compiler only where that fails.

    Raises:
      UserError: it sees no card where JAX sees one, or nothing works.
    """
    child = bench.workers.child(TORCH, deadline)
    plain = {"batch_size": batch_size, "channels_last": True, "autocast": bench.dtype == "bfloat16"}
    choices = [{**plain, **one} for one in torch_choices(bench, batch_size)]
    working = {}
    while choices:
        options, begin = choices.pop(0), time.monotonic()
        name = json.dumps(options)
        try:
            contender = child.contender(name, options)
            if bench.platform == "gpu" and contender.work.facts()["device"] != "cuda":
                raise UserError("PyTorch finds no card where JAX finds one")
            contender.work.run(WARM_UP)
            working[name] = figures(contender, bench.time(contender)[name]), contender
            tried.append({"options": options, **working[name][0]})
        except UserError as error:
            if not child.is_running or "no card" in str(error):
                raise
            tried.append({"options": options, "error": " ".join(str(error).split())[:200]})
        if not choices and not any("stem_channels" in one["options"] for one in tried):
            choices = next_choices(options, working)
        if working and time.monotonic() + 2.5 * (time.monotonic() - begin) > deadline:
            break  # the next one, and the turns beside ours, may not fit
    if not working:
        raise UserError(f"PyTorch: nothing works: {tried[-1]['error']}")
    return min(working.values(), key=lambda pair: pair[0]["ms"]["median"])[1]


def torch_choices(bench: Bench, batch_size: int) -> list[dict]:
    """Micro-batches and compilers, before the stem; launches limit only small batches on a card."""
    sizes = bench.size.torch_micro_batch_sizes[batch_size]
    modes = ["reduce-overhead", ""] if bench.platform == "gpu" and 0 in sizes else [""]
    return [{"micro_batch_size": size, "compile": True, "mode": mode} for size in sizes for mode in modes]


def next_choices(last: dict, working: dict[str, tuple[dict, Contender]]) -> list[dict]:
    """The fastest with padded stems; if nothing works, the last without its compiler, which may be missing."""
    if working:
        fastest = json.loads(min(working, key=lambda name: working[name][0]["ms"]["median"]))
        return [{**fastest, "stem_channels": channels} for channels in STEM_CHANNELS]
    return [{**last, "compile": False, "mode": ""}] if last["compile"] else []


def measure_variant(bench: Bench, options: dict, xla_flags: str, deadline: float) -> dict:
    """A variant of our step, in turns with the one that train.py chooses; the ratio is of images/s."""
    batch_size = options["batch_size"]
    auto = bench.workers.step(bench.auto(batch_size), deadline, keep=True)
    try:
        variant = bench.workers.step(options, deadline, xla_flags=xla_flags)
        name = f"{variant.name} {xla_flags}"
        variant = Contender(name, variant.work, variant.images)
        times = bench.time(auto, variant)
        return {
            "batch_size": batch_size,
            "ours": our_figures(variant, times[name], xla_flags),
            "auto": our_figures(auto, times[auto.name]),
            "ratio": ratio(variant, auto, times),
        }
    finally:
        if xla_flags:
            bench.workers.stop(OURS, xla_flags)


def measure_start(bench: Bench, batch_size: int, cache_dir: str, deadline: float) -> dict:
    """Seconds from the start of a process to the end of its first update, with an empty and a filled cache.

    How many programs are in the cache after either shows whether the second found them.
    """
    env = environment(
        JAX_COMPILATION_CACHE_DIR=cache_dir,
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    found = {"batch_size": batch_size, "cached_programs": []}
    for state in ("cold_sec", "warm_sec"):
        begin = time.monotonic()
        with Child(OURS, env) as child:
            child.deadline = deadline
            child.ask(build={"kind": "step", **bench.auto(batch_size)}, name="step")
            step = ChildStep(child, "step")
            step.run(1)
            found[state] = time.monotonic() - begin
            if step.progress().updates != 1:
                raise UserError("the first update did not happen")
        found["cached_programs"].append(len(list(Path(cache_dir).glob("*-cache"))))
    return found


def measure_kernels(
    workers: Workers, size: Size, batch_size: int, updates: int, xla_flags: str, deadline: float
) -> dict:
    """Measure the kernels of an update of the step that train.py chooses, by the time that they take."""
    child = workers.child(OURS, deadline, xla_flags)
    options = Bench(workers, size, "", "auto").auto(batch_size)
    child.ask(build={"kind": "profile", "updates": updates, **options}, name="variant")
    return {"batch_size": batch_size, **child.ask(facts=True, name="variant")}
