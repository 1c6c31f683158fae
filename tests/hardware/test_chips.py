"""The dtype and the micro-batch size that "auto" stands for, by platform, instruction sets and network."""

from pathlib import Path

import pytest

import model
from largebatch.hardware import chips
from largebatch.hardware.chips import CARDS, TPUS, Hardware
from largebatch.training.costs import ACTIVATIONS_ON_GPU, training_costs

AVX2 = {"sse4_2", "avx", "avx2"}
AVX512 = AVX2 | {"avx512f", "avx512_vnni"}
COOPER_LAKE = AVX512 | {"avx512_bf16"}
SAPPHIRE_RAPIDS = COOPER_LAKE | {"amx_bf16", "amx_int8"}
CPUS = {  # flags, and the dtype with each --xla_cpu_max_isa: none, AVX2, AVX512, AVX512_VNNI, AVX512_BF16, AMX
    "AVX2": (AVX2, "f f f f f f"),
    "AVX512": (AVX512, "f f f f f f"),
    "AVX512_BF16": (COOPER_LAKE, "b f f f b b"),
    "AMX": (SAPPHIRE_RAPIDS, "b f f f b b"),
    "ARM": (set(), "f f f f f f"),
}
MAX_ISAS = ["", "AVX2", "AVX512", "AVX512_VNNI", "AVX512_BF16", "AMX"]
NAMES = {"f": "float32", "b": "bfloat16"}


def dtype_with(cpu_flags: set[str], xla_flags: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chips, "read_cpu_flags", lambda: cpu_flags)
        patch.setenv("XLA_FLAGS", xla_flags)
        return chips.auto_dtype("cpu")


@pytest.mark.parametrize("cpu", CPUS)
def test_a_cpu_computes_in_bfloat16_where_xla_may_use_its_instructions(cpu):
    cpu_flags, expected = CPUS[cpu]
    found = [dtype_with(cpu_flags, f"--a=b --xla_cpu_max_isa={isa} --c" if isa else "--a=b") for isa in MAX_ISAS]
    assert found == [NAMES[letter] for letter in expected.split()]


def test_the_last_max_isa_counts_as_xla_reads_it():
    assert dtype_with(COOPER_LAKE, "--xla_cpu_max_isa=AMX --xla_cpu_max_isa=avx2") == "float32"
    assert dtype_with(COOPER_LAKE, "--xla_cpu_max_isa=SSE4_2 --xla_cpu_max_isa=AMX_FP16") == "bfloat16"


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_an_accelerator_computes_in_bfloat16_whatever_its_host(platform):
    assert chips.auto_dtype(platform) == "bfloat16"


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
