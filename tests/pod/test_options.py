"""Options of the compiler on several hosts, of which programs that are compiled ahead of time know nothing."""

import sys
from pathlib import Path

import numpy as np
from conftest import run_script

SCRIPT = Path(__file__).parent / "options_of_hosts.py"


def test_programs_with_options_do_on_two_hosts_as_without(tmp_path):
    pod = ["-m", "largebatch.pod", "--hosts", 2, "--devices", 2, "--", sys.executable, SCRIPT]
    result = run_script(*pod, tmp_path / "results.npz")
    assert result.returncode == 0, result.stderr
    results = np.load(tmp_path / "results.npz")
    total = 0 + 1 + 2 + 3
    expected = np.arange(3) + 2 * np.arange(4)[:, None] + total + 2 * total
    for way in ("plain", "with_options"):
        np.testing.assert_array_equal(results[f"{way}/w"], expected)
        assert results[f"{way}/total"] == 2 * total
        assert results[f"{way}/shape"].tolist() == [2, 3]  # of a host
