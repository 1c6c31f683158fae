"""The interface of tasks: the loss of an example, and the scores of a split."""

from typing import Any, Protocol

import jax

from largebatch.tasks.kinds import TaskKind


class Scores(Protocol):
    """Scores over the examples of a split that count."""

    loss: float  # mean over the examples
    num_examples: int

    @property
    def score(self) -> float:
        """The score by which the best validation is chosen; `TaskKind` says which way it goes."""

    def row_fields(self) -> dict[str, float | int | None]:
        """Return the columns of a row of metrics.jsonl for the validation split."""


class Task(Protocol):
    """A task, as a frozen dataclass, since programs are shared between runs of equal tasks.

    In all methods `outputs` are the network's for a micro-batch of M examples, and `targets` what they should be.

    Attributes:
      kind: kind of the task, by its name.
      outputs: outputs of the network: the number of classes, or the channels of each dense target.
      metric_names: names of the metrics that `metrics` returns.
      kept_names: names of the columns of `kept`; () where they are those of the outputs.
      target_planes: number of the last channels of a stored image that are its dense targets.
    """

    kind: TaskKind
    outputs: int | tuple[int, ...]
    metric_names: tuple[str, ...]
    kept_names: tuple[str, ...]
    target_planes: int

    def targets(self, labels: jax.Array, planes: jax.Array) -> Any:
        """Return the targets of classes int32 [M] and integer planes [M, H, W, target_planes]."""

    def losses(self, outputs: Any, targets: Any) -> jax.Array:
        """Return one loss per example, float32 [M], so that sums do not depend on how a batch is split."""

    def metrics(self, outputs: Any, targets: Any) -> dict[str, jax.Array]:
        """Return the metrics of training beside the loss, by name: float32 [M], to be averaged over a batch."""

    def sums(self, outputs: Any, targets: Any, is_known: jax.Array) -> Any:
        """Return the sums for `scores`: a pytree of sums over the examples where `is_known` [M].

        Whole numbers are int32: their sum over devices may be above that.
        """

    def kept(self, outputs: Any, targets: Any) -> jax.Array:
        """Return the per-example outputs that a run keeps for validation examples, float32 [M, columns]."""

    def predictions(self, outputs: Any) -> jax.Array:
        """Return the prediction for each example, for evaluate.py to write: [M, ...]."""

    def scores(self, sums: Any) -> Scores | None:
        """Return the scores of a split; None where no example is known.

        Args:
          sums: sums as by `sums`, but NumPy arrays [micro-batches, ...], for the host to add up in more digits;
            whole numbers are int64.
        """
