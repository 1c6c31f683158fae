"""Batches that change and local steps, against replays in NumPy of the same examples."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from jax import flatten_util, lax
from problems import Problem

from largebatch.config.fields import BatchConfig, OptimizerConfig, ScheduleConfig
from largebatch.hardware.compiled import COLLECTIVE, parse
from largebatch.hosts import replicas
from largebatch.hosts.replicas import AXIS, pmap
from largebatch.optim import schedules
from largebatch.optim.batch_schedule import BatchSchedule
from largebatch.optim.optimizers import Hyperparams
from largebatch.optim.schedules import StepInputs
from largebatch.runs.progress import replicas_from_mean
from largebatch.training.local_sgd import LocalSGD, Sync, make_local_loop
from largebatch.training.loss import BatchSums

DIMENSIONS, EXAMPLES, RATE, MOMENTUM, MAX_STEPS = 5, 1280, 0.05, 0.9, 16
RNG = np.random.default_rng(0)
POINTS = RNG.standard_normal((EXAMPLES, DIMENSIONS)).astype(np.float32)
TARGETS = (POINTS @ np.arange(DIMENSIONS) + RNG.standard_normal(EXAMPLES)).astype(np.float32)


def loss_fn(params, model_state, batch):
    """Least squares; counts how often it is called."""
    error = batch.images[:, :-1] @ params["w"] + params["b"] - batch.images[:, -1]
    return jnp.sum(batch.weights * error**2 / 2), BatchSums({"calls": jnp.float32(1)}, {})


@functools.cache  # so that tests share what is compiled
def make_problem(num_devices, name="sgd", momentum=MOMENTUM, loss_fn=loss_fn, **options) -> Problem:
    rows = np.concatenate([POINTS, TARGETS[:, None]], axis=1)
    params, optimizer = {"w": jnp.zeros(DIMENSIONS), "b": jnp.zeros(())}, OptimizerConfig(name, momentum=momentum)
    return problems.problem_of_vectors(rows, loss_fn, params, num_devices, optimizer, **options)


def inputs_of(sizes, first=0) -> StepInputs:
    """The inputs of MAX_STEPS steps from `first` on, of a run whose batches have these sizes again and again."""
    every = problems.inputs_of(np.resize(sizes, first + MAX_STEPS), EXAMPLES, RATE)
    return jax.tree.map(lambda x: x[first:], every)


def on_device(tree: dict, device: int) -> dict:
    return {name: np.asarray(leaf)[device] for name, leaf in tree.items()}


def assert_close(actual, expected, tolerance=2e-5):
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], rtol=tolerance, atol=tolerance)


def assert_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


class Replica:
    """Momentum SGD in NumPy, float64: Goyal et al. 2017, eq. 9."""

    def __init__(self):
        self.params = {"w": np.zeros(DIMENSIONS), "b": np.zeros(())}
        self.velocity = {"w": np.zeros(DIMENSIONS), "b": np.zeros(())}

    def step(self, rows, rate=RATE):
        error = POINTS[rows] @ self.params["w"] + self.params["b"] - TARGETS[rows]
        gradient = {"w": POINTS[rows].T.astype(np.float64) @ error / len(rows), "b": error.mean()}
        for name, value in gradient.items():
            self.velocity[name] = MOMENTUM * self.velocity[name] + value
            self.params[name] = self.params[name] - rate * self.velocity[name]


# ---- batches that change ----------------------------------------------------------------------------------


def test_a_trace_is_the_replay_of_its_examples_with_one_compilation():
    """At rates that follow the batch. Sums of float32 gradients against float64: 2e-5."""
    sizes = [32, 64, 96, 7, 1024, 50, 1280, 1]
    options = ScheduleConfig(scaling="linear", reference_batch_size=64)
    batch_sizes = BatchSchedule.from_config(BatchConfig(trace=tuple(sizes * 2)), EXAMPLES, 8)
    schedule, traced = schedules.create_schedule(options, 0.005, MAX_STEPS, batch_sizes, EXAMPLES), []

    def counted(*arguments):
        traced.append(1)
        return loss_fn(*arguments)

    problem, replica = make_problem(8, loss_fn=counted), Replica()
    inputs, state, traced_at_first, seen = inputs_of(sizes), None, 0, []
    inputs = inputs.replace(learning_rate=schedule.learning_rates(np.arange(MAX_STEPS)).astype(np.float32))
    for number, size in enumerate(sizes):
        from_here = jax.tree.map(lambda x, number=number: np.roll(x, -number), inputs)
        state, metrics = problem.run(from_here, 1, state)
        traced_at_first = traced_at_first or len(traced)
        assert len(traced) == traced_at_first
        rows = problem.all_examples(inputs, number)
        assert len(rows) == size
        micro_batches = sum(-(-len(problem.examples(device, inputs, number)) // 16) for device in range(8))
        assert float(metrics["calls"][0]) * size == pytest.approx(micro_batches)  # each device takes what it has
        seen += rows.tolist()
        replica.step(rows, schedule.learning_rate_at(number))
        for device in (0, 7):
            assert_close(on_device(state.params, device), replica.params)
    # 2,554 visits, of which batch 1,280 crosses the end of the first epoch: all twice, but for 6 that come next.
    assert len(set(seen[:1273])) == 1273
    assert sorted(np.bincount(seen, minlength=EXAMPLES)) == [1] * 6 + [2] * (EXAMPLES - 6)


# ---- local steps --------------------------------------------------------------------------------------------


@functools.cache
def programs_of(step, policy):
    """The loop of local steps, and the average of replicas."""
    local = LocalSGD(step, policy)
    return make_local_loop(local), pmap(local.average)


def run_local(problem, sizes, sync: Sync, policy="average", num_steps=MAX_STEPS, state=None, first=0):
    loop, _ = programs_of(problem.step, policy)
    return loop(state or problem.first_state(), problem.data, inputs_of(sizes, first), np.int32(num_steps), sync)


def averaged(problem, state):
    _, average = programs_of(problem.step, "average")
    return average(state)


def sync_of(every, rate=1.0, momentum=0.0) -> Sync:
    return Sync(np.int32(every), np.int32(0), np.float32(rate), np.float32(momentum))


@pytest.mark.parametrize(
    ("name", "sizes"), [("sgd", [50, 37, 7, 200]), pytest.param("adam", [1], marks=pytest.mark.full)]
)
def test_averaging_after_every_step_is_synchronous_training(name, sizes):
    """Also where devices have unequal shares, or none: those take the moments and counters of the others."""
    problem = make_problem(8, name)
    local, metrics = run_local(problem, sizes, sync_of(1))
    together, expected = problem.run(inputs_of(sizes), MAX_STEPS)
    assert_close(local.params, together.params)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-4)
    moments = (jax.tree.leaves(state.opt_state.inner_state) for state in (local, together))
    for a, b in zip(*moments, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(local.num_averaged, np.full(8, MAX_STEPS))


def test_local_sgd_and_its_outer_step_against_numpy():
    problem, every, sizes, rate, momentum = make_problem(4), 3, [48, 13, 6], 0.7, 0.9
    state, metrics = run_local(problem, sizes, sync_of(every, rate, momentum), num_steps=8)
    in_numpy, anchor = [Replica() for _ in range(4)], Replica().params
    outer = {name: np.zeros_like(value) for name, value in anchor.items()}
    inputs, weights, drifts = inputs_of(sizes), np.zeros(4), []

    def mean(of_replicas):
        return np.average(of_replicas, axis=0, weights=weights)

    for step in range(8):
        for device, replica in enumerate(in_numpy):
            rows = problem.examples(device, inputs, step)
            if len(rows):
                replica.step(rows)
            weights[device] += len(rows)
        if (step + 1) % every == 0:
            moved = [{name: replica.params[name] - anchor[name] for name in anchor} for replica in in_numpy]
            means = {name: mean([of_one[name] for of_one in moved]) for name in anchor}
            spread = mean([sum(np.square(one[name] - means[name]).sum() for name in anchor) for one in moved])
            velocity = {name: mean([replica.velocity[name] for replica in in_numpy]) for name in anchor}
            for name in anchor:
                outer[name] = momentum * outer[name] + means[name]
                anchor[name] = anchor[name] + rate * (means[name] + momentum * outer[name])
            drifts.append(np.sqrt(spread) / np.linalg.norm(np.append(anchor["w"], anchor["b"])))
            for replica in in_numpy:
                replica.params, replica.velocity = dict(anchor), dict(velocity)
            weights[:] = 0
    for device, replica in enumerate(in_numpy):  # two steps after the last synchronisation, so that they differ
        assert_close(on_device(state.params, device), replica.params, 1e-4)
    assert np.flatnonzero(np.asarray(metrics["synced"])).tolist() == [2, 5]
    np.testing.assert_allclose(np.asarray(metrics["drift"])[[2, 5]], drifts, rtol=1e-3)
    average = replicas.all_replicas(averaged(problem, state))
    assert_close(on_device(average.params, 0), {n: mean([r.params[n] for r in in_numpy]) for n in anchor}, 1e-4)
    velocity = mean([replica.velocity["w"] for replica in in_numpy])
    np.testing.assert_allclose(momentum_buffers(average), np.tile(velocity, (4, 1)), rtol=1e-4)


def momentum_buffers(state):
    inner = jax.tree.leaves(state.opt_state.inner_state)
    return next(np.asarray(leaf) for leaf in inner if leaf.shape[1:] == (DIMENSIONS,))


def test_what_becomes_of_the_optimizer_s_state_when_devices_meet():
    """Its hyper-parameters stay as they are."""
    problem, after = make_problem(4, momentum=0.7), {}
    before = momentum_buffers(run_local(problem, [64], sync_of(9), "keep", num_steps=3)[0])
    for policy in ("average", "keep", "reset"):
        state, _ = run_local(problem, [64], sync_of(3), policy, num_steps=3)
        after[policy] = momentum_buffers(state)
        for name, value in vars(Hyperparams(momentum=0.7)).items():
            assert (np.asarray(state.opt_state.hyperparams[name]) == np.float32(value)).all(), name
    assert np.abs(before - before[0]).max() > 1e-3
    np.testing.assert_array_equal(after["keep"], before)
    np.testing.assert_allclose(after["average"], np.broadcast_to(before.mean(0), before.shape), rtol=1e-5)
    np.testing.assert_array_equal(after["reset"], np.zeros_like(before))


def add_around_the_ring(tree):
    """A sum over 4 devices that begins at another of them for every element, as that of several hosts does."""
    vector, unravel = flatten_util.ravel_pytree(tree)
    parts, element = lax.all_gather(vector, AXIS), jnp.arange(len(vector))
    return unravel(sum(parts[(element + turn) % 4, element] for turn in range(4)))


@pytest.mark.full
def test_results_do_not_depend_on_how_the_loop_is_cut():
    """Mid-window, and through a copy of all replicas on the host, as a checkpoint has them."""
    problem, sizes, sync = make_problem(4, reduce=add_around_the_ring), [48, 13, 6], sync_of(4, 0.7, 0.9)
    whole, metrics = run_local(problem, sizes, sync, num_steps=11)
    state, in_parts = problem.first_state(), {"loss": [], "grad_norm": []}
    for first, count in ((0, 3), (3, 7), (10, 1)):
        state, metrics_of_part = run_local(problem, sizes, sync, num_steps=count, state=state, first=first)
        for name, values in in_parts.items():
            values += np.asarray(metrics_of_part[name])[:count].tolist()
        state = replicas.spread(replicas.all_replicas(state), replicas.local_devices_of(state))
    assert in_parts == {name: np.asarray(metrics[name])[:11].tolist() for name in in_parts}
    assert_equal(whole, state)


def test_on_another_number_of_devices_all_start_from_the_mean():
    before, after = make_problem(4), make_problem(2)
    state, _ = run_local(before, [48, 13], sync_of(4, 0.7, 0.9), num_steps=6)  # two after a synchronisation
    mean, state = replicas.first_replica(averaged(before, state)), replicas.all_replicas(state)
    moved = replicas_from_mean(mean, replicas.all_replicas(after.first_state()))
    expected = {name: np.average(leaf, axis=0, weights=state.local.examples) for name, leaf in state.params.items()}
    for device in range(2):
        assert_close(on_device(moved.params, device), expected)
        assert_close(on_device(moved.local.anchor, device), expected)
    assert (moved.local.examples == 0).all()
    assert (moved.step == 6).all()

    placed = replicas.spread(moved, jax.local_devices()[:2])
    state, metrics = run_local(after, [48, 13], sync_of(4, 0.7, 0.9), num_steps=2, state=placed, first=6)
    assert np.isfinite(np.asarray(metrics["loss"])[:2]).all()
    one, other = replicas.all_replicas(state).params["w"]  # step 8 was a synchronisation
    np.testing.assert_array_equal(one, other)


def test_the_mean_of_devices_that_have_just_met_is_what_they_hold():
    problem = make_problem(4)
    state, _ = run_local(problem, [48], sync_of(4), num_steps=8)
    assert_equal(state, averaged(problem, state))


def test_devices_cross_once_a_synchronisation_and_once_a_call():
    problem, every = make_problem(8, "adam"), 4
    local = LocalSGD(problem.step, "average")
    arguments = problem.first_state(), problem.data, inputs_of([64]), np.int32(MAX_STEPS), sync_of(every)
    text = make_local_loop(local).lower(*arguments).compile().as_text()
    reductions = [one for one in parse(text).instructions() if COLLECTIVE.fullmatch(one.opcode)]
    assert [one.opcode.removesuffix("-start") for one in reductions] == ["all-reduce"] * 2
    # One stands in the branch of a conditional, the other outside every loop.
    computations = text.split("\n\n")
    conditional = next(part for part in computations if " conditional(" in part)
    inside = [part for part in computations if " all-reduce(" in part or " all-reduce-start(" in part]
    (branch,) = [part.split(" ", 1)[0] for part in inside if not part.startswith("ENTRY")]
    assert branch in conditional
    _, metrics = run_local(problem, [64], sync_of(every))
    assert np.asarray(metrics["synced"]).sum() == MAX_STEPS / every
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), problem.first_state())
    assert local.sync_bytes(state) in [one.output_bytes for one in reductions]


def test_a_device_passes_over_a_step_that_is_not_finite():
    """The others go on, and all learn of it when the call ends, however far the next synchronisation is."""
    problem = make_problem(4)
    rows = np.array(replicas.all_replicas(problem.data)["vectors"])
    example = problem.examples(2, inputs_of([48]), 3)[0]
    rows[2, problem.sharding.originals_of(2, seed=0).tolist().index(example), 0] = np.nan
    problem = dataclasses.replace(problem, data=replicas.spread({"vectors": rows}, jax.local_devices()[:4]))
    for every in (3, 100):
        state, metrics = run_local(problem, [48], sync_of(every), num_steps=6)
        assert np.asarray(metrics["nonfinite"])[:7].tolist() == [0, 0, 0, 1, 0, 0, 0]
        assert np.asarray(state.step).tolist() == [6] * 4
        assert np.isfinite(state.params["w"]).all()
        assert np.abs(state.params["w"]).max() > 0
    state, metrics = run_local(problem, [48], sync_of(3), num_steps=4)
    assert np.asarray(state.nonfinite).tolist() == [1] * 4
