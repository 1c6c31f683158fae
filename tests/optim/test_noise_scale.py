"""The noise scale where it is known, AdaScale's gain, and what both do to a run."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from conftest import ROOT, run_script
from problems import Problem

from largebatch.data.batching import Grouping
from largebatch.hosts import collectives, replicas
from largebatch.hosts.start import start_jax
from largebatch.optim import noise_scale
from largebatch.optim.noise_scale import Noise, NoisePlan
from largebatch.training.loss import BatchSums

DIMENSIONS, EXAMPLES, STEPS, BATCH = 12, 20_000, 512, 333


def linear_problem(count=EXAMPLES, noise_scale_of_set=None):
    """Examples whose gradient is themselves, with the true noise scale tr S / |g|^2, which may be chosen."""
    rng = np.random.default_rng(0)
    deviations = np.linspace(0.2, 2.0, DIMENSIONS)
    points = 0.4 + deviations * rng.standard_normal((count, DIMENSIONS))
    if noise_scale_of_set:
        points -= points.mean(0)
        points += np.sqrt(points.var(0).sum() / noise_scale_of_set / DIMENSIONS)
    points = points.astype(np.float32)
    return points, float(points.var(0).sum() / np.square(points.mean(0, dtype=np.float64)).sum())


def loss_fn(params, model_state, batch):
    return jnp.sum(batch.weights * (batch.images @ params["w"])), BatchSums({}, {})


def plan_of(decay, every=1, sizes=(16,), least_groups=1) -> NoisePlan:
    return NoisePlan(decay, every, sizes, least_groups)


def make_problem(num_devices, *, points=None, **options) -> Problem:
    points = linear_problem()[0] if points is None else points
    return problems.problem_of_vectors(points, loss_fn, {"w": jnp.zeros(DIMENSIONS)}, num_devices, **options)


def inputs_of(sizes, rates):
    return problems.inputs_of(sizes, EXAMPLES, rates, length=64)


def noise_of(state) -> Noise:
    return replicas.first_replica(state.noise)


def measured(num_devices, sizes, seeds=(0,), micro_batch_size=16, **options) -> list[Noise]:
    """The noise after up to 2,000 steps of these sizes, which draw other examples with each seed."""
    plan = plan_of(0.9999, sizes=(micro_batch_size,))
    problem = make_problem(num_devices, micro_batch_size=micro_batch_size, noise=plan, **options)
    states = (problem.run_sizes(sizes, 0.0, state=problem.first_state(seed), length=2000)[0] for seed in seeds)
    return [noise_of(state) for state in states]


def assert_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# ---- the noise scale ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.full), 8])
def test_noise_scale_is_the_analytic_value(num_devices):
    """Within 10 %; batches that devices share unevenly, and that change."""
    _, expected = linear_problem()
    (noise,) = measured(num_devices, np.resize([64, 200, 37, 300], STEPS))
    assert noise.count == STEPS
    assert noise_scale.noise_scale(noise) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("part", "views"), [pytest.param(0.9, 1, marks=pytest.mark.full), (0.5, 8)])
def test_noise_scale_near_the_size_of_the_set(part, views):
    """Within 10 % where it is a large part of the images: batches are drawn without replacement.

    The full batch has all views of an image, whose gradients are alike; they are no less noise.
    """
    count = 2003  # which 8 devices share unevenly
    points, expected = linear_problem(count, part * count)
    assert expected == pytest.approx(part * count, rel=1e-3)
    for sizes in ([count * views] * 32, np.resize([300, 1000, 457, count - 1, 1001, 1500], 2000)):
        # One run deviates by 5 % and one in twenty by 10 %, so three are taken together.
        noises = measured(8, sizes, range(3), points=points, micro_batch_size=20, views=views)
        scale = np.mean([noise_scale.noise_scale(noise) for noise in noises])
        assert scale == pytest.approx(expected, rel=0.1), sizes[0]


@pytest.mark.full
def test_noise_scale_on_a_pod():
    """2 hosts x 4 devices."""
    command = [sys.executable, ROOT / "tests" / "optim" / "test_noise_scale.py"]
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'training'}"}
    result = run_script("-m", "largebatch.pod", "--hosts", 2, "--devices", 4, "--", *command, env=paths)
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if "noise_scale" in line)
    found = json.loads(line[line.index("{") :])
    assert found["devices"] == 8
    assert found["noise_scale"] == pytest.approx(linear_problem()[1], rel=0.1)


def test_estimates_are_unbiased_for_uneven_groups():
    """Over many draws the means are tr S and |g|^2, whatever the groups' sizes."""
    rng = np.random.default_rng(1)
    groups, mean, deviation = [1, 5, 2, 0, 8], np.array([0.5, -1.0]), np.array([1.0, 3.0])
    group_term, measure = jax.jit(noise_scale.group_term), jax.jit(noise_scale.measure)
    estimates = []
    for _ in range(4000):
        sums = [(mean + deviation * rng.standard_normal((n, 2))).sum(0) for n in groups]
        terms = sum(float(group_term({"w": s}, n)) for s, n in zip(sums, groups, strict=True))
        batch = sum(groups)
        norm = np.linalg.norm(sum(sums) / batch)
        estimates.append(measure(terms, 4, norm, batch)[:2])
    np.testing.assert_allclose(np.mean(estimates, 0), [10.0, 1.25], rtol=0.06)


