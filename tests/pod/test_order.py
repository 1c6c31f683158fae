"""Which examples form a step, on the hosts of real pods."""

import sys
from pathlib import Path

import numpy as np
import numpy_order
import pytest
from conftest import run_script

SCRIPT = Path(__file__).parent / "order_of_hosts.py"
ORIGINALS, SHARDS, VIEWS, SEED, EPOCHS = 601, 480, 8, 5, 3


@pytest.mark.full
@pytest.mark.parametrize(("hosts", "devices", "batch_size"), [(2, 4, 100), (4, 8, 512)])
def test_updates_have_the_examples_of_the_numpy_order_on_any_pod(hosts, devices, batch_size, tmp_path):
    expected = numpy_order.order(ORIGINALS, SHARDS, VIEWS, SEED, EPOCHS)
    num_steps = len(expected) // batch_size
    expected = np.sort(expected[: num_steps * batch_size].reshape(num_steps, batch_size))
    pod = ["-m", "largebatch.pod", "--hosts", hosts, "--devices", devices, "--", sys.executable, SCRIPT]
    result = run_script(*pod, tmp_path / "ids.npy", ORIGINALS, SHARDS, VIEWS, SEED, EPOCHS, batch_size)
    assert result.returncode == 0, result.stderr
    ids = np.sort(np.load(tmp_path / "ids.npy"))
    np.testing.assert_array_equal(ids[:, :batch_size], expected)
    assert (ids[:, batch_size:] == ORIGINALS * VIEWS).all()
