"""A study has one dtype, decided when it is made, on whatever machines its trials are trained."""

import json

import pytest
from conftest import assert_one_line_error
from machines import run_on

import model as models
from configs import default
from largebatch.config.rules import rules
from largebatch.studies.search import SearchOptions
from largebatch.studies.space import read_space
from largebatch.studies.study import Study
from largebatch.util import BadSetting, UserError

SPACE = """
from optuna.distributions import CategoricalDistribution

def get_space():
    return {"optimizer.learning_rate": CategoricalDistribution([0.003, 0.01, 0.03])}
"""
SAID = "model.dtype: auto is float32 in this study; here it would be bfloat16"


@pytest.fixture
def sweep_on(tmp_path, session_cache):
    """A function that runs sweep.py on a machine where "auto" stands for a dtype; and the study folder."""
    (tmp_path / "space.py").write_text(SPACE)
    small = {"dataset.num_examples": 100, "dataset.image_size": 16, "train.inner_steps": 1, "train.outer_steps": 1}
    small |= {"batch.size": 64, "batch.micro_batch_size": 16, "augment.cache_dir": session_cache}
    config = [f"--config.{name}={value}" for name, value in small.items()]

    def run(dtype, *arguments, given="auto"):
        options = [*config, f"--config.model.dtype={given}"] if given else []
        space = f"--space={tmp_path / 'space.py'}"
        return run_on(dtype, "sweep.py", f"--study={tmp_path / 'study'}", space, *options, *arguments)

    run.folder = tmp_path / "study"
    return run


def dtypes_of_trials(folder) -> list[str]:
    configs = [json.loads((path / "config.json").read_text()) for path in sorted((folder / "trials").iterdir())]
    return [config["model"]["dtype"] for config in configs]


@pytest.mark.full
@pytest.mark.parametrize("again", [{"given": "auto"}, {"given": None}], ids=["same command", "folder alone"])
def test_machines_of_two_kinds_work_on_one_study(sweep_on, again):
    made = sweep_on("float32", "--trials=1")
    assert made.returncode == 0, made.stderr
    assert "model.dtype" not in made.stderr
    assert json.loads((sweep_on.folder / "study.json").read_text())["config"]["model"]["dtype"] == "float32"
    done = sweep_on("bfloat16", "--trials=3", **again)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SAID) == 1
    assert dtypes_of_trials(sweep_on.folder) == ["float32"] * 3


@pytest.mark.full
def test_an_explicit_dtype_of_a_study(sweep_on):
    assert sweep_on("bfloat16", "--trials=1").returncode == 0
    other = sweep_on("float32", "--trials=2", given="float32")
    assert_one_line_error(other, "another study: config.model.dtype: 'float32' here, 'bfloat16' there")
    same = sweep_on("float32", "--trials=2", given="bfloat16")
    assert (same.returncode, "model.dtype" in same.stderr) == (0, False), same.stderr
    explicit = sweep_on("float32", "--trials=3", given=None)
    assert (explicit.returncode, "model.dtype" in explicit.stderr) == (0, False), explicit.stderr
    assert dtypes_of_trials(sweep_on.folder) == ["bfloat16"] * 3


def test_a_trial_does_not_choose(tmp_path):
    file = tmp_path / "space.py"
    file.write_text(SPACE.replace("optimizer.learning_rate", "model.dtype").replace("[0.003", '["auto", 0.003'))
    with pytest.raises(UserError, match=r"model.dtype: 'auto' cannot be searched; allowed: float32 \| bfloat16"):
        read_space(file, rules(models.MODELS))

    def derive(config):
        config.model.dtype = "auto"

    study = Study(
        path=tmp_path,
        config=default.get_config(),
        storage="",
        search=SearchOptions({}, "grid", study_seed=0, settings=1, seeds=1),
        pruner="none",
        objective="best_val_accuracy",
        heartbeat_sec=20,
        derive=derive,
        models=models.MODELS,
        description={},
    )
    with pytest.raises(BadSetting, match=r"model.dtype: 'auto'; allowed in a trial: float32 \| bfloat16"):
        study.config_of({}, 0)
