"""Start of JAX on this host, joined with other hosts if there are any."""

import contextlib
import logging
import os

import jax
import numpy as np
from jax import lax
from jax._src import xla_bridge

from largebatch.hosts.clusters import Meeting, find_meeting, gpus_of_process
from largebatch.hosts.collectives import barrier, gather, named_collective_errors
from largebatch.hosts.rendezvous import call_roll
from largebatch.hosts.replicas import AXIS, pmap
from largebatch.util import UserError

HEARTBEAT_TIMEOUT_SEC = 20
JOIN_SEC = 300.0


def start_jax(
    platform: str = "auto",
    coordinator_address: str | None = None,
    num_hosts: int | None = None,
    host_index: int | None = None,
    join_sec: float = JOIN_SEC,
) -> None:
    """Start JAX on this host, joined with other hosts if there are any.

    Missing arguments are found by `largebatch.pod`'s variables, or by what `jax.distributed` recognises (TPU pods,
    Slurm, Open MPI, Kubernetes); if nothing is given or found, this host is alone.

    Args:
      platform: "cpu", "gpu", "tpu", or "auto" for what JAX finds.
      coordinator_address: "HOST:PORT" of host 0, or "HOST" or ":PORT" alone.
      num_hosts, host_index: number of hosts, and index of this host. 1 host without an address: alone.
      join_sec: seconds for which the hosts wait for each other.
    Raises:
      UserError: no device of `platform` here, or other hosts are missing.
    """
    _use_every_core()
    if platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    _choose_plugins()
    # JAX's own service would take SIGTERM, which `preemption` handles.
    jax.config.update("jax_enable_preemption_service", False)
    if not jax.distributed.is_initialized():
        meeting = find_meeting(coordinator_address, num_hosts, host_index, join_sec)
        if meeting is not None:
            _join(meeting, join_sec)
    if jax.distributed.is_initialized():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # an empty AssertionError if no plugin knows the platform
        reason = (str(error) or "JAX knows none").splitlines()[0]
        raise UserError(
            f"devices.platform: {platform!r} has no device on this host ({reason}); "
            f"allowed: a platform that JAX finds here, or 'auto'"
        ) from error
    if len({device.platform for device in devices}) != 1:
        raise UserError(f"devices.platform: {platform!r} finds several kinds of device: {devices}")
    if jax.process_count() > 1:
        _connect()


def _connect() -> None:
    """Connect all devices by a collective that takes no time to compile.

    Gloo waits only 30 s for the hosts in its first collective, and minutes in later ones. So the hosts wait at a
    barrier before the first. Later some may compile the training loop while others find it in their cache.
    """
    barrier()
    with named_collective_errors():
        gather(np.zeros(1, np.float32))
        ones = np.ones(jax.local_device_count(), np.float32)
        jax.block_until_ready(pmap(lambda x: lax.psum(x, AXIS))(ones))


def _choose_plugins() -> None:
    """Load no plugin of JAX if only the CPU is requested; elsewhere log a failing one in one line.

    JAX would load GPU plugins for the CPU too, and print a traceback of each that finds no driver.
    """
    if jax.config.jax_platforms == "cpu":
        xla_bridge.discover_pjrt_plugins = lambda: None
    logging.getLogger(xla_bridge.__name__).addFilter(_in_a_line)


def _in_a_line(record: logging.LogRecord) -> bool:
    """Replace the traceback of a log record by its error; return True, so that the record is shown."""
    if record.exc_info and record.exc_info[1]:
        reason = " ".join(str(record.exc_info[1]).split())
        record.msg = f"{record.getMessage()}: {reason}; JAX_PLATFORMS=cpu loads no plugin"
        record.args, record.exc_info = (), None
    return True


def _use_every_core() -> None:
    """Create one CPU device per core, unless XLA_FLAGS or JAX_NUM_CPU_DEVICES set the number.

    Two devices of one core each train 1.15x as fast as one device of two cores, where one core waits for the other
    at the end of every operation (LOG.md).
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_num_cpu_devices == -1 and "xla_force_host_platform_device_count" not in flags:
        with contextlib.suppress(RuntimeError):  # a caller that already uses its devices keeps them
            has_affinity = hasattr(os, "sched_getaffinity")  # macOS has not
            num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
            jax.config.update("jax_num_cpu_devices", num_cores)


def _join(meeting: Meeting, limit_sec: float) -> None:
    """Join this host with the others; see `start_jax`."""
    if meeting.num_hosts > 1:
        call_roll(meeting, limit_sec)
    try:
        jax.distributed.initialize(
            meeting.address,
            meeting.num_hosts,
            meeting.host_index,
            local_device_ids=gpus_of_process(),
            cluster_detection_method="deactivate",  # all is known, and JAX would give each process one GPU
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SEC,
        )
    except ValueError as error:
        raise UserError(f"devices: the hosts cannot be joined ({error})") from error
    except RuntimeError as error:
        if "before any JAX calls" in str(error) and meeting.num_hosts == 1:
            return  # a caller (a test, a notebook) that already uses its own devices
        raise UserError(f"hosts did not meet at {meeting.address}: {str(error).splitlines()[0]}") from error
