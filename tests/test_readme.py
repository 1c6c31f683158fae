"""What README promises a newcomer, on a fresh clone.

The environment is this one: that `make` makes it from nothing is shown where `.ci/run` starts.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, find_set
from test_sources import mean_colour_accuracy

from configs import default
from largebatch.data.sources.splits import split_indices


def test_make_keeps_its_variables_to_itself(tmp_path):
    """A job of Slurm that finds PYTHON in its environment would run by it."""
    for name in (".run", ".dev"):
        (tmp_path / name).touch()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "python"
    program.write_text(f'#!/bin/sh\nenv > {tmp_path}/environment\necho "$@" > {tmp_path}/arguments\n')
    program.chmod(0o755)
    given = {"VENV": str(tmp_path), "PYTHON": "python3.13", "ARGS": "-x", "DATA": "data"}
    environment = {name: value for name, value in os.environ.items() if name not in (*given, "MAKEFLAGS")}
    command = ["make", "test", *(f"{name}={value}" for name, value in given.items())]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "arguments").read_text().endswith(" -x\n")
    handed_on = {line.partition("=")[0] for line in (tmp_path / "environment").read_text().splitlines()}
    assert "XLA_FLAGS" in handed_on
    assert not handed_on & set(given)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_make_train_on_a_fresh_clone_learns_what_colour_does_not_tell(tmp_path):
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

    fields = default.get_config().dataset
    dataset = find_set(fields.name, num_examples=fields.num_examples, split_seed=fields.split_seed)
    splits = split_indices(dataset.ids, fields.split_seed)
    train, val = (
        (dataset.images(splits[name]).astype(np.float64), dataset.labels[splits[name]]) for name in ("train", "val")
    )
    assert mean_colour_accuracy(train, val) < 0.6
    with np.load(clone / workdir / "predictions.npz", allow_pickle=False) as predictions:
        assert predictions["labels"].tolist() == val[1].tolist()
