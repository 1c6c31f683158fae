"""Kinds of tasks by name: their targets and their scores. JAX is not imported."""

import dataclasses
import math
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True)
class TaskKind:
    """A task that a config can name.

    Attributes:
      name: name in a config's `task`.
      has_mask, has_depth: whether each pixel has a class or a depth; with neither each image has a class.
      score: name of the score; with "val_" before it, its column in metrics.jsonl.
      score_words: the score in words.
      higher_is_better: whether higher scores are better.
      fields: fields of a config's `task` that matter to it.
    """

    name: str
    has_mask: bool
    has_depth: bool
    score: str
    score_words: str
    higher_is_better: bool
    fields: frozenset[str]

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


CLASSIFICATION = TaskKind(
    name="classification",
    has_mask=False,
    has_depth=False,
    score="accuracy",
    score_words="accuracy",
    higher_is_better=True,
    fields=frozenset(),
)
SEGMENTATION = TaskKind(
    name="segmentation",
    has_mask=True,
    has_depth=False,
    score="mean_iou",
    score_words="mean IoU",
    higher_is_better=True,
    fields=frozenset({"mask_loss"}),
)
DEPTH = TaskKind(
    name="depth",
    has_mask=False,
    has_depth=True,
    score="depth_rmse",
    score_words="depth RMSE",
    higher_is_better=False,
    fields=frozenset({"depth_loss"}),
)
MASK_DEPTH = dataclasses.replace(
    SEGMENTATION,
    name="mask_depth",
    has_depth=True,
    fields=frozenset({"mask_loss", "depth_loss", "depth_weight"}),
)
KINDS = {kind.name: kind for kind in (CLASSIFICATION, SEGMENTATION, DEPTH, MASK_DEPTH)}


def kind_of(config: Mapping) -> TaskKind:
    """Return the kind of a run's task, by its config; classification where that names none, as in older code."""
    task = config.get("task")
    name = task.get("name") if isinstance(task, Mapping) else None
    return KINDS.get(name, CLASSIFICATION) if isinstance(name, str) else CLASSIFICATION
