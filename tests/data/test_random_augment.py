"""Random changes of training images: what they do to pixels, how they are distributed, and on how many devices."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_order import key_of

from largebatch.config.fields import TaskConfig
from largebatch.data import batching, random_augment
from largebatch.data.batching import DataSharding, Grouping
from largebatch.data.random_augment import RandomAugment
from largebatch.tasks.planes import PixelTargets
from largebatch.tasks.task import Classification, make_task
from largebatch.training.views import expand, make_read

SHAPE, FILL = (9, 6, 2), (100.25, 7.5)
ALL = RandomAugment(crop_scale=0.3, shift=2, brightness=0.4, contrast=0.5, cutout=3, fill=FILL)
MANY_KEYS = np.arange(20_000, dtype=np.uint32)


def images_of(count: int, dtype=np.uint8, shape=SHAPE) -> np.ndarray:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (count, *shape), dtype, endpoint=True)


# ---- the same in NumPy, an image at a time ----------------------------------------------------------------


def uniform(key: int, salt: int, low=0.0, high=1.0) -> float:
    return low + (high - low) * float(key_of(key, salt) >> np.uint64(8)) / 2**24


def cropped(image, key, smallest_share):
    height, width = image.shape[:2]
    share = uniform(key, 2, smallest_share, 1)
    ratio = np.exp(uniform(key, 3, np.log(3 / 4), np.log(4 / 3)))
    if share * height * width * ratio > width**2:
        ratio = width / (share * height)
    if share * height * width / ratio > height**2:
        ratio = share * width / height
    crop_height, crop_width = np.sqrt(share * height * width / ratio), np.sqrt(share * height * width * ratio)
    top, left = uniform(key, 4, 0, height - crop_height), uniform(key, 5, 0, width - crop_width)
    rows = top + (np.arange(height) + 0.5) * crop_height / height - 0.5
    columns = left + (np.arange(width) + 0.5) * crop_width / width - 0.5
    by_row = np.apply_along_axis(lambda pixels: np.interp(rows, np.arange(height), pixels), 0, image)
    return np.apply_along_axis(lambda pixels: np.interp(columns, np.arange(width), pixels), 1, by_row)


def shifted(image, key, limit):
    row, column = int(key_of(key, 0)) % (2 * limit + 1), int(key_of(key, 1)) % (2 * limit + 1)
    padded = np.pad(image, ((limit, limit), (limit, limit), (0, 0)), mode="reflect")
    return padded[row : row + image.shape[0], column : column + image.shape[1]]


def contrasted(image, key, most, largest):
    mean = image.mean(axis=(0, 1))
    return np.clip(mean + (image - mean) * uniform(key, 7, 1 - most, 1 + most), 0, largest)


def cut_out(image, key, side, fill):
    image = image.copy()
    row, column = int(key_of(key, 8)) % image.shape[0], int(key_of(key, 9)) % image.shape[1]
    top, left = row - side // 2, column - side // 2
    image[max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = fill
    return image


def applied(options: RandomAugment, image: np.ndarray, key: int) -> np.ndarray:
    """Return what `options` make of an image, float64 [H, W, C]."""
    largest, image = np.iinfo(image.dtype).max, image.astype(float)
    if options.crop_scale < 1:
        image = cropped(image, key, options.crop_scale)
    if options.shift:
        image = shifted(image, key, options.shift)
    if options.brightness:
        factor = uniform(key, 6, 1 - options.brightness, 1 + options.brightness)
        image = np.clip(image * factor, 0, largest)
    if options.contrast:
        image = contrasted(image, key, options.contrast, largest)
    if options.cutout:
        image = cut_out(image, key, options.cutout, options.fill)
    return image


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        pytest.param(RandomAugment(crop_scale=0.2), np.uint8, id="crop"),
        pytest.param(RandomAugment(shift=3), np.uint16, id="shift"),
        pytest.param(RandomAugment(brightness=0.7), np.uint16, id="brightness"),
        pytest.param(RandomAugment(contrast=0.9), np.uint8, id="contrast"),
        pytest.param(RandomAugment(cutout=4, fill=FILL), np.uint8, id="even cutout"),
        pytest.param(ALL, np.uint8, id="all"),
        pytest.param(ALL, np.uint16, id="all of 16 bits"),
    ],
)
def test_images_are_those_of_numpy(options, dtype):
    images, keys = images_of(60, dtype), np.arange(60, dtype=np.uint32) * 77_777
    expected = np.stack([applied(options, image, key) for image, key in zip(images, keys, strict=True)])
    found = np.asarray(jax.jit(options.apply)(images, keys))
    largest = np.iinfo(dtype).max
    assert found.dtype == (dtype if options == RandomAugment(shift=3) else np.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * largest)
    assert (np.abs(found - images).max(axis=(1, 2, 3)) > 0).mean() > 0.8


# ---- what is random ---------------------------------------------------------------------------------------


def assert_uniform(values, low, high):
    """The distribution function is within 0.015 of the straight line (Kolmogorov-Smirnov: else once in 4,000)."""
    values = np.sort(np.asarray(values, float))
    assert low - 1e-4 <= values[0]
    assert values[-1] <= high + 1e-4
    distance = np.abs((values - low) / (high - low) - np.linspace(0, 1, len(values))).max()
    assert distance < 0.015 * np.sqrt(len(MANY_KEYS) / len(values))


def test_crops_are_uniform_in_area_ratio_and_place_and_within_the_image():
    height, width = 40, 60
    crops = jax.tree.map(np.asarray, random_augment.draw_crops(MANY_KEYS, height, width, 0.2))
    assert min(crops.top.min(), crops.left.min()) >= 0
    assert (crops.top + crops.height).max() <= height * (1 + 1e-6)
    assert (crops.left + crops.width).max() <= width * (1 + 1e-6)
    share = crops.height * crops.width / (height * width)
    assert_uniform(share, 0.2, 1)
    ratio = np.log(crops.width / crops.height)
    assert_uniform(ratio[share < 0.45], np.log(3 / 4), np.log(4 / 3))  # which all fit
    room_above, room_beside = height - crops.height, width - crops.width
    moves = (room_above > 0.5) & (room_beside > 0.5)
    top, left = crops.top[moves] / room_above[moves], crops.left[moves] / room_beside[moves]
    assert_uniform(top, 0, 1)
    assert_uniform(left, 0, 1)
    fits = share[moves] < 0.45  # where the ratio does not follow the area
    draws = np.stack([share[moves], ratio[moves], top, left])[:, fits]
    assert np.abs(np.corrcoef(draws) - np.eye(4)).max() < 0.05


def test_factors_of_brightness_and_contrast_are_uniform_and_apart():
    images = np.tile(np.uint8([40, 60]).reshape(1, 2, 1, 1), (len(MANY_KEYS), 1, 1, 1))
    brightness = random_augment.brightened(images, MANY_KEYS, 0.6, 255)[:, 0, 0, 0] / 40
    contrast = (50 - random_augment.contrasted(images, MANY_KEYS, 0.3, 255)[:, 0, 0, 0]) / 10
    assert_uniform(brightness, 0.4, 1.6)
    assert_uniform(contrast, 0.7, 1.3)
    assert abs(np.corrcoef(brightness, contrast)[0, 1]) < 0.03


def test_every_shift_and_every_centre_of_a_cutout_is_as_frequent():
    images = np.zeros((2400, 4, 6, 1), np.uint8)
    cut = np.asarray(random_augment.cut_out(images, MANY_KEYS[:2400], 1, (9.0,)))
    assert (cut.reshape(2400, -1) == 9).sum(axis=1).tolist() == [1] * 2400
    counts = (cut == 9).sum(axis=0)
    assert 60 < counts.min() <= counts.max() < 140  # of 100 expected: 4 standard deviations
    images = np.tile(np.arange(24, dtype=np.uint8).reshape(1, 4, 6, 1), (2500, 1, 1, 1))
    shifted_images = np.asarray(random_augment.shifted(images, MANY_KEYS[:2500], 2)).reshape(2500, -1)
    counts = np.unique(shifted_images, axis=0, return_counts=True)[1]
    assert len(counts) == 25
    assert 60 < counts.min() <= counts.max() < 140


# ---- on devices -------------------------------------------------------------------------------------------


READ = jax.jit(make_read("on_device", SHAPE, 2, Classification(2), ALL))


@jax.jit
def visits_of_an_epoch(num_devices, device, epoch) -> batching.MicroBatchIndices:
    sharding = DataSharding(20, 8, num_devices, views=2)
    batch = batching.device_batch(sharding, device, epoch, 0, 40)
    return batching.micro_batch(sharding, batch, 0, Grouping(40, 40), 3)


def images_by_visit(num_devices: int) -> dict:
    """Return {visit key: (original, image after all changes)} of two epochs of 20 originals in 2 views."""
    sharding, originals, found = DataSharding(20, 8, num_devices, views=2), images_of(20).reshape(20, -1), {}
    for epoch, device in itertools.product((0, 1), range(num_devices)):
        rows = np.resize(sharding.originals_of(device, seed=0), 20)
        chosen = jax.tree.map(np.asarray, visits_of_an_epoch(num_devices, device, epoch))
        shard = {"images": originals[rows], "labels": rows}
        images, labels = map(np.asarray, READ(shard, chosen.examples, chosen.visit_keys))
        for place in np.flatnonzero(chosen.weights):
            found[int(chosen.visit_keys[place])] = int(labels[place]), images[place].tobytes()
    return found


def test_a_visit_has_the_same_bits_on_any_number_of_devices_and_others_in_every_epoch():
    on_one_device = images_by_visit(1)
    assert len(on_one_device) == len({image for _, image in on_one_device.values()}) == 80
    assert images_by_visit(2) == images_by_visit(8) == on_one_device


# ---- dense targets ----------------------------------------------------------------------------------------

KEYS, SIZE = np.arange(5, dtype=np.uint32) * 77 + 3, 12


@pytest.mark.parametrize(("storage", "num_views"), [("expanded", 8), ("on_device", 8)])
def test_views_and_shifts_move_an_image_and_its_targets_alike(storage, num_views):
    images = images_of(6, shape=(SIZE, SIZE, 1))
    stored = np.concatenate([images, images], axis=-1)  # each pixel is to be predicted as itself
    if storage == "expanded":
        stored = expand(stored, num_views).reshape(-1, *stored.shape[1:])
    task = make_task(TaskConfig(name="segmentation"), 0, PixelTargets(("a", "b")))
    read = make_read(storage, (SIZE, SIZE, 2), num_views, task, RandomAugment(shift=4))
    shard = {"images": jnp.asarray(stored.reshape(len(stored), -1)), "labels": jnp.zeros(6, jnp.int32)}
    moved, targets = read(shard, jnp.arange(5) * num_views + np.arange(5) % num_views, KEYS)
    np.testing.assert_array_equal(moved, targets)
    assert not np.array_equal(moved[0], images[0])


def test_a_crop_takes_the_target_of_the_nearest_pixel_and_colours_and_cutouts_leave_it():
    targets = images_of(5, shape=(SIZE, SIZE, 3))
    change = RandomAugment(crop_scale=0.3, brightness=0.5, contrast=0.5, cutout=4, fill=(0.0,))
    cropped = change.move(jnp.asarray(targets), KEYS)
    assert cropped.dtype == np.uint8
    crops = jax.tree.map(np.asarray, random_augment.draw_crops(KEYS, SIZE, SIZE, 0.3))
    for example in range(5):
        top, left, height, width = (float(part[example]) for part in crops)
        rows = np.floor(top + (np.arange(SIZE) + 0.5) * height / SIZE).astype(int)
        columns = np.floor(left + (np.arange(SIZE) + 0.5) * width / SIZE).astype(int)
        np.testing.assert_array_equal(cropped[example], targets[example][rows][:, columns])
