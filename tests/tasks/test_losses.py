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


EXPECTED = {
    "cross_entropy": numpy_cross_entropies().mean((1, 2)),
    "dice": numpy_dice(),
    "cross_entropy_dice": numpy_cross_entropies().mean((1, 2)) + numpy_dice(),
    "focal": ((1 - np.exp(-numpy_cross_entropies())) ** 2 * numpy_cross_entropies()).mean((1, 2)),
    "l1": np.abs(DEPTHS.astype(float) - TRUTH).mean((1, 2)),
    "berhu": numpy_berhu(),
    "gradient": numpy_gradient(),
}


@pytest.mark.parametrize("name", [*MASK_LOSSES, *DEPTH_LOSSES])
def test_losses_are_numpys_and_know_no_other_image(name):
    """So gradients of a batch do not depend on how it is split."""
    loss = (MASK_LOSSES | DEPTH_LOSSES)[name]
    predicted, truth = (LOGITS, CLASSES) if name in MASK_LOSSES else (DEPTHS, TRUTH)
    np.testing.assert_allclose(loss(predicted, truth), EXPECTED[name], rtol=1e-5)
    np.testing.assert_allclose(loss(predicted[2:3], truth[2:3]), EXPECTED[name][2:3], rtol=1e-5)


@pytest.mark.parametrize("name", DEPTH_LOSSES)
def test_a_perfect_depth_costs_nothing_and_has_a_gradient(name):
    """Also of a single row of pixels."""
    for truth in (TRUTH, TRUTH[:, :1]):
        total = jax.value_and_grad(lambda depths: DEPTH_LOSSES[name](depths, truth).sum())  # noqa: B023
        loss, gradient = jax.jit(total)(truth)
        assert float(loss) == 0
        assert np.isfinite(gradient).all()
