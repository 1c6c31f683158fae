"""Functions of the update that are constant by stages."""

from typing import NamedTuple

import numpy as np


class PiecewiseConstant(NamedTuple):
    """A value that holds from one update to another: int64 first updates (ascending from 0), and the values."""

    starts: np.ndarray
    values: np.ndarray

    @classmethod
    def constant(cls, value) -> "PiecewiseConstant":
        """One value for ever."""
        return cls(np.zeros(1, np.int64), np.array([value]))

    def at(self, updates: np.ndarray) -> np.ndarray:
        """The values at `updates`; the last one holds for ever."""
        return self.values[np.searchsorted(self.starts, updates, side="right") - 1]

    def start_of(self, updates: np.ndarray) -> np.ndarray:
        """The first update of the stage that each of `updates` is in, int64."""
        return self.starts[np.searchsorted(self.starts, updates, side="right") - 1]

    def sum_before(self, updates: np.ndarray) -> np.ndarray:
        """Sum of the values of all updates before `updates`, int64, in closed form."""
        stage = np.searchsorted(self.starts, updates, side="right") - 1
        return self._before()[stage] + (updates - self.starts[stage]) * self.values[stage]

    def updates_to(self, total: np.ndarray) -> np.ndarray:
        """How many updates it takes to reach the sum `total`, which is above 0; int64."""
        before = self._before()
        stage = np.searchsorted(before, total, side="left") - 1
        return (self.starts[stage] + -(-(total - before[stage]) // self.values[stage])).astype(np.int64)

    def cut(self, length: int) -> "PiecewiseConstant":
        """Of the first `length` updates."""
        count = np.searchsorted(self.starts, length)
        return PiecewiseConstant(self.starts[:count], self.values[:count])

    def _before(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(np.diff(self.starts) * self.values[:-1])])
