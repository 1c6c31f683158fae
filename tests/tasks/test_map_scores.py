"""Scores of masks and depths over a whole split, against NumPy."""

import jax
import numpy as np
import pytest

from largebatch.predictions import maps
from largebatch.tasks import planes, segmentation
from largebatch.tasks.depth import Depth
from largebatch.tasks.mask_depth import MaskDepth, MaskDepthTargets
from largebatch.tasks.segmentation import Segmentation
from largebatch.training.evaluation import from_halves, in_halves

RNG = np.random.default_rng(0)
CLASSES = ("background", "tree", "house", "nowhere")
MASK = Segmentation(CLASSES, "cross_entropy")
DEPTH = Depth("l1")
TASK = MaskDepth(MASK, DEPTH, 2.0)
SHAPE = (7, 5, 6)
OUTPUTS = RNG.normal(0, 1, (*SHAPE, 5)).astype(np.float32)
OUTPUTS[..., 3] = -9  # no pixel is taken for the last class, and none is of it
TRUTH = MaskDepthTargets(RNG.integers(0, 3, SHAPE).astype(np.int32), RNG.random(SHAPE).astype(np.float32))
TRUTH.depths[0, 0, :3] = 0
IS_KNOWN = np.array([1, 1, 0, 1, 1, 1, 1], bool)


def sums_of_micro_batches(task, outputs, truth, size=3):
    """As evaluation makes them: [micro-batches], the last one filled up with what does not count."""
    parts = []
    for start in range(0, len(outputs), size):
        rows = np.minimum(np.arange(start, start + size), len(outputs) - 1)
        is_known = IS_KNOWN[rows] & (np.arange(start, start + size) < len(outputs))
        of_rows = jax.tree.map(lambda array, rows=rows: array[rows], truth)
        parts.append(jax.tree.map(np.asarray, in_halves(task.sums(outputs[rows], of_rows, is_known))))
    return from_halves(jax.tree.map(lambda *arrays: np.stack(arrays), *parts))


def test_intersection_over_union_is_that_of_all_pixels():
    scores = MASK.scores(sums_of_micro_batches(MASK, OUTPUTS[..., :-1], TRUTH.classes))
    predicted, truth = OUTPUTS[IS_KNOWN][..., :-1].argmax(-1), TRUTH.classes[IS_KNOWN]
    for value, name in enumerate(CLASSES[:3]):
        both, either = (predicted == value) & (truth == value), (predicted == value) | (truth == value)
        assert scores.iou[name] == both.sum() / either.sum()
    assert scores.iou["nowhere"] is None
    assert scores.score == pytest.approx(np.mean([scores.iou[name] for name in CLASSES[:3]]))
    assert scores.num_examples == 6
    assert scores.row_fields()["val_iou_tree"] == scores.iou["tree"]


def test_errors_of_depths_are_those_of_all_pixels():
    scores = TASK.scores(sums_of_micro_batches(TASK, OUTPUTS, TRUTH))
    depths, truth = OUTPUTS[IS_KNOWN][..., -1].clip(0, 1).astype(float), TRUTH.depths[IS_KNOWN].astype(float)
    has_depth = truth > 0
    assert scores.depth.rmse == pytest.approx(np.sqrt(np.mean((depths - truth) ** 2)), rel=1e-6)
    relative = np.abs(depths - truth)[has_depth] / truth[has_depth]
    assert scores.depth.relative_error == pytest.approx(relative.mean(), rel=1e-6)
    is_near = (depths < 1.25 * truth) & (truth < 1.25 * depths)
    assert scores.depth.near == is_near[has_depth].mean()
    losses = np.asarray(TASK.losses(OUTPUTS, TRUTH))[IS_KNOWN]
    assert scores.loss == pytest.approx(losses.mean(), rel=1e-6)


def test_without_examples_there_are_no_scores():
    sums = jax.tree.map(np.zeros_like, sums_of_micro_batches(TASK, OUTPUTS, TRUTH))
    assert TASK.scores(sums) is None


def test_depths_that_are_all_zero_have_no_relative_error():
    flat = MaskDepthTargets(TRUTH.classes, np.zeros(SHAPE, np.float32))
    scores = TASK.scores(sums_of_micro_batches(TASK, OUTPUTS, flat))
    assert (scores.depth.relative_error, scores.depth.near) == (None, None)
    assert scores.depth.rmse > 0


