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
from largebatch.optim.schedules import UpdateInputs
from largebatch.training.loss import Batch, BatchSums
from largebatch.training.state import TrainState

# Names of the loops in profiles and compiled programs.
UPDATES, MICRO_BATCHES = "updates", "micro_batches"


def sum_over_devices(tree):
    """Sum `tree` over devices, as ONE all-reduce of one flat float32 vector."""
    vector, unravel = flatten_util.ravel_pytree(tree)
    return unravel(lax.psum(vector, AXIS))


@dataclasses.dataclass(frozen=True)
class MicroBatchReader:
    """A reader of the micro-batches of a device's part of a batch."""

    # (data of this device, local example indices [M], visit keys [M]) -> images, labels
    read: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    sharding: DataSharding
    grouping: Grouping
    single: bool = False  # whether each device has one micro-batch in every step; see `has_one_micro_batch`

    def with_size(self, micro_batch_size: int) -> "MicroBatchReader":
        """Return a reader of smaller micro-batches: whole groups, or parts of the only group there is."""
        group_size = min(self.grouping.group_size, micro_batch_size)
        return dataclasses.replace(self, grouping=Grouping(micro_batch_size, group_size), single=False)

    def example_batch(self, data) -> Batch:
        """Return a micro-batch to trace by: example 0, again and again."""
        grouping = self.grouping
        examples = jnp.zeros(grouping.micro_batch_size, jnp.int32)
        weights = jnp.zeros((grouping.groups_at_once, grouping.group_size))
        return Batch(*self.read(data, examples, examples.astype(jnp.uint32)), weights)

    def num_micro_batches(self, batch: DeviceBatch):
        """Return the number of micro-batches of a device's part of a batch, a constant where that is 1."""
        return 1 if self.single else self.grouping.num_micro_batches(batch.count)

    def find(self, batch: DeviceBatch, index, seed):
        """Return what `micro_batch` takes for micro-batch number `index` of a device's part of a batch."""
        return batching.micro_batch(self.sharding, batch, index, self.grouping, seed)

    def micro_batch(self, data, found) -> Batch:
        """Read the micro-batch that was found."""
        images, labels = self.read(data, found.examples, found.visit_keys)
        return Batch(images, labels, found.weights.reshape(self.grouping.groups_at_once, -1))

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


@dataclasses.dataclass(frozen=True)
class SliceReader(MicroBatchReader):
    """A reader of all examples of a device as slices of its rows, for batches that are the whole training set.

    Which examples share a micro-batch does not matter then, so nothing is drawn or gathered. It is not for batch
    normalisation or the gradient's noise: a slice has all views of its images, and is no fair sample of the set.
    """

    # (data of this device, first row, rows M) -> images, labels; required
    read_slice: Callable[[Any, jax.Array, int], tuple[jax.Array, jax.Array]] | None = None

    def num_micro_batches(self, batch: DeviceBatch):
        """Return the number of micro-batches, a constant if all devices have as many.

        With a constant a GPU does not ask its host before each micro-batch.
        """
        shares = self.sharding.share_bounds(self.sharding.num_examples)
        fewest, most = (self.grouping.num_micro_batches(share) for share in shares)
        return most if fewest == most else super().num_micro_batches(batch)

    def find(self, batch: DeviceBatch, index, seed):
        """Return the first row of micro-batch `index` and how many rows it has; see `MicroBatchReader`."""
        begins, lengths = self.grouping.groups_of(batch.count, index)
        return begins[0], lengths[0]

    def micro_batch(self, data, found) -> Batch:
        """Read the rows that were found. A slice that would end behind the last row begins earlier."""
        (begin, length), num_rows = found, data["images"].shape[0]
        size = min(self.grouping.micro_batch_size, num_rows)
        start = jnp.minimum(begin, num_rows - size)
        images, labels = self.read_slice(data, start, size)
        rows = start + jnp.arange(size)
        weights = ((begin <= rows) & (rows < begin + length)).astype(jnp.float32)
        return Batch(images, labels, weights[None])


@struct.dataclass
class GradientSums:
    """Sums over a device's part of a batch, or over the whole batch."""

    grads: Any  # like the parameters
    loss: jax.Array
    others: BatchSums
    group_terms: jax.Array  # sum of noise_scale.group_term


@struct.dataclass
class MeanGradient:
    """Means over the examples of a batch; `statistics` are those of the network's layers."""

    grads: Any
    loss: jax.Array
    metrics: dict[str, jax.Array]
    statistics: Any
    grad_norm: jax.Array
    finite: jax.Array  # bool, whether loss and gradient norm are finite; else the step is not applied


