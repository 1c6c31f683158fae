"""Runs the compiled inner loop in calls of a few seconds, which is where a run can be looked at and stopped."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import jax
import numpy as np

from largebatch.data.streaming import Resident, Stream, Upcoming
from largebatch.hosts import preemption, replicas
from largebatch.hosts.clock import Clock
from largebatch.hosts.collectives import is_primary
from largebatch.optim.schedules import Schedule, UpdateInputs
from largebatch.training.local_sgd import Sync
from largebatch.training.programs import CompiledPrograms
from largebatch.training.state import TrainState

# A call is as many updates as fit in about this long, so that progress is seen and signals are answered.
SECONDS_PER_CALL = 2.0
PROFILED_UPDATES = 3


class NonFinite(Exception):
    """A loss or gradient is not finite, more often than is put up with."""

    def __init__(self, what: str, step: int, update: UpdateInputs, learning_rate: float):
        super().__init__(f"{what} (learning rate {learning_rate:g})")
        self.step = int(step)  # number of the update, which was not applied
        self.update = update  # its inputs


@dataclasses.dataclass(frozen=True)
class TrainerOptions:
    """What does not change while a run trains."""

    inner_steps: int  # updates between two validations; the last outer loop may be shorter than the others
    max_nonfinite: int  # as the loops were made with
    inputs_length: int  # updates that a call can do, as the loops were compiled for
    first_local_step: int | None  # the update from which devices take local steps; None where they never do
    sync: Sync
    profile_dir: str | None = None  # where to write a profile of the call after the first, if anywhere


@dataclasses.dataclass(frozen=True)
class Counters:
    """The counters of a training state, as Python numbers on every host."""

    step: int
    seed: int  # of the order of examples
    scale_invariant_steps: float
    learning_rate_scale: float

    @classmethod
    def of(cls, state: TrainState) -> "Counters":
        """Reads them from the devices."""
        step, seed, steps, scale = replicas.first_replica(
            (state.step, state.seed, state.scale_invariant_steps, state.learning_rate_scale)
        )
        return cls(int(step), int(seed), float(steps), float(scale))


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the compiled loop, as the loop around it sees it."""

    updates: int
    examples: int
    seconds: float


