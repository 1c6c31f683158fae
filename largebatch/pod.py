"""A pod on one machine: several processes, each with its own CPU devices, joined over loopback.

    python -m largebatch.pod --hosts 4 --devices 8 -- python train.py --config configs/eurosat.py
    python -m largebatch.pod --availability trace.csv --hosts 4 --devices 2 -- python train.py --workdir runs/a

Shows the output of host 0. When a process fails, all others are ended, the last lines of its output are shown, and
its exit code becomes that of the pod. The first SIGTERM or SIGINT tells the hosts to save and stop, the second to
leave at once. Nothing is left running, however the pod ends.

With --availability hosts come and go as a file says that counts devices over time: at each change all save and
stop, and the command starts again on as many hosts as there are then.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from largebatch.hosts.clusters import HOST_INDEX_VARIABLE, NUM_HOSTS_VARIABLE
from largebatch.optim import traces
from largebatch.util import UserError, address_argument, printable

POLL_SEC = 0.1
GRACE_SEC = 5.0
SETTLE_SEC = 0.5  # after the first failure, until all hosts that died of it have ended
SHOWN_LINES = 15
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes of hosts that agreed to stop
PR_SET_PDEATHSIG = 1


class Hosts:
    """Processes of one start of a command on several hosts; a context manager that ends them on exit."""

    def __init__(self, command: list[str], num_hosts: int, devices_per_host: int):
        self._processes: list[subprocess.Popen] = []
        self._logs = [tempfile.TemporaryFile("w+b") for _ in range(num_hosts)]  # noqa: SIM115
        address = f"127.0.0.1:{free_port()}"
        variables = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_COORDINATOR_BIND_ADDRESS": address,
            "JAX_NUM_CPU_DEVICES": str(devices_per_host),
            NUM_HOSTS_VARIABLE: str(num_hosts),
        }
        for host, log in enumerate(self._logs):
            process = subprocess.Popen(
                command,
                env=os.environ | variables | {HOST_INDEX_VARIABLE: str(host)},
                stdin=subprocess.DEVNULL,
                stdout=log if host else None,
                stderr=subprocess.STDOUT if host else None,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),
            )
            self._processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Send SIGINT to every remaining process group, and SIGKILL to those that remain after GRACE_SEC."""
        deadline = time.monotonic() + GRACE_SEC
        for number in (signal.SIGINT, signal.SIGKILL):
            self.send(number)
            while time.monotonic() < deadline and None in self.codes():
                time.sleep(POLL_SEC)
        for process, log in zip(self._processes, self._logs, strict=True):
            process.wait()
            log.close()

    def codes(self) -> list[int | None]:
        """Return the exit code of each host, below 0 if a signal killed it; None while it runs."""
        return [process.poll() for process in self._processes]

    def send(self, number: int) -> None:
        """Send a signal to every host and its child processes."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def name_failure(self) -> int:
        """Print which host failed first and how, with its last lines; return the exit code for the pod.

        When one host dies, JAX aborts the others or they raise an exception. So aborted and failed hosts rank last.
        """
        codes = self.codes()
        failed = [host for host, code in enumerate(codes) if code and code not in STOPPED]
        host = min(failed, key=lambda host: (codes[host] == -signal.SIGABRT, codes[host] > 0))
        code = codes[host]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        say(f"host {host} {how}; ending the others")
        self._logs[host].seek(0)
        for line in self._logs[host].read().decode(errors="replace").splitlines()[-SHOWN_LINES:]:
            say(f"host {host}: {line}")
        return 128 - code if code < 0 else code


def watch(hosts: Hosts, received: list[int], is_over: Callable[[], bool]) -> int | None:
    """Watch the hosts until they have ended; some may still run if others failed or a second signal came.

    Args:
      received: signals that the pod got; at the first the hosts are told to save and stop.
      is_over: function that is polled until it returns True: then the hosts are told to save and stop.
    Returns:
      The exit code for the pod; None if the hosts stopped because `is_over` was True.
    """
    is_told = False
    while len(received) < 2:
        if not is_told and (received or is_over()):
            is_told = True
            hosts.send(signal.SIGINT if signal.SIGINT in received else signal.SIGTERM)
        codes = hosts.codes()
        if is_told:  # a host may get the signal before it handles signals
            codes = [128 - code if code in (-signal.SIGINT, -signal.SIGTERM) else code for code in codes]
        stopped = [code for code in codes if code in STOPPED]
        failed = [code for code in codes if code and code not in STOPPED]
        if stopped and (failed or None not in codes):  # hosts that fail now fail because their peers have left
            return None if is_told and not received else stopped[0]
        if failed:
            time.sleep(SETTLE_SEC)
            return hosts.name_failure()
        if None not in codes:
            return 0
        time.sleep(POLL_SEC)
    return 128 + received[-1]


def read_availability(given: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Read the trace of --availability, or make one of --hosts all the time.

    Returns:
      The seconds from which each count of hosts holds, float64 [changes] from 0; and the counts, int64 [changes].
    Raises:
      UserError: the trace cannot be read, or has more hosts than --hosts at some time.
    """
    if given.availability is None:
        return np.zeros(1), np.array([given.hosts])
    devices = traces.read_availability(given.availability, "--availability")
    counts = devices.counts // given.trace_devices_per_host
    if counts.max() > given.hosts:
        row = int(np.argmax(counts > given.hosts))
        found = f"{devices.counted} {devices.counts[row]} at {devices.times[row]:.12g} is {counts[row]} hosts"
        raise UserError(f"--availability: {given.availability}: {found}; allowed: up to {given.hosts} (--hosts)")
    return (devices.times - devices.times[0]) * given.trace_seconds_per_unit, counts