def mean_gradient(sums: GradientSums, count) -> MeanGradient:
    """Return the means of sums over `count` examples."""
    grads, loss, others = jax.tree.map(lambda x: x / count, (sums.grads, sums.loss, sums.others))
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    return MeanGradient(grads, loss, others.metrics, others.statistics, grad_norm, finite)


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

    def zero_sums(self, state: TrainState, data) -> GradientSums:
        """Return the sums of an empty batch, all zero, to start adding from.

        The metrics and statistics that the loss returns are found by tracing it, which is quick.
        """
        example = self.reader.example_batch(data)
        shapes = jax.eval_shape(self.loss_fn, state.params, state.model_state, example)[1]
        others = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return GradientSums(jax.tree.map(jnp.zeros_like, state.params), jnp.zeros(()), others, jnp.zeros(()))

    def sum_gradients(self, state: TrainState, data, batch: DeviceBatch, zeros: GradientSums) -> GradientSums:
        """Sum gradients over this device's part of a batch, without any collective."""
        if self.noise is None:
            return self._sum_over(self.reader, state, data, batch, zeros, measures=False)
        ways = [functools.partial(self._sum_over, reader, measures=True) for reader in self._measuring_readers()]
        way = self.noise.choice(self._num_groups(batch.count))
        if self.noise.every > 1:  # then most steps do not measure
            ways = [functools.partial(self._sum_over, self.reader, measures=False), *ways]
            way = jnp.where(self._measures_at(state.step), way + 1, 0)
        if len(ways) == 1:
            return ways[0](state, data, batch, zeros)
        return lax.switch(way, ways, state, data, batch, zeros)

    def _sum_over(
        self,
        reader: MicroBatchReader,
        state: TrainState,
        data,
        batch: DeviceBatch,
        zeros: GradientSums,
        *,
        measures,
    ) -> GradientSums:
        """Sum gradients by the micro-batches of `reader`, with or without the noise between them."""
        value_and_grad = jax.value_and_grad(self.loss_fn, has_aux=True)

        def sums_of(micro_batch):
            (loss, others), grads = value_and_grad(state.params, state.model_state, micro_batch)
            group_term = jnp.zeros(())
            if measures:
                group_term = noise_scale.group_term(grads, micro_batch.weights.sum())
            return GradientSums(grads, loss, others, group_term)

        return reader.sum_over(sums_of, zeros, data, batch, state.seed)

    def apply_gradients(self, state: TrainState, mean: MeanGradient, update: UpdateInputs, gain=1.0) -> TrainState:
        """Return the state after a step by the mean gradient of a batch; `gain` multiplies the rate."""
        learning_rate = update.learning_rate * gain * state.learning_rate_scale
        opt_state = optax.tree.set(state.opt_state, learning_rate=learning_rate, b2=update.b2)
        updates, opt_state = self.optimizer.update(mean.grads, opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        smoothed = {
            name: smooth(state.model_state[name], new, self.statistics_decay, state.num_averaged)
            for name, new in mean.statistics.items()
        }
        model_state = {**state.model_state, **smoothed}
        ema = state.ema
        if ema is not None:
            ema = smooth(ema, {"params": params, "model_state": model_state}, self.ema_decay, state.num_averaged)
        return state.replace(
            params=params,
            model_state=model_state,
            ema=ema,
            opt_state=opt_state,
            num_averaged=state.num_averaged + 1,
        )

    def train_step(self, state: TrainState, data, device, update: UpdateInputs, zeros: GradientSums):
        """Take one synchronous step; return the state after it, and its metrics by name.

        Args:
          device: index of this device, over all hosts.
          update: inputs of this step.
          zeros: see `zero_sums`.
        """
        sharding = self.reader.sharding
        batch = batching.device_batch(sharding, device, update.epoch, update.offset, update.batch_size)
        sums = self.reduce(self.sum_gradients(state, data, batch, zeros))
        mean = mean_gradient(sums, update.batch_size)
        noise, gain = state.noise, jnp.float32(1)
        if self.noise is not None:
            variance, signal, valid = self._measure_noise(sums, mean, update)
            noise = noise_scale.add(
                noise, variance, signal, valid & self._measures_at(state.step), self.noise.decay
            )
        if self.adascale_reference:
            gain = noise_scale.gain(noise, update.batch_size, self.adascale_reference)

        updated = self.apply_gradients(state, mean, update, gain)
        updated = updated.replace(noise=noise, scale_invariant_steps=state.scale_invariant_steps + gain)
        # With a condition a GPU would wait for its host to choose a branch, and copy the state into it.
        state = jax.tree.map(lambda new, old: jnp.where(mean.finite, new, old), updated, state)
        nonfinite = jnp.where(mean.finite, 0, state.nonfinite + 1)
        state = state.replace(step=state.step + 1, nonfinite=nonfinite)
        metrics = {"loss": mean.loss, "grad_norm": mean.grad_norm, **mean.metrics}
        metrics["nonfinite"] = nonfinite.astype(jnp.float32)
        if self.adascale_reference:
            metrics["gain"], metrics["rate"] = gain, update.learning_rate * gain
        return state, metrics

    def _measures_at(self, step) -> jax.Array:
        """Tell whether the step after `step` others measures the noise, also in a resumed run."""
        return step % self.noise.every == 0

    def _measuring_readers(self) -> list[MicroBatchReader]:
        """Return the readers of a step that measures, one for each size."""
        return [self.reader.with_size(size) for size in self.noise.sizes]

    def _num_groups(self, count) -> list[jax.Array]:
        """Return the number of micro-batches of `count` examples of a device in a step that measures, by size."""
        return [reader.grouping.num_micro_batches(count) for reader in self._measuring_readers()]

    def _measure_noise(self, sums: GradientSums, mean: MeanGradient, update: UpdateInputs) -> tuple:
        """Measure the gradient's noise by how all devices' micro-batches differ; see `noise_scale.measure`."""
        sharding = self.reader.sharding
        every_device = jnp.arange(sharding.num_devices)
        batches = batching.device_batch(sharding, every_device, update.epoch, update.offset, update.batch_size)
        by_size = self._num_groups(batches.count)
        num_groups = jnp.sum(jnp.choose(self.noise.choice(by_size), by_size, mode="clip"))
        drawn = noise_scale.sampling(update.offset, update.batch_size, sharding.num_originals)
        return noise_scale.measure(sums.group_terms, num_groups, mean.grad_norm, update.batch_size, drawn)

    def inputs_at(self, inputs: UpdateInputs, index, state: TrainState) -> UpdateInputs:
        """Return the inputs of step number `index` of a call, taken from the arrays of the call."""
        rate_index = index
        if self.adascale_reference:  # a table by scale-invariant step
            last = inputs.learning_rate.shape[0] - 1
            rate_index = jnp.minimum(jnp.floor(state.scale_invariant_steps), last).astype(jnp.int32)
        return UpdateInputs(
            epoch=inputs.epoch[index],
            offset=inputs.offset[index],
            batch_size=inputs.batch_size[index],
            learning_rate=inputs.learning_rate[rate_index],
            b2=inputs.b2[index],
        )

    def metric_names(self, zeros: GradientSums) -> list[str]:
        """Return the names of the metrics that `train_step` returns."""
        names = ["loss", "grad_norm", "nonfinite", *zeros.others.metrics]
        if self.adascale_reference:
            names += ["gain", "rate"]
        return names


def make_inner_loop(step: TrainStep, devices: list | None = None):
    """Make the inner loop of training, pmapped over all devices.

    Args:
      devices: devices to compile for, which need not be attached; None for this host's.
    Returns:
      A function (state, data, inputs, num_updates) -> (state, metrics).
      state: TrainState with a leading axis of this host's devices; donated.
      data: as `MicroBatchReader.read` takes it, with the same leading axis.
      inputs: UpdateInputs of the next steps, each [inputs_length], the same on every device.
      num_updates: number of steps to take.
      metrics: float32 [inputs_length] by name, zero for steps that were not reached: "loss", "grad_norm",
        "nonfinite" (the state's counter after the step) and those of `loss_fn`; with AdaScale "gain" and "rate".
    """

    def inner_loop(state, data, inputs, num_updates):
        device = lax.axis_index(AXIS)
        zeros = step.zero_sums(state, data)

        def goes_on(carry):
            index, state, _ = carry
            more = (index < num_updates) & (state.nonfinite <= step.max_nonfinite)
            return more & (step.inputs_at(inputs, index, state).learning_rate >= 0)

        def body(carry):
            index, state, metrics = carry
            state, of_update = step.train_step(state, data, device, step.inputs_at(inputs, index, state), zeros)
            return index + 1, state, write_metrics(metrics, index, of_update)

        metrics = empty_metrics(inputs, step.metric_names(zeros))
        with jax.named_scope(UPDATES):
            _, state, metrics = lax.while_loop(goes_on, body, (jnp.int32(0), state, metrics))
        return state, metrics

    in_axes, out_axes = (0, 0, None, None), (0, None)
    return pmap(inner_loop, in_axes, out_axes, donate_argnums=(0,), devices=devices)


def empty_metrics(inputs: UpdateInputs, names) -> dict[str, jax.Array]:
    """Return zeros by metric, for all steps that a call can take."""
    return {name: jnp.zeros(inputs.epoch.shape) for name in names}


def write_metrics(metrics: dict, index, of_update: dict) -> dict:
    """Return `metrics` with the values of step number `index` written at that index."""
    return jax.tree.map(lambda every, one: every.at[index].set(one), metrics, of_update)
