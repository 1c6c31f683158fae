"""batch.micro_batch_size "auto", by device and network."""

import pytest

import model
from largebatch.hardware import chips
from largebatch.hardware.chips import CARDS, TPUS, Hardware
from largebatch.training.costs import ACTIVATIONS_ON_GPU, training_costs


def test_the_table_names_devices_and_networks_that_there_are():
    assert set(chips.TPU_SIZES) <= set(TPUS)
    for sizes in chips.TPU_SIZES.values():
        assert set(sizes) <= set(model.MODELS)


def not_asked():
    pytest.fail("activations were asked for")


def test_sizes_are_those_of_the_table_or_the_guess():
    v3 = Hardware("tpu", "TPU v3", 32)
    assert chips.auto_micro_batch_size(v3, "convnet", not_asked) == 5400
    assert chips.auto_micro_batch_size(v3, "of tomorrow", not_asked) == chips.SIZE_ELSEWHERE
    assert chips.auto_micro_batch_size(Hardware("cpu", "cpu", 2), "convnet", not_asked) == 16


def size_on_a_card(name, dtype="bfloat16", image_shape=(64, 64, 3)):
    network = model.create_model(name, 10, dtype, "lax")
    hardware = Hardware("gpu", "NVIDIA H200", 1)
    return chips.auto_micro_batch_size(
        hardware, name, lambda: training_costs(network, image_shape).activation_bytes
    )


def test_sizes_on_gpus_have_the_bytes_of_what_was_fastest_on_an_h200():
    assert size_on_a_card("convnet") == pytest.approx(5_400, rel=0.02)
    assert size_on_a_card("convnet", "float32") == pytest.approx(2_700, rel=0.02)
    assert size_on_a_card("convnet", image_shape=(32, 32, 3)) == pytest.approx(21_600, rel=0.02)
    assert 1 < size_on_a_card("resnet50", image_shape=(224, 224, 3)) < 100
    smallest = min(card.memory_bytes for card in CARDS.values())
    assert smallest / 20 > ACTIVATIONS_ON_GPU * chips.GPU_ACTIVATION_BYTES