def test_the_tasks_alone_have_the_scores_of_both_together():
    both = TASK.scores(sums_of_micro_batches(TASK, OUTPUTS, TRUTH))
    mask = MASK.scores(sums_of_micro_batches(MASK, OUTPUTS[..., :-1], TRUTH.classes))
    depth = DEPTH.scores(sums_of_micro_batches(DEPTH, OUTPUTS[..., -1:], TRUTH.depths))
    assert (both.mask, both.depth) == (mask, depth)
    assert both.loss == mask.loss + 2.0 * depth.loss
    assert both.score == mask.score
    assert depth.score == depth.rmse


def test_what_is_kept_of_an_image_is_its_own_score():
    _, mean_iou, rmse = np.asarray(TASK.kept(OUTPUTS, TRUTH)).T
    for number in range(len(OUTPUTS)):
        classes = OUTPUTS[number, ..., :-1].argmax(-1)
        assert mean_iou[number] == pytest.approx(maps.mean_iou(classes, TRUTH.classes[number], len(CLASSES)))
        errors = OUTPUTS[number, ..., -1].clip(0, 1) - TRUTH.depths[number]
        assert rmse[number] == pytest.approx(np.sqrt(np.mean(errors**2)))


def test_a_pixel_that_is_not_finite_is_predicted_as_no_class():
    broken = OUTPUTS[..., :-1].copy()
    broken[0, 0, 0, 2] = np.nan
    broken[1, 2, 3, 0] = np.inf
    intersections, unions = segmentation.class_pixels(broken, TRUTH.classes)
    predicted = broken.argmax(-1)
    predicted[0, 0, 0] = predicted[1, 2, 3] = -1
    for value in range(len(CLASSES)):
        is_predicted, is_there = predicted == value, TRUTH.classes == value
        np.testing.assert_array_equal(intersections[:, value], (is_predicted & is_there).sum((1, 2)))
        np.testing.assert_array_equal(unions[:, value], (is_predicted | is_there).sum((1, 2)))
    nothing = np.full_like(broken, np.nan)
    assert MASK.scores(sums_of_micro_batches(MASK, nothing, TRUTH.classes)).score == 0


def test_pixels_of_all_devices_may_be_more_than_an_int32_holds():
    of_devices = np.array([2**31 - 1, 2**31 - 5, 7, 2**30], np.int32)
    total = jax.tree.map(lambda halves: np.asarray(halves).sum(axis=0, dtype=np.int32), in_halves(of_devices))
    assert from_halves(total) == of_devices.sum(dtype=np.int64)


def test_planes_hold_a_mask_and_a_depth_exactly():
    image = RNG.integers(0, 256, (4, 5, 3)).astype(np.uint8)
    mask, depth = RNG.integers(0, 200, (4, 5)), RNG.integers(0, 65_536, (4, 5)).astype(np.uint16)
    stored = planes.join(image, mask, depth)
    assert stored.dtype == np.uint8
    assert stored.shape == (4, 5, 3 + planes.PixelTargets(("a", "b"), has_depth=True).planes)
    np.testing.assert_array_equal(stored[..., :3], image)
    np.testing.assert_array_equal(planes.classes_of(stored[None, ..., 3:])[0], mask)
    np.testing.assert_array_equal(planes.depths_of(stored[None, ..., 3:])[0], (depth / np.float32(65_535)))
    np.testing.assert_array_equal(planes.join(image, None, depth)[..., 3:], stored[..., 4:])
    np.testing.assert_array_equal(planes.join(image, mask, None), stored[..., :4])


TARGETS = [planes.NO_TARGETS, planes.PixelTargets(("a", "b")), planes.PixelTargets((), has_depth=True)]


@pytest.mark.parametrize("targets", TARGETS)
def test_targets_are_read_back(targets):
    assert planes.PixelTargets.recorded_in({"mean": [1], **targets.record()}) == targets
    kinds = {0: "classification", 1: "segmentation", 2: "depth"}
    assert targets.kind.name == kinds[targets.planes]


@pytest.mark.parametrize("damaged", [None, 5, {"planes": 5}, {"classes": "ab", "has_depth": True}, {"classes": []}])
def test_damaged_targets_are_refused(damaged):
    with pytest.raises(ValueError, match="targets"):
        planes.PixelTargets.recorded_in({"targets": damaged})
