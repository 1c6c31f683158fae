"""The noise scale where it is known, AdaScale's gain, and what both do to a run."""

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import ROOT, run_script

from largebatch.config.fields import OptimizerConfig
from largebatch.data import batching
from largebatch.data.batching import DataSharding, Grouping
from largebatch.hosts import collectives, replicas
from largebatch.hosts.start import start_jax
from largebatch.optim import noise_scale
from largebatch.optim.noise_scale import Noise, NoisePlan
from largebatch.optim.optimizers import create_optimizer
from largebatch.optim.schedules import UpdateInputs, epoch_and_offset
from largebatch.training.loss import BatchSums
from largebatch.training.state import create_train_state
from largebatch.training.step import MicroBatchReader, TrainStep, make_inner_loop

DIMENSIONS, EXAMPLES, UPDATES = 12, 20_000, 512


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


@dataclasses.dataclass(frozen=True)
class Trainer:
    """An inner loop with the data that it runs on, on all hosts."""

    loop: Callable
    data: Any
    sharding: DataSharding
    optimizer: optax.GradientTransformation

    def first_state(self, seed=0):
        """Before the first update; a new one for every call, since the loop takes its memory."""
        state = create_train_state({"w": jnp.zeros(DIMENSIONS)}, self.optimizer, seed)
        return replicas.replicate(state, replicas.local_devices_of(self.data))

    def inputs(self, sizes, rates) -> UpdateInputs:
        """Of updates with these batch sizes; `rates` is a rate for all, or what UpdateInputs has."""
        starts = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
        epoch, offset = epoch_and_offset(starts, self.sharding.num_examples)
        rates = np.full(len(sizes), rates, np.float32) if np.ndim(rates) == 0 else np.float32(rates)
        return UpdateInputs(epoch, offset, np.int32(sizes), rates, b2=np.full(len(sizes), 0.999, np.float32))

    def run(self, inputs: UpdateInputs, num_updates, state=None):
        return self.loop(state or self.first_state(), self.data, inputs, np.int32(num_updates))


def plan_of(decay, every=1, sizes=(16,), least_groups=1) -> NoisePlan:
    return NoisePlan(decay, every, sizes, least_groups)


