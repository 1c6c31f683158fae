"""The compiled inner loop, run in calls of a few seconds, so that a run can be watched and stopped."""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import lax

from largebatch.data.streaming import Resident, Stream, Upcoming
from largebatch.hosts import preemption, replicas
from largebatch.hosts.clock import Clock
from largebatch.hosts.collectives import is_primary
from largebatch.hosts.replicas import AXIS, pmap
from largebatch.nn.layers import STATISTICS
from largebatch.optim.schedules import Schedule, StepInputs
from largebatch.runs import checkpoints
from largebatch.training.local_sgd import Sync
from largebatch.training.loss import Batch
from largebatch.training.programs import Programs
from largebatch.training.state import TrainState
from largebatch.training.step import TrainStep

# A call runs as many steps as fit in about this long, so that progress is seen and signals are answered.
SECONDS_PER_CALL = 2.0
PROFILED_STEPS = 3


class NonFinite(Exception):
    """Raised after more than `max_nonfinite` consecutive non-finite losses or gradients, or a validation loss."""

    def __init__(self, what: str, step: int, inputs: StepInputs):
        super().__init__(f"{what} (learning rate {inputs.learning_rate:g})")
        self.step = int(step)  # number of the step, which was not applied
        self.inputs = inputs  # inputs of the step