class Trainer:
    """The state on the devices, and the metrics of the running outer loop's updates.

    `snapshot` and `restore` carry all of it through a checkpoint. Whoever changes `schedule`, for the updates to
    come, also restores it.
    """

    def __init__(
        self,
        state: TrainState,
        programs: CompiledPrograms,
        data: Resident | Stream,
        schedule: Schedule,
        clock: Clock,
        options: TrainerOptions,
    ):
        self.state, self.schedule = state, schedule
        self._programs, self._data, self._clock, self._options = programs, data, clock, options
        self._counters = Counters.of(state)
        # Of each update of the running outer loop, float32 [inner_steps] by name.
        self._metrics = {name: np.zeros(options.inner_steps, np.float32) for name in programs.metric_names}
        self._profile_dir = options.profile_dir
        self._calls, self._updates_of_next_call, self._signal = 0, 1, 0

    # ---- where training stands --------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Updates done."""
        return self._counters.step

    @property
    def learning_rate_scale(self) -> float:
        """What rollbacks left of the planned rate."""
        return self._counters.learning_rate_scale

    @property
    def schedule_step(self) -> float:
        """How much of the schedule's `num_updates` is done: updates, with AdaScale scale-invariant steps."""
        return self._counters.scale_invariant_steps if self.schedule.scale_invariant else self.step

    @property
    def examples_left(self) -> int:
        """Training examples from here to the last update, by the schedule as it is now."""
        schedule = self.schedule
        return schedule.examples_before(schedule.num_updates) - schedule.examples_before(int(self.schedule_step))

    @property
    def done(self) -> bool:
        """Whether the run's last update is done."""
        return self.schedule_step >= self.schedule.num_updates

    @property
    def at_validation(self) -> bool:
        """Whether an outer loop has ended, or none has begun."""
        return self.step % self._options.inner_steps == 0 or self.done

    @property
    def _takes_local_steps(self) -> bool:
        """Whether the devices' states may differ now."""
        first = self._options.first_local_step
        return first is not None and self.step > first

    @property
    def updates_in_outer(self) -> int:
        """Updates of the outer loop that has just ended; the last one may be shorter than the others."""
        return (self.step - 1) % self._options.inner_steps + 1

    def metrics_of_outer_loop(self) -> dict[str, np.ndarray]:
        """The metrics of each update of the outer loop that has just ended."""
        return {name: values[: self.updates_in_outer] for name, values in self._metrics.items()}

    def mean_state(self) -> TrainState:
        """The state, or a copy in which devices that take local steps have the mean; on every host together."""
        return self._programs.average(self.state) if self._takes_local_steps else self.state

    # ---- checkpoints --------------------------------------------------------------------------------

    def snapshot(self) -> dict:
        """All that must survive a restart, as a pytree of NumPy arrays; the same on every host, called on all.

        Of devices that may take local steps it has every replica, beside their mean, which is what others read.
        """
        snapshot = {"state": replicas.first_replica(self.mean_state()), "updates": self._metrics}
        if self._programs.local_loop:
            snapshot["replicas"] = replicas.all_replicas(self.state)
        return snapshot

    def restore(self, snapshot: dict) -> None:
        """Goes on from a `snapshot`."""
        on = replicas.local_devices_of(self.state)
        if "replicas" in snapshot:
            self.state = replicas.spread(snapshot["replicas"], on)
        else:
            self.state = replicas.replicate(snapshot["state"], on)
        self._metrics = {name: np.array(values) for name, values in snapshot["updates"].items()}
        self._counters = Counters.of(self.state)

    # ---- training -------------------------------------------------------------------------------------

    def finish_outer_loop(self) -> Iterator[Call]:
        """Does the updates that are left of the running outer loop, call by call.

        Afterwards `metrics_of_outer_loop` has the metrics of all its updates.

        Raises:
          NonFinite: see there; the updates before it are done.
          preemption.Stopped: between two calls, on all hosts together.
        """
        end = (self.step // self._options.inner_steps + 1) * self._options.inner_steps
        if not self.schedule.scale_invariant:
            end = min(end, self.schedule.num_updates)
        while self.step < end and not self.done:
            first, begin = self.step, time.perf_counter()
            self._call(min(self._updates_of_next_call, self._end_of_mode(end) - first))
            seconds = time.perf_counter() - begin
            examples = self.schedule.examples_before(self.step) - self.schedule.examples_before(first)
            updates = PROFILED_UPDATES
            if not self._profile_dir:
                updates = self._updates_with(SECONDS_PER_CALL * examples / seconds)
            self._signal, self._updates_of_next_call = preemption.agree(updates)
            yield Call(self.step - first, examples, seconds)
            if not self.at_validation:  # else once the row of the outer loop is written
                self.stop_if_asked()

    def stop_if_asked(self) -> None:
        """Raises preemption.Stopped if the hosts agreed after the last call that one of them got a signal."""
        if self._signal:
            raise preemption.Stopped(self._signal)

    def _end_of_mode(self, end: int) -> int:
        """Where a call has to end: no call does both synchronous updates and local steps."""
        first = self._options.first_local_step
        return first if first is not None and self.step < first < end else end

    def _updates_with(self, examples: float) -> int:
        """How many of the next updates see so many examples together; at least one, at most an outer loop."""
        next_updates = np.arange(self.step, self.step + self._options.inner_steps)
        seen = np.cumsum(self.schedule.batch_sizes.value_at(next_updates))
        return max(1, int(np.searchsorted(seen, examples, side="right")))

    def _run_loop(self, data: dict, inputs: UpdateInputs, num_updates: int):
        """Calls the compiled loop of this part of the run: (state, metrics)."""
        first_local_step = self._options.first_local_step
        if first_local_step is None or self.step < first_local_step:
            return self._programs.inner_loop(self.state, data, inputs, np.int32(num_updates))
        return self._programs.local_loop(self.state, data, inputs, np.int32(num_updates), self._options.sync)

    def _upcoming(self, num_updates: int) -> Upcoming:
        """The updates from here to the end of the run; with AdaScale at least the next `num_updates`."""
        end = max(self.schedule.num_updates, self.step + num_updates)
        return Upcoming(self._counters.seed, self.step, end, self.schedule.examples_before)

    def _call(self, num_updates: int) -> None:
        """Does `num_updates`, or fewer if the data at hand serve fewer."""
        first = self.step
        inputs = self.schedule.inputs(first, self._options.inputs_length)
        with self._maybe_profile(), self._clock.measure("train"):
            loaded = self._data.for_updates(self._upcoming(num_updates), num_updates)
            num_updates = loaded.num_updates
            self.state, metrics = self._run_loop(loaded.arrays, inputs, num_updates)
            del loaded  # or its memory could not be used for what comes after it
            jax.block_until_ready((self.state, metrics))
        counters = Counters.of(self.state)
        if self.schedule.scale_invariant:  # which may have come to its end before
            num_updates = counters.step - first
        metrics = {name: np.asarray(values) for name, values in metrics.items()}
        self._refuse_nonfinite(inputs, metrics, num_updates)
        place = slice(first % self._options.inner_steps, first % self._options.inner_steps + num_updates)
        for name, values in self._metrics.items():
            values[place] = metrics[name][:num_updates] if name in metrics else 0
        self._counters = counters
        self._calls += 1

    # ---- trouble ----------------------------------------------------------------------------------------

    def _refuse_nonfinite(self, inputs: UpdateInputs, metrics: dict[str, np.ndarray], num_updates: int) -> None:
        too_many = np.flatnonzero(metrics["nonfinite"][:num_updates] > self._options.max_nonfinite)
        if not len(too_many):
            return
        index, step = too_many[0], self.step + too_many[0] + 1
        name = "grad_norm" if np.isfinite(metrics["loss"][index]) else "loss"
        rates = metrics["rate"] if self.schedule.scale_invariant else inputs.learning_rate
        raise self._nonfinite(
            f"{name} of update {step} is {metrics[name][index]}", step, inputs, index, rates[index]
        )

    def nonfinite_validation(self, loss: float) -> NonFinite:
        """What to raise when the loss of a validation is not finite; its place is the next update's."""
        last_update = self.schedule.num_updates - 1
        rate = self.schedule.learning_rate_at(min(int(self.schedule_step), last_update))
        inputs = self.schedule.inputs(self.step, 1)
        what = f"the validation loss after update {self.step} is {loss}"
        return self._nonfinite(what, self.step, inputs, 0, rate)

    def _nonfinite(self, what: str, step: int, inputs: UpdateInputs, index: int, rate: float) -> NonFinite:
        rate = rate * self.learning_rate_scale
        place = inputs.epoch[index], inputs.offset[index], inputs.batch_size[index]
        update = UpdateInputs(*place, learning_rate=rate, b2=inputs.b2[index])
        return NonFinite(what, step, update, rate)

    def _maybe_profile(self):
        """Host 0 traces the call after the first; the others do as many updates in it."""
        if not self._profile_dir or not self._calls:
            return contextlib.nullcontext()
        folder, self._profile_dir = self._profile_dir, None
        if not is_primary():
            return contextlib.nullcontext()
        # Python's own calls are left out. The devices are what is asked about, and that tracer is put into
        # every thread of the process, those that write checkpoints among them.
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        return jax.profiler.trace(folder, profiler_options=options)
