"""The compiled inner loop, run in calls of a few seconds, so that a run can be watched and stopped."""

import contextlib
import dataclasses
import time

import jax
import numpy as np

from largebatch.data.streaming import Resident, Stream, Upcoming
from largebatch.hosts import preemption, replicas
from largebatch.hosts.clock import Clock
from largebatch.hosts.collectives import is_primary
from largebatch.optim.schedules import Schedule, UpdateInputs
from largebatch.training.local_sgd import Sync
from largebatch.training.programs import Programs
from largebatch.training.state import TrainState

# A call runs as many steps as fit in about this long, so that progress is seen and signals are answered.
SECONDS_PER_CALL = 2.0
PROFILED_UPDATES = 3


class NonFinite(Exception):
    """Raised after more than `max_nonfinite` consecutive non-finite losses or gradients, or a validation loss."""

    def __init__(self, what: str, step: int, update: UpdateInputs, learning_rate: float):
        super().__init__(f"{what} (learning rate {learning_rate:g})")
        self.step = int(step)  # number of the step, which was not applied
        self.update = update  # inputs of the step


@dataclasses.dataclass(frozen=True)
class TrainerOptions:
    """Options that do not change while a run trains."""

    inner_steps: int  # steps between two validations; the last outer loop may be shorter than the others
    max_nonfinite: int  # maximum consecutive non-finite steps, as the loops were made with
    inputs_length: int  # most steps of a call, as the loops were compiled for
    first_local_step: int | None  # the step from which devices take local steps; None where they never do
    sync: Sync
    profile_dir: str | None = None  # where to write a profile of the call after the first, if anywhere


@dataclasses.dataclass(frozen=True)
class Counters:
    """The counters of a training state, as Python numbers on every host."""

    step: int
    seed: int  # seed of the order of examples
    scale_invariant_steps: float
    learning_rate_scale: float

    @classmethod
    def of(cls, state: TrainState) -> "Counters":
        """Read the counters from the devices."""
        step, seed, steps, scale = replicas.first_replica(
            (state.step, state.seed, state.scale_invariant_steps, state.learning_rate_scale)
        )
        return cls(int(step), int(seed), float(steps), float(scale))


@dataclasses.dataclass(frozen=True)
class Call:
    """Examples and seconds of one call of the compiled loop."""

    examples: int
    seconds: float


