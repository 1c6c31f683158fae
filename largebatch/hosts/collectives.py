"""Collectives of hosts: exchange of texts, arrays, errors and decisions."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from largebatch.hosts import rendezvous
from largebatch.util import UserError

HOSTS = "hosts"  # axis of a mesh of one device per host


def is_primary() -> bool:
    """Return True on the primary host, which writes the run folder."""
    return jax.process_index() == 0


def barrier() -> None:
    """Wait until every host has called it, however long that takes; see `gather_text`."""
    gather_text("")


def from_primary(value):
    """Broadcast the primary host's pytree of numbers or arrays to every host, bit by bit.

    Args:
      value: the pytree; on the other hosts only its structure, shapes and dtypes count.
    """
    if jax.process_count() == 1:
        return value
    # The bits are sent as integers: JAX broadcasts by adding zeros, which would turn -0.0 into 0.0.
    arrays = jax.tree.map(np.asarray, value)
    bits = jax.tree.map(lambda array: array.view(f"uint{8 * array.dtype.itemsize}"), arrays)
    received = multihost_utils.broadcast_one_to_all(bits)
    return jax.tree.map(lambda bits, array: np.asarray(bits).view(array.dtype), received, arrays)


def gather(value: np.ndarray) -> np.ndarray:
    """Gather every host's array on every host, stacked by host index.

    `multihost_utils.process_allgather` would copy it to every device; here one device of each host takes part.

    Args:
      value: array of the same shape [...] and dtype on every host.
    Returns:
      [hosts, ...]
    """
    if jax.process_count() == 1:
        return value[None]
    mesh = _mesh_of_hosts()
    one_row_per_host = NamedSharding(mesh, PartitionSpec(HOSTS))
    stacked = jax.make_array_from_process_local_data(one_row_per_host, value[None], (mesh.size, *value.shape))
    copied = _copy_to_every_host()(stacked)
    return np.asarray(copied.addressable_data(0))


@functools.cache
def _mesh_of_hosts() -> Mesh:
    """Create the mesh of the first device of each host, by host index."""
    first_device = {}
    for device in jax.devices():
        first_device.setdefault(device.process_index, device)
    return Mesh(np.array([first_device[host] for host in sorted(first_device)]), (HOSTS,))


@functools.cache
def _copy_to_every_host() -> Callable[[jax.Array], jax.Array]:
    """Return a function that copies to every host; cached, for JAX would compile a new one again."""
    every_host = NamedSharding(_mesh_of_hosts(), PartitionSpec())
    return jax.jit(lambda x: x, out_shardings=every_host)


def gather_text(text: str) -> list[str]:
    """Gather every host's `text` (any length) on every host, by host index.

    JAX's collectives time out on a late host, but hosts may come here from work of any length: JAX's are not used.

    Raises:
      UserError: another host died.
    """
    if jax.process_count() == 1:
        return [text]
    with named_collective_errors():
        return rendezvous.exchange(text)


def json_from_primary(value) -> Any:
    """Broadcast the primary host's `value` (plain JSON) to every host; wait as `gather_text` does."""
    return json.loads(gather_text(json.dumps(value if is_primary() else None))[0])


def share_error(error: Exception | None) -> None:
    """Wait for all hosts, and raise the first error of any of them on all, as a UserError of its kind."""
    message = {"kind": type(error).__name__, "text": str(error)} if error else None
    messages = [json.loads(text) for text in gather_text(json.dumps(message))]
    first = next(filter(None, messages), None)
    if first:
        kinds = {kind.__name__: kind for kind in UserError.__subclasses__()}
        raise kinds.get(first["kind"], UserError)(first["text"]) from error


def agreed(act: Callable[[], Any], here: bool = True) -> Any:
    """Run `act` on the hosts where `here` is true; raise a UserError of one host on all.

    Returns:
      The result of `act`, None on the other hosts.
    """
    result = error = None
    if here:
        try:
            result = act()
        except UserError as raised:
            error = raised
    share_error(error)
    return result


def primary_takes(act: Callable[[Iterator], Any], items: Iterator) -> Any:
    """Run `act` on host 0 with items that all hosts make together; raise its UserError on all.

    Args:
      act: function that takes the items one by one, perhaps not all.
      items: a generator of the same length on every host; making an item may be a collective.
    Returns:
      The result of `act`, None on the other hosts.
    """

    def take():
        try:
            return act(items) if is_primary() else None
        finally:
            for _ in items:  # the remaining items, which the other hosts make too
                pass

    return agreed(take)


@contextlib.contextmanager
def named_collective_errors():
    """Turn the error of a failed collective into one line: of several hosts, another one usually caused it.

    Raises:
      UserError: in place of JAX's error. On a single host JAX's error passes unchanged.
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
