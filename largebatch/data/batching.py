"""Which examples of which device belong to which update, in closed form.

Originals are dealt to devices once, by a seeded permutation; every device holds all views of its
originals. Each epoch every device passes over its own originals as often as there are views, each pass in
a new order and each time with another view of each, and a batch takes the next positions of the epoch
round-robin over devices. Where devices hold unequal numbers, the last round of every pass goes to those that
hold one original more. So each example is visited once per epoch, each original once per pass, no data
moves between devices, a batch may be of any size, and the place of any update follows from
(seed, epoch, offset) alone: resuming replays nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Which examples form an update. A run is resumed only by code of the same version. 1: 8 Feistel rounds, and all
# short rounds at the end of the epoch.
ORDER_VERSION = 2
# Few bits mix slowly: over a million keys a chi-square test of pairs still finds 16 rounds of 3 bits (LOG.md).
_FEISTEL_ROUNDS, _FEISTEL_ROUNDS_OF_FEW_BITS, _FEW_BITS = 12, 24, 3


class Deal(NamedTuple):
    """How `num_originals * views` examples are spread over `num_devices` devices."""

    num_originals: int
    num_devices: int
    views: int

    @property
    def num_examples(self) -> int:
        """Examples in one epoch, over all devices."""
        return self.num_originals * self.views

    @property
    def max_originals(self) -> int:
        """Originals on the device that holds the most."""
        return -(-self.num_originals // self.num_devices)

    def originals_of(self, device: int, seed: int) -> np.ndarray:
        """Global indices of the originals that `device` holds, in the order it holds them."""
        order = np.random.default_rng(seed).permutation(self.num_originals)
        return order[device :: self.num_devices]

    def num_originals_of(self, device):
        """Originals that `device` holds; `device` may be traced."""
        return self.num_originals // self.num_devices + (device < self.num_originals % self.num_devices)

    def count_before(self, position, device):
        """How many of an epoch's first `position` positions belong to `device` (may be traced).

        A pass is `num_originals` positions, dealt round-robin over devices from device 0 on.
        """
        passes, inside = divmod(position, self.num_originals)
        in_this_pass = (inside + self.num_devices - 1 - device) // self.num_devices
        return passes * self.num_originals_of(device) + in_this_pass

    def share_bounds(self, batch_size: int) -> tuple[int, int]:
        """The fewest and the most examples of a batch that one device gets, wherever in the epoch it begins.

        A batch that begins a round later has the same shares, unless it then ends in another pass. So the first
        round of a pass, and the first from which batches end in another, stand for all.
        """
        devices = np.arange(self.num_devices)
        first_round, first_to_end_later = devices, -batch_size % self.num_originals + devices
        begins = np.concatenate([first_round, first_to_end_later])[:, None] % self.num_originals
        shares = self.count_before(begins + batch_size, devices) - self.count_before(begins, devices)
        return int(shares.min()), int(shares.max())


def epoch_and_offset(deal: Deal, examples_before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Epoch and position in it, int32, of updates that start after `examples_before` (int64) examples.

    Done on the host: the number of examples of a run does not fit 32 bits, an epoch does.
    """
    epoch, offset = np.divmod(np.asarray(examples_before, np.int64), deal.num_examples)
    return epoch.astype(np.int32), offset.astype(np.int32)


class Share(NamedTuple):
    """What one device does of one update: `first` examples end its epoch, the rest start the next."""

    epoch: jax.Array
    start: jax.Array
    first: jax.Array
    count: jax.Array


def device_share(deal: Deal, device, epoch, offset, batch_size) -> Share:
    """The part of a batch that falls to `device`; all arguments but `deal` may be traced.

    The batch is the positions [offset, offset + batch_size) of `epoch`, running on into the next
    epoch where it passes the end. Needs 1 <= batch_size <= deal.num_examples, 0 <= offset < num_examples.
    """
    end = offset + batch_size
    start = deal.count_before(offset, device)
    first = deal.count_before(jnp.minimum(end, deal.num_examples), device) - start
    rest = deal.count_before(jnp.maximum(end - deal.num_examples, 0), device)
    return Share(epoch, start, first, first + rest)


