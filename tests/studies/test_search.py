import collections
import math
import re

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from largebatch.studies.search import SearchOptions, fixed_settings, grid, refined, tpe_sampler
from largebatch.util import UserError

SPACE = {
    "optimizer.name": CategoricalDistribution(["lamb", "adam", "sgd"]),
    "optimizer.learning_rate": FloatDistribution(1e-4, 1.0, log=True),
    "optimizer.momentum": FloatDistribution(0.5, 0.9, step=0.1),
    "batch.size": IntDistribution(16, 1024, log=True),
    "train.inner_steps": IntDistribution(1, 5),
}


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


def test_a_space_may_leave_points_of_its_grid_out():
    space = {"name": CategoricalDistribution(["adam", "sgd"]), "rate": CategoricalDistribution([1, 2, 3])}
    points = grid(space, lambda values: values["name"] == "adam" or values["rate"] > 2)
    assert [tuple(point.values()) for point in points] == [("adam", 1), ("adam", 2), ("adam", 3), ("sgd", 3)]
    with pytest.raises(UserError, match=r"includes\(\) of the space file takes no point"):
        grid(space, lambda values: False)
    with pytest.raises(UserError, match=r"--space: includes\(\): KeyError: 'nosuch'"):
        grid(space, lambda values: values["nosuch"])


@pytest.mark.parametrize(
    ("refine", "message"),
    [
        (lambda best: [best["nosuch"]], "refine(): KeyError: 'nosuch'"),
        (lambda best: [{"name": "adam"}], "allowed: a value for each of name, rate"),
        (lambda best: [{**best, "rate": 4}], "refine() gave rate 4; allowed: [1, 2, 3]"),
    ],
)
def test_what_refine_must_not_give(refine, message):
    space = {"name": CategoricalDistribution(["adam", "sgd"]), "rate": CategoricalDistribution([1, 2, 3])}
    options = SearchOptions(space, "grid", study_seed=0, settings=6, refine=refine)
    with pytest.raises(UserError, match=re.escape(message)):
        refined(options, {"name": "adam", "rate": 1})
