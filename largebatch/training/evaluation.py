"""Predictions and scores over ALL examples of a split, across all hosts."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from largebatch.data.dataset import UNKNOWN
from largebatch.data.sharded_split import ShardedSplit
from largebatch.hosts import collectives
from largebatch.hosts.replicas import AXIS, pmap
from largebatch.tasks.planes import split_planes
from largebatch.tasks.scores import Scores
from largebatch.tasks.task import Task


def make_predict(
    logits_fn: Callable,
    task: Task,
    stored_shape: tuple[int, int, int],
    micro_batch_size: int,
    *,
    whole: bool = False,
    devices: list | None = None,
):
    """Make the pmapped program that predicts a block and reduces it on the devices.

    Args:
      logits_fn: (variables, integer images [M, H, W, C]) -> outputs of the network, float32.
      stored_shape: shape of a stored image, with its dense targets.
      micro_batch_size: images per forward pass, per device.
      whole: whether to keep the predictions in place of the outputs that a run keeps; see `task.Task`.
      devices: devices to compile for, which need not be attached; None for this host's.
    Returns:
      (variables, Block), both with a leading local-device axis -> the sums of the task over all devices (see
      `in_halves`), each [micro-batches, ...]; and the per-example outputs of this host's devices, which stay
      there: [local devices, n', ...], n' >= rows of the block.
    """

    def predict(variables, block):
        num_rows = len(block.labels)
        size = min(micro_batch_size, num_rows)

        def some(start):
            # The last slice may run over the end: there it repeats the last row, which does not count again.
            rows = start + jnp.arange(size)
            within = jnp.minimum(rows, num_rows - 1)
            labels = block.labels[within]
            images, planes = split_planes(block.images[within].reshape(-1, *stored_shape), task.target_planes)
            outputs = logits_fn(variables, images)
            targets, is_known = planes if task.target_planes else labels, (rows < num_rows) & (labels != UNKNOWN)
            sums, kept = task.evaluate(outputs, targets, is_known)
            return in_halves(sums), task.predictions(outputs) if whole else kept

        starts = jnp.arange(-(-num_rows // size)) * size
        sums, kept = lax.map(some, starts)
        return lax.psum(sums, AXIS), kept.reshape(-1, *kept.shape[2:])

    return pmap(predict, in_axes=(0, 0), out_axes=(None, 0), devices=devices)


def in_halves(sums):
    """Split whole numbers int32 [...] of a pytree into [..., 2]: how many times 65,536, and the rest.

    The pixels of all devices may be more than an int32 holds; the sums of halves are not.
    """
    return _map_integers(lambda sum_: jnp.stack([sum_ >> 16, sum_ & 0xFFFF], axis=-1), sums)


def from_halves(sums):
    """Join the NumPy arrays that `in_halves` split to whole numbers int64."""
    return _map_integers(lambda sum_: (sum_[..., 0].astype(np.int64) << 16) + sum_[..., 1], sums)


def _map_integers(function: Callable, tree):
    return jax.tree.map(lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.integer) else x, tree)


@dataclasses.dataclass(frozen=True)
class SplitPredictions:
    """The scores of a split, and its per-example outputs on the devices that computed them.

    A slice `predictions[first:last]` is a NumPy array [n, ...] in the split's order, on every host. Slicing is
    collective; only the slice crosses hosts.

    Attributes:
      scores: None where no example's targets are known.
      blocks: one array for each block, [local devices, rows of a block or more, ...].
      rows_per_block: rows of a device in each block.
      num_devices: number of devices of all hosts.
      shape: (examples, ...); for classes (examples, num_classes).
    """

    scores: Scores | None
    blocks: list[jax.Array]
    rows_per_block: int
    num_devices: int
    shape: tuple[int, ...]

    def __getitem__(self, examples: slice) -> np.ndarray:
        first, last, _ = examples.indices(self.shape[0])
        first_row, end_row = first // self.num_devices, -(-last // self.num_devices)
        pieces = []  # rows [local devices, n, ...] of this host's devices
        for number, block in enumerate(self.blocks):
            start = number * self.rows_per_block
            begin, end = max(first_row - start, 0), min(end_row - start, self.rows_per_block)
            if begin < end:
                shards = [shard.data for shard in block.addressable_shards]
                pieces.append(np.concatenate([np.asarray(shard[:, begin:end]) for shard in shards]))
        here = np.concatenate(pieces, axis=1)
        all_rows = collectives.gather(here).reshape(-1, *here.shape[1:])  # [devices, rows, ...]
        in_order = all_rows.swapaxes(0, 1).reshape(-1, *self.shape[1:])
        skipped = first - first_row * self.num_devices
        return in_order[skipped : skipped + last - first]


def predict_split(
    predict: Callable, variables, split: ShardedSplit, micro_batch_size: int, task: Task
) -> SplitPredictions:
    """Predict all examples of a split. Collective.

    Args:
      predict: program made by `make_predict` with this micro-batch size and task.
      variables: variables of the network, with a leading local-device axis.
    Raises:
      UserError: an image cannot be read; see `ShardedSplit.blocks`.
    """
    sums, blocks = [], []
    for block in split.blocks(micro_batch_size):
        # Only started here: the next block is read while the devices work on this one.
        block_sums, block_outputs = predict(variables, block)
        sums.append(block_sums)
        blocks.append(block_outputs)
        if len(sums) > 1:
            jax.block_until_ready(sums[-2])  # so that no more than two blocks are on the devices
    scores = task.scores(from_halves(jax.tree.map(lambda *parts: np.concatenate(parts), *sums)))
    shape = (len(split.dataset.labels), *blocks[0].shape[2:])
    return SplitPredictions(scores, blocks, split.rows_per_block(micro_batch_size), split.num_devices, shape)
