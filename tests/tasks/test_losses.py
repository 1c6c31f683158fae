"""Losses of masks and depths, against NumPy in float64 and by hand."""

import jax
import numpy as np
import pytest
import scipy.special

from largebatch.tasks.losses import DEPTH_LOSSES, MASK_LOSSES

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 2, (5, 6, 7, 3)).astype(np.float32)
CLASSES = RNG.integers(0, 3, (5, 6, 7)).astype(np.int32)
CLASSES[0] = 0  # an image without objects
DEPTHS, TRUTH = RNG.random((2, 5, 6, 7)).astype(np.float32)


def numpy_cross_entropies():
    return -np.take_along_axis(scipy.special.log_softmax(LOGITS.astype(float), -1), CLASSES[..., None], -1)[..., 0]


def numpy_dice():
    shares, losses = scipy.special.softmax(LOGITS.astype(float), -1), []
    for image in range(5):
        of_classes = []
        for value in (1, 2):
            predicted, truth = shares[image, ..., value], CLASSES[image] == value
            of_classes.append(1 - (2 * predicted[truth].sum() + 1) / (predicted.sum() + truth.sum() + 1))
        losses.append(np.mean(of_classes))
    return np.array(losses)


EXPECTED_OF_MASKS = {
    "cross_entropy": numpy_cross_entropies().mean((1, 2)),
    "dice": numpy_dice(),
    "cross_entropy_dice": numpy_cross_entropies().mean((1, 2)) + numpy_dice(),
    "focal": ((1 - np.exp(-numpy_cross_entropies())) ** 2 * numpy_cross_entropies()).mean((1, 2)),
}


@pytest.mark.parametrize("name", MASK_LOSSES)
def test_losses_of_masks(name):
    np.testing.assert_allclose(MASK_LOSSES[name](LOGITS, CLASSES), EXPECTED_OF_MASKS[name], rtol=1e-5)


def numpy_berhu():
    losses = []
    for errors in np.abs(DEPTHS.astype(float) - TRUTH):
        threshold = errors.max() / 5
        losses.append(np.where(errors <= threshold, errors, (errors**2 + threshold**2) / (2 * threshold)).mean())
    return np.array(losses)


def numpy_gradient():
    errors = DEPTHS.astype(float) - TRUTH
    parts = (errors, np.diff(errors, axis=1), np.diff(errors, axis=2))
    return sum(np.abs(part).sum((1, 2)) for part in parts) / errors[0].size


EXPECTED_OF_DEPTHS = {
    "l1": np.abs(DEPTHS.astype(float) - TRUTH).mean((1, 2)),
    "berhu": numpy_berhu(),
    "gradient": numpy_gradient(),
}


@pytest.mark.parametrize("name", DEPTH_LOSSES)
def test_losses_of_depths(name):
    np.testing.assert_allclose(DEPTH_LOSSES[name](DEPTHS, TRUTH), EXPECTED_OF_DEPTHS[name], rtol=1e-5)


def test_a_row_of_pixels_has_a_gradient_too():
    one_row = DEPTH_LOSSES["gradient"](DEPTHS[:, :1], TRUTH[:, :1])
    assert np.isfinite(one_row).all()


def test_dice_by_hand():
    """Two of four pixels are the object; three are taken for it with certainty, two of them rightly."""
    truth = np.array([[[1, 1], [0, 0]]])
    logits = np.where(np.array([[[1, 1], [1, 0]]])[..., None] == [0, 1], 50.0, -50.0).astype(np.float32)
    np.testing.assert_allclose(MASK_LOSSES["dice"](logits, truth), [1 - (2 * 2 + 1) / (3 + 2 + 1)], rtol=1e-6)


@pytest.mark.parametrize("name", DEPTH_LOSSES)
def test_a_perfect_depth_costs_nothing_and_has_a_gradient(name):
    loss, gradient = jax.value_and_grad(lambda depths: DEPTH_LOSSES[name](depths, TRUTH).sum())(TRUTH)
    assert float(loss) == 0
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("losses", [MASK_LOSSES, DEPTH_LOSSES], ids=["masks", "depths"])
def test_a_loss_of_an_image_knows_no_other_image(losses):
    """So that gradients of a batch do not depend on how it is split."""
    predicted, truth = (LOGITS, CLASSES) if losses is MASK_LOSSES else (DEPTHS, TRUTH)
    for loss in losses.values():
        alone = np.concatenate([loss(predicted[i : i + 1], truth[i : i + 1]) for i in range(5)])
        np.testing.assert_allclose(alone, loss(predicted, truth), rtol=1e-6)
