"""Machines in place of this one: CPUs with and without bfloat16 instructions, and targets of compilers."""

import importlib.util
from dataclasses import dataclass

import pytest
from conftest import ROOT, run_script

from largebatch.hardware import chips
from largebatch.hardware.targets import Target, find_target
from largebatch.util import UserError

# The environment of processes that compile in a third of the time.
QUICKLY = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "PYTHONPATH": str(ROOT)}
FLAGS = {"float32": frozenset({"avx2"}), "bfloat16": frozenset({"avx2", "avx512_bf16"})}
# Runs a script on such a machine: python -c SCRIPT_ON DTYPE_OF_HOST_0,DTYPE_OF_HOST_1,... train.py ...
SCRIPT_ON = """
import os, runpy, sys
from largebatch.hardware import chips
_, machines, *sys.argv = sys.argv
chosen = machines.split(",")[int(os.environ.get("LARGEBATCH_HOST_INDEX", 0))]
chips.read_cpu_flags = lambda: {"float32": {"avx2"}, "bfloat16": {"avx2", "avx512_bf16"}}[chosen]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def become(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Make this machine one where "auto" stands for `dtype`."""
    monkeypatch.setattr(chips, "read_cpu_flags", lambda: FLAGS[dtype])


def run_on(dtype: str, *arguments, **options):
    """`run_script` on such a machine."""
    return run_script("-c", SCRIPT_ON, dtype, *arguments, **options)


def target_or_skip(name: str) -> Target:
    """Return the devices to compile for; skip the test where their compiler is not installed."""
    try:
        return find_target(name)
    except UserError as error:
        if "not installed" in str(error):
            pytest.skip(str(error))
        raise


# ---- what is compiled for them ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A config file, with fields that differ from it."""

    config: str
    fields: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        """Return the name of a test."""
        return " ".join([self.config, *(f"{field}={value}" for field, value in self.fields)])

    def load(self):
        """Load the config."""
        path = ROOT / "configs" / f"{self.config}.py"
        spec = importlib.util.spec_from_file_location(self.config, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.get_config()
        config.update_from_flattened_dict(dict(self.fields))
        return config


def all_cases(target: str) -> list[Case]:
    """Return every config whose data are known, and ImageNet with four times the batch.

    ImageNet is streamed to a single card, which cannot hold it.
    """
    large = "imagenet_resnet50"
    fields = (("augment.storage", "streamed"),) if target == "h200" else ()
    names = [path.stem for path in sorted((ROOT / "configs").glob("*.py")) if path.stem != "own_images"]
    cases = [Case(name, fields if name == large else ()) for name in names]
    return [*cases, Case(large, (("batch.size", 32_768), *fields))]
