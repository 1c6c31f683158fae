"""Devices that take local steps, each on its own share of every batch, and average what they have now and then.

Local SGD: Stich 2019, "Local SGD Converges Fast and Communicates Little"; after a synchronous start, post-local
SGD: Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD". Each device's part of the average is the number
of examples that it has trained on since the last one, so that averaging after every update of plain or momentum SGD
is synchronous training. The average may be moved on by an outer optimizer: Douillard et al. 2023, "DiLoCo".
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from largebatch.data import batching
from largebatch.hosts.replicas import AXIS
from largebatch.training.state import LocalState, TrainState
from largebatch.training.step import Step, empty_metrics, sum_over_devices, write_at


class Sync(NamedTuple):
    """When devices synchronise and what they do then; numbers that any value serves the same compiled program.

    They do every `every` updates, counted from update `start_step` on. The average's distance from the parameters
    at the last synchronisation goes through SGD with this rate and Nesterov momentum; 1 and 0 take the average as
    it is.
    """

    every: int
    start_step: int
    outer_learning_rate: float
    outer_momentum: float


class Means(NamedTuple):
    """What devices average, all float32; `squares` is |moved|^2.

    Counters are rounded again. They differ where a batch left some devices without an example.
    """

    squares: jax.Array
    moved: Any
    statistics: Any
    ema: Any
    averaged: jax.Array
    opt_state: Any


def _squares(tree) -> jax.Array:
    return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree))


def _scaled(tree, factor):
    return jax.tree.map(lambda x: x * factor, tree)


def _like(means, own):
    """The means in the types of what they are of."""

    def like(mean, own):
        counts = jnp.issubdtype(own.dtype, jnp.integer)
        return (jnp.rint(mean) if counts else mean).astype(own.dtype)

    return jax.tree.map(like, means, own)


def _own(state: TrainState, statistics: tuple[str, ...], policy: str) -> Means:
    # Distances from the anchor, not parameters: less is rounded, and little lost when squares are taken away.
    moved = jax.tree.map(jnp.subtract, state.params, state.local.anchor)
    smoothed = {name: state.model_state[name] for name in statistics}
    inner = state.opt_state.inner_state if policy == "average" else None
    own = Means(_squares(moved), moved, smoothed, state.ema, state.averaged, inner)
    return jax.tree.map(lambda x: x.astype(jnp.float32), own)


def _mean_over_devices(own: Means, examples, reduce) -> tuple[Means, jax.Array]:
    """By ONE all-reduce: the means by examples, and how many those were."""
    sums, examples = reduce((_scaled(own, examples), examples))
    return _scaled(sums, 1 / jnp.maximum(examples, 1)), examples


def _with_means(state: TrainState, mean: Means, params) -> TrainState:
    """`state` with these parameters and the means of what goes with them."""
    ema = mean.ema
    if ema is not None:  # a frozen stem is the same everywhere, but for rounding in its mean
        frozen = {name: part for name, part in state.ema["model_state"].items() if name not in mean.statistics}
        ema = {**ema, "model_state": {**ema["model_state"], **frozen}}
    averaged, opt_state = _like(mean.averaged, state.averaged), state.opt_state
    if mean.opt_state is not None:
        opt_state = opt_state._replace(inner_state=_like(mean.opt_state, opt_state.inner_state))
    return state._replace(
        params=params,
        model_state={**state.model_state, **mean.statistics},
        ema=ema,
        averaged=averaged,
        opt_state=opt_state,
    )


def _where(condition, one, other):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def make_average(statistics: tuple[str, ...], policy: str, reduce=sum_over_devices):
    """(state of each device) -> a copy with what a synchronisation would average as the mean; see `LocalStep`.

    Right after a synchronisation that is the state itself, bit by bit. Pmapped over all devices.
    """

    def average(state):
        mean, examples = _mean_over_devices(_own(state, statistics, policy), state.local.examples, reduce)
        params = jax.tree.map(jnp.add, state.local.anchor, mean.moved)
        return _where(examples > 0, _with_means(state, mean, params), state)

    return jax.pmap(average, AXIS)


class LocalStep(NamedTuple):
    """Local steps, and the synchronisation after some of them.

    step: without AdaScale, which needs all devices at every update.
    policy: of the optimizer's state when devices synchronise: each takes the "average" of all, does "keep" its
      own, or starts anew ("reset").
    statistics: collections of the model state that `step.loss_fn` has sums for.
    """

    step: Step
    policy: str
    statistics: tuple[str, ...]

    def update(self, state, data, device, extras, epoch, offset, batch_size, learning_rate):
        """One update of this device by its share; its metrics, weighted so that their sum is the batch's mean."""
        share = batching.device_share(self.step.deal, device, epoch, offset, batch_size)
        sums = self.step.sum_over_share(state, data, device, share, extras)
        count = share.count.astype(jnp.float32)
        grads, loss, (averages, smoothed) = jax.tree.map(lambda x: x / jnp.maximum(count, 1), sums[:3])
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        takes = finite & (share.count > 0)
        state = lax.cond(takes, lambda s: self.step.move(s, grads, smoothed, learning_rate), lambda s: s, state)
        examples = state.local.examples + jnp.where(takes, count, 0)
        local = state.local._replace(examples=examples, updates=state.local.updates + 1)
        metrics = _scaled({"loss": loss, "grad_norm": grad_norm, **averages}, count / batch_size)
        return state._replace(step=state.step + 1, local=local), metrics | {"nonfinite": 1.0 - finite}

    def synchronize(self, state, sync: Sync):
        """The state of every device after a synchronisation."""
        own = _own(state, self.statistics, self.policy)
        mean, examples = _mean_over_devices(own, state.local.examples, self.step.reduce)
        velocity = jax.tree.map(lambda v, m: sync.outer_momentum * v + m, state.local.velocity, mean.moved)
        ahead = jax.tree.map(lambda v, m: m + sync.outer_momentum * v, velocity, mean.moved)
        params = jax.tree.map(lambda p, a: p + sync.outer_learning_rate * a, state.local.anchor, ahead)
        spread = jnp.maximum(mean.squares - _squares(mean.moved), 0)
        synced = _with_means(state, mean, params)
        if self.policy == "reset":
            inner = self.step.optimizer.init(params).inner_state
            synced = synced._replace(opt_state=state.opt_state._replace(inner_state=inner))
        synced = _where(examples > 0, synced, state)  # else no device had a share that is finite: nothing has moved
        local = LocalState(
            anchor=synced.params,
            velocity=_where(examples > 0, velocity, state.local.velocity),
            examples=jnp.zeros(()),
            updates=jnp.zeros((), jnp.int32),
            drift=jnp.sqrt(spread) / optax.tree.norm(synced.params),
        )
        return synced._replace(local=local)


