"""Rendezvous of the hosts before JAX starts, which names missing hosts, and their exchange of texts."""

import contextlib
import itertools
import json
import logging
import os
import selectors
import socket
import time

import jax
from jax._src import distributed

from largebatch.hosts.clusters import Meeting
from largebatch.util import UserError

log = logging.getLogger("largebatch")

FIRST_WAIT_MS = 1000
FAILING_WAIT_MS = 5000  # for the other hosts to report their errors
LEAVING_SEC = 0.2  # for the other hosts to exit before host 0
SHORT_WAIT_SEC = 10.0  # in it the store is polled every SHORT_POLL_SEC, and afterwards every POLL_SEC
SHORT_POLL_SEC, POLL_SEC = 0.1, 1.0

_meeting_numbers = itertools.count()  # all hosts make their exchanges in the same order


def exchange(text: str) -> list[str]:
    """Exchange texts of any length: return every host's `text`, by host index, on every host.

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
    """Wait for all failing hosts, for FAILING_WAIT_MS at most; a host calls it once, before it exits.

    Most errors are shared: every host is about to print the same line. As soon as host 0 has exited, JAX aborts the
    others, so they have to print it and exit before. A host whose error is its own waits in vain.
    """
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # not all came, or host 0 is gone
        _store().wait_at_barrier("largebatch/failing", FAILING_WAIT_MS)
        if jax.process_index() == 0:
            time.sleep(LEAVING_SEC)


def _collect_and_answer(store, number: int, text: str) -> list[str]:
    """Collect the texts of all hosts and answer with all of them: host 0's part of an exchange."""
    texts = [text]
    for host in range(1, jax.process_count()):
        texts.append(_wait_for(store, _key(number, host)))
    store.key_value_set(_key(number, "all"), json.dumps(texts))
    if number > 0:  # the hosts of this exchange have read the answer of the previous one
        store.key_value_delete(_key(number - 1, "all"))
    return texts


def _store():
    """Return the client of the coordination service, without a public name in JAX; Orbax and Flax use it, too."""
    return distributed.global_state.client


def _key(number: int, whose: int | str) -> str:
    return f"largebatch/meeting/{number}/{whose}"


def _wait_for(store, key: str) -> str:
    """Wait for the value of `key`; return to Python at least every second, so that signals are handled.

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


NOTICE_SEC = 20.0  # after it a host logs for which hosts it waits
RETRY_SEC = 0.2
CONNECT_SEC = 5.0
TAKEN_PORT_SEC = 30.0  # for a process of an earlier start to exit
ANSWER_SEC = 10.0  # beyond the limit, so that host 0 reports first
LONGEST_LINE = 64 * 1024
MOST_NAMED = 8
BACKLOG = 1024  # hosts that connect at once


def call_roll(meeting: Meeting, limit_sec: float) -> None:
    """Wait for the rendezvous: return on every host once all have connected.

    Raises:
      UserError: hosts are missing after `limit_sec`, or two have the same index; on every host.
    """
    if meeting.host_index == 0:
        _HostZero(meeting, limit_sec).wait_for_all()
    else:
        _report_to_host_zero(meeting, limit_sec)


class _HostZero:
    """Host 0's part of the rendezvous: the connected hosts by their connections."""

    def __init__(self, meeting: Meeting, limit_sec: float):
        self._meeting, self._begin, self._limit_sec = meeting, time.monotonic(), limit_sec
        self._selector = selectors.DefaultSelector()
        self._lines: dict[socket.socket, bytes] = {}  # bytes read of hosts that are not known yet
        self._hosts: dict[socket.socket, tuple[int, str]] = {}  # (host index, name) of known hosts

    def wait_for_all(self) -> None:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(_listen(self._meeting, min(self._limit_sec, TAKEN_PORT_SEC)))
            stack.callback(self._close)
            self._selector.register(server, selectors.EVENT_READ)
            is_noticed = False
            while len(self._hosts) < self._meeting.num_hosts - 1:
                waited = time.monotonic() - self._begin
                if waited > self._limit_sec:
                    self._fail(
                        f"devices.join_sec: after {self._limit_sec:g} s {self._missing()}; {_advice(self._meeting)}"
                    )
                if waited > NOTICE_SEC and not is_noticed:
                    is_noticed = True
                    log.warning("waiting: %s; %s", self._missing(), _advice(self._meeting))
                for key, _ in self._selector.select(timeout=RETRY_SEC):
                    if key.fileobj is server:
                        self._accept(server)
                    else:
                        self._read(key.fileobj)
            self._tell_all({"go": True})

    def _accept(self, server: socket.socket) -> None:
        connection, _ = server.accept()
        connection.setblocking(False)
        self._lines[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        """Read from a connection: a host's line, the end of a host, or a stranger."""
        try:
            data = connection.recv(LONGEST_LINE)
        except OSError:
            data = b""
        if not data or connection in self._hosts or len(self._lines[connection]) > LONGEST_LINE:
            self._drop(connection)
            return
        self._lines[connection] += data
        if not self._lines[connection].endswith(b"\n"):
            return
        said = _parse(self._lines[connection])
        try:
            host, hosts, name = int(said["host"]), int(said["hosts"]), str(said["name"])
        except (KeyError, TypeError, ValueError, OverflowError):
            host, hosts, name = -1, -1, ""
        if not 0 < host < hosts:  # not from this program
            self._drop(connection)
            return
        self._enter(connection, host, hosts, name)

    def _enter(self, connection: socket.socket, host: int, hosts: int, name: str) -> None:
        known = dict(self._hosts.values()) | {0: _own_name()}
        self._hosts[connection] = (host, name)
        if hosts != self._meeting.num_hosts:
            self._fail(
                f"devices.num_hosts: {self._meeting.num_hosts} on host 0, {hosts} on host {host} ({name}); "
                "allowed: the same on all hosts"
            )
        if host in known:
            self._fail(
                f"devices.host_index: two processes say that they are host {host}, on {known[host]} and on {name}; "
                "allowed: each index once. Was the command started twice?"
            )

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._lines.pop(connection, None)
        self._hosts.pop(connection, None)
        connection.close()

    def _missing(self) -> str:
        came = dict(self._hosts.values()) | {0: _own_name()}
        missing = [str(host) for host in range(self._meeting.num_hosts) if host not in came]
        there = [f"{host} on {came[host]}" for host in sorted(came)]
        word = "host" if len(missing) == 1 else "hosts"
        return (
            f"{word} {_listed(missing)} of {self._meeting.num_hosts} did not come to {self._meeting.address} "
            f"(there are: {_listed(there)}; seen here: {self._meeting.seen})"
        )

    def _fail(self, text: str) -> None:
        self._tell_all({"error": text})
        raise UserError(text)

    def _tell_all(self, answer: dict) -> None:
        for connection in self._hosts:
            with contextlib.suppress(OSError):  # the host is gone, as JAX will find
                connection.settimeout(CONNECT_SEC)
                connection.sendall(_line(answer))

    def _close(self) -> None:
        for connection in list(self._lines):
            self._drop(connection)
        self._selector.close()


def _report_to_host_zero(meeting: Meeting, limit_sec: float) -> None:
    """Report to host 0 and wait for its answer: the part of every other host in the rendezvous."""
    begin, is_noticed, problem = time.monotonic(), False, "no answer"
    host, _, port = meeting.address.rpartition(":")
    hello = {"host": meeting.host_index, "hosts": meeting.num_hosts, "name": _own_name()}
    while (waited := time.monotonic() - begin) < limit_sec:
        if waited > NOTICE_SEC and not is_noticed:
            is_noticed = True
            log.warning("waiting: %s; %s", _no_host_zero(meeting, problem), _advice(meeting))
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SEC) as connection:
                connection.sendall(_line(hello))
                answer = _wait_for_answer(connection, begin + limit_sec + ANSWER_SEC, meeting)
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(RETRY_SEC)
            continue
        if "error" in answer:
            raise UserError(str(answer["error"]))
        if answer.get("go") is True:
            time.sleep(RETRY_SEC)  # until JAX's service listens, which is then found at the first try
            return
        problem = "what answers there is not this program, or it has ended"
        time.sleep(RETRY_SEC)
    text = f"after {limit_sec:g} s {_no_host_zero(meeting, problem)}"
    raise UserError(f"devices.join_sec: {text}; {_advice(meeting)}")


