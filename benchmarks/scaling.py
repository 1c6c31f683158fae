"""bench.py scaling: the cost of an image over batch sizes, devices and hosts, and the bytes between devices.

More devices than cores are simulated: together they have the same cores, so a constant rate is the best
there is, and what a rate loses is what the devices cost.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import jax

from benchmarks.ours import OurStep, auto_options
from benchmarks.peers.serve import Progress
from benchmarks.timing import ROOT, Child, Contender, interleave
from largebatch.hosts.start import start_jax
from largebatch.runs.summary import git_commit, versions
from largebatch.util import UserError

BATCH_SIZES = (64, 512, 4096, 32768, 172800)
DEVICE_COUNTS = (1, 2, 4, 8, 16, 32)
HOSTS_AND_DEVICES = ((1, 8), (2, 4), (4, 2))
STRONG_BATCH, WEAK_BATCH_PER_DEVICE = 2048, 64
MICRO_BATCH_SIZE = 16  # of simulated devices
DTYPE = "bfloat16"


def bench_scaling(
    repeats: int, batch_sizes=BATCH_SIZES, device_counts=DEVICE_COUNTS, pods=HOSTS_AND_DEVICES
) -> dict:
    """All three growths. Simulated devices and hosts are of the CPU, whatever the platform is."""
    start_jax()
    return {
        "command": "scaling",
        "dtype": DTYPE,
        "repeats": repeats,
        "batch_sizes": over_batch_sizes(batch_sizes, repeats),
        "devices": over_devices(device_counts, repeats),
        "hosts": over_hosts(pods),
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "local_devices": jax.local_device_count(),
        "versions": versions(),
        "git_commit": git_commit(),
    }


def measure_rates(contenders: list[Contender], repeats: int) -> list[dict]:
    """Images per second of each contender: median, least and most."""
    times = interleave(contenders, repeats)
    rows = []
    for contender in contenders:
        rates = [contender.images / seconds for seconds in times[contender.name]]
        rows.append({"images_per_sec": statistics.median(rates), "range": [min(rates), max(rates)]})
    return rows


# ---- batch sizes -------------------------------------------------------------------------------------


def over_batch_sizes(batch_sizes, repeats: int) -> list[dict]:
    """One compiled program, given each batch size in turn."""
    step = OurStep(auto_options(max(batch_sizes), DTYPE, num_devices=jax.device_count()))
    contenders = [Contender(f"batch {size}", AtBatchSize(step, size), size) for size in batch_sizes]
    rates = measure_rates(contenders, repeats)
    return [{"batch_size": size, **rate} for size, rate in zip(batch_sizes, rates, strict=True)]


class AtBatchSize:
    """A step at one of several batch sizes; it counts the updates that were done at this one."""

    def __init__(self, step: OurStep, batch_size: int):
        self._step, self._batch_size, self._updates = step, batch_size, 0

    def run(self, rounds: int) -> None:
        """See `timing.Work`."""
        before = self._step.updates()
        self._step.batch_size = self._batch_size
        self._step.run(rounds)
        self._updates += self._step.updates() - before

    def progress(self) -> Progress:
        """See `timing.Work`."""
        return dataclasses.replace(self._step.progress(), updates=self._updates)


# ---- devices -----------------------------------------------------------------------------------------


def over_devices(counts, repeats: int) -> list[dict]:
    """Strong and weak scaling (the batch grows with the devices), and the collectives of the programs."""
    with ExitStack() as stack:
        children = [stack.enter_context(_child(count)) for count in counts]
        strong = _contenders(children, counts, [STRONG_BATCH for _ in counts])
        strong_rates = measure_rates(strong, repeats)
        weak = _contenders(children, counts, [WEAK_BATCH_PER_DEVICE * count for count in counts])
        weak_rates = measure_rates(weak, repeats)
        facts = [contender.work.facts() for contender in weak]
    rows = []
    for index, count in enumerate(counts):
        rows.append(
            {
                "devices": count,
                "strong": strong_rates[index],
                "weak": weak_rates[index],
                "weak_batch": WEAK_BATCH_PER_DEVICE * count,
                **traffic(facts[index]["collectives"], facts[index]["params"], count),
            }
        )
    return rows


def _child(num_devices: int) -> Child:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)}
    return Child("benchmarks.ours", env=environment)


def _contenders(children: list[Child], counts, batch_sizes: list[int]) -> list[Contender]:
    """A step in each child, in place of the one before."""
    contenders = []
    for child, count, batch_size in zip(children, counts, batch_sizes, strict=True):
        options = {"batch_size": batch_size, "micro_batch_size": MICRO_BATCH_SIZE, "dtype": DTYPE}
        contenders.append(child.contender(f"{count} devices", options))
    return contenders


def traffic(collectives: list[dict], params: int, num_devices: int) -> dict:
    """What one device sends per update, if each all-reduce is a ring, beside 2 (D - 1) / D x float32 gradients."""
    ring = 2 * (num_devices - 1) / num_devices
    reduced = [one["bytes"] for one in collectives if one["kind"] == "all-reduce"]
    return {
        "collectives": [one["kind"] for one in collectives],
        "bytes_per_update": sum(ring * size for size in reduced),
        "ring_formula": ring * 4 * params,
    }


# ---- hosts -------------------------------------------------------------------------------------------


def over_hosts(pods) -> list[dict]:
    """The same eight devices on one, two and four hosts: whole runs of train.py under largebatch.pod."""
    return [
        {
            "hosts": hosts,
            "devices_per_host": devices_per_host,
            "images_per_sec": train_on_pod(hosts, devices_per_host)["images_per_sec"],
        }
        for hosts, devices_per_host in pods
    ]


def train_on_pod(hosts: int, devices_per_host: int) -> dict:
    """The summary of a short run of train.py on simulated hosts.

    Raises:
      UserError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        pod = [sys.executable, "-m", "largebatch.pod", f"--hosts={hosts}", f"--devices={devices_per_host}", "--"]
        train = [
            sys.executable,
            "train.py",
            f"--config.model.dtype={DTYPE}",
            f"--config.batch.size={STRONG_BATCH}",
            "--config.train.inner_steps=5",
            "--config.train.outer_steps=4",
            f"--config.augment.cache_dir={folder}",
            f"--workdir={folder}/run",
        ]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run([*pod, *train], cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{hosts} hosts ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
        return json.loads((Path(folder) / "run" / "summary.json").read_text())


def print_scaling(result: dict) -> None:
    """The result of `bench_scaling`, a line per size, device count and pod."""
    for row in result["batch_sizes"]:
        print(f"batch {row['batch_size']:>7,}   {row['images_per_sec']:8,.0f} images/s  ({_span(row)})")
    for row in result["devices"]:
        weak, strong = row["weak"], row["strong"]
        print(
            f"{row['devices']:>3} devices   strong {strong['images_per_sec']:6,.0f} images/s ({_span(strong)})   "
            f"weak {weak['images_per_sec']:6,.0f} ({_span(weak)})   "
            f"{'+'.join(row['collectives']) or 'no collective'}, "
            f"{row['bytes_per_update'] / 1e6:.4f} MB sent per update, ring formula {row['ring_formula'] / 1e6:.4f}"
        )
    for row in result["hosts"]:
        layout = f"{row['hosts']} hosts x {row['devices_per_host']} devices"
        print(f"{layout}   {row['images_per_sec']:6,.0f} images/s (train.py, 32x32 images)")


def _span(row: dict) -> str:
    low, high = row["range"]
    return f"{low:,.0f}-{high:,.0f}"
