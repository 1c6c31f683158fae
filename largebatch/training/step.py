"""The pmapped inner loop: many steps per call, one all-reduce per step.

Each device sums weighted gradients over its part of the batch, micro-batch by micro-batch; one psum
adds the devices; the sum is divided by the true batch size. The loops over steps and micro-batches
have traced trip counts, so a batch size that changes, or a call that is cut shorter, compiles nothing new.
Only where every batch is the whole set, or one micro-batch, the number of micro-batches may be a constant.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import flatten_util, lax

from largebatch.data import batching
from largebatch.data.batching import DataSharding, DeviceBatch, Grouping
from largebatch.hosts.replicas import AXIS, pmap
from largebatch.optim import noise_scale
from largebatch.optim.averages import smooth
from largebatch.optim.noise_scale import NoisePlan
from largebatch.optim.schedules import StepInputs
from largebatch.training.loss import Batch, BatchSums
from largebatch.training.state import TrainState

# Names of the loops in profiles and compiled programs.
STEPS, MICRO_BATCHES = "steps", "micro_batches"


def sum_over_devices(tree):
    """Sum `tree` over devices, as ONE all-reduce of one flat float32 vector."""
    vector, unravel = flatten_util.ravel_pytree(tree)
    return unravel(lax.psum(vector, AXIS))


@dataclasses.dataclass(frozen=True)
class MicroBatchReader:
    """A reader of the micro-batches of a device's part of a batch.

    With `read_slice`, for batches that are the whole training set, micro-batches are slices of a device's rows:
    which examples share a micro-batch does not matter then, so nothing is drawn or gathered. It is not for batch
    normalisation or the gradient's noise: a slice has all views of its images, and is no fair sample of the set.
    """

    # (data of this device, local example indices [M], visit keys [M]) -> images, targets
    read: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    sharding: DataSharding
    grouping: Grouping
    single: bool = False  # whether each device has one micro-batch in every step
    # (data of this device, first row, rows M) -> images, targets
    read_slice: Callable[[Any, jax.Array, int], tuple[jax.Array, jax.Array]] | None = None

    def device_batch(self, device, step_inputs: StepInputs) -> DeviceBatch:
        """Return the part of a step's batch that falls to `device`, which may be an array of indices."""
        return batching.device_batch(
            self.sharding, device, step_inputs.epoch, step_inputs.offset, step_inputs.batch_size
        )

    def example_batch(self, data) -> Batch:
        """Return a micro-batch to trace by: example 0, again and again."""
        grouping = self.grouping
        examples = jnp.zeros(grouping.micro_batch_size, jnp.int32)
        weights = jnp.zeros((grouping.groups_at_once, grouping.group_size))
        return Batch(*self.read(data, examples, examples.astype(jnp.uint32)), weights)

    def num_micro_batches(self, batch: DeviceBatch):
        """Return the number of micro-batches of a device's part of a batch, a constant where all devices have it.

        With a constant a GPU does not ask its host before each micro-batch.
        """
        if self.single:
            return 1
        if self.read_slice:
            shares = self.sharding.share_bounds(self.sharding.num_examples)
            fewest, most = (self.grouping.num_micro_batches(share) for share in shares)
            if fewest == most:
                return most
        return self.grouping.num_micro_batches(batch.count)

    def find(self, batch: DeviceBatch, index, seed):
        """Return the examples of micro-batch `index` of a device's part of a batch, or of a slice its place."""
        if self.read_slice:
            begins, lengths = self.grouping.groups_of(batch.count, index)
            return begins[0], lengths[0]
        return batching.micro_batch(self.sharding, batch, index, self.grouping, seed)

    def micro_batch(self, data, found) -> Batch:
        """Read the micro-batch that was found. A slice that would end behind the last row begins earlier."""
        if not self.read_slice:
            images, targets = self.read(data, found.examples, found.visit_keys)
            return Batch(images, targets, found.weights.reshape(self.grouping.groups_at_once, -1))
        (begin, length), num_rows = found, data["images"].shape[0]
        size = min(self.grouping.micro_batch_size, num_rows)
        start = jnp.minimum(begin, num_rows - size)
        images, targets = self.read_slice(data, start, size)
        rows = start + jnp.arange(size)
        weights = ((begin <= rows) & (rows < begin + length)).astype(jnp.float32)
        return Batch(images, targets, weights[None])

    def sum_over(self, sums_of: Callable[[Batch], Any], zeros, data, batch: DeviceBatch, seed):
        """Add `sums_of(micro_batch)`, a pytree like `zeros`, over the micro-batches of `batch`."""

        # Each iteration finds the examples of the next one. Otherwise XLA would fuse the shuffle of 24 rounds that
        # finds them into the reading of images, and repeat it for every pixel; a loop's carry is computed once.
        def add(index, carry):
            sums, found = carry
            sums = jax.tree.map(jnp.add, sums, sums_of(self.micro_batch(data, found)))
            return sums, self.find(batch, index + 1, seed)

        with jax.named_scope(MICRO_BATCHES):
            first = self.find(batch, jnp.int32(0), seed)
            return lax.fori_loop(0, self.num_micro_batches(batch), add, (zeros, first))[0]


