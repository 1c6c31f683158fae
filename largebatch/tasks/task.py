"""What a network learns: the loss of an example, and the scores of a split."""

from typing import Any, Protocol

import jax

from largebatch.tasks.kinds import TaskKind


class Scores(Protocol):
    """Of the examples of a split that count."""

    loss: float  # mean over them
    num_examples: int

    @property
    def score(self) -> float:
        """The one by which the best validation is chosen; which way it goes says `TaskKind`."""

    def row_fields(self) -> dict[str, float | int | None]:
        """What a row of metrics.jsonl says of the validation split."""


class Task(Protocol):
    """A frozen dataclass, since programs are shared between runs of equal tasks.

    In all of these `outputs` are what the network gives for a micro-batch of M examples, and `targets` what it
    should give.

    Attributes:
      kind: what is known of it by its name.
      outputs: what a network is asked for: the number of classes, or the channels of each map.
      metric_names: of what `metrics` returns.
      kept_names: of the columns of `kept`; () where they are those of the outputs.
      target_planes: how many of the last channels of a stored image are to be predicted, not looked at.
    """

    kind: TaskKind
    outputs: int | tuple[int, ...]
    metric_names: tuple[str, ...]
    kept_names: tuple[str, ...]
    target_planes: int

    def targets(self, labels: jax.Array, planes: jax.Array) -> Any:
        """The targets of classes int32 [M] and integer planes [M, H, W, target_planes]."""

    def losses(self, outputs: Any, targets: Any) -> jax.Array:
        """float32 [M], one of each example, so that their sum does not depend on how a batch is split."""

    def metrics(self, outputs: Any, targets: Any) -> dict[str, jax.Array]:
        """What training reports beside the loss, by name: float32 [M] each, to be averaged over a batch."""

    def sums(self, outputs: Any, targets: Any, is_known: jax.Array) -> Any:
        """What `scores` are made of: a pytree of sums over the examples where `is_known` [M].

        Whole numbers are int32: their sum over devices may be above that.
        """

    def kept(self, outputs: Any, targets: Any) -> jax.Array:
        """What a run keeps of each validation example beside the scores, float32 [M, columns]."""

    def predictions(self, outputs: Any) -> jax.Array:
        """What is predicted of each example, for evaluate.py to write: [M, ...]."""

    def scores(self, sums: Any) -> Scores | None:
        """The scores of a split; None where nothing is known of any example.

        Args:
          sums: as of `sums`, but NumPy arrays [micro-batches, ...], for the host to add up in more digits; whole
            numbers are int64.
        """
