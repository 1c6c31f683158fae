"""Pytrees with a leading device axis for `jax.pmap`: placed, replicated, read back, compared."""

import concurrent.futures
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from largebatch.hardware.chips import options_for
from largebatch.hosts.collectives import gather
from largebatch.util import UserError

log = logging.getLogger(__name__)

# Axis of every pmap. Arrays made here are sharded along it, so that pmap takes them without a copy.
AXIS = "devices"


class PmappedFunction:
    """A `jax.pmap` over all devices of all hosts, along AXIS, that can be compiled before it is called.

    It is compiled with this platform's options. jax.pmap offers neither on several hosts. A function without
    options that was not compiled ahead is run by jax.pmap, unchanged. Else its arguments have to be on the devices
    of the program; jax.pmap would move an array that is not.
    """

    def __init__(self, function: Callable, in_axes=0, out_axes=0, donate_argnums=(), devices: list | None = None):
        """Pmap a function.

        Args:
          in_axes, out_axes: 0 or None, for all arguments or results or one by one.
          devices: compile targets, if they are not attached.
        """
        self._pmapped = jax.pmap(
            function, AXIS, in_axes=in_axes, out_axes=out_axes, donate_argnums=donate_argnums, devices=devices
        )
        self.lower = self._pmapped.lower
        self._in_axes = in_axes
        self._donated = donate_argnums
        self._programs: dict = {}

    def __call__(self, *arguments):
        """Call the function; the results are those of jax.pmap."""
        signature = _signature(arguments)
        if signature not in self._programs:
            if not options_for(jax.default_backend()):
                return self._pmapped(*arguments)
            compile_side_by_side([(self, arguments)])
        return self._run(self._programs[signature], arguments)

    def take(self, compiling: concurrent.futures.Future, lowered: jax.stages.Lowered, arguments: tuple) -> None:
        """Take a program that is compiled for arguments like these, after a first run if it has options.

        A jaxlib may not know an option. A convolution may need an algorithm that a CUDA graph cannot hold, which is
        known only when it is recorded.

        Raises:
          UserError: it cannot be compiled or recorded with its options, on several hosts.
        """
        options = options_for(jax.default_backend())
        try:
            program = compiling.result()
            if options:
                jax.block_until_ready(self._run(program, self._with_copies(arguments)))
        except jax.errors.JaxRuntimeError as error:
            reason, flags = str(error).partition("\n")[0], " ".join(f"--{name}=" for name in options)
            if not options or reason.startswith("RESOURCE_EXHAUSTED"):
                raise
            if jax.process_count() > 1:  # the other hosts may run another program
                raise UserError(f"a program fails here ({reason}); set XLA_FLAGS={flags} on all hosts") from error
            log.warning("compiled again, as with XLA_FLAGS=%s, for a program fails here: %s", flags, reason)
            program = lowered.compile()
        self._programs[_signature(arguments)] = program

    def _with_copies(self, arguments: tuple) -> tuple:
        """Return the arguments, with copies of the donated ones."""
        copied = list(arguments)
        for number in self._donated:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, arguments[number])
            copied[number] = jax.device_put(arguments[number], shardings, may_alias=False)
        return tuple(copied)

    def _run(self, program: Callable, arguments: tuple):
        if jax.process_count() == 1:
            return program(*arguments)
        devices = [device for host in range(jax.process_count()) for device in jax.local_devices(host)]
        mesh = Mesh(np.array(devices), (AXIS,))
        axes = self._in_axes if isinstance(self._in_axes, tuple) else (self._in_axes,) * len(arguments)
        everywhere = [
            multihost_utils.host_local_array_to_global_array(one, mesh, PartitionSpec(AXIS)) if axis == 0 else one
            for one, axis in zip(arguments, axes, strict=True)
        ]
        results = program(*everywhere)
        specs = jax.tree.map(lambda x: PartitionSpec() if x.is_fully_replicated else PartitionSpec(AXIS), results)
        return multihost_utils.global_array_to_host_local_array(results, mesh, specs)


pmap = PmappedFunction  # every pmap of the project is made here


