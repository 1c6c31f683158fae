"""Local SGD: each device takes steps on its own part of every batch, and all average their states now and then.

Stich 2019, "Local SGD Converges Fast and Communicates Little"; after a synchronous start, post-local
SGD: Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD". Each device's weight in the average is the
number of examples that it has trained on since the last one, so that averaging after every step of plain or
momentum SGD is synchronous training. The average may be moved on by an outer optimizer: Douillard et al. 2023,
"DiLoCo".
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import lax

from largebatch.config.fields import SyncConfig
from largebatch.hosts.replicas import AXIS, pmap
from largebatch.nn.layers import STATISTICS
from largebatch.optim.schedules import StepInputs
from largebatch.training.state import LocalState, TrainState, count_params
from largebatch.training.step import STEPS, TrainStep, mean_gradient, write_metrics


@struct.dataclass
class Sync:
    """The times of synchronisations, and the outer optimizer; any values serve the same compiled program.

    The average's distance from the parameters at the last synchronisation goes through SGD with the outer rate and
    Nesterov momentum; a rate of 1 and a momentum of 0 take the average as it is.
    """

    every: jax.Array  # int32, steps from one synchronisation to the next
    start_step: jax.Array  # int32, the step from which they are counted
    outer_learning_rate: jax.Array  # float32
    outer_momentum: jax.Array  # float32

    @classmethod
    def from_config(cls, sync: SyncConfig) -> "Sync":
        """Take the fields from a config's section."""
        counts, rates = (sync.every, sync.start_step), (sync.outer_learning_rate, sync.outer_momentum)
        return cls(*map(np.int32, counts), *map(np.float32, rates))


@struct.dataclass
class Averaged:
    """The part of a state that devices average, in float32."""

    squared_distance: jax.Array  # |distance|^2
    distance: Any  # of the parameters from the anchor
    statistics: Any  # of the network's layers
    ema: Any
    # Rounded after averaging: counters differ where a batch left some devices without an example.
    num_averaged: jax.Array
    opt_state: Any  # None where devices keep their own


def _cast_like(means, originals):
    """Cast the float32 `means` to the dtypes of `originals`; counters are rounded."""

    def cast(mean, original):
        return (jnp.rint(mean) if jnp.issubdtype(original.dtype, jnp.integer) else mean).astype(original.dtype)

    return jax.tree.map(cast, means, originals)


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Local steps, and the synchronisation after some of them."""

    step: TrainStep  # without AdaScale, which needs all devices at every step
    # The optimizer's state when devices synchronise: each takes the "average" of all, does "keep" its own, or is
    # "reset".
    policy: str

    def device_part(self, state: TrainState) -> Averaged:
        """Return this device's part of the average."""
        # Distances from the anchor lose less to rounding than parameters, also where squares are subtracted.
        distance = optax.tree.sub(state.params, state.local.anchor)
        part = Averaged(
            squared_distance=optax.tree.norm(distance, squared=True),
            distance=distance,
            statistics={name: part for name, part in state.model_state.items() if name == STATISTICS},
            ema=state.ema,
            num_averaged=state.num_averaged,
            opt_state=state.opt_state.inner_state if self.policy == "average" else None,
        )
        return optax.tree.cast(part, jnp.float32)

    def sync_bytes(self, state: TrainState) -> int:
        """Return the bytes a device puts into the all-reduce of a synchronisation; `state` may be its shapes."""
        return 4 * (1 + count_params(jax.eval_shape(self.device_part, state)))

    def _mean_over_devices(self, state: TrainState) -> tuple[Averaged, jax.Array]:
        """Return the mean weighted by examples, and the number of examples; by ONE all-reduce."""
        examples = state.local.examples
        sums, examples = self.step.reduce((optax.tree.scale(examples, self.device_part(state)), examples))
        return optax.tree.scale(1 / jnp.maximum(examples, 1), sums), examples

    def _with_means(self, state: TrainState, mean: Averaged, params) -> TrainState:
        """Return `state` with these parameters and the means that belong to them."""
        ema = mean.ema
        if ema is not None:  # a frozen stem is the same everywhere, but for rounding in its mean
            frozen = {name: part for name, part in state.ema["model_state"].items() if name not in mean.statistics}
            ema = {**ema, "model_state": {**ema["model_state"], **frozen}}
        opt_state = state.opt_state
        if mean.opt_state is not None:
            opt_state = opt_state._replace(inner_state=_cast_like(mean.opt_state, opt_state.inner_state))
        return state.replace(
            params=params,
            model_state={**state.model_state, **mean.statistics},
            ema=ema,
            num_averaged=_cast_like(mean.num_averaged, state.num_averaged),
            opt_state=opt_state,
        )

    def average(self, state: TrainState) -> TrainState:
        """Return a copy of this device's state with the means that a synchronisation would compute.

        Right after a synchronisation the copy is the state itself, bit by bit.
        """
        mean, examples = self._mean_over_devices(state)
        params = optax.tree.add(state.local.anchor, mean.distance)
        return optax.tree.where(examples > 0, self._with_means(state, mean, params), state)

    def synchronize(self, state: TrainState, sync: Sync) -> TrainState:
        """Return the state of every device after a synchronisation."""
        mean, examples = self._mean_over_devices(state)
        velocity = optax.tree.add_scale(mean.distance, sync.outer_momentum, state.local.velocity)
        direction = optax.tree.add_scale(mean.distance, sync.outer_momentum, velocity)
        params = optax.tree.add_scale(state.local.anchor, sync.outer_learning_rate, direction)
        # The mean of squared distances less the square of the mean distance.
        variance = jnp.maximum(mean.squared_distance - optax.tree.norm(mean.distance, squared=True), 0)
        synced = self._with_means(state, mean, params)
        if self.policy == "reset":
            inner_state = self.step.optimizer.init(params).inner_state
            synced = synced.replace(opt_state=state.opt_state._replace(inner_state=inner_state))
        # Where no example was counted, no device had a finite gradient, and nothing has moved.
        synced = optax.tree.where(examples > 0, synced, state)
        local = LocalState(
            anchor=synced.params,
            velocity=optax.tree.where(examples > 0, velocity, state.local.velocity),
            examples=jnp.zeros(()),
            steps=jnp.zeros((), jnp.int32),
            drift=jnp.sqrt(variance) / optax.tree.norm(synced.params),
        )
        return synced.replace(local=local)

    def local_step(self, state: TrainState, data, device, step_inputs: StepInputs):
        """Take one step of this device on its part of the batch.

        Returns:
          The state after it, and its metrics, weighted so that their sum over devices is the mean of the batch.
        """
        # At the first local step the anchor is set to the parameters that all devices still share.
        anchor = lax.cond(state.local.steps > 0, lambda: state.local.anchor, lambda: state.params)
        state = state.replace(local=state.local.replace(anchor=anchor))
        batch = self.step.reader.device_batch(device, step_inputs)
        count = batch.count.astype(jnp.float32)
        sums = self.step.sum_gradients(state, data, batch)
        mean, grad_norm, is_finite = mean_gradient(sums, jnp.maximum(count, 1))
        is_applied = is_finite & (batch.count > 0)
        state = lax.cond(
            is_applied,
            lambda state: self.step.apply_gradients(state, mean, step_inputs),
            lambda state: state,
            state,
        )
        examples = state.local.examples + jnp.where(is_applied, count, 0)
        local = state.local.replace(examples=examples, steps=state.local.steps + 1)
        metrics = {"loss": mean.loss, "grad_norm": grad_norm, **mean.others.metrics}
        metrics = optax.tree.scale(count / step_inputs.batch_size, metrics) | {"nonfinite": 1.0 - is_finite}
        return state.replace(step=state.step + 1, local=local), metrics


