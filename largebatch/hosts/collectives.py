"""Collectives of hosts: exchange of arrays, texts, errors and decisions, in the same order on every host."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from largebatch.util import UserError

LEAST_BYTES = 1024  # to which shorter texts are padded: one program for almost all texts


def is_primary() -> bool:
    """Return True on the primary host, which writes the run folder."""
    return jax.process_index() == 0


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
    with named_collective_errors():
        received = multihost_utils.broadcast_one_to_all(bits)
    return jax.tree.map(lambda bits, array: np.asarray(bits).view(array.dtype), received, arrays)


def gather(value: np.ndarray) -> np.ndarray:
    """Gather every host's array on every host, stacked by host index.

    Args:
      value: array of the same shape [...] and dtype on every host.
    Returns:
      [hosts, ...]
    """
    with named_collective_errors():
        return multihost_utils.process_allgather(value)


def gather_text(text: str) -> list[str]:
    """Gather every host's `text` (any length) on every host, by host index."""
    if jax.process_count() == 1:
        return [text]
    content = np.frombuffer(text.encode(), np.uint8)
    lengths = gather(np.int32(content.size))
    # Padded to powers of two, so that few programs are compiled.
    padded = np.zeros(max(LEAST_BYTES, 1 << int(lengths.max()).bit_length()), np.uint8)
    padded[: content.size] = content
    return [row[:length].tobytes().decode() for row, length in zip(gather(padded), lengths, strict=True)]


def gather_json(value) -> list:
    """Gather every host's `value` (plain JSON) on every host, by host index."""
    return [json.loads(text) for text in gather_text(json.dumps(value))]


def json_from_primary(value) -> Any:
    """Broadcast the primary host's `value` (plain JSON) to every host."""
    return gather_json(value if is_primary() else None)[0]


def agreed(act: Callable[[], Any], here: bool = True) -> Any:
    """Run `act` on the hosts where `here` is true, wait for all hosts, and raise the first UserError on all.

    Returns:
      The result of `act`, None on the other hosts.
    """
    result = error = None
    if here:
        try:
            result = act()
        except UserError as raised:
            error = raised
    for name, text in filter(None, gather_json([type(error).__name__, str(error)] if error else None)):
        kinds = {kind.__name__: kind for kind in UserError.__subclasses__()}
        raise kinds.get(name, UserError)(text) from error
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
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0][:200]
        # Gloo's failures are plain ValueErrors.
        if jax.process_count() == 1 or not (isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in reason):
            raise
        raise UserError(
            f"a collective failed, probably since another host died or was late ({reason}); "
            "start again to go on from the last checkpoint"
        ) from error
