"""bench.py pack: trials one per device at once, beside the same trials one after the other on all devices."""

import dataclasses
import os
import statistics

import jax

from benchmarks.ours import OurStep, PackedStep, auto_options
from benchmarks.peers.serve import Progress
from benchmarks.timing import Contender, about_machine, interleave, ratio
from largebatch.hosts.start import start_jax

BATCH_SIZES = (16, 64, 256, 1024)
NUM_CPU_DEVICES = 8
DTYPE = "bfloat16"


def bench_pack(repeats: int, batch_sizes=BATCH_SIZES) -> dict:
    """One update of each of as many trials as devices, over batch sizes; a CPU is cut into eight devices."""
    if "JAX_NUM_CPU_DEVICES" not in os.environ and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    start_jax()
    trials = jax.local_device_count()
    return {
        "command": "pack",
        "trials": trials,
        "dtype": DTYPE,
        "repeats": repeats,
        "rows": [compare(batch_size, trials, repeats) for batch_size in batch_sizes],
        **about_machine(),
    }


def compare(batch_size: int, trials: int, repeats: int) -> dict:
    """Images/s of all trials packed and in turn, and the first over the second."""
    packed_step = PackedStep(auto_options(batch_size, DTYPE, num_devices=1))
    one_trial = OurStep(auto_options(batch_size, DTYPE, num_devices=trials))
    packed = Contender("packed", RoundOfTrials(packed_step, 1), batch_size * trials)
    # As many updates of one trial, which take as long as one of each.
    in_turn = Contender("in turn", RoundOfTrials(one_trial, trials), batch_size * trials)
    times = interleave([packed, in_turn], repeats)
    rates = {c.name: c.images / statistics.median(times[c.name]) for c in (packed, in_turn)}
    return {"batch_size": batch_size, "images_per_sec": rates, "gain": ratio(packed, in_turn, times)}


class RoundOfTrials:
    """A round is one call of a step, of so many updates."""

    def __init__(self, step: OurStep, updates: int):
        self._step, self._updates = step, updates

    def run(self, rounds: int) -> None:
        """See `timing.Work`."""
        for _ in range(rounds):
            self._step.run(self._updates)

    def progress(self) -> Progress:
        """See `timing.Work`."""
        progress = self._step.progress()
        return dataclasses.replace(progress, updates=progress.updates // self._updates)


def print_pack(result: dict) -> None:
    """The result of `bench_pack`, a line per batch size."""
    for row in result["rows"]:
        rates, gain = row["images_per_sec"], row["gain"]
        print(
            f"batch {row['batch_size']:>6,}   {result['trials']} trials packed {rates['packed']:7,.0f} images/s, "
            f"in turn {rates['in turn']:7,.0f}: {gain['median']:.2f}x ({gain['min']:.2f}-{gain['max']:.2f})"
        )
