"""What a study may be, and what it may become when it is resumed."""

import json
import re

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


def refine_none(best):
    return []


def refine_badly(best):
    return [{**best, "optimizer.nam": "sgd"}]


@pytest.mark.parametrize(
    ("options", "fields", "refine", "message"),
    [
        ({"trials": 9}, {}, None, "--trials: 9 settings; allowed: up to 3, the whole grid"),
        ({"trials": 3, "seeds": 2}, {}, None, "--trials: 3; allowed: a multiple of --seeds, 2"),
        ({"sampler": "random"}, {}, None, "--trials: missing"),
        ({"best_seeds": 1}, {}, None, "--best_seeds: 1; allowed: more than --seeds, 1"),
        ({"objective": "steps_to_target"}, {}, None, "needs train.target_accuracy"),
        ({"pruner": "hyperband"}, {"train__target_accuracy": 0.9}, None, "--pruner: hyperband; allowed"),
        ({"storage": "nonsense"}, {}, None, "--storage: 'nonsense'; allowed: a database URL"),
        ({"trials": 3, "sampler": "random"}, {}, refine_none, "--sampler: random; allowed with a space that has"),
        ({"trials": 2}, {}, refine_none, "--trials: 2; allowed with a space that has refine(): none"),
        ({}, {}, refine_badly, "optimizer.nam: unknown field"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, fields, refine, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make_study(config_with(**fields), tmp_path, space_of(RATES, refine=refine), **options)
    assert not list(tmp_path.iterdir())


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
    config = study.config_of({"schedule.name": "step", "schedule.decay_steps": [1, 2]}, 0)
    assert config.schedule.decay_steps == (1, 2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: undefined, r"--space: \{.*NameError: name 'undefined'"),  # noqa: F821
        (lambda: "auto", r"model.dtype: 'auto'; allowed in a trial: float32 \| bfloat16"),
    ],
)
def test_a_faulty_derive_is_one_line(tmp_path, value, message):
    def derive(config):
        config.model.dtype = value()

    with pytest.raises(BadSetting, match=message):
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


@pytest.mark.parametrize(("groups", "count"), [((), 2), (("optimizer.name", "batch.size"), 4)])
def test_best_settings_are_of_each_batch_size_or_combination_of_groups(tmp_path, groups, count):
    choices = {"optimizer.name": ["sgd", "lamb"], "batch.size": [64, 128], **RATES}
    study = make_study(config_with(), tmp_path, space_of(choices, groups=groups))
    assert len(set(map(study.group_of, study.settings))) == count


def test_what_may_change_when_a_study_is_resumed(tmp_path):
    study = make_study(config_with(), tmp_path, space_of(RATES))
    may_change = {"seeds": 3, "trials": 2, "best_seeds": 4, "dtype_is_auto": True}
    refuse_another(tmp_path, study.description, study.description | may_change)
    message = f"--study: {tmp_path} holds another study: order_version: 4 here, 1 there; sampler: 'grid' here"
    with pytest.raises(UserError, match=message):
        refuse_another(tmp_path, study.description, study.description | {"order_version": 1, "sampler": "tpe"})


# ---- one dtype, whatever machines its trials are trained on ----------------------------------------------


@pytest.mark.full
def test_machines_of_two_kinds_work_on_one_study_by_its_dtype(tmp_path, session_cache):
    (tmp_path / "space.py").write_text(
        'def suggest(trial):\n    trial.suggest_categorical("optimizer.learning_rate", [0.003, 0.01, 0.03])\n'
    )
    small = {"dataset.num_examples": 100, "dataset.image_size": 16, "train.inner_steps": 1, "train.outer_steps": 1}
    small |= {"batch.size": 64, "batch.micro_batch_size": 16, "augment.cache_dir": session_cache}
    config = [f"--config.{name}={value}" for name, value in small.items()]

    def sweep_on(dtype, *arguments, given="auto"):
        options = [*config, f"--config.model.dtype={given}"] if given else []
        space = f"--space={tmp_path / 'space.py'}"
        return run_on(dtype, "sweep.py", f"--study={tmp_path / 'study'}", space, *options, *arguments)

    made = sweep_on("float32", "--trials=1")
    assert (made.returncode, "model.dtype" in made.stderr) == (0, False), made.stderr
    assert json.loads((tmp_path / "study" / "study.json").read_text())["config"]["model"]["dtype"] == "float32"
    done = sweep_on("bfloat16", "--trials=2", given=None)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SAID) == 1
    other = sweep_on("float32", "--trials=2", given="bfloat16")
    assert_one_line_error(other, "another study: config.model.dtype: 'bfloat16' here, 'float32' there")
    configs = [json.loads(path.read_text()) for path in (tmp_path / "study" / "trials").glob("*/config.json")]
    assert [config["model"]["dtype"] for config in configs] == ["float32"] * 2