def _with_anchor(state: TrainState) -> TrainState:
    """Before the first local step devices hold the same parameters, which later ones are measured from."""
    anchor = lax.cond(state.local.updates > 0, lambda: state.local.anchor, lambda: state.params)
    return state._replace(local=state.local._replace(anchor=anchor))


def _count_in_a_row(before, bad, reached):
    """How many of the latest updates were bad, after each of them that was reached; and after the last."""

    def count(before, here):
        bad, reached = here
        now = jnp.where(reached > 0, jnp.where(bad > 0, before + 1, 0), before)
        return now, now * reached

    return lax.scan(count, before.astype(jnp.float32), (bad, reached))


def _rolled(metrics, by):
    return jax.tree.map(lambda x: jnp.roll(x, by), metrics)


def make_local_loop(local: LocalStep):
    """The inner loop of local steps, pmapped over all devices.

    Returns:
      (state, data, plan, num_updates, sync: Sync) -> (state, metrics), as `step.make_inner_loop`. Every device has
      a state of its own. Metrics are those of all devices: "grad_norm" is the mean norm of their gradients,
      "nonfinite" counts the latest updates in a row that some device passed over, "local" is 1, and "drift" and
      "synced" are zero for updates without a synchronisation. Metrics cross devices once, at the end of a call.
    """

    def local_loop(state, data, plan, num_updates, sync):
        device = lax.axis_index(AXIS)
        extras, first = local.step.extras_of(state, data), state.step

        def body(index, carry):
            state, metrics, common = carry
            state, new = local.update(_with_anchor(state), data, device, extras, *(field[index] for field in plan))
            due = (state.step - sync.start_step) % sync.every == 0
            state = lax.cond(due, lambda s: local.synchronize(s, sync), lambda s: s, state)
            drift = jnp.where(due, state.local.drift, 0)
            same = {"drift": drift, "synced": due.astype(jnp.float32), "local": jnp.float32(1)}
            return state, write_at(metrics, index, new), write_at(common, index, same)

        empty = empty_metrics(plan, ("loss", "grad_norm", "nonfinite", *extras[0]))
        common = empty_metrics(plan, ("drift", "synced", "local"))
        state, metrics, common = lax.fori_loop(0, num_updates, body, (state, empty, common))
        # To where the update stands in any call: in which order hosts add may depend on it.
        metrics = _rolled(local.step.reduce(_rolled(metrics, first)), -first)
        latest, metrics["nonfinite"] = _count_in_a_row(state.nonfinite, metrics["nonfinite"], common["local"])
        return state._replace(nonfinite=latest.astype(jnp.int32)), metrics | common

    return jax.pmap(local_loop, AXIS, in_axes=(0, 0, None, None, None), out_axes=(0, None), donate_argnums=(0,))


def bytes_of_sync(state: TrainState, statistics: tuple[str, ...], policy: str) -> int:
    """What one device puts into the all-reduce of a synchronisation; `state` is one device's, or its shapes."""
    own = jax.eval_shape(lambda state: _own(state, statistics, policy), state)
    return 4 * (1 + sum(leaf.size for leaf in jax.tree.leaves(own)))
