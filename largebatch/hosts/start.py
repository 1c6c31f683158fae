"""Starts JAX on this host, joined with the others where there are any."""

import contextlib
import os

import jax
import numpy as np
from jax import lax

from largebatch.errors import UserError
from largebatch.hosts.collectives import barrier, gather, named_collective_errors
from largebatch.hosts.replicas import AXIS, pmap

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

    Where no address is given, the other hosts are found by `largebatch.pod`'s variables, or by whatever
    `jax.distributed` recognises (TPU pods, Slurm, Open MPI, Kubernetes); otherwise this host is alone.

    Args:
      platform: "cpu", "gpu", "tpu", or "auto" for what JAX finds.
      coordinator_address: "address:port" of host 0.
      num_hosts, host_index: how many hosts there are, and which of them this is.
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
    # JAX's own service would take SIGTERM, which `preemption` answers.
    jax.config.update("jax_enable_preemption_service", False)
    if not jax.distributed.is_initialized():
        _join(coordinator_address, num_hosts, host_index)
    if jax.distributed.is_initialized():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"devices.platform: {platform!r} has no device on this host ({reason}); "
            f"allowed: a platform that JAX finds here, or 'auto'"
        ) from error
    if len({device.platform for device in devices}) != 1:
        raise UserError(f"devices.platform: {platform!r} finds several kinds of device: {devices}")
    if jax.process_count() > 1:
        _connect()


def _connect() -> None:
    """Lets all devices meet in a program that takes no time to compile.

    Gloo waits only 30 s for the hosts in its first collective, and minutes in later ones. So the hosts meet at a
    barrier before the first. Later some may compile the training loop while others find it in their cache.
    """
    barrier()
    with named_collective_errors():
        gather(np.zeros(1, np.float32))
        ones = np.ones(jax.local_device_count(), np.float32)
        jax.block_until_ready(pmap(lambda x: lax.psum(x, AXIS))(ones))


def _use_every_core() -> None:
    """Makes one CPU device per core, unless XLA_FLAGS or JAX_NUM_CPU_DEVICES say how many.

    Two devices of one core each train 1.15x as fast as one device of two cores, where one core waits for the other
    at the end of every operation (LOG.md).
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_num_cpu_devices == -1 and "xla_force_host_platform_device_count" not in flags:
        with contextlib.suppress(RuntimeError):  # a caller that already uses its devices keeps them
            has_affinity = hasattr(os, "sched_getaffinity")  # macOS has not
            num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
            jax.config.update("jax_num_cpu_devices", num_cores)


def _join(coordinator_address: str | None, num_hosts: int | None, host_index: int | None) -> None:
    """Joins this host with the others; see `start_jax`."""
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
    """Open MPI 5 does not set what JAX looks for: several hosts would each train alone, into the same folder."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if int(os.environ.get(name, 1)) > 1:
            raise UserError(
                f"devices: started as one of {os.environ[name]} processes ({name}) that JAX does not recognise; "
                "give devices.coordinator_address, devices.num_hosts and devices.host_index"
            )
