"""The order of examples once more, in plain NumPy: a list of all visits, position by position, without devices."""

from functools import cache

import numpy as np

ROUNDS = 24


def mix(value):
    """The finaliser of MurmurHash3, for 32 bits; `value` is uint32 in 64 bits."""
    value = value ^ value >> 16
    value = value * 0x85EBCA6B & 0xFFFFFFFF
    value = value ^ value >> 13
    value = value * 0xC2B2AE35 & 0xFFFFFFFF
    return value ^ value >> 16


def key_of(*parts):
    """Make keys of these integers, or of arrays of them."""
    key = np.uint64(0x9E3779B9)
    for part in parts:
        key = mix(key ^ mix(np.asarray(part, np.uint64) + 0x85EBCA6B & 0xFFFFFFFF))
    return key


def permutations(lengths: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return a pseudo-random order of range(length) for each key: int [keys, longest], of which `length` count.

    Swap-or-not: in a round two values swap, or not, if their sum is the round's number modulo the length.
    """
    values = np.arange(lengths.max(), dtype=np.int64)[None]
    lengths, keys = np.maximum(lengths, 1)[:, None], keys[:, None]
    for number in range(ROUNDS):
        round_key = mix(keys + number * 0x9E3779B9 & 0xFFFFFFFF)
        pair_sum = (round_key * lengths.astype(np.uint64) >> 32).astype(np.int64)
        partner = (pair_sum - values) % lengths
        larger = np.maximum(values, partner).astype(np.uint64)
        values = np.where(mix(round_key ^ larger) >= 1 << 31, partner, values)
    return values


@cache
def epoch_order(num_originals: int, num_shards: int, views: int, seed: int, epoch: int) -> np.ndarray:
    """Return the examples of an epoch in their order: int64 [num_originals * views], original * views + view.

    Originals are numbered by their place in the seeded permutation that spreads them over shards.
    """
    shards, most = np.arange(num_shards), -(-num_originals // num_shards)
    sizes = np.array([len(range(shard, num_originals, num_shards)) for shard in shards])
    shard_and_place = np.array([(shard, place) for shard in shards for place in range(most)])
    view_keys = key_of(seed, epoch, shard_and_place[:, 0], views + shard_and_place[:, 1])
    view_orders = permutations(np.full(len(view_keys), views), view_keys).reshape(num_shards, most, views)
    order = []
    for pass_index in range(views):
        places = permutations(sizes, key_of(seed, epoch, shards, pass_index))
        for round_ in range(most):
            for shard in shards:
                if round_ < sizes[shard]:
                    place = places[shard, round_]
                    view = view_orders[shard, place, pass_index]
                    order.append((place * num_shards + shard) * views + view)
    return np.array(order)


def order(num_originals: int, num_shards: int, views: int, seed: int, epochs: int) -> np.ndarray:
    """Return the examples of so many epochs, one after the other."""
    return np.concatenate([epoch_order(num_originals, num_shards, views, seed, epoch) for epoch in range(epochs)])
