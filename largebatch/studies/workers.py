"""Several worker processes of a study on this machine, each with its own accelerators where there are several."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from largebatch.hosts.preemption import SIGNALS
from largebatch.pod import die_with_parent
from largebatch.util import UserError

MEMORY_FRACTION = 0.9  # of a GPU, which its workers share
POLL_SEC = 0.2
FIRST_PORT = 8476  # of TPU processes


def accelerators() -> tuple[str, list[str]]:
    """Return the kind of this machine's accelerators, "gpu", "tpu" or "cpu", and their numbers, without JAX."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return ("gpu", visible.split(",")) if visible else ("cpu", [])
    gpus = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    if gpus:
        return "gpu", sorted(gpus, key=int)
    chips = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    return ("tpu" if chips else "cpu"), [str(number) for number in range(len(chips))]


def environments(count: int, kind: str, devices: list[str]) -> list[dict[str, str]]:
    """Return what to add to the environment of each worker.

    Args:
      kind, devices: see `accelerators`.
    Raises:
      UserError: more workers than TPU chips, which cannot be shared.
    """
    if kind == "cpu":
        return [{} for _ in range(count)]
    if kind == "gpu":
        added = [{"CUDA_VISIBLE_DEVICES": ",".join(devices[i % len(devices) :: count])} for i in range(count)]
        workers_per_gpu = -(-count // len(devices))
        if workers_per_gpu > 1:
            share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{MEMORY_FRACTION / workers_per_gpu:.3f}"}
            added = [environment | share for environment in added]
        return added
    if count > len(devices):
        raise UserError(f"--workers: {count}; allowed: up to {len(devices)}, the TPU chips of this machine")
    return [
        {
            "TPU_VISIBLE_CHIPS": devices[index],
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_PORT": str(FIRST_PORT + index),
            "TPU_PROCESS_ADDRESSES": f"localhost:{FIRST_PORT + index}",
        }
        for index in range(count)
    ]


def run_workers(count: int, study: Path) -> int:
    """Run this process's command `count` times as workers, and pass signals on.

    The first begins alone, until it has checked the study and written study.json. A worker that dies leaves its
    trial to the others.

    Returns:
      The exit code: 0, or that of the first worker that did not end well.
    """
    added = environments(count, *accelerators())
    workers: list[subprocess.Popen] = []

    def start(index: int) -> None:
        workers.append(
            subprocess.Popen(
                # The last flag counts; TTY_COMPATIBLE keeps the bars of several workers off one terminal.
                [sys.executable, *sys.argv, "--workers=1", f"--worker={index}"],
                stdin=subprocess.DEVNULL,
                env=os.environ | added[index] | {"PYTHONUNBUFFERED": "1", "TTY_COMPATIBLE": "0"},
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # it saves and puts its trial back
            )
        )

    def pass_on(number: int, _) -> None:
        for worker in workers:
            worker.send_signal(number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    start(0)
    while workers[0].poll() is None and not (study / "study.json").exists():
        time.sleep(POLL_SEC)
    if workers[0].poll() in (None, 0):
        for index in range(1, count):
            start(index)
    codes = [worker.wait() for worker in workers]
    for index, code in enumerate(codes):
        if code < 0:
            name = signal.Signals(-code).name
            print(
                f"worker {index} was killed by {name}; start again with --study {study} to go on", file=sys.stderr
            )
    failed = [128 - code if code < 0 else code for code in codes if code]
    return failed[0] if failed else 0