class Trainer:
    """The state on the devices, and the metrics of the running outer loop's steps.

    `snapshot` and `restore` carry both through a checkpoint. A caller that changes `schedule`, for the steps to
    come, also restores it.
    """

    def __init__(
        self,
        state: TrainState,
        programs: Programs,
        data: Resident | Stream,
        schedule: Schedule,
        clock: Clock,
        options: TrainerOptions,
    ):
        self.state, self.schedule = state, schedule
        self.programs, self._data, self._clock, self._options = programs, data, clock, options
        self._counters = Counters.of(state)
        # float32 [inner_steps] by name: a value for each step of the running outer loop.
        self._metrics = {name: np.zeros(options.inner_steps, np.float32) for name in programs.metric_names}
        self._profile_dir = options.profile_dir
        self._calls, self._updates_of_next_call, self._signal = 0, 1, 0

    # ---- where training stands --------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self._counters.step

    @property
    def inner_steps(self) -> int:
        """Steps between two validations."""
        return self._options.inner_steps

    @property
    def next_validation(self) -> int:
        """The step at which the running outer loop ends; AdaScale may end it before."""
        end = (self.step // self.inner_steps + 1) * self.inner_steps
        return end if self.schedule.scale_invariant else min(end, self.schedule.num_updates)

    @property
    def learning_rate_scale(self) -> float:
        """Factor on the learning rate after rollbacks."""
        return self._counters.learning_rate_scale

    @property
    def schedule_step(self) -> float:
        """Steps done of the schedule's `num_updates`; with AdaScale, scale-invariant steps."""
        return self._counters.scale_invariant_steps if self.schedule.scale_invariant else self.step

    @property
    def examples_left(self) -> int:
        """Training examples from here to the last step, by the schedule as it is now."""
        schedule = self.schedule
        return schedule.examples_before(schedule.num_updates) - schedule.examples_before(int(self.schedule_step))

    @property
    def done(self) -> bool:
        """True after the run's last step."""
        return self.schedule_step >= self.schedule.num_updates

    @property
    def at_validation(self) -> bool:
        """True between two outer loops, before the first and after the last."""
        return self.step % self.inner_steps == 0 or self.done

    @property
    def _takes_local_steps(self) -> bool:
        """True where the states of the devices may differ."""
        first = self._options.first_local_step
        return first is not None and self.step > first

    @property
    def updates_in_outer(self) -> int:
        """Number of steps in the outer loop that has just ended; the last one may be shorter than the others."""
        return (self.step - 1) % self.inner_steps + 1

    def metrics_of_outer_loop(self) -> dict[str, np.ndarray]:
        """Return the metrics of each step of the outer loop that has just ended."""
        return {name: values[: self.updates_in_outer] for name, values in self._metrics.items()}

    def mean_state(self) -> TrainState:
        """Return the state, averaged over the devices where they take local steps. Collective."""
        return self.programs.average(self.state) if self._takes_local_steps else self.state

    # ---- checkpoints --------------------------------------------------------------------------------

    def snapshot(self) -> dict:
        """Return all that must survive a restart: a pytree of NumPy arrays, equal on every host. Collective.

        Where devices may take local steps it has every replica beside their mean, which is what others read.
        """
        snapshot = {"state": replicas.first_replica(self.mean_state()), "updates": self._metrics}
        if self.programs.local_loop:
            snapshot["replicas"] = replicas.all_replicas(self.state)
        return snapshot

    def restore(self, snapshot: dict) -> None:
        """Restore a `snapshot`."""
        on = replicas.local_devices_of(self.state)
        if "replicas" in snapshot:
            self.state = replicas.spread(snapshot["replicas"], on)
        else:
            self.state = replicas.replicate(snapshot["state"], on)
        self._metrics = {name: np.array(values) for name, values in snapshot["updates"].items()}
        self._counters = Counters.of(self.state)

    # ---- training -------------------------------------------------------------------------------------

    def run(self, num_steps: int) -> Call:
        """Run at most `num_steps` steps in one call of the compiled loop, fewer if they took over 2 seconds.

        At the end of an outer loop `metrics_of_outer_loop` has the metrics of all its steps.

        Raises:
          NonFinite: see there; the steps before it are done.
        """
        first, begin = self.step, time.perf_counter()
        end = self._end_of_mode(first + min(num_steps, self._updates_of_next_call))
        self._call(end - first)
        seconds = time.perf_counter() - begin
        examples = self.schedule.examples_before(self.step) - self.schedule.examples_before(first)
        steps = PROFILED_UPDATES if self._profile_dir else self._updates_with(SECONDS_PER_CALL * examples / seconds)
        self._signal, self._updates_of_next_call = preemption.agree(steps)
        return Call(examples, seconds)

    def stop_if_asked(self) -> None:
        """Raise preemption.Stopped if the hosts agreed after the last call that one of them got a signal."""
        if self._signal:
            raise preemption.Stopped(self._signal)

    def _end_of_mode(self, end: int) -> int:
        """Return the end of a call, at most `end`: no call runs both synchronous and local steps."""
        first = self._options.first_local_step
        return first if first is not None and self.step < first < end else end

    def _updates_with(self, examples: float) -> int:
        """Return how many of the next steps see so many examples together: from 1 to an outer loop."""
        next_updates = np.arange(self.step, self.step + self.inner_steps)
        seen = np.cumsum(self.schedule.batch_sizes.at(next_updates))
        return max(1, int(np.searchsorted(seen, examples, side="right")))

    def _run_loop(self, data: dict, inputs: UpdateInputs, num_updates: int):
        """Call the compiled loop of this part of the run; return (state, metrics)."""
        first_local_step = self._options.first_local_step
        if first_local_step is None or self.step < first_local_step:
            return self.programs.inner_loop(self.state, data, inputs, np.int32(num_updates))
        return self.programs.local_loop(self.state, data, inputs, np.int32(num_updates), self._options.sync)

    def _upcoming(self, num_updates: int) -> Upcoming:
        """Return the steps from here to the end of the run; with AdaScale at least the next `num_updates`."""
        end = max(self.schedule.num_updates, self.step + num_updates)
        return Upcoming(self._counters.seed, self.step, end, self.schedule.examples_before)

    def _call(self, num_updates: int) -> None:
        """Run `num_updates` steps, or fewer if the data at hand serve fewer."""
        first = self.step
        inputs = self.schedule.inputs(first, self._options.inputs_length)
        with self._maybe_profile(), self._clock.measure("train"):
            loaded = self._data.for_updates(self._upcoming(num_updates), num_updates)
            num_updates = loaded.num_updates
            self.state, metrics = self._run_loop(loaded.arrays, inputs, num_updates)
            del loaded  # else its memory could not be used for the data that follow
            jax.block_until_ready((self.state, metrics))
        counters = Counters.of(self.state)
        if self.schedule.scale_invariant:  # the schedule may have ended before
            num_updates = counters.step - first
        metrics = {name: np.asarray(values) for name, values in metrics.items()}
        self._refuse_nonfinite(inputs, metrics, num_updates)
        place = slice(first % self.inner_steps, first % self.inner_steps + num_updates)
        for name, values in self._metrics.items():
            values[place] = metrics[name][:num_updates] if name in metrics else 0
        self._counters = counters
        self._calls += 1

    # ---- non-finite values, and profiles ----------------------------------------------------------------

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
        """Return the error for a validation loss that is not finite; its `update` is that of the next step."""
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
        """Return a context in which host 0 traces the call after the first; all hosts run as many steps in it."""
        if not self._profile_dir or not self._calls:
            return contextlib.nullcontext()
        folder, self._profile_dir = self._profile_dir, None
        if not is_primary():
            return contextlib.nullcontext()
        # Python's own calls are left out: the profile is about the devices, and that tracer runs in every thread of
        # the process, those that write checkpoints among them.
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        return jax.profiler.trace(folder, profiler_options=options)
