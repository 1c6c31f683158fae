"""Which dtype "auto" stands for, by platform and instruction sets."""

from pathlib import Path

import pytest

from largebatch.hardware import chips

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


def test_a_max_isa_of_this_process_is_respected(monkeypatch):
    monkeypatch.setattr(chips, "read_cpu_flags", lambda: SAPPHIRE_RAPIDS)
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    assert chips.auto_dtype() == "bfloat16"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    assert chips.auto_dtype() == "float32"
