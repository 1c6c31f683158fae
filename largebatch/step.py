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

from largebatch import batching, optimizers
from largebatch.batching import Deal
from largebatch.devices import AXIS
from largebatch.state import smooth


class Batch(NamedTuple):
    """One micro-batch: uint8 images [M, H, W, C], int32 labels [M], float32 weights [M] (0 is padding)."""

    images: jax.Array
    labels: jax.Array
    weights: jax.Array


class Plan(NamedTuple):
    """Per-update inputs of one call, each a NumPy array [max_updates], made on the host."""

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


def _move(state, *, optimizer, grads, statistics, learning_rate, statistics_decay, ema_decay):
    """The state after an update by the mean gradient `grads`, whose batch had these statistics."""
    opt_state = optimizers.with_learning_rate(state.opt_state, learning_rate * state.learning_rate_scale)
    updates, opt_state = optimizer.update(grads, opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    smoothed = {
        name: smooth(state.model_state[name], new, statistics_decay, state.averaged)
        for name, new in statistics.items()
    }
    model_state = {**state.model_state, **smoothed}
    new = {"params": params, "model_state": model_state}
    ema = None if state.ema is None else smooth(state.ema, new, ema_decay, state.averaged)
    averaged = state.averaged + 1
    return state._replace(params=params, model_state=model_state, ema=ema, opt_state=opt_state, averaged=averaged)


def make_inner_loop(
    loss_fn: Callable[[Any, Any, Batch], tuple[jax.Array, tuple[dict[str, jax.Array], Any]]],
    optimizer: optax.GradientTransformation,
    read: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]],
    deal: Deal,
    micro_batch_size: int,
    reduce: Callable = sum_over_devices,
    max_nonfinite: int = 0,
    *,
    statistics_decay: float = 0.9,
    ema_decay: float = 0.0,
    packed: bool = False,
):
    """The inner loop of training, pmapped over all devices.

    Args:
      loss_fn: (params, model state, batch) -> sum over the micro-batch of weight * loss; such sums of whatever
        else is to be averaged over the batch, scalars by name; and such sums of the network's statistics, as the
        collections of the model state that they are smoothed into.
      optimizer: from `optimizers.create_optimizer`.
      read: (data of this device, local example indices [M], keys of their visits [M]) -> images, labels.
      deal: how the examples are spread over devices.
      micro_batch_size: examples per gradient evaluation, per device.
      reduce: adds a pytree over devices; everything that crosses devices goes through it, once per update.
      max_nonfinite: updates in a row whose loss or gradient norm is not finite before the loop ends early.
        Such an update is never applied: its batch is passed over.
      statistics_decay: of the moving average of the statistics over updates; see `state.smooth`.
      ema_decay: of the moving average of parameters and model state, where the state has one.
      packed: each device trains a run of its own on a deal to one device: nothing crosses devices, and
        plan, number of updates and metrics have a leading device axis too.

    Returns:
      (state, data, plan, num_updates) -> (state, metrics). State and data have a leading local-device
      axis, the plan and the number of updates to do are the same on every device, and the state is
      donated. Metrics are "loss", "grad_norm", "nonfinite" (the state's counter after the update) and the
      averages of `loss_fn`, each float32 [max_updates]; zero for updates that were not reached.
    """

    if packed:
        reduce = _no_sum

    move = partial(_move, optimizer=optimizer, statistics_decay=statistics_decay, ema_decay=ema_decay)

    def local_sums(state, data, device, share, extras):
        """Sum of gradients and losses over this device's share; no collective in this loop."""

        def sums_of(batch):
            return jax.value_and_grad(loss_fn, has_aux=True)(state.params, state.model_state, batch)

        zeros = ((jnp.zeros(()), extras), jax.tree.map(jnp.zeros_like, state.params))
        return _sum_over_share(sums_of, zeros, read, deal, micro_batch_size, state.seed, data, device, share)

    def update(state, data, device, extras, epoch, offset, batch_size, learning_rate):
        share = batching.device_share(deal, device, epoch, offset, batch_size)
        sums = reduce(local_sums(state, data, device, share, extras))
        (loss, (averages, statistics)), grads = jax.tree.map(lambda x: x / batch_size, sums)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

        apply = partial(move, grads=grads, statistics=statistics, learning_rate=learning_rate)
        state = lax.cond(finite, apply, lambda same: same, state)
        nonfinite = jnp.where(finite, 0, state.nonfinite + 1)
        state = state._replace(step=state.step + 1, nonfinite=nonfinite)
        counted = nonfinite.astype(jnp.float32)
        return state, {"loss": loss, "grad_norm": grad_norm, "nonfinite": counted, **averages}

    def inner_loop(state, data, plan, num_updates):
        device = 0 if packed else lax.axis_index(AXIS)
        # What `loss_fn` sums beside the loss, as zeros; traced forward only, which is quick.
        example = _example_batch(read, data, micro_batch_size)
        extras = _zeros_like_shapes(jax.eval_shape(loss_fn, state.params, state.model_state, example)[1])

        def goes_on(carry):
            index, state, _ = carry
            return (index < num_updates) & (state.nonfinite <= max_nonfinite)

        def body(carry):
            index, state, metrics = carry
            state, new = update(state, data, device, extras, *(field[index] for field in plan))
            return index + 1, state, jax.tree.map(lambda all_, one: all_.at[index].set(one), metrics, new)

        empty = {name: jnp.zeros(plan.epoch.shape) for name in ("loss", "grad_norm", "nonfinite", *extras[0])}
        return lax.while_loop(goes_on, body, (jnp.int32(0), state, empty))[1:]

    per_run = 0 if packed else None
    return jax.pmap(inner_loop, AXIS, in_axes=(0, 0, per_run, per_run), out_axes=(0, per_run), donate_argnums=(0,))


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
