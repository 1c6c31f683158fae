"""From integer images, uint8 or uint16, to logits and the loss."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from largebatch.nn.normalisation import STATISTICS
from largebatch.nn.side_heads import SIDE_LOGITS


@struct.dataclass
class Batch:
    """One micro-batch of M examples."""

    images: jax.Array  # pixel values of any dtype [M, H, W, C], or flat rows [M, H * W * C]
    labels: jax.Array  # int32 [M]
    weights: jax.Array  # float32 [M], 1, and 0 for padding


@struct.dataclass
class BatchSums:
    """What a loss adds up over a micro-batch beside the loss itself."""

    metrics: dict[str, jax.Array]  # scalars by name, to be averaged over the batch
    statistics: (
        Any  # of the network's layers times the sum of weights, as the collections that they are smoothed into
    )


def make_normalise(network, image_shape, mean, std):
    """Pixel values of any dtype [M, H * W * C] -> [M, H, W, C] in the network's dtype, normalised when read."""
    mean, scale = np.float32(mean), np.float32(1 / np.asarray(std))

    def normalise(images):
        images = images.reshape(-1, *image_shape)
        return ((images.astype(jnp.float32) - mean) * scale).astype(network.dtype)

    return normalise


def make_logits_fn(network, image_shape, mean, std):
    """(variables, integer images [M, H * W * C]) -> float32 logits, as for evaluation.

    Variables are {"params": ..., and the collections that `model.init_variables` gives}.
    """
    normalise = make_normalise(network, image_shape, mean, std)

    def logits_fn(variables, images):
        return network.apply(variables, normalise(images))

    return logits_fn


def make_loss_fn(network, image_shape, mean, std, label_smoothing: float = 0.0):
    """The `loss_fn` of the step: cross-entropy against labels smoothed as by Szegedy et al. 2016, section 7.

    Where the network has side heads, the mean of their losses is added.

    Args:
      label_smoothing: the share of a label that is spread evenly over all classes.
    Returns:
      (params, model state, batch) -> sum over the micro-batch of weight * loss, and BatchSums with hits as the
      metric "accuracy".
    """
    normalise = make_normalise(network, image_shape, mean, std)

    def cross_entropy(logits, labels):
        if label_smoothing:
            targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), label_smoothing)
            return optax.softmax_cross_entropy(logits, targets)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    def loss_fn(params, model_state, batch):
        logits, collections = network.apply(
            {"params": params, **model_state},
            normalise(batch.images),
            batch.weights,
            mutable=[STATISTICS, SIDE_LOGITS],
        )
        of_sides = [cross_entropy(side, batch.labels) for side in jax.tree.leaves(collections.pop(SIDE_LOGITS, {}))]
        losses = cross_entropy(logits, batch.labels)
        if of_sides:
            losses += sum(of_sides) / len(of_sides)
        hits = jnp.argmax(logits, axis=-1) == batch.labels
        statistics = jax.tree.map(lambda x: x * batch.weights.sum(), collections)
        sums = BatchSums({"accuracy": jnp.sum(hits * batch.weights)}, statistics)
        return jnp.sum(losses * batch.weights), sums

    return loss_fn
