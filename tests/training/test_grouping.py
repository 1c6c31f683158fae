"""The micro-batches and ghost batches that a run gets, and the groups between which it measures its noise."""

import numpy as np
import pytest
from conftest import facts_of, typed

from largebatch.data import batching
from largebatch.data.batching import DataSharding, Grouping
from largebatch.hardware.chips import Hardware
from largebatch.optim.noise_scale import NoisePlan
from largebatch.util import BadSetting, UserError
from plan import plan_run

# ---- micro-batches and ghost batches ------------------------------------------------------------------


def micro_batch_size_on_5_devices(config, num_originals):
    return plan_run(typed(config), facts_of(num_originals, (16, 16, 3)), Hardware.here(5)).micro_batch_size


def test_a_ghost_batch_is_no_larger_than_what_a_device_has(small_config):
    small_config.model.norm, small_config.batch.ghost_size = "batch", 32
    small_config.batch.micro_batch_size, small_config.batch.size = "auto", 100

    def grouping():
        return plan_run(typed(small_config), facts_of(384, (16, 16, 3)), Hardware.here(5)).grouping

    assert grouping() == Grouping(23, 23)  # where an epoch ends
    small_config.batch.size = 640  # of which a device has up to 133: 5 groups of 32
    assert grouping() == Grouping(32, 32)  # 16 on a CPU
    small_config.batch.micro_batch_size = 96
    assert grouping() == Grouping(96, 32)


def test_batch_norm_sees_no_single_image_where_an_epoch_ends(small_config):
    """384 originals in 32 shards of 12, of which two devices have 7 and three have 6."""
    small_config.model.norm, small_config.batch.micro_batch_size = "batch", 16
    small_config.batch.size = 20
    assert micro_batch_size_on_5_devices(small_config, 384) == 5
    sharding = DataSharding(384, 32, 5, 8)
    offsets = np.arange(0, sharding.num_examples, 4)[:, None]  # 20 and an epoch have 4 in common
    shares = batching.device_batch(sharding, np.arange(5)[None], 0, offsets, 20).count
    assert int(shares.min()) >= 2
    small_config.batch.size = 11  # of which a device gets one somewhere in an epoch
    with pytest.raises(UserError, match="batches of 11"):
        micro_batch_size_on_5_devices(small_config, 384)
    small_config.batch.size = 13
    assert micro_batch_size_on_5_devices(small_config, 385) == 4


# ---- the noise of the gradient ------------------------------------------------------------------------


def plan_on(config, num_devices, platform, num_originals=10_000) -> NoisePlan | None:
    hardware = Hardware(platform, {"cpu": "cpu", "gpu": "NVIDIA H200"}[platform], num_devices)
    return plan_run(typed(config), facts_of(num_originals, (16, 16, 3)), hardware).micro_batches.noise


@pytest.fixture
def config(small_config):
    small_config.optimizer.name = "sgd"
    small_config.batch.size, small_config.batch.micro_batch_size = 512, "auto"
    return small_config


def test_the_noise_is_measured_always_on_a_cpu_and_elsewhere_if_it_is_needed(config):
    assert plan_on(config, 2, "cpu") == NoisePlan(0.98, 1, (16,), 1)
    assert plan_on(config, 1, "gpu") is None
    config.schedule.scaling = "adascale"
    assert plan_on(config, 1, "gpu") == NoisePlan(0.98, 10, (64,), 8)
    config.log.noise_every = 3
    assert plan_on(config, 2, "cpu") == NoisePlan(0.98, 3, (16,), 8)
    config.schedule.scaling, config.log.noise_every = "none", 0
    assert plan_on(config, 2, "cpu") is None


def test_groups_are_as_large_as_leaves_eight_to_each_batch(config):
    config.log.noise_every = 10
    for batch_size, devices, size in (
        (512, 1, 64),
        (512, 4, 16),
        (500, 8, 7),
        (24, 2, 1),
        (5, 2, 1),
        (80_000, 1, 5_000),
    ):
        config.batch.size = batch_size
        if batch_size == 80_000:
            config.batch.micro_batch_size = 5_000
        assert plan_on(config, devices, "gpu").sizes == (size,), batch_size
    config.batch.micro_batch_size = "auto"
    config.batch.trace, config.batch.hold_last = (8192, 64), True
    assert plan_on(config, 1, "gpu").sizes == (1024, 128, 16, 2)


def test_ghost_batches_are_not_cut(config):
    config.log.noise_every, config.model.norm, config.batch.ghost_size = 10, "batch", 16
    assert plan_on(config, 1, "gpu").sizes == (64,)  # 8 groups of 4 ghost batches
    config.batch.size = 64
    assert plan_on(config, 1, "gpu").sizes == (16,)  # there are but 4
    config.batch.ghost_size = None
    assert plan_on(config, 1, "gpu").sizes == (64,)  # there is but one


def test_a_run_on_one_device_that_cannot_measure_the_noise_it_needs_is_refused(config):
    config.batch.auto, config.batch.size, config.batch.ghost_size, config.model.norm = True, 16, 32, "batch"
    refused = r"^batch\.ghost_size: ghost batches of up to 32 in batches from 16 on; allowed: at least two in each"
    with pytest.raises(BadSetting, match=refused):
        plan_on(config, 1, "cpu")
