"""Names of devices that are not here, and what is said where their compiler is missing or the wrong one."""

import importlib.metadata

import jax
import pytest

from largebatch.hardware import targets
from largebatch.util import UserError


@pytest.fixture(autouse=True)
def settings_of_jax():
    """Restore what `find_target` sets for this process."""
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.parametrize("name", ["v9:2x2", "v3", "v3:7", "v3:4x4x4x4", "h100x", "h200:0", "h200:99999", "tpu", ""])
def test_unknown_names_are_told_with_the_known_ones(name):
    with pytest.raises(UserError) as raised:
        targets.find_target(name)
    text = str(raised.value)
    assert text.startswith(f"--compile_for: {name!r}; allowed: ")
    assert "\n" not in text
    assert all(known in text for known in [*targets.TPU_GENERATIONS, *targets.CARD_NAMES])


@pytest.mark.parametrize(
    ("name", "packages"), [("v3:4x4", "libtpu"), ("h200:8", "jax-cuda12-plugin or jax-cuda13-plugin")]
)
def test_a_missing_compiler_is_named_with_what_installs_it(monkeypatch, name, packages):
    def version(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserError) as raised:
        targets.find_target(name)
    text = str(raised.value)
    assert f"needs the package {packages}, which is not installed; make compilers installs it" in text
    assert text.endswith(f".venv/compilers/bin/python train.py ... --compile_for {name}")


def test_documented_names_are_targets():
    assert set(targets.TPU_GENERATIONS) == {"v2", "v3", "v5e", "v5p", "v6e"}
    assert set(targets.CARD_NAMES) == {"a100-40gb", "a100", "a6000", "h100", "h100-pcie", "h200"}
