"""Predictions and scores over ALL examples of a split, across all hosts."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from largebatch.data.validation import UNKNOWN, DealtSplit
from largebatch.hosts import collectives
from largebatch.hosts.replicas import AXIS, pmap
from largebatch.tasks.task import Scores, Task


def make_predict(
    logits_fn: Callable, task: Task, micro_batch_size: int, *, packed: bool = False, devices: list | None = None
):
    """Predicts a block and reduces it where it lies, pmapped.

    Args:
      logits_fn: (variables, integer images [M, ...]) -> float32 logits [M, num_classes].
      micro_batch_size: images per forward pass, per device.
      packed: each device has a run of its own, and sums of its own [local devices, ...].
      devices: to compile for, where they are not here.
    Returns:
      (variables, Block), both with a leading local-device axis -> the sums of the task over all devices, each
      [micro-batches], or [local devices, micro-batches] if packed; and the logits [local devices, n', num_classes],
      n' >= rows of the block, of this host's devices, which stay there.
    """

    def predict(variables, block):
        num_rows = len(block.labels)
        size = min(micro_batch_size, num_rows)

        def some(start):
            # The last slice may run over the end: it repeats the last row there, which then counts nowhere.
            rows = start + jnp.arange(size)
            within = jnp.minimum(rows, num_rows - 1)
            labels = block.labels[within]
            logits = logits_fn(variables, block.images[within])
            return task.sums(logits, labels, (rows < num_rows) & (labels != UNKNOWN)), logits

        starts = jnp.arange(-(-num_rows // size)) * size
        sums, logits = lax.map(some, starts)
        return sums if packed else lax.psum(sums, AXIS), logits.reshape(-1, logits.shape[-1])

    return pmap(predict, in_axes=(0, 0), out_axes=(0 if packed else None, 0), devices=devices)


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
    """What was predicted for a split; the scores are None where nothing is known of any example."""

    scores: Scores | None
    logits: SplitLogits


def predict_split(
    predict: Callable, variables, split: DealtSplit, micro_batch_size: int, task: Task
) -> SplitPredictions:
    """Predicts all of a split; every host calls it.

    Args:
      predict: made by `make_predict` with this micro-batch size and task.
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
    shape = (len(split.labels), logits[0].shape[-1])
    on_devices = SplitLogits(logits, split.rows_per_block(micro_batch_size), split.num_devices, shape)
    of_all = jax.tree.map(lambda *of_blocks: np.concatenate(of_blocks), *sums)
    return SplitPredictions(task.scores(of_all), on_devices)
