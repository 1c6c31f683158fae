"""Watches one start of a command on the hosts of a pod until it ends."""

import dataclasses
import signal
import time
from collections.abc import Callable

from largebatch.pod.processes import POLL_SEC, STOPPED, Hosts, Signals, say

STOP_GRACE_SEC = 60.0  # for hosts that agreed to stop: they leave one by one, all of them within it
SETTLE_SEC = 0.5  # after the first sign of trouble, until all that died of it have ended
MAX_SIGNALS = 2  # passed on; after one more the pod itself leaves
SHOWN_LINES = 15


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a start of the command ended.

    kind: "done"; "stopped", when the hosts agreed to save and stop; "killed", when a signal ended some of them;
      "failed", when the command did.
    code: what the pod's exit code is from it: 0, 130 or 143, or that of the first host that failed (128 + signal if
      killed).
    """

    kind: str
    code: int = 0
    num_killed: int = 0  # hosts
    was_told: bool = False  # to stop, by `wants_stop`


def watch(hosts: Hosts, signals: Signals, wants_stop: Callable[[], bool] = lambda: False) -> Ending:
    """Waits until the hosts have ended; some may still run where others failed.

    Signals are passed on: the first tells the hosts to save and stop, the second to leave at once.

    Args:
      wants_stop: asked again and again, until it is True: then the hosts are told to save and stop.
    """
    num_handled, is_told, stopping_since = 0, False, None
    while True:
        for number in signals.received[num_handled:]:
            if not (is_told and num_handled == 0):  # hosts that were told take one more for "leave at once"
                hosts.send(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            num_handled += 1
        if num_handled > MAX_SIGNALS:
            return Ending("stopped", 128 + signals.received[-1])
        if not is_told and num_handled == 0 and wants_stop():
            is_told = True
            hosts.send(signal.SIGTERM)

        codes = hosts.codes()
        if is_told or num_handled:  # a host may get the signal before it answers signals
            codes = [128 - code if code in (-signal.SIGINT, -signal.SIGTERM) else code for code in codes]
        stopped = [code for code in codes if code in STOPPED]
        failed = [code for code in codes if code and code not in STOPPED]
        if stopped:  # what fails now, fails because its peers have left
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
    """Says which host failed and how, with its last lines."""
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
    """The host that failed first, most likely.

    When one host dies, JAX aborts the others or they raise an exception. So those are taken last.
    """
    failed = [host for host, code in enumerate(codes) if code and code not in STOPPED]
    return min(failed, key=lambda host: (codes[host] == -signal.SIGABRT, codes[host] > 0))