def run(given: argparse.Namespace, received: list[int]) -> int:
    """Run the command, again at each change of the number of hosts; return the exit code of the pod."""
    starts, counts = read_availability(given)
    begin = time.monotonic()

    def hosts_now() -> int:
        return int(counts[np.searchsorted(starts, time.monotonic() - begin, side="right") - 1])

    while not received:
        if num_hosts := hosts_now():
            if given.availability:
                say(f"{time.monotonic() - begin:.1f} s: starting on {num_hosts} host{'s' * (num_hosts > 1)}")
            with Hosts(given.command, num_hosts, given.devices) as hosts:
                code = watch(hosts, received, lambda num_hosts=num_hosts: hosts_now() != num_hosts)
            if code is not None:
                return code
        elif time.monotonic() - begin >= starts[-1]:
            say("the trace ends without hosts (--availability)")
            return 1
        else:
            time.sleep(POLL_SEC)
    return 128 + received[0]


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def say(text: str) -> None:
    """Print a line about the pod."""
    print(f"pod: {text}", file=sys.stderr, flush=True)


def die_with_parent(number: int) -> None:
    """Start a session in a child process; on Linux the kernel sends it signal `number` when its parent dies."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; wrong usage ends the program with one line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m largebatch.pod", description=__doc__, formatter_class=raw)
    parser.add_argument("--hosts", type=int, required=True, help="number of processes; of a trace, the most")
    parser.add_argument("--devices", type=int, required=True, help="CPU devices of each process")
    parser.add_argument("--availability", type=address_argument, metavar="CSV", help="trace of devices over time")
    parser.add_argument(
        "--trace_devices_per_host", type=int, default=1, help="devices of the trace that make a host"
    )
    parser.add_argument("--trace_seconds_per_unit", type=float, default=1.0, help="seconds per unit of its time")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command to run on every host")
    given = parser.parse_args(arguments)
    if given.command[:1] == ["--"]:
        given.command = given.command[1:]
    if given.hosts < 1 or given.devices < 1 or not given.command:
        parser.error("--hosts and --devices must be at least 1, and a command must follow --")
    if given.trace_devices_per_host < 1 or not 0 < given.trace_seconds_per_unit < float("inf"):
        parser.error("--trace_devices_per_host must be at least 1, and --trace_seconds_per_unit above 0")
    return given


def main() -> int:
    """Run the pod; return the exit code."""
    given, received = parse(), []
    for number in SIGNALS:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        return run(given, received)
    except FileNotFoundError as error:
        problem = f"cannot run {error.filename!r}"
    except UserError as error:
        problem = printable(error)
    print(f"python -m largebatch.pod: error: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
