"""Elastic pod: when hosts die, the command starts again on the remaining ones.

The command has to resume by itself from its last checkpoint, as train.py with a --workdir does. When hosts return,
all are told to save and stop, and the command starts again on more. On a cluster the scheduler does this (see
docs/pods.md); this supervisor plays its part on one machine.
"""

import dataclasses
import time

from largebatch.pod.availability import Availability
from largebatch.pod.processes import POLL_SEC, Hosts, Signals, say
from largebatch.pod.watch import Ending, watch

EXIT_USAGE, EXIT_DIVERGED = 2, 3  # exit codes after which another start would not help


@dataclasses.dataclass(frozen=True)
class ElasticOptions:
    """Command of an elastic pod, and its limits on hosts and failures."""

    command: list[str]
    devices_per_host: int
    min_hosts: int  # with fewer the pod waits
    retries: int  # maximum consecutive failures
    healthy_sec: float  # a start that lasted so long resets the count of failures


class Supervisor:
    """Supervisor that starts the command again until it is done, is stopped, or fails too often.

    Args:
      availability: number of available hosts, by seconds since the supervisor was made.
    """

    def __init__(self, options: ElasticOptions, availability: Availability, signals: Signals):
        self._options, self._availability, self._signals = options, availability, signals
        self._start_time = time.monotonic()
        self._failures = 0  # consecutive ones

    def run(self) -> int:
        """Run the pod until its end; return its exit code."""
        while True:
            num_hosts = self._wait_for_hosts()
            if not num_hosts:
                return self._code_without_hosts()
            begin = self._seconds()
            ending = self._run_once(num_hosts)
            if ending.kind == "done" or self._signals.received or ending.code in (EXIT_USAGE, EXIT_DIVERGED):
                return ending.code
            if self._seconds() - begin >= self._options.healthy_sec:
                self._failures = 0
            self._note(ending)
            if self._failures > self._options.retries:
                self._say(f"giving up after {self._failures} failures in a row (--retries)")
                return ending.code
            self._pause(back_off_seconds(self._failures))

    def _run_once(self, num_hosts: int) -> Ending:
        """Run the command until it ends, for whatever reason."""
        self._say(f"starting on {num_hosts} hosts")
        with Hosts(self._options.command, num_hosts, self._options.devices_per_host) as hosts:
            ending = watch(hosts, self._signals, lambda: self._is_resized(num_hosts))
            if not self._signals.received:
                hosts.kill()  # hosts that wait for a dead one
        return ending

    def _note(self, ending: Ending) -> None:
        """Record the ending of a start that is followed by another."""
        if ending.kind == "stopped":
            if not ending.was_told:  # one host alone got a signal, as from a cloud that takes it back
                self._say("a host was told to go; all have stopped")
                self._availability.lose(1, self._seconds())
            return
        self._failures += 1
        self._availability.lose(ending.num_killed, self._seconds())

    def _is_resized(self, num_hosts: int) -> bool:
        """Return True if the number of available hosts differs from that of the running command."""
        wanted = self._wanted_hosts()
        if wanted != num_hosts:
            self._say(f"{num_hosts} hosts run and {wanted} are there: saving")
        return wanted != num_hosts

    def _wanted_hosts(self) -> int:
        """Return the number of hosts to run on now; 0 to wait."""
        count = self._availability.count(self._seconds())
        return count if count >= self._options.min_hosts else 0

    def _wait_for_hosts(self) -> int:
        """Wait until there are enough hosts; return how many, 0 if a signal came or no more will come."""
        is_waiting = False
        while not self._signals.received:
            if wanted := self._wanted_hosts():
                return wanted
            if self._availability.is_over(self._seconds()):
                return 0
            if not is_waiting:
                count, is_waiting = self._availability.count(self._seconds()), True
                self._say(f"waiting: {count} hosts are there, at least {self._options.min_hosts} are needed")
            time.sleep(POLL_SEC)
        return 0

    def _code_without_hosts(self) -> int:
        if self._signals.received:
            return 128 + self._signals.received[0]
        self._say(f"giving up: there will not be {self._options.min_hosts} hosts any more")
        return 1

    def _pause(self, seconds: float) -> None:
        """Wait for some seconds, or until a signal comes."""
        deadline = self._seconds() + seconds
        while self._seconds() < deadline and not self._signals.received:
            time.sleep(POLL_SEC)

    def _seconds(self) -> float:
        """Return the seconds since the pod began."""
        return time.monotonic() - self._start_time

    def _say(self, text: str) -> None:
        say(f"{self._seconds():.1f} s: {text}")


def back_off_seconds(failures: int) -> float:
    """Return the seconds to wait after consecutive failures: none after the first, then 1, 2, 4, ... up to 60."""
    return 0.0 if failures <= 1 else min(2.0 ** min(failures - 2, 6), 60.0)
