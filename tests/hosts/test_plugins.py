"""Plugins of JAX that find no driver, as those for GPUs on other machines: what is printed of them."""

import pytest
from conftest import ROOT, run_script

FAILS = """
import sys

def initialize():
    raise RuntimeError("Unable to load CUDA.\\nIs it installed?")
"""


@pytest.fixture
def plugins(tmp_path) -> dict[str, str]:
    """The environment of a process that finds two of them, by either of JAX's ways; it has no JAX_PLATFORMS."""
    path = tmp_path / "packages"
    (path / "jax_plugins" / "failing_one").mkdir(parents=True)
    (path / "jax_plugins" / "failing_one" / "__init__.py").write_text(FAILS)
    (path / "failing_two.py").write_text(FAILS)
    (path / "failing-1.0.dist-info").mkdir()
    (path / "failing-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: failing\nVersion: 1.0\n")
    (path / "failing-1.0.dist-info" / "entry_points.txt").write_text("[jax_plugins]\ntwo = failing_two\n")
    return {"PYTHONPATH": f"{path}:{ROOT}", "JAX_PLATFORMS": ""}


START = """
import sys
from largebatch import terminal
from largebatch.hosts.start import start_jax
terminal.log_to_stderr()
start_jax(sys.argv[1])
import jax
print(jax.local_device_count(), jax.default_backend())
"""


@pytest.mark.parametrize(("platform", "num_told"), [("cpu", 0), ("auto", 2)])
def test_a_plugin_that_fails_is_told_in_a_line_unless_the_cpu_is_asked_for(plugins, platform, num_told):
    done = run_script("-c", START, platform, env=plugins)
    assert (done.returncode, done.stdout) == (0, "2 cpu\n"), done.stderr
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if "failing" in line]
    assert len(told) == num_told, done.stderr
    for line in told:
        assert line.endswith(": Unable to load CUDA. Is it installed?; JAX_PLATFORMS=cpu says nothing of plugins")
