"""Predictions, loss and accuracy over ALL examples of a split, across all hosts."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import lax

from largebatch.data.validation import UNKNOWN, DealtSplit
from largebatch.hosts import collectives
from largebatch.hosts.replicas import AXIS, pmap

TOP = 5
MIN_CLASSES_FOR_TOP5 = TOP + 1  # with fewer every example is among the first five


@dataclasses.dataclass(frozen=True)
class Scores:
    """Over `num_examples` examples."""

    loss: float  # mean cross-entropy, in nats
    accuracy: float  # 0..1
    accuracy_top5: float | None  # 0..1; None with fewer than MIN_CLASSES_FOR_TOP5 classes
    num_examples: int


@struct.dataclass
class Sums:
    """Over the labelled examples of one block; those of all devices, unless each has a run of its own."""

    losses: jax.Array  # float32 [micro-batches], one sum each, for the host to add up in float64
    hits: jax.Array  # int32
    hits_top5: jax.Array  # int32
    count: jax.Array  # int32


def make_predict(logits_fn: Callable, micro_batch_size: int, *, packed: bool = False, devices: list | None = None):
    """Predicts a block and reduces it where it lies, pmapped.

    Args:
      logits_fn: (variables, integer images [M, ...]) -> float32 logits [M, num_classes].
      micro_batch_size: images per forward pass, per device.
      packed: each device has a run of its own, and sums of its own [local devices, ...].
      devices: to compile for, where they are not here.
    Returns:
      (variables, Block), both with a leading local-device axis -> Sums, and the logits
      [local devices, n', num_classes] of this host's devices, n' >= rows of the block, which stay there.
    """

    def predict(variables, block):
        num_rows = len(block.labels)
        size = min(micro_batch_size, num_rows)

        def some(start):
            # The last slice may run over the end: it repeats the last row there, which then has no label.
            rows = start + jnp.arange(size)
            within = jnp.minimum(rows, num_rows - 1)
            logits = logits_fn(variables, block.images[within])
            return _sums(logits, jnp.where(rows < num_rows, block.labels[within], UNKNOWN)), logits

        starts = jnp.arange(-(-num_rows // size)) * size
        of_micro_batches, logits = lax.map(some, starts)
        sums = Sums(
            losses=of_micro_batches.losses,
            hits=jnp.sum(of_micro_batches.hits),
            hits_top5=jnp.sum(of_micro_batches.hits_top5),
            count=jnp.sum(of_micro_batches.count),
        )
        return sums if packed else lax.psum(sums, AXIS), logits.reshape(-1, logits.shape[-1])

    return pmap(predict, in_axes=(0, 0), out_axes=(0 if packed else None, 0), devices=devices)


def _sums(logits, labels) -> Sums:
    """Sums over one micro-batch.

    An example is a hit among the first k if fewer than k classes come before its own. The larger logit comes first,
    of equal ones the lower class, as with argmax. A logit that is NaN comes before all, and is never a hit.
    """
    is_known = labels != UNKNOWN
    labels = jnp.maximum(labels, 0)[:, None]
    own = jnp.take_along_axis(logits, labels, axis=1)
    comes_later = jnp.arange(logits.shape[1]) >= labels
    is_behind = (own > logits) | ((own == logits) & comes_later)
    rank = jnp.sum(~is_behind, axis=1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[:, 0])
    return Sums(
        losses=jnp.sum(jnp.where(is_known, losses, 0.0)),
        hits=jnp.sum(is_known & (rank < 1), dtype=jnp.int32),
        hits_top5=jnp.sum(is_known & (rank < TOP), dtype=jnp.int32),
        count=jnp.sum(is_known, dtype=jnp.int32),
    )


@dataclasses.dataclass(frozen=True)
class SplitLogits:
    """The logits of a split, on the devices where they were computed.

    A slice `logits[first:last]` is those examples' as NumPy array [n, num_classes] in the split's order, on every
    host; every host asks for it, and no more than the slice travels.

    Attributes:
      blocks: float32 [local devices, rows of a block or more, num_classes] each.
      rows_per_block: of a device.
      num_devices: see `DealtSplit`.
      shape: (examples, num_classes).
    """

    blocks: list[jax.Array]
    rows_per_block: int
    num_devices: int
    shape: tuple[int, int]

    def __getitem__(self, examples: slice) -> np.ndarray:
        first, last, _ = examples.indices(self.shape[0])
        first_row, end_row = first // self.num_devices, -(-last // self.num_devices)
        here = self._rows_of_local_devices(first_row, end_row)
        collectives.barrier()  # a host may be late from writing what came before
        of_all = collectives.gather(here).reshape(-1, *here.shape[1:])  # [devices, rows, num_classes]
        in_order = of_all.swapaxes(0, 1).reshape(-1, self.shape[1])
        skipped = first - first_row * self.num_devices
        return in_order[skipped : skipped + last - first]

    def _rows_of_local_devices(self, first_row: int, end_row: int) -> np.ndarray:
        """[local devices, end_row - first_row, num_classes]."""
        pieces = []
        for number, block in enumerate(self.blocks):
            start = number * self.rows_per_block
            begin = max(first_row - start, 0)
            end = min(end_row - start, self.rows_per_block)
            if begin < end:
                shards = [shard.data for shard in block.addressable_shards]
                pieces.append(np.concatenate([_fetch_rows(shard, begin, end) for shard in shards]))
        return np.concatenate(pieces, axis=1)


def _fetch_rows(shard: jax.Array, begin: int, end: int) -> np.ndarray:
    """Rows of one device [1, rows, num_classes], on the host; of a small part only that is copied."""
    if 2 * (end - begin) > shard.shape[1]:
        return np.asarray(shard)[:, begin:end]
    return np.asarray(_slice_rows(shard, begin, end - begin))


@functools.partial(jax.jit, static_argnums=2)
def _slice_rows(shard, begin, size):
    return lax.dynamic_slice_in_dim(shard, begin, size, axis=1)


@dataclasses.dataclass(frozen=True)
class SplitPredictions:
    """What was predicted for a split; the scores are None where no example has a label."""

    scores: Scores | None
    logits: SplitLogits


def predict_split(predict: Callable, variables, split: DealtSplit, micro_batch_size: int) -> SplitPredictions:
    """Predicts all of a split; every host calls it.

    Args:
      predict: made by `make_predict` with this micro-batch size.
      variables: of the network, with a leading local-device axis.
    Raises:
      UserError: an image cannot be read; see `DealtSplit.blocks`.
    """
    sums, logits = [], []
    for block in split.blocks(micro_batch_size):
        # Only started here: the next block is read while the devices work on this one.
        sums_of_block, logits_of_block = predict(variables, block)
        sums.append(sums_of_block)
        logits.append(logits_of_block)
        if len(sums) > 1:
            jax.block_until_ready(sums[-2])  # so that no more than two blocks are on the devices
    num_classes = logits[0].shape[-1]
    shape = (len(split.labels), num_classes)
    on_devices = SplitLogits(logits, split.rows_per_block(micro_batch_size), split.num_devices, shape)
    return SplitPredictions(scores_of(sums, num_classes), on_devices)


def scores_of(sums: list[Sums], num_classes: int) -> Scores | None:
    """Scores of the blocks of a split; None where no example has a label."""
    count = sum(int(block.count) for block in sums)
    if not count:
        return None
    # Exact but for one rounding, so blocks without an example at the end change nothing.
    loss = math.fsum(float(loss) for block in sums for loss in np.asarray(block.losses))
    hits = sum(int(block.hits) for block in sums)
    hits_top5 = sum(int(block.hits_top5) for block in sums)
    accuracy_top5 = hits_top5 / count if num_classes >= MIN_CLASSES_FOR_TOP5 else None
    return Scores(loss / count, hits / count, accuracy_top5, count)
