"""Hosts of a pod on one machine: processes, each with its own CPU devices, joined over loopback."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

from largebatch.hosts.clusters import HOST_INDEX_VARIABLE, NUM_HOSTS_VARIABLE

GRACE_SEC = 5.0
POLL_SEC = 0.1
COLLECTIVE_TIMEOUT_SEC = 3600
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# Exit codes of hosts that agreed to stop.
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_PR_SET_PDEATHSIG = 1


class Signals:
    """Record of the signals that the pod receives."""

    def __init__(self):
        self.received: list[int] = []
        for number in SIGNALS:
            signal.signal(number, lambda number, _: self.received.append(number))


class Hosts:
    """Processes of one start of a command on several hosts; a context manager that ends them on exit."""

    def __init__(self, command: list[str], num_hosts: int, devices_per_host: int):
        self._command, self._num_hosts, self._devices_per_host = command, num_hosts, devices_per_host
        self._processes: list[subprocess.Popen] = []
        self._logs: list = []

    def __enter__(self):
        self._logs = [tempfile.TemporaryFile("w+b") for _ in range(self._num_hosts)]  # noqa: SIM115
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._end()
        for log in self._logs:
            log.close()

    def codes(self) -> list[int | None]:
        """Return the exit code of each host, below 0 if a signal killed it; None while it runs."""
        return [process.poll() for process in self._processes]

    def send(self, number: int) -> None:
        """Send a signal to every host and its child processes."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def kill(self) -> None:
        """End all hosts at once and wait for them."""
        self.send(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def last_lines(self, host: int, count: int) -> list[str]:
        """Return the last lines of a host's output; none of host 0, whose output was shown."""
        if host == 0:
            return []
        log = self._logs[host]
        log.seek(0)
        return log.read().decode(errors="replace").splitlines()[-count:]

    def _start(self) -> None:
        address = f"127.0.0.1:{free_port()}"
        flags = [
            os.environ.get("XLA_FLAGS", ""),
            f"--xla_force_host_platform_device_count={self._devices_per_host}",
            # The simulated devices share a few cores, so one may wait for the others as long as all work.
            f"--xla_cpu_collective_call_terminate_timeout_seconds={COLLECTIVE_TIMEOUT_SEC}",
        ]
        for host, log in enumerate(self._logs):
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_COORDINATOR_BIND_ADDRESS": address,
                NUM_HOSTS_VARIABLE: str(self._num_hosts),
                HOST_INDEX_VARIABLE: str(host),
                "XLA_FLAGS": " ".join(flags).strip(),
                "JAX_NUM_CPU_DEVICES": str(self._devices_per_host),  # takes precedence over XLA_FLAGS
            }
            process = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log if host else None,
                stderr=subprocess.STDOUT if host else None,
                preexec_fn=_die_with_parent,
            )
            self._processes.append(process)

    def _end(self) -> None:
        """Send SIGINT to every remaining process group, and SIGKILL to those that remain after GRACE_SEC."""
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}  # nothing interrupts this
        deadline = time.monotonic() + GRACE_SEC
        for number in (signal.SIGINT, signal.SIGKILL):
            self.send(number)
            while time.monotonic() < deadline and None in self.codes():
                time.sleep(POLL_SEC)
        for process in self._processes:
            process.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def say(text: str) -> None:
    """Print a line about the pod."""
    print(f"pod: {text}", file=sys.stderr, flush=True)


def _die_with_parent() -> None:
    """Start a session in the child, and on Linux request SIGKILL from the kernel when this process dies."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
