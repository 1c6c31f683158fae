"""Kinds of tasks by name: their targets and their scores. JAX is not imported."""

import dataclasses
import math
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True)
class TaskKind:
    """A task that a config can name.

    Attributes:
      name: name in a config's `task`.
      score: name of the score; with "val_" before it, its column in metrics.jsonl.
      score_words: the score in words.
      higher_is_better: whether higher scores are better.
      has_mask, has_depth: whether each pixel has a class or a depth; with neither each image has a class.
      metric_names: names of the metrics of training.
      kept_names: names of the columns that a run keeps of validation examples; () where it keeps the outputs.
      fields: fields of a config's `task` that matter to it.
    """

    name: str
    score: str
    score_words: str
    higher_is_better: bool = True
    has_mask: bool = False
    has_depth: bool = False
    metric_names: tuple[str, ...] = ()
    kept_names: tuple[str, ...] = ()
    fields: frozenset[str] = frozenset()

    @property
    def of_pixels(self) -> bool:
        """True where each pixel has a target."""
        return self.has_mask or self.has_depth

    @property
    def score_column(self) -> str:
        """The score's column in metrics.jsonl."""
        return f"val_{self.score}"

    def rank(self, score: float | None) -> float:
        """Return a number by which scores are sorted, best first; None and NaN come last."""
        if score is None or math.isnan(score):
            return math.inf
        return -score if self.higher_is_better else score

    def is_better(self, score: float, other: float | None) -> bool:
        """Tell whether a score is better than another one; any is better than none."""
        return other is None or self.rank(score) < self.rank(other)

    def reaches(self, score: float | None, target: float) -> bool:
        """Tell whether a score is as good as the target."""
        return self.rank(score) <= self.rank(target)

    def best(self, scores: Iterable[float | None]) -> float | None:
        """Return the best of the scores that are known."""
        return min((score for score in scores if score is not None), key=self.rank, default=None)


CLASSIFICATION = TaskKind("classification", "accuracy", "accuracy", metric_names=("accuracy",))
SEGMENTATION = TaskKind(
    "segmentation",
    "mean_iou",
    "mean IoU",
    has_mask=True,
    metric_names=("pixel_accuracy",),
    kept_names=("loss", "mean_iou"),
    fields=frozenset({"mask_loss"}),
)
DEPTH = TaskKind(
    "depth",
    "depth_rmse",
    "depth RMSE",
    higher_is_better=False,
    has_depth=True,
    metric_names=("depth_error",),
    kept_names=("loss", "depth_rmse"),
    fields=frozenset({"depth_loss"}),
)
MASK_DEPTH = dataclasses.replace(
    SEGMENTATION,
    name="mask_depth",
    has_depth=True,
    metric_names=("pixel_accuracy", "depth_error"),
    kept_names=("loss", "mean_iou", "depth_rmse"),
    fields=frozenset({"mask_loss", "depth_loss", "depth_weight"}),
)
KINDS = {kind.name: kind for kind in (CLASSIFICATION, SEGMENTATION, DEPTH, MASK_DEPTH)}


def kind_of(config: Mapping) -> TaskKind:
    """Return the kind of a run's task, by its config; classification where that names none."""
    return KINDS.get((config.get("task") or {}).get("name"), CLASSIFICATION)