@struct.dataclass
class Gradients:
    """The gradient, the loss and more of a batch: sums or means over its examples."""

    grads: Any  # like the parameters
    loss: jax.Array
    others: BatchSums
    group_terms: jax.Array  # sum of noise_scale.group_term


def mean_gradient(sums: Gradients, count) -> tuple[Gradients, jax.Array, jax.Array]:
    """Return the means of sums over `count` examples, the gradient's norm, and whether loss and norm are finite."""
    mean = jax.tree.map(lambda x: x / count, sums)
    grad_norm = optax.tree.norm(mean.grads)
    return mean, grad_norm, jnp.isfinite(mean.loss) & jnp.isfinite(grad_norm)


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """The training step of the parameters, and its parts."""

    # (params, model state, batch) -> sum over the micro-batch of weight * loss, BatchSums
    loss_fn: Callable[[Any, Any, Batch], tuple[jax.Array, BatchSums]]
    optimizer: optax.GradientTransformation  # from `optimizers.create_optimizer`
    reader: MicroBatchReader
    # Adds a pytree over devices. Everything that crosses devices goes through it, once per step.
    reduce: Callable = sum_over_devices
    # Maximum consecutive non-finite steps before the loop ends early. A non-finite step is never applied: its
    # batch is skipped.
    max_nonfinite: int = 0
    statistics_decay: float = 0.9  # of the moving average of the layers' statistics over steps
    ema_decay: float = 0.0  # of the moving average of parameters and model state, where the state has one
    noise: NoisePlan | None = None  # how the gradient's noise is measured; None where it is not
    # AdaScale's reference batch size. The rate of a step is then that of the scale-invariant step in which it
    # starts, times its gain; the loop ends early where the run does.
    adascale_reference: int | None = None

    def zero_sums(self, state: TrainState, data) -> Gradients:
        """Return the sums of an empty batch, all zero, to start adding from.

        The metrics and statistics that the loss returns are found by tracing it, which is quick.
        """
        example = self.reader.example_batch(data)
        shapes = jax.eval_shape(self.loss_fn, state.params, state.model_state, example)[1]
        others = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return Gradients(jax.tree.map(jnp.zeros_like, state.params), jnp.zeros(()), others, jnp.zeros(()))

    def sum_gradients(self, state: TrainState, data, batch: DeviceBatch) -> Gradients:
        """Sum gradients over this device's part of a batch, without any collective."""
        if self.noise is None:
            return self._sum_over(self.reader, state, data, batch, measures=False)
        ways = [functools.partial(self._sum_over, reader, measures=True) for reader in self._measuring_readers()]
        way = self.noise.choice(self._num_groups(batch.count))
        if self.noise.every > 1:  # then most steps do not measure
            ways = [functools.partial(self._sum_over, self.reader, measures=False), *ways]
            way = jnp.where(state.step % self.noise.every == 0, way + 1, 0)
        return ways[0](state, data, batch) if len(ways) == 1 else lax.switch(way, ways, state, data, batch)

    def _sum_over(self, reader: MicroBatchReader, state: TrainState, data, batch: DeviceBatch, *, measures: bool):
        """Sum gradients by the micro-batches of `reader`, with or without the noise between them."""
        value_and_grad = jax.value_and_grad(self.loss_fn, has_aux=True)

        def sums_of(micro_batch):
            (loss, others), grads = value_and_grad(state.params, state.model_state, micro_batch)
            group_term = jnp.zeros(())
            if measures:
                group_term = noise_scale.group_term(grads, micro_batch.weights.sum())
            return Gradients(grads, loss, others, group_term)

        return reader.sum_over(sums_of, self.zero_sums(state, data), data, batch, state.seed)

    def apply_gradients(self, state: TrainState, mean: Gradients, step_inputs: StepInputs, gain=1.0) -> TrainState:
        """Return the state after a step by the mean gradient of a batch; `gain` multiplies the learning rate."""
        learning_rate = step_inputs.learning_rate * gain * state.learning_rate_scale
        hyperparams = {**state.opt_state.hyperparams, "learning_rate": learning_rate, "b2": step_inputs.b2}
        opt_state = state.opt_state._replace(hyperparams=hyperparams)
        updates, opt_state = self.optimizer.update(mean.grads, opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        count, model_state, ema = state.num_averaged, state.model_state, state.ema
        smoothed = {
            name: smooth(model_state[name], new, self.statistics_decay, count)
            for name, new in mean.others.statistics.items()
        }
        model_state = {**model_state, **smoothed}
        if ema is not None:
            ema = smooth(ema, {"params": params, "model_state": model_state}, self.ema_decay, count)
        return state.replace(
            params=params, model_state=model_state, ema=ema, opt_state=opt_state, num_averaged=count + 1
        )

    def train_step(self, state: TrainState, data, device, inputs: StepInputs, index):
        """Take one synchronous step; return the state after it, and its metrics by name.

        Args:
          device: index of this device, over all hosts.
          inputs: inputs of the steps of a call, of which this is number `index`.
        """
        step_inputs = jax.tree.map(lambda x: x[index], inputs)
        if self.adascale_reference:
            step_inputs = step_inputs.replace(learning_rate=scale_invariant_rate(inputs, state))
        sums = self.reduce(self.sum_gradients(state, data, self.reader.device_batch(device, step_inputs)))
        mean, grad_norm, is_finite = mean_gradient(sums, step_inputs.batch_size)
        noise, gain = state.noise, jnp.float32(1)
        if self.noise is not None:
            variance, signal, valid = self._measure_noise(sums.group_terms, grad_norm, step_inputs)
            # By the step's number, so that a resumed run measures at the same steps.
            valid &= state.step % self.noise.every == 0
            noise = noise_scale.add(noise, variance, signal, valid, self.noise.decay)
        if self.adascale_reference:
            gain = noise_scale.gain(noise, step_inputs.batch_size, self.adascale_reference)

        updated = self.apply_gradients(state, mean, step_inputs, gain)
        updated = updated.replace(noise=noise, scale_invariant_steps=state.scale_invariant_steps + gain)
        # With a condition a GPU would wait for its host to choose a branch, and copy the state into it.
        state = optax.tree.where(is_finite, updated, state)
        nonfinite = jnp.where(is_finite, 0, state.nonfinite + 1)
        state = state.replace(step=state.step + 1, nonfinite=nonfinite)
        metrics = {"loss": mean.loss, "grad_norm": grad_norm, **mean.others.metrics}
        metrics["nonfinite"] = nonfinite.astype(jnp.float32)
        if self.adascale_reference:
            metrics["gain"], metrics["rate"] = gain, step_inputs.learning_rate * gain
        return state, metrics

    def metric_names(self, sums: Gradients) -> list[str]:
        """Return the names of the metrics that `train_step` returns."""
        extra = ("gain", "rate") if self.adascale_reference else ()
        return ["loss", "grad_norm", "nonfinite", *sums.others.metrics, *extra]

    def _measuring_readers(self) -> list[MicroBatchReader]:
        """Return the readers of a step that measures, by size: of whole groups, or parts of the only group."""
        group_size = self.reader.grouping.group_size
        groupings = [Grouping(size, min(group_size, size)) for size in self.noise.sizes]
        return [dataclasses.replace(self.reader, grouping=grouping, single=False) for grouping in groupings]

    def _num_groups(self, count) -> list[jax.Array]:
        """Return the number of micro-batches of `count` examples of a device in a step that measures, by size."""
        return [reader.grouping.num_micro_batches(count) for reader in self._measuring_readers()]

    def _measure_noise(self, group_terms, grad_norm, step_inputs: StepInputs) -> tuple:
        """Measure the gradient's noise by how all devices' micro-batches differ; see `noise_scale.measure`."""
        sharding = self.reader.sharding
        by_size = self._num_groups(self.reader.device_batch(jnp.arange(sharding.num_devices), step_inputs).count)
        num_groups = jnp.sum(jnp.choose(self.noise.choice(by_size), by_size, mode="clip"))
        drawn = noise_scale.sampling(step_inputs.offset, step_inputs.batch_size, sharding.num_originals)
        return noise_scale.measure(group_terms, num_groups, grad_norm, step_inputs.batch_size, drawn)


def scale_invariant_rate(inputs: StepInputs, state: TrainState) -> jax.Array:
    """Return AdaScale's learning rate: that of the scale-invariant step in which a step starts."""
    last = inputs.learning_rate.shape[0] - 1
    return inputs.learning_rate[jnp.minimum(jnp.floor(state.scale_invariant_steps), last).astype(jnp.int32)]


def make_inner_loop(step: TrainStep, devices: list | None = None):
    """Make the inner loop of training, pmapped over all devices.

    Args:
      devices: devices to compile for, which need not be attached; None for this host's.
    Returns:
      A function (state, data, inputs, num_steps) -> (state, metrics).
      state: TrainState with a leading axis of this host's devices; donated.
      data: as `MicroBatchReader.read` takes it, with the same leading axis.
      inputs: StepInputs of the next steps, each [inputs_length], the same on every device.
      num_steps: number of steps to take.
      metrics: float32 [inputs_length] by name, zero for steps that were not reached: "loss", "grad_norm",
        "nonfinite" (the state's counter after the step) and those of `loss_fn`; with AdaScale "gain" and "rate".
    """

    def inner_loop(state, data, inputs, num_steps):
        device = lax.axis_index(AXIS)

        def goes_on(carry):
            index, state, _ = carry
            more = (index < num_steps) & (state.nonfinite <= step.max_nonfinite)
            if step.adascale_reference:  # the table of rates is below 0 beyond the end of the run
                more &= scale_invariant_rate(inputs, state) >= 0
            return more

        def body(carry):
            index, state, metrics = carry
            state, of_step = step.train_step(state, data, device, inputs, index)
            return index + 1, state, write_metrics(metrics, index, of_step)

        names = step.metric_names(step.zero_sums(state, data))
        metrics = dict.fromkeys(names, jnp.zeros(inputs.epoch.shape))
        with jax.named_scope(STEPS):
            _, state, metrics = lax.while_loop(goes_on, body, (jnp.int32(0), state, metrics))
        return state, metrics

    return pmap(inner_loop, (0, 0, None, None), out_axes=(0, None), donate_argnums=(0,), devices=devices)


def write_metrics(metrics: dict, index, of_step: dict) -> dict:
    """Return `metrics` with the values of step number `index` written at that index."""
    return jax.tree.map(lambda every, one: every.at[index].set(one), metrics, of_step)