class Trainer:
    """The state on the devices, and the metrics of the running outer loop's steps.

    `snapshot` and `restore` carry both through a checkpoint. A caller that changes `schedule`, for the steps to
    come, also restores it.

    Attributes:
      step: number of steps done.
      learning_rate_scale: factor on the learning rate after rollbacks.
    """

    def __init__(
        self,
        state: TrainState,
        programs: Programs,
        data: Resident | Stream,
        schedule: Schedule,
        clock: Clock,
        *,
        inner_steps: int,
        max_nonfinite: int,
        inputs_length: int,
        first_local_step: int | None,
        sync: Sync,
        profile_dir: str | None = None,
    ):
        """Start from a state.

        Args:
          inner_steps: steps between two validations; the last outer loop may be shorter than the others.
          max_nonfinite: maximum consecutive non-finite steps, as the loops were made with.
          inputs_length: most steps of a call, as the loops were compiled for.
          first_local_step: step from which devices take local steps; None where they never do.
          profile_dir: where to write a profile of the call after the first, if anywhere.
        """
        self.state, self.programs, self.schedule, self.inner_steps = state, programs, schedule, inner_steps
        self._data, self._clock, self._sync, self._profile_dir = data, clock, sync, profile_dir
        self._max_nonfinite, self._inputs_length = max_nonfinite, inputs_length
        self._first_local_step = np.inf if first_local_step is None else first_local_step
        self._read_counters()
        # float32 [inner_steps] by name: a value for each step of the running outer loop.
        self._metrics = {name: np.zeros(inner_steps, np.float32) for name in programs.metric_names}
        self._calls, self._steps_of_next_call, self._signal = 0, 1, 0

    def _read_counters(self) -> None:
        """Read the counters of the state from the devices."""
        state, first = self.state, replicas.first_replica
        self.step, self._seed = int(first(state.step)), int(first(state.seed))
        self._scale_invariant_steps = float(first(state.scale_invariant_steps))
        self.learning_rate_scale = float(first(state.learning_rate_scale))

    @property
    def next_validation(self) -> int:
        """The step at which the running outer loop ends; AdaScale may end it before."""
        end = (self.step // self.inner_steps + 1) * self.inner_steps
        return end if self.schedule.scale_invariant else min(end, self.schedule.num_steps)

    @property
    def schedule_step(self) -> float:
        """Steps done of the schedule's `num_steps`; with AdaScale, scale-invariant steps."""
        return self._scale_invariant_steps if self.schedule.scale_invariant else self.step

    @property
    def examples_left(self) -> int:
        """Training examples from here to the last step, by the schedule as it is now."""
        schedule = self.schedule
        return schedule.examples_before(schedule.num_steps) - schedule.examples_before(int(self.schedule_step))

    @property
    def done(self) -> bool:
        """True after the run's last step."""
        return self.schedule_step >= self.schedule.num_steps

    @property
    def at_validation(self) -> bool:
        """True between two outer loops, before the first and after the last."""
        return self.step % self.inner_steps == 0 or self.done

    def metrics_of_outer_loop(self) -> dict[str, np.ndarray]:
        """Return the metrics of each step of the outer loop that has just ended; the last may be shorter."""
        return {name: values[: (self.step - 1) % self.inner_steps + 1] for name, values in self._metrics.items()}

    def mean_state(self) -> TrainState:
        """Return the state, averaged over the devices where they take local steps. Collective."""
        return self.programs.average(self.state) if self.step > self._first_local_step else self.state

    def snapshot(self) -> dict:
        """Return all that must survive a restart: a pytree of NumPy arrays, equal on every host. Collective.

        Where devices may take local steps it has every replica beside their mean, which is what others read.
        """
        snapshot = {"state": replicas.first_replica(self.mean_state()), "steps": self._metrics}
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
        self._metrics = {name: np.array(values) for name, values in snapshot["steps"].items()}
        self._read_counters()

    def run(self, num_steps: int) -> tuple[int, float]:
        """Run at most `num_steps` steps in one call of the compiled loop, fewer if they took over 2 seconds.

        At the end of an outer loop `metrics_of_outer_loop` has the metrics of all its steps.

        Returns:
          The number of examples that the steps saw, and the seconds that they took.
        Raises:
          NonFinite: see there; the steps before it are done.
        """
        first, begin = self.step, time.perf_counter()
        end = first + min(num_steps, self._steps_of_next_call)
        if first < self._first_local_step < end:  # no call runs both synchronous and local steps
            end = self._first_local_step
        # Up to the end of the run; with AdaScale at least these.
        upcoming = Upcoming(self._seed, first, max(self.schedule.num_steps, end), self.schedule.examples_before)
        inputs = self.schedule.inputs(first, self._inputs_length)
        with self._maybe_profile(), self._clock.measure("train"):
            loaded = self._data.for_steps(upcoming, end - first)
            num_steps = loaded.num_steps  # fewer where the data at hand serve fewer
            arguments = self.state, loaded.arrays, inputs, np.int32(num_steps)
            if first < self._first_local_step:
                self.state, metrics = self.programs.inner_loop(*arguments)
            else:
                self.state, metrics = self.programs.local_loop(*arguments, self._sync)
            del loaded, arguments  # else their memory could not be used for the data that follow
            jax.block_until_ready((self.state, metrics))
        if self.schedule.scale_invariant:  # the schedule may have ended before
            num_steps = int(replicas.first_replica(self.state.step)) - first
        metrics = {name: np.asarray(values) for name, values in metrics.items()}
        self._refuse_nonfinite(inputs, metrics, num_steps)
        place = slice(first % self.inner_steps, first % self.inner_steps + num_steps)
        for name, values in self._metrics.items():
            values[place] = metrics[name][:num_steps] if name in metrics else 0
        self._read_counters()
        self._calls += 1
        seconds = time.perf_counter() - begin
        examples = self.schedule.examples_before(self.step) - self.schedule.examples_before(first)
        # As many of the next steps as see the examples of two seconds: from 1 to an outer loop.
        seen = np.cumsum(self.schedule.batch_sizes.at(np.arange(self.step, self.step + self.inner_steps)))
        fitting = max(1, int(np.searchsorted(seen, SECONDS_PER_CALL * examples / seconds, side="right")))
        steps = PROFILED_STEPS if self._profile_dir else fitting
        self._signal, self._steps_of_next_call = preemption.agree(steps)
        return examples, seconds

    def stop_if_asked(self) -> None:
        """Raise preemption.Stopped if the hosts agreed after the last call that one of them got a signal."""
        if self._signal:
            raise preemption.Stopped(self._signal)

    def _refuse_nonfinite(self, inputs: StepInputs, metrics: dict[str, np.ndarray], num_steps: int) -> None:
        too_many = np.flatnonzero(metrics["nonfinite"][:num_steps] > self._max_nonfinite)
        if len(too_many):
            index, step = too_many[0], self.step + too_many[0] + 1
            name = "grad_norm" if np.isfinite(metrics["loss"][index]) else "loss"
            rates = metrics["rate"] if self.schedule.scale_invariant else inputs.learning_rate
            what = f"{name} of step {step} is {metrics[name][index]}"
            raise NonFinite(what, step, self._inputs_of(inputs, index, rates[index]))

    def nonfinite_validation(self, loss: float) -> NonFinite:
        """Return the error for a validation loss that is not finite; its `inputs` are those of the next step."""
        last_step = self.schedule.num_steps - 1
        rate = self.schedule.learning_rate_at(min(int(self.schedule_step), last_step))
        what = f"the validation loss after step {self.step} is {loss}"
        return NonFinite(what, self.step, self._inputs_of(self.schedule.inputs(self.step, 1), 0, rate))

    def _inputs_of(self, inputs: StepInputs, index: int, rate: float) -> StepInputs:
        """Return the inputs of one step, with the learning rate that it took."""
        place = inputs.epoch[index], inputs.offset[index], inputs.batch_size[index]
        return StepInputs(*place, learning_rate=rate * self.learning_rate_scale, b2=inputs.b2[index])

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


def locate_nonfinite(
    network: nn.Module, normalise: Callable, step: TrainStep, state: TrainState, data, inputs: StepInputs
) -> str:
    """Describe where a step first has a non-finite value: in a layer's output, else in a gradient.

    Args:
      normalise: see loss.make_normalise.
      step: the training step that was taken.
      state: state before that step, and `data` of each device; with a leading local-device axis.
      inputs: those of the step.
    """

    def layer_outputs(params, model_state, batch: Batch) -> OrderedDict:
        """Return the outputs of the network's layers by name, from input to output."""
        _, collections = network.apply(
            {"params": params, **model_state},
            normalise(batch.images),
            batch.weights,
            capture_intermediates=True,
            mutable=["intermediates", STATISTICS],
        )
        by_path = traverse_util.flatten_dict(collections["intermediates"])
        # Unlike a dict's, its order outlives a transformation by JAX.
        return OrderedDict(("/".join(path[:-1]) or "logits", outputs[0]) for path, outputs in by_path.items())

    reader = step.reader

    def count_nonfinite(state, data, inputs):
        def counts_of(batch):
            grads, _ = jax.grad(step.loss_fn, has_aux=True)(state.params, state.model_state, batch)
            values = layer_outputs(state.params, state.model_state, batch), grads
            return jax.tree.map(lambda x: jnp.sum(~jnp.isfinite(x), dtype=jnp.int32), values)

        shapes = jax.eval_shape(counts_of, reader.example_batch(data))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        batch = reader.device_batch(lax.axis_index(AXIS), inputs)
        return lax.psum(reader.sum_over(counts_of, zeros, data, batch, state.seed), AXIS)

    outputs, gradients = pmap(count_nonfinite, in_axes=(0, 0, None), out_axes=None)(state, data, inputs)
    for name, count in outputs.items():
        if count:
            return f"first in the output of layer {name}"
    # Gradients run from output to input.
    names = [name for name, count in checkpoints.named_leaves(gradients).items() if count]
    if not names:
        return "no single layer's output or gradient is"
    layers = list(outputs)
    last = max(names, key=lambda name: layers.index(name.rpartition(".")[0].replace(".", "/")))
    return f"first in the gradient of {last}"
