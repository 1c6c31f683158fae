"""What hosts tell each other: texts, arrays, errors, decisions."""

import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from largebatch.errors import UserError
from largebatch.hosts import meeting


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
