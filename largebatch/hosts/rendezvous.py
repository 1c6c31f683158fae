"""Rendezvous of the hosts before JAX starts: JAX aborts where hosts are missing, without their names."""

import contextlib
import json
import logging
import os
import socket
import time

from largebatch.hosts.clusters import Here, Place
from largebatch.util import UserError

log = logging.getLogger("largebatch")

NOTICE_SEC = 20.0  # after it host 0 logs for whom it waits
RETRY_SEC = 0.2
CONNECT_SEC = 5.0
TAKEN_PORT_SEC = 30.0
BACKLOG = 1024  # hosts that connect at once
ADVICE = "the same command must be started on every host, as srun, mpirun and `gcloud ... --worker=all` do"


def meet(place: Place, limit_sec: float) -> list[Here]:
    """Wait until all hosts have come to host 0, at the address of JAX's future service.

    Returns:
      What each host says of itself, by host index.
    Raises:
      UserError: hosts are missing after `limit_sec`, or two have the same index; on every host that came.
    """
    answer = _receive_hosts(place, limit_sec) if place.host_index == 0 else _report(place, limit_sec)
    if "error" in answer:
        raise UserError(answer["error"])
    return [Here(*said) for said in answer["hosts"]]


def _receive_hosts(place: Place, limit_sec: float) -> dict:
    """Receive the other hosts and send each of them the answer: host 0's part."""
    came, error, deadline, notice = {0: Here.now()}, "", time.monotonic() + limit_sec, time.monotonic() + NOTICE_SEC
    with contextlib.ExitStack() as stack:
        server, connections = stack.enter_context(_listen(place)), []
        while not error and len(came) < place.num_hosts:
            missing = [str(host) for host in range(place.num_hosts) if host not in came]
            there = ", ".join(f"{host} on {came[host].name}" for host in sorted(came))
            text = f"hosts {', '.join(missing)} of {place.num_hosts} did not come to {place.address}"
            text += f" (there: {there}; {place.seen}); {ADVICE}"
            if time.monotonic() > deadline:
                error = f"devices.join_sec: after {limit_sec:g} s {text}"
            elif time.monotonic() > notice:
                notice = deadline
                log.warning("waiting: %s", text)
            with contextlib.suppress(OSError, ValueError, TypeError, LookupError):  # nobody came, or a stranger
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(CONNECT_SEC)
                said = json.loads(connection.makefile("rb").readline(1 << 16))
                host, here = said["host"], Here(*said["here"])
                if host not in range(1, said["num_hosts"]):
                    continue
                connections.append(connection)
                if said["num_hosts"] != place.num_hosts:
                    error = f"devices.num_hosts: {place.num_hosts} on host 0, {said['num_hosts']} on host {host}; "
                    error += "allowed: the same on all hosts"
                elif host in came:
                    names = f"on {came[host].name} and on {here.name}"
                    error = f"devices.host_index: two processes say that they are host {host}, {names}; "
                    error += "allowed: each index once. Was the command started twice?"
                came[host] = here
        answer = {"error": error} if error else {"hosts": [came[host] for host in range(place.num_hosts)]}
        for connection in connections:
            with contextlib.suppress(OSError):  # it is gone, as JAX will find
                connection.sendall(json.dumps(answer).encode() + b"\n")
    return answer


def _report(place: Place, limit_sec: float) -> dict:
    """Report to host 0 and return its answer: the part of every other host."""
    hello = {"host": place.host_index, "num_hosts": place.num_hosts, "here": Here.now()}
    host, _, port = place.address.rpartition(":")
    deadline, problem = time.monotonic() + limit_sec, ""
    while time.monotonic() < deadline:
        with contextlib.suppress(ValueError):  # what answers is not this program, or has ended
            try:
                with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SEC) as connection:
                    connection.sendall(json.dumps(hello).encode() + b"\n")
                    connection.settimeout(limit_sec + CONNECT_SEC)  # host 0 gives up first, and says why
                    return json.loads(connection.makefile("rb").readline())
            except OSError as error:
                problem = f": {error.strerror or error}"
        time.sleep(RETRY_SEC)
    text = f"host 0 of {place.num_hosts} did not answer host {place.host_index} at {place.address}{problem}"
    return {"error": f"devices.join_sec: after {limit_sec:g} s {text} ({place.seen}); {ADVICE}"}


def _listen(place: Place) -> socket.socket:
    """Open host 0's socket; a process of an earlier start may hold its port a little longer.

    Raises:
      UserError: the port stays taken.
    """
    bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f":{place.address.rpartition(':')[2]}")
    host, _, port = bound.rpartition(":")
    is_any = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_any or ":" in host else socket.AF_INET
    deadline = time.monotonic() + TAKEN_PORT_SEC
    while True:
        try:
            address = host.strip("[]"), int(port)
            server = socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=is_any)
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"devices.coordinator_address: host 0 cannot listen on port {port} ({error.strerror}); "
                    "allowed: a port that is free there, as :PORT or in JAX_COORDINATOR_PORT"
                ) from error
            time.sleep(RETRY_SEC)
        else:
            server.settimeout(RETRY_SEC)
            return server