def compile_side_by_side(calls: list[tuple[PmappedFunction, tuple]]) -> None:
    """Compile functions for arguments like these, which are kept; one is compiled while the next is traced."""
    options = options_for(jax.default_backend())
    with concurrent.futures.ThreadPoolExecutor() as pool:
        lowered = []
        for function, arguments in calls:
            traced = function.lower(*arguments)
            lowered.append((traced, pool.submit(traced.compile, compiler_options=options)))
        for (function, arguments), (traced, compiling) in zip(calls, lowered, strict=True):
            function.take(compiling, traced, arguments)


def _signature(arguments: tuple) -> tuple:
    """Return what a program is compiled for: the arguments' structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple(map(jax.typeof, leaves))


def local_indices() -> list[int]:
    """Return the positions of this host's devices on the pmap axis, in the order of jax.local_devices().

    All hosts have the same number of devices.
    """
    first = jax.process_index() * jax.local_device_count()
    return list(range(first, first + jax.local_device_count()))


# ---- to the devices ---------------------------------------------------------------------------------


def stack(per_device: list):
    """Stack one pytree per device to a pytree with a leading device axis.

    Nothing is copied: each device's arrays become shards.

    Args:
      per_device: pytrees of the same structure, each on its device; every leaf has shape [1, ...].
    Returns:
      A pytree of the same structure; every leaf has shape [devices, ...].
    """
    sharding = _sharding_over([jax.tree.leaves(tree)[0].device for tree in per_device])

    def join(*shards):
        shape = (len(shards), *shards[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))

    return jax.tree.map(join, *per_device)


def replicate(tree, devices: list | None = None):
    """Copy `tree` to each of these local devices (default all), with a leading device axis."""
    devices = devices or jax.local_devices()
    copies = jax.tree.map(lambda x: np.broadcast_to(x, (len(devices), *np.shape(x))), tree)
    return jax.device_put(copies, _sharding_over(devices))


def spread(replicas, devices: list):
    """Place this host's part of the replicas on its devices; the inverse of `all_replicas`."""
    first = jax.process_index() * len(devices)
    rows = jax.tree.map(lambda leaf: leaf[first : first + len(devices)], replicas)
    return jax.device_put(rows, _sharding_over(devices))


def _sharding_over(devices: list) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), (AXIS,)), PartitionSpec(AXIS))


# ---- from the devices -------------------------------------------------------------------------------


def local_devices_of(tree) -> list:
    """Return this host's devices that hold `tree`, in the order of its leading axis."""
    return [shard.device for shard in jax.tree.leaves(tree)[0].addressable_shards]


def first_replica(tree):
    """Return this host's first replica as NumPy arrays. (Indexing a sharded array would gather it.)"""
    return jax.tree.map(lambda x: np.asarray(x.addressable_shards[0].data)[0], tree)


def all_replicas(tree):
    """Return the replicas of all hosts as NumPy arrays [devices of all hosts, ...], on every host. Collective."""

    def gather_rows(leaf):
        rows = np.concatenate([np.asarray(shard.data) for shard in leaf.addressable_shards])
        return gather(rows).reshape(-1, *rows.shape[1:])

    return jax.tree.map(gather_rows, tree)


# ---- comparison -------------------------------------------------------------------------------------


def _hash(tree) -> jax.Array:
    """Return a uint32 that any bit of any leaf changes: the sum of all words, each times its own odd number."""
    total = jnp.uint32(0)
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        words = lax.bitcast_convert_type(leaf, word).astype(jnp.uint32).ravel()
        position = jnp.arange(words.size, dtype=jnp.uint32) * 2 + 1
        total += jnp.sum(words * (position * jnp.uint32(0x9E3779B1) | 1)) * jnp.uint32(2 * number + 1)
    return total


_gathered_hashes = pmap(lambda tree: lax.all_gather(_hash(tree), AXIS), out_axes=None)


def check_replicas(tree, what: str) -> None:
    """Compare a hash of `tree` over all devices of all hosts.

    Args:
      what: content of `tree`, for the message.
    Raises:
      RuntimeError: replicas differ; the message names the devices that disagree with device 0.
    """
    # The sharding's devices do not tell: those of arrays made here, and not by a pmap, are this host's alone.
    if len(local_devices_of(tree)) * jax.process_count() == 1:
        return
    hashes = np.asarray(_gathered_hashes(tree))
    wrong = np.flatnonzero(hashes != hashes[0])
    if len(wrong):
        raise RuntimeError(f"{what} differ between replicas: devices {wrong.tolist()} disagree with device 0")
