"""Watch over one start of a command on the hosts of a pod until it ends."""

import dataclasses
import signal
import time
from collections.abc import Callable

from largebatch.pod.processes import POLL_SEC, STOPPED, Hosts, Signals, say

STOP_GRACE_SEC = 60.0  # for all hosts that agreed to stop to exit, one by one
SETTLE_SEC = 0.5  # after the first failure, until all hosts that died of it have ended
MAX_SIGNALS = 2  # signals that are passed on; after one more the pod itself exits
SHOWN_LINES = 15


@dataclasses.dataclass(frozen=True)
class Ending:
    """Ending of one start of the command.

    kind: "done"; "stopped", when the hosts agreed to save and stop; "killed", when a signal ended some of them;
      "failed", when the command did.
    code: exit code for the pod: 0, 130 or 143, or that of the first host that failed (128 + signal if
      killed).
    """

    kind: str
    code: int = 0
    num_killed: int = 0  # number of killed hosts
    was_told: bool = False  # True if `wants_stop` told the hosts to stop


def watch(hosts: Hosts, signals: Signals, wants_stop: Callable[[], bool] = lambda: False) -> Ending:
    """Watch the hosts until they have ended; some may still run if others failed.

    Signals are passed on: the first tells the hosts to save and stop, the second to leave at once.

    Args:
      wants_stop: function that is polled until it returns True: then the hosts are told to save and stop.
    """
    num_handled, is_told, stopping_since = 0, False, None
    while True:
        for number in signals.received[num_handled:]:
            if not (is_told and num_handled == 0):  # to hosts that were told it means "leave at once"
                hosts.send(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            num_handled += 1
        if num_handled > MAX_SIGNALS:
            return Ending("stopped", 128 + signals.received[-1])
        if not is_told and num_handled == 0 and wants_stop():
            is_told = True
            hosts.send(signal.SIGTERM)

        codes = hosts.codes()
        if is_told or num_handled:  # a host may get the signal before it handles signals
            codes = [128 - code if code in (-signal.SIGINT, -signal.SIGTERM) else code for code in codes]
        stopped = [code for code in codes if code in STOPPED]
        failed = [code for code in codes if code and code not in STOPPED]
        if stopped:  # hosts that fail now fail because their peers have left
            stopping_since = stopping_since or time.monotonic()
            is_late = time.monotonic() - stopping_since > STOP_GRACE_SEC
            if is_late:
                say(f"some hosts did not stop within {STOP_GRACE_SEC:.0f} s of the others; ending them")
            if failed or is_late or num_handled > 1 or None not in codes:
                return Ending("stopped", stopped[0], was_told=is_told)
        elif failed:
            time.sleep(SETTLE_SEC)
            return _failure(hosts, is_told)
        elif None not in codes:
            return Ending("done")
        time.sleep(POLL_SEC)


def _failure(hosts: Hosts, was_told: bool) -> Ending:
    """Print which host failed and how, with its last lines; return the ending."""
    codes = hosts.codes()
    host = culprit_of(codes)
    code = codes[host]
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    say(f"host {host} {how}; ending the others")
    for line in hosts.last_lines(host, SHOWN_LINES):
        say(f"host {host}: {line}")
    killed = [other for other in codes if other is not None and other < 0 and other != -signal.SIGABRT]
    if code in killed:
        return Ending("killed", 128 - code, len(killed), was_told)
    return Ending("failed", 128 - code if code < 0 else code, was_told=was_told)


def culprit_of(codes: list[int | None]) -> int:
    """Return the host that most likely failed first.

    When one host dies, JAX aborts the others or they raise an exception. So aborted and failed hosts rank last.
    """
    failed = [host for host, code in enumerate(codes) if code and code not in STOPPED]
    return min(failed, key=lambda host: (codes[host] == -signal.SIGABRT, codes[host] > 0))
