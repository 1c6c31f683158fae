"""Number of available hosts over time, for a pod that may lose some."""

import dataclasses
import math
from typing import Protocol

import numpy as np

from largebatch.optim.traces import AvailableDevices
from largebatch.util import UserError


class Availability(Protocol):
    """Number of available hosts over time; `seconds` count from the start of the pod."""

    def count(self, seconds: float) -> int:
        """Return the number of hosts that could run now."""

    def lose(self, num_hosts: int, seconds: float) -> None:
        """Record that `num_hosts` hosts have just died."""

    def is_over(self, seconds: float) -> bool:
        """Return True if the count will not change any more by itself."""


class ReturningHosts:
    """Fixed number of hosts, of which a dead one returns after some time."""

    def __init__(self, num_hosts: int, return_sec: float):
        self._num_hosts, self._return_sec = num_hosts, return_sec
        self._deaths: list[float] = []

    def count(self, seconds: float) -> int:
        """Return the number of hosts that could run now."""
        return self._num_hosts - sum(seconds < death + self._return_sec for death in self._deaths)

    def lose(self, num_hosts: int, seconds: float) -> None:
        """Record that `num_hosts` hosts have just died."""
        self._deaths += [seconds] * num_hosts

    def is_over(self, seconds: float) -> bool:
        """Return True if no dead host will return any more."""
        return self._return_sec == math.inf or all(seconds >= death + self._return_sec for death in self._deaths)


@dataclasses.dataclass(frozen=True)
class TracedHosts:
    """Hosts that come and go by a trace; one that dies of another cause returns at once."""

    starts: np.ndarray  # float64 [changes], seconds at which a count begins; the first is 0
    counts: np.ndarray  # int64 [changes]

    @classmethod
    def scaled(
        cls, devices: AvailableDevices, *, per_host: int, seconds_per_unit: float, max_hosts: int
    ) -> "TracedHosts":
        """Convert a trace of devices to one of hosts.

        Args:
          per_host: number of the trace's devices per host; a remainder makes no host.
          seconds_per_unit: seconds per unit of the trace's time.
          max_hosts: largest allowed number of hosts.
        Raises:
          UserError: the trace has more hosts than `max_hosts` at some time.
        """
        starts = (devices.times - devices.times[0]) * seconds_per_unit
        counts = devices.counts // per_host
        if counts.max() > max_hosts:
            row = int(np.argmax(counts > max_hosts))
            found = f"{devices.counted} {devices.counts[row]} at {devices.times[row]:.12g} is {counts[row]} hosts"
            raise UserError(
                f"--availability: {devices.path}: {found}; allowed: up to {max_hosts} (--hosts, "
                "--trace_devices_per_host)"
            )
        return cls(starts, counts)

    def count(self, seconds: float) -> int:
        """Return the number of hosts that the trace has now."""
        return int(self.counts[np.searchsorted(self.starts, seconds, side="right") - 1])

    def lose(self, num_hosts: int, seconds: float) -> None:
        """Do nothing: hosts that die return at once."""

    def is_over(self, seconds: float) -> bool:
        """Return True after the last change of the trace."""
        return seconds >= self.starts[-1]
