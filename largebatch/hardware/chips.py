"""What the makers say of their chips: arithmetic, memory, clock; by the name that JAX gives a device.

A device is what JAX counts as one: a core of a TPU v2 or v3, a chip of later TPUs, a card.

TPUs: from the pages on system architecture of Google's Cloud TPU documentation; a core of v2 or v3 is half of its
chip. Their clocks are those by which their compiler counts cycles. Cards: from NVIDIA's data sheets, and
from the specifications that XLA keeps for compiling without a card.
"""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device."""

    peak_flops: float  # per second, dense matrix products in bfloat16
    memory_bytes: int
    bytes_per_second: float  # from and to that memory
    clock_hz: float | None = None  # of TPUs


@dataclasses.dataclass(frozen=True)
class Card(Chip):
    """One GPU, with what XLA wants to know of it to compile for it."""

    compute_capability: tuple[int, int] = (0, 0)
    cores: int = 0  # streaming multiprocessors
    lanes_per_core: int = 0  # float32 units
    core_clock_ghz: float = 0.0
    threads_per_core: int = 2048
    l2_bytes: int = 0
    shared_bytes_per_core: int = 0
    shared_bytes_per_block: int = 0  # at most, where a kernel asks for more than 48 KiB
    is_accelerated: bool = False  # compiled for exactly this capability: sm_90a, not sm_90


GIB = 2**30
TPUS = {
    "TPU v2": Chip(22.5e12, 8 * GIB, 300e9, 700e6),
    "TPU v3": Chip(61.5e12, 16 * GIB, 450e9, 940e6),
    "TPU v4": Chip(275e12, 32 * GIB, 1228e9, 1050e6),
    "TPU v5 lite": Chip(197e12, 16 * GIB, 819e9, 1500e6),
    "TPU v5": Chip(459e12, 95 * GIB, 2765e9, 1750e6),
    "TPU v6 lite": Chip(918e12, 32 * GIB, 1640e9, 1750e6),
}
_HOPPER = {
    "compute_capability": (9, 0),
    "lanes_per_core": 128,
    "l2_bytes": 52_428_800,
    "shared_bytes_per_core": 233_472,
    "shared_bytes_per_block": 232_448,
    "is_accelerated": True,
}
_A100 = {
    "compute_capability": (8, 0),
    "cores": 108,
    "lanes_per_core": 64,
    "core_clock_ghz": 1.41,
    "l2_bytes": 41_943_040,
    "shared_bytes_per_core": 167_936,
    "shared_bytes_per_block": 166_912,
}
CARDS = {
    "NVIDIA A100-SXM4-40GB": Card(312e12, 42_331_013_120, 1555e9, **_A100),
    "NVIDIA A100-SXM4-80GB": Card(312e12, 85_100_068_864, 2039e9, **_A100),
    "NVIDIA RTX A6000": Card(
        155e12,
        51_041_271_808,
        768e9,
        compute_capability=(8, 6),
        cores=84,
        lanes_per_core=128,
        core_clock_ghz=1.8,
        threads_per_core=1536,
        l2_bytes=6_291_456,
        shared_bytes_per_core=102_400,
        shared_bytes_per_block=101_376,
    ),
    "NVIDIA H100 80GB HBM3": Card(989e12, 84_942_979_072, 3352e9, cores=132, core_clock_ghz=1.98, **_HOPPER),
    "NVIDIA H100 PCIe": Card(756e12, 84_942_979_072, 2039e9, cores=114, core_clock_ghz=1.755, **_HOPPER),
    "NVIDIA H200": Card(989e12, 151_397_597_184, 4800e9, cores=132, core_clock_ghz=1.98, **_HOPPER),
}
CHIPS: dict[str, Chip] = {**TPUS, **CARDS}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The devices that a run's programs are made for."""

    platform: str  # cpu | gpu | tpu
    device_kind: str  # as JAX names it
    num_devices: int  # that share a batch

    @classmethod
    def here(cls, num_devices: int | None = None) -> "Hardware":
        """The devices of all hosts of this process; `num_devices` of them."""
        return cls(jax.default_backend(), jax.devices()[0].device_kind, num_devices or jax.device_count())

    @property
    def chip(self) -> Chip | None:
        """What is known of one device; None where that is nothing, as of CPUs."""
        return CHIPS.get(self.device_kind)
