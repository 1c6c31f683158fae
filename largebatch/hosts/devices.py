"""Hosts and devices: start, place, replicate, agree, compare."""

import contextlib
import functools
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from largebatch.errors import BadSetting, UserError
from largebatch.hosts import meeting

# Set by largebatch.pod for each of its processes, beside JAX's own JAX_COORDINATOR_ADDRESS.
NUM_HOSTS_VARIABLE = "LARGEBATCH_NUM_HOSTS"
HOST_INDEX_VARIABLE = "LARGEBATCH_HOST_INDEX"
HEARTBEAT_TIMEOUT_SEC = 20
# The axis of every pmap; arrays made here carry it, so that pmap takes them as they are.
AXIS = "devices"


def start(
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


def is_primary() -> bool:
    """Whether this host writes the run folder."""
    return jax.process_index() == 0


def barrier() -> None:
    """Waits until every host is here, however long that takes; see `gather_text`."""
    gather_text("")


def from_primary(value):
    """The primary host's pytree of numbers or arrays, on every host, bit by bit.

    On the other hosts `value` gives structure, shapes and types. It travels as integers, since JAX adds
    zeros to it, which would turn -0.0 into 0.0.
    """
    if jax.process_count() == 1:
        return value
    value = jax.tree.map(np.asarray, value)
    bits = jax.tree.map(lambda x: x.view(f"uint{8 * x.dtype.itemsize}"), value)
    return jax.tree.map(lambda x, y: np.asarray(x).view(y.dtype), multihost_utils.broadcast_one_to_all(bits), value)


def gather(value: np.ndarray) -> np.ndarray:
    """Every host's array of one shape, stacked by host index, on every host.

    By one device of each host: `multihost_utils.process_allgather` makes a copy on every device.
    """
    if jax.process_count() == 1:
        return value[None]
    hosts = _mesh_of_hosts()
    apart = NamedSharding(hosts, PartitionSpec(hosts.axis_names))
    stacked = jax.make_array_from_process_local_data(apart, value[None], (hosts.size, *value.shape))
    return np.asarray(_on_every_host()(stacked).addressable_data(0))


@functools.cache
def _mesh_of_hosts() -> Mesh:
    """One device of each host."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    return Mesh(np.array([first[index] for index in sorted(first)]), ("hosts",))


@functools.cache
def _on_every_host() -> Callable[[jax.Array], jax.Array]:
    """Made once, for what JAX has compiled goes with the function."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(_mesh_of_hosts(), PartitionSpec()))


def gather_text(text: str) -> list[str]:
    """Every host's `text` (any length), by host index, on every host.

    No collective, which would give up on a host that is late: hosts may come from work of any length.

    Raises:
      UserError: another host died.
    """
    if jax.process_count() == 1:
        return [text]
    with named_collective_errors():
        return meeting.exchange(text)


def json_from_primary(value) -> Any:
    """The primary host's `value` (plain JSON) on every host; that of the others counts for nothing.

    Waits as `gather_text` does.
    """
    return json.loads(gather_text(json.dumps(value if is_primary() else None))[0])


def share_error(error: Exception | None) -> None:
    """Waits for all hosts; raises on each of them the first error that any passes, as a UserError of its kind."""
    mine = [type(error).__name__, str(error)] if error else None
    found = [json.loads(text) for text in gather_text(json.dumps(mine))]
    for kind, text in filter(None, found):
        known = {one.__name__: one for one in UserError.__subclasses__()}
        raise known.get(kind, UserError)(text) from error


def agreed(act: Callable[[], Any], here: bool = True) -> Any:
    """`act()` on the hosts where `here` is true, else None; a UserError on one of them is raised on all."""
    result = error = None
    if here:
        try:
            result = act()
        except UserError as raised:
            error = raised
    share_error(error)
    return result


@contextlib.contextmanager
def named_collective_errors():
    """Says in one line that a collective failed, which on several hosts seldom is this host's fault.

    Raises:
      UserError: in place of JAX's error; on one host that passes as it is.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        reason = str(error).splitlines()[0][:200]
        raise UserError(
            f"a collective failed, probably since another host died or was late ({reason}); "
            "start again to go on from the last checkpoint"
        ) from error


def local_indices() -> list[int]:
    """Positions of this host's devices on the pmap axis, in the order of jax.local_devices()."""
    first = jax.process_index() * jax.local_device_count()
    return list(range(first, first + jax.local_device_count()))


def stack(per_device: list):
    """Pytrees, one per device and already on it -> one pytree with a leading device axis, as pmap wants it.

    No copy: each device's array becomes a shard. Every leaf has shape [1, ...].
    """
    on = [jax.tree.leaves(tree)[0].device for tree in per_device]
    sharding = NamedSharding(Mesh(np.array(on), (AXIS,)), PartitionSpec(AXIS))

    def join(*shards):
        shape = (len(shards), *shards[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))

    return jax.tree.map(join, *per_device)


def replicate(tree, on: list | None = None):
    """`tree` on local devices (default all), with a leading device axis."""
    with_axis = jax.tree.map(lambda x: np.asarray(x)[None], tree)
    return stack([jax.device_put(with_axis, device) for device in on or jax.local_devices()])


def shards_of(tree) -> list:
    """The inverse of `stack`: this host's part of `tree`, device by device, each with an axis of 1; no copy."""
    leaves, structure = jax.tree.flatten(tree)
    per_device = zip(*([shard.data for shard in leaf.addressable_shards] for leaf in leaves), strict=True)
    return [jax.tree.unflatten(structure, shards) for shards in per_device]


def local_devices_of(tree) -> list:
    """This host's devices that hold `tree`, in the order of its leading axis."""
    return [shard.device for shard in jax.tree.leaves(tree)[0].addressable_shards]


def count(tree) -> int:
    """How many devices of all hosts hold `tree`."""
    return len(jax.tree.leaves(tree)[0].sharding.device_set)


def first_replica(tree):
    """This host's first replica as NumPy arrays. (Indexing a sharded array would gather it.)"""
    return jax.tree.map(lambda x: np.asarray(x.addressable_shards[0].data)[0], tree)


def all_replicas(tree):
    """The replicas of all hosts as NumPy arrays with a leading axis over all devices, on every host.

    In one message, since each more is another program to compile and another wait for the slowest host.
    """
    leaves, structure = jax.tree.flatten(tree)
    mine = [np.concatenate([np.asarray(shard.data) for shard in leaf.addressable_shards]) for leaf in leaves]
    hosts = gather(np.concatenate([leaf.ravel().view(np.uint8) for leaf in mine]))  # [hosts, bytes]
    ends = np.cumsum([leaf.nbytes for leaf in mine])[:-1]
    parts = zip(np.split(hosts, ends, axis=1), mine, strict=True)
    return structure.unflatten(
        [np.ascontiguousarray(part).view(leaf.dtype).reshape(-1, *leaf.shape[1:]) for part, leaf in parts]
    )


def spread(replicas, on: list):
    """The inverse of `all_replicas`: this host's part on its devices `on`."""
    first = jax.process_index() * len(on)
    parts = [jax.tree.map(lambda x, i=first + i: x[i : i + 1], replicas) for i in range(len(on))]
    return stack([jax.device_put(part, device) for part, device in zip(parts, on, strict=True)])


def _hash(tree) -> jax.Array:
    """uint32 that changes with any bit of any leaf: words times odd, position-dependent numbers, added."""
    total = jnp.uint32(0)
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        words = lax.bitcast_convert_type(leaf, bits).astype(jnp.uint32).ravel()
        position = jnp.arange(words.size, dtype=jnp.uint32) * 2 + 1
        total += jnp.sum(words * (position * jnp.uint32(0x9E3779B1) | 1)) * jnp.uint32(2 * number + 1)
    return total


_gathered_hashes = jax.pmap(lambda tree: lax.all_gather(_hash(tree), AXIS), AXIS, out_axes=None)


def check_replicas(tree, what: str) -> None:
    """Compares a hash of `tree` over all devices of all hosts.

    Raises:
      RuntimeError: replicas differ; names the devices that disagree with device 0.
    """
    if count(tree) == 1:
        return
    hashes = np.asarray(_gathered_hashes(tree))
    wrong = np.flatnonzero(hashes != hashes[0])
    if len(wrong):
        raise RuntimeError(f"{what} differ between replicas: devices {wrong.tolist()} disagree with device 0")


def aligned_empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An uninitialised array on a page boundary, which a CPU device takes over without a copy.

    Small pages: NumPy asks for huge ones, which on a virtual machine take five times as long to come (LOG.md).
    """
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8, num_bytes).view(dtype).reshape(shape)


def available_bytes() -> int | None:
    """Bytes free for each local device, or None where the platform does not tell."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    meminfo = Path("/proc/meminfo")
    if jax.default_backend() == "cpu" and meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        sharing = jax.local_device_count() * int(os.environ.get(NUM_HOSTS_VARIABLE, 1))
        return int(fields["MemAvailable"].split()[0]) * 1024 // sharing
    return None


def check_fits(sizes: dict[str, int], hint: str) -> None:
    """Compares an estimate in bytes per device, by part, with what a device has free.

    Raises:
      UserError: it does not fit; lists the parts.
    """
    available, total = available_bytes(), sum(sizes.values())
    if available is not None and total > available:
        parts = " + ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in sizes.items())
        raise BadSetting(
            f"does not fit on a device: {parts} = {total / 1e6:,.1f} MB needed, "
            f"{available / 1e6:,.1f} MB free; {hint}"
        )
