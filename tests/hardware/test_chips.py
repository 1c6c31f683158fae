"""The dtype and the micro-batch size that "auto" stands for, by platform, instruction sets and network."""

from pathlib import Path

import pytest

import model
from largebatch.hardware import chips
from largebatch.hardware.chips import CARDS, TPUS, Hardware
from largebatch.training.costs import ACTIVATIONS_ON_GPU, training_costs

AVX2 = {"sse4_2", "avx", "avx2"}
AVX512 = AVX2 | {"avx512f", "avx512_vnni"}


@pytest.mark.parametrize(
    ("cpu_flags", "dtype"),
    [
        (AVX512, "float32"),
        (AVX512 | {"avx512_bf16"}, "bfloat16"),  # Cooper Lake
        (AVX512 | {"amx_bf16", "amx_int8"}, "bfloat16"),  # Sapphire Rapids
        (set(), "float32"),  # ARM
    ],
)
def test_bfloat16_is_for_accelerators_and_cpus_that_multiply_it(monkeypatch, cpu_flags, dtype):
    monkeypatch.setattr(chips, "read_cpu_flags", lambda: cpu_flags)
    assert chips.auto_dtype("cpu") == dtype
    assert chips.auto_dtype("gpu") == chips.auto_dtype("tpu") == "bfloat16"


def test_flags_are_those_of_proc_cpuinfo(tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(chips, "Path", lambda path: info if path == "/proc/cpuinfo" else Path(path))
    assert chips.read_cpu_flags() == frozenset()  # no Linux
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\nvmx flags\t: vnmi\n\nprocessor\t: 1\n")
    assert chips.read_cpu_flags() == {"fpu", "avx2", "avx512_bf16"}
    info.write_text("processor\t: 0\nFeatures\t: asimd bf16\n")
    assert chips.read_cpu_flags() == frozenset()  # ARM


def test_the_table_names_devices_and_networks_that_there_are():
    assert set(chips.TPU_SIZES) <= set(TPUS)
    for sizes in chips.TPU_SIZES.values():
        assert set(sizes) <= set(model.MODELS)


def test_sizes_are_those_of_the_table_or_the_guess():
    not_asked = None  # what would count the bytes of activations
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
    smallest = min(card.memory_bytes for card in CARDS.values())
    assert smallest / 20 > ACTIVATIONS_ON_GPU * chips.GPU_ACTIVATION_BYTES
