"""How many hosts there are at a moment, as a pod that may lose some has to know."""

import dataclasses
import math
from typing import Protocol

import numpy as np

from largebatch.optim.traces import AvailableDevices
from largebatch.util import UserError


class Availability(Protocol):
    """Tells how many hosts there are; `seconds` count from the start of the pod."""

    def count(self, seconds: float) -> int:
        """Hosts that could run now."""

    def lose(self, num_hosts: int, seconds: float) -> None:
        """Notes that so many hosts have just died."""

    def is_over(self, seconds: float) -> bool:
        """Whether the count will not change any more by itself."""


class ReturningHosts:
    """A fixed number of hosts, of which a dead one is there again after some time."""

    def __init__(self, num_hosts: int, return_sec: float):
        self._num_hosts, self._return_sec = num_hosts, return_sec
        self._deaths: list[float] = []

    def count(self, seconds: float) -> int:
        """See `Availability`."""
        return self._num_hosts - sum(seconds < death + self._return_sec for death in self._deaths)

    def lose(self, num_hosts: int, seconds: float) -> None:
        """See `Availability`."""
        self._deaths += [seconds] * num_hosts

    def is_over(self, seconds: float) -> bool:
        """See `Availability`."""
        return self._return_sec == math.inf or all(seconds >= death + self._return_sec for death in self._deaths)


@dataclasses.dataclass(frozen=True)
class TracedHosts:
    """Hosts that come and go as a trace says. One that dies of something else is there again at once."""

    starts: np.ndarray  # float64 [changes], seconds from which a count holds; the first is 0
    counts: np.ndarray  # int64 [changes]

    @classmethod
    def scaled(
        cls, devices: AvailableDevices, *, per_host: int, seconds_per_unit: float, max_hosts: int
    ) -> "TracedHosts":
        """The hosts that a trace of devices makes.

        Args:
          per_host: the trace's devices that make a host; what is left over makes none.
          seconds_per_unit: seconds that a unit of the trace's time takes.
          max_hosts: that there may be.
        Raises:
          UserError: there are more at some time.
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
        """See `Availability`."""
        return int(self.counts[np.searchsorted(self.starts, seconds, side="right") - 1])

    def lose(self, num_hosts: int, seconds: float) -> None:
        """See `Availability`."""

    def is_over(self, seconds: float) -> bool:
        """See `Availability`."""
        return seconds >= self.starts[-1]
