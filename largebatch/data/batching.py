"""The examples of every step, and the devices that hold them, in closed form.

An *original* is a training image as it was read; an *example* is one of its views. A seeded permutation spreads the
originals over *virtual shards*, and these over devices: a device holds all views of its originals.
An epoch visits every example once. It has as many *passes* as there are views: in each pass every shard visits all
its originals, in a new order and each in another view. Batches take the next positions of the epoch, round-robin
over shards. Where shards hold unequal numbers of originals, the last round of every pass goes to those that hold
one more.

So each example is visited once per epoch and each original once per pass, no data move between devices, and a batch
may be of any size. The examples of a step follow from the seed and the number of shards. They do not depend on the
number of devices: devices may come and go, and the batches stay the same. The place of any step follows from (seed,
epoch, offset) alone: resuming replays nothing.

Example: 5 originals with 2 views in 3 shards, on 2 devices. Shards 0 and 1 hold 2 originals, shard 2 holds 1.
Device 0 has shards 0 and 2, device 1 has shard 1. An epoch has 10 positions in two passes of 5:

    pass        0              1
    position    0 1 2 3 4      5 6 7 8 9
    shard       0 1 2 0 1      0 1 2 0 1
    device      0 1 0 0 1      0 1 0 0 1

A batch of 4 at offset 3 has the positions 3 to 6. Device 0 gets positions 3 and 5: the second visit of shard 0 in
pass 0, and the first of shard 0 in pass 1. Counted on device 0 alone, these are its positions 2 and 3 in the epoch,
so `DeviceBatch.start` is 2. As device 0 holds 3 originals, these are position 2 of pass 0 and position 0 of pass 1.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from largebatch.util import BadSetting

ORDER_VERSION = 4  # version of the order of examples; a run is resumed only by code of the same version
# Numbers of virtual shards to choose from: most numbers of devices get equal shares of them, or nearly. A shard
# should hold enough originals to be shuffled; but a small pod should find enough shards in any data set.
SHARD_COUNTS = (32, 96, 192, 480, 960, 1920, 3840)
MIN_ORIGINALS_PER_SHARD = 32
MOST_SHARDS_PER_ORIGINAL = 4  # with more, most shards would be empty
# Each round halves what is left of the order before. Tests over 8 million keys see nothing of that order from 14
# rounds on (LOG.md); 10 more rounds leave a thousandth of it.
SHUFFLE_ROUNDS = 24


@dataclasses.dataclass(frozen=True)
class DataSharding:
    """The sharding of `num_originals * views` examples over virtual shards, and of these over devices.

    Original i of the seeded permutation belongs to shard i % num_shards, and shard s to device s % num_devices.
    """

    num_originals: int
    num_shards: int
    num_devices: int
    views: int

    @property
    def num_examples(self) -> int:
        """Examples in one epoch, over all devices."""
        return self.num_originals * self.views

    @property
    def max_originals(self) -> int:
        """Originals on the device that holds the most."""
        return self.num_originals_of(0)

    def originals_of(self, device: int, seed: int) -> np.ndarray:
        """Return the global indices of the originals that `device` holds, in the order it holds them."""
        order = np.random.default_rng(seed).permutation(self.num_originals)
        shards = np.arange(self.num_originals) % self.num_shards
        return order[shards % self.num_devices == device]

    def num_originals_in_shard(self, shard):
        """Return the number of originals in `shard`, which may be traced."""
        return self.num_originals // self.num_shards + (shard < self.num_originals % self.num_shards)

    def num_originals_of(self, device):
        """Return the number of originals that `device` holds; `device` may be traced."""
        return self._count_in_a_pass(self.num_originals, device)

    def num_shards_of(self, device):
        """Return the number of virtual shards that `device` holds; `device` may be traced."""
        return self._shards_below(self.num_shards, device)

    def _shards_below(self, shard, device):
        """Count the shards before `shard` that belong to `device`."""
        return (shard + self.num_devices - 1 - device) // self.num_devices

    def _count_in_a_pass(self, position, device):
        """Count those of a pass's first `position` positions that belong to `device`."""
        rounds, shard = divmod(position, self.num_shards)
        return rounds * self.num_shards_of(device) + self._shards_below(shard, device)

    def count_before(self, position, device):
        """Count those of an epoch's first `position` positions that belong to `device`; both may be traced."""
        passes, position_in_pass = divmod(position, self.num_originals)
        return passes * self.num_originals_of(device) + self._count_in_a_pass(position_in_pass, device)

    def share_bounds(self, batch_size: int) -> tuple[int, int]:
        """Return the fewest and the most examples of a batch that one device gets, wherever the batch begins.

        A batch that begins a round later has the same shares, unless it then ends in another pass. So the first
        round of a pass, and the first from which batches end in another, stand for all.
        """
        a_round, devices = np.arange(self.num_shards), np.arange(self.num_devices)
        begins = np.concatenate([a_round, -batch_size % self.num_originals + a_round])[:, None] % self.num_originals
        shares = self.count_before(begins + batch_size, devices) - self.count_before(begins, devices)
        return int(shares.min()), int(shares.max())


