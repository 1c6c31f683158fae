"""The order of examples: beside NumPy's, even, and the same on any number of devices."""

import itertools
from functools import partial

import evenness
import jax
import jax.numpy as jnp
import numpy as np
import numpy_order
import pytest

from largebatch.data import batching
from largebatch.data.batching import DataSharding, Grouping, choose_sharding
from largebatch.optim.schedules import epoch_and_offset
from largebatch.util import BadSetting


@pytest.mark.parametrize("length", [2**16 + 1, 2**24 - 3, 2**31 - 1])
def test_shuffled_neither_overflows_nor_meets_for_long_lengths(length):
    """Beside Python's integers, which are of any size."""

    def in_python(value: int) -> int:
        for number in range(batching.SHUFFLE_ROUNDS):
            round_key = int(numpy_order.mix(np.uint64(7 + number * 0x9E3779B9 & 0xFFFFFFFF)))
            partner = (round_key * length // 2**32 - value) % length
            if numpy_order.mix(np.uint64(round_key ^ max(value, partner))) >= 2**31:
                value = partner
        return value

    ends = [0, 1, length // 2, length - 2, length - 1]
    index = np.unique([*ends, *np.random.default_rng(0).integers(0, length, 100_000)]).astype(np.int32)
    places = np.asarray(jax.jit(batching.shuffled)(index, np.int32(length), jnp.uint32(7)))
    assert places.min() >= 0
    assert places.max() < length
    assert len(np.unique(places)) == len(index)
    for value in [*ends, *index[::500].tolist()]:
        assert places[np.searchsorted(index, value)] == in_python(value)


@pytest.mark.parametrize(
    ("length", "count"),
    [(n, 100_000) for n in (2, 3, 8, 45)]
    + [pytest.param(n, 1_000_000, marks=pytest.mark.full) for n in (2, 3, 5, 6, 8, 45, 46, 334, 21_600)],
)
def test_shuffled_has_no_favourite_places_pairs_and_distances(length, count):
    """Shuffles by one key, and by keys of consecutive epochs, passes, shards, images and seeds, are even."""
    for keys in evenness.KEYS:
        shares = evenness.shares_of_bound(length, keys, count)
        assert len(shares) >= 7
        assert max(shares.values()) < 1, keys


def test_a_micro_batch_is_found_without_a_loop():
    """A loop whose turns the program cannot know makes an accelerator wait for its host at each."""
    sharding = DataSharding(21_600, 480, 7, VIEWS)

    def find(device, offset, index, seed):
        batch = batching.device_batch(sharding, device, 0, offset, 512)
        return batching.micro_batch(sharding, batch, index, Grouping(16, 16), seed)

    program = str(jax.make_jaxpr(find)(*jnp.arange(3), jnp.uint32(0)))
    assert "shift_right_logical" in program  # the shuffle is in it
    assert " while[" not in program
    assert " scan[" not in program


# (originals, shards, devices): shards of one size and of two, more shards than originals, devices that share shards
# evenly and not, devices without an original.
LAYOUTS = [(5, 3, 1), (5, 8, 8), (13, 32, 5), (16, 8, 8), (29, 7, 5), (384, 32, 5)]


@pytest.mark.parametrize(("originals", "num_shards", "num_devices"), LAYOUTS)
def test_count_before_uses_every_example(originals, num_shards, num_devices):
    sharding = DataSharding(originals, num_shards, num_devices, views=2)
    positions, devices = np.arange(sharding.num_examples + 1)[:, None], np.arange(num_devices)
    counts = sharding.count_before(positions, devices)
    assert (counts.sum(axis=1) == positions[:, 0]).all()
    assert (np.diff(counts, axis=0) >= 0).all()
    assert counts[-1].tolist() == [sharding.num_originals_of(d) * 2 for d in devices]
    shares = [sharding.originals_of(d, seed=3) for d in devices]
    assert [len(share) for share in shares] == [sharding.num_originals_of(d) for d in devices]
    assert max(map(len, shares)) == sharding.max_originals
    assert sorted(np.concatenate(shares)) == list(range(originals))


# ---- the order, beside NumPy's ----------------------------------------------------------------------

SEED, VIEWS = 5, 8


@partial(jax.jit, static_argnums=(0, 1))
def examples_of_steps(sharding: DataSharding, share: int, epoch, offset, batch_size):
    """Return the compiled order of steps with these inputs: MicroBatchIndices [steps, devices, share]."""

    def on_device(device, epoch, offset):
        batch = batching.device_batch(sharding, device, epoch, offset, batch_size)
        return batching.micro_batch(sharding, batch, 0, Grouping(share, share), SEED)

    devices = jnp.arange(sharding.num_devices)
    on_all_devices = jax.vmap(on_device, in_axes=(0, None, None))
    return jax.vmap(on_all_devices, in_axes=(None, 0, 0))(devices, epoch, offset)


def ids_of_steps(sharding: DataSharding, batch_size: int, num_steps: int) -> np.ndarray:
    """The examples of every step [steps, batch_size], ascending, by place in the permutation of the shards."""
    epoch, offset = epoch_and_offset(np.arange(num_steps) * batch_size, sharding.num_examples)
    share = sharding.share_bounds(batch_size)[1]
    chosen = jax.tree.map(np.asarray, examples_of_steps(sharding, share, epoch, offset, batch_size))
    place_of = np.argsort(np.random.default_rng(0).permutation(sharding.num_originals))
    ids = np.full(chosen.examples.shape, sharding.num_examples)  # beyond all ids, so that padding comes last
    for device in range(sharding.num_devices):
        rows = np.append(place_of[sharding.originals_of(device, 0)], 0)
        original, view = np.divmod(chosen.examples[:, device], sharding.views)
        is_example = chosen.weights[:, device] == 1
        ids[:, device][is_example] = (rows[original] * sharding.views + view)[is_example]
    ids = np.sort(ids.reshape(num_steps, -1))
    assert (ids[:, batch_size:] == sharding.num_examples).all()
    return ids[:, :batch_size]


COMBINATIONS = [
    pytest.param(*both, marks=() if both == (480, 512) else pytest.mark.full)
    for both in itertools.product([480, 64, 60], [1, 7, 100, 512, "full"])
]


@pytest.mark.parametrize(("num_shards", "batch_size"), COMBINATIONS)
def test_steps_have_the_examples_of_the_numpy_order_on_any_number_of_devices(num_shards, batch_size):
    originals, epochs = 601, 3
    expected = numpy_order.order(originals, num_shards, VIEWS, SEED, epochs)
    batch_size = originals * VIEWS if batch_size == "full" else batch_size
    num_steps = len(expected) // batch_size
    expected = np.sort(expected[: num_steps * batch_size].reshape(num_steps, batch_size))
    for num_devices in (1, 2, 3, 5, 8, 32):
        sharding = DataSharding(originals, num_shards, num_devices, VIEWS)
        np.testing.assert_array_equal(ids_of_steps(sharding, batch_size, num_steps), expected)


@pytest.mark.parametrize("views", [1, 2])
def test_fewer_views_are_visited_once_an_epoch_in_the_numpy_order(views):
    order = numpy_order.order(61, 32, views, SEED, 2)
    assert (np.sort(order.reshape(2, -1)) == np.arange(61 * views)).all()
    ids = ids_of_steps(DataSharding(61, 32, 3, views), 61, 2 * views)  # a pass each
    np.testing.assert_array_equal(ids, np.sort(order.reshape(-1, 61)))


@pytest.mark.parametrize(("originals", "num_shards"), [(5, 3), (13, 32), (601, 480)])
def test_the_numpy_order_visits_each_example_once_an_epoch_and_each_original_once_a_pass(originals, num_shards):
    epochs = [numpy_order.epoch_order(originals, num_shards, VIEWS, SEED, epoch) for epoch in (0, 1)]
    for order in epochs:
        assert (np.sort(order) == np.arange(originals * VIEWS)).all()
        assert (np.sort((order // VIEWS).reshape(VIEWS, originals)) == np.arange(originals)).all()
        assert len(set(order[:originals] % VIEWS)) > 1  # a pass mixes the views
    assert (epochs[0] != epochs[1]).any()


@pytest.mark.parametrize("grouping", [Grouping(16, 16), Grouping(12, 4), Grouping(24, 8), Grouping(5, 5)])
def test_groups_are_those_of_an_even_split_in_numpy(grouping):
    groups_of = jax.jit(grouping.groups_of)
    for count in range(1, 100):
        expected = np.array_split(np.arange(count), -(-count // grouping.group_size))
        found = []
        for index in range(grouping.num_micro_batches(count)):
            begins, lengths = map(np.asarray, groups_of(count, index))
            assert lengths[0] > 0
            found += [np.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
        assert all(len(group) == 0 for group in found[len(expected) :])
        assert len(found) < len(expected) + grouping.groups_at_once
        for group, wanted in zip(found, expected, strict=False):
            np.testing.assert_array_equal(group, wanted)


@pytest.mark.parametrize(
    ("batch_size", "grouping"), [(1, Grouping(12, 4)), (40, Grouping(16, 16)), (104, Grouping(12, 4))]
)
def test_micro_batches_are_the_batch_in_parts_of_one_size(batch_size, grouping):
    sharding = DataSharding(13, 4, 3, VIEWS)
    for step in range(0, 3 * sharding.num_examples // batch_size, 5):
        epoch, offset = epoch_and_offset(step * batch_size, sharding.num_examples)
        whole = examples_of_steps(sharding, batch_size, epoch[None], offset[None], batch_size)
        for device in range(3):
            batch = batching.device_batch(sharding, device, epoch, offset, batch_size)
            count = range(int(grouping.num_micro_batches(batch.count)))
            parts = [part_of_batch(sharding, batch, index, grouping) for index in count]
            for name in ("examples", "visit_keys"):
                together = [np.asarray(getattr(part, name))[np.asarray(part.weights) == 1] for part in parts]
                expected = np.asarray(getattr(whole, name))[0, device, : int(batch.count)]
                np.testing.assert_array_equal(np.concatenate([*together, []]), expected)


@partial(jax.jit, static_argnums=(0, 3))
def part_of_batch(sharding: DataSharding, batch: batching.DeviceBatch, index, grouping: Grouping):
    """Micro-batch number `index`."""
    return batching.micro_batch(sharding, batch, index, grouping, SEED)


# ---- shares of devices ------------------------------------------------------------------------------


@pytest.mark.parametrize(("originals", "num_shards", "num_devices"), LAYOUTS)
def test_share_bounds_hold_at_every_place_of_an_epoch(originals, num_shards, num_devices):
    sharding = DataSharding(originals, num_shards, num_devices, 8)
    sizes = {1, 6, 20, 3 * originals + 5, originals, originals - 1, originals + 1}
    devices, offsets = np.arange(num_devices)[None], np.arange(sharding.num_examples)[:, None]
    counts = jax.jit(lambda size: batching.device_batch(sharding, devices, 0, offsets, size).count)
    for batch_size in sizes:
        shares = counts(batch_size)
        fewest, most = sharding.share_bounds(batch_size)
        assert (fewest, most) == (int(shares.min()), int(shares.max()))


def test_the_number_of_shards_follows_from_the_originals_alone():
    chosen = [batching.choose_num_shards(count) for count in (10, 3071, 3072, 21_600, 1_281_167)]
    assert chosen == [32, 32, 96, 480, 3840]


@pytest.mark.parametrize(
    ("num_shards", "originals", "devices", "message"),
    [
        (7, 100, 8, "batch.virtual_shards: 7 for 100 training images .* from 8 to 400"),
        (401, 100, 8, "batch.virtual_shards: 401 for 100 training images .* from 8 to 400"),
        (None, 100, 40, "batch.virtual_shards: 32 by itself .* an integer from 40 to 400"),
        (None, 5, 64, "dataset: 5 training images on 64 devices; allowed: up to 32 devices"),
    ],
)
def test_shards_devices_and_images_that_do_not_go_together_are_named(num_shards, originals, devices, message):
    with pytest.raises(BadSetting, match=message):
        choose_sharding(num_shards, originals, devices, VIEWS)
