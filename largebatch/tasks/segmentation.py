"""A class for each pixel: losses by name, and the intersection over union of each class."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from largebatch.tasks import planes
from largebatch.tasks.kinds import KINDS
from largebatch.tasks.pixel_losses import MASK_LOSSES, PIXELS

NO_CLASS = -1  # the class predicted where an output is not finite


@dataclasses.dataclass(frozen=True)
class SegmentationScores:
    """Scores over all pixels of a split; see `task.Scores`."""

    loss: float
    iou: dict[str, float | None]  # IoU of each class; None where it is neither there nor predicted
    num_examples: int

    @property
    def score(self) -> float:
        """The mean IoU of the classes that are there or were predicted."""
        known = [iou for iou in self.iou.values() if iou is not None]
        return sum(known) / len(known)

    def row_fields(self) -> dict:
        """Return the columns of metrics.jsonl; see `task.Scores`."""
        return {
            "val_loss": self.loss,
            "val_mean_iou": self.score,
            **{f"val_iou_{name}": iou for name, iou in self.iou.items()},
            "val_examples": self.num_examples,
        }


@struct.dataclass
class SegmentationSums:
    """Sums over the known examples of a micro-batch, and over their pixels."""

    losses: jax.Array  # float32
    count: jax.Array  # int32, examples
    intersections: jax.Array  # int32 [K]: pixels of a class that were predicted as it
    unions: jax.Array  # int32 [K]: pixels of a class or predicted as it


@dataclasses.dataclass(frozen=True)
class Segmentation:
    """The task of logits [M, H, W, K] for classes int32 [M, H, W]; see `task.Task`."""

    classes: tuple[str, ...]  # names, by the value in the mask
    mask_loss: str  # a key of MASK_LOSSES
    kind: ClassVar = KINDS["segmentation"]
    target_planes: ClassVar = planes.MASK_PLANES
    metric_names: ClassVar = ("pixel_accuracy",)
    kept_names: ClassVar = ("loss", "mean_iou")

    @property
    def outputs(self) -> tuple[int, ...]:
        """Number of classes, as the only dense target's channels; see `task.Task`."""
        return (len(self.classes),)

    def targets(self, labels, target_planes) -> jax.Array:
        """Return the classes; see `task.Task`."""
        return planes.classes_of(target_planes)

    def losses(self, outputs, targets) -> jax.Array:
        """Compute the loss of each example; see `task.Task`."""
        return MASK_LOSSES[self.mask_loss](outputs, targets)

    def metrics(self, outputs, targets) -> dict[str, jax.Array]:
        """Return the share of each image's pixels whose class is right."""
        return {"pixel_accuracy": (predicted_classes(outputs) == targets).mean(PIXELS)}

    def sums(self, outputs, targets, is_known) -> SegmentationSums:
        """Sum losses, intersections and unions; see `task.Task`."""
        intersections, unions = class_pixels(outputs, targets)
        known = is_known[:, None]
        return SegmentationSums(
            losses=jnp.sum(jnp.where(is_known, self.losses(outputs, targets), 0.0)),
            count=jnp.sum(is_known, dtype=jnp.int32),
            intersections=jnp.sum(jnp.where(known, intersections, 0), axis=0),
            unions=jnp.sum(jnp.where(known, unions, 0), axis=0),
        )

    def kept(self, outputs, targets) -> jax.Array:
        """Return the loss, and the mean IoU of the classes that are there or were predicted."""
        intersections, unions = class_pixels(outputs, targets)
        num_classes = jnp.sum(unions > 0, axis=-1)
        mean_iou = jnp.sum(intersections / jnp.maximum(unions, 1), axis=-1) / num_classes
        return jnp.stack([self.losses(outputs, targets), mean_iou], axis=-1)

    def predictions(self, outputs) -> jax.Array:
        """Return the class of each pixel, as the plane of a mask: uint8 [M, H, W, 1]."""
        return jnp.argmax(outputs, axis=-1, keepdims=True).astype(jnp.uint8)

    def scores(self, sums: SegmentationSums) -> SegmentationScores | None:
        """Return the scores of a split; see `task.Task`."""
        count = int(sums.count.sum())
        if not count:
            return None
        intersections, unions = sums.intersections.sum(axis=0), sums.unions.sum(axis=0)
        iou = {
            name: int(both) / int(either) if either else None
            for name, both, either in zip(self.classes, intersections, unions, strict=True)
        }
        return SegmentationScores(math.fsum(sums.losses.astype(float)) / count, iou, count)


def predicted_classes(outputs: jax.Array) -> jax.Array:
    """Return the classes int32 [M, H, W] of logits [M, H, W, K], NO_CLASS where one is not finite."""
    is_finite = jnp.all(jnp.isfinite(outputs), axis=-1)
    return jnp.where(is_finite, jnp.argmax(outputs, axis=-1), NO_CLASS)


def class_pixels(outputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Count pixels of a class predicted as it, and pixels that are either; both int32 [M, K]."""
    every_class = jnp.arange(outputs.shape[-1])
    is_predicted = predicted_classes(outputs)[..., None] == every_class
    is_there = targets[..., None] == every_class
    intersections = jnp.sum(is_predicted & is_there, axis=PIXELS, dtype=jnp.int32)
    unions = jnp.sum(is_predicted | is_there, axis=PIXELS, dtype=jnp.int32)
    return intersections, unions