def test_where_there_is_no_estimate():
    """One group measures no noise; where the signal is lost in the noise its scale is infinite."""
    assert noise_scale.noise_scale(measured(1, [16, 8, 16])[0]) is None
    assert measured(1, [16, 32, 16])[0].count == 1
    assert noise_scale.noise_scale(Noise(np.float32(2), np.float32(-1), np.int32(5))) == np.inf
    assert noise_scale.noise_scale(Noise(np.float32(-2), np.float32(1), np.int32(5))) == 0.0


def test_measuring_adds_no_collective_and_changes_no_step():
    problems = make_problem(8), make_problem(8, noise=plan_of(0.9))
    assert problems[1].collectives() == [("all-reduce", 1)]
    states = [problem.run_sizes([64, 50], 0.1)[0] for problem in problems]
    assert_equal(*(state.params for state in states))
    assert [int(noise_of(state).count) for state in states] == [0, 2]


def test_estimates_are_those_of_numpy_for_the_groups():
    """A device has 42 or 41 examples, and takes the largest size that gives it 8 groups."""
    points, _ = linear_problem()
    problem = make_problem(8, micro_batch_size=100, noise=plan_of(0.9, 1, (40, 5), 8))
    inputs, groups = inputs_of([BATCH], 0.0), []
    noise = noise_of(problem.run(inputs, 1)[0])
    for device in range(8):
        examples = points[problem.examples(device, inputs, 0)].astype(np.float64)
        groups += np.array_split(examples, -(-len(examples) // 5))
    mean = sum(group.sum(0) for group in groups) / BATCH
    passes, correction = noise_scale.sampling(int(inputs.offset[0]), BATCH, problem.sharding.num_originals)
    terms = sum(np.square(group.sum(0)).sum() / len(group) for group in groups)
    variance = (terms - BATCH * np.square(mean).sum()) / (len(groups) - passes - correction)
    signal = np.square(mean).sum() - correction * variance / BATCH
    np.testing.assert_allclose((noise.variance, noise.signal), (variance, signal), rtol=1e-4)


def test_the_noise_is_measured_when_it_is_due_and_a_resumed_run_is_the_same():
    """At steps 0, 10, 20 and 30 of 35, however calls are cut."""
    measuring = make_problem(2, micro_batch_size=64, noise=plan_of(0.9, 10, (4,), 8))
    inputs = inputs_of(np.resize([256, 96, 100], 35), 0.1)
    whole, _ = measuring.run(inputs, 35)
    state, counts, done = None, [], 0
    for steps in (1, 9, 1, 2, 12, 10):
        state, _ = measuring.run(jax.tree.map(lambda x: np.roll(x, -done), inputs), steps, state)  # noqa: B023
        done += steps
        counts.append(int(noise_of(state).count))
    assert counts == [1, 1, 2, 2, 3, 4]
    assert_equal(whole, state)


def test_where_every_step_measures_in_one_size_there_is_no_condition():
    """On a GPU each would wait for the host."""

    def conditions(**options):
        problem = make_problem(2, **options)
        arguments = problem.first_state(), problem.data, inputs_of([64], 0.1), np.int32(1)
        return str(jax.make_jaxpr(problem.loop)(*arguments)).count(" cond[")

    assert conditions(noise=plan_of(0.9)) == conditions() == 0
    assert conditions(noise=plan_of(0.9, 2)) == conditions(noise=plan_of(0.9, 1, (16, 2))) == 1


# ---- AdaScale -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variance", "signal", "batch_size", "expected"),
    [
        (7.0, 3.0, 128, 1.0),  # scale 1
        (128.0, 1.0, 256, 2 / 1.5),  # (1 + 1) / (1 / 2 + 1)
        (128.0, 1.0, 128 * 10**6, 2.0),  # all that averaging can take away is gone
        (128.0, -3.0, 1024, 8.0),  # only noise: linear scaling
        (-5.0, 1.0, 1024, 1.0),  # no noise: nothing gained
        (0.0, 0.0, 1024, 1.0),
        (128.0, 1.0, 64, 2 / 3),  # a smaller batch is worth less
    ],
)
def test_gain(variance, signal, batch_size, expected):
    noise = Noise(jnp.float32(variance), jnp.float32(signal), jnp.int32(1))
    assert float(noise_scale.gain(noise, batch_size, 128)) == pytest.approx(expected, rel=1e-5)


def test_adascale_at_scale_one_is_plain_sgd():
    """Bitwise: every gain is 1, every step one of the schedule."""
    rates, sizes = np.float32([0.1, 0.2, 0.3, 0.4]), [64] * 8
    plain, scaled = make_problem(8), make_problem(8, adascale_reference=64, noise=plan_of(0.98))
    one, _ = plain.run_sizes(sizes[:4], rates)
    other, metrics = scaled.run_sizes(sizes, np.pad(rates, (0, 16), constant_values=-1))
    assert_equal(one.params, other.params)
    state = replicas.first_replica(other)
    assert int(state.step) == 4  # and the run has come to its end
    assert float(state.scale_invariant_steps) == 4.0
    assert np.asarray(metrics["gain"]).tolist() == [1] * 4 + [0] * 16


def test_adascale_stretches_the_schedule_by_its_gain():
    """A replay in NumPy: rate of the floor of the steps done, times the gain; however the loop is cut."""
    schedule = np.float32(0.5 * (1 - np.arange(40) / 40))
    problem = make_problem(4, adascale_reference=32, noise=plan_of(0.9))
    table, sizes = np.pad(schedule, (0, 24), constant_values=-1), np.resize([256, 96, 512], 64)
    inputs = inputs_of(sizes, table)
    whole, metrics = problem.run(inputs, 64)
    steps = int(replicas.first_replica(whole.step))
    assert 8 < steps < 40
    gains, rates = (np.asarray(metrics[name])[:steps] for name in ("gain", "rate"))
    steps_done = np.concatenate([[0], np.cumsum(gains, dtype=np.float32)])
    np.testing.assert_allclose(rates, schedule[np.floor(steps_done[:-1]).astype(int)] * gains, rtol=1e-6)
    assert steps_done[-2] < 40 <= steps_done[-1]
    assert (gains >= 1).all()
    assert (gains <= sizes[:steps] / 32 + 1e-5).all()
    state, _ = problem.run(inputs, 3)
    from_the_fourth = jax.tree.map(lambda x: np.roll(x, -3), inputs).replace(learning_rate=table)
    state, _ = problem.run(from_the_fourth, steps - 3, state)
    assert_equal(whole, state)


def test_devices_choose_by_what_they_have():
    plan, counts = plan_of(0.9, 1, (8, 2, 1), 8), jnp.array([9, 8, 17, 15, 64, 57, 56, 0])
    groups = [Grouping(size, size).num_micro_batches(counts) for size in plan.sizes]
    assert plan.choice(groups).tolist() == [2, 2, 1, 1, 0, 0, 1, 2]


if __name__ == "__main__":
    start_jax()
    (noise,) = measured(jax.device_count(), np.resize([64, 200, 37, 300], STEPS))
    if collectives.is_primary():
        print(json.dumps({"noise_scale": noise_scale.noise_scale(noise), "devices": jax.device_count()}))
