"""Runs the compiled inner loop in calls of a few seconds, which is where a run can be looked at and stopped."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from largebatch import devices, metrics, preemption
from largebatch.state import TrainState
from largebatch.step import Plan

# A call is as many updates as fit in about this long, so that progress is seen and signals are answered.
SECONDS_PER_CALL = 2.0
PROFILED_UPDATES = 3


class NonFinite(Exception):
    """A loss or gradient is not finite, more often than is put up with.

    `step` is the number of the update, which was not applied; `place` its epoch, offset and batch size.
    """

    def __init__(self, what: str, step: int, place: tuple, learning_rate: float):
        super().__init__(f"{what} (learning rate {learning_rate:g})")
        self.step, self.place = int(step), place


class Trainer:
    """The state on the devices, the update count, and the metrics of the running outer loop's updates.

    `snapshot` and `restore` carry all of it through a checkpoint.

    Args:
      inner_loop: from `step.make_inner_loop`.
      metric_names: of what it returns beside the state.
      data: its second argument.
      plan_of: first update (counted from 0) -> Plan of the next updates.
      inner_steps: updates between two validations.
      num_updates: of the whole run; the last outer loop may be shorter than the others.
      max_nonfinite: as `inner_loop` was made with.
      profile_dir: where to write a profile of the call after the first, if anywhere.
    """

    def __init__(
        self,
        state: TrainState,
        inner_loop: Callable,
        metric_names: tuple[str, ...],
        data: Any,
        plan_of: Callable[[int], Plan],
        clock: metrics.Clock,
        *,
        inner_steps: int,
        num_updates: int,
        max_nonfinite: int,
        profile_dir: str | None = None,
    ):
        self._inner_loop, self._data, self._plan_of, self._clock = inner_loop, data, plan_of, clock
        self._inner_steps, self._num_updates = inner_steps, num_updates
        self._max_nonfinite, self._profile_dir = max_nonfinite, profile_dir
        self._calls, self._next_count = 0, 1
        self.state, self.step, self.signal = state, 0, 0
        self.values = {name: np.zeros(inner_steps, np.float32) for name in metric_names}
        self.learning_rate_scale = 1.0

    @property
    def in_outer_loop(self) -> bool:
        """Whether the outer loop goes on, so that there is no validation yet."""
        return self.step % self._inner_steps > 0 and self.step < self._num_updates

    def outer_values(self) -> dict[str, np.ndarray]:
        """The metrics of each update of the outer loop that has just ended."""
        return {name: values[: (self.step - 1) % self._inner_steps + 1] for name, values in self.values.items()}

    def snapshot(self) -> dict:
        """All that must survive a restart, as a pytree of NumPy arrays; the same on every host."""
        return {"state": devices.first_replica(self.state), "updates": self.values}

    def restore(self, snapshot: dict) -> None:
        """Goes on from a `snapshot`."""
        self.state = devices.replicate(snapshot["state"], on=devices.local_devices_of(self.state))
        self.values = {name: np.array(values) for name, values in snapshot["updates"].items()}
        self.step = int(snapshot["state"].step)
        self.learning_rate_scale = float(snapshot["state"].learning_rate_scale)

    def finish_outer_loop(self) -> Iterator[tuple[int, float]]:
        """Does the updates that are left of the running outer loop; yields (updates, seconds) of each call.

        Afterwards `outer_values` has the metrics of all its updates.

        Raises:
          NonFinite: see there; the updates before it are done.
          preemption.Stopped: between two calls, on all hosts together.
        """
        last = min((self.step // self._inner_steps + 1) * self._inner_steps, self._num_updates)
        while self.step < last:
            count = min(self._next_count, last - self.step)
            begin = time.perf_counter()
            self._call(count)
            seconds = time.perf_counter() - begin
            fitting = self._updates_in(SECONDS_PER_CALL * self._examples(self.step - count, count) / seconds)
            self.signal, self._next_count = preemption.agree(PROFILED_UPDATES if self._profile_dir else fitting)
            yield count, seconds
            if self.step < last:  # else once the row of the outer loop is written
                self.stop_if_asked()

    def _examples(self, first: int, count: int) -> int:
        return int(self._plan_of(first).batch_size[:count].sum(dtype=np.int64))

    def _updates_in(self, examples: float) -> int:
        """How many of the next updates see so many examples together; at least one, at most an outer loop."""
        sizes = self._plan_of(self.step).batch_size[: self._inner_steps]
        return max(1, int(np.searchsorted(np.cumsum(sizes, dtype=np.int64), examples, side="right")))

    def stop_if_asked(self) -> None:
        """Raises preemption.Stopped if the hosts agreed after the last call that one of them got a signal."""
        if self.signal:
            raise preemption.Stopped(self.signal)

    def _call(self, count: int) -> None:
        plan, first = self._plan_of(self.step), self.step % self._inner_steps
        with self._maybe_profile(), self._clock.measure("train"):
            self.state, values = self._inner_loop(self.state, self._data, plan, np.int32(count))
            jax.block_until_ready((self.state, values))
        values = {name: np.asarray(value) for name, value in values.items()}
        too_many = np.flatnonzero(values["nonfinite"][:count] > self._max_nonfinite)
        if len(too_many):
            index, step = too_many[0], self.step + too_many[0] + 1
            name = "loss" if not np.isfinite(values["loss"][index]) else "grad_norm"
            raise self._nonfinite(f"{name} of update {step} is {values[name][index]}", step, plan, index)
        for name, value in values.items():
            self.values[name][first : first + count] = value[:count]
        self.step += count
        self._calls += 1

    def nonfinite_validation(self, loss: float) -> NonFinite:
        """What to raise when the loss of a validation is not finite; its place is the next update's."""
        what = f"the validation loss after update {self.step} is {loss}"
        return self._nonfinite(what, self.step, self._plan_of(self.step), 0)

    def _nonfinite(self, what: str, step: int, plan: Plan, index: int) -> NonFinite:
        place = plan.epoch[index], plan.offset[index], plan.batch_size[index]
        return NonFinite(what, step, place, plan.learning_rate[index] * self.learning_rate_scale)

    def _maybe_profile(self):
        """Host 0 traces the call after the first; the others do as many updates in it."""
        if not self._profile_dir or not self._calls:
            return contextlib.nullcontext()
        folder, self._profile_dir = self._profile_dir, None
        return jax.profiler.trace(folder) if devices.is_primary() else contextlib.nullcontext()
