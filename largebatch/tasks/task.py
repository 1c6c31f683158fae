"""The two tasks: a class for each image, and dense targets for each pixel (a mask, a depth, or both).

In all methods `outputs` are the network's for a micro-batch of M examples, and `targets` what they should be: the
classes of images int32 [M], or integer planes [M, H, W, target_planes].
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from largebatch.config.fields import TaskConfig
from largebatch.tasks import losses, planes, scores
from largebatch.tasks.kinds import CLASSIFICATION, KINDS, TaskKind
from largebatch.tasks.planes import PixelTargets
from largebatch.tasks.scores import Scores

TOP = 5


@dataclasses.dataclass(frozen=True)
class Classification:
    """The task of logits [M, num_classes] for classes of images; equal tasks share their programs."""

    num_classes: int
    label_smoothing: float = 0.0
    kind: ClassVar = CLASSIFICATION
    target_planes: ClassVar = 0  # number of the last channels of a stored image that are its dense targets

    @property
    def outputs(self) -> int:
        """The outputs of the network: the number of classes, or the channels of each dense target."""
        return self.num_classes

    def losses(self, outputs, targets) -> jax.Array:
        """Return one loss per example, float32 [M]."""
        return losses.image_cross_entropy(outputs, targets, self.label_smoothing)

    def metrics(self, outputs, targets) -> dict[str, jax.Array]:
        """Return the metrics of training beside the loss, by name: float32 [M], to be averaged over a batch."""
        return {"accuracy": (jnp.argmax(outputs, axis=-1) == targets).astype(jnp.float32)}

    def evaluate(self, outputs, targets, is_known) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return the sums for `scores` over the examples where `is_known` [M], and what a run keeps of each.

        The latter is float32 [M, columns]; the columns are `kind.kept_names`, or where those are () the outputs.
        """
        labels = jnp.where(is_known, targets, 0)[:, None]
        # An example is a hit among the first k if fewer than k classes come before its own. The larger logit comes
        # first, of equal ones the lower class, as with argmax. A NaN comes before all, and is never a hit.
        own = jnp.take_along_axis(outputs, labels, axis=1)
        comes_later = jnp.arange(outputs.shape[1]) >= labels
        rank = jnp.sum(~((own > outputs) | ((own == outputs) & comes_later)), axis=1)
        sums = {
            "losses": scores.sum_where(is_known, losses.image_cross_entropy(outputs, labels[:, 0])),
            "hits": scores.count(is_known & (rank < 1)),
            "hits_top5": scores.count(is_known & (rank < TOP)),
            "examples": scores.count(is_known),
        }
        return sums, outputs

    def scores(self, sums: dict[str, np.ndarray]) -> Scores | None:
        """Return the scores of a split from its sums [micro-batches, ...]; None where no example is known."""
        examples, hits, hits_top5 = (int(sums[name].sum()) for name in ("examples", "hits", "hits_top5"))
        if not examples:
            return None
        values = {
            "loss": scores.exact_sum(sums["losses"]) / examples,
            "accuracy": hits / examples,
            "accuracy_top5": hits_top5 / examples if self.num_classes > TOP else None,  # else always 1
            "examples": examples,
        }
        return Scores(self.kind, values)

    def predictions(self, outputs) -> jax.Array:
        """Return the prediction for each example, for evaluate.py to write: [M, ...]."""
        return outputs


