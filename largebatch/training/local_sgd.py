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
from largebatch.data import batching
from largebatch.hosts.replicas import AXIS, pmap
from largebatch.optim.schedules import UpdateInputs
from largebatch.training.state import LocalState, TrainState
from largebatch.training.step import (
    UPDATES,
    GradientSums,
    TrainStep,
    empty_metrics,
    mean_gradient,
    sum_over_devices,
    write_metrics,
)


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
    def from_config(cls, fields: SyncConfig) -> "Sync":
        """Take the fields from a config's section."""
        return cls(
            every=np.int32(fields.every),
            start_step=np.int32(fields.start_step),
            outer_learning_rate=np.float32(fields.outer_learning_rate),
            outer_momentum=np.float32(fields.outer_momentum),
        )


@struct.dataclass
class Averaged:
    """Values that devices average, all as float32."""

    squared_distance: jax.Array  # |distance|^2
    distance: Any  # of the parameters from the anchor
    statistics: Any  # of the network's layers
    ema: Any
    # Rounded after averaging: counters differ where a batch left some devices without an example.
    num_averaged: jax.Array
    opt_state: Any  # None where devices keep their own


def _squared_norm(tree) -> jax.Array:
    return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree))


def _scaled(tree, factor):
    return jax.tree.map(lambda x: x * factor, tree)


def _cast_like(means, originals):
    """Cast the float32 `means` to the dtypes of `originals`; counters are rounded."""

    def cast(mean, original):
        is_count = jnp.issubdtype(original.dtype, jnp.integer)
        return (jnp.rint(mean) if is_count else mean).astype(original.dtype)

    return jax.tree.map(cast, means, originals)


def _to_average(state: TrainState, statistics: tuple[str, ...], policy: str) -> Averaged:
    """Return this device's part of the average."""
    # Distances from the anchor lose less to rounding than parameters, also where squares are subtracted.
    distance = jax.tree.map(jnp.subtract, state.params, state.local.anchor)
    of_device = Averaged(
        squared_distance=_squared_norm(distance),
        distance=distance,
        statistics={name: state.model_state[name] for name in statistics},
        ema=state.ema,
        num_averaged=state.num_averaged,
        opt_state=state.opt_state.inner_state if policy == "average" else None,
    )
    return jax.tree.map(lambda x: x.astype(jnp.float32), of_device)


def _mean_over_devices(of_device: Averaged, examples, reduce) -> tuple[Averaged, jax.Array]:
    """Return the mean weighted by examples, and the number of examples; by ONE all-reduce."""
    sums, examples = reduce((_scaled(of_device, examples), examples))
    return _scaled(sums, 1 / jnp.maximum(examples, 1)), examples


def _with_means(state: TrainState, mean: Averaged, params) -> TrainState:
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


def _select(condition, if_true, if_false):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)


def make_average(statistics: tuple[str, ...], policy: str, devices: list | None = None):
    """Make the program (state of each device) -> a copy with the means that a synchronisation would compute.

    Right after a synchronisation the copy is the state itself, bit by bit; see `LocalStep`. Pmapped over devices.
    """

    def average(state):
        of_device = _to_average(state, statistics, policy)
        mean, examples = _mean_over_devices(of_device, state.local.examples, sum_over_devices)
        params = jax.tree.map(jnp.add, state.local.anchor, mean.distance)
        return _select(examples > 0, _with_means(state, mean, params), state)

    return pmap(average, devices=devices)


@dataclasses.dataclass(frozen=True)
class LocalStep:
    """Local steps, and the synchronisation after some of them."""

    step: TrainStep  # without AdaScale, which needs all devices at every step
    # The optimizer's state when devices synchronise: each takes the "average" of all, does "keep" its own, or is
    # "reset".
    policy: str
    statistics: tuple[str, ...]  # collections of the model state that `step.loss_fn` has sums for

    def local_step(self, state: TrainState, data, device, update: UpdateInputs, zeros: GradientSums):
        """Take one step of this device on its part of the batch.

        Returns:
          The state after it, and its metrics, weighted so that their sum over devices is the mean of the batch.
        """
        sharding = self.step.reader.sharding
        batch = batching.device_batch(sharding, device, update.epoch, update.offset, update.batch_size)
        sums = self.step.sum_gradients(state, data, batch, zeros)
        count = batch.count.astype(jnp.float32)
        mean = mean_gradient(sums, jnp.maximum(count, 1))
        is_applied = mean.finite & (batch.count > 0)
        state = lax.cond(
            is_applied,
            lambda state: self.step.apply_gradients(state, mean, update),
            lambda state: state,
            state,
        )
        examples = state.local.examples + jnp.where(is_applied, count, 0)
        local = state.local.replace(examples=examples, updates=state.local.updates + 1)
        metrics = {"loss": mean.loss, "grad_norm": mean.grad_norm, **mean.metrics}
        metrics = _scaled(metrics, count / update.batch_size)
        metrics["nonfinite"] = 1.0 - mean.finite
        return state.replace(step=state.step + 1, local=local), metrics

    def synchronize(self, state: TrainState, sync: Sync) -> TrainState:
        """Return the state of every device after a synchronisation."""
        of_device = _to_average(state, self.statistics, self.policy)
        mean, examples = _mean_over_devices(of_device, state.local.examples, self.step.reduce)
        anchor, momentum = state.local.anchor, sync.outer_momentum
        velocity = jax.tree.map(lambda v, d: momentum * v + d, state.local.velocity, mean.distance)
        direction = jax.tree.map(lambda v, d: d + momentum * v, velocity, mean.distance)
        params = jax.tree.map(lambda a, d: a + sync.outer_learning_rate * d, anchor, direction)
        # The mean of squared distances less the square of the mean distance.
        variance = jnp.maximum(mean.squared_distance - _squared_norm(mean.distance), 0)
        synced = _with_means(state, mean, params)
        if self.policy == "reset":
            inner_state = self.step.optimizer.init(params).inner_state
            synced = synced.replace(opt_state=state.opt_state._replace(inner_state=inner_state))
        # Where no example was counted, no device had a finite gradient, and nothing has moved.
        synced = _select(examples > 0, synced, state)
        local = LocalState(
            anchor=synced.params,
            velocity=_select(examples > 0, velocity, state.local.velocity),
            examples=jnp.zeros(()),
            updates=jnp.zeros((), jnp.int32),
            drift=jnp.sqrt(variance) / optax.tree.norm(synced.params),
        )
        return synced.replace(local=local)


