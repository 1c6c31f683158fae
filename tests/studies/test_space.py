"""Space files: what they may say, and the settings that samplers make of them."""

import collections
import importlib
import math
import re

import numpy as np
import optuna
import pytest
from conftest import ROOT, typed
from made_studies import RULES, space_of

from largebatch.studies.space import Space, read_space, settings_of, suggest, tpe_sampler
from largebatch.util import UserError


def read(tmp_path, text: str) -> Space:
    path = tmp_path / "space.py"
    path.write_text(f"{text}\n")
    return read_space(path, RULES)


def space_with(call: str) -> str:
    return f"def suggest(trial):\n    trial.{call}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "suggest is None; allowed: a function"),
        ("def suggest(trial):\n    pass\nrefine = 3", "refine is 3; allowed: a function"),
        ("def suggest(trial):\n    pass\nGROUPS = ('batch',)", "GROUPS is ('batch',); allowed: a tuple"),
        ("\n1 / 0", "space.py, line 2: ZeroDivisionError"),
    ],
)
def test_a_bad_space_file_is_named_in_one_line(tmp_path, text, message):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        read(tmp_path, text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("nothing()", "AttributeError: '_CheckedTrial' object has no attribute 'nothing'"),
        (
            'suggest_categorical("optimizer.learning_rat", [0.1])',
            "unknown field (did you mean 'optimizer.learning_rate'?)",
        ),
        ('suggest_categorical("optimizer.name", ["sgd", "sgd"])', "allowed: different choices, at least one"),
        ('suggest_categorical("optimizer.name", ["sgd", "lambb"])', "optimizer.name: 'lambb'; allowed: lamb | sgd"),
        ('suggest_float("optimizer.momentum", 0.5, 1.5, step=0.5)', "optimizer.momentum: 1.5; allowed"),
        ('suggest_int("seed", 0, 5)', "seed: cannot be searched (use --seeds)"),
        ('suggest_categorical("log.tensorboard", [True])', "log.tensorboard: cannot be searched"),
        ('suggest_categorical("model.dtype", ["auto"])', "model.dtype: 'auto' cannot be searched"),
        ('suggest_float("optimizer.learning_rate", 0.1, 1.0)', "optimizer.learning_rate is a range; allowed"),
        ('suggest_int("train.inner_steps", 1, 8, log=True)', "train.inner_steps is logarithmic; allowed"),
        ('suggest_int("train.inner_steps", 1, 99999)', "over 10,000 settings; allowed: fewer"),
        ('suggest_categorical("schedule.decay_steps", [(0,), (1, 2)])', "(0,); allowed: a tuple of integers >= 1"),
    ],
)
def test_a_bad_suggestion_is_named_in_one_line(tmp_path, call, message):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        settings_of(read(tmp_path, space_with(call)), "grid", 0, None)
    assert "\n" not in str(error.value)


def test_a_grid_has_every_combination_once_with_the_first_field_slowest():
    def suggest(trial):
        optimizer = trial.suggest_categorical("optimizer.name", ["lamb", "sgd"])
        if optimizer == "sgd":
            trial.suggest_categorical("optimizer.nesterov", [False, True])
        trial.suggest_float("optimizer.momentum", 0.5, 0.9, step=0.2)
        trial.suggest_int("train.inner_steps", 1, 5, step=4)

    settings, distributions = settings_of(Space(suggest, RULES), "grid", 0, None)
    rest = [[momentum, steps] for momentum in (0.5, 0.7, 0.9) for steps in (1, 5)]
    expected = [[*first, *more] for first in (["lamb"], ["sgd", False], ["sgd", True]) for more in rest]
    assert [list(setting.values()) for setting in settings] == expected
    for setting in settings:
        for field, value in setting.items():
            assert distributions[field]._contains(distributions[field].to_internal_repr(value))
    assert settings_of(Space(suggest, RULES), "grid", 0, 8) == (settings[:8], distributions)
    with pytest.raises(UserError, match="--trials: 19 settings; allowed: up to 18"):
        settings_of(Space(suggest, RULES), "grid", 0, 19)


@pytest.mark.parametrize("sampler", ["random", "quasi-random"])
def test_settings_follow_from_seed_and_number_and_fill_the_space(sampler):
    def suggest(trial):
        trial.suggest_categorical("optimizer.name", ["lamb", "adam", "sgd"])
        trial.suggest_float("optimizer.learning_rate", 1e-4, 1.0, log=True)
        trial.suggest_int("train.inner_steps", 1, 5)

    space = Space(suggest, RULES)
    settings, distributions = settings_of(space, sampler, 3, 128)
    assert settings[:8] == settings_of(space, sampler, 3, 8)[0]
    assert settings[7] != settings_of(space, sampler, 4, 8)[0][7]
    rates = distributions["optimizer.learning_rate"]
    assert (rates.low, rates.log) == (1e-4, True)
    counts = collections.Counter(setting["train.inner_steps"] for setting in settings)
    assert min(counts.values()) > 128 / 5 / 2  # the ends as often as the others
    logs = np.sort([math.log10(setting["optimizer.learning_rate"]) for setting in settings])
    assert np.abs(logs - np.linspace(-4, 0, 128)).max() < (0.7 if sampler == "random" else 0.1)


def test_tpe_does_not_repeat_its_draws_after_a_restart():
    draws = [tpe_sampler(0, index)._rng.rng.random() for index in (0, 1, 1)]
    assert draws[0] != draws[1] == draws[2]


def test_choices_that_are_no_scalars_are_suggested_by_a_database_too():
    space = space_of({"schedule.decay_steps": [(1,), (1, 2)], "optimizer.clip_norm": [None, 1.0]})
    trial = optuna.create_study().ask({})
    setting = suggest(space, trial)
    assert setting["schedule.decay_steps"] in ((1,), (1, 2))
    assert trial.params["schedule.decay_steps"] in ("[1]", "[1, 2]")


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*.py")), ids=lambda path: path.stem)
def test_the_spaces_that_come_along_are_sound(path):
    """Every trial of their grids has a config that would start."""
    space = read_space(path, RULES)
    (config_path,) = re.findall(r"--config (configs/\w+)\.py", path.read_text())
    sampler, count = ("random", 20) if "--sampler" in path.read_text() else ("grid", None)
    settings, _ = settings_of(space, sampler, 0, count)
    assert len(settings) > 1
    settings += [refined for setting in settings for refined in space.refined(setting)]
    for setting in settings:
        config = importlib.import_module(config_path.replace("/", ".")).get_config()
        config.update_from_flattened_dict(setting)
        if space.derive:
            space.derive(config)
        typed(config)
