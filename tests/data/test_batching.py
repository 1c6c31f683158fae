import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from largebatch.data import batching
from largebatch.data.batching import DataSharding
from largebatch.optim.schedules import epoch_and_offset


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 65, 1000])
def test_shuffled_is_a_permutation_that_depends_on_the_key(length):
    shuffle = jax.jit(lambda key: batching.shuffled(jnp.arange(length), length, length, key))
    one, other = np.asarray(shuffle(jnp.uint32(1))), np.asarray(shuffle(jnp.uint32(2)))
    assert sorted(one) == list(range(length))
    assert sorted(other) == list(range(length))
    assert length < 64 or (one != other).mean() > 0.9


@pytest.mark.parametrize(
    "length", [2, 3, 5, 8, 9, 16, *(pytest.param(n, marks=pytest.mark.full) for n in (4, 6, 7, *range(10, 16)))]
)
def test_shuffled_has_no_favourite_places_and_pairs(length):
    """Chi-square over 100,000 keys, within the bound that chance keeps 99.9 times of 100."""
    count = 100_000
    keys = jax.vmap(lambda epoch: batching.shuffle_key(0, epoch, 0))(jnp.arange(count))
    shuffle = jax.jit(jax.vmap(lambda key: batching.shuffled(jnp.arange(length), length, length, key)))
    orders = np.asarray(shuffle(keys))
    places = np.array([np.bincount(orders[:, place], minlength=length) for place in range(length)])
    chi_square = ((places - count / length) ** 2 / (count / length)).sum()
    assert chi_square < stats.chi2.ppf(0.999, (length - 1) ** 2)
    for first, second in {(0, 1), (0, length - 1), (length - 2, length - 1)}:
        pairs = np.bincount(orders[:, first] * length + orders[:, second], minlength=length**2)
        different = pairs.reshape(length, length)[~np.eye(length, dtype=bool)]
        expected = count / len(different)
        chi_square = ((different - expected) ** 2 / expected).sum()
        assert length == 2 or chi_square < stats.chi2.ppf(0.999, len(different) - 1)


def test_neighbours_are_no_closer_than_chance():
    keys = jax.vmap(lambda epoch: batching.shuffle_key(0, epoch, 0))(jnp.arange(4000))
    shuffle = jax.jit(jax.vmap(lambda key: batching.shuffled(jnp.arange(16), 16, 16, key)))
    orders = np.asarray(shuffle(keys))
    assert abs(np.abs(np.diff(orders, axis=1)).mean() - 17 / 3) < 0.1  # mean distance of two random places of 16


@pytest.mark.parametrize(
    ("originals", "num_devices", "views"), [(5, 1, 8), (5, 8, 8), (13, 4, 8), (16, 8, 2), (3, 2, 1)]
)
def test_count_before_is_a_round_robin_that_uses_every_example(originals, num_devices, views):
    sharding = DataSharding(originals, num_devices, views)
    counts = np.array(
        [[int(sharding.count_before(p, d)) for d in range(num_devices)] for p in range(sharding.num_examples + 1)]
    )
    assert (counts.sum(axis=1) == np.arange(sharding.num_examples + 1)).all()
    assert (np.diff(counts, axis=0) >= 0).all()
    assert counts[-1].tolist() == [int(sharding.num_originals_of(d)) * views for d in range(num_devices)]
    dealt = np.concatenate([sharding.originals_of(d, seed=3) for d in range(num_devices)])
    assert sorted(dealt) == list(range(originals))


SEED = 5


@partial(jax.jit, static_argnums=0)
def device_batch_of(sharding: DataSharding, device, epoch, offset, batch_size):
    return batching.device_batch(sharding, device, epoch, offset, batch_size)


@partial(jax.jit, static_argnums=(0, 1))
def micro_batch_of(sharding: DataSharding, micro_batch_size: int, batch: batching.DeviceBatch, index):
    num_micro_batches = batch.num_micro_batches(micro_batch_size)
    return batching.micro_batch(sharding, batch, index, num_micro_batches, micro_batch_size, SEED)


@dataclasses.dataclass(frozen=True)
class Visit:
    """Of one example, by its device's numbering."""

    epoch: int
    device: int
    example: int


@dataclasses.dataclass(frozen=True)
class MicroBatchLength:
    """Examples in one of the micro-batches that a device has in an update."""

    update: int
    device: int
    length: int


def replay(sharding: DataSharding, batch_size: int, num_updates: int, micro_batch_size: int):
    """Every visit of every update, in order, and the length of every micro-batch."""
    visits, lengths = [], []
    for update in range(num_updates):
        epoch, offset = epoch_and_offset(update * batch_size, sharding.num_examples)
        for device in range(sharding.num_devices):
            batch = device_batch_of(sharding, device, epoch, offset, batch_size)
            num_seen = 0
            for index in range(int(batch.num_micro_batches(micro_batch_size))):
                chosen = micro_batch_of(sharding, micro_batch_size, batch, index)
                examples = np.asarray(chosen.examples)[np.asarray(chosen.weights) == 1]
                lengths.append(MicroBatchLength(update, device, len(examples)))
                for example in examples:
                    is_next_epoch = num_seen >= int(batch.num_in_epoch)
                    visits.append(Visit(int(epoch) + is_next_epoch, device, int(example)))
                    num_seen += 1
            assert num_seen == int(batch.count)
    return visits, lengths


