import importlib
import re

import pytest
from conftest import ROOT, typed

from largebatch.config.dicts import RULES
from largebatch.studies.search import SearchOptions, fixed_settings, grid
from largebatch.studies.space import SpaceFile, read_space
from largebatch.util import UserError


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
            ["optimizer.name: 'lambb'; allowed: lamb | sgd | lars | adam | adamw | nadamw | muon | soap"],
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
    if space_file.refine:
        settings += [further for best in settings for further in space_file.refine(best)]
    assert len(settings) > 1
    for values in settings:
        config = importlib.import_module(config_path.replace("/", ".")).get_config()
        config.update_from_flattened_dict(values)
        space_file.derive(config)
        typed(config)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("includes = 3", "includes is 3; allowed: a function"),
        ("refine = 3", "refine is 3; allowed: a function"),
        ("GROUPS = 'batch.size'", "GROUPS is 'batch.size'; allowed: a tuple of fields of get_space()"),
        ("GROUPS = ('batch.size',)", "GROUPS is ('batch.size',); allowed: a tuple of fields of get_space()"),
    ],
)
def test_what_a_space_file_defines_beside_its_space(tmp_path, line, message):
    path = tmp_path / "space.py"
    path.write_text(
        f"from optuna.distributions import FloatDistribution\n{line}\n"
        "def get_space():\n    return {'optimizer.momentum': FloatDistribution(0.1, 0.9)}\n"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        read_space(path, RULES)


def test_tuples_in_a_space_are_checked_as_they_stand_there(tmp_path):
    """A database gives them back as lists."""
    text = 'def get_space():\n    return {"schedule.decay_steps": CategoricalDistribution(%s)}'
    space = read(tmp_path, text % "[(1,), (1, 2), ()]").space
    assert grid(space) == [{"schedule.decay_steps": steps} for steps in ([1], [1, 2], [])]
    with pytest.raises(UserError, match=r"schedule\.decay_steps: \(0,\); allowed: a tuple of integers >= 1"):
        read(tmp_path, text % "[(0,), (1, 2)]")
