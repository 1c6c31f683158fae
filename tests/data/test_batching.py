from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from largebatch.data import batching
from largebatch.data.batching import Deal


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
    deal = Deal(originals, num_devices, views)
    counts = np.array(
        [[int(deal.count_before(p, d)) for d in range(num_devices)] for p in range(deal.num_examples + 1)]
    )
    assert (counts.sum(axis=1) == np.arange(deal.num_examples + 1)).all()
    assert (np.diff(counts, axis=0) >= 0).all()
    assert counts[-1].tolist() == [int(deal.num_originals_of(d)) * views for d in range(num_devices)]
    held = np.concatenate([deal.originals_of(d, seed=3) for d in range(num_devices)])
    assert sorted(held) == list(range(originals))


@partial(jax.jit, static_argnums=(0, 1))
def one_micro_batch(deal: Deal, micro_batch_size: int, batch_size, device, epoch, offset, index):
    """A device's share of a batch, the micro-batches in it, and the examples and weights of one of them."""
    share = batching.device_share(deal, device, epoch, offset, batch_size)
    count = -(-share.count // micro_batch_size)
    examples, _, weights = batching.micro_batch(deal, device, share, index, count, micro_batch_size, 5)
    return share, count, examples, weights


def visited(deal: Deal, batch_size: int, num_updates: int, micro_batch_size: int):
    """(epoch, device, example) of every visit of every update, with each device's micro-batch sizes."""
    visits, sizes = [], []
    one = partial(one_micro_batch, deal, micro_batch_size, batch_size)
    for update in range(num_updates):
        epoch, offset = batching.epoch_and_offset(deal, np.array(update * batch_size))
        for device in range(deal.num_devices):
            share, count, _, _ = one(device, epoch, offset, 0)
            seen = 0
            for index in range(int(count)):
                _, _, examples, weights = one(device, epoch, offset, index)
                kept = np.asarray(examples)[np.asarray(weights) == 1]
                sizes.append((update, device, len(kept)))
                for example in kept:
                    visits.append((int(epoch) + (seen >= int(share.first)), device, int(example)))
                    seen += 1
            assert seen == int(share.count)
    return visits, sizes


@pytest.mark.parametrize("batch_size", [1, 7, 40, 50, 104])
@pytest.mark.parametrize("num_devices", [1, 4])
def test_an_epoch_visits_every_example_once_for_any_batch_size(batch_size, num_devices):
    deal = Deal(13, num_devices, 8)
    num_updates = -(-2 * deal.num_examples // batch_size)
    visits, sizes = visited(deal, batch_size, num_updates, micro_batch_size=16)
    for epoch in (0, 1):
        seen = [(device, example) for e, device, example in visits if e == epoch]
        assert len(seen) == len(set(seen)) == deal.num_examples
        for device in range(num_devices):  # each pass over the originals, each time with another view
            own = [example // 8 for d, example in seen if d == device]
            held = len(own) // 8
            passes = [own[turn * held : (turn + 1) * held] for turn in range(8)]
            assert all(sorted(one) == list(range(held)) for one in passes)
            assert held < 4 or len(set(map(tuple, passes))) > 1
    orders = [[x for e, *x in visits if e == epoch] for epoch in (0, 1)]
    assert orders[0] != orders[1]
    views = [[example % 8 for _, example in order[: deal.num_originals]] for order in orders]
    assert len(set(views[0])) > 1  # a pass mixes the views
    for key in {(update, device) for update, device, _ in sizes}:
        parts = [size for update, device, size in sizes if (update, device) == key]
        assert max(parts) - min(parts) <= 1


def shares_of(deal, offset, batch_size) -> np.ndarray:
    return np.asarray(batching.device_share(deal, np.arange(deal.num_devices), 0, offset, batch_size).count)


def test_a_devices_share_differs_from_the_others_by_one_at_most_within_a_pass():
    deal = Deal(13, 4, 8)
    for offset in range(13 * 8 - 6):
        shares = shares_of(deal, offset, 6)
        assert shares.sum() == 6
        if offset % 13 + 6 <= 13:
            assert shares.max() - shares.min() <= 1


@pytest.mark.parametrize(("originals", "num_devices"), [(13, 4), (12, 4), (29, 5), (3, 8), (31, 1)])
def test_a_batch_of_all_originals_is_one_view_of_each(originals, num_devices):
    deal = Deal(originals, num_devices, 8)
    for turn in range(8):
        shares = shares_of(deal, turn * originals, originals)
        assert shares.tolist() == [int(deal.num_originals_of(device)) for device in range(num_devices)]


@pytest.mark.parametrize(
    ("originals", "num_devices"), [(384, 5), (13, 4), (12, 4), (29, 5), (30, 7), (50, 9), (3, 8), (31, 1)]
)
def test_share_bounds_hold_at_every_place_of_an_epoch(originals, num_devices):
    deal = Deal(originals, num_devices, 8)
    sizes = {1, 2, 6, 20, 2 * originals, 3 * originals + 5, originals, originals - 1, originals + 1}
    devices, offsets = np.arange(num_devices)[None], np.arange(deal.num_examples)[:, None]
    counts = jax.jit(lambda size: batching.device_share(deal, devices, 0, offsets, size).count)
    for batch_size in sizes:
        shares = counts(batch_size)
        fewest, most = deal.share_bounds(batch_size)
        assert (fewest, most) == (int(shares.min()), int(shares.max()))


def test_epoch_and_offset_do_not_overflow():
    deal = Deal(21_600, 32, 8)
    epoch, offset = batching.epoch_and_offset(deal, np.array([10**12 + 17]))
    assert epoch.dtype == offset.dtype == np.int32
    assert int(epoch[0]) * deal.num_examples + int(offset[0]) == 10**12 + 17


def test_a_visit_has_one_key_on_any_number_of_devices_and_another_in_every_epoch():
    found = []
    for num_devices in (1, 4):
        deal, keys = Deal(13, num_devices, 8), {}

        @jax.jit
        def whole_epoch(device, epoch, deal=deal):
            share = batching.device_share(deal, device, epoch, 0, deal.num_examples)
            return batching.micro_batch(deal, device, share, 0, 1, deal.num_examples, 5)

        for epoch in (0, 1):
            for device in range(num_devices):
                examples, visits, weights = whole_epoch(device, epoch)
                held = deal.originals_of(device, seed=5)
                for example, visit, weight in zip(*map(np.asarray, (examples, visits, weights)), strict=True):
                    if weight:
                        keys[epoch, held[example // 8], example % 8] = visit
        found.append(keys)
    assert found[0] == found[1]
    assert len(set(found[0].values())) == 2 * 13 * 8
