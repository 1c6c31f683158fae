"""Hosts meet to exchange text, and wait there for each other however long one of them takes.

By the key-value store of JAX's coordination service, which host 0 runs and every host is connected to. A
collective would do, but for a host that is late: Gloo, which joins CPUs, gives up after 30 minutes. The service
itself ends the wait for a host that died, once that has missed its heartbeats.
"""

import itertools
import json
import time

import jax
from jax._src import distributed

FIRST_WAIT_MS = 1000
SHORT_POLL_SEC, POLL_SEC = 0.1, 1.0  # in the first seconds of a wait, and later
SHORT_WAIT_SEC = 10.0

_numbers = itertools.count()  # of the meetings, which all hosts come to in one order


def exchange(text: str) -> list[str]:
    """Every host's `text` (any length), by host index, on every host.

    Host 0 collects and answers, since among hundreds of hosts that takes the store a message or two of each,
    where all that read from all would take tens of thousands.

    Raises:
      JaxRuntimeError: another host died; JAX may instead end this process.
    """
    store, number, host = _store(), next(_numbers), jax.process_index()
    answer = _key(number, "all")
    if host == 0:
        texts = [text, *(_wait_for(store, _key(number, other)) for other in range(1, jax.process_count()))]
        store.key_value_set(answer, json.dumps(texts))
        if number:  # whoever came to this meeting has read the answer of the one before
            store.key_value_delete(_key(number - 1, "all"))
        return texts
    store.key_value_set(_key(number, host), text)
    texts = json.loads(_wait_for(store, answer))
    store.key_value_delete(_key(number, host))
    return texts


def _store():
    """The client of the coordination service; JAX has no public name for it: Orbax and Flax take it here too."""
    return distributed.global_state.client


def _key(number: int, of: int | str) -> str:
    return f"largebatch/meeting/{number}/{of}"


def _wait_for(store, key: str) -> str:
    """The value of `key`, once it is there. Comes back to Python every second or sooner, for it to see to signals.

    A wait that is over stays in the service's memory, 20 kB of it on both sides, so there is only one.
    """
    try:
        return store.blocking_key_value_get(key, FIRST_WAIT_MS)
    except jax.errors.JaxRuntimeError as error:
        _raise_unless("DEADLINE_EXCEEDED", error)
    begin = time.monotonic()
    while True:
        try:
            return store.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            _raise_unless("NOT_FOUND", error)
        time.sleep(SHORT_POLL_SEC if time.monotonic() - begin < SHORT_WAIT_SEC else POLL_SEC)


def _raise_unless(status: str, error: Exception) -> None:
    if not str(error).startswith(status):
        raise error
