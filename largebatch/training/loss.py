"""From uint8 images to logits and the loss."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax

from largebatch.nn.normalisation import STATISTICS

# ---- from uint8 images to the loss -----------------------------------------------------------------


def make_normalise(network, image_shape, mean, std):
    """uint8 images [M, H * W * C] -> [M, H, W, C] in the network's dtype, normalised where they are read."""
    mean, scale = np.float32(mean), np.float32(1 / np.asarray(std))

    def normalise(images):
        images = images.reshape(-1, *image_shape)
        return ((images.astype(jnp.float32) - mean) * scale).astype(network.dtype)

    return normalise


def make_logits_fn(network, image_shape, mean, std):
    """(variables, uint8 images [M, H * W * C]) -> float32 logits, as for evaluation.

    Variables are {"params": ..., and the collections of `init_variables`}.
    """
    normalise = make_normalise(network, image_shape, mean, std)
    return lambda variables, images: network.apply(variables, normalise(images))


def make_loss_fn(network, image_shape, mean, std, label_smoothing: float = 0.0):
    """The `loss_fn` of the step: cross-entropy against labels smoothed as by Szegedy et al. 2016, section 7.

    Args:
      label_smoothing: the share of a label that is spread evenly over all classes.
    Returns:
      (params, model state, batch) -> sum over the micro-batch of weight * loss; such sums of hits by the name
      "accuracy", and the micro-batch's statistics times its sum of weights.
    """
    normalise = make_normalise(network, image_shape, mean, std)

    def loss_fn(params, model_state, batch):
        logits, statistics = network.apply(
            {"params": params, **model_state}, normalise(batch.images), batch.weights, mutable=[STATISTICS]
        )
        if label_smoothing:
            targets = optax.smooth_labels(jax.nn.one_hot(batch.labels, logits.shape[-1]), label_smoothing)
            losses = optax.softmax_cross_entropy(logits, targets)
        else:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        hits = jnp.argmax(logits, axis=-1) == batch.labels
        statistics = jax.tree.map(lambda x: x * batch.weights.sum(), statistics)
        return jnp.sum(losses * batch.weights), ({"accuracy": jnp.sum(hits * batch.weights)}, statistics)

    return loss_fn
