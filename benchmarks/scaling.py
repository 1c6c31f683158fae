"""bench.py scaling: the cost of an image over batch sizes, devices and hosts, and the bytes between devices.

More devices than cores are simulated: together they have the same cores, so a constant rate is the best
there is, and what a rate loses is what the devices cost.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import jax

import model as models
from benchmarks.ours import OurStep
from benchmarks.peers import serve
from benchmarks.timing import ROOT, Child, Contender, interleave
from experiment import resolve_micro_batch_size
from largebatch.errors import UserError
from largebatch.hosts.start import start_jax
from largebatch.runs.provenance import git_commit, versions

BATCH_SIZES = (64, 512, 4096, 32768, 172800)
DEVICE_COUNTS = (1, 2, 4, 8, 16, 32)
HOSTS_AND_DEVICES = ((1, 8), (2, 4), (4, 2))
STRONG_BATCH, WEAK_BATCH_PER_DEVICE = 2048, 64
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


def _rates(contenders: list[Contender], repeats: int) -> list[dict]:
    rows = []
    for contender, times in zip(contenders, interleave(contenders, repeats).values(), strict=True):
        rates = sorted(contender.images / seconds for seconds in times)
        rows.append({"images_per_sec": statistics.median(rates), "range": [rates[0], rates[-1]]})
    return rows


def over_batch_sizes(sizes, repeats: int) -> list[dict]:
    """One compiled program, given each batch size in turn."""
    platform = jax.default_backend()
    options = {
        "batch_size": max(sizes),
        "micro_batch_size": resolve_micro_batch_size("auto"),
        "dtype": DTYPE,
        "conv": models.resolve_conv("auto", platform),
    }
    ours = OurStep(options)
    rows = _rates([_of_batch_size(ours, size) for size in sizes], repeats)
    return [{"batch_size": size} | row for size, row in zip(sizes, rows, strict=True)]


def _of_batch_size(ours: OurStep, batch_size: int) -> Contender:
    step, done = ours.step(), [0]

    def run(rounds):
        before, ours.batch_size = step.updates(), batch_size
        ours.run(rounds)
        done[0] += step.updates() - before

    return Contender(f"batch {batch_size}", run, lambda: serve.digest(step) | {"updates": done[0]}, batch_size)


def over_devices(counts, repeats: int) -> list[dict]:
    """Weak (the batch grows with the devices) and strong scaling, and the collectives of the programs."""
    with ExitStack() as stack:
        children = [stack.enter_context(_child(count)) for count in counts]
        rows = []
        for kind in ("strong", "weak"):
            contenders = []
            for count, child in zip(counts, children, strict=True):
                batch_size = STRONG_BATCH if kind == "strong" else WEAK_BATCH_PER_DEVICE * count
                options = {"batch_size": batch_size, "micro_batch_size": 16, "dtype": DTYPE}
                contenders.append(child.contender(f"{count} devices", options))
            rows.append(_rates(contenders, repeats))
        facts = [
            child.ask(facts=True, name=f"{count} devices") for count, child in zip(counts, children, strict=True)
        ]
    return [
        {"devices": count, "strong": strong, "weak": weak, "weak_batch": WEAK_BATCH_PER_DEVICE * count}
        | traffic(fact["collectives"], fact["params"], count)
        for count, strong, weak, fact in zip(counts, *rows, facts, strict=True)
    ]


def traffic(collectives: list[dict], params: int, count: int) -> dict:
    """What one device sends per update, if each all-reduce is a ring, beside 2 (D - 1) / D x float32 gradients."""
    ring = 2 * (count - 1) / count
    return {
        "collectives": [found["kind"] for found in collectives],
        "bytes_per_update": sum(ring * found["bytes"] for found in collectives if found["kind"] == "all-reduce"),
        "ring_formula": ring * 4 * params,
    }


def _child(count: int) -> Child:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(count)}
    return Child("benchmarks.ours", env=environment)


def over_hosts(pods) -> list[dict]:
    """The same eight devices on one, two and four hosts: whole runs of train.py under largebatch.pod."""
    rows = []
    for hosts, per_host in pods:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "largebatch.pod", f"--hosts={hosts}", f"--devices={per_host}", "--"]
            command += [
                sys.executable,
                "train.py",
                f"--config.model.dtype={DTYPE}",
                f"--config.batch.size={STRONG_BATCH}",
            ]
            command += ["--config.train.inner_steps=5", "--config.train.outer_steps=4"]
            command += [f"--config.augment.cache_dir={folder}", f"--workdir={folder}/run"]
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise UserError(f"{hosts} hosts ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
            summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
        rows.append({"hosts": hosts, "devices_per_host": per_host, "images_per_sec": summary["images_per_sec"]})
    return rows


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
    return f"{row['range'][0]:,.0f}-{row['range'][1]:,.0f}"
