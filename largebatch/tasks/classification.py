"""Classification, one class for each image: cross-entropy, and the share of images whose class is predicted."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import struct

from largebatch.tasks.kinds import CLASSIFICATION

TOP = 5
MIN_CLASSES_FOR_TOP5 = TOP + 1  # with fewer classes every example is among the first five


@dataclasses.dataclass(frozen=True)
class ClassificationScores:
    """Scores over `num_examples` examples; see `task.Scores`."""

    loss: float  # mean cross-entropy, in nats
    accuracy: float  # 0..1
    accuracy_top5: float | None  # 0..1; None with fewer than MIN_CLASSES_FOR_TOP5 classes
    num_examples: int

    @property
    def score(self) -> float:
        """The accuracy."""
        return self.accuracy

    def row_fields(self) -> dict[str, float | int | None]:
        """Return the columns of metrics.jsonl; see `task.Scores`."""
        return {
            "val_loss": self.loss,
            "val_accuracy": self.accuracy,
            "val_accuracy_top5": self.accuracy_top5,
            "val_examples": self.num_examples,
        }


@struct.dataclass
class ClassificationSums:
    """Sums over the examples of a micro-batch whose class is known."""

    losses: jax.Array  # float32
    hits: jax.Array  # int32
    hits_top5: jax.Array  # int32
    count: jax.Array  # int32


@dataclasses.dataclass(frozen=True)
class Classification:
    """The task of logits [M, num_classes] for classes int32 [M]; see `task.Task`."""

    num_classes: int
    label_smoothing: float = 0.0  # share of a label that is spread evenly over all classes
    kind: ClassVar = CLASSIFICATION
    target_planes: ClassVar = 0
    metric_names: ClassVar = ("accuracy",)
    kept_names: ClassVar = ()

    @property
    def outputs(self) -> int:
        """Number of classes; see `task.Task`."""
        return self.num_classes

    def targets(self, labels, planes) -> jax.Array:
        """Return the classes."""
        return labels

    def losses(self, outputs, targets) -> jax.Array:
        """Compute cross-entropy against labels smoothed as by Szegedy et al. 2016, section 7."""
        if self.label_smoothing:
            smoothed = optax.smooth_labels(jax.nn.one_hot(targets, outputs.shape[-1]), self.label_smoothing)
            return optax.softmax_cross_entropy(outputs, smoothed)
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets)

    def metrics(self, outputs, targets) -> dict[str, jax.Array]:
        """Return the hits, whose mean is the accuracy."""
        return {"accuracy": (jnp.argmax(outputs, axis=-1) == targets).astype(jnp.float32)}

    def sums(self, outputs, targets, is_known) -> ClassificationSums:
        """Sum plain cross-entropy and hits.

        An example is a hit among the first k if fewer than k classes come before its own. The larger logit comes
        first, of equal ones the lower class, as with argmax. A logit that is NaN comes before all, and is never a
        hit.
        """
        labels = jnp.where(is_known, targets, 0)[:, None]
        own = jnp.take_along_axis(outputs, labels, axis=1)
        comes_later = jnp.arange(outputs.shape[1]) >= labels
        is_behind = (own > outputs) | ((own == outputs) & comes_later)
        rank = jnp.sum(~is_behind, axis=1)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, labels[:, 0])
        return ClassificationSums(
            losses=jnp.sum(jnp.where(is_known, losses, 0.0)),
            hits=jnp.sum(is_known & (rank < 1), dtype=jnp.int32),
            hits_top5=jnp.sum(is_known & (rank < TOP), dtype=jnp.int32),
            count=jnp.sum(is_known, dtype=jnp.int32),
        )

    def kept(self, outputs, targets) -> jax.Array:
        """Return the logits."""
        return outputs

    def predictions(self, outputs) -> jax.Array:
        """Return the logits."""
        return outputs

    def scores(self, sums: ClassificationSums) -> ClassificationScores | None:
        """Return the scores of a split; see `task.Task`."""
        count = int(sums.count.sum())
        if not count:
            return None
        # Exact but for one rounding, so micro-batches without an example change nothing.
        loss = math.fsum(sums.losses.astype(float))
        accuracy, accuracy_top5 = int(sums.hits.sum()) / count, int(sums.hits_top5.sum()) / count
        if self.num_classes < MIN_CLASSES_FOR_TOP5:
            accuracy_top5 = None
        return ClassificationScores(loss / count, accuracy, accuracy_top5, count)
