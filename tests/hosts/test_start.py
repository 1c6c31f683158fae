"""JAX's start on a CPU, beside plugins that find no driver, as those for GPUs on other machines; its memory."""

import os

import numpy as np
import pytest
from conftest import ROOT, run_script

from largebatch.hosts import memory

FAILS = """
import sys

def initialize():
    raise RuntimeError("Unable to load CUDA.\\nIs it installed?")
"""
ENTRY_POINTS = {
    "METADATA": "Metadata-Version: 2.1\nName: failing\nVersion: 1.0\n",
    "entry_points.txt": "[jax_plugins]\ntwo = failing_two\n",
}
START = """
import sys
from largebatch import terminal
from largebatch.hosts.start import start_jax
terminal.log_to_stderr()
start_jax(sys.argv[1])
import jax
print(jax.local_device_count(), jax.default_backend())
"""


@pytest.mark.parametrize(
    ("platform", "flags", "num_devices", "num_told"),
    [("cpu", "", len(os.sched_getaffinity(0)), 0), ("auto", "--xla_force_host_platform_device_count=5", 5, 2)],
)
def test_cpus_have_a_device_per_core_and_plugins_that_fail_a_line(
    tmp_path, monkeypatch, platform, flags, num_devices, num_told
):
    """The line of a plugin is left out if the CPU is asked for. Plugins are found by either of JAX's ways."""
    for path in (tmp_path / "jax_plugins" / "failing_one" / "__init__.py", tmp_path / "failing_two.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FAILS)
    for name, text in ENTRY_POINTS.items():
        (tmp_path / "failing-1.0.dist-info").mkdir(exist_ok=True)
        (tmp_path / "failing-1.0.dist-info" / name).write_text(text)
    variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "", "XLA_FLAGS": flags}
    done = run_script("-c", START, platform, env=variables | {"JAX_NUM_CPU_DEVICES": "-1"})
    assert (done.returncode, done.stdout) == (0, f"{num_devices} cpu\n"), done.stderr
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if "failing" in line]
    assert len(told) == num_told, done.stderr
    for line in told:
        assert line.endswith(": Unable to load CUDA. Is it installed?; JAX_PLATFORMS=cpu says nothing of plugins")


@pytest.mark.parametrize("shape", [(0, 3), (1000, 4097)])
def test_aligned_empty_is_writable_and_aligned(shape):
    array = memory.aligned_empty(shape, np.float32)
    assert (array.shape, array.dtype) == (shape, np.float32)
    assert array.size == 0 or array.ctypes.data % 64 == 0
    array[...] = 7
    assert (array == 7).all()
