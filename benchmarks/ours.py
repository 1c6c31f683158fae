"""The training step of train.py as a contender, and its kernels by the time that they take."""

import functools
import gzip
import json
import math
import tempfile
from collections import defaultdict
from pathlib import Path

import jax
import numpy as np

import model
from benchmarks import timing
from build import make_step
from configs import default
from largebatch.config import rules
from largebatch.data.batching import DataSharding
from largebatch.data.cache import DatasetInfo, RowLayout
from largebatch.data.streaming import Resident, Upcoming
from largebatch.hardware.chips import Hardware, auto_dtype
from largebatch.hardware.compiled import CompiledProgram, compile_and_look
from largebatch.hosts import replicas
from largebatch.hosts.start import start_jax
from largebatch.optim.optimizers import Hyperparams
from largebatch.runs.summary import git_commit, versions
from largebatch.training.costs import flops_utilisation, training_costs
from largebatch.training.state import count_params
from largebatch.training.step import make_inner_loop
from plan import RunPlan, make_init, plan_run, possible_storages, state_shapes

INNER_STEPS = 256  # of a call at most
PROFILED_STEPS = 2
NAME_LENGTH, KEPT = 120, 40  # kernels: names of templates go on for thousands of letters


def build(options: dict) -> "OurStep":
    """Build the step of `make_plan` on random images."""
    start_jax()
    plan = make_plan(**options)
    return OurStep(plan, Resident(random_rows(plan.sharding, plan.stored_views)))


