"""The order of examples: beside NumPy's, even, and the same on any number of devices."""

import dataclasses
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
    [(n, 100_000) for n in (3, 45)]
    + [pytest.param(n, 1_000_000, marks=pytest.mark.full) for n in (2, 3, 8, 45, 334, 21_600)],
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
def test_share_bounds_hold_at_every_place_of_an_epoch(originals, num_shards, num_devices):
    sharding, devices = DataSharding(originals, num_shards, num_devices, views=8), np.arange(num_devices)
    begins = np.arange(sharding.num_examples)[:, None]
    for batch_size in {1, 6, 20, 3 * originals + 5, originals, originals - 1, originals + 1}:
        shares = sharding.count_before(begins + batch_size, devices) - sharding.count_before(begins, devices)
        assert sharding.share_bounds(batch_size) == (shares.min(), shares.max())


# ---- the order, beside NumPy's ----------------------------------------------------------------------

SEED, VIEWS = 5, 8


MOST_DEVICES, GROUPING = 32, Grouping(64, 32)


@partial(jax.jit, static_argnums=0)
def compiled_order(num_parts: int, sharding_fields, epoch, offset, batch_size):
    """Return MicroBatchIndices [steps, MOST_DEVICES, examples of all micro-batches] of steps with these inputs.

    The fields of the sharding are traced, so that one program serves all of them.
    """
    sharding = DataSharding(*sharding_fields)

    def on_device(device, epoch, offset):
        batch = batching.device_batch(sharding, device, epoch, offset, batch_size)
        part = partial(batching.micro_batch, sharding, batch, grouping=GROUPING, seed=SEED)
        return jax.tree.map(jnp.ravel, jax.vmap(part)(jnp.arange(num_parts)))

    on_all_devices = jax.vmap(on_device, in_axes=(0, None, None))
    return jax.vmap(on_all_devices, in_axes=(None, 0, 0))(jnp.arange(MOST_DEVICES), epoch, offset)


def ids_of_steps(sharding: DataSharding, batch_size: int, num_steps: int) -> np.ndarray:
    """Return the examples of every step [steps, batch_size], ascending, by place in the shards' permutation."""
    num_parts = GROUPING.num_micro_batches(512 if batch_size <= 512 else 601 * VIEWS)
    at_once, parts = 128 // num_parts, []  # steps
    for begin in range(0, num_steps, at_once):
        steps = np.resize(np.arange(begin, num_steps), at_once)
        epoch, offset = epoch_and_offset(steps * batch_size, sharding.num_examples)
        parts.append(compiled_order(num_parts, dataclasses.astuple(sharding), epoch, offset, batch_size))
    chosen = jax.tree.map(lambda *arrays: np.concatenate(arrays)[:num_steps], *parts)
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


QUICK = [(601, 480, 512, VIEWS), (151, 60, 100, 2), (61, 32, 61, 1), (5, 8, 7, VIEWS)]
FULL = [*itertools.product([601], [480, 60], [100, 601 * VIEWS], [VIEWS]), (61, 64, 7, VIEWS)]


@pytest.mark.parametrize(
    ("originals", "num_shards", "batch_size", "views"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.full) for one in FULL)],
)
def test_steps_have_the_examples_of_the_numpy_order_on_any_number_of_devices(
    originals, num_shards, batch_size, views
):
    expected = numpy_order.order(originals, num_shards, views, SEED, epochs=2)
    num_steps = len(expected) // batch_size
    expected = np.sort(expected[: num_steps * batch_size].reshape(num_steps, batch_size))
    for num_devices in (1, 2, 3, 5, 8, MOST_DEVICES):
        sharding = DataSharding(originals, num_shards, num_devices, views)
        np.testing.assert_array_equal(ids_of_steps(sharding, batch_size, num_steps), expected)


@pytest.mark.parametrize(("originals", "num_shards", "views"), [(5, 3, 8), (601, 480, 8), (61, 32, 1)])
def test_the_numpy_order_visits_each_example_once_an_epoch_and_each_original_once_a_pass(
    originals, num_shards, views
):
    epochs = [numpy_order.epoch_order(originals, num_shards, views, SEED, epoch) for epoch in (0, 1)]
    for order in epochs:
        assert (np.sort(order) == np.arange(originals * views)).all()
        assert (np.sort((order // views).reshape(views, originals)) == np.arange(originals)).all()
        assert views == 1 or len(set(order[:originals] % views)) > 1  # a pass mixes the views
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


# ---- shares of devices ------------------------------------------------------------------------------


def test_the_number_of_shards_follows_from_the_originals_alone():
    counts = (10, 3071, 3072, 21_600, 1_281_167)
    chosen = [choose_sharding(None, count, 1, VIEWS).num_shards for count in counts]
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
