"""A pod on one machine: several processes, each with its own CPU devices, joined over loopback.

    python -m largebatch.pod --hosts 4 --devices 8 -- python train.py --config configs/eurosat.py

Streams the output of host 0. When a process ends with an error, all others are ended, the end of its
output is shown, and the exit code is its own. SIGTERM and SIGINT are passed on, once to save and stop,
twice to leave at once. Nothing is left running, however this ends.
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

from largebatch.hosts.start import HOST_INDEX_VARIABLE, NUM_HOSTS_VARIABLE

GRACE_SEC = 5.0
# Exit codes of hosts that agreed to stop; they leave one by one within the grace.
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
STOP_GRACE_SEC = 60.0
POLL_SEC = 0.1
SHOWN_LINES = 15
COLLECTIVE_TIMEOUT_SEC = 3600
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """In the child: its own session, and SIGKILL from the kernel if this process dies unseen (Linux)."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(command: list[str], hosts: int, devices_per_host: int, logs: list, processes: list) -> None:
    """Adds one process per host to `processes`, as each is started."""
    address = f"127.0.0.1:{_free_port()}"
    flags = [
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={devices_per_host}",
        # A simulated device waits for the others as long as two cores need for all of their work.
        f"--xla_cpu_collective_call_terminate_timeout_seconds={COLLECTIVE_TIMEOUT_SEC}",
    ]
    for host in range(hosts):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_COORDINATOR_BIND_ADDRESS": address,
            NUM_HOSTS_VARIABLE: str(hosts),
            HOST_INDEX_VARIABLE: str(host),
            "XLA_FLAGS": " ".join(flags).strip(),
            "JAX_NUM_CPU_DEVICES": str(devices_per_host),  # which JAX heeds before XLA_FLAGS
        }
        out = {} if host == 0 else {"stdout": logs[host], "stderr": subprocess.STDOUT}
        processes.append(
            subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent, **out)
        )


def _pass_on(number: int, processes: list[subprocess.Popen]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _end_all(processes: list[subprocess.Popen]) -> None:
    """SIGINT to every process group that is left, SIGKILL to what is there after GRACE_SEC."""
    for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)  # nothing interrupts the cleaning up
    deadline = time.monotonic() + GRACE_SEC
    for signal_ in (signal.SIGINT, signal.SIGKILL):
        _pass_on(signal_, processes)
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(POLL_SEC)
    for process in processes:
        process.wait()


def run(command: list[str], hosts: int, devices_per_host: int) -> int:
    """Runs `command` on `hosts` processes with `devices_per_host` CPU devices each.

    Returns:
      0 when all ended well, 130 or 143 when they stopped at a signal, else the exit code of the first that
      failed (128 + signal if killed).
    """
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+b")) for _ in range(hosts)]
        processes = []
        stack.callback(lambda: _end_all(processes))
        signals = []  # that came so far
        for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(name, lambda number, _: signals.append(number))
        _start(command, hosts, devices_per_host, logs, processes)
        passed_on, stopping_since = 0, None
        while True:
            for number in signals[passed_on:]:
                _pass_on(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM, processes)
                passed_on += 1
            if passed_on > 2:
                return 128 + signals[-1]
            codes = [process.poll() for process in processes]
            failed = [host for host, code in enumerate(codes) if code and code not in STOPPED]
            stopped = [code for code in codes if code in STOPPED]
            if stopped and not any(codes[host] > 0 for host in failed):
                stopping_since = stopping_since or time.monotonic()
                late = time.monotonic() - stopping_since > STOP_GRACE_SEC
                if failed or late or passed_on > 1 or None not in codes:
                    return stopped[0]
            elif failed:
                # The peers of a host that died end by an exception or are aborted by JAX: name them last.
                culprit = min(failed, key=lambda host: (codes[host] == -signal.SIGABRT, codes[host] > 0))
                return _report(culprit, codes[culprit], logs[culprit])
            elif all(code == 0 for code in codes):
                return 0
            time.sleep(POLL_SEC)


def _report(host: int, code: int, file) -> int:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    print(f"pod: host {host} {how}; ending the others", file=sys.stderr)
    if host:
        file.seek(0)
        for line in file.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]:
            print(f"pod: host {host}: {line}", file=sys.stderr)
    return 128 - code if code < 0 else code


def main() -> int:
    """Parses the command line and runs the pod; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m largebatch.pod", description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, required=True, help="number of processes")
    parser.add_argument("--devices", type=int, required=True, help="CPU devices of each process")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command to run on every host")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if arguments.hosts < 1 or arguments.devices < 1 or not command:
        parser.error("--hosts and --devices must be at least 1, and a command must follow --")
    try:
        return run(command, arguments.hosts, arguments.devices)
    except FileNotFoundError as error:
        parser.error(f"cannot run {error.filename!r}")


if __name__ == "__main__":
    sys.exit(main())
