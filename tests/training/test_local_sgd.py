"""Batches that change and local steps, against replays in NumPy of the same examples."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import flatten_util, lax
from test_step import examples_of

from benchmarks.ours import collectives
from largebatch.config.fields import BatchConfig, OptimizerConfig, ScheduleConfig
from largebatch.data.batching import DataSharding, Grouping
from largebatch.hosts import replicas
from largebatch.hosts.replicas import AXIS, pmap
from largebatch.optim import schedules
from largebatch.optim.batch_schedule import BatchSchedule
from largebatch.optim.optimizers import Hyperparams, create_optimizer
from largebatch.optim.schedules import UpdateInputs, epoch_and_offset
from largebatch.runs.progress import replicas_from_mean
from largebatch.training.local_sgd import LocalSGD, Sync, make_local_loop
from largebatch.training.loss import BatchSums
from largebatch.training.state import TrainState, create_train_state
from largebatch.training.step import MicroBatchReader, TrainStep, make_inner_loop

POLICIES = ("average", "keep", "reset")
DIMENSIONS, EXAMPLES, RATE, MOMENTUM = 5, 1280, 0.05, 0.9
RNG = np.random.default_rng(0)
POINTS = RNG.standard_normal((EXAMPLES, DIMENSIONS)).astype(np.float32)
TARGETS = (POINTS @ np.arange(DIMENSIONS) + RNG.standard_normal(EXAMPLES)).astype(np.float32)
MAX_UPDATES = 16


def loss_fn(params, model_state, batch):
    """Least squares; counts how often it is called."""
    error = batch.images[:, :-1] @ params["w"] + params["b"] - batch.images[:, -1]
    return jnp.sum(batch.weights * error**2 / 2), BatchSums({"calls": jnp.float32(1)}, {})


def gradient(params, rows):
    """The mean gradient of `rows`, float64."""
    error = POINTS[rows] @ params["w"] + params["b"] - TARGETS[rows]
    return {"w": POINTS[rows].T.astype(np.float64) @ error / len(rows), "b": error.mean()}


@dataclasses.dataclass(frozen=True)
class Problem:
    """What updates are made of, the data that they see and a maker of states before the first."""

    step: TrainStep
    data: Any
    first_state: Callable[[], TrainState]

    @property
    def sharding(self) -> DataSharding:
        return self.step.reader.sharding

    def with_step(self, **changes) -> "Problem":
        return dataclasses.replace(self, step=dataclasses.replace(self.step, **changes))


def make_problem(num_devices, name="sgd", micro_batch_size=16, momentum=MOMENTUM, **options) -> Problem:
    sharding, devices = DataSharding(EXAMPLES, 64, num_devices, views=1), jax.local_devices()[:num_devices]
    shards = []
    for index, device in enumerate(devices):
        originals = sharding.originals_of(index, seed=0)
        rows = np.concatenate([POINTS[originals], TARGETS[originals, None]], 1)
        rows = np.pad(rows, ((0, sharding.max_originals - len(originals)), (0, 0)))
        shards.append(jax.device_put({"rows": rows[None]}, device))

    def read(data, examples, visit_keys):
        return data["rows"][examples], jnp.zeros(examples.shape, jnp.int32)

    optimizer = create_optimizer(OptimizerConfig(name=name, momentum=momentum, **options))
    step = TrainStep(
        loss_fn, optimizer, MicroBatchReader(read, sharding, Grouping(micro_batch_size, micro_batch_size))
    )

    def first_state():
        params = {"w": jnp.zeros(DIMENSIONS), "b": jnp.zeros(())}
        return replicas.replicate(create_train_state(params, optimizer, 0, local=True), devices)

    return Problem(step, replicas.stack(shards), first_state)


def inputs_of(sizes, first_update=0) -> UpdateInputs:
    """Of MAX_UPDATES updates from `first_update` on, of a run whose batches have these sizes again and again."""
    sizes = np.resize(sizes, first_update + MAX_UPDATES)
    starts = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
    epoch, offset = epoch_and_offset(starts[first_update:], EXAMPLES)
    rates = np.full(MAX_UPDATES, RATE, np.float32)
    b2 = np.full(MAX_UPDATES, 0.999, np.float32)
    return UpdateInputs(epoch, offset, sizes[first_update:].astype(np.int32), rates, b2)


def run_synchronous(problem: Problem, sizes, updates=MAX_UPDATES):
    loop = make_inner_loop(problem.step)
    return loop(problem.first_state(), problem.data, inputs_of(sizes), np.int32(updates))


def rows_of(sharding: DataSharding, device, update: UpdateInputs) -> np.ndarray:
    """Global indices of what a device trains on in one update."""
    examples = examples_of(sharding, device, update.epoch, update.offset, np.int32(update.batch_size))
    return sharding.originals_of(device, seed=0)[examples]


def one_update(inputs: UpdateInputs, index: int) -> UpdateInputs:
    return jax.tree.map(lambda x: x[index], inputs)


def params_of(state):
    return {name: np.asarray(leaf) for name, leaf in state.params.items()}  # [devices, ...]


def params_of_device(state, device):
    return {name: leaf[device] for name, leaf in params_of(state).items()}


def assert_close(actual, expected, tolerance=2e-5):
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], rtol=tolerance, atol=tolerance)


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


@pytest.mark.parametrize("corrected", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_trace_is_the_replay_of_its_examples_with_one_compilation(corrected):
    """At rates that follow the batch. Sums of float32 gradients against float64: 2e-5."""
    sizes = [32, 64, 96, 7, 1024, 50, 1280, 1]
    options = ScheduleConfig(scaling="linear", reference_batch_size=64)
    batch_sizes = BatchSchedule.from_config(BatchConfig(trace=tuple(sizes * 2)), EXAMPLES, 8)
    schedule = schedules.create_schedule(options, 0.005, MAX_UPDATES, batch_sizes, EXAMPLES)
    problem, replica = make_problem(8, momentum_correction=corrected), Replica(corrected)
    traced = []

    def counted(*arguments):
        traced.append(1)
        return loss_fn(*arguments)

    loop = make_inner_loop(problem.with_step(loss_fn=counted).step)
    inputs, state, traced_at_first, seen = inputs_of(sizes), problem.first_state(), 0, []
    inputs = inputs.replace(learning_rate=schedule.learning_rates(np.arange(MAX_UPDATES)).astype(np.float32))
    for number, size in enumerate(sizes):
        update = one_update(inputs, number)
        from_here = jax.tree.map(lambda x, number=number: np.roll(x, -number), inputs)
        state, _ = loop(state, problem.data, from_here, np.int32(1))
        traced_at_first = traced_at_first or len(traced)
        assert len(traced) == traced_at_first
        rows = np.concatenate([rows_of(problem.sharding, device, update) for device in range(8)])
        assert len(rows) == size
        seen += rows.tolist()
        replica.update(rows, schedule.learning_rate_at(number))
        for device in (0, 7):
            assert_close(params_of_device(state, device), replica.params)
    # 2,554 visits, of which batch 1,280 crosses the end of the first epoch: all twice, but for 6 that come next.
    assert len(set(seen[:1273])) == 1273
    assert sorted(np.bincount(seen, minlength=EXAMPLES)) == [1] * 6 + [2] * (EXAMPLES - 6)


def test_the_seed_s_own_example_accumulates_as_it_says():
    """Local batch 32, trace 64, 96: accumulate, update, accumulate, accumulate, update."""
    state, metrics = run_synchronous(make_problem(1, micro_batch_size=32), [64, 96], updates=2)
    calls = np.asarray(metrics["calls"])[:2] * [64, 96]  # sums over the batch are divided by its size
    np.testing.assert_allclose(calls, [2, 3], rtol=1e-6)
    assert int(replicas.first_replica(state.step)) == 2


def test_devices_may_accumulate_unequally():
    _, metrics = run_synchronous(make_problem(8, micro_batch_size=4), [33], updates=1)
    np.testing.assert_allclose(np.asarray(metrics["calls"])[0] * 33, 7 * 1 + 2, rtol=1e-6)  # 7 of 4, one of 5


# ---- local steps --------------------------------------------------------------------------------------------


def run_local(problem, sizes, sync: Sync, policy="average", updates=MAX_UPDATES, state=None, first_update=0):
    step = dataclasses.replace(problem.step, noise=None)
    loop = make_local_loop(LocalSGD(step, policy))
    inputs = inputs_of(sizes, first_update)
    return loop(state or problem.first_state(), problem.data, inputs, np.int32(updates), sync)


def averaged(problem, state):
    return pmap(LocalSGD(problem.step, "average").average)(state)


def sync_of(every, rate=1.0, momentum=0.0) -> Sync:
    return Sync(
        every=np.int32(every),
        start_step=np.int32(0),
        outer_learning_rate=np.float32(rate),
        outer_momentum=np.float32(momentum),
    )


@pytest.mark.parametrize("sizes", [[64], [50, 37, 7, 200]])
def test_averaging_after_every_update_is_synchronous_training(sizes):
    """With momentum, and where devices have unequal shares or none."""
    problem = make_problem(8)
    local, metrics = run_local(problem, sizes, sync_of(1))
    together, expected = run_synchronous(problem, sizes)
    assert_close(params_of(local), params_of(together))
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-4)


@pytest.mark.full
def test_devices_without_an_example_take_the_others_moments_and_counters():
    """Of a batch of one image a single device has an update; the mean by examples is that device's state."""
    problem = make_problem(8, "adam")
    local, _ = run_local(problem, [1], sync_of(1))
    together, _ = run_synchronous(problem, [1])
    assert_close(params_of(local), params_of(together), 1e-6)
    moments, expected = (jax.tree.leaves(state.opt_state.inner_state) for state in (local, together))
    for a, b in zip(moments, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(local.num_averaged, np.full(8, MAX_UPDATES))


@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
def test_local_sgd_and_its_outer_step_against_numpy(rate, momentum):
    problem, every, sizes = make_problem(4), 3, [48, 13, 6]
    state, metrics = run_local(problem, sizes, sync_of(every, rate, momentum), updates=8)
    in_numpy, anchor = [Replica() for _ in range(4)], Replica().params
    outer = {name: np.zeros_like(value) for name, value in anchor.items()}
    inputs, weights, drifts = inputs_of(sizes), np.zeros(4), []
    for update in range(8):
        for device, replica in enumerate(in_numpy):
            rows = rows_of(problem.sharding, device, one_update(inputs, update))
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
        assert_close(params_of_device(state, device), replica.params, 1e-4)
    assert np.flatnonzero(np.asarray(metrics["synced"])).tolist() == [2, 5]
    np.testing.assert_allclose(np.asarray(metrics["drift"])[[2, 5]], drifts, rtol=1e-3)
    average = replicas.all_replicas(averaged(problem, state))
    expected = {n: np.average([r.params[n] for r in in_numpy], axis=0, weights=weights) for n in anchor}
    assert_close(params_of_device(average, 0), expected, 1e-4)
    velocity = np.average([replica.velocity["w"] for replica in in_numpy], axis=0, weights=weights)
    np.testing.assert_allclose(momentum_buffers(average), np.tile(velocity, (4, 1)), rtol=1e-4)


def momentum_buffers(state):
    inner = jax.tree.leaves(state.opt_state.inner_state)
    return next(np.asarray(leaf) for leaf in inner if leaf.shape[1:] == (DIMENSIONS,))


@pytest.mark.full
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
    for name, value in vars(Hyperparams(momentum=0.7)).items():
        assert (np.asarray(state.opt_state.hyperparams[name]) == np.float32(value)).all(), name


def add_around_the_ring(tree):
    """A sum over 4 devices that begins at another of them for every element, as that of several hosts does."""
    vector, unravel = flatten_util.ravel_pytree(tree)
    parts, element = lax.all_gather(vector, AXIS), jnp.arange(len(vector))
    return unravel(sum(parts[(element + turn) % 4, element] for turn in range(4)))


@pytest.mark.full
def test_results_do_not_depend_on_how_the_loop_is_cut():
    """Mid-window, and through a copy of all replicas on the host, as a checkpoint has them."""
    problem, sizes, sync = make_problem(4).with_step(reduce=add_around_the_ring), [48, 13, 6], sync_of(4, 0.7, 0.9)
    whole, metrics = run_local(problem, sizes, sync, updates=11)
    state, in_parts = problem.first_state(), {"loss": [], "grad_norm": []}
    for first, count in ((0, 3), (3, 7), (10, 1)):
        state, metrics_of_part = run_local(problem, sizes, sync, updates=count, state=state, first_update=first)
        for name, values in in_parts.items():
            values += np.asarray(metrics_of_part[name])[:count].tolist()
        state = replicas.spread(replicas.all_replicas(state), replicas.local_devices_of(state))
    assert in_parts == {name: np.asarray(metrics[name])[:11].tolist() for name in in_parts}
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("num_devices", [2, 8])
def test_on_another_number_of_devices_all_start_from_the_mean(num_devices):
    before, after = make_problem(4), make_problem(num_devices)
    state, _ = run_local(before, [48, 13], sync_of(4, 0.7, 0.9), updates=6)  # two after a synchronisation
    mean = replicas.first_replica(averaged(before, state))
    moved = replicas_from_mean(mean, replicas.all_replicas(after.first_state()))
    weights = replicas.all_replicas(state).local.examples
    expected = {
        name: np.average(of_all, axis=0, weights=weights)
        for name, of_all in replicas.all_replicas(state).params.items()
    }
    for device in range(num_devices):
        assert_close({name: of_all[device] for name, of_all in moved.params.items()}, expected)
        assert_close({name: of_all[device] for name, of_all in moved.local.anchor.items()}, expected)
    assert (moved.local.examples == 0).all()
    assert (moved.step == 6).all()

    placed = replicas.spread(moved, jax.local_devices()[:num_devices])
    state, metrics = run_local(after, [48, 13], sync_of(4, 0.7, 0.9), updates=2, state=placed, first_update=6)
    assert np.isfinite(np.asarray(metrics["loss"])[:2]).all()
    of_all = replicas.all_replicas(state).params["w"]  # update 8 was a synchronisation
    np.testing.assert_array_equal(of_all, np.broadcast_to(of_all[0], of_all.shape))


def test_the_mean_of_devices_that_have_just_met_is_what_they_hold():
    problem = make_problem(4)
    state, _ = run_local(problem, [48], sync_of(4), updates=8)
    mean = averaged(problem, state)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(mean), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_devices_cross_once_a_synchronisation_and_once_a_call():
    """All-reduces of the compiled program times how often they run, against one per update in step."""
    problem, every = make_problem(8, "adam"), 4
    step = dataclasses.replace(problem.step, noise=None)
    loop = make_local_loop(LocalSGD(step, "average"))

    def arguments():
        return problem.first_state(), problem.data, inputs_of([64]), np.int32(MAX_UPDATES)

    synchronous = make_inner_loop(step).lower(*arguments()).compile().as_text()
    assert [one["kind"] for one in collectives(synchronous)] == ["all-reduce"]  # MAX_UPDATES times
    text = loop.lower(*arguments(), sync_of(every)).compile().as_text()
    reductions = collectives(text)
    assert [one["kind"] for one in reductions] == ["all-reduce"] * 2
    # One stands in the branch of a conditional, the other outside every loop.
    computations = text.split("\n\n")
    conditional = next(part for part in computations if " conditional(" in part)
    inside = [part for part in computations if " all-reduce(" in part or " all-reduce-start(" in part]
    branches = [part.split(" ", 1)[0] for part in inside if not part.startswith("ENTRY")]
    assert len(branches) == 1
    assert branches[0] in conditional
    _, metrics = loop(*arguments(), sync_of(every))
    assert np.asarray(metrics["synced"]).sum() == MAX_UPDATES / every
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), problem.first_state())
    assert LocalSGD(step, "average").sync_bytes(state) in [one["bytes"] for one in reductions]


def test_a_device_passes_over_an_update_that_is_not_finite():
    """The others go on, and all learn of it when the call ends, however far the next synchronisation is."""
    problem = make_problem(4)
    rows = np.array(replicas.all_replicas(problem.data)["rows"])
    example = rows_of(problem.sharding, 2, one_update(inputs_of([48]), 3))[0]
    rows[2, problem.sharding.originals_of(2, seed=0).tolist().index(example), 0] = np.nan
    problem = dataclasses.replace(problem, data=replicas.spread({"rows": rows}, jax.local_devices()[:4]))
    for every in (3, 100):
        state, metrics = run_local(problem, [48], sync_of(every), updates=6)
        assert np.asarray(metrics["nonfinite"])[:7].tolist() == [0, 0, 0, 1, 0, 0, 0]
        assert np.asarray(state.step).tolist() == [6] * 4
        assert np.isfinite(params_of(state)["w"]).all()
        assert np.abs(params_of(state)["w"]).max() > 0
    state, metrics = run_local(problem, [48], sync_of(3), updates=4)
    assert np.asarray(state.nonfinite).tolist() == [1] * 4
