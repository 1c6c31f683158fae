"""Known chips by name, dtypes, micro-batch sizes, and options of the compiler."""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Chip:
    """Figures of one device."""

    peak_flops: float  # per second, dense matrix products in bfloat16
    memory_bytes: int
    bytes_per_second: float  # from and to that memory
    target: str | None = None  # name among the targets of `--compile_for`
    clock_hz: float | None = None  # known of TPUs
    gpu_fields: dict[str, Any] | None = None  # what XLA needs to compile for a GPU, by its own names


GIB = 2**30
TPUS = {  # by the name that JAX gives them
    "TPU v2": Chip(22.5e12, 8 * GIB, 300e9, "v2", 700e6),
    "TPU v3": Chip(61.5e12, 16 * GIB, 450e9, "v3", 940e6),
    # No target: libtpu describes the two cores of a v4's chip, and JAX runs one program on both.
    "TPU v4": Chip(275e12, 32 * GIB, 1228e9, None, 1050e6),
    "TPU v5 lite": Chip(197e12, 16 * GIB, 819e9, "v5e", 1500e6),
    "TPU v5": Chip(459e12, 95 * GIB, 2765e9, "v5p", 1750e6),
    "TPU v6 lite": Chip(918e12, 32 * GIB, 1640e9, "v6e", 1750e6),
}


def _gpu(
    capability: str,
    cores: int,
    lanes: int,
    clock_ghz: float,
    l2_bytes: int,
    shared_bytes: int,
    *,
    threads: int = 2048,
) -> dict[str, Any]:
    """Return what XLA needs to compile for a GPU; lanes, shared memory and threads are those of a core."""
    return {
        "cuda_compute_capability": capability,
        "core_count": cores,
        "fpus_per_core": lanes,
        "clock_rate_ghz": clock_ghz,
        "l2_cache_size": l2_bytes,
        "shared_memory_per_core": shared_bytes,
        "threads_per_core_limit": threads,
    }


_HOPPER = "{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }"  # sm_90a, not sm_90
_A100 = _gpu("{ major: 8 minor: 0 }", 108, 64, 1.41, 41_943_040, 167_936)
_A6000 = _gpu("{ major: 8 minor: 6 }", 84, 128, 1.8, 6_291_456, 102_400, threads=1536)
_H100 = _gpu(_HOPPER, 132, 128, 1.98, 52_428_800, 233_472)
_H100_PCIE = _gpu(_HOPPER, 114, 128, 1.755, 52_428_800, 233_472)
CARDS = {
    "NVIDIA A100-SXM4-40GB": Chip(312e12, 42_331_013_120, 1555e9, "a100-40gb", gpu_fields=_A100),
    "NVIDIA A100-SXM4-80GB": Chip(312e12, 85_100_068_864, 2039e9, "a100", gpu_fields=_A100),
    "NVIDIA RTX A6000": Chip(155e12, 51_041_271_808, 768e9, "a6000", gpu_fields=_A6000),
    "NVIDIA H100 80GB HBM3": Chip(989e12, 84_942_979_072, 3352e9, "h100", gpu_fields=_H100),
    "NVIDIA H100 PCIe": Chip(756e12, 84_942_979_072, 2039e9, "h100-pcie", gpu_fields=_H100_PCIE),
    "NVIDIA H200": Chip(989e12, 151_397_597_184, 4800e9, "h200", gpu_fields=_H100),
}
CHIPS: dict[str, Chip] = {**TPUS, **CARDS}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The devices that a run's programs are made for."""

    platform: str  # cpu | gpu | tpu
    device_kind: str  # as JAX names it
    num_devices: int  # devices that share a batch

    @classmethod
    def here(cls, num_devices: int | None = None) -> "Hardware":
        """Return the devices of all hosts of this process, or `num_devices` of them."""
        return cls(jax.default_backend(), jax.devices()[0].device_kind, num_devices or jax.device_count())

    @property
    def chip(self) -> Chip | None:
        """Figures of one device; None where they are not known, as for CPUs."""
        return CHIPS.get(self.device_kind)


AUTO = "auto"
DTYPES = ("float32", "bfloat16")
# Instructions that multiply bfloat16, by Linux's names. Without them XLA converts to float32 and back.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def auto_dtype(platform: str | None = None) -> str:
    """Return the dtype that "auto" stands for: bfloat16 where the hardware multiplies it, else float32.

    Args:
      platform: cpu | gpu | tpu, as JAX names it; that of this process by default. A CPU is that of this machine.
    """
    if (platform or jax.default_backend()) in ("gpu", "tpu"):
        return "bfloat16"
    return "bfloat16" if BFLOAT16_FLAGS & read_cpu_flags() else "float32"


def read_cpu_flags() -> frozenset[str]:
    """Read the instruction sets of this machine's CPU from Linux; return none elsewhere."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)$", path.read_text() if path.exists() else "", re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


# Sizes on TPUs with the fewest cycles an image by the compiler, for full batches of EuroSAT, ImageNet for ResNet-50
# (docs/hardware.md). On a v5e the activations of so few stay on the chip.
TPU_SIZES = {
    "TPU v3": {"convnet": 5400, "resconvnet": 5400, "resconvnet7": 5400, "resnet8": 1350, "resnet50": 64},
    "TPU v5 lite": {"convnet": 338, "resconvnet": 338, "resconvnet7": 338, "resnet8": 338, "resnet50": 64},
    "TPU v6 lite": {"convnet": 1350, "resconvnet": 1350, "resconvnet7": 1350, "resnet8": 1350, "resnet50": 64},
}
CPU_SIZE = 16  # best of 16 to 256 on a core (LOG.md)
# Bytes of a micro-batch's activations on GPUs. In the convnet in bfloat16 an image of EuroSAT has 246,312 of them,
# and on an H200 a full batch takes 195.7 ms in micro-batches of 1,080, 169.2 ms of 2,700, 154.0 ms of 5,400 and
# 178.1 ms of 21,600. That is a thirtieth of the memory of the smallest card in chips.py, so there is room.
GPU_ACTIVATION_BYTES = 5_400 * 246_312
SIZE_ELSEWHERE = 1024  # a guess, for TPUs and networks that were not compiled


def auto_micro_batch_size(hardware: Hardware, network: str, activation_bytes: Callable[[], int]) -> int:
    """Return the number of examples per gradient evaluation of one device.

    On GPUs this size was measured for one network on one card, the H200. For others it is extrapolated: arrays of
    as many bytes fill a card as well.

    Args:
      network: a config's model.name.
      activation_bytes: returns the bytes of an image's activations; called on GPUs.
    """
    if hardware.platform == "cpu":
        return CPU_SIZE
    if hardware.platform == "gpu":
        return max(GPU_ACTIVATION_BYTES // activation_bytes(), 1)
    return TPU_SIZES.get(hardware.device_kind, {}).get(network, SIZE_ELSEWHERE)


# Operations that may be part of a CUDA graph, which the driver starts at once: XLA's own choice, loops and
# convolutions. A loop is recorded only if all that is in it can be; then the host starts no kernel of it, and does
# not wait for its condition after each iteration.
GPU_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,"
    "CONDITIONAL,WHILE,CONVOLUTION"
}


def options_for(platform: str) -> dict[str, str]:
    """Return the compiler options for `platform`, but for those that the environment variable XLA_FLAGS sets."""
    options = GPU_OPTIONS if platform in ("gpu", "cuda") else {}
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if f"--{name}=" not in flags}
