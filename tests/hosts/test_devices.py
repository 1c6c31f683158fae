import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, on_devices, run_script

from largebatch.hosts import memory


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, len(os.sched_getaffinity(0))),
        ({"JAX_NUM_CPU_DEVICES": "3"}, 3),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=5"}, 5),
    ],
)
def test_a_cpu_is_one_device_per_core_unless_told_otherwise(variables, expected):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    code = "import jax; from largebatch.hosts.start import start_jax; start_jax(); print(jax.device_count())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == expected


@pytest.mark.parametrize("shape", [(0, 3), (5,), (7, 11), (1000, 4097)])
def test_aligned_empty_is_writable_and_aligned(shape):
    for dtype in (np.uint8, np.float32):
        array = memory.aligned_empty(shape, dtype)
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.size == 0 or array.ctypes.data % 64 == 0
        array[...] = 7
        assert (array == 7).all()


@pytest.mark.parametrize(
    "wrapper", [[], ["-m", "largebatch.pod", "--hosts", "1", "--devices", "2", "--", sys.executable]]
)
def test_the_callers_xla_flags_reach_what_a_test_starts(wrapper, monkeypatch):
    code = "import os, jax; print(os.environ['XLA_FLAGS'].split(), jax.device_count())"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    result = run_script(*wrapper, "-c", code)
    assert result.returncode == 0, result.stderr
    assert "'--xla_cpu_max_isa=AVX2'" in result.stdout
    assert result.stdout.endswith("] 2\n")
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag")  # XLA itself has read it
    assert "xla_no_such_flag" in run_script(*wrapper, "-c", code).stderr


def test_the_suite_leaves_the_callers_xla_flags():
    code = "import conftest, os, jax; print(os.environ['XLA_FLAGS'], jax.device_count())"
    variables = {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2", "PYTHONPATH": str(ROOT / "tests")}
    for count in (1, 4):
        result = run_script("-c", code, env=on_devices(count) | variables)
        assert result.stdout == "--xla_cpu_max_isa=AVX2 8\n", result.stderr
