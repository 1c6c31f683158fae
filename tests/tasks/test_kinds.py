"""Which of two scores is better, by the task."""

import math

import pytest

from largebatch.tasks.kinds import CLASSIFICATION, KINDS, kind_of

DEPTH = KINDS["depth"]


def test_scores_go_the_way_of_their_task():
    assert CLASSIFICATION.is_better(0.6, 0.5)
    assert not CLASSIFICATION.is_better(0.5, 0.5)
    assert DEPTH.is_better(0.5, 0.6)
    assert CLASSIFICATION.best([None, 0.0, 0.3]) == 0.3
    assert DEPTH.best([0.3, None, 0.0]) == 0.0
    assert DEPTH.best([None]) is None


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_nothing_and_nan_are_worse_than_any_score(kind):
    assert kind.is_better(0.0, None)
    assert not kind.is_better(math.nan, 0.5)
    assert kind.is_better(0.5, math.nan)
    assert not kind.reaches(None, 0.0)


def test_targets_are_reached_from_either_side():
    assert CLASSIFICATION.reaches(0.9, 0.9)
    assert not CLASSIFICATION.reaches(0.89, 0.9)
    assert DEPTH.reaches(0.05, 0.06)
    assert not DEPTH.reaches(0.07, 0.06)
    assert CLASSIFICATION.reaches(0.0, 0.0)


@pytest.mark.parametrize("config", [{}, {"task": None}, {"task": {"name": "later"}}])
def test_configs_without_a_known_task_are_of_classes(config):
    assert kind_of(config) == CLASSIFICATION
    assert kind_of({"task": {"name": "depth"}}) == DEPTH
