"""Scores of a split: what devices sum over micro-batches, and what the host makes of the sums.

Devices sum whole numbers as int32. The host gets NumPy arrays [micro-batches, ...], whole numbers as int64. It adds
losses and errors with a single rounding, so that neither blocks nor micro-batches without an example change a bit.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from largebatch.tasks.kinds import TaskKind
from largebatch.tasks.losses import PIXELS

NO_CLASS = -1  # the class predicted where a logit is not finite
NEAR = 1.25  # a depth is right within this factor: Eigen et al. 2014, "Depth Map Prediction", section 4.2


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of a task over the examples of a split whose targets are known.

    Attributes:
      values: in the order of their columns "loss", the mean over examples, the scores of the task, None where one
        is not defined, and "examples", the number of them.
    """

    kind: TaskKind
    values: dict[str, float | int | None]

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.values["loss"]

    @property
    def score(self) -> float:
        """The score by which the best validation is chosen."""
        return self.values[self.kind.score]

    def row_fields(self) -> dict[str, float | int | None]:
        """Return the columns of a row of metrics.jsonl for the validation split."""
        return {f"val_{name}": value for name, value in self.values.items()}


def sum_where(condition: jax.Array, values: jax.Array) -> jax.Array:
    """Sum the float32 values where a condition holds."""
    return jnp.sum(jnp.where(condition, values, 0.0))


def count(condition: jax.Array) -> jax.Array:
    """Count where a condition holds, int32."""
    return jnp.sum(condition, dtype=jnp.int32)


def exact_sum(values: np.ndarray) -> float:
    """Sum float32 values with a single rounding."""
    return math.fsum(values.astype(float))


def predicted_classes(logits: jax.Array) -> jax.Array:
    """Return the classes int32 [M, H, W] of logits [M, H, W, K], NO_CLASS where one is not finite."""
    is_finite = jnp.all(jnp.isfinite(logits), axis=-1)
    return jnp.where(is_finite, jnp.argmax(logits, axis=-1), NO_CLASS)


def class_pixels(logits: jax.Array, classes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Count an image's pixels of a class predicted as it, and those that are either; both int32 [M, K]."""
    every_class = jnp.arange(logits.shape[-1])
    is_predicted = predicted_classes(logits)[..., None] == every_class
    is_there = classes[..., None] == every_class
    intersections = jnp.sum(is_predicted & is_there, axis=PIXELS, dtype=jnp.int32)
    return intersections, jnp.sum(is_predicted | is_there, axis=PIXELS, dtype=jnp.int32)


def mask_sums(logits: jax.Array, classes: jax.Array, is_known: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return sums of `class_pixels` over the known images, and each image's mean intersection over union (IoU)."""
    pixels = intersections, unions = class_pixels(logits, classes)
    both, either = (jnp.sum(jnp.where(is_known[:, None], of_images, 0), axis=0) for of_images in pixels)
    mean_iou = jnp.sum(intersections / jnp.maximum(unions, 1), axis=-1) / jnp.sum(unions > 0, axis=-1)
    return {"intersections": both, "unions": either}, mean_iou


def mask_scores(sums: dict[str, np.ndarray], class_names: tuple[str, ...]) -> dict[str, float | None]:
    """Return the intersection over union (IoU) of each class over all pixels, and the mean of those defined.

    It is None for a class that is neither there nor predicted.
    """
    pixels = zip(class_names, sums["intersections"].sum(axis=0), sums["unions"].sum(axis=0), strict=True)
    iou = {f"iou_{name}": int(both) / int(either) if either else None for name, both, either in pixels}
    known = [value for value in iou.values() if value is not None]
    return {"mean_iou": sum(known) / len(known), **iou}


def depth_sums(depths: jax.Array, truth: jax.Array, is_known: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return sums over the pixels of the known images, and each image's root mean square error.

    Relative errors and "near", the pixels within NEAR, are of those with a true depth above 0.
    """
    depths = jnp.clip(depths, 0.0, 1.0)
    errors, known = jnp.abs(depths - truth), jnp.broadcast_to(is_known[:, None, None], truth.shape)
    has_depth = known & (truth > 0)
    sums = {
        "pixels": count(known),
        "square_errors": sum_where(known, errors**2),
        "relative_errors": sum_where(has_depth, errors / jnp.where(has_depth, truth, 1.0)),
        "near": count(has_depth & (depths < NEAR * truth) & (truth < NEAR * depths)),
        "with_depth": count(has_depth),
    }
    return sums, jnp.sqrt(jnp.square(depths - truth).mean(PIXELS))


def depth_scores(sums: dict[str, np.ndarray]) -> dict[str, float | None]:
    """Return the root mean square error, the mean of |error| / depth and the share of pixels within NEAR.

    The latter two are None where no true depth is above 0.
    """
    pixels, near, with_depth = (int(sums[name].sum()) for name in ("pixels", "near", "with_depth"))
    return {
        "depth_rmse": math.sqrt(exact_sum(sums["square_errors"]) / pixels),
        "depth_relative_error": exact_sum(sums["relative_errors"]) / with_depth if with_depth else None,
        "depth_near": near / with_depth if with_depth else None,
    }


# By the part of a dense task: (predicted, true) -> metric of training of each image, float32 [M]
METRICS = {
    "mask": lambda logits, classes: (predicted_classes(logits) == classes).mean(PIXELS),
    "depth": lambda depths, truth: jnp.abs(jnp.clip(depths, 0.0, 1.0) - truth).mean(PIXELS),
}
SUMS = {"mask": mask_sums, "depth": depth_sums}
