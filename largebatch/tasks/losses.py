"""Losses of all tasks: one number for each example, so that no sum depends on how a batch is split.

The loss of a dense target (mask, depth) is a mean over the image's pixels. Masks have class logits [M, H, W, K] and
classes int32 [M, H, W], depths float32 [M, H, W]. Losses are float32 [M].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

FOCUS = 2.0  # gamma of the focal loss
BERHU_SHARE = 0.2  # share of an image's largest error, where its BerHu loss goes from linear to quadratic
SMOOTHING = 1.0  # pixels, added to both parts of Dice's fraction: a class that is nowhere costs nothing

PIXELS = (1, 2)  # the axes of a dense target


def image_cross_entropy(logits: jax.Array, classes: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
    """Compute the cross-entropy in nats of logits [M, K] and the classes of images, int32 [M].

    Args:
      label_smoothing: share of a label that is spread evenly over all classes: Szegedy et al. 2016, section 7.
    """
    if label_smoothing:
        smoothed = optax.smooth_labels(jax.nn.one_hot(classes, logits.shape[-1]), label_smoothing)
        return optax.softmax_cross_entropy(logits, smoothed)
    return optax.softmax_cross_entropy_with_integer_labels(logits, classes)


def cross_entropy(logits: jax.Array, classes: jax.Array) -> jax.Array:
    """Compute cross-entropy, mean over pixels, in nats; with two classes it is binary cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean(PIXELS)


def dice(logits: jax.Array, classes: jax.Array) -> jax.Array:
    """Compute 1 - 2 |P and T| / (|P| + |T|) of each image, mean over the classes but the first, the background.

    Milletari et al. 2016, "V-Net", with plain sums below the fraction.
    """
    shares = jax.nn.softmax(logits)[..., 1:]
    truth = jax.nn.one_hot(classes, logits.shape[-1])[..., 1:]
    both, either = (shares * truth).sum(PIXELS), (shares + truth).sum(PIXELS)
    return jnp.mean(1 - (2 * both + SMOOTHING) / (either + SMOOTHING), axis=-1)


def focal(logits: jax.Array, classes: jax.Array) -> jax.Array:
    """Compute cross-entropy times (1 - share of the true class) ** 2: Lin et al. 2017, "Focal Loss", eq. 4."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, classes)
    return ((1 - jnp.exp(-losses)) ** FOCUS * losses).mean(PIXELS)


def l1(depths: jax.Array, truth: jax.Array) -> jax.Array:
    """Compute the mean absolute error."""
    return jnp.abs(depths - truth).mean(PIXELS)


def berhu(depths: jax.Array, truth: jax.Array) -> jax.Array:
    """Compute absolute errors up to a threshold c, (e^2 + c^2) / (2 c) beyond it, mean over pixels.

    Laina et al. 2016, "Deeper Depth Prediction with Fully Convolutional Residual Networks", equation 1, where c is
    a share of the batch's largest error; here of the image's. The threshold is not differentiated.
    """
    errors = jnp.abs(depths - truth)
    threshold = jax.lax.stop_gradient(BERHU_SHARE * errors.max(PIXELS, keepdims=True))
    threshold = jnp.maximum(threshold, jnp.finfo(jnp.float32).tiny)
    beyond = (errors**2 + threshold**2) / (2 * threshold)
    return jnp.where(errors <= threshold, errors, beyond).mean(PIXELS)


def gradient(depths: jax.Array, truth: jax.Array) -> jax.Array:
    """Compute L1 of the depths and of their differences between neighbours, which keep edges sharp."""
    errors = depths - truth
    pixels = errors.shape[1] * errors.shape[2]
    across, down = (jnp.abs(jnp.diff(errors, axis=axis)).sum(PIXELS) for axis in (2, 1))
    return l1(depths, truth) + (across + down) / pixels


MASK_LOSSES: dict[str, Callable] = {
    "cross_entropy": cross_entropy,
    "dice": dice,
    "cross_entropy_dice": lambda logits, classes: cross_entropy(logits, classes) + dice(logits, classes),
    "focal": focal,
}
DEPTH_LOSSES: dict[str, Callable] = {"l1": l1, "berhu": berhu, "gradient": gradient}
