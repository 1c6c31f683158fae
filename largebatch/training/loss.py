"""Outputs and loss of a network for integer images, uint8 or uint16."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from largebatch.nn.layers import SIDE_LOGITS, STATISTICS
from largebatch.tasks.task import Task


@struct.dataclass
class Batch:
    """A micro-batch of M examples."""

    images: jax.Array  # pixel values of any dtype [M, H, W, C], or flat rows [M, H * W * C]
    targets: Any  # targets of the task; for classification the class, int32 [M]
    # float32 [groups, M / groups]: 1, and 0 for padding. Batch normalisation takes each group by itself.
    weights: jax.Array


@struct.dataclass
class BatchSums:
    """Sums over a micro-batch that a loss returns beside itself."""

    metrics: dict[str, jax.Array]  # scalars by name, to be averaged over the batch
    # Statistics of the network's layers times the sum of weights, by the collections that they are smoothed into.
    statistics: Any


def make_normalise(network, image_shape, mean, std):
    """Make the function: pixels of any dtype [M, H * W * C] -> normalised [M, H, W, C] in the network's dtype."""
    mean, scale = np.float32(mean), np.float32(1 / np.asarray(std))

    def normalise(images):
        images = images.reshape(-1, *image_shape)
        return ((images.astype(jnp.float32) - mean) * scale).astype(network.dtype)

    return normalise


def make_logits_fn(network, image_shape, mean, std):
    """Make the function (variables, integer images [M, H, W, C]) -> outputs, float32, for evaluation.

    Variables are {"params": ..., and the collections that `model.init_variables` returns}.
    """
    normalise = make_normalise(network, image_shape, mean, std)
    return lambda variables, images: network.apply(variables, normalise(images))


def make_loss_fn(network, image_shape, mean, std, task: Task):
    """Make the `loss_fn` of the step.

    The mean of the losses of auxiliary heads is added, where the network has any.

    Returns:
      (params, model state, batch) -> sum over the micro-batch of weight * loss, and BatchSums with the metrics of
      the task.
    """
    normalise = make_normalise(network, image_shape, mean, std)

    def loss_fn(params, model_state, batch):
        outputs, collections = network.apply(
            {"params": params, **model_state},
            normalise(batch.images),
            batch.weights,
            mutable=[STATISTICS, SIDE_LOGITS],
        )
        weights = batch.weights.ravel()
        sides = jax.tree.leaves(collections.pop(SIDE_LOGITS, {}))
        losses = task.losses(outputs, batch.targets)
        if sides:
            losses += sum(task.losses(side, batch.targets) for side in sides) / len(sides)
        metrics = {name: jnp.sum(x * weights) for name, x in task.metrics(outputs, batch.targets).items()}
        statistics = jax.tree.map(lambda x: x * weights.sum(), collections)
        return jnp.sum(losses * weights), BatchSums(metrics, statistics)

    return loss_fn
