"""What a network learns: the loss of an example, and the scores of a split."""

from typing import Any, Protocol

import jax


class Scores(Protocol):
    """Of the examples of a split that count."""

    loss: float  # mean over them
    num_examples: int

    @property
    def score(self) -> float:
        """The one by which the best validation is chosen; higher is better."""

    def row_fields(self) -> dict[str, float | int | None]:
        """What a row of metrics.jsonl says of the validation split."""


class Task(Protocol):
    """A frozen dataclass, since programs are shared between runs of equal tasks.

    In all of these `outputs` are what the network gives for a micro-batch of M examples, and `targets` what it
    should give.
    """

    def losses(self, outputs: Any, targets: Any) -> jax.Array:
        """float32 [M], one of each example, so that their sum does not depend on how a batch is split."""

    def metrics(self, outputs: Any, targets: Any) -> dict[str, jax.Array]:
        """What training reports beside the loss, by name: float32 [M] each, to be averaged over a batch."""

    def sums(self, outputs: Any, targets: Any, is_known: jax.Array) -> Any:
        """What `scores` are made of: a pytree of scalars, each a sum over the examples where `is_known` [M]."""

    def scores(self, sums: Any) -> Scores | None:
        """The scores of a split; None where nothing is known of any example.

        Args:
          sums: as of `sums`, but NumPy arrays [micro-batches], for the host to add up in more digits.
        """
