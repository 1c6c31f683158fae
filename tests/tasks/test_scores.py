"""Scores of masks and depths over a whole split, against NumPy."""

import math

import jax
import numpy as np
import pytest

from largebatch.config.fields import TaskConfig
from largebatch.predictions import tables
from largebatch.tasks import planes, scores
from largebatch.tasks.kinds import CLASSIFICATION, KINDS
from largebatch.tasks.planes import PixelTargets
from largebatch.tasks.task import make_task
from largebatch.training.evaluation import from_halves, in_halves

RNG = np.random.default_rng(0)
CLASSES = ("background", "tree", "house", "nowhere")
MASK = make_task(TaskConfig(name="segmentation"), 0, PixelTargets(CLASSES))
DEPTH = make_task(TaskConfig(name="depth"), 0, PixelTargets(has_depth=True))
TASK = make_task(TaskConfig(name="mask_depth", depth_weight=2.0), 0, PixelTargets(CLASSES, has_depth=True))
SHAPE = (7, 5, 6)
OUTPUTS = RNG.normal(0, 1, (*SHAPE, 5)).astype(np.float32)
OUTPUTS[..., 3] = -9  # no pixel is taken for the last class, and none is of it
TRUTH = RNG.integers(0, 256, (*SHAPE, 3)).astype(np.uint8)  # planes
TRUTH[..., 0] %= 3
TRUTH[0, 0, :3, 1:] = 0
TRUE_CLASSES, TRUE_DEPTHS = planes.classes_of(TRUTH), planes.depths_of(TRUTH)
IS_KNOWN = np.array([1, 1, 0, 1, 1, 1, 1], bool)


def scores_of(task, outputs, truth, size=3):
    """As evaluation makes them: of micro-batches, the last one filled up with what does not count."""
    parts = []
    for start in range(0, len(outputs), size):
        rows = np.minimum(np.arange(start, start + size), len(outputs) - 1)
        is_known = IS_KNOWN[rows] & (np.arange(start, start + size) < len(outputs))
        sums, _ = task.evaluate(outputs[rows], truth[rows], is_known)
        parts.append(jax.tree.map(np.asarray, in_halves(sums)))
    return task.scores(from_halves(jax.tree.map(lambda *arrays: np.stack(arrays), *parts)))


def test_intersection_over_union_is_that_of_all_pixels():
    found = scores_of(MASK, OUTPUTS[..., :-1], TRUTH[..., :1])
    predicted, truth = OUTPUTS[IS_KNOWN][..., :-1].argmax(-1), TRUE_CLASSES[IS_KNOWN]
    row, iou = found.row_fields(), []
    for value, name in enumerate(CLASSES[:3]):
        both, either = (predicted == value) & (truth == value), (predicted == value) | (truth == value)
        iou.append(both.sum() / either.sum())
        assert row[f"val_iou_{name}"] == iou[-1]
    assert row["val_iou_nowhere"] is None
    assert found.score == row["val_mean_iou"] == pytest.approx(np.mean(iou))
    assert row["val_examples"] == 6


def test_errors_of_depths_are_those_of_all_pixels():
    found = scores_of(TASK, OUTPUTS, TRUTH).values
    depths, truth = OUTPUTS[IS_KNOWN][..., -1].clip(0, 1).astype(float), TRUE_DEPTHS[IS_KNOWN].astype(float)
    has_depth = truth > 0
    assert found["depth_rmse"] == pytest.approx(np.sqrt(np.mean((depths - truth) ** 2)), rel=1e-6)
    relative = np.abs(depths - truth)[has_depth] / truth[has_depth]
    assert found["depth_relative_error"] == pytest.approx(relative.mean(), rel=1e-6)
    is_near = (depths < 1.25 * truth) & (truth < 1.25 * depths)
    assert found["depth_near"] == is_near[has_depth].mean()
    losses = np.asarray(TASK.losses(OUTPUTS, TRUTH))[IS_KNOWN]
    assert found["loss"] == pytest.approx(losses.mean(), rel=1e-6)


def test_depths_that_are_all_zero_have_no_relative_error():
    found = scores_of(DEPTH, OUTPUTS[..., -1:], np.zeros_like(TRUTH[..., 1:])).values
    assert (found["depth_relative_error"], found["depth_near"]) == (None, None)
    assert found["depth_rmse"] > 0


def test_the_tasks_alone_have_the_scores_of_both_together(monkeypatch):
    def every_score():
        mask = scores_of(MASK, OUTPUTS[..., :-1], TRUTH[..., :1])
        return scores_of(TASK, OUTPUTS, TRUTH), mask, scores_of(DEPTH, OUTPUTS[..., -1:], TRUTH[..., 1:])

    both, mask, depth = every_score()
    expected = mask.values | depth.values | {"loss": mask.loss + 2.0 * depth.loss}
    assert list(both.values.items()) == list(expected.items())  # in the order of their columns
    assert both.score == mask.score
    assert depth.score == depth.values["depth_rmse"]
    monkeypatch.setitem(globals(), "IS_KNOWN", np.zeros(7, bool))
    assert every_score() == (None, None, None)