def make_plan(batch_size: int, **fields) -> RunPlan:
    """Plan the step that train.py takes by itself for the network of all contenders and Adam.

    Args:
      batch_size: examples per step over all devices.
      fields: fields of the config that differ from the default and from dtype "auto".
    """
    config = default.get_config()
    config.model.name, config.model.dtype, config.optimizer.name = "convnet", "auto", "adam"
    config.optimizer.learning_rate, config.schedule.name = timing.LEARNING_RATE, "constant"
    config.update_from_flattened_dict(fields | {"batch.size": batch_size, "train.inner_steps": INNER_STEPS})
    typed = rules.check(config.to_dict(), model.MODELS)
    if typed.model.dtype == "auto":
        typed = typed.replace(model={"dtype": auto_dtype()})
    num_images = -(-max(batch_size, timing.NUM_IMAGES) // 8)  # each in 8 views
    layout = RowLayout.of({"train": num_images, "val": 0, "test": 0}, timing.IMAGE_SHAPE, np.dtype(np.uint8))
    data = DatasetInfo(layout, timing.NUM_CLASSES, mean=(timing.MEAN,) * 3, std=(timing.STD,) * 3)
    return plan_run(typed, data, Hardware.here(), possible_storages(typed)[0])


@functools.lru_cache(maxsize=1)  # gigabytes, which the next contender mostly wants again
def random_rows(sharding: DataSharding, views: int) -> dict:
    """Draw images for this host's devices in so many views, as flat rows, and the labels of the originals."""
    shards = []
    for index, device in enumerate(jax.local_devices()):
        rng, rows = np.random.default_rng(index), sharding.max_originals
        images = rng.integers(0, 256, (1, rows * views, math.prod(timing.IMAGE_SHAPE)), np.uint8)
        labels = rng.integers(0, timing.NUM_CLASSES, (1, rows), np.int32)
        shards.append(jax.device_put({"images": images, "labels": labels}, device))
    return replicas.stack(shards)


class OurStep:
    """The compiled inner loop on training data: those of `placement.place`, or `Resident` arrays."""

    def __init__(self, plan: RunPlan, data):
        self.plan, self._data, self._next = plan, data, 0
        self._inner_loop = make_inner_loop(make_step(plan))
        hyperparams = Hyperparams.from_config(plan.config.optimizer)
        self._state = replicas.replicate(make_init(plan)(np.uint32(plan.config.seed), hyperparams, None))

    def run(self, count: int) -> None:
        """Do so many steps and wait for them."""
        schedule, end, length = self.plan.schedule, self._next + count, self.plan.inputs_length
        while self._next < end:
            # One more is planned than is done here, so that a stream always has one to read and finds one read.
            upcoming = Upcoming(self.plan.config.seed, self._next, end + 1, schedule.examples_before)
            loaded = self._data.for_steps(upcoming, end - self._next)
            number, inputs = min(loaded.num_steps, length), schedule.inputs(self._next, length)
            self._state, values = self._inner_loop(self._state, loaded.arrays, inputs, np.int32(number))
            jax.block_until_ready((self._state, values))
            self._next += number

    def steps(self) -> int:
        """Return the number of steps so far."""
        return int(replicas.first_replica(self._state.step))

    def params(self) -> list[np.ndarray]:
        """Return all parameters."""
        return jax.tree.leaves(replicas.first_replica(self._state.params))

    def facts(self) -> dict:
        """Return what was planned, FLOPs, the most bytes in use so far on a device, and the machine."""
        plan, memory = self.plan, jax.local_devices()[0].memory_stats() or {}  # a CPU has none
        return {
            "micro_batch_size": plan.micro_batch_size,
            "dtype": str(plan.network.dtype),
            "storage": plan.storage,
            "conv": plan.network.conv,
            "flops_per_image": training_costs(plan.network, plan.image_shape).flops,
            "share_of_peak": flops_utilisation(1.0, 1.0, plan.hardware),  # of a FLOP/s; None where it is not known
            "params": count_params(state_shapes(plan).params),
            "peak_bytes": memory.get("peak_bytes_in_use"),
            "platform": plan.hardware.platform,
            "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "num_devices": jax.device_count(),
            "versions": versions(),
            "commit": git_commit(),
        }

    def compiled(self) -> CompiledProgram:
        """Compile the inner loop once more, for its figures: those of a step of one micro-batch."""
        inputs = self.plan.schedule.inputs(0, self.plan.inputs_length)
        lowered = self._inner_loop.lower(self._state, self._data.arrays, inputs, np.int32(0))
        return compile_and_look(lowered, {"steps": 1, "micro_batches": 1}, jax.default_backend())

    def traffic(self) -> dict:
        """Return the collectives of a step."""
        return {"collectives": self.compiled().collectives}

    def kernels(self) -> dict:
        """Return kernels by their time, from a profile of some steps after a warm-up."""
        self.run(1)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.run(PROFILED_STEPS)
            return read_trace(folder, PROFILED_STEPS)


# ---- kernels, from a trace of jax.profiler -----------------------------------------------------------


def read_trace(folder: str, steps: int) -> dict:
    """Read the kernels of so many steps from a folder that `jax.profiler.trace` wrote.

    Returns:
      "ms_per_step" of all kernels of all devices, and "kernels", the longest first: for each its "ms" and
      "launches" per step, its "name" and the operation of "hlo" that it is launched for.
    """
    (path,) = Path(folder).glob("**/*.trace.json.gz")
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = defaultdict(list)
    for event, own_us in own_times(kernel_events(events)):
        found[event["name"][:NAME_LENGTH], event.get("args", {}).get("hlo_op", "")].append(own_us)
    rows = [
        {"ms": sum(times) / 1e3 / steps, "launches": len(times) / steps, "name": name, "hlo": hlo}
        for (name, hlo), times in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]
    return {"ms_per_step": sum(row["ms"] for row in rows), "kernels": rows[:KEPT]}


def kernel_events(events: list[dict]) -> list[dict]:
    """Return the events of a card's streams, or of a TPU's or CPU's operations."""
    names = {
        (event["name"], event["pid"], event.get("tid")): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name")
    }
    timed, on_device = [event for event in events if event.get("ph") == "X"], []
    for event in timed:
        process = names.get(("process_name", event["pid"], None), "")
        line = names.get(("thread_name", event["pid"], event["tid"]), "")
        if process.startswith("/device:") and (line.startswith("Stream") or line == "XLA Ops"):
            on_device.append(event)
    return on_device or [event for event in timed if "hlo_op" in event.get("args", {})]


def own_times(events: list[dict]) -> list[tuple[dict, float]]:
    """Return each event with its microseconds, less those of events within it, such as the turns of a loop."""
    own, around = {}, defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        open_ = around[event["pid"], event["tid"]]
        while open_ and open_[-1]["ts"] + open_[-1]["dur"] <= event["ts"]:
            open_.pop()
        if open_:
            own[id(open_[-1])] -= event["dur"]
        own[id(event)] = event["dur"]
        open_.append(event)
    return [(event, max(0.0, own[id(event)])) for event in events]
