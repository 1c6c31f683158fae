"""Runs whose devices have one micro-batch in every update: on a GPU their programs have no loop over them."""

import jax
import numpy as np
import pytest
from conftest import make_small_config, typed

from build import ProgramCache, prepare
from largebatch.cache.plan import DatasetInfo
from largebatch.hardware import hlo
from largebatch.hardware.chips import Hardware
from largebatch.hosts import replicas
from largebatch.hosts.clock import Clock
from largebatch.training import grouping
from plan import plan_run


@pytest.fixture
def config(session_cache):
    c = make_small_config(session_cache)
    c.optimizer.name, c.optimizer.momentum, c.optimizer.learning_rate = "sgd", 0.0, 1.0
    c.log.noise_every = 0
    c.batch.size, c.batch.micro_batch_size = 100, 16  # up to 14 images on each of 8 devices
    return c


def one_update(config):
    """The gradient of the first update, and in how many loops over micro-batches it is found."""
    plan, data, programs, state = prepare(typed(config), Clock(), ProgramCache())
    before = replicas.first_replica(state.params)
    inputs = plan.schedule.inputs(0, plan.inputs_length)
    arguments = state, data.train.arrays, inputs, np.int32(1)
    program = hlo.parse(programs.inner_loop.lower(*arguments).compile().as_text())
    loops = [loop for loop in program.loops() if loop.op_name.endswith("micro_batches/while")]
    state, _ = programs.inner_loop(*arguments)
    return jax.tree.map(np.subtract, before, replicas.first_replica(state.params)), len(loops)


def test_a_program_that_knows_it_has_no_loop_and_the_same_gradient(config, monkeypatch):
    expected, loops = one_update(config)
    assert loops == 1
    monkeypatch.setattr(grouping, "has_one_micro_batch", lambda *arguments: True)
    gradient, loops = one_update(config)
    assert loops == 0
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * largest)


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
    config.batch.update(fields)
    config.log.noise_every = int(config.batch.auto)
    data = DatasetInfo.of(ProgramCache().load(typed(config)).data.cache)
    hardware = Hardware(platform, "NVIDIA H200", num_devices)
    assert plan_run(typed(config), data, hardware).micro_batches.single == knows
