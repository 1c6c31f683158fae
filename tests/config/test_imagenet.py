"""configs/imagenet_resnet50.py without ImageNet: what follows from it is as in Goyal et al. 2017, on a v3-32."""

import numpy as np
import pytest
from conftest import typed

from configs import imagenet_resnet50
from largebatch.data.cache import DatasetInfo, RowLayout
from largebatch.hardware.chips import Hardware
from model import MODELS
from plan import needed_bytes, plan_run

NUM_TRAIN, NUM_VAL, NUM_TEST = 1_231_167, 50_000, 50_000  # test images are cut from the 1,281,167
DEVICE_BYTES = 16e9  # of a core of a TPU v3


@pytest.fixture(scope="module")
def setup():
    config = imagenet_resnet50.get_config()
    config.model.conv, config.model.dtype = "lax", "bfloat16"  # as on a TPU
    counts = {"train": NUM_TRAIN, "val": NUM_VAL, "test": NUM_TEST}
    layout = RowLayout.of(counts, (224, 224, 3), np.dtype(np.uint8))
    data = DatasetInfo(layout, 1000, mean=(120.0,) * 3, std=(70.0,) * 3)
    assert config.model.name in MODELS
    return plan_run(typed(config), data, Hardware.here(32)), layout


def test_rates_are_those_of_the_paper(setup):
    schedule = setup[0].schedule
    rates = schedule.learning_rates(np.arange(schedule.num_steps))
    epochs = np.arange(schedule.num_steps) * 8192 / 1_281_167
    assert schedule.num_steps * 8192 == pytest.approx(90 * 1_281_167, rel=1e-3)
    assert rates[0] == pytest.approx(0.1, rel=0.05)  # from there, over 5 epochs: section 2.2
    np.testing.assert_allclose(rates[(epochs > 5.1) & (epochs < 29.9)], 0.1 * 8192 / 256)
    for begin, end, factor in ((30.1, 59.9, 0.1), (60.1, 79.9, 0.01), (80.1, 90, 0.001)):
        np.testing.assert_allclose(rates[(epochs > begin) & (epochs < end)], 3.2 * factor, rtol=1e-6)


@pytest.mark.full
def test_images_and_a_step_fit_on_a_core_of_a_tpu_v3(setup, monkeypatch):
    monkeypatch.setattr("largebatch.hosts.memory.available_bytes", lambda: int(DEVICE_BYTES))
    needed = needed_bytes(setup[0])
    row_bytes = 224 * 224 * 3
    assert needed["training images"] == pytest.approx(NUM_TRAIN * row_bytes / 32, rel=0.01)
    assert needed["validation images"] == 1563 * row_bytes
    assert sum(needed.values()) < DEVICE_BYTES


def test_ghost_batches_have_64_images_or_65(setup):
    most = setup[0].sharding.share_bounds(8192)[1]
    assert setup[0].micro_batch_size == 65
    assert -(-most // 65) == 8192 // 32 // 64  # as many as there would be of 64
