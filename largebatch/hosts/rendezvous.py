"""Rendezvous of the hosts before JAX starts: JAX aborts where hosts are missing, without their names."""

import contextlib
import json
import logging
import os
import socket
import time

from largebatch.hosts.clusters import Here, Place, seen
from largebatch.util import UserError

log = logging.getLogger("largebatch")

NOTICE_SEC = 20.0  # after it host 0 logs for whom it waits
RETRY_SEC = 0.2
CONNECT_SEC = 5.0
ADVICE = "the same command must be started on every host, as srun, mpirun and `gcloud ... --worker=all` do"


def meet(place: Place, limit_sec: float) -> list[Here]:
    """Wait until all hosts have come to host 0, at the address of JAX's future service.

    Returns:
      What each host says of itself, by host index.
    Raises:
      UserError: hosts are missing after `limit_sec`, or two have the same index; on every host that came.
    """
    hosts, error = _receive_hosts(place, limit_sec) if place.host_index == 0 else _report(place, limit_sec)
    if error:
        raise UserError(error)
    return [Here(*said) for said in hosts]


def _receive_hosts(place: Place, limit_sec: float) -> tuple[list, str]:
    """Receive the other hosts and send each of them the answer, (hosts, error): host 0's part."""
    came, error, start, is_told = {0: Here.now()}, "", time.monotonic(), False
    with contextlib.ExitStack() as stack:
        server, connections = stack.enter_context(_listen(place)), []
        while not error and len(came) < place.num_hosts:
            there = "there: " + ", ".join(f"{host} on {came[host].name}" for host in sorted(came))
            missing = ", ".join(str(host) for host in range(place.num_hosts) if host not in came)
            text = f"hosts {missing} of {place.num_hosts} did not come to {place.address} ({there}; {seen()})"
            waited_sec = time.monotonic() - start
            if waited_sec > limit_sec:
                error = f"devices.join_sec: after {limit_sec:g} s {text}; {ADVICE}"
            elif waited_sec > NOTICE_SEC and not is_told:
                is_told = True
                log.warning("waiting: %s; %s", text, ADVICE)
            with contextlib.suppress(OSError, ValueError, TypeError):  # nobody came, or a stranger
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(CONNECT_SEC)
                host, num_hosts, said = json.loads(connection.makefile("rb").readline(1 << 16))
                here = Here(*said)
                connections.append(connection)
                if host in came or num_hosts != place.num_hosts:
                    error = f"devices: {here.name} says that it is host {host} of {num_hosts} ({there}); allowed: "
                    error += f"each of 0 to {place.num_hosts - 1} once. Was the command started twice?"
                came[host] = here
        answer = [came[host] for host in sorted(came)], error
        for connection in connections:
            with contextlib.suppress(OSError):  # it is gone, as JAX will find
                connection.sendall(json.dumps(answer).encode() + b"\n")
    return answer


def _report(place: Place, limit_sec: float) -> tuple[list, str]:
    """Report to host 0 and return its answer: the part of every other host."""
    host, _, port = place.address.rpartition(":")
    hello = json.dumps([place.host_index, place.num_hosts, Here.now()]).encode() + b"\n"
    deadline, problem = time.monotonic() + limit_sec, ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SEC) as connection:
                connection.sendall(hello)
                connection.settimeout(limit_sec + CONNECT_SEC)  # host 0 gives up first, and says why
                return json.loads(connection.makefile("rb").readline())
        except (OSError, ValueError) as error:  # a ValueError: what answers is not this program, or has ended
            problem = str(error)
        time.sleep(RETRY_SEC)
    text = f"host 0 of {place.num_hosts} did not answer host {place.host_index} at {place.address}"
    return [], f"devices.join_sec: after {limit_sec:g} s {text} ({problem}; {seen()}); {ADVICE}"


def _listen(place: Place) -> socket.socket:
    """Open host 0's socket, at JAX_COORDINATOR_BIND_ADDRESS or at all addresses of this machine."""
    bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f":{place.address.rpartition(':')[2]}")
    host, _, port = bound.rpartition(":")
    is_any = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_any or ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host.strip("[]"), int(port)), family=family, dualstack_ipv6=is_any)
    except OSError as error:
        text = f"devices.coordinator_address: host 0 cannot listen on port {port} ({error.strerror})"
        raise UserError(f"{text}; allowed: a free port, as :PORT or in JAX_COORDINATOR_PORT") from error
    server.settimeout(RETRY_SEC)
    return server
