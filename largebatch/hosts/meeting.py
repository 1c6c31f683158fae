"""Meetings of all hosts, to exchange text: they wait for each other however long one of them takes.

A meeting uses the key-value store of JAX's coordination service, which runs on host 0 and to which every host is
connected. A collective would give up on a late host: Gloo, which joins CPUs, does after 30 minutes. If a host dies,
the service ends the wait for it once its heartbeats stay out.
"""

import contextlib
import itertools
import json
import time

import jax
from jax._src import distributed

FIRST_WAIT_MS = 1000
FAILING_WAIT_MS = 5000  # for the others to say why they fail
LEAVING_SEC = 0.2  # for the others to be gone before host 0
SHORT_WAIT_SEC = 10.0  # of a wait, in which the store is asked every SHORT_POLL_SEC, and afterwards every POLL_SEC
SHORT_POLL_SEC, POLL_SEC = 0.1, 1.0

_meeting_numbers = itertools.count()  # all hosts come to the meetings in the same order


def exchange(text: str) -> list[str]:
    """Every host's `text` (any length), by host index, on every host.

    Host 0 collects the texts and answers with all of them: one or two messages per host. If every host read from
    every other, hundreds of hosts would send tens of thousands.

    Raises:
      JaxRuntimeError: another host died; JAX may instead end this process.
    """
    store, number, host = _store(), next(_meeting_numbers), jax.process_index()
    if host == 0:
        return _collect_and_answer(store, number, text)
    question, answer = _key(number, host), _key(number, "all")
    store.key_value_set(question, text)
    texts = json.loads(_wait_for(store, answer))
    store.key_value_delete(question)
    return texts


def wait_for_failing_hosts() -> None:
    """Waits until all hosts have come here, for FAILING_WAIT_MS at most; a host calls it once, before it exits.

    Most errors are agreed: every host is about to say the same line. As soon as host 0 has exited, JAX aborts the
    others, so they have to say it before, and to exit before. A host whose error is its own waits in vain.
    """
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # not all came, or host 0 is gone
        _store().wait_at_barrier("largebatch/failing", FAILING_WAIT_MS)
        if jax.process_index() == 0:
            time.sleep(LEAVING_SEC)


def _collect_and_answer(store, number: int, text: str) -> list[str]:
    """Host 0's part of a meeting."""
    texts = [text]
    for host in range(1, jax.process_count()):
        texts.append(_wait_for(store, _key(number, host)))
    store.key_value_set(_key(number, "all"), json.dumps(texts))
    if number > 0:  # whoever came to this meeting has read the answer of the one before
        store.key_value_delete(_key(number - 1, "all"))
    return texts


def _store():
    """The client of the coordination service. JAX has no public name for it; Orbax and Flax take it here too."""
    return distributed.global_state.client


def _key(number: int, whose: int | str) -> str:
    return f"largebatch/meeting/{number}/{whose}"


def _wait_for(store, key: str) -> str:
    """Waits for the value of `key`. Returns to Python at least every second, so that signals are handled.

    The service keeps 20 kB on both sides for every blocking wait that timed out, so only the first one blocks.
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
