"""Plugins of JAX that find no driver, as those for GPUs on other machines: what is printed of them."""

import sys

import pytest
from conftest import run_script
from test_train import small_flags

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
    return {"PYTHONPATH": str(path), "JAX_PLATFORMS": ""}


@pytest.mark.parametrize(
    ("platform", "variables"), [("cpu", {}), ("auto", {"JAX_PLATFORMS": "cpu"})], ids=["field", "variable"]
)
def test_a_run_on_the_cpu_says_nothing_of_plugins(plugins, tmp_path, session_cache, platform, variables):
    flags = small_flags(session_cache, **{"devices.platform": platform})
    done = run_script("train.py", *flags, "--workdir", tmp_path / "run", env=plugins | variables)
    assert done.returncode == 0, done.stderr
    assert "failing" not in done.stderr + done.stdout
    assert "2 cpu" in done.stdout


def test_a_plugin_that_fails_is_told_in_a_line(plugins, tmp_path, session_cache):
    done = run_script("train.py", *small_flags(session_cache), "--workdir", tmp_path / "run", env=plugins)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if "failing" in line]
    assert len(told) == 2, done.stderr
    for line in told:
        assert line.endswith(": Unable to load CUDA. Is it installed?; JAX_PLATFORMS=cpu says nothing of plugins")


@pytest.mark.full
def test_a_simulated_pod_says_nothing_of_plugins(plugins, tmp_path, session_cache):
    train = [sys.executable, "train.py", *small_flags(session_cache), "--workdir", tmp_path / "run"]
    done = run_script("-m", "largebatch.pod", "--hosts", "2", "--devices", "1", "--", *train, env=plugins)
    assert done.returncode == 0, done.stderr
    assert "failing" not in done.stderr + done.stdout


@pytest.mark.full
def test_a_study_on_the_cpu_says_nothing_of_plugins(plugins, tmp_path, session_cache):
    (tmp_path / "space.py").write_text(
        "def suggest(trial):\n    trial.suggest_categorical('optimizer.learning_rate', [0.1, 0.2])\n"
    )
    flags = small_flags(session_cache, **{"devices.platform": "cpu"})
    study = [f"--space={tmp_path / 'space.py'}", f"--study={tmp_path / 'study'}"]
    done = run_script("sweep.py", *study, *flags, env=plugins)
    assert done.returncode == 0, done.stderr
    assert "failing" not in done.stderr + done.stdout
