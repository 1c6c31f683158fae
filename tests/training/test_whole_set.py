"""augment.storage "normalised": batches that are the whole set, read by slices of normalised images."""

import jax
import numpy as np
import pytest
from conftest import make_small_config

from experiment import ProgramCache, prepare
from largebatch.data.batching import Grouping
from largebatch.errors import BadSetting
from largebatch.hardware.chips import Hardware
from largebatch.hosts import replicas
from largebatch.hosts.clock import Clock
from largebatch.optim import noise_scale
from largebatch.training.loss import make_normalise
from largebatch.training.setup import DataFacts, storages_to_try
from resolve import needed_bytes, possible_storages


@pytest.fixture
def config(session_cache):
    return make_config(session_cache, "normalised")


def make_config(cache_dir, storage):
    """The first update subtracts the gradient."""
    c = make_small_config(cache_dir)
    c.augment.storage = storage
    c.optimizer.name, c.optimizer.momentum = "sgd", 0.0
    c.optimizer.learning_rate = 1.0
    return c


def one_update(config):
    """The gradient of the first update, its loss, and the variance of the gradient between micro-batches."""
    experiment, state = prepare(config, Clock(), ProgramCache())
    assert experiment.setup.program.storage == config.augment.storage
    before = replicas.first_replica(state.params)
    inputs = experiment.setup.schedule.inputs(0, experiment.setup.program.inputs_length)
    state, metrics = experiment.programs.inner_loop(state, experiment.data.train.arrays, inputs, np.int32(1))
    gradient = jax.tree.map(np.subtract, before, replicas.first_replica(state.params))
    return gradient, float(metrics["loss"][0]), noise_scale.noise_scale(replicas.first_replica(state.noise))


@pytest.fixture(scope="module")
def update_of_rows(session_cache):
    """`one_update` of images read by rows, in micro-batches of 16: others would give the same but for rounding."""
    return one_update(make_config(session_cache, "expanded"))


@pytest.mark.parametrize(
    "micro_batch_size",
    [pytest.param(16, marks=pytest.mark.full), 12, 10_000],
    ids=["even", "uneven", "whole share"],
)
def test_gradients_are_those_of_rows(config, update_of_rows, micro_batch_size):
    config.batch.micro_batch_size = micro_batch_size
    gradient, loss, noise = one_update(config)
    expected, expected_loss, expected_noise = update_of_rows
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * largest)
    assert loss == pytest.approx(expected_loss, rel=2e-6)
    if micro_batch_size > 80:  # one micro-batch on each device: too few to measure noise by
        return
    # As noisy as drawn micro-batches; those that held all views of an original would be far noisier.
    assert noise == pytest.approx(expected_noise, rel=0.5)


@pytest.mark.parametrize("virtual_shards", [None, 11])  # 8 devices hold 11 unequally
def test_every_view_of_a_device_lies_there_once_and_normalised(config, virtual_shards):
    config.batch.virtual_shards = virtual_shards
    placed = ProgramCache().load(config)
    program, arrays = placed.setup.program, placed.data.train.arrays
    config.augment.storage = "expanded"
    rows = ProgramCache().load(config).data.train.arrays
    normalise = make_normalise(program.network, program.image_shape, program.mean, program.std)
    for device, (share, expected) in enumerate(
        zip(replicas.shards_of(arrays), replicas.shards_of(rows), strict=True)
    ):
        count = int(program.sharding.num_originals_of(device)) * 8
        parts = -(-count // placed.setup.micro_batch_size)  # micro-batches of this device, all but evenly filled
        lengths = [(count + parts - 1 - part) // parts for part in range(parts)]
        kept = [np.asarray(share["images"][0, part, :length]) for part, length in enumerate(lengths)]
        images = np.concatenate(kept).reshape(count, -1)
        kept_labels = np.concatenate([share["labels"][0, part, :length] for part, length in enumerate(lengths)])
        wanted = np.asarray(normalise(expected["images"][0]))[:count].reshape(count, -1)
        labels = np.repeat(np.asarray(expected["labels"][0]), 8)[:count]
        assert sorted(map(tuple, np.c_[images, kept_labels])) == sorted(map(tuple, np.c_[wanted, labels]))


def test_now_and_then_the_noise_is_measured_between_parts_of_what_lies_there(config, update_of_rows):
    config.log.noise_every = 3
    gradient, loss, noise = one_update(config)
    setup = ProgramCache().load(config).setup
    assert setup.program.grouping == Grouping(20, 10)  # 8 parts of a share of 80; micro-batches of 16 were wanted
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(update_of_rows[0]))
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(update_of_rows[0]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * largest)
    assert loss == pytest.approx(update_of_rows[1], rel=2e-6)
    assert noise == pytest.approx(update_of_rows[2], rel=0.5)


def test_no_image_is_left_out_where_micro_batches_of_ghost_batches_measure_the_noise(config):
    """Those that measure have 9 images here, of which 24 is no multiple: so 27 lie on the device together."""
    gradients = {}
    for every in (0, 3):
        config.model.norm, config.batch.ghost_size, config.batch.micro_batch_size = "batch", 3, 24
        config.log.noise_every = every
        gradients[every] = one_update(config)[0]
        grouping = ProgramCache().load(config).setup.program.grouping
        assert (grouping.group_size, grouping.micro_batch_size) == (3, {0: 24, 3: 27}[every])
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients[0]))
    for ours, theirs in zip(*map(jax.tree.leaves, gradients.values()), strict=True):
        # The same gradients are added in another order, and some of them cancel.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * largest)


def test_data_are_placed_again_for_other_batches_sizes_and_dtypes(config):
    shared = ProgramCache()
    normalised = shared.load(config)
    assert shared.load(config).data is normalised.data
    config.batch.micro_batch_size = 20
    assert shared.load(config).data.train.arrays["images"].shape[1:3] == (4, 20)
    config.model.dtype = "bfloat16"
    assert shared.load(config).data.train.arrays["images"].dtype == "bfloat16"
    config.augment.storage = "auto"
    config.batch.size = 64
    rows = shared.load(config)
    assert rows.setup.program.storage == "expanded"
    assert rows.data.train.arrays["images"].dtype == np.uint8


def test_what_the_devices_need_is_announced(config):
    placed = ProgramCache().load(config)
    needed = needed_bytes(placed.setup, placed.cache.layout)
    assert needed["the same normalised"] == placed.data.train.arrays["images"].nbytes // 8


@pytest.mark.parametrize(
    "changes",
    [
        {"batch.size": 64},
        {"batch.auto": True},
        {"batch.per_device_batch_size": 80},
        {"batch.trace": (640, 64)},
        {"augment.shift": 1},
        {"schedule.decay_by": "batch"},
    ],
)
def test_normalised_images_serve_whole_sets_alone(config, changes):
    cache = ProgramCache().load(config).cache
    for field, value in changes.items():
        group, name = field.split(".")
        config[group][name] = value
    with pytest.raises(BadSetting, match=r"augment\.storage: 'normalised'; .*unless every batch is"):
        possible_storages(config, DataFacts.of(cache), Hardware.here())
    config.augment.storage = "auto"
    assert "normalised" not in storages_to_try(config, 640, "tpu")


def test_auto_normalises_on_accelerators(config):
    config.augment.storage = "auto"
    assert storages_to_try(config, 640, "tpu")[0] == "normalised"
    assert storages_to_try(config, 640, "gpu")[0] == "normalised"
    assert storages_to_try(config, 640, "cpu")[0] == "expanded"
