"""Pytrees with a leading device axis: placed, replicated, read back, compared."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from largebatch.hosts.collectives import gather

# The axis of every pmap; arrays made here carry it, so that pmap takes them as they are.
AXIS = "devices"


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
