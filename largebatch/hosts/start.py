"""Starts JAX on this host, joined with the others where there are any."""

import contextlib
import os

import jax
import numpy as np
from jax import lax

from largebatch.errors import UserError
from largebatch.hosts.collectives import barrier, gather, named_collective_errors
from largebatch.hosts.replicas import AXIS

# Set by largebatch.pod for each of its processes, beside JAX's own JAX_COORDINATOR_ADDRESS.
NUM_HOSTS_VARIABLE = "LARGEBATCH_NUM_HOSTS"
HOST_INDEX_VARIABLE = "LARGEBATCH_HOST_INDEX"
HEARTBEAT_TIMEOUT_SEC = 20


def start_jax(
    platform: str = "auto",
    coordinator_address: str | None = None,
    num_hosts: int | None = None,
    host_index: int | None = None,
) -> None:
    """Starts JAX on this host, joined with the others where there are any.

    With no arguments: `largebatch.pod`'s variables, else whatever `jax.distributed` recognises (TPU
    pods, Slurm, Open MPI, Kubernetes), else this host alone.

    Raises:
      UserError: no device of `platform` here, or the other hosts did not come.
    """
    _use_every_core()
    if platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    if coordinator_address is None and NUM_HOSTS_VARIABLE in os.environ:
        coordinator_address = os.environ["JAX_COORDINATOR_ADDRESS"]
        num_hosts = int(os.environ[NUM_HOSTS_VARIABLE])
        host_index = int(os.environ[HOST_INDEX_VARIABLE])
    # It would take SIGTERM for itself; `preemption` answers it.
    jax.config.update("jax_enable_preemption_service", False)
    if not jax.distributed.is_initialized():
        _join(coordinator_address, num_hosts, host_index)
    if jax.distributed.is_initialized():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        found = jax.local_devices()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"devices.platform: {platform!r} has no device on this host ({reason}); "
            f"allowed: a platform that JAX finds here, or 'auto'"
        ) from error
    if len({device.platform for device in found}) != 1:
        raise UserError(f"devices.platform: {platform!r} finds several kinds of device: {found}")
    if jax.process_count() > 1:
        _connect()


def _connect() -> None:
    """Lets all devices meet in a program that compiles at once.

    Gloo waits 30 s for every host to come to the first collective, so they meet before it; and minutes in later
    ones, while some hosts may compile the training loop, which others find in their cache.
    """
    barrier()
    with named_collective_errors():
        gather(np.zeros(1, np.float32))
        ones = np.ones(jax.local_device_count(), np.float32)
        jax.block_until_ready(jax.pmap(lambda x: lax.psum(x, AXIS), AXIS)(ones))


def _use_every_core() -> None:
    """Makes one CPU device per core, unless XLA_FLAGS or JAX_NUM_CPU_DEVICES say how many.

    Two devices of one core each train 1.15x as fast as one device of two: no core waits for the other at
    the end of every operation (LOG.md).
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_num_cpu_devices == -1 and "xla_force_host_platform_device_count" not in flags:
        with contextlib.suppress(RuntimeError):  # a caller that already uses its devices keeps them
            # macOS has no affinity.
            affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
            jax.config.update("jax_num_cpu_devices", len(affinity(0)))


def _join(coordinator_address, num_hosts, host_index):
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_hosts,
            host_index,
            local_device_ids=None,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SEC,
        )
    except ValueError as error:
        if coordinator_address is None and str(error).startswith("coordinator_address should be defined"):
            _check_that_host_is_alone()
            return
        raise UserError(f"devices: the hosts cannot be joined ({error})") from error
    except RuntimeError as error:
        if coordinator_address is None and "before any JAX calls" in str(error):
            return  # a caller (a test, a notebook) that already uses its own devices
        raise UserError(f"hosts did not meet at {coordinator_address}: {str(error).splitlines()[0]}") from error


def _check_that_host_is_alone() -> None:
    """Open MPI 5 does not set what JAX looks for: several hosts would each train alone, into one folder."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if int(os.environ.get(name, 1)) > 1:
            raise UserError(
                f"devices: started as one of {os.environ[name]} processes ({name}) that JAX does not recognise; "
                "give devices.coordinator_address, devices.num_hosts and devices.host_index"
            )
