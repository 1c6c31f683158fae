import collections
import importlib
import math
import re

import numpy as np
import pytest
from conftest import ROOT
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

import model as models
from largebatch.config.rules import RULES
from largebatch.config.validate import validate
from largebatch.errors import UserError
from largebatch.studies.search import SearchOptions, fixed_settings, grid, tpe_sampler
from largebatch.studies.space import SpaceFile, read_space

SPACE = {
    "optimizer.name": CategoricalDistribution(["lamb", "adam", "sgd"]),
    "optimizer.learning_rate": FloatDistribution(1e-4, 1.0, log=True),
    "optimizer.momentum": FloatDistribution(0.5, 0.9, step=0.1),
    "batch.size": IntDistribution(16, 1024, log=True),
    "train.inner_steps": IntDistribution(1, 5),
}


def read(tmp_path, text: str) -> SpaceFile:
    path = tmp_path / "space.py"
    path.write_text(f"from optuna.distributions import *\n{text}\n")
    return read_space(path, RULES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", ["has no function get_space"]),
        ("def get_space():\n    return {}", ["get_space() gave {}"]),
        ("def get_space():\n    return 1 / 0", ["line 3", "ZeroDivisionError"]),
        ("def get_space(:", ["SyntaxError"]),
        (
            'def get_space():\n    return {"optimizer.learning_rat": FloatDistribution(0.1, 1)}',
            ["optimizer.learning_rat: unknown field", "did you mean 'optimizer.learning_rate'"],
        ),
        (
            'def get_space():\n    return {"optimizer.learning_rate": FloatDistribution(0, 1, log=True)}',
            ["line 3", "`low > 0` must hold"],
        ),
        (
            'def get_space():\n    return {"optimizer.momentum": FloatDistribution(0.9, 0.5)}',
            ["line 3", "low <= high"],
        ),
        ('def get_space():\n    return {"optimizer.name": CategoricalDistribution([])}', ["one or more"]),
        (
            'def get_space():\n    return {"optimizer.name": CategoricalDistribution(["sgd", "sgd"])}',
            ["comes twice"],
        ),
        (
            'def get_space():\n    return {"optimizer.name": CategoricalDistribution(["sgd", "lambb"])}',
            ["optimizer.name: 'lambb'; allowed: sgd | adam | adamw | nadamw | lamb | lars | muon | soap"],
        ),
        (
            'def get_space():\n    return {"optimizer.momentum": FloatDistribution(0.5, 1.5)}',
            ["optimizer.momentum: 1.5"],
        ),
        ('def get_space():\n    return {"optimizer.momentum": [0.5]}', ["[0.5]; allowed: a FloatDistribution"]),
        (
            'def get_space():\n    return {"seed": IntDistribution(0, 5)}',
            ["seed: cannot be searched (use --seeds)"],
        ),
        (
            'def get_space():\n    return {"log.tensorboard": CategoricalDistribution([True])}',
            ["cannot be searched"],
        ),
    ],
)
def test_a_bad_space_is_named_in_one_line(tmp_path, text, words):
    with pytest.raises(UserError) as error:
        read(tmp_path, text)
    message = str(error.value)
    assert "space.py" in message
    assert "\n" not in message
    for word in words:
        assert word in message


def test_all_problems_of_a_space_are_listed(tmp_path):
    fields = (
        '{"modle.name": CategoricalDistribution(["convnet"]), "batch.size": CategoricalDistribution([0, "ful"])}'
    )
    with pytest.raises(UserError, match=r"modle\.name.*batch\.size: 0;.*batch\.size: 'ful'"):
        read(tmp_path, f"def get_space():\n    return {fields}")


def test_the_cap_on_images_cannot_be_searched(tmp_path):
    text = 'def get_space():\n    return {"dataset.max_image_pixels": CategoricalDistribution([100, 10000])}'
    with pytest.raises(UserError, match=r"dataset.max_image_pixels: cannot be searched"):
        read(tmp_path, text)


def test_a_missing_space_file(tmp_path):
    with pytest.raises(UserError, match="is not a file"):
        read_space(tmp_path / "none.py", RULES)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*.py")), ids=lambda path: path.stem)
