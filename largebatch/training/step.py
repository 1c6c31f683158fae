"""The pmapped inner loop: many updates per call, one all-reduce per update.

Each device sums weighted gradients over its share of the batch, micro-batch by micro-batch; one psum
adds the devices; the sum is divided by the true batch size. Both loops have traced trip counts, so a
batch size that changes, or a call that is cut shorter, compiles nothing new.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import flatten_util, lax

from largebatch.data import batching
from largebatch.data.batching import Deal
from largebatch.hosts.replicas import AXIS
from largebatch.optim import noise_scale, optimizers
from largebatch.optim.averaging import smooth


class Batch(NamedTuple):
    """One micro-batch: uint8 images [M, H, W, C], int32 labels [M], float32 weights [M] (0 is padding)."""

    images: jax.Array
    labels: jax.Array
    weights: jax.Array


class Plan(NamedTuple):
    """Per-update inputs of one call, each a NumPy array [max_updates], made on the host.

    With AdaScale the rates are those of all scale-invariant steps of the run, and below 0 beyond its end.
    """

    epoch: np.ndarray
    offset: np.ndarray
    batch_size: np.ndarray
    learning_rate: np.ndarray


def sum_over_devices(tree):
    """The sum of `tree` over devices, as ONE all-reduce of one flat float32 vector."""
    vector, unravel = flatten_util.ravel_pytree(tree)
    return unravel(lax.psum(vector, AXIS))


def _no_sum(tree):
    return tree


def _example_batch(read, data, micro_batch_size: int) -> Batch:
    """A micro-batch to trace by: example 0, again and again."""
    examples = jnp.zeros(micro_batch_size, jnp.int32)
    return Batch(*read(data, examples, examples.astype(jnp.uint32)), examples.astype(jnp.float32))


def _zeros_like_shapes(shapes):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _sum_over_share(sums_of, zeros, read, deal: Deal, micro_batch_size: int, seed, data, device, share):
    """`sums_of(batch)` added over the micro-batches of one device's share."""
    num_micro_batches = -(-share.count // micro_batch_size)

    def add(index, sums):
        examples, visits, weights = batching.micro_batch(
            deal, device, share, index, num_micro_batches, micro_batch_size, seed
        )
        return jax.tree.map(jnp.add, sums, sums_of(Batch(*read(data, examples, visits), weights)))

    return lax.fori_loop(0, num_micro_batches, add, zeros)


class Sums(NamedTuple):
    """Of a share or a whole batch: sums of the gradient, of the loss, of what else `loss_fn` adds up, and of
    `noise_scale.group_term`."""

    grads: Any
    loss: jax.Array
    extras: tuple[dict[str, jax.Array], Any]
    group_terms: jax.Array


class Step(NamedTuple):
    """What updates are made of.

    loss_fn: (params, model state, batch) -> sum over the micro-batch of weight * loss; such sums of whatever else
      is to be averaged over the batch, scalars by name; and such sums of the network's statistics, as the
      collections of the model state that they are smoothed into.
    optimizer: from `optimizers.create_optimizer`.
    read: (data of this device, local example indices [M], keys of their visits [M]) -> images, labels.
    deal: how the examples are spread over devices.
    micro_batch_size: examples per gradient evaluation, per device.
    reduce: adds a pytree over devices; everything that crosses devices goes through it, once per update.
    max_nonfinite: updates in a row whose loss or gradient norm is not finite before the loop ends early. Such an
      update is never applied: its batch is passed over.
    statistics_decay: of the moving average of the statistics over updates; see `state.smooth`.
    ema_decay: of the moving average of parameters and model state, where the state has one.
    noise_decay: of the moving averages of the gradient's noise; None does not measure it.
    adascale_reference: AdaScale's reference batch size. Every update's rate is that of the scale-invariant step
      that it starts in, times its gain; the loop ends early where the run does.
    packed: each device trains a run of its own on a deal to one device: nothing crosses devices.
    """

    loss_fn: Callable[[Any, Any, Batch], tuple[jax.Array, tuple[dict[str, jax.Array], Any]]]
    optimizer: optax.GradientTransformation
    read: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]
    deal: Deal
    micro_batch_size: int
    reduce: Callable = sum_over_devices
    max_nonfinite: int = 0
    statistics_decay: float = 0.9
    ema_decay: float = 0.0
    noise_decay: float | None = 0.98
    adascale_reference: int | None = None
    packed: bool = False

    def extras_of(self, state, data):
        """What `loss_fn` sums beside the loss, as zeros; traced forward only, which is quick."""
        example = _example_batch(self.read, data, self.micro_batch_size)
        return _zeros_like_shapes(jax.eval_shape(self.loss_fn, state.params, state.model_state, example)[1])

    def sum_over_share(self, state, data, device, share, extras) -> Sums:
        """Of this device's share; no collective in this loop."""

        def sums_of(batch):
            value_and_grad = jax.value_and_grad(self.loss_fn, has_aux=True)
            (loss, more), grads = value_and_grad(state.params, state.model_state, batch)
            measures = self.noise_decay is not None
            term = noise_scale.group_term(grads, batch.weights.sum()) if measures else jnp.zeros(())
            return Sums(grads, loss, more, term)

        zeros = Sums(jax.tree.map(jnp.zeros_like, state.params), jnp.zeros(()), extras, jnp.zeros(()))
        return _sum_over_share(
            sums_of, zeros, self.read, self.deal, self.micro_batch_size, state.seed, data, device, share
        )

    def num_groups(self, epoch, offset, batch_size):
        """Micro-batches of all devices."""
        shares = batching.device_share(self.deal, jnp.arange(self.deal.num_devices), epoch, offset, batch_size)
        return jnp.sum(-(-shares.count // self.micro_batch_size))

    def move(self, state, grads, statistics, learning_rate):
        """The state after an update by the mean gradient `grads`, whose batch had these statistics."""
        opt_state = optimizers.with_learning_rate(state.opt_state, learning_rate * state.learning_rate_scale)
        updates, opt_state = self.optimizer.update(grads, opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        smoothed = {
            name: smooth(state.model_state[name], new, self.statistics_decay, state.averaged)
            for name, new in statistics.items()
        }
        model_state = {**state.model_state, **smoothed}
        new = {"params": params, "model_state": model_state}
        ema = None if state.ema is None else smooth(state.ema, new, self.ema_decay, state.averaged)
        return state._replace(
            params=params, model_state=model_state, ema=ema, opt_state=opt_state, averaged=state.averaged + 1
        )

    def update(self, state, data, device, extras, epoch, offset, batch_size, rate_of):
        """One synchronous update: the state after it, and its metrics."""
        share = batching.device_share(self.deal, device, epoch, offset, batch_size)
        sums = self.reduce(self.sum_over_share(state, data, device, share, extras))
        grads, loss, (averages, statistics) = jax.tree.map(lambda x: x / batch_size, sums[:3])
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        noise, gain = state.noise, jnp.float32(1)
        if self.noise_decay is not None:
            num_groups = self.num_groups(epoch, offset, batch_size)
            drawn = noise_scale.sampling(offset, batch_size, self.deal.num_originals)
            measured = noise_scale.measure(sums.group_terms, num_groups, grad_norm, batch_size, drawn)
            noise = noise_scale.add(noise, measured, self.noise_decay)
        if self.adascale_reference:
            gain = noise_scale.gain(noise, batch_size, self.adascale_reference)

        def apply(state):
            state = self.move(state, grads, statistics, rate_of(state) * gain)
            return state._replace(noise=noise, progress=state.progress + gain)

        metrics = {"loss": loss, "grad_norm": grad_norm, **averages}
        if self.adascale_reference:
            metrics |= {"gain": gain, "rate": rate_of(state) * gain}
        state = lax.cond(finite, apply, lambda same: same, state)
        nonfinite = jnp.where(finite, 0, state.nonfinite + 1)
        state = state._replace(step=state.step + 1, nonfinite=nonfinite)
        return state, metrics | {"nonfinite": nonfinite.astype(jnp.float32)}


def make_inner_loop(step: Step):
    """The inner loop of training, pmapped over all devices.

    Returns:
      (state, data, plan, num_updates) -> (state, metrics). State and data have a leading local-device
      axis, the plan and the number of updates to do are the same on every device (unless `step` is packed: they and
      the metrics have a leading device axis too), and the state is donated. Metrics are "loss", "grad_norm",
      "nonfinite" (the state's counter after the update), with AdaScale "gain" and "rate", and the averages of
      `loss_fn`, each float32 [max_updates]; zero for updates that were not reached.
    """
    if step.packed:
        step = step._replace(reduce=_no_sum)

    def rate_at(plan, index, state):
        if not step.adascale_reference:
            return plan.learning_rate[index]
        last = plan.learning_rate.shape[0] - 1
        return plan.learning_rate[jnp.minimum(jnp.floor(state.progress), last).astype(jnp.int32)]

    def inner_loop(state, data, plan, num_updates):
        device = 0 if step.packed else lax.axis_index(AXIS)
        extras = step.extras_of(state, data)

        def goes_on(carry):
            index, state, _ = carry
            more = (index < num_updates) & (state.nonfinite <= step.max_nonfinite)
            return more & (rate_at(plan, index, state) >= 0)

        def body(carry):
            index, state, metrics = carry
            place = (field[index] for field in plan[:3])
            state, new = step.update(state, data, device, extras, *place, partial(rate_at, plan, index))
            return index + 1, state, write_at(metrics, index, new)

        names = ["loss", "grad_norm", "nonfinite", *extras[0]] + ["gain", "rate"] * bool(step.adascale_reference)
        return lax.while_loop(goes_on, body, (jnp.int32(0), state, empty_metrics(plan, names)))[1:]

    per_run = 0 if step.packed else None
    return jax.pmap(inner_loop, AXIS, in_axes=(0, 0, per_run, per_run), out_axes=(0, per_run), donate_argnums=(0,))


def empty_metrics(plan: Plan, names) -> dict[str, jax.Array]:
    """Zeros for every update of a plan."""
    return {name: jnp.zeros(plan.epoch.shape) for name in names}


def write_at(metrics: dict, index, new: dict) -> dict:
    """`metrics` with those of update number `index`."""
    return jax.tree.map(lambda all_, one: all_.at[index].set(one), metrics, new)


def make_count_nonfinite(
    outputs_fn: Callable, loss_fn: Callable, read: Callable, deal: Deal, micro_batch_size: int
):
    """Finds where an update stops being finite, once it has; pmapped over all devices.

    Args:
      outputs_fn: (params, model state, batch) -> outputs of the network's layers, by name.
      The others: as for `make_inner_loop`.

    Returns:
      (state, data, epoch, offset, batch_size) -> number of values that are not finite, int32, in each
      layer's output and in each parameter's gradient, over the whole batch: two pytrees.
    """

    def counts_of(params, model_state, batch):
        grads, _ = jax.grad(loss_fn, has_aux=True)(params, model_state, batch)
        found = outputs_fn(params, model_state, batch), grads
        return jax.tree.map(lambda x: jnp.sum(~jnp.isfinite(x), dtype=jnp.int32), found)

    def count(state, data, epoch, offset, batch_size):
        device = lax.axis_index(AXIS)
        share = batching.device_share(deal, device, epoch, offset, batch_size)
        batch = _example_batch(read, data, micro_batch_size)
        zeros = _zeros_like_shapes(jax.eval_shape(counts_of, state.params, state.model_state, batch))
        sums_of = partial(counts_of, state.params, state.model_state)
        return lax.psum(
            _sum_over_share(sums_of, zeros, read, deal, micro_batch_size, state.seed, data, device, share), AXIS
        )

    return jax.pmap(count, AXIS, in_axes=(0, 0, None, None, None), out_axes=None)