def _count_in_a_row(before, bad, reached):
    """Count the consecutive bad steps up to the last step, and up to each step that was reached."""

    def count(before, step_inputs):
        bad, reached = step_inputs
        now = jnp.where(reached > 0, jnp.where(bad > 0, before + 1, 0), before)
        return now, now * reached

    return lax.scan(count, before.astype(jnp.float32), (bad, reached))


def make_local_loop(local: LocalSGD, devices: list | None = None):
    """Make the inner loop of local steps, pmapped over all devices, or over the `devices` to compile for.

    Returns:
      (state, data, inputs, num_steps, sync: Sync) -> (state, metrics), as `step.make_inner_loop`. Every device
      has a state of its own. Metrics are those of all devices: "grad_norm" is the mean norm of their gradients,
      "nonfinite" counts the latest consecutive steps that some device skipped, "local" is 1, and "drift" and
      "synced" are zero for steps without a synchronisation. Metrics cross devices once, at the end of a call.
    """

    def local_loop(state, data, inputs, num_steps, sync):
        device, first_step = lax.axis_index(AXIS), state.step

        def body(index, carry):
            state, device_metrics, all_metrics = carry
            step_inputs = jax.tree.map(lambda x: x[index], inputs)
            state, metrics = local.local_step(state, data, device, step_inputs)
            is_due = (state.step - sync.start_step) % sync.every == 0
            state = lax.cond(is_due, lambda s: local.synchronize(s, sync), lambda s: s, state)
            drift = jnp.where(is_due, state.local.drift, 0)
            same = {"drift": drift, "synced": is_due.astype(jnp.float32), "local": jnp.float32(1)}
            return state, write_metrics(device_metrics, index, metrics), write_metrics(all_metrics, index, same)

        device_metrics, all_metrics = (
            dict.fromkeys(names, jnp.zeros(inputs.epoch.shape))
            for names in (local.step.metric_names(local.step.zero_sums(state, data)), ("drift", "synced", "local"))
        )
        with jax.named_scope(STEPS):
            carry = state, device_metrics, all_metrics
            state, device_metrics, all_metrics = lax.fori_loop(0, num_steps, body, carry)
        # An all-reduce over hosts may add the elements of a vector in an order that depends on their place in it,
        # and a run that was resumed begins a call at another step. So that no restart changes that order, each
        # step's metrics are rolled to the place of its number, summed there, and rolled back.
        in_place = jax.tree.map(lambda x: jnp.roll(x, first_step), device_metrics)
        metrics = jax.tree.map(lambda x: jnp.roll(x, -first_step), local.step.reduce(in_place))
        latest, metrics["nonfinite"] = _count_in_a_row(state.nonfinite, metrics["nonfinite"], all_metrics["local"])
        return state.replace(nonfinite=latest.astype(jnp.int32)), {**metrics, **all_metrics}

    in_axes = (0, 0, None, None, None)
    return pmap(local_loop, in_axes, out_axes=(0, None), donate_argnums=(0,), devices=devices)
