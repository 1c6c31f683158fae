"""What README promises a newcomer, on a fresh clone.

The environment is this one: that `make` makes it from nothing is shown where `.ci/run` starts.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.mark.full
@pytest.mark.timeout(900)
def test_make_train_on_a_fresh_clone_reaches_the_accuracy(tmp_path):
    clone, environment_made = tmp_path / "clone", tmp_path / "venv" / ".run"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    # The last three come from `make test ARGS=...`.
    inherited = ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "MAKEFLAGS", "MAKEOVERRIDES", "ARGS")
    environment = {k: v for k, v in os.environ.items() if k not in inherited}
    environment["HOME"] = str(tmp_path / "home")
    assert "make train" in (clone / "README.md").read_text()
    environment_made.parent.mkdir()
    environment_made.touch()
    here = [f"VENV={environment_made.parent}", f"BIN={Path(sys.executable).parent}"]
    result = subprocess.run(["make", "train", *here], cwd=clone, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    workdir = re.search(r"run folder\s+(\S+)", result.stdout).group(1)
    summary = json.loads((clone / workdir / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["final_val_accuracy"] >= 0.95
    assert f"{summary['best_val_accuracy']:.4f}" in result.stdout
