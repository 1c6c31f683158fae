"""A pod on one machine: several processes, each with its own CPU devices, joined over loopback.

    python -m largebatch.pod --hosts 4 --devices 8 -- python train.py --config configs/eurosat.py

Shows the output of host 0. When a process fails, all others are ended, the last lines of its output are shown, and
its exit code becomes that of the pod. SIGTERM and SIGINT are passed on: the first tells the hosts to save and stop,
the second to leave at once. Nothing is left running, however the pod ends.
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
# Exit codes of hosts that agreed to stop. They leave one by one, all of them within the grace.
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
STOP_GRACE_SEC = 60.0
MAX_SIGNALS = 2  # passed on; after one more the pod itself leaves
POLL_SEC = 0.1
SHOWN_LINES = 15
COLLECTIVE_TIMEOUT_SEC = 3600
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Runs in the child: gives it a session, and on Linux SIGKILL from the kernel when this process dies."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(command: list[str], hosts: int, devices_per_host: int, logs: list, processes: list) -> None:
    """Starts one process per host and adds it to `processes` at once, so that `_end_all` finds it."""
    address = f"127.0.0.1:{_free_port()}"
    flags = [
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={devices_per_host}",
        # The simulated devices share a few cores, so one may wait for the others as long as all of them work.
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
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=logs[host] if host else None,
            stderr=subprocess.STDOUT if host else None,
            preexec_fn=_die_with_parent,
        )
        processes.append(process)


def _pass_on(number: int, processes: list[subprocess.Popen]) -> None:
    """Sends a signal to every host and whatever it has started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _end_all(processes: list[subprocess.Popen]) -> None:
    """Sends SIGINT to every process group that is left, and SIGKILL to those still there after GRACE_SEC."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # nothing interrupts the cleaning up
    deadline = time.monotonic() + GRACE_SEC
    for number in (signal.SIGINT, signal.SIGKILL):
        _pass_on(number, processes)
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
        processes: list[subprocess.Popen] = []
        stack.callback(_end_all, processes)
        signals: list[int] = []  # that came so far
        for number in _SIGNALS:
            signal.signal(number, lambda number, _: signals.append(number))
        _start(command, hosts, devices_per_host, logs, processes)
        return _wait(processes, logs, signals)


def _wait(processes: list[subprocess.Popen], logs: list, signals: list[int]) -> int:
    """Passes signals on until the pod has ended; returns its exit code, see `run`.

    Args:
      signals: grows while this waits.
    """
    num_passed_on, stopping_since = 0, None
    while True:
        for number in signals[num_passed_on:]:
            _pass_on(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM, processes)
            num_passed_on += 1
        if num_passed_on > MAX_SIGNALS:
            return 128 + signals[-1]
        codes = [process.poll() for process in processes]
        failed = [host for host, code in enumerate(codes) if code and code not in STOPPED]
        stopped = [code for code in codes if code in STOPPED]
        # While hosts stop, JAX may abort one whose peers have left; that is no failure.
        if stopped and not any(codes[host] > 0 for host in failed):
            stopping_since = stopping_since or time.monotonic()
            is_late = time.monotonic() - stopping_since > STOP_GRACE_SEC
            if failed or is_late or num_passed_on > 1 or None not in codes:
                return stopped[0]
        elif failed:
            # When one host dies, JAX aborts the others or they raise an exception. So those are named last.
            culprit = min(failed, key=lambda host: (codes[host] == -signal.SIGABRT, codes[host] > 0))
            return _report(culprit, codes[culprit], logs[culprit])
        elif all(code == 0 for code in codes):
            return 0
        time.sleep(POLL_SEC)


def _report(host: int, code: int, log) -> int:
    """Says which host failed and how, with the last lines of its `log`; returns the exit code of the pod."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    print(f"pod: host {host} {how}; ending the others", file=sys.stderr)
    if host > 0:  # the output of host 0 has been shown
        log.seek(0)
        for line in log.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]:
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
