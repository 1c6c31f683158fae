"""bench.py pack: trials one per device at once, beside the same trials one after the other on all devices."""

import os
import statistics

import jax
import numpy as np

import model as models
from benchmarks.ours import OurStep
from benchmarks.peers import serve
from benchmarks.timing import MAX_ROUNDS, Contender, about_machine, interleave, ratio
from experiment import resolve_micro_batch_size
from largebatch.hosts.start import start_jax
from largebatch.training.step import Plan

BATCH_SIZES = (16, 64, 256, 1024)
NUM_CPU_DEVICES = 8
DTYPE = "bfloat16"


class PackedStep(OurStep):
    """As many trials as devices, each on all images and on a device of its own."""

    packed = True

    def plan(self) -> Plan:
        """Inputs of the next updates of each trial."""
        return jax.tree.map(lambda x: np.stack([x] * jax.local_device_count()), super().plan())

    def run(self, rounds: int) -> None:
        """Does `rounds` updates of each trial in one call and waits for them."""
        updates = np.full(jax.local_device_count(), rounds, np.int32)
        self.state, values = self.inner_loop(self.state, self.shards, self.plan(), updates)
        jax.block_until_ready((self.state, values))
        self.updates += rounds


def bench_pack(repeats: int, batch_sizes=BATCH_SIZES) -> dict:
    """One update of each of as many trials as devices, over batch sizes; a CPU is cut into eight devices."""
    if "JAX_NUM_CPU_DEVICES" not in os.environ and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    start_jax()
    platform, count = jax.default_backend(), jax.local_device_count()
    rows = []
    for batch_size in batch_sizes:
        options = {
            "batch_size": batch_size,
            "micro_batch_size": min(batch_size, resolve_micro_batch_size("auto")),
            "dtype": DTYPE,
            "conv": models.resolve_conv("auto", platform),
        }
        packed = _contender("packed", PackedStep(options), count, 1)
        share = min(options["micro_batch_size"], -(-batch_size // count))
        in_turn = _contender("in turn", OurStep(options | {"micro_batch_size": share}), count, count)
        times = interleave([packed, in_turn], repeats)
        rates = {c.name: c.images / statistics.median(times[c.name]) for c in (packed, in_turn)}
        rows.append({"batch_size": batch_size, "images_per_sec": rates, "gain": ratio(packed, in_turn, times)})
    return {
        "command": "pack",
        "trials": count,
        "dtype": DTYPE,
        "repeats": repeats,
        "rows": rows,
    } | about_machine()


def _contender(name: str, ours: OurStep, trials: int, calls: int) -> Contender:
    """A round is an update of each of `trials` trials, by `calls` calls of the step."""
    step = ours.step()

    def run(rounds):
        for _ in range(min(rounds, MAX_ROUNDS // calls)):
            ours.run(calls)

    def look():
        seen = serve.digest(step)
        return seen | {"updates": seen["updates"] // calls}

    return Contender(name, run, look, ours.batch_size * trials)


def print_pack(result: dict) -> None:
    """The result of `bench_pack`, a line per batch size."""
    for row in result["rows"]:
        rates, gain = row["images_per_sec"], row["gain"]
        print(
            f"batch {row['batch_size']:>6,}   {result['trials']} trials packed {rates['packed']:7,.0f} images/s, "
            f"in turn {rates['in turn']:7,.0f}: {gain['median']:.2f}x ({gain['min']:.2f}-{gain['max']:.2f})"
        )
