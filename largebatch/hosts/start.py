"""Start of JAX on this host, joined with other hosts if there are any."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
from jax import lax

from largebatch.hosts import memory, preemption
from largebatch.hosts.clusters import FIELDS, Place, check_alone, find_place, seen, share_gpus
from largebatch.hosts.collectives import gather, named_collective_errors
from largebatch.hosts.rendezvous import ADVICE, meet
from largebatch.hosts.replicas import AXIS, pmap
from largebatch.util import UserError

HEARTBEAT_TIMEOUT_SEC = 20
JOIN_SEC = 300.0
FAILING_SEC = 5.0  # for the other hosts to print their errors, which are most often the same
LATE_SEC = 60  # beyond the limit, for JAX, which would abort without a message for users
# Seconds for which a host may wait for another one's work in a collective. JAX notices a dead host by itself.
PATIENCE_FLAGS = {
    "xla_cpu_collective_timeout_seconds": 10**6,
    "xla_cpu_collective_call_terminate_timeout_seconds": 10**6,
}

_host_index = 0  # by the rendezvous; JAX's needs its devices, which may be what failed


def start_jax(
    platform: str = "auto",
    coordinator_address: str | None = None,
    num_hosts: int | None = None,
    host_index: int | None = None,
    join_sec: float = JOIN_SEC,
) -> None:
    """Start JAX on this host, joined with other hosts if there are any.

    Missing arguments are found by the variables of largebatch.pod, Slurm, Open MPI and GKE, else by JAX (TPU VMs,
    Kubernetes with its Python client); if nothing is given or found, this host is alone.

    Args:
      platform: "cpu", "gpu", "tpu", or "auto" for what JAX finds.
      coordinator_address: "HOST:PORT" of host 0, or "HOST" or ":PORT" alone.
      num_hosts, host_index: number of hosts, and index of this host; 1 host is alone.
      join_sec: seconds for which the hosts wait for each other.
    Raises:
      UserError: no device of `platform` here, or other hosts are missing.
    """
    _use_every_core()
    for handler in logging.getLogger().handlers:
        handler.addFilter(_in_a_line)
    if platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    # JAX's own service would take SIGTERM, which `preemption` handles.
    jax.config.update("jax_enable_preemption_service", False)
    if not jax.distributed.is_initialized():
        place = find_place(coordinator_address, num_hosts, host_index)
        if place is None:
            _join_as_jax_finds(join_sec)
        elif place.num_hosts > 1:
            _join(place, join_sec)
    if jax.distributed.is_initialized():
        patience = [f"--{name}={seconds}" for name, seconds in PATIENCE_FLAGS.items()]
        os.environ["XLA_FLAGS"] = " ".join([*patience, os.environ.get("XLA_FLAGS", "")])  # of two the last counts
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # an empty AssertionError if no plugin knows the platform
        reason = (str(error) or "JAX knows none").splitlines()[0]
        raise UserError(
            f"devices.platform: {platform!r} has no device on this host ({reason}); "
            f"allowed: a platform that JAX finds here, or 'auto'"
        ) from error
    if jax.process_count() > 1:
        # Connect all devices by collectives that take no time to compile: Gloo waits only 30 s for the hosts in its
        # first one. Later some hosts may compile the training loop while others find it in their cache.
        gather(np.zeros(1, np.float32))
        with named_collective_errors():
            ones = np.ones(jax.local_device_count(), np.float32)
            jax.block_until_ready(pmap(lambda x: lax.psum(x, AXIS))(ones))


def wait_for_failing_hosts() -> None:
    """Give the other hosts time to print their errors and exit: JAX aborts them as soon as host 0 is gone."""
    if _host_index == 0:
        for number in preemption.SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        time.sleep(FAILING_SEC)


def _in_a_line(record: logging.LogRecord) -> bool:
    """Replace the traceback of a plugin that finds no driver by its error; drop it if only the CPU is asked for."""
    if record.name.startswith("jax.") and record.exc_info and record.exc_info[1]:
        reason = " ".join(str(record.exc_info[1]).split())
        record.msg = f"{record.getMessage()}: {reason}; JAX_PLATFORMS=cpu says nothing of plugins"
        record.args, record.exc_info = (), None
        return jax.config.jax_platforms != "cpu"
    return True


def _use_every_core() -> None:
    """Create one CPU device per core, unless XLA_FLAGS or JAX_NUM_CPU_DEVICES set the number.

    Two devices of one core each train 1.15x as fast as one device of two cores, where one core waits for the other
    at the end of every operation (LOG.md).
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_num_cpu_devices == -1 and "xla_force_host_platform_device_count" not in flags:
        has_affinity = hasattr(os, "sched_getaffinity")  # macOS has not
        num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        with contextlib.suppress(RuntimeError):  # a caller that already uses its devices keeps them
            jax.config.update("jax_num_cpu_devices", num_cores)


def _join(place: Place, limit_sec: float) -> None:
    """Join this host with the others, after the rendezvous; see `start_jax`."""
    global _host_index
    hosts, _host_index = meet(place, limit_sec), place.host_index
    memory.processes_here = [here.machine for here in hosts].count(hosts[_host_index].machine)
    gpus = None if jax.config.jax_platforms == "cpu" else share_gpus(hosts, place.host_index)
    try:
        jax.distributed.initialize(
            place.address,
            place.num_hosts,
            place.host_index,
            local_device_ids=gpus,
            cluster_detection_method="deactivate",  # all is known, and JAX would give each process one GPU
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SEC,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"devices: the hosts did not join at {place.address} ({reason})") from error


def _join_as_jax_finds(limit_sec: float) -> None:
    """Join this host with those that JAX detects, as on a TPU VM, or leave it alone; see `start_jax`."""

    def give_up():
        text = (
            f"devices.join_sec: after {limit_sec:g} s not all hosts that JAX finds have come ({seen()}); {ADVICE}"
        )
        os.write(2, f"{Path(sys.argv[0]).name}: error: {text}\n".encode())
        os._exit(1)

    timer = threading.Timer(limit_sec, give_up)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            initialization_timeout=int(limit_sec) + LATE_SEC, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SEC
        )
    except Exception as error:  # metadata servers, Kubernetes' client, missing variables
        reason = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, ValueError) and "should be defined" in reason:
            check_alone()
        elif "before any JAX calls" not in reason:  # else a test or notebook already uses its own devices
            raise UserError(
                f"devices: the other hosts cannot be found ({reason}; {seen()}); give {FIELDS}"
            ) from error
    finally:
        timer.cancel()
