"""The images that a stream has on the devices: all that the next steps visit, however a run is cut."""

import jax
import numpy as np
import pytest
from conftest import typed
from numpy_order import order

import augment
from largebatch.data import streaming
from largebatch.data.batching import choose_sharding
from largebatch.data.cache import Cache
from largebatch.data.placement import bytes_per_device, place
from largebatch.data.streaming import Stream, Upcoming, load_inputs
from largebatch.optim.schedules import StepInputs

SEED = 3
BATCH_SIZES = (40, 7, 64, 64, 1, 50, 64, 33) * 6  # 1,938 examples: three epochs of 640


@pytest.fixture
def on_devices(small_config, monkeypatch):
    """A function that returns the cache, the sharding and a stream on some of this process's devices."""

    def make(num_devices: int, num_rows: int | None = None):
        devices = jax.local_devices()[:num_devices]
        monkeypatch.setattr(jax, "local_devices", lambda backend=None: devices)
        monkeypatch.setattr(jax, "local_device_count", lambda: num_devices)
        cache = augment.prepare_cache(typed(small_config))
        views = augment.VIEW_COUNTS[small_config.augment.views]
        sharding = choose_sharding(None, cache.layout.counts["train"], num_devices, views)
        num_rows = num_rows or streaming.buffer_rows(sharding, 10**9, max(BATCH_SIZES))
        return cache, sharding, Stream(cache, sharding, small_config.dataset.split_seed, num_rows)

    return make


def upcoming_from(first: int, batch_sizes=BATCH_SIZES, seed: int = SEED) -> Upcoming:
    """The steps from `first` on."""
    before = np.cumsum([0, *batch_sizes])
    return Upcoming(seed, first, len(batch_sizes), lambda step: int(before[step]))


def examples_of(sharding, device: int, upcoming: Upcoming, step: int) -> np.ndarray:
    """Return the visits of a device in a step, by its own numbering, without the code under test."""
    visits = order(sharding.num_originals, sharding.num_shards, sharding.views, SEED, epochs=4)
    examples = visits[upcoming.examples_before(step) : upcoming.examples_before(step + 1)]
    places, views = np.divmod(examples, sharding.views)
    rounds, shards = np.divmod(places, sharding.num_shards)
    is_own = shards % sharding.num_devices == device
    shards_of_device = len(range(device, sharding.num_shards, sharding.num_devices))
    originals = rounds * shards_of_device + shards // sharding.num_devices
    return (originals * sharding.views + views)[is_own].astype(np.int32)


@pytest.mark.parametrize("num_devices", [8])
def test_every_step_reads_the_images_that_resident_data_have(small_config, on_devices, num_devices):
    cache, sharding, stream = on_devices(num_devices)
    resident = place(cache, sharding, small_config.dataset.split_seed).train.arrays
    images, labels = np.asarray(resident["images"]), np.asarray(resident["labels"])
    step, num_chunks, wanted = 0, 0, [3, 1, 100, 2]
    while step < len(BATCH_SIZES):
        upcoming = upcoming_from(step)
        before = stream.arrays
        loaded = stream.for_steps(upcoming, wanted[step % 4])
        num_chunks += loaded.arrays is not before
        assert 1 <= loaded.num_steps <= wanted[step % 4]
        shard = jax.tree.map(np.asarray, loaded.arrays)
        for following in range(step, step + loaded.num_steps):
            for device in range(num_devices):
                examples = examples_of(sharding, device, upcoming, following)
                originals = examples // sharding.views
                in_buffer = shard["images"][device][shard["rows"][device][originals]]
                np.testing.assert_array_equal(in_buffer, images[device][originals])
                np.testing.assert_array_equal(shard["labels"][device], labels[device])
        step += loaded.num_steps
    assert num_chunks > 10


def test_what_the_devices_need_is_announced(on_devices):
    cache, sharding, stream = on_devices(2, num_rows=37)
    stream.for_steps(upcoming_from(0), 1)
    following = stream._next.arrays.result()
    own, next_ = (jax.tree.map(lambda x: x.nbytes // 2, arrays) for arrays in (stream.arrays, following))
    announced = bytes_per_device(cache.layout, sharding, 1, buffer_rows=37)
    assert announced["training images in two buffers"] == own["images"] + next_["images"] == 2 * 37 * 16 * 16 * 3
    assert announced["their rows and labels"] == own["rows"] + next_["rows"] + own["labels"] == 3 * 4 * 40


def test_a_buffer_has_what_one_step_needs_and_no_more_than_all(on_devices, monkeypatch):
    _, sharding, _ = on_devices(2)
    monkeypatch.setattr(streaming, "BUFFER_BYTES", 10_000)
    assert streaming.buffer_rows(sharding, 1_000, batch_size=16) == 10
    assert streaming.buffer_rows(sharding, 1_000, batch_size=40) == sharding.share_bounds(40)[1] == 20
    assert streaming.buffer_rows(sharding, 10, batch_size=16) == sharding.max_originals == 40
    assert streaming.buffer_rows(sharding, 10_000, batch_size=640) == 40


@pytest.fixture
def reads(monkeypatch) -> list[np.ndarray]:
    """The rows of each read from a cache."""
    reads, fill = [], Cache.fill

    def fill_and_note(self, rows, out, num_threads=None):
        reads.append(rows)
        fill(self, rows, out, num_threads)

    monkeypatch.setattr(Cache, "fill", fill_and_note)
    return reads


def test_the_next_chunk_is_read_ahead_once_and_every_original_of_it_once(on_devices, reads):
    _, _, stream = on_devices(1)
    reads.clear()
    sizes = (64,) * 6
    for step in range(6):
        stream.for_steps(upcoming_from(step, sizes), 1)
        if stream._next:
            stream._next.arrays.result()
        assert len(reads) == min(step + 2, 6)
    assert all(len(set(rows)) == len(rows) for rows in reads)
    assert len(reads[1]) < 64  # where a pass ends, originals come twice


def test_a_chunk_serves_whatever_lies_in_it_and_nothing_else(on_devices, reads):
    _, sharding, stream = on_devices(1, num_rows=80)
    stream.for_steps(upcoming_from(0, (10,) * 20), 20)
    stream._next.arrays.result()
    reads.clear()
    assert stream.for_steps(upcoming_from(2, (10,) * 20), 20).num_steps == 6
    assert stream.for_steps(upcoming_from(1, (20,) * 4), 20).num_steps == 3  # the batch has grown
    assert not reads
    chunk = stream._chunk
    stream.for_steps(upcoming_from(0, (10,) * 20, seed=4), 1)
    assert stream._chunk is not chunk
    inputs = StepInputs(*(np.array([x], np.int32) for x in (2, 630, 30)), learning_rate=None, b2=None)
    assert load_inputs(stream, sharding, SEED, inputs).num_steps == 1
    assert (stream._chunk.begin, stream._chunk.end) == (2 * 640 + 630, 3 * 640 + 20)


def test_no_chunk_is_longer_than_an_epoch(on_devices):
    _, sharding, stream = on_devices(1)
    stream._num_rows = 10**9
    assert stream._end_of_chunk(upcoming_from(0, (640, 640, 640))) == sharding.num_examples
