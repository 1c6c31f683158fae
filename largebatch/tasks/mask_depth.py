"""A class and a depth for each pixel, by one network with two decoders: the two tasks side by side."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from largebatch.tasks import planes
from largebatch.tasks.depth import Depth, DepthScores, DepthSums
from largebatch.tasks.kinds import KINDS
from largebatch.tasks.segmentation import Segmentation, SegmentationScores, SegmentationSums


@struct.dataclass
class MaskDepthTargets:
    """Dense targets of M images."""

    classes: jax.Array  # int32 [M, H, W]
    depths: jax.Array  # float32 [M, H, W], 0 to 1


@struct.dataclass
class MaskDepthSums:
    """Sums of both tasks."""

    mask: SegmentationSums
    depth: DepthSums


@dataclasses.dataclass(frozen=True)
class MaskDepthScores:
    """Scores over all pixels of a split; see `task.Scores`."""

    loss: float
    mask: SegmentationScores
    depth: DepthScores

    @property
    def score(self) -> float:
        """The mean IoU."""
        return self.mask.score

    @property
    def num_examples(self) -> int:
        """Number of images."""
        return self.mask.num_examples

    def row_fields(self) -> dict:
        """Return the columns of metrics.jsonl; see `task.Scores`."""
        return self.mask.row_fields() | self.depth.row_fields() | {"val_loss": self.loss}


@dataclasses.dataclass(frozen=True)
class MaskDepth:
    """The task of outputs [M, H, W, K + 1], class logits and a depth; see `task.Task`."""

    mask: Segmentation
    depth: Depth
    depth_weight: float  # weight of the depth's loss beside the mask's
    kind: ClassVar = KINDS["mask_depth"]
    target_planes: ClassVar = planes.MASK_PLANES + planes.DEPTH_PLANES
    metric_names: ClassVar = (*Segmentation.metric_names, *Depth.metric_names)
    kept_names: ClassVar = ("loss", "mean_iou", "depth_rmse")

    @property
    def outputs(self) -> tuple[int, ...]:
        """Channels of the class logits and of the depth; see `task.Task`."""
        return (*self.mask.outputs, *self.depth.outputs)

    def targets(self, labels, target_planes) -> MaskDepthTargets:
        """Return the classes and the depths; see `task.Task`."""
        return MaskDepthTargets(planes.classes_of(target_planes), planes.depths_of(target_planes))

    def losses(self, outputs, targets) -> jax.Array:
        """Compute the weighted sum of both losses; see `task.Task`."""
        logits, depths = _parted(outputs)
        of_depth = self.depth.losses(depths, targets.depths)
        return self.mask.losses(logits, targets.classes) + self.depth_weight * of_depth

    def metrics(self, outputs, targets) -> dict[str, jax.Array]:
        """Return the metrics of both tasks."""
        logits, depths = _parted(outputs)
        return self.mask.metrics(logits, targets.classes) | self.depth.metrics(depths, targets.depths)

    def sums(self, outputs, targets, is_known) -> MaskDepthSums:
        """Return the sums of both tasks; see `task.Task`."""
        logits, depths = _parted(outputs)
        return MaskDepthSums(
            mask=self.mask.sums(logits, targets.classes, is_known),
            depth=self.depth.sums(depths, targets.depths, is_known),
        )

    def kept(self, outputs, targets) -> jax.Array:
        """Return the loss, the mean IoU, and the RMSE of the depth."""
        logits, depths = _parted(outputs)
        mean_iou, rmse = (
            self.mask.kept(logits, targets.classes)[:, 1],
            self.depth.kept(depths, targets.depths)[:, 1],
        )
        return jnp.stack([self.losses(outputs, targets), mean_iou, rmse], axis=-1)

    def predictions(self, outputs) -> jax.Array:
        """Return class and depth of each pixel, as planes of uint8: [M, H, W, 3]."""
        logits, depths = _parted(outputs)
        return jnp.concatenate([self.mask.predictions(logits), self.depth.predictions(depths)], axis=-1)

    def scores(self, sums: MaskDepthSums) -> MaskDepthScores | None:
        """Return the scores of a split; see `task.Task`."""
        mask, depth = self.mask.scores(sums.mask), self.depth.scores(sums.depth)
        if mask is None or depth is None:
            return None
        return MaskDepthScores(mask.loss + self.depth_weight * depth.loss, mask, depth)


def _parted(outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split outputs into logits of classes [M, H, W, K] and the depth [M, H, W, 1]."""
    return outputs[..., :-1], outputs[..., -1:]
