"""Batches that are the whole set, read as slices on accelerators."""

import jax
import numpy as np
import pytest
from conftest import make_small_config, typed

from build import ProgramCache, make_step, prepare
from largebatch.cache.plan import DatasetInfo
from largebatch.data.batching import DeviceBatch, Grouping
from largebatch.hardware.chips import Hardware
from largebatch.hosts import replicas
from largebatch.hosts.clock import Clock
from largebatch.training.grouping import plan_micro_batches
from largebatch.training.step import SliceReader
from plan import choose_plan


@pytest.fixture
def config(session_cache):
    return make_config(session_cache)


def make_config(cache_dir):
    """The first update subtracts the gradient; 640 examples on 8 devices."""
    c = make_small_config(cache_dir)
    c.augment.storage, c.log.noise_every = "expanded", 0
    c.optimizer.name, c.optimizer.momentum = "sgd", 0.0
    c.optimizer.learning_rate = 1.0
    return c


@pytest.fixture
def as_on_an_accelerator(monkeypatch):
    """Plan micro-batches here as for TPUs, whose updates read slices."""

    def plan(config, batch_sizes, sharding, hardware, *arguments, **options):
        tpus = Hardware("tpu", "TPU v3", hardware.num_devices)
        return plan_micro_batches(config, batch_sizes, sharding, tpus, *arguments, **options)

    monkeypatch.setattr("plan.plan_micro_batches", plan)


def one_update(config):
    """The gradient of the first update and its loss."""
    plan, data, programs, state = prepare(typed(config), Clock(), ProgramCache())
    before = replicas.first_replica(state.params)
    inputs = plan.schedule.inputs(0, plan.inputs_length)
    state, metrics = programs.inner_loop(state, data.train.arrays, inputs, np.int32(1))
    gradient = jax.tree.map(np.subtract, before, replicas.first_replica(state.params))
    return gradient, float(metrics["loss"][0])


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
    gradient, loss = one_update(config)
    expected, expected_loss = update_of_drawn_examples
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * largest)
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

    reader = SliceReader(None, None, Grouping(micro_batch_size, micro_batch_size), read_slice=read_slice)
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