@pytest.mark.parametrize("batch_size", [1, 7, 40, 50, 104])
@pytest.mark.parametrize("num_devices", [1, 4])
def test_an_epoch_visits_every_example_once_for_any_batch_size(batch_size, num_devices):
    sharding = DataSharding(13, num_devices, 8)
    num_updates = -(-2 * sharding.num_examples // batch_size)
    visits, lengths = replay(sharding, batch_size, num_updates, micro_batch_size=16)
    orders = [[visit for visit in visits if visit.epoch == epoch] for epoch in (0, 1)]
    for order in orders:
        assert len(order) == len(set(order)) == sharding.num_examples
        for device in range(num_devices):  # each pass over the originals, each time with another view
            originals = [visit.example // 8 for visit in order if visit.device == device]
            num_originals = len(originals) // 8
            passes = np.reshape(originals, (8, num_originals))
            assert (np.sort(passes) == np.arange(num_originals)).all()
            assert num_originals < 4 or len(np.unique(passes, axis=0)) > 1
        first_pass = order[: sharding.num_originals]
        assert len({visit.example % 8 for visit in first_pass}) > 1  # a pass mixes the views
    without_epochs = [[(visit.device, visit.example) for visit in order] for order in orders]
    assert without_epochs[0] != without_epochs[1]
    for batch in {(one.update, one.device) for one in lengths}:
        in_batch = [one.length for one in lengths if (one.update, one.device) == batch]
        assert max(in_batch) - min(in_batch) <= 1


def shares_of(sharding: DataSharding, offset, batch_size) -> np.ndarray:
    return np.asarray(batching.device_batch(sharding, np.arange(sharding.num_devices), 0, offset, batch_size).count)


def test_a_devices_share_differs_from_the_others_by_one_at_most_within_a_pass():
    sharding = DataSharding(13, 4, 8)
    for offset in range(13 * 8 - 6):
        shares = shares_of(sharding, offset, 6)
        assert shares.sum() == 6
        if offset % 13 + 6 <= 13:
            assert shares.max() - shares.min() <= 1


@pytest.mark.parametrize(("originals", "num_devices"), [(13, 4), (12, 4), (29, 5), (3, 8), (31, 1)])
def test_a_batch_of_all_originals_is_one_view_of_each(originals, num_devices):
    sharding = DataSharding(originals, num_devices, 8)
    for pass_index in range(8):
        shares = shares_of(sharding, pass_index * originals, originals)
        assert shares.tolist() == [int(sharding.num_originals_of(device)) for device in range(num_devices)]


@pytest.mark.parametrize(
    ("originals", "num_devices"), [(384, 5), (13, 4), (12, 4), (29, 5), (30, 7), (50, 9), (3, 8), (31, 1)]
)
def test_share_bounds_hold_at_every_place_of_an_epoch(originals, num_devices):
    sharding = DataSharding(originals, num_devices, 8)
    sizes = {1, 2, 6, 20, 2 * originals, 3 * originals + 5, originals, originals - 1, originals + 1}
    devices, offsets = np.arange(num_devices)[None], np.arange(sharding.num_examples)[:, None]
    counts = jax.jit(lambda size: batching.device_batch(sharding, devices, 0, offsets, size).count)
    for batch_size in sizes:
        shares = counts(batch_size)
        fewest, most = sharding.share_bounds(batch_size)
        assert (fewest, most) == (int(shares.min()), int(shares.max()))


def test_devices_hold_equally_many_originals_where_they_divide_evenly():
    sharding = DataSharding(21_600, 32, 8)
    assert {len(sharding.originals_of(device, 0)) for device in range(32)} == {675}


def test_a_visit_has_one_key_on_any_number_of_devices_and_another_in_every_epoch():
    keys_by_num_devices = {}
    for num_devices in (1, 4):
        sharding, keys = DataSharding(13, num_devices, 8), {}
        for epoch in (0, 1):
            for device in range(num_devices):
                batch = device_batch_of(sharding, device, epoch, 0, sharding.num_examples)
                chosen = micro_batch_of(sharding, sharding.num_examples, batch, 0)
                is_example = np.asarray(chosen.weights) == 1
                examples = np.asarray(chosen.examples)[is_example]
                originals = sharding.originals_of(device, SEED)[examples // 8]
                visit_keys = np.asarray(chosen.visit_keys)[is_example]
                for original, view, key in zip(originals, examples % 8, visit_keys, strict=True):
                    keys[epoch, original, view] = key
        keys_by_num_devices[num_devices] = keys
    assert keys_by_num_devices[1] == keys_by_num_devices[4]
    assert len(set(keys_by_num_devices[1].values())) == 2 * 13 * 8