@dataclasses.dataclass(frozen=True)
class Dense:
    """The task of outputs [M, H, W, channels] for class masks, depths or both; methods as of `Classification`."""

    kind: TaskKind
    classes: tuple[str, ...]  # names, by the value in the mask
    mask_loss: str  # a key of MASK_LOSSES
    depth_loss: str  # a key of DEPTH_LOSSES
    depth_weight: float = 1.0  # weight of the depth's loss beside the mask's

    @property
    def target_planes(self) -> int:
        """The number of the last channels of a stored image that are its dense targets."""
        return PixelTargets(self.classes, self.kind.has_depth).planes

    @property
    def outputs(self) -> tuple[int, ...]:
        """The channels of the mask's logits and of the depth."""
        return ((len(self.classes),) if self.kind.has_mask else ()) + ((1,) if self.kind.has_depth else ())

    def _parts(self, outputs, targets) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Return what is predicted and what is true of the mask and the depth, as far as the task has them."""
        parts = {}
        if self.kind.has_mask:
            parts["mask"] = outputs[..., : len(self.classes)], planes.classes_of(targets)
        if self.kind.has_depth:
            parts["depth"] = outputs[..., -1], planes.depths_of(targets)
        return parts

    def _losses(self, parts: dict) -> dict[str, jax.Array]:
        """Return the losses of mask and depth, float32 [M] each."""
        functions = {"mask": losses.MASK_LOSSES[self.mask_loss], "depth": losses.DEPTH_LOSSES[self.depth_loss]}
        return {f"{name}_losses": functions[name](*part) for name, part in parts.items()}

    def _weighted(self, parts: dict):
        """Return the loss of an example from those of its mask and depth."""
        if len(parts) == 1:
            return next(iter(parts.values()))
        return parts["mask_losses"] + self.depth_weight * parts["depth_losses"]

    def losses(self, outputs, targets) -> jax.Array:
        """Return the loss of the mask, of the depth, or their weighted sum."""
        return self._weighted(self._losses(self._parts(outputs, targets)))

    def metrics(self, outputs, targets) -> dict[str, jax.Array]:
        """Return the share of an image's pixels whose class is right, and its depth's mean absolute error."""
        parts = self._parts(outputs, targets)
        metrics = (scores.METRICS[name](*part) for name, part in parts.items())
        return dict(zip(self.kind.metric_names, metrics, strict=True))

    def evaluate(self, outputs, targets, is_known) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return sums over the known examples, and the loss, mean IoU and RMSE of each example."""
        parts = self._parts(outputs, targets)
        part_losses = self._losses(parts)
        sums = {name: scores.sum_where(is_known, values) for name, values in part_losses.items()}
        sums["examples"], kept = scores.count(is_known), [self._weighted(part_losses)]
        for name, part in parts.items():
            part_sums, part_score = scores.SUMS[name](*part, is_known)
            sums |= part_sums
            kept.append(part_score)
        return sums, jnp.stack(kept, axis=-1)

    def scores(self, sums: dict[str, np.ndarray]) -> Scores | None:
        """Return the scores over all pixels of a split."""
        examples = int(sums["examples"].sum())
        if not examples:
            return None
        means = {name: scores.exact_sum(part) / examples for name, part in sums.items() if name.endswith("_losses")}
        values = {"loss": self._weighted(means)}
        if self.kind.has_mask:
            values |= scores.mask_scores(sums, self.classes) | {"examples": examples}
        if self.kind.has_depth:
            values |= scores.depth_scores(sums) | {"examples": examples}
        return Scores(self.kind, values)

    def predictions(self, outputs) -> jax.Array:
        """Return class and depth of each pixel, as planes of uint8: [M, H, W, target_planes]."""
        parts = []
        if self.kind.has_mask:
            parts.append(jnp.argmax(outputs[..., : len(self.classes)], axis=-1).astype(jnp.uint8))
        if self.kind.has_depth:
            depths = (jnp.clip(outputs[..., -1], 0.0, 1.0) * planes.LARGEST_DEPTH + 0.5).astype(jnp.int32)
            parts += [(depths >> 8).astype(jnp.uint8), (depths & 255).astype(jnp.uint8)]
        return jnp.stack(parts, axis=-1)


Task = Classification | Dense


def make_task(config: TaskConfig, num_classes: int, targets: PixelTargets, label_smoothing: float = 0.0) -> Task:
    """Make the task of a config for a data set.

    Args:
      num_classes: number of classes of images.
      targets: dense targets of the data set.
    """
    if config.name == CLASSIFICATION.name:
        return Classification(num_classes, label_smoothing)
    return Dense(KINDS[config.name], targets.classes, config.mask_loss, config.depth_loss, config.depth_weight)
