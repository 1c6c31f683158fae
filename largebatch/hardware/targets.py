"""Compile targets by name: TPU slices and NVIDIA cards; the hardware need not be attached.

v3:4x4     a slice of a TPU, by its chips: a v3-32, whose 16 chips have 2 cores each
h200       one card
h200:8     8 of them in one machine
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import re

import jax
from jax.experimental import topologies

from largebatch.hardware.chips import CARDS, TPUS, Chip, Hardware
from largebatch.util import UserError

# JAX's names of the devices, by the start of a target's name.
TPU_GENERATIONS = {chip.target: kind for kind, chip in TPUS.items() if chip.target}
CARD_NAMES = {card.target: kind for kind, card in CARDS.items()}
KNOWN = (
    "TPU slices by their chips, as v3:4x4 or v5p:2x2x2 "
    f"({', '.join(TPU_GENERATIONS)}; sides of 2, 4, 8, 16, ... chips, or 1x1), "
    f"or cards, as h200 or h200:8 ({', '.join(CARD_NAMES)})"
)
# Packages of compilers, of which one is enough.
TPU_COMPILERS = ("libtpu",)
CARD_COMPILERS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
# Otherwise libtpu looks for this machine's TPU, says on stderr that it has none, and locks out other compilers.
TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v3-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices that programs are compiled for."""

    name: str  # as the user gave it
    hardware: Hardware
    devices: list  # JAX's descriptions of them, for `jax.pmap`

    @property
    def chip(self) -> Chip:
        """Figures of one device."""
        return self.hardware.chip


def find_target(name: str) -> Target:
    """Find the devices that `name` stands for; see the module's docstring.

    From here on JAX uses this machine's CPU alone: a plugin that looks for its own devices and finds none cannot
    compile. JAX caches no programs either: those of devices that are not attached cannot be read back.

    Raises:
      UserError: there is no such slice or card, or its compiler is not installed or cannot be used.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    kind, _, size = name.partition(":")
    if kind in CARD_NAMES and re.fullmatch(r"[1-9]\d{0,3}|", size):
        platform, device_kind = "gpu", CARD_NAMES[kind]
        _check_compiler(name, CARD_COMPILERS)
        specification = card_specification(device_kind, CARDS[device_kind])
        topology = {"platform": "cuda", "target_config": specification, "topology": f"1x1x{size or 1}"}
    elif kind in TPU_GENERATIONS and re.fullmatch(r"\d+(x\d+){1,2}", size):
        platform, device_kind = "tpu", TPU_GENERATIONS[kind]
        _check_compiler(name, TPU_COMPILERS)
        for variable, value in TPU_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        # libtpu takes hosts of 2x2 chips, so a single chip has to be said.
        is_single = set(size) == {"1", "x"}
        topology = {"platform": "tpu"} | ({"chips_per_host_bounds": [1, 1, 1]} if is_single else {})
    else:
        raise UserError(f"--compile_for: {name!r}; allowed: {KNOWN}")
    try:
        devices = topologies.get_topology_desc(topology_name=name, **topology).devices
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--compile_for: {name!r}: its compiler says {reason!r}; allowed: {KNOWN}") from error
    return Target(name, Hardware(platform, device_kind, len(devices)), devices)


def _check_compiler(name: str, packages: tuple[str, ...]) -> None:
    """Raise UserError if none of `packages` is installed."""
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(package)
            return
    raise UserError(
        f"--compile_for: {name!r} needs the package {' or '.join(packages)}, which is not installed; "
        "make compilers installs it beside the environment that trains; then "
        f".venv/compilers/bin/python train.py ... --compile_for {name}"
    )


def card_specification(device_kind: str, card: Chip) -> str:
    """Describe a card for XLA: a GpuTargetConfigProto in text form."""
    fields = "\n".join(f"{name}: {value}" for name, value in card.gpu_fields.items())
    return f"""
        platform_name: "CUDA"
        device_description_str: "{device_kind}"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        gpu_device_info {{
          driver_version: "13.0.0"
          runtime_version: "12.8.0"
          compile_time_toolkit_version: "12.8.0"
          device_memory_size: {card.memory_bytes}
          memory_bandwidth: {int(card.bytes_per_second)}
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: {card.gpu_fields["shared_memory_per_core"] - 1024}
          threads_per_warp: 32
          threads_per_block_limit: 1024
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          {fields}
        }}
    """