def make_trainer(num_devices, micro_batch_size=16, views=1, points=None, **options) -> Trainer:
    """A trainer whose TrainStep has these `options`; views of an example are the example."""
    points = linear_problem()[0] if points is None else points
    sharding = DataSharding(len(points), 64, num_devices, views)
    shards = []
    for index, device in zip(replicas.local_indices(), jax.local_devices(), strict=True):
        if index < num_devices:
            rows = points[sharding.originals_of(index, seed=0)]
            rows = np.pad(rows, ((0, sharding.max_originals - len(rows)), (0, 0)))
            shards.append(jax.device_put({"points": rows[None]}, device))
    optimizer = create_optimizer(OptimizerConfig(name="sgd", momentum=0.0))

    def read(data, examples, visit_keys):
        return data["points"][examples // views], jnp.zeros(examples.shape, jnp.int32)

    reader = MicroBatchReader(read, sharding, Grouping(micro_batch_size, micro_batch_size))
    loop = make_inner_loop(TrainStep(loss_fn, optimizer, reader, **options))
    return Trainer(loop, replicas.stack(shards), sharding, optimizer)


def measured(num_devices, sizes, seed=0, **options) -> Noise:
    """The noise after updates of these sizes."""
    return measured_over_seeds(num_devices, sizes, [seed], **options)[0]


def measured_over_seeds(num_devices, sizes, seeds, micro_batch_size=16, **options) -> list[Noise]:
    """The noise after updates of these sizes, which draw other examples with each seed."""
    plan = plan_of(0.9999, sizes=(micro_batch_size,))
    trainer = make_trainer(num_devices, micro_batch_size, noise=plan, **options)
    inputs = trainer.inputs(sizes, rates=0.0)
    states = (trainer.run(inputs, len(sizes), trainer.first_state(seed))[0] for seed in seeds)
    return [replicas.first_replica(state.noise) for state in states]


# ---- the noise scale ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.full), 8])
def test_noise_scale_is_the_analytic_value(num_devices):
    """Within 10 %; batches that devices share unevenly, and that change."""
    _, expected = linear_problem()
    sizes = np.resize([64, 200, 37, 300], UPDATES)
    noise = measured(num_devices, sizes)
    assert noise.count == UPDATES
    assert noise_scale.noise_scale(noise) == pytest.approx(expected, rel=0.1)


@pytest.mark.full
@pytest.mark.parametrize("num_devices", [1, 2, 8])
@pytest.mark.parametrize(("part", "views"), [(0.2, 1), (0.9, 1), (0.9, 8), (0.5, 8)])
def test_noise_scale_near_the_size_of_the_set(num_devices, part, views):
    """Within 10 % where it is a large part of the originals: batches are drawn without replacement."""
    count = 2003  # which 2 and 8 devices share unevenly
    points, expected = linear_problem(count, part * count)
    assert expected == pytest.approx(part * count, rel=1e-3)
    for sizes in ([count * views] * 32, np.resize([300, 1000, 457, count - 1, 1001, 1500], 2000)):
        # One run deviates by 5 % and one in twenty by 10 %, so three are taken together.
        noises = measured_over_seeds(num_devices, sizes, range(3), points=points, micro_batch_size=20, views=views)
        scale = np.mean([noise_scale.noise_scale(noise) for noise in noises])
        assert scale == pytest.approx(expected, rel=0.1), sizes[0]


@pytest.mark.full
def test_noise_scale_on_a_pod():
    """4 hosts x 8 devices."""
    command = [sys.executable, ROOT / "tests" / "optim" / "test_noise_scale.py"]
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    result = run_script("-m", "largebatch.pod", "--hosts", 4, "--devices", 8, "--", *command, env=paths)
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if "noise_scale" in line)
    result = json.loads(line[line.index("{") :])
    _, expected = linear_problem()
    assert result["devices"] == 32
    assert result["noise_scale"] == pytest.approx(expected, rel=0.1)


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


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.full), 8])
def test_views_of_an_image_in_one_batch_are_no_less_noise(num_devices):
    """The full batch: a device's share holds all views of its images, whose gradients are alike."""
    _, expected = linear_problem()
    noise = measured(num_devices, [EXAMPLES * 8], micro_batch_size=100, views=8)
    assert noise_scale.noise_scale(noise) == pytest.approx(expected, rel=0.1)


@pytest.mark.full
def test_one_group_measures_nothing():
    assert noise_scale.noise_scale(measured(1, [16, 8, 16])) is None
    assert measured(2, [1, 1, 1]).count == 0
    assert measured(1, [16, 32, 16]).count == 1


def test_the_noise_scale_has_no_end_where_the_signal_is_lost():
    assert noise_scale.noise_scale(Noise(np.float32(2), np.float32(-1), np.int32(5))) == np.inf
    assert noise_scale.noise_scale(Noise(np.float32(-2), np.float32(1), np.int32(5))) == 0.0


def test_measuring_adds_no_collective_and_changes_no_update():
    plain, measuring = make_trainer(8), make_trainer(8, noise=plan_of(0.9))
    inputs = plain.inputs([64, 50], 0.1)

    def count_all_reduces(trainer):
        compiled = trainer.loop.lower(trainer.first_state(), trainer.data, inputs, np.int32(2)).compile()
        return compiled.as_text().count(" all-reduce(") + compiled.as_text().count(" all-reduce-start(")

    assert [count_all_reduces(trainer) for trainer in (plain, measuring)] == [1, 1]
    states = [trainer.run(inputs, 2)[0] for trainer in (plain, measuring)]
    one, other = (np.asarray(state.params["w"]) for state in states)
    np.testing.assert_array_equal(one, other)
    assert [int(replicas.first_replica(state.noise.count)) for state in states] == [0, 2]


