"""Programs that know how many micro-batches there are, and batches of the whole set that are read as slices."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import make_small_config, typed

from build import ProgramCache, make_step, prepare
from largebatch.data.batching import DeviceBatch, Grouping
from largebatch.data.cache import DatasetInfo
from largebatch.hardware.chips import Hardware
from largebatch.hardware.compiled import parse
from largebatch.hosts import replicas
from largebatch.hosts.clock import Clock
from largebatch.training.grouping import plan_micro_batches
from largebatch.training.step import MicroBatchReader
from plan import choose_plan, plan_run


@pytest.fixture
def config(session_cache):
    return make_config(session_cache)


def make_config(cache_dir):
    """The first update subtracts the gradient; 640 examples on 8 devices."""
    c = make_small_config(cache_dir)
    c.augment.storage, c.log.noise_every = "expanded", 0
    c.optimizer.name, c.optimizer.momentum, c.optimizer.learning_rate = "sgd", 0.0, 1.0
    return c


@pytest.fixture
def plan_with(monkeypatch):
    """plan_with(function): micro-batches are planned by that function."""
    return lambda function: monkeypatch.setattr("plan.plan_micro_batches", function)


@pytest.fixture
def as_on_an_accelerator(plan_with):
    """Plan micro-batches here as for TPUs, whose updates read slices."""

    def plan(batch_sizes, sharding, hardware, *given, **options):
        tpus = Hardware("tpu", "TPU v3", hardware.num_devices)
        return plan_micro_batches(batch_sizes, sharding, tpus, *given, **options)

    plan_with(plan)


def one_update(config):
    """The gradient of the first update and its loss, and in how many loops over micro-batches they are found."""
    plan, data, programs, state = prepare(typed(config), Clock(), ProgramCache())
    before = replicas.first_replica(state.params)
    arguments = state, data.train.arrays, plan.schedule.inputs(0, plan.inputs_length), np.int32(1)
    program = parse(programs.inner_loop.lower(*arguments).compile().as_text())
    loops = [loop for loop in program.loops() if loop.scope == "micro_batches"]
    state, metrics = programs.inner_loop(*arguments)
    gradient = jax.tree.map(np.subtract, before, replicas.first_replica(state.params))
    return gradient, float(metrics["loss"][0]), len(loops)


def assert_same_gradient(one, other):
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(other))
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * largest)


# ---- one micro-batch on each device in every update: on a GPU there is no loop over them ----------------------


def test_a_program_that_knows_it_has_no_loop_and_the_same_gradient(config, plan_with):
    config.batch.size, config.batch.micro_batch_size = 100, 16  # up to 14 images on each of 8 devices
    expected, _, loops = one_update(config)
    assert loops == 1
    plan_with(lambda *given, **options: dataclasses.replace(plan_micro_batches(*given, **options), single=True))
    gradient, _, loops = one_update(config)
    assert loops == 0
    assert_same_gradient(gradient, expected)


@pytest.mark.parametrize(
    ("platform", "num_devices", "fields", "knows"),
    [
        ("gpu", 8, {}, True),
        ("cpu", 8, {}, False),
        ("tpu", 8, {}, False),
        ("gpu", 1, {}, False),  # 7 micro-batches
        ("gpu", 1, {"micro_batch_size": 100}, True),
        ("gpu", 8, {"micro_batch_size": 12}, False),  # some devices have 2
        ("gpu", 8, {"size": 4}, False),  # some devices have none
        ("gpu", 8, {"auto": True, "max_size": 256}, False),  # 2 in the largest batch
    ],
)
def test_which_programs_know(config, platform, num_devices, fields, knows):
    config.batch.update({"size": 100, "micro_batch_size": 16} | fields)
    config.log.noise_every = int(config.batch.auto)
    data = DatasetInfo.of(ProgramCache().load(typed(config)).data.cache)
    hardware = Hardware(platform, "NVIDIA H200", num_devices)
    assert plan_run(typed(config), data, hardware).micro_batches.single == knows


# ---- batches that are the whole set, read as slices on accelerators --------------------------------------------


@pytest.fixture(scope="module")
def update_of_drawn_examples(session_cache):
    """`one_update` of examples that are drawn, in micro-batches of 16."""
    return one_update(make_config(session_cache))


@pytest.mark.parametrize(
    "micro_batch_size",
    [pytest.param(16, marks=pytest.mark.full), 12, 10_000],
    ids=["even", "uneven", "whole share"],
)
def test_gradients_are_those_of_drawn_examples(
    config, update_of_drawn_examples, as_on_an_accelerator, micro_batch_size
):
    config.batch.micro_batch_size = micro_batch_size
    config.batch.virtual_shards = 11  # 8 devices hold them unequally
    assert ProgramCache().load(typed(config)).plan.micro_batches.by_slices
    gradient, loss, _ = one_update(config)
    expected, expected_loss, _ = update_of_drawn_examples
    assert_same_gradient(gradient, expected)
    assert loss == pytest.approx(expected_loss, rel=2e-6)


@pytest.mark.parametrize(
    ("count", "micro_batch_size"), [(80, 16), (80, 12), (80, 80), (73, 16), (73, 80), (1, 16), (0, 16)]
)
def test_every_row_of_a_share_has_a_weight_once(count, micro_batch_size):
    """Rows of padding, behind `count` of the 80 that a device has, have none."""
    share = {"images": np.arange(80, dtype=np.int32)}

    def read_slice(data, start, size):
        rows = jax.lax.dynamic_slice_in_dim(data["images"], start, size)
        return rows, rows

    reader = MicroBatchReader(None, None, Grouping(micro_batch_size, micro_batch_size), read_slice=read_slice)
    zero = np.int32(0)
    batch = DeviceBatch(zero, zero, zero, np.int32(count), np.int32(count))
    weights = np.zeros(80)
    for index in range(reader.grouping.num_micro_batches(count)):
        micro_batch = reader.micro_batch(share, reader.find(batch, np.int32(index), 0))
        np.add.at(weights, np.asarray(micro_batch.images), np.asarray(micro_batch.weights[0]))
    np.testing.assert_array_equal(weights, np.arange(80) < count)


@pytest.mark.parametrize(("virtual_shards", "expected"), [(8, 5), (11, None)])
def test_the_number_of_micro_batches_is_a_constant_where_devices_have_as_many(
    config, as_on_an_accelerator, virtual_shards, expected
):
    config.batch.virtual_shards, config.batch.micro_batch_size = virtual_shards, 16
    reader = make_step(ProgramCache().load(typed(config)).plan).reader
    batch = DeviceBatch(*[jax.ShapeDtypeStruct((), np.int32)] * 5)
    found = []
    jax.eval_shape(lambda batch: found.append(reader.num_micro_batches(batch)) or 0, batch)
    assert (found[0] if isinstance(found[0], int) else None) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"batch.size": 640}, True),
        ({"batch.size": 64}, False),
        ({"batch.auto": True, "batch.size": 64, "log.noise_every": 1}, False),
        ({"batch.per_device_batch_size": 80}, False),
        ({"batch.trace": (640, 64), "batch.hold_last": True}, False),
        ({"augment.shift": 1}, False),
        ({"schedule.decay_by": "batch", "schedule.name": "step", "schedule.decay_steps": (2,)}, False),
        ({"model.norm": "batch"}, False),  # a micro-batch must be a sample of the set
    ],
)
def test_which_runs_read_slices(config, fields, expected):
    data = DatasetInfo.of(ProgramCache().load(typed(config)).data.cache)
    config.update_from_flattened_dict(fields)

    def by_slices(platform, kind):
        plan = choose_plan(typed(config), data, Hardware(platform, kind, 8), free_bytes=10**12)
        return plan.micro_batches.by_slices

    assert by_slices("tpu", "TPU v3") == by_slices("gpu", "NVIDIA H200") == expected
    assert not by_slices("cpu", "cpu")
    config.augment.storage = "on_device"
    assert not by_slices("tpu", "TPU v3")


def test_examples_are_drawn_where_the_noise_is_measured(config, as_on_an_accelerator):
    config.log.noise_every = 3
    assert not ProgramCache().load(typed(config)).plan.micro_batches.by_slices