def test_what_is_kept_of_an_image_is_its_own_score():
    _, kept = TASK.evaluate(OUTPUTS, TRUTH, IS_KNOWN)
    loss, mean_iou, rmse = np.asarray(kept).T
    assert TASK.kind.kept_names == ("loss", "mean_iou", "depth_rmse")
    np.testing.assert_array_equal(loss, TASK.losses(OUTPUTS, TRUTH))
    for number in range(len(OUTPUTS)):
        classes = OUTPUTS[number, ..., :-1].argmax(-1)
        assert mean_iou[number] == pytest.approx(tables.mean_iou(classes, TRUE_CLASSES[number], len(CLASSES)))
        errors = OUTPUTS[number, ..., -1].clip(0, 1) - TRUE_DEPTHS[number]
        assert rmse[number] == pytest.approx(np.sqrt(np.mean(errors**2)))


def test_a_pixel_that_is_not_finite_is_predicted_as_no_class():
    broken = OUTPUTS[..., :-1].copy()
    broken[0, 0, 0, 2] = np.nan
    broken[1, 2, 3, 0] = np.inf
    intersections, unions = scores.class_pixels(broken, TRUE_CLASSES)
    predicted = broken.argmax(-1)
    predicted[0, 0, 0] = predicted[1, 2, 3] = -1
    for value in range(len(CLASSES)):
        is_predicted, is_there = predicted == value, value == TRUE_CLASSES
        np.testing.assert_array_equal(intersections[:, value], (is_predicted & is_there).sum((1, 2)))
        np.testing.assert_array_equal(unions[:, value], (is_predicted | is_there).sum((1, 2)))
    nothing = np.full_like(broken, np.nan)
    assert scores_of(MASK, nothing, TRUTH[..., :1]).score == 0


def test_pixels_of_all_devices_may_be_more_than_an_int32_holds():
    of_devices = np.array([2**31 - 1, 2**31 - 5, 7, 2**30], np.int32)
    total = jax.tree.map(lambda halves: np.asarray(halves).sum(axis=0, dtype=np.int32), in_halves(of_devices))
    assert from_halves(total) == of_devices.sum(dtype=np.int64)


def test_planes_hold_a_mask_and_a_depth_exactly():
    image = RNG.integers(0, 256, (4, 5, 3)).astype(np.uint8)
    mask, depth = RNG.integers(0, 200, (4, 5)), RNG.integers(0, 65_536, (4, 5)).astype(np.uint16)
    stored = planes.join(image, mask, depth)
    assert stored.dtype == np.uint8
    assert stored.shape == (4, 5, 3 + PixelTargets(("a", "b"), has_depth=True).planes)
    np.testing.assert_array_equal(stored[..., :3], image)
    np.testing.assert_array_equal(planes.classes_of(stored[None, ..., 3:])[0], mask)
    np.testing.assert_array_equal(planes.depths_of(stored[None, ..., 3:])[0], (depth / np.float32(65_535)))
    np.testing.assert_array_equal(planes.join(image, None, depth)[..., 3:], stored[..., 4:])
    np.testing.assert_array_equal(planes.join(image, mask, None), stored[..., :4])


@pytest.mark.parametrize(
    ("targets", "name"),
    [
        (planes.NO_TARGETS, "classification"),
        (PixelTargets(("a", "b")), "segmentation"),
        (PixelTargets((), has_depth=True), "depth"),
    ],
)
def test_targets_are_read_back(targets, name):
    assert PixelTargets.recorded_in({"mean": [1], **targets.record()}) == targets
    assert targets.kind.name == name


# ---- which of two is better -------------------------------------------------------------------------------


def test_scores_go_the_way_of_their_task():
    classes, depth = CLASSIFICATION, KINDS["depth"]
    assert classes.is_better(0.6, 0.5)
    assert not classes.is_better(0.5, 0.5)
    assert depth.is_better(0.5, 0.6)
    assert classes.best([None, 0.0, 0.3]) == 0.3
    assert depth.best([0.3, None, 0.0]) == 0.0
    assert depth.best([None]) is None
    assert classes.reaches(0.9, 0.9)
    assert not classes.reaches(0.89, 0.9)
    assert depth.reaches(0.05, 0.06)
    assert not depth.reaches(0.07, 0.06)
    for kind in KINDS.values():
        assert kind.is_better(0.0, None)
        assert not kind.is_better(math.nan, 0.5)
        assert kind.is_better(0.5, math.nan)
        assert not kind.reaches(None, 0.0)
