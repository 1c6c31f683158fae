"""The data on the devices: every training image once, with its views and its label."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import decode_all, find_set, typed

import augment
from largebatch.data import placement
from largebatch.data.batching import choose_sharding
from largebatch.data.placement import bytes_per_device, place
from largebatch.data.sources.splits import split_indices
from largebatch.tasks.task import Classification
from largebatch.training.views import expansion, make_read


@pytest.mark.parametrize("storage", ["expanded", "on_device"])
def test_placed_examples_are_the_views_of_all_originals_with_their_labels(small_config, storage, monkeypatch):
    small_config.augment.storage, num_devices = storage, 3
    devices = jax.local_devices()[:num_devices]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setattr(jax, "local_device_count", lambda: num_devices)
    cache = augment.prepare_cache(typed(small_config))
    sharding = choose_sharding(None, cache.layout.counts["train"], num_devices, 8)
    expand = expansion(storage, 8)
    data = place(cache, sharding, small_config.dataset.split_seed, expand)
    dataset = find_set("synthetic", num_examples=100, image_size=16)
    pixels = decode_all(dataset)
    original_and_view = {}
    for original in split_indices(dataset.ids, 0)["train"]:
        for view, image in enumerate(augment.expand(pixels[original][None], 8)[0]):
            original_and_view[image.tobytes(), int(dataset.labels[original])] = original, view
    read, seen = make_read(storage, (16, 16, 3), 8, Classification(5)), []
    for device in range(num_devices):
        shard = jax.tree.map(lambda x, device=device: jnp.asarray(np.asarray(x)[device]), data.train.arrays)
        examples = jnp.arange(int(sharding.num_originals_of(device)) * 8)
        images, labels = map(np.asarray, read(shard, examples, examples.astype(np.uint32)))
        for image, label in zip(images, labels, strict=True):
            seen.append(original_and_view[image.tobytes(), int(label)])
    assert sorted(seen) == sorted(original_and_view.values())
    assert len(seen) == 640
    assert len(data.validation.dataset.labels) == 10
    of_images = bytes_per_device(cache.layout, sharding, 8 if storage == "expanded" else 1)
    assert data.train.arrays["images"].nbytes == num_devices * of_images["training images"]


@pytest.mark.parametrize("take", [placement.take_rows, placement._take_in_turn], ids=["chosen", "in turn"])
@pytest.mark.parametrize("width", [3, placement.WIDEST_GATHERED + 1])
def test_rows_that_are_taken_are_those_of_numpy(take, width):
    array = np.random.default_rng(0).integers(0, 256, (7, width), np.uint8)
    index = np.int32([6, 0, 3, 3])
    np.testing.assert_array_equal(jax.jit(take)(array, index), array[index])
