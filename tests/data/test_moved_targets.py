"""What is to be predicted of a pixel goes where the pixel goes."""

import jax.numpy as jnp
import numpy as np
import pytest

import augment
from largebatch.config.fields import TaskConfig
from largebatch.data import random_augment
from largebatch.data.random_augment import RandomAugment
from largebatch.tasks.planes import PixelTargets
from largebatch.tasks.task import make_task
from largebatch.training.views import make_read

KEYS = np.arange(5, dtype=np.uint32) * 77 + 3
RNG = np.random.default_rng(0)
SIZE, NUM_ORIGINALS = 12, 6


TASK = make_task(TaskConfig(name="segmentation"), 0, PixelTargets(("a", "b")))


@pytest.mark.parametrize("storage", ["expanded", "on_device"])
@pytest.mark.parametrize("num_views", [1, 2, 8])
def test_views_and_shifts_move_an_image_and_its_planes_alike(storage, num_views):
    images = RNG.integers(0, 256, (NUM_ORIGINALS, SIZE, SIZE, 1), np.uint8)
    stored = np.concatenate([images, images], axis=-1)  # each pixel is to be predicted as itself
    if storage == "expanded":
        stored = augment.expand(stored, num_views).reshape(-1, *stored.shape[1:])
    read = make_read(storage, (SIZE, SIZE, 2), num_views, TASK, RandomAugment(shift=4))
    shard = {"images": jnp.asarray(stored.reshape(len(stored), -1)), "labels": jnp.zeros(NUM_ORIGINALS, jnp.int32)}
    examples = jnp.arange(5) * num_views + np.arange(5) % num_views
    moved, planes = read(shard, examples, KEYS)
    np.testing.assert_array_equal(moved, planes)
    assert not np.array_equal(moved[0], images[0])


def test_a_crop_takes_the_value_of_the_nearest_pixel():
    planes = RNG.integers(0, 256, (5, SIZE, SIZE, 3), np.uint8)
    cropped = RandomAugment(crop_scale=0.3).move(jnp.asarray(planes), KEYS)
    assert cropped.dtype == np.uint8
    crops = random_augment.draw_crops(KEYS, SIZE, SIZE, 0.3)
    for example in range(5):
        top, left, height, width = (
            float(part[example]) for part in (crops.top, crops.left, crops.height, crops.width)
        )
        rows = np.floor(top + (np.arange(SIZE) + 0.5) * height / SIZE).astype(int)
        columns = np.floor(left + (np.arange(SIZE) + 0.5) * width / SIZE).astype(int)
        np.testing.assert_array_equal(cropped[example], planes[example][rows][:, columns])


def test_a_crop_keeps_a_large_object_in_its_place():
    """The bilinear image and the nearest mask of a square agree but at its border."""
    image = np.zeros((5, 48, 48, 1), np.uint8)
    image[:, 14:34, 14:34] = 255
    change = RandomAugment(crop_scale=0.5)
    looked_at, mask = change.apply(jnp.asarray(image), KEYS), change.move(jnp.asarray(image), KEYS)
    assert np.mean((looked_at > 127.5) != (mask > 127)) < 0.01


def test_colours_and_cutouts_leave_planes_alone():
    planes = RNG.integers(0, 256, (5, SIZE, SIZE, 2), np.uint8)
    change = RandomAugment(brightness=0.5, contrast=0.5, cutout=4, fill=(0.0,))
    np.testing.assert_array_equal(change.move(jnp.asarray(planes), KEYS), planes)