def noise_by_numpy(trainer, points, update: UpdateInputs, micro_batch_sizes) -> tuple[float, float]:
    """tr S and |g|^2 from the groups of one update; `micro_batch_sizes` has that of each device."""
    sharding, groups = trainer.sharding, []
    for device, size in enumerate(micro_batch_sizes):
        batch = batching.device_batch(sharding, device, *(int(x[0]) for x in (update.epoch, update.offset)), BATCH)
        whole = Grouping(int(batch.count), int(batch.count))
        rows = np.asarray(batching.micro_batch(sharding, batch, 0, whole, 0).examples)
        examples = points[sharding.originals_of(device, seed=0)][rows]
        groups += np.array_split(examples.astype(np.float64), -(-len(rows) // size))
    mean = sum(group.sum(0) for group in groups) / BATCH
    passes, correction = noise_scale.sampling(int(update.offset[0]), BATCH, sharding.num_originals)
    terms = sum(np.square(group.sum(0)).sum() / len(group) for group in groups)
    variance = (terms - BATCH * np.square(mean).sum()) / (len(groups) - passes - correction)
    return variance, np.square(mean).sum() - correction * variance / BATCH


BATCH = 333  # 333, 167 and 166, or 42 and 41 of a device


@pytest.mark.parametrize(
    ("num_devices", "taken"), [(1, [40]), pytest.param(2, [5, 5], marks=pytest.mark.full), (8, [5] * 8)]
)
def test_estimates_are_those_of_numpy_for_the_groups(num_devices, taken):
    """A device takes the largest size that gives it 8 groups."""
    points, _ = linear_problem()
    trainer = make_trainer(num_devices, 100, noise=plan_of(0.9, 3, (40, 5, 1), 8))
    inputs = trainer.inputs([BATCH] * 4, 0.0)
    state, _ = trainer.run(inputs, 1)
    noise = replicas.first_replica(state.noise)
    expected = noise_by_numpy(trainer, points, inputs, taken)
    np.testing.assert_allclose((noise.variance, noise.signal), expected, rtol=1e-4)


def test_devices_choose_by_what_they_have():
    """The largest size with 8 groups, or the smallest there is."""
    plan = plan_of(0.9, 1, (8, 2, 1), 8)
    counts = jnp.array([9, 8, 17, 15, 64, 57, 56, 0])
    groups = [Grouping(size, size).num_micro_batches(counts) for size in plan.sizes]
    assert plan.choice(groups).tolist() == [2, 2, 1, 1, 0, 0, 1, 2]


def test_the_noise_is_measured_when_it_is_due_and_a_resumed_run_is_the_same():
    """At updates 0, 10, 20 and 30 of 35, however calls are cut; parameters are those without a measurement."""
    plan = plan_of(0.9, 10, (4,), 8)
    plain, measuring = make_trainer(2, 64), make_trainer(2, 64, noise=plan)
    inputs = plain.inputs(np.resize([256, 96, 100], 35), 0.1)
    expected, whole = plain.run(inputs, 35)[0], measuring.run(inputs, 35)[0]
    np.testing.assert_allclose(np.asarray(whole.params["w"]), np.asarray(expected.params["w"]), rtol=1e-5)
    assert int(replicas.first_replica(whole.noise.count)) == 4
    state, counts, done = None, [], 0
    for updates in (1, 9, 1, 2, 12, 10):
        state, _ = measuring.run(jax.tree.map(lambda x: np.roll(x, -done), inputs), updates, state)  # noqa: B023
        done += updates
        counts.append(int(replicas.first_replica(state.noise.count)))
    assert counts == [1, 1, 2, 2, 3, 4]
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_where_every_update_measures_in_one_size_there_is_no_condition():
    def conditions(**options):
        trainer = make_trainer(2, **options)
        arguments = trainer.first_state(), trainer.data, trainer.inputs([64], 0.1), np.int32(1)
        return str(jax.make_jaxpr(trainer.loop)(*arguments)).count(" cond[")

    assert conditions(noise=plan_of(0.9)) == conditions() == 0
    assert conditions(noise=plan_of(0.9, 2)) == conditions(noise=plan_of(0.9, 1, (16, 2))) == 1


# ---- AdaScale -------------------------------------------------------------------------------------------


def noise_of(variance, signal):
    return Noise(jnp.float32(variance), jnp.float32(signal), jnp.int32(1))


@pytest.mark.parametrize(
    ("variance", "signal", "batch_size", "expected"),
    [
        (7.0, 3.0, 128, 1.0),  # scale 1
        (128.0, 1.0, 256, 2 / 1.5),  # (1 + 1) / (1 / 2 + 1)
        (128.0, 1.0, 128 * 10**6, 2.0),  # all that averaging can take away is gone
        (128.0, 0.0, 1024, 8.0),  # only noise: linear scaling
        (128.0, -3.0, 1024, 8.0),
        (0.0, 1.0, 1024, 1.0),  # no noise: nothing gained
        (-5.0, 1.0, 1024, 1.0),
        (0.0, 0.0, 1024, 1.0),
        (128.0, 1.0, 64, 2 / 3),  # a smaller batch is worth less
    ],
)
def test_gain(variance, signal, batch_size, expected):
    gain = noise_scale.gain(noise_of(variance, signal), batch_size, 128)
    assert float(gain) == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_adascale_at_scale_one_is_plain_sgd():
    """Bitwise: every gain is 1, every update a step of the schedule."""
    rates = np.float32([0.1, 0.2, 0.3, 0.4])
    plain, scaled = make_trainer(8), make_trainer(8, adascale_reference=64, noise=plan_of(0.98))
    sizes = [64] * 8
    one, _ = plain.run(plain.inputs(sizes, np.pad(rates, (0, 4))), 4)
    other, metrics = scaled.run(scaled.inputs(sizes, np.pad(rates, (0, 4), constant_values=-1)), 8)
    np.testing.assert_array_equal(np.asarray(one.params["w"]), np.asarray(other.params["w"]))
    state = replicas.first_replica(other)
    assert int(state.step) == 4  # and the run has come to its end
    assert float(state.scale_invariant_steps) == 4.0
    assert np.asarray(metrics["gain"]).tolist() == [1] * 4 + [0] * 4


def test_adascale_stretches_the_schedule_by_its_gain():
    """A replay in NumPy: rate of the floor of the steps done, times the gain; however the loop is cut."""
    schedule = np.float32(0.5 * (1 - np.arange(40) / 40))
    trainer = make_trainer(4, adascale_reference=32, noise=plan_of(0.9))
    table = np.pad(schedule, (0, 24), constant_values=-1)
    sizes = np.resize([256, 96, 512], 64)
    inputs = trainer.inputs(sizes, table)
    whole, metrics = trainer.run(inputs, 64)
    updates = int(replicas.first_replica(whole.step))
    assert 8 < updates < 40
    gains, rates = (np.asarray(metrics[name])[:updates] for name in ("gain", "rate"))
    steps_done = np.concatenate([[0], np.cumsum(gains, dtype=np.float32)])
    np.testing.assert_allclose(rates, schedule[np.floor(steps_done[:-1]).astype(int)] * gains, rtol=1e-6)
    assert steps_done[-2] < 40 <= steps_done[-1]
    assert (gains >= 1).all()
    assert (gains <= sizes[:updates] / 32 + 1e-5).all()
    state, _ = trainer.run(inputs, 3)
    from_the_fourth = jax.tree.map(lambda x: np.roll(x, -3), inputs).replace(learning_rate=table)
    state, _ = trainer.run(from_the_fourth, updates - 3, state)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


if __name__ == "__main__":
    start_jax()
    noise = measured(jax.device_count(), np.resize([64, 200, 37, 300], UPDATES))
    if collectives.is_primary():
        print(json.dumps({"noise_scale": noise_scale.noise_scale(noise), "devices": jax.device_count()}))
