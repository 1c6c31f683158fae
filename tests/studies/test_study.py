"""What a study may be, and what it may become when it is resumed."""

import json

import pytest
from conftest import assert_one_line_error
from machines import run_on
from made_studies import make_study, space_of

from configs import default
from largebatch.studies.study import refuse_another
from largebatch.util import BadSetting, UserError

RATES = {"optimizer.learning_rate": [0.003, 0.01, 0.03]}
SAID = "model.dtype: auto is float32 in this study; here it would be bfloat16"


def config_with(**fields):
    config = default.get_config()
    config.model.dtype = "float32"
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in fields.items()})
    return config


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        ({"trials": 9}, {}, "--trials: 9 settings; allowed: up to 3, the whole grid"),
        ({"trials": 3, "seeds": 2}, {}, "--trials: 3; allowed: a multiple of --seeds, 2"),
        ({"sampler": "random"}, {}, "--trials: missing"),
        ({"best_seeds": 1}, {}, "--best_seeds: 1; allowed: more than --seeds, 1"),
        ({"objective": "steps_to_target"}, {}, "needs train.target_accuracy"),
        ({"pruner": "hyperband"}, {"train__target_accuracy": 0.9}, "--pruner: hyperband; allowed"),
        ({"storage": "nonsense"}, {}, "--storage: 'nonsense'; allowed: a database URL"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, fields, message):
    with pytest.raises(UserError, match=message):
        make_study(config_with(**fields), tmp_path, space_of(RATES), **options)
    assert not list(tmp_path.iterdir())


def test_a_space_with_refine_is_a_whole_grid(tmp_path):
    space = space_of(RATES, refine=lambda best: [])
    with pytest.raises(UserError, match=r"--sampler: random; allowed with a space that has refine\(\): grid"):
        make_study(config_with(), tmp_path, space, sampler="random", trials=3)
    with pytest.raises(UserError, match=r"--trials: 2; allowed with a space that has refine\(\): none"):
        make_study(config_with(), tmp_path, space, trials=2)


@pytest.mark.parametrize(
    ("fields", "objective"), [({}, "best_val_accuracy"), ({"train__target_accuracy": 0.9}, "steps_to_target")]
)
def test_the_objective_that_a_config_suggests(tmp_path, fields, objective):
    study = make_study(config_with(**fields), tmp_path, space_of(RATES))
    assert study.description["objective"] == objective
    assert study.maximizes == (objective == "best_val_accuracy")


def test_integers_in_place_of_words_and_tuples_from_a_database(tmp_path):
    choices = {"batch.size": [64, "full"], "batch.micro_batch_size": [8]}
    study = make_study(config_with(batch__size="full"), tmp_path, space_of(choices))
    assert study.config_of({"batch.size": 64, "batch.micro_batch_size": 8}, 0).batch.size == 64
    study = make_study(config_with(batch__size=64), tmp_path, space_of(choices))
    assert study.config_of({"batch.size": "full", "batch.micro_batch_size": 8}, 0).batch.size == "full"
    config = study.config_of({"schedule.name": "step", "schedule.decay_steps": [1, 2]}, 0)
    assert config.schedule.decay_steps == (1, 2)


def test_a_faulty_derive_is_one_line(tmp_path):
    def derive(config):
        config.train.inner_steps = undefined  # noqa: F821

    with pytest.raises(BadSetting, match=r"--space: \{.*NameError: name 'undefined'"):
        make_study(config_with(), tmp_path, space_of(RATES, derive=derive))


def test_a_trial_does_not_choose_its_dtype(tmp_path):
    def derive(config):
        config.model.dtype = "auto"

    with pytest.raises(BadSetting, match=r"model.dtype: 'auto'; allowed in a trial: float32 \| bfloat16"):
        make_study(config_with(), tmp_path, space_of(RATES, derive=derive))


def test_run_folders_are_named_by_their_settings(tmp_path):
    study = make_study(config_with(), tmp_path, space_of(RATES))
    settings = [{"optimizer.name": "sgd", "batch.size": 64}, {"optimizer.name": "sgd", "optimizer.momentum": 64}]
    settings += [{"schedule.decay_steps": (1, 2)}, {"batch.trace": "../a b/" + 99 * "c"}]
    names = [study.folder_of(setting, 1).name for setting in settings]
    assert names[0].startswith("sgd-64-")
    assert names[1].startswith("sgd-64-")
    assert len(set(names)) == 4
    assert all(name.endswith("-1") and len(name) < 80 and "/" not in name for name in names)
    assert study.folder_of({"schedule.decay_steps": [1, 2]}, 1).name == names[2]  # as a database returns it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": 3, "trials": 2, "best_seeds": 4, "dtype_is_auto": True}, None),
        ({"order_version": 1}, "order_version: 4 here, 1 there"),
        ({"sampler": "random"}, "sampler: 'grid' here, 'random' there"),
        ({"fields": ["batch.size"]}, "fields: "),
    ],
)
def test_what_may_change_when_a_study_is_resumed(tmp_path, change, message):
    study = make_study(config_with(), tmp_path, space_of(RATES))
    recorded = study.description | change
    if message is None:
        refuse_another(tmp_path, study.description, recorded)
        return
    with pytest.raises(UserError, match=f"--study: {tmp_path} holds another study: {message}"):
        refuse_another(tmp_path, study.description, recorded)


# ---- one dtype, whatever machines its trials are trained on ----------------------------------------------


@pytest.fixture
def sweep_on(tmp_path, session_cache):
    """A function that runs sweep.py on a machine where "auto" stands for a dtype; and the study folder."""
    (tmp_path / "space.py").write_text(
        'def suggest(trial):\n    trial.suggest_categorical("optimizer.learning_rate", [0.003, 0.01, 0.03])\n'
    )
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
    assert dtypes_of_trials(sweep_on.folder) == ["bfloat16"] * 2