def micro_batch(deal: Deal, device, share: Share, index, num_micro_batches, size: int, seed):
    """Device-local example indices, visits and 0/1 weights of one micro-batch.

    A share is split evenly, so that no micro-batch is left with a few examples: sizes differ by one
    at most. Returns int32 [size] indices (padding points at a valid example), uint32 [size] keys of the visits, for
    what is random about them, and float32 [size] weights. A visit has the same key on any number of devices.
    """
    # floor((i + 1) * count / k) - floor(i * count / k), written so that int32 cannot overflow.
    base, extra = share.count // num_micro_batches, share.count % num_micro_batches
    begin = index * base + jnp.minimum(index, extra)
    length = base + (index < extra)
    lane = jnp.arange(size, dtype=jnp.int32)
    weights = (lane < length).astype(jnp.float32)
    nth = jnp.where(lane < length, begin + lane, 0)

    in_first = nth < share.first
    position = jnp.where(in_first, share.start + nth, nth - share.first)
    epoch = jnp.where(in_first, share.epoch, share.epoch + 1)
    held = jnp.maximum(deal.num_originals_of(device), 1)
    turn, nth = jnp.divmod(jnp.minimum(position, held * deal.views - 1), held)
    original = shuffled(nth, held, deal.max_originals, shuffle_key(seed, epoch, device, turn))
    view = shuffled(turn, deal.views, deal.views, shuffle_key(seed, epoch, device, deal.views + original))
    # Devices hold every num_devices-th of one permutation, whose places are the same for any number of them.
    place = original * deal.num_devices + device
    return original * deal.views + view, shuffle_key(seed, epoch, place, view), weights


def shuffle_key(*parts) -> jax.Array:
    """uint32 key made of integers, as seed, epoch and device, that may be traced and broadcast."""
    key = jnp.uint32(0x9E3779B9)
    for part in parts:
        key = _mix(key ^ _mix(jnp.asarray(part).astype(jnp.uint32) + jnp.uint32(0x85EBCA6B)))
    return key


def shuffled(index, length, max_length: int, key) -> jax.Array:
    """Element `index` of a pseudo-random permutation of range(length), without building it.

    A Feistel network over the next power of two at or above `max_length`, applied again wherever it
    leaves range(length) ("cycle walking": Black and Rogaway, Ciphers with Arbitrary Finite Domains,
    CT-RSA 2002). A sort per epoch would give the same guarantee, but needs memory in the training
    state and work whenever a batch crosses an epoch.

    Args:
      index: int32 array, 0 <= index < length.
      length: int32, may be traced; 1 <= length <= max_length.
      max_length: static bound, which fixes the number of bits.
      key: uint32 array that broadcasts against `index`.
    """
    bits = max(1, (max_length - 1).bit_length())
    rounds = _FEISTEL_ROUNDS_OF_FEW_BITS if bits <= _FEW_BITS else _FEISTEL_ROUNDS
    low_bits = bits - bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits // 2)) - 1

    def encrypt(value):
        high, low = value >> low_bits, value & low_mask
        for round_ in range(rounds):
            round_key = key + jnp.uint32(round_ * 0x9E3779B9 & 0xFFFFFFFF)
            if round_ % 2:
                low ^= _mix(high ^ round_key) & low_mask
            else:
                high ^= _mix(low ^ round_key) & high_mask
        return high << low_bits | low

    length = jnp.asarray(length).astype(jnp.uint32)
    walked = jax.lax.while_loop(
        lambda value: jnp.any(value >= length),
        lambda value: jnp.where(value >= length, encrypt(value), value),
        encrypt(jnp.broadcast_to(index.astype(jnp.uint32), jnp.broadcast_shapes(index.shape, key.shape))),
    )
    return walked.astype(jnp.int32)


def _mix(value: jax.Array) -> jax.Array:
    """The 32-bit finaliser of MurmurHash3 (Appleby, public domain): every bit reaches every bit."""
    value ^= value >> 16
    value *= jnp.uint32(0x85EBCA6B)
    value ^= value >> 13
    value *= jnp.uint32(0xC2B2AE35)
    return value ^ (value >> 16)
