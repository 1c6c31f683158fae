"""The type of arithmetic that model.dtype = "auto" stands for."""

import os
import re
from collections.abc import Collection
from pathlib import Path

import jax

AUTO = "auto"
DTYPES = ("float32", "bfloat16")
# What Linux calls the instructions that multiply bfloat16. Without them XLA converts to float32 and back.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
# Those of them that are left by XLA's --xla_cpu_max_isa. Of a name that is not here XLA takes no notice.
LEFT_BY_MAX_ISA = {
    **dict.fromkeys(("SSE4_2", "AVX", "AVX2", "AVX512", "AVX512_VNNI"), frozenset()),
    "AVX512_BF16": frozenset({"avx512_bf16"}),
    **dict.fromkeys(("AMX", "AMX_FP16"), BFLOAT16_FLAGS),
}


def auto_dtype(platform: str, cpu_flags: Collection[str] = ()) -> str:
    """The dtype that "auto" stands for: bfloat16 where the hardware multiplies it, else float32.

    Args:
      platform: as JAX names it: cpu | gpu | tpu.
      cpu_flags: of a CPU, the instruction sets that XLA may use there, as Linux names them; see `usable_flags`.
    """
    if platform in ("gpu", "tpu"):
        return "bfloat16"
    return "bfloat16" if BFLOAT16_FLAGS.intersection(cpu_flags) else "float32"


def auto_dtype_here() -> str:
    """The dtype that "auto" stands for on the devices of this process."""
    return auto_dtype(jax.default_backend(), usable_flags(read_cpu_flags(), os.environ.get("XLA_FLAGS", "")))


def with_dtype(config, dtype: str):
    """A copy of a config with `dtype` in place of model.dtype "auto"; the config itself where it says another."""
    if config.model.dtype != AUTO:
        return config
    config = config.copy_and_resolve_references()
    config.model.dtype = dtype
    return config


def usable_flags(cpu_flags: Collection[str], xla_flags: str) -> frozenset[str]:
    """The instruction sets of `cpu_flags` for bfloat16 that XLA uses, started with the flags `xla_flags`."""
    given = re.findall(r"--xla_cpu_max_isa=[\"']?(\w*)", xla_flags)
    left = LEFT_BY_MAX_ISA.get(given[-1].upper(), BFLOAT16_FLAGS) if given else BFLOAT16_FLAGS
    return left.intersection(cpu_flags)


def read_cpu_flags() -> frozenset[str]:
    """The instruction sets of this machine's CPU by Linux; nothing is known elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()
