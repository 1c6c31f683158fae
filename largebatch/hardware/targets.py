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
from packaging.requirements import Requirement

from largebatch.hardware.chips import CARDS, TPUS, Card, Chip, Hardware
from largebatch.util import UserError

# JAX's names of the devices, by the start of a target's name.
TPU_GENERATIONS = {chip.target: kind for kind, chip in TPUS.items() if chip.target}
CARD_NAMES = {card.target: kind for kind, card in CARDS.items()}
KNOWN = (
    "TPU slices by their chips, as v3:4x4 or v5p:2x2x2 "
    f"({', '.join(TPU_GENERATIONS)}; sides of 2, 4, 8, 16, ... chips, or 1x1), "
    f"or cards, as h200 or h200:8 ({', '.join(CARD_NAMES)})"
)
# Packages of compilers, and the extra of jax that brings each; one of them is enough.
TPU_COMPILERS = {"libtpu": "tpu"}
CARD_COMPILERS = {"jax-cuda12-plugin": "cuda12-local", "jax-cuda13-plugin": "cuda13-local"}
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
      UserError: there is no such slice or card, or its compiler is not installed, or not of jax's version.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    kind, _, size = name.partition(":")
    if kind in CARD_NAMES and re.fullmatch(r"[1-9]\d{0,3}|", size):
        return _find_cards(name, CARD_NAMES[kind], size or "1")
    if kind in TPU_GENERATIONS and re.fullmatch(r"\d+(x\d+){1,2}", size):
        return _find_slice(name, TPU_GENERATIONS[kind], size)
    raise UserError(f"--compile_for: {name!r}; allowed: {KNOWN}")


def _find_cards(name: str, device_kind: str, count: str) -> Target:
    _check_compiler(name, CARD_COMPILERS)
    specification = card_specification(device_kind, CARDS[device_kind])
    topology = f"1x1x{count}"
    devices = _describe(name, device_kind, platform="cuda", target_config=specification, topology=topology)
    return Target(name, Hardware("gpu", device_kind, len(devices)), devices)


def _find_slice(name: str, device_kind: str, chips: str) -> Target:
    _check_compiler(name, TPU_COMPILERS)
    for variable, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    # libtpu takes hosts of 2x2 chips, so a single chip has to be said.
    is_single = set(chips) == {"1", "x"}
    options = {"chips_per_host_bounds": [1, 1, 1]} if is_single else {}
    devices = _describe(name, name, platform="tpu", **options)
    assert devices[0].device_kind == device_kind, devices[0].device_kind
    return Target(name, Hardware("tpu", device_kind, len(devices)), devices)


def _describe(name: str, topology_name: str, **options) -> list:
    try:
        return topologies.get_topology_desc(topology_name=topology_name, **options).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--compile_for: {name!r}: its compiler says {reason!r}; allowed: {KNOWN}") from error


def _check_compiler(name: str, extras: dict[str, str]) -> None:
    """Check that a compiler is installed, in a version that this jax asks for.

    Args:
      extras: {package: the extra of jax that brings it}, of which one is needed.
    Raises:
      UserError: there is none, or one of another version.
    """
    hint = (
        "make compilers installs it beside the environment that trains; then "
        f".venv/compilers/bin/python train.py ... --compile_for {name}"
    )
    requirements = [Requirement(text) for text in importlib.metadata.requires("jax")]
    is_installed = False
    for package, extra in extras.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found, is_installed = importlib.metadata.version(package), True
            wanted = next(
                requirement.specifier
                for requirement in requirements
                if requirement.name == package
                and requirement.marker
                and requirement.marker.evaluate({"extra": extra})
            )
            if found not in wanted:
                raise UserError(
                    f"--compile_for: {name!r}: {package} {found} does not go with jax {jax.__version__}; "
                    f"allowed: {package}{wanted}; {hint}"
                )
    if not is_installed:
        raise UserError(
            f"--compile_for: {name!r} needs the package {' or '.join(extras)}, which is not installed; {hint}"
        )


def card_specification(device_kind: str, card: Card) -> str:
    """Describe a card for XLA: a GpuTargetConfigProto in text form."""
    major, minor = card.compute_capability
    return f"""
        platform_name: "CUDA"
        device_description_str: "{device_kind}"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        gpu_device_info {{
          name: "{device_kind}"
          device_vendor: "NVIDIA Corporation"
          driver_version: "13.0.0"
          runtime_version: "12.8.0"
          compile_time_toolkit_version: "12.8.0"
          dnn_version: "9.10.0"
          cub_version: "3.1.2"
          cuda_compute_capability {{
            major: {major} minor: {minor}
            feature_extension: {"ACCELERATED_FEATURES" if card.is_accelerated else "NONE"}
          }}
          core_count: {card.cores}
          fpus_per_core: {card.lanes_per_core}
          clock_rate_ghz: {card.core_clock_ghz}
          device_memory_size: {card.memory_bytes}
          memory_bandwidth: {int(card.bytes_per_second)}
          l2_cache_size: {card.l2_bytes}
          shared_memory_per_block: 49152
          shared_memory_per_core: {card.shared_bytes_per_core}
          shared_memory_per_block_optin: {card.shared_bytes_per_block}
          threads_per_warp: 32
          threads_per_block_limit: 1024
          threads_per_core_limit: {card.threads_per_core}
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          thread_dim_limit_x: 1024
          thread_dim_limit_y: 1024
          thread_dim_limit_z: 64
          ecc_enabled: true
        }}
    """
