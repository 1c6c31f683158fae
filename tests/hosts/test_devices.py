import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

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
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == expected


@pytest.mark.parametrize("shape", [(0, 3), (5,), (1000, 4097)])
def test_aligned_empty_is_writable_and_aligned(shape):
    array = memory.aligned_empty(shape, np.float32)
    assert (array.shape, array.dtype) == (shape, np.float32)
    assert array.size == 0 or array.ctypes.data % 64 == 0
    array[...] = 7
    assert (array == 7).all()