def _wait_for_answer(connection: socket.socket, deadline: float, meeting: Meeting) -> dict:
    """Return host 0's answer, {} if there is none; return to Python every second, so that signals are handled."""
    data, is_noticed, begin = b"", False, time.monotonic()
    connection.settimeout(1.0)
    while time.monotonic() < deadline:
        if time.monotonic() - begin > NOTICE_SEC and not is_noticed:
            is_noticed = True
            log.warning("waiting: host 0 at %s is there, other hosts are not; it names them", meeting.address)
        try:
            more = connection.recv(LONGEST_LINE)
        except TimeoutError:
            continue
        data += more
        if not more or data.endswith(b"\n"):
            break
    return _parse(data)


def _listen(meeting: Meeting, patience_sec: float) -> socket.socket:
    """Open a socket at the address of JAX's future service.

    Raises:
      UserError: the port is taken.
    """
    bound, port = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", ""), meeting.address.rpartition(":")[2]
    host = ""
    if bound:
        host, _, port = bound.rpartition(":")
    host = host.strip("[]")
    deadline = time.monotonic() + patience_sec
    while True:
        try:
            if host in ("", "::") and socket.has_dualstack_ipv6():
                options = {"family": socket.AF_INET6, "dualstack_ipv6": True}
                return socket.create_server(("", int(port)), backlog=BACKLOG, **options)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, int(port)), family=family, backlog=BACKLOG)
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"devices.coordinator_address: host 0 cannot listen on port {port} ({error.strerror}); "
                    "allowed: a port that is free there, as :PORT or in JAX_COORDINATOR_PORT"
                ) from error
        time.sleep(RETRY_SEC)


def _no_host_zero(meeting: Meeting, problem: str) -> str:
    return (
        f"host 0 did not answer at {meeting.address} ({problem}); this is host {meeting.host_index} of "
        f"{meeting.num_hosts} on {_own_name()} (seen here: {meeting.seen})"
    )


def _advice(meeting: Meeting) -> str:
    """Return advice on missing hosts, such as a command that was started on one host of a pod only."""
    how = ""
    if "Slurm" in meeting.seen:
        how = " (srun does)"
    elif "Open MPI" in meeting.seen or "MPI:" in meeting.seen:
        how = " (mpirun does)"
    elif "no variable" in meeting.seen or "TPU" in meeting.seen:
        how = " (on a TPU pod: gcloud compute tpus tpu-vm ssh NAME --worker=all)"
    return f"the same command must be started on every host{how}"


def _listed(words: list[str]) -> str:
    more = [f"{len(words) - MOST_NAMED} more"] if len(words) > MOST_NAMED else []
    return ", ".join([*words[:MOST_NAMED], *more])


def _own_name() -> str:
    return socket.gethostname()


def _line(message: dict) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _parse(line: bytes) -> dict:
    """Return the message of a line, {} if it is not one of ours."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}
