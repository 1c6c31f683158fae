"""What hosts tell each other: texts, arrays, errors, decisions."""

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

HOSTS = "hosts"  # the axis of a mesh of one device per host


def is_primary() -> bool:
    """Whether this host writes the run folder."""
    return jax.process_index() == 0


def barrier() -> None:
    """Waits until every host has called it, however long that takes; see `gather_text`."""
    gather_text("")


def from_primary(value):
    """The primary host's pytree of numbers or arrays, on every host, bit by bit.

    Args:
      value: on the other hosts only its structure, shapes and dtypes count.
    """
    if jax.process_count() == 1:
        return value
    # As integers: JAX broadcasts by adding zeros, which would turn -0.0 into 0.0.
    arrays = jax.tree.map(np.asarray, value)
    bits = jax.tree.map(lambda array: array.view(f"uint{8 * array.dtype.itemsize}"), arrays)
    received = multihost_utils.broadcast_one_to_all(bits)
    return jax.tree.map(lambda bits, array: np.asarray(bits).view(array.dtype), received, arrays)


def gather(value: np.ndarray) -> np.ndarray:
    """Every host's array, stacked by host index, on every host.

    `multihost_utils.process_allgather` would copy it to every device; this takes one device of each host.

    Args:
      value: of the same shape [...] and dtype on every host.
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
    """The first device of each host, by host index."""
    first_device = {}
    for device in jax.devices():
        first_device.setdefault(device.process_index, device)
    return Mesh(np.array([first_device[host] for host in sorted(first_device)]), (HOSTS,))


@functools.cache
def _copy_to_every_host() -> Callable[[jax.Array], jax.Array]:
    """Made once: JAX keeps what it compiles with the function, and a new one would compile again."""
    every_host = NamedSharding(_mesh_of_hosts(), PartitionSpec())
    return jax.jit(lambda x: x, out_shardings=every_host)


def gather_text(text: str) -> list[str]:
    """Every host's `text` (any length), by host index, on every host.

    Not a collective of JAX: those give up on a late host, and hosts may come here from work of any length.

    Raises:
      UserError: another host died.
    """
    if jax.process_count() == 1:
        return [text]
    with named_collective_errors():
        return rendezvous.exchange(text)


def json_from_primary(value) -> Any:
    """The primary host's `value` (plain JSON) on every host; waits as `gather_text` does."""
    return json.loads(gather_text(json.dumps(value if is_primary() else None))[0])


def share_error(error: Exception | None) -> None:
    """Waits for all hosts. If any of them passes an error, all raise the first one, as a UserError of its kind."""
    message = {"kind": type(error).__name__, "text": str(error)} if error else None
    messages = [json.loads(text) for text in gather_text(json.dumps(message))]
    first = next(filter(None, messages), None)
    if first:
        kinds = {kind.__name__: kind for kind in UserError.__subclasses__()}
        raise kinds.get(first["kind"], UserError)(first["text"]) from error


def agreed(act: Callable[[], Any], here: bool = True) -> Any:
    """Runs `act` on the hosts where `here` is true; a UserError on one host is raised on all.

    Returns:
      What `act` returned, None on the other hosts.
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
    """Runs `act` on host 0 with items that all hosts make together; a UserError there is raised on all.

    Args:
      act: takes the items one by one, perhaps not all.
      items: a generator, as long on every host; making an item may be a collective.
    Returns:
      What `act` returned, None on the other hosts.
    """

    def take():
        try:
            return act(items) if is_primary() else None
        finally:
            for _ in items:  # which the others make too
                pass

    return agreed(take)


@contextlib.contextmanager
def named_collective_errors():
    """Turns the error of a failed collective into one line: on several hosts another one is usually to blame.

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