def choose_sharding(virtual_shards: int | None, num_originals: int, num_devices: int, views: int) -> DataSharding:
    """Choose the sharding of the training set over virtual shards and devices.

    Args:
      virtual_shards: a config's batch.virtual_shards; None to choose by `num_originals`.
    Raises:
      BadSetting: there are fewer shards than devices, or far more than originals.
    """
    fitting = [count for count in SHARD_COUNTS if count * MIN_ORIGINALS_PER_SHARD <= num_originals]
    num_shards = virtual_shards or max(fitting, default=SHARD_COUNTS[0])
    most = max(MOST_SHARDS_PER_ORIGINAL * num_originals, SHARD_COUNTS[0])
    found = f"{num_originals} training images on {num_devices} devices"
    if num_devices > most:
        raise BadSetting(f"dataset: {found}; allowed: up to {most} devices")
    if not num_devices <= num_shards <= most:
        chosen = "" if virtual_shards else " by itself"
        raise BadSetting(
            f"batch.virtual_shards: {num_shards}{chosen} for {found}; "
            f"allowed: an integer from {num_devices} to {most}"
        )
    return DataSharding(num_originals, num_shards, num_devices, views)


@dataclasses.dataclass(frozen=True)
class Grouping:
    """The groups of a device's part of a batch, and the micro-batches that take them.

    The examples are spread evenly over the fewest groups that hold them, so that none is left with a few: sizes
    differ by one at most. Each group is padded at its end. A micro-batch takes the next groups; those beyond the
    last are empty.
    """

    micro_batch_size: int  # M, places of one gradient evaluation
    group_size: int  # places of a group, which batch normalisation takes together: a divisor of M

    @property
    def groups_at_once(self) -> int:
        """Groups in a micro-batch."""
        return self.micro_batch_size // self.group_size

    def num_groups(self, count):
        """Return the number of groups of `count` examples, which may be traced."""
        return -(-count // self.group_size)

    def num_micro_batches(self, count):
        """Return the number of micro-batches of `count` examples, which may be traced."""
        return -(-self.num_groups(count) // self.groups_at_once)

    def groups_of(self, count, index):
        """Return where each group of micro-batch `index` begins among `count` examples, and its length.

        Args:
          count, index: integers, which may be traced.
        Returns:
          Two int32 [groups at once].
        """
        group, num_groups = index * self.groups_at_once + jnp.arange(self.groups_at_once), self.num_groups(count)
        # The first `count % num_groups` groups have one more example; written so that int32 cannot overflow.
        examples_each, one_more = count // num_groups, count % num_groups
        begins = group * examples_each + jnp.minimum(group, one_more)
        return begins, jnp.where(group < num_groups, examples_each + (group < one_more), 0)


@struct.dataclass
class DeviceBatch:
    """The part of one batch that falls to one device; all int32 scalars, which may be traced."""

    device: jax.Array  # index of the device, over all hosts
    epoch: jax.Array  # epoch in which the batch begins
    start: jax.Array  # the device's own position in that epoch, of the first example
    num_in_epoch: jax.Array  # examples of that epoch; the rest begin the next one
    count: jax.Array  # examples in all; 0 is possible


@struct.dataclass
class MicroBatchIndices:
    """The examples of a device that form one micro-batch of M, group by group."""

    examples: jax.Array  # int32 [M], original * views + view, by the device's own numbering; padding is a valid one
    visit_keys: jax.Array  # uint32 [M], for random changes of a visit; the same on any number of devices
    weights: jax.Array  # float32 [M]: 1, and 0 for padding


def device_batch(sharding: DataSharding, device, epoch, offset, batch_size) -> DeviceBatch:
    """Return the part of a batch that falls to `device`; all arguments but `sharding` may be traced.

    The batch is the positions [offset, offset + batch_size) of `epoch`, running on into the next
    epoch where it passes the end. Requires 1 <= batch_size <= num_examples, 0 <= offset < num_examples.
    """
    end = offset + batch_size
    start = sharding.count_before(offset, device)
    in_this_epoch = sharding.count_before(jnp.minimum(end, sharding.num_examples), device) - start
    in_the_next = sharding.count_before(jnp.maximum(end - sharding.num_examples, 0), device)
    return DeviceBatch(device, epoch, start, in_this_epoch, in_this_epoch + in_the_next)


def micro_batch(sharding: DataSharding, batch: DeviceBatch, index, grouping: Grouping, seed) -> MicroBatchIndices:
    """Return micro-batch number `index` of a device's part of a batch; index and seed may be traced."""
    begins, lengths = grouping.groups_of(batch.count, index)
    place = jnp.arange(grouping.group_size, dtype=jnp.int32)
    is_example = (place < lengths[:, None]).ravel()
    position_in_batch = jnp.where(is_example, (begins[:, None] + place).ravel(), 0)

    # The position in the batch gives the device's position in its epoch.
    in_first_epoch = position_in_batch < batch.num_in_epoch
    epoch = jnp.where(in_first_epoch, batch.epoch, batch.epoch + 1)
    position_in_epoch = jnp.where(
        in_first_epoch, batch.start + position_in_batch, position_in_batch - batch.num_in_epoch
    )

    # The device's position in its epoch gives a pass over its originals, and the position in that pass.
    num_originals = jnp.maximum(sharding.num_originals_of(batch.device), 1)
    last_position = num_originals * sharding.views - 1
    pass_index, position_in_pass = jnp.divmod(jnp.minimum(position_in_epoch, last_position), num_originals)

    # That gives one of the device's shards, which are every num_devices-th, and the position in a pass over it.
    num_shards = jnp.maximum(sharding.num_shards_of(batch.device), 1)
    position_in_shard, shard_on_device = jnp.divmod(position_in_pass, num_shards)
    shard = batch.device + sharding.num_devices * shard_on_device

    # Each pass over a shard has its own order of originals, each original its own order of views over the passes.
    in_shard = jnp.maximum(sharding.num_originals_in_shard(shard), 1)
    pass_key = shuffle_key(seed, epoch, shard, pass_index)
    original = shuffled(position_in_shard, in_shard, pass_key)
    views_key = shuffle_key(seed, epoch, shard, sharding.views + original)
    view = shuffled(pass_index, sharding.views, views_key)

    place_on_device = original * num_shards + shard_on_device
    place_in_permutation = original * sharding.num_shards + shard  # the same on any number of devices
    return MicroBatchIndices(
        examples=place_on_device * sharding.views + view,
        visit_keys=shuffle_key(seed, epoch, place_in_permutation, view),
        weights=is_example.astype(jnp.float32),
    )


def shuffle_key(*parts) -> jax.Array:
    """Make a uint32 key of integers, such as seed, epoch and device, that may be traced and broadcast."""
    key = jnp.uint32(0x9E3779B9)
    for part in parts:
        key = _mix(key ^ _mix(jnp.asarray(part).astype(jnp.uint32) + jnp.uint32(0x85EBCA6B)))
    return key


def shuffled(index, length, key) -> jax.Array:
    """Return element `index` of a pseudo-random permutation of range(length), without building it.

    The swap-or-not shuffle (Hoang, Morris and Rogaway, An Enciphering Scheme Based on a Card Shuffle, CRYPTO 2012):
    each round pairs the values whose sum is a random number modulo the length, and a hash of the pair says whether
    its two swap. That is a permutation for any length, in the same number of rounds. A sort per epoch would give
    the same guarantee, but needs memory in the training state and work whenever a batch crosses an epoch.

    Args:
      index: int32 array, 0 <= index < length.
      length: int32, may be traced; at least 1.
      key: uint32 array that broadcasts against `index`.
    """
    length = jnp.asarray(length).astype(jnp.uint32)
    shape = jnp.broadcast_shapes(index.shape, length.shape, key.shape)
    value = jnp.broadcast_to(index.astype(jnp.uint32), shape)
    return _shuffle_rounds(value, length, key).astype(jnp.int32)


@functools.partial(jax.jit, inline=True)  # traced once for the four calls of a step
def _shuffle_rounds(value: jax.Array, length: jax.Array, key: jax.Array) -> jax.Array:
    """Run all rounds of `shuffled` on uint32 arrays."""
    # Written out, so that no loop is left in the program: accelerators start every iteration from the host.
    for number in range(SHUFFLE_ROUNDS):
        round_key = _mix(key + jnp.uint32(number * 0x9E3779B9 & 0xFFFFFFFF))
        pair_sum = _high_word(round_key, length)  # in range(length)
        partner = pair_sum - value + jnp.where(value > pair_sum, length, 0)  # wraps on the way, ends below length
        swaps = _mix(round_key ^ jnp.maximum(value, partner)) >> 31  # the same for both of a pair
        value = jnp.where(swaps == 1, partner, value)
    return value


def _high_word(one: jax.Array, other: jax.Array) -> jax.Array:
    """Return the upper 32 of the 64 bits of a product of two uint32, as JAX has no uint64 by default.

    For `one` drawn from all uint32 it is a number below `other`, and cheaper than a remainder.
    """
    one_high, one_low = one >> 16, one & 0xFFFF
    other_high, other_low = other >> 16, other & 0xFFFF
    middle = one_high * other_low + (one_low * other_low >> 16)
    rest = one_low * other_high + (middle & 0xFFFF)
    return one_high * other_high + (middle >> 16) + (rest >> 16)


def _mix(value: jax.Array) -> jax.Array:
    """Apply the 32-bit finaliser of MurmurHash3 (Appleby, public domain): every bit reaches every bit."""
    value ^= value >> 16
    value *= jnp.uint32(0x85EBCA6B)
    value ^= value >> 13
    value *= jnp.uint32(0xC2B2AE35)
    return value ^ (value >> 16)
