"""Programs that know how many micro-batches there are, and batches of the whole set that are read as slices."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import facts_of, make_small_config, typed

import build
from build import ProgramCache, prepare
from largebatch.hardware.chips import Hardware
from largebatch.hardware.compiled import parse
from largebatch.hosts import replicas
from largebatch.hosts.clock import Clock
from largebatch.training.grouping import plan_micro_batches
from plan import plan_run


@pytest.fixture
def config(session_cache):
    return make_config(session_cache)


def make_config(cache_dir):
    """The first step subtracts the gradient; 640 examples on 8 devices."""
    c = make_small_config(cache_dir)
    c.augment.storage, c.log.noise_every = "expanded", 0
    c.optimizer.name, c.optimizer.momentum, c.optimizer.learning_rate = "sgd", 0.0, 1.0
    return c


@pytest.fixture
def plan_with(monkeypatch):
    """plan_with(**changes) changes the micro-batches that are planned."""

    def change(**changes):
        def plan(*given, **options):
            return dataclasses.replace(plan_micro_batches(*given, **options), **changes)

        monkeypatch.setattr("plan.plan_micro_batches", plan)

    return change


def one_step(config):
    """The gradient of the first step and its loss, and in how many loops over micro-batches they are found."""
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


@pytest.fixture(scope="module")
def drawn(session_cache):
    """`one_step` of examples that are drawn, in micro-batches of 16."""
    return one_step(make_config(session_cache))


# ---- one micro-batch on each device in every step: on a GPU there is no loop over them ------------------------


def test_a_program_that_knows_it_has_no_loop_and_the_same_gradient(config, drawn, plan_with):
    config.batch.micro_batch_size = 80  # all that each of 8 devices has
    plan_with(single=True)
    gradient, _, loops = one_step(config)
    expected, _, expected_loops = drawn
    assert (loops, expected_loops) == (0, 1)
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
    hardware = Hardware(platform, "NVIDIA H200", num_devices)
    assert plan_run(typed(config), facts_of(80, (16, 16, 3)), hardware).micro_batches.single == knows


# ---- batches that are the whole set, read as slices on accelerators --------------------------------------------


@pytest.mark.parametrize("micro_batch_size", [13, 10_000], ids=["the last slice begins earlier", "whole share"])
def test_gradients_of_slices_are_those_of_drawn_examples(config, drawn, plan_with, micro_batch_size, monkeypatch):
    made, make = [], build.make_read_slice
    monkeypatch.setattr(build, "make_read_slice", lambda *arguments: made.append(arguments) or make(*arguments))
    config.batch.micro_batch_size = micro_batch_size
    config.batch.virtual_shards = 11  # 8 devices hold them unequally
    plan_with(by_slices=True)
    gradient, loss, _ = one_step(config)
    assert made
    expected, expected_loss, _ = drawn
    assert_same_gradient(gradient, expected)
    assert loss == pytest.approx(expected_loss, rel=2e-6)


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
        ({"log.noise_every": 3}, False),
        ({"schedule.decay_by": "batch", "schedule.name": "step", "schedule.decay_steps": (2,)}, False),
        ({"model.norm": "batch"}, False),  # a micro-batch must be a sample of the set
    ],
)
def test_which_runs_read_slices(config, fields, expected):
    config.update_from_flattened_dict(fields)

    def by_slices(platform, kind):
        return plan_run(
            typed(config), facts_of(80, (16, 16, 3)), Hardware(platform, kind, 8)
        ).micro_batches.by_slices

    assert by_slices("tpu", "TPU v3") == by_slices("gpu", "NVIDIA H200") == expected
    assert not by_slices("cpu", "cpu")
    config.augment.storage = "on_device"
    assert not by_slices("tpu", "TPU v3")