def _with_anchor(state: TrainState) -> TrainState:
    """Set the anchor at the first local step, to the parameters that all devices still share."""
    anchor = lax.cond(state.local.updates > 0, lambda: state.local.anchor, lambda: state.params)
    return state.replace(local=state.local.replace(anchor=anchor))


def _count_in_a_row(before, bad, reached):
    """Count the consecutive bad steps up to the last step, and up to each step that was reached."""

    def count(before, update):
        bad, reached = update
        now = jnp.where(reached > 0, jnp.where(bad > 0, before + 1, 0), before)
        return now, now * reached

    return lax.scan(count, before.astype(jnp.float32), (bad, reached))


def _sum_in_place_of_update(metrics, first_update, reduce):
    """Sum metrics [inputs_length] over devices, in an order of additions that no restart changes.

    An all-reduce over hosts may add the elements of a vector in an order that depends on where in the vector they
    lie. A run that was stopped and resumed begins a call at another step. So each step's metrics are rolled to the
    place of its number, summed there, and rolled back.
    """
    in_place = jax.tree.map(lambda x: jnp.roll(x, first_update), metrics)
    return jax.tree.map(lambda x: jnp.roll(x, -first_update), reduce(in_place))


def make_local_loop(local: LocalStep, devices: list | None = None):
    """Make the inner loop of local steps, pmapped over all devices, or over the `devices` to compile for.

    Returns:
      (state, data, inputs, num_updates, sync: Sync) -> (state, metrics), as `step.make_inner_loop`. Every device
      has a state of its own. Metrics are those of all devices: "grad_norm" is the mean norm of their gradients,
      "nonfinite" counts the latest consecutive steps that some device skipped, "local" is 1, and "drift" and
      "synced" are zero for steps without a synchronisation. Metrics cross devices once, at the end of a call.
    """

    def local_loop(state, data, inputs, num_updates, sync):
        device = lax.axis_index(AXIS)
        zeros, first_update = local.step.zero_sums(state, data), state.step

        def body(index, carry):
            state, of_devices, of_all = carry
            update = local.step.inputs_at(inputs, index, state)
            state, metrics = local.local_step(_with_anchor(state), data, device, update, zeros)
            is_due = (state.step - sync.start_step) % sync.every == 0
            state = lax.cond(is_due, lambda s: local.synchronize(s, sync), lambda s: s, state)
            drift = jnp.where(is_due, state.local.drift, 0)
            same = {"drift": drift, "synced": is_due.astype(jnp.float32), "local": jnp.float32(1)}
            return state, write_metrics(of_devices, index, metrics), write_metrics(of_all, index, same)

        of_devices = empty_metrics(inputs, local.step.metric_names(zeros))  # differ from device to device
        of_all = empty_metrics(inputs, ("drift", "synced", "local"))  # the same on all
        with jax.named_scope(UPDATES):
            state, of_devices, of_all = lax.fori_loop(0, num_updates, body, (state, of_devices, of_all))
        metrics = _sum_in_place_of_update(of_devices, first_update, local.step.reduce)
        latest, metrics["nonfinite"] = _count_in_a_row(state.nonfinite, metrics["nonfinite"], of_all["local"])
        return state.replace(nonfinite=latest.astype(jnp.int32)), {**metrics, **of_all}

    in_axes = (0, 0, None, None, None)
    return pmap(local_loop, in_axes, out_axes=(0, None), donate_argnums=(0,), devices=devices)


def bytes_of_sync(state: TrainState, statistics: tuple[str, ...], policy: str) -> int:
    """Return the bytes a device puts into the all-reduce of a synchronisation; `state` may be its shapes."""
    of_device = jax.eval_shape(lambda state: _to_average(state, statistics, policy), state)
    return 4 * (1 + sum(leaf.size for leaf in jax.tree.leaves(of_device)))
