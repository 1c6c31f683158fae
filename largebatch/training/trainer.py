"""Runs the compiled inner loop in calls of a few seconds, which is where a run can be looked at and stopped."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from largebatch.hosts import collectives, preemption, replicas
from largebatch.hosts.clock import Clock
from largebatch.optim.schedules import Schedule
from largebatch.training.state import TrainState
from largebatch.training.step import Plan

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


class Loops(NamedTuple):
    """The compiled loops of a run.

    `inner_loop` does the updates before `start_step`, `local_loop` the local steps from there on; `average`
    gives the mean state of all devices.
    """

    inner_loop: Callable | None
    local_loop: Callable | None
    average: Callable | None
    start_step: float


class Trainer:
    """The state on the devices, the update count, and the metrics of the running outer loop's updates.

    `snapshot` and `restore` carry all of it through a checkpoint.

    Args:
      loops: `inner_loop` from `step.make_inner_loop`, the others from `local_sgd`.
      metric_names: of what the loops return beside the state.
      data: their second argument.
      schedule: of the whole run; whoever changes it for the updates to come also restores it.
      plan_of: (schedule, first update, counted from 0) -> Plan of the next updates.
      inner_steps: updates between two validations; the last outer loop may be shorter than the others.
      max_nonfinite: as the loops were made with.
      profile_dir: where to write a profile of the call after the first, if anywhere.
    """

    def __init__(
        self,
        state: TrainState,
        loops: Loops,
        metric_names: tuple[str, ...],
        data: Any,
        schedule: Schedule,
        plan_of: Callable[[Schedule, int], Plan],
        clock: Clock,
        *,
        inner_steps: int,
        max_nonfinite: int,
        profile_dir: str | None = None,
    ):
        self._loops, self._data, self._clock = loops, data, clock
        self._make_plan, self._inner_steps = plan_of, inner_steps
        self._max_nonfinite, self._profile_dir = max_nonfinite, profile_dir
        self._calls, self._next_count = 0, 1
        self.state, self.schedule, self.step, self.signal = state, schedule, 0, 0
        self.values = {name: np.zeros(inner_steps, np.float32) for name in metric_names}
        self.learning_rate_scale, self._progress = 1.0, 0.0

    @property
    def position(self) -> float:
        """How much of the schedule's `num_updates` is done: updates, with AdaScale scale-invariant steps."""
        return self._progress if self.schedule.scale_invariant else self.step

    @property
    def done(self) -> bool:
        """Whether the run's last update is done."""
        return self.position >= self.schedule.num_updates

    @property
    def at_boundary(self) -> bool:
        """Whether an outer loop has ended, or none has begun."""
        return self.step % self._inner_steps == 0 or self.done

    def outer_values(self) -> dict[str, np.ndarray]:
        """The metrics of each update of the outer loop that has just ended."""
        return {name: values[: (self.step - 1) % self._inner_steps + 1] for name, values in self.values.items()}

    @property
    def _is_local(self) -> bool:
        return self.step > self._loops.start_step

    def mean_state(self) -> TrainState:
        """The state, or a copy in which devices that take local steps have the mean; on every host together."""
        return self._loops.average(self.state) if self._is_local else self.state

    def snapshot(self) -> dict:
        """All that must survive a restart, as a pytree of NumPy arrays; the same on every host, called on all.

        Of devices that may take local steps it has every replica, beside their mean, which is what others read.
        """
        snapshot = {"state": replicas.first_replica(self.mean_state()), "updates": self.values}
        if self._loops.local_loop:
            snapshot["replicas"] = replicas.all_replicas(self.state)
        return snapshot

    def restore(self, snapshot: dict) -> None:
        """Goes on from a `snapshot`."""
        on, state = replicas.local_devices_of(self.state), snapshot["state"]
        if "replicas" in snapshot:
            self.state = replicas.spread(snapshot["replicas"], on)
        else:
            self.state = replicas.replicate(state, on)
        self.values = {name: np.array(values) for name, values in snapshot["updates"].items()}
        self.step, self._progress = int(state.step), float(state.progress)
        self.learning_rate_scale = float(state.learning_rate_scale)

    def finish_outer_loop(self) -> Iterator[tuple[int, float]]:
        """Does the updates that are left of the running outer loop; yields (updates, seconds) of each call.

        Afterwards `outer_values` has the metrics of all its updates.

        Raises:
          NonFinite: see there; the updates before it are done.
          preemption.Stopped: between two calls, on all hosts together.
        """
        last = (self.step // self._inner_steps + 1) * self._inner_steps
        if not self.schedule.scale_invariant:
            last = min(last, self.schedule.num_updates)
        while self.step < last and not self.done:
            before = self.step
            begin = time.perf_counter()
            self._call(min(self._next_count, self._until_local_steps(last) - before))
            seconds = time.perf_counter() - begin
            updates = self.step - before
            fitting = self._updates_in(SECONDS_PER_CALL * self._examples(before, updates) / seconds)
            self.signal, self._next_count = preemption.agree(PROFILED_UPDATES if self._profile_dir else fitting)
            yield updates, seconds
            if not self.at_boundary:  # else once the row of the outer loop is written
                self.stop_if_asked()

    def _until_local_steps(self, last: int) -> int:
        start = self._loops.start_step
        return int(start) if self.step < start < last else last

    def plan_of(self, first: int) -> Plan:
        """Inputs of the updates from `first` on."""
        return self._make_plan(self.schedule, first)

    def _examples(self, first: int, count: int) -> int:
        return int(self.plan_of(first).batch_size[:count].sum(dtype=np.int64))

    def _updates_in(self, examples: float) -> int:
        """How many of the next updates see so many examples together; at least one, at most an outer loop."""
        sizes = self.plan_of(self.step).batch_size[: self._inner_steps]
        return max(1, int(np.searchsorted(np.cumsum(sizes, dtype=np.int64), examples, side="right")))

    def stop_if_asked(self) -> None:
        """Raises preemption.Stopped if the hosts agreed after the last call that one of them got a signal."""
        if self.signal:
            raise preemption.Stopped(self.signal)

    def _call(self, count: int) -> None:
        plan, first = self.plan_of(self.step), self.step % self._inner_steps
        loop = self._loops.inner_loop if self.step < self._loops.start_step else self._loops.local_loop
        with self._maybe_profile(), self._clock.measure("train"):
            self.state, values = loop(self.state, self._data, plan, np.int32(count))
            jax.block_until_ready((self.state, values))
        if self.schedule.scale_invariant:  # which may have come to its end before
            state = replicas.first_replica((self.state.step, self.state.progress))
            count, self._progress = int(state[0]) - self.step, float(state[1])
        values = {name: np.asarray(value) for name, value in values.items()}
        too_many = np.flatnonzero(values["nonfinite"][:count] > self._max_nonfinite)
        if len(too_many):
            index, step = too_many[0], self.step + too_many[0] + 1
            name = "loss" if not np.isfinite(values["loss"][index]) else "grad_norm"
            rate = values["rate"][index] if self.schedule.scale_invariant else plan.learning_rate[index]
            raise self._nonfinite(f"{name} of update {step} is {values[name][index]}", step, plan, index, rate)
        for name, all_ in self.values.items():
            all_[first : first + count] = values[name][:count] if name in values else 0
        self.step += count
        self._calls += 1

    def nonfinite_validation(self, loss: float) -> NonFinite:
        """What to raise when the loss of a validation is not finite; its place is the next update's."""
        what = f"the validation loss after update {self.step} is {loss}"
        rate = self.schedule.rates(min(int(self.position), self.schedule.num_updates - 1))
        return self._nonfinite(what, self.step, self.plan_of(self.step), 0, float(rate))

    def _nonfinite(self, what: str, step: int, plan: Plan, index: int, learning_rate: float) -> NonFinite:
        place = plan.epoch[index], plan.offset[index], plan.batch_size[index]
        return NonFinite(what, step, place, learning_rate * self.learning_rate_scale)

    def _maybe_profile(self):
        """Host 0 traces the call after the first; the others do as many updates in it."""
        if not self._profile_dir or not self._calls:
            return contextlib.nullcontext()
        folder, self._profile_dir = self._profile_dir, None
        return jax.profiler.trace(folder) if collectives.is_primary() else contextlib.nullcontext()
