"""Batches that change and local steps, against replays in NumPy of the same examples."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import flatten_util, lax
from test_step import examples_of

from benchmarks.ours import collectives
from configs import default
from largebatch.data import batching
from largebatch.data.batching import Deal
from largebatch.hosts import replicas
from largebatch.hosts.replicas import AXIS
from largebatch.optim import optimizers, schedules, traces
from largebatch.optim.optimizers import Numbers, Switches
from largebatch.training import local_sgd
from largebatch.training.local_sgd import LocalStep, Sync
from largebatch.training.state import create_state
from largebatch.training.step import Plan, Step, make_inner_loop

POLICIES = ("average", "keep", "reset")
DIMENSIONS, EXAMPLES, RATE, MOMENTUM = 5, 1280, 0.05, 0.9
RNG = np.random.default_rng(0)
POINTS = RNG.standard_normal((EXAMPLES, DIMENSIONS)).astype(np.float32)
TARGETS = (POINTS @ np.arange(DIMENSIONS) + RNG.standard_normal(EXAMPLES)).astype(np.float32)
LENGTH = 16


def loss_fn(params, model_state, batch):
    """Least squares; counts how often it is called."""
    error = batch.images[:, :-1] @ params["w"] + params["b"] - batch.images[:, -1]
    return jnp.sum(batch.weights * error**2 / 2), ({"calls": jnp.float32(1)}, {})


def gradient(params, rows):
    """The mean gradient of `rows`, float64."""
    error = POINTS[rows] @ params["w"] + params["b"] - TARGETS[rows]
    return {"w": POINTS[rows].T.astype(np.float64) @ error / len(rows), "b": error.mean()}


class Problem(NamedTuple):
    deal: Deal
    step: Step
    data: object
    fresh: object


def make_problem(num_devices, name="sgd", micro_batch_size=16, momentum=MOMENTUM, **switches):
    deal = Deal(EXAMPLES, num_devices, views=1)
    shards = []
    for index, device in enumerate(jax.local_devices()[:num_devices]):
        held = deal.originals_of(index, seed=0)
        rows = np.concatenate([POINTS[held], TARGETS[held, None]], 1)
        rows = np.pad(rows, ((0, deal.max_originals - len(held)), (0, 0)))
        shards.append(jax.device_put({"rows": rows[None]}, device))

    def read(data, examples, visits):
        return data["rows"][examples], jnp.zeros(examples.shape, jnp.int32)

    optimizer = optimizers.create_optimizer(name, Numbers(momentum=momentum), Switches(**switches))
    step = Step(loss_fn, optimizer, read, deal, micro_batch_size)

    def fresh():
        params = {"w": jnp.zeros(DIMENSIONS), "b": jnp.zeros(())}
        return replicas.replicate(create_state(params, optimizer, 0, local=True), jax.local_devices()[:num_devices])

    return Problem(deal, step, replicas.stack(shards), fresh)


def make_plan(deal, sizes, first=0, rate=RATE):
    sizes = np.resize(sizes, LENGTH + first)
    starts = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
    place = batching.epoch_and_offset(deal, starts)
    plan = Plan(*place, sizes.astype(np.int32), np.full(len(sizes), rate, np.float32))
    return Plan(*(field[first:] for field in plan))


def rows_of(deal, device, epoch, offset, batch_size):
    """Global indices of what a device trains on in one update."""
    examples, weights = examples_of(deal, device, epoch, offset, np.int32(batch_size))
    return deal.originals_of(device, seed=0)[np.asarray(examples)[np.asarray(weights) == 1]]


def params_of(state):
    return {name: np.asarray(leaf) for name, leaf in state.params.items()}  # [devices, ...]


def assert_close(found, expected, tolerance=2e-5):
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance)


class Replica:
    """Momentum SGD in NumPy, with the rate outside the momentum or inside: Goyal et al. 2017, eq. 9 and 10."""

    def __init__(self, corrected=True):
        self.params = {"w": np.zeros(DIMENSIONS), "b": np.zeros(())}
        self.velocity = {"w": np.zeros(DIMENSIONS), "b": np.zeros(())}
        self.corrected = corrected

    def update(self, rows, rate=RATE):
        outside, inside = (rate, 1) if self.corrected else (1, rate)
        for name, value in gradient(self.params, rows).items():
            self.velocity[name] = MOMENTUM * self.velocity[name] + inside * value
            self.params[name] = self.params[name] - outside * self.velocity[name]


# ---- batches that change ----------------------------------------------------------------------------------


@pytest.mark.parametrize("corrected", [True, False])
def test_a_trace_is_the_replay_of_its_examples_with_one_compilation(corrected):
    """At rates that follow the batch. Sums of float32 gradients against float64: 2e-5."""
    sizes = [32, 64, 96, 7, 1024, 50, 1280, 1]
    fields = default.get_config().schedule.to_dict() | {"scaling": "linear", "reference_batch_size": 64}
    trace = traces.from_list(sizes * 2).batch_sizes
    rates = schedules.create(fields, 0.005, LENGTH, trace, EXAMPLES).rates(np.arange(LENGTH))
    problem, replica = make_problem(8, momentum_correction=corrected), Replica(corrected)
    traced = []

    def counted(*arguments):
        traced.append(1)
        return loss_fn(*arguments)

    loop = make_inner_loop(problem.step._replace(loss_fn=counted))
    plan, state, made, seen = make_plan(problem.deal, sizes), problem.fresh(), 0, []
    plan = plan._replace(learning_rate=rates.astype(np.float32))
    for update, size in enumerate(sizes):
        one = Plan(*(np.roll(field, -update) for field in plan))
        state, _ = loop(state, problem.data, one, np.int32(1))
        made = made or len(traced)
        assert len(traced) == made
        place = plan.epoch[update], plan.offset[update], size
        rows = np.concatenate([rows_of(problem.deal, device, *place) for device in range(8)])
        assert len(rows) == size
        seen += rows.tolist()
        replica.update(rows, rates[update])
        for device in (0, 7):
            assert_close({name: leaf[device] for name, leaf in params_of(state).items()}, replica.params)
    # 2,554 visits, of which batch 1,280 crosses the end of the first epoch: all twice, but for 6 that come next.
    assert len(set(seen[:1273])) == 1273
    assert sorted(np.bincount(seen, minlength=EXAMPLES)) == [1] * 6 + [2] * (EXAMPLES - 6)


def test_the_seed_s_own_example_accumulates_as_it_says():
    """Local batch 32, trace 64, 96: accumulate, update, accumulate, accumulate, update."""
    problem = make_problem(1, micro_batch_size=32)
    state, metrics = make_inner_loop(problem.step)(
        problem.fresh(), problem.data, make_plan(problem.deal, [64, 96]), np.int32(2)
    )
    calls = np.asarray(metrics["calls"])[:2] * [64, 96]  # sums over the batch are divided by its size
    np.testing.assert_allclose(calls, [2, 3], rtol=1e-6)
    assert int(replicas.first_replica(state.step)) == 2


def test_devices_may_accumulate_unequally():
    problem = make_problem(8, micro_batch_size=4)
    _, metrics = make_inner_loop(problem.step)(
        problem.fresh(), problem.data, make_plan(problem.deal, [33]), np.int32(1)
    )
    np.testing.assert_allclose(np.asarray(metrics["calls"])[0] * 33, 7 * 1 + 2, rtol=1e-6)  # 7 of 4, one of 5


# ---- local steps --------------------------------------------------------------------------------------------


def run_local(problem, sizes, sync, policy="average", updates=LENGTH, state=None, first=0, **changes):
    loop = local_sgd.make_local_loop(LocalStep(problem.step._replace(noise_decay=None, **changes), policy, ()))
    plan = make_plan(problem.deal, sizes, first)
    return loop(state or problem.fresh(), problem.data, plan, np.int32(updates), Sync(*map(np.asarray, sync)))


def sync_of(every, start=0, rate=1.0, momentum=0.0):
    return Sync(np.int32(every), np.int32(start), np.float32(rate), np.float32(momentum))


@pytest.mark.parametrize("sizes", [[64], [50, 37, 7, 200]])
def test_averaging_after_every_update_is_synchronous_training(sizes):
    """With momentum, and where devices have unequal shares or none."""
    problem = make_problem(8)
    local, metrics = run_local(problem, sizes, sync_of(1))
    together, expected = make_inner_loop(problem.step)(
        problem.fresh(), problem.data, make_plan(problem.deal, sizes), np.int32(LENGTH)
    )
    assert_close(params_of(local), params_of(together))
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-4)


def test_devices_without_an_example_take_the_others_moments_and_counters():
    """Of a batch of one image a single device has an update; the mean by examples is that device's state."""
    problem = make_problem(8, "adam")
    local, _ = run_local(problem, [1], sync_of(1))
    together, _ = make_inner_loop(problem.step)(
        problem.fresh(), problem.data, make_plan(problem.deal, [1]), np.int32(LENGTH)
    )
    assert_close(params_of(local), params_of(together), 1e-6)
    for a, b in zip(
        *map(jax.tree.leaves, (local.opt_state.inner_state, together.opt_state.inner_state)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(local.averaged, np.full(8, LENGTH))


@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
def test_local_sgd_and_its_outer_step_against_numpy(rate, momentum):
    problem, every, sizes = make_problem(4), 3, [48, 13, 6]
    state, metrics = run_local(problem, sizes, sync_of(every, 0, rate, momentum), updates=8)
    in_numpy, anchor = [Replica() for _ in range(4)], Replica().params
    outer = {name: np.zeros_like(value) for name, value in anchor.items()}
    plan, weights, drifts = make_plan(problem.deal, sizes), np.zeros(4), []
    for update in range(8):
        for device, replica in enumerate(in_numpy):
            rows = rows_of(problem.deal, device, plan.epoch[update], plan.offset[update], plan.batch_size[update])
            if len(rows):
                replica.update(rows)
            weights[device] += len(rows)
        if (update + 1) % every == 0:
            means = {}
            for name in anchor:
                moved = np.stack([replica.params[name] - anchor[name] for replica in in_numpy])
                means[name] = np.average(moved, axis=0, weights=weights)
                outer[name] = momentum * outer[name] + means[name]
            flat = [np.append(r.params["w"] - anchor["w"], r.params["b"] - anchor["b"]) for r in in_numpy]
            center = np.append(means["w"], means["b"])
            spread = np.average([np.square(f - center).sum() for f in flat], weights=weights)
            velocity = {
                name: np.average([replica.velocity[name] for replica in in_numpy], axis=0, weights=weights)
                for name in anchor
            }
            anchor = {n: anchor[n] + rate * (means[n] + momentum * outer[n]) for n in anchor}
            drifts.append(np.sqrt(spread) / np.linalg.norm(np.append(anchor["w"], anchor["b"])))
            for replica in in_numpy:
                replica.params, replica.velocity = dict(anchor), dict(velocity)
            weights[:] = 0
    for device, replica in enumerate(in_numpy):  # two updates after the last synchronisation, so that they differ
        assert_close({name: leaf[device] for name, leaf in params_of(state).items()}, replica.params, 1e-4)
    assert np.flatnonzero(np.asarray(metrics["synced"])).tolist() == [2, 5]
    np.testing.assert_allclose(np.asarray(metrics["drift"])[[2, 5]], drifts, rtol=1e-3)
    found = replicas.all_replicas(local_sgd.make_average((), "average")(state))
    expected = {n: np.average([r.params[n] for r in in_numpy], axis=0, weights=weights) for n in anchor}
    assert_close({name: leaf[0] for name, leaf in found.params.items()}, expected, 1e-4)
    velocity = np.average([replica.velocity["w"] for replica in in_numpy], axis=0, weights=weights)
    np.testing.assert_allclose(momentum_buffers(found), np.tile(velocity, (4, 1)), rtol=1e-4)


def momentum_buffers(state):
    inner = jax.tree.leaves(state.opt_state.inner_state)
    return next(np.asarray(leaf) for leaf in inner if leaf.shape[1:] == (DIMENSIONS,))


def test_what_becomes_of_the_optimizer_s_state_when_devices_meet():
    problem = make_problem(4)
    before = momentum_buffers(run_local(problem, [64], sync_of(9), "keep", updates=3)[0])
    after = {
        policy: momentum_buffers(run_local(problem, [64], sync_of(3), policy, updates=3)[0]) for policy in POLICIES
    }
    assert np.abs(before - before[0]).max() > 1e-3
    np.testing.assert_array_equal(after["keep"], before)
    np.testing.assert_allclose(after["average"], np.broadcast_to(before.mean(0), before.shape), rtol=1e-5)
    np.testing.assert_array_equal(after["reset"], np.zeros_like(before))


@pytest.mark.parametrize("policy", POLICIES)
def test_synchronisation_keeps_the_numbers_of_the_optimizer(policy):
    """Hyper-parameters are part of its state, but nothing to average."""
    state, _ = run_local(make_problem(8, "adam", momentum=0.7), [50], sync_of(1), policy)
    found = {name: np.asarray(value) for name, value in state.opt_state.hyperparams.items()}
    for name, value in Numbers(momentum=0.7)._asdict().items():
        assert (found[name] == np.float32(value)).all(), name


def add_around_the_ring(tree):
    """A sum over 4 devices that begins at another of them for every element, as that of several hosts does."""
    vector, unravel = flatten_util.ravel_pytree(tree)
    parts, element = lax.all_gather(vector, AXIS), jnp.arange(len(vector))
    return unravel(sum(parts[(element + turn) % 4, element] for turn in range(4)))


def test_results_do_not_depend_on_how_the_loop_is_cut():
    """Mid-window, and through a copy of all replicas on the host, as a checkpoint has them."""
    problem = make_problem(4)
    problem = problem._replace(step=problem.step._replace(reduce=add_around_the_ring))
    whole, metrics = run_local(problem, [48, 13, 6], sync_of(4, 0, 0.7, 0.9), updates=11)
    state, found = problem.fresh(), {"loss": [], "grad_norm": []}
    for first, count in ((0, 3), (3, 7), (10, 1)):
        state, values = run_local(
            problem, [48, 13, 6], sync_of(4, 0, 0.7, 0.9), updates=count, state=state, first=first
        )
        for name, all_ in found.items():
            all_ += np.asarray(values[name])[:count].tolist()
        state = replicas.spread(replicas.all_replicas(state), replicas.local_devices_of(state))
    assert found == {name: np.asarray(metrics[name])[:11].tolist() for name in found}
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_the_mean_of_devices_that_have_just_met_is_what_they_hold():
    problem = make_problem(4)
    state, _ = run_local(problem, [48], sync_of(4), updates=8)
    mean = local_sgd.make_average((), "average")(state)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(mean), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_devices_cross_once_a_synchronisation_and_once_a_call():
    """All-reduces of the compiled program times how often they run, against one per update in step."""
    problem, every = make_problem(8, "adam"), 4
    step = problem.step._replace(noise_decay=None)
    loop = local_sgd.make_local_loop(LocalStep(step, "average", ()))
    plan = make_plan(problem.deal, [64])
    synchronous = make_inner_loop(step).lower(problem.fresh(), problem.data, plan, np.int32(LENGTH)).compile()
    assert [one["kind"] for one in collectives(synchronous.as_text())] == ["all-reduce"]  # LENGTH times
    text = loop.lower(problem.fresh(), problem.data, plan, np.int32(LENGTH), sync_of(every)).compile().as_text()
    found = collectives(text)
    assert [one["kind"] for one in found] == ["all-reduce"] * 2
    # One stands in the branch of a conditional, the other outside every loop.
    computations = text.split("\n\n")
    conditional = next(part for part in computations if " conditional(" in part)
    inside = [part for part in computations if " all-reduce(" in part or " all-reduce-start(" in part]
    branches = [part.split(" ", 1)[0] for part in inside if not part.startswith("ENTRY")]
    assert len(branches) == 1
    assert branches[0] in conditional
    _, metrics = loop(problem.fresh(), problem.data, plan, np.int32(LENGTH), sync_of(every))
    assert np.asarray(metrics["synced"]).sum() == LENGTH / every
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), problem.fresh())
    assert local_sgd.bytes_of_sync(state, (), "average") in [one["bytes"] for one in found]


def test_a_device_passes_over_an_update_that_is_not_finite():
    """The others go on, and all learn of it when the call ends, however far the next synchronisation is."""
    problem = make_problem(4)
    rows = np.array(replicas.all_replicas(problem.data)["rows"])
    example = rows_of(problem.deal, 2, 0, 3 * 48, 48)[0]  # of update 3
    rows[2, problem.deal.originals_of(2, seed=0).tolist().index(example), 0] = np.nan
    problem = problem._replace(data=replicas.spread({"rows": rows}, jax.local_devices()[:4]))
    for every in (3, 100):
        state, metrics = run_local(problem, [48], sync_of(every), updates=6)
        assert np.asarray(metrics["nonfinite"])[:7].tolist() == [0, 0, 0, 1, 0, 0, 0]
        assert np.asarray(state.step).tolist() == [6] * 4
        params = params_of(state)["w"]
        assert np.isfinite(params).all()
        assert np.abs(params).max() > 0
    state, metrics = run_local(problem, [48], sync_of(3), updates=4)
    assert np.asarray(state.nonfinite).tolist() == [1] * 4