def test_the_spaces_that_come_along_are_sound(path):
    """Every trial of their grids has a config that would start."""
    space_file = read_space(path, RULES)
    space = space_file.space
    (config_path,) = re.findall(r"--config (configs/\w+)\.py", path.read_text())
    if any(getattr(distribution, "step", 1) is None for distribution in space.values()):
        settings = fixed_settings(SearchOptions(space, "random", study_seed=0, settings=20))
    else:
        settings = grid(space, space_file.includes)
    assert len(settings) > 1
    for values in settings:
        config = importlib.import_module(config_path.replace("/", ".")).get_config()
        config.update_from_flattened_dict(values)
        space_file.derive(config)
        validate(config, models.OPTIONS)


def test_grid_has_every_combination_once_first_field_slowest():
    space = {
        "optimizer.name": CategoricalDistribution(["lamb", "sgd"]),
        "optimizer.momentum": FloatDistribution(0.5, 0.9, step=0.2),
        "train.inner_steps": IntDistribution(1, 5, step=4),
    }
    points = grid(space)
    assert [point["optimizer.name"] for point in points] == ["lamb"] * 6 + ["sgd"] * 6
    assert {(p["optimizer.momentum"], p["train.inner_steps"]) for p in points} == {
        (m, n) for m in (0.5, 0.7, 0.9) for n in (1, 5)
    }
    assert all(space[f]._contains(space[f].to_internal_repr(v)) for point in points for f, v in point.items())
    assert fixed_settings(SearchOptions(space, "grid", study_seed=0, settings=8)) == points[:8]


def test_a_range_is_no_grid():
    with pytest.raises(UserError, match=r"optimizer.learning_rate is a range"):
        grid(SPACE)
    with pytest.raises(UserError, match=r"over 10,000 points; allowed: fewer"):
        grid({"batch.size": IntDistribution(16, 16384)})


@pytest.mark.parametrize("sampler", ["random", "quasi-random"])
def test_points_follow_from_seed_and_number_and_fill_the_space(sampler):
    points = fixed_settings(SearchOptions(SPACE, sampler, study_seed=3, settings=256))
    assert points[:8] == fixed_settings(SearchOptions(SPACE, sampler, study_seed=3, settings=8))
    assert points[7] != fixed_settings(SearchOptions(SPACE, sampler, study_seed=4, settings=8))[7]
    for field, values in SPACE.items():
        assert all(values._contains(values.to_internal_repr(point[field])) for point in points), field
    counts = collections.Counter(point["train.inner_steps"] for point in points)
    assert min(counts.values()) > 256 / 5 / 2  # the ends as often as the others
    logs = np.sort([math.log10(point["optimizer.learning_rate"]) for point in points])
    uniform = np.linspace(-4, 0, 256)
    assert np.abs(logs - uniform).max() < (0.5 if sampler == "random" else 0.05)


def test_tpe_does_not_repeat_its_draws_after_a_restart():
    draws = [tpe_sampler(0, setting)._rng.rng.random() for setting in (0, 1, 1)]
    assert draws[0] != draws[1] == draws[2]


def test_a_space_may_leave_points_of_its_grid_out(tmp_path):
    space = {"name": CategoricalDistribution(["adam", "sgd"]), "rate": CategoricalDistribution([1, 2, 3])}
    points = grid(space, lambda values: values["name"] == "adam" or values["rate"] > 2)
    assert [tuple(point.values()) for point in points] == [("adam", 1), ("adam", 2), ("adam", 3), ("sgd", 3)]
    with pytest.raises(UserError, match=r"includes\(\) of the space file takes no point"):
        grid(space, lambda values: False)
    path = tmp_path / "space.py"
    path.write_text(
        "from optuna.distributions import FloatDistribution\nincludes = 3\n"
        "def get_space():\n    return {'optimizer.momentum': FloatDistribution(0.1, 0.9)}\n"
    )
    with pytest.raises(UserError, match=r"includes is 3; allowed: a function"):
        read_space(path, RULES)
    with pytest.raises(UserError, match=r"--space: includes\(\): KeyError: 'nosuch'"):
        grid(space, lambda values: values["nosuch"])
