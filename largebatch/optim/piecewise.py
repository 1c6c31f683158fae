"""Functions of the update that are constant by stages."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class PiecewiseConstant:
    """A value that holds from one update to another; the last one holds for ever."""

    starts: np.ndarray  # int64 [stages], the first update of each stage, ascending from 0
    values: np.ndarray  # [stages], int64 or float64

    @classmethod
    def constant(cls, value) -> "PiecewiseConstant":
        """One value for ever."""
        return cls(np.zeros(1, np.int64), np.array([value]))

    def value_at(self, updates: np.ndarray) -> np.ndarray:
        """The values at `updates`."""
        return self.values[self._stage_of(updates)]

    def start_of(self, updates: np.ndarray) -> np.ndarray:
        """The first update of the stage that each of `updates` is in, int64."""
        return self.starts[self._stage_of(updates)]

    def total_before(self, updates: np.ndarray) -> np.ndarray:
        """Sum of the values of all updates before `updates`, int64, in closed form."""
        stage = self._stage_of(updates)
        return self._totals_at_starts()[stage] + (updates - self.starts[stage]) * self.values[stage]

    def updates_to(self, total: np.ndarray) -> np.ndarray:
        """How many updates it takes to reach the sum `total`, which is above 0; int64."""
        totals = self._totals_at_starts()
        stage = np.searchsorted(totals, total, side="left") - 1
        return (self.starts[stage] + -(-(total - totals[stage]) // self.values[stage])).astype(np.int64)

    def first(self, num_updates: int) -> "PiecewiseConstant":
        """The stages that begin within the first `num_updates` updates."""
        count = np.searchsorted(self.starts, num_updates)
        return PiecewiseConstant(self.starts[:count], self.values[:count])

    def changed_from(self, update: int, value) -> "PiecewiseConstant":
        """The same up to `update`, and `value` from there on."""
        before = self.starts < update
        return PiecewiseConstant(np.append(self.starts[before], update), np.append(self.values[before], value))

    def _stage_of(self, updates: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.starts, updates, side="right") - 1

    def _totals_at_starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(np.diff(self.starts) * self.values[:-1])])
