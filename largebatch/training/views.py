"""The views of an image, and the reading of a micro-batch's images from a device's memory."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from largebatch.data.placement import take_rows
from largebatch.data.random_augment import RandomAugment
from largebatch.tasks.planes import split_planes
from largebatch.tasks.task import Task

# Ways to hold the training images on the devices; each needs less memory than the one before.
STORAGES = ("expanded", "on_device", "streamed")
# Number of the views of `apply_view` that an image has, by augment.views.
VIEW_COUNTS = {"all": 8, "flip": 2, "none": 1}


def apply_view(images, view: int):
    """Apply view `view` to images [..., H, W, C]: bit 0 flips left/right, bit 1 up/down, bit 2 transposes.

    The views are the 8 symmetries of the square (four rotations, each with and without a flip); 0 is the
    identity. Images are NumPy or JAX arrays.
    """
    if view & 1:
        images = images[..., :, ::-1, :]
    if view & 2:
        images = images[..., ::-1, :, :]
    if view & 4:
        images = images.swapaxes(-3, -2)
    return images


def inverse_view(view: int) -> int:
    """Return the view that undoes `view`: a transposition swaps the two flips, other views undo themselves."""
    return 4 | (view & 1) << 1 | (view & 2) >> 1 if view & 4 else view


def expand(images: np.ndarray, num_views: int) -> np.ndarray:
    """Return the first `num_views` views of images [n, H, W, C], as [n, num_views, H, W, C]."""
    views = np.empty((len(images), num_views, *images.shape[1:]), images.dtype)
    for view in range(num_views):
        # To flip up/down is to copy whole rows, 30 times as fast as any other view: half of the views are made so
        # from one that is there. A transposition swaps the two flips.
        flips_rows = 1 if view & 4 else 2
        if view & flips_rows:
            views[:, view] = views[:, view ^ flips_rows, ::-1]
        else:
            # By channels: NumPy is slow where the innermost loop is as short as a pixel.
            for channel in range(images.shape[-1]):
                views[:, view, ..., channel] = apply_view(images, view)[..., channel]
    return views


def expansion(storage: str, num_views: int) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the function from images [n, H, W, C] to the views that devices hold; None where they hold images."""
    return functools.partial(expand, num_views=num_views) if storage == "expanded" else None


def select_views(images: jax.Array, views: jax.Array, num_views: int) -> jax.Array:
    """Apply one traced view per image: images [M, H, W, C], views int32 [M], below `num_views`."""
    views = views[:, None, None, None]
    if num_views > 1:
        images = jnp.where(views & 1, images[:, :, ::-1], images)
    if num_views > 2:
        images = jnp.where(views & 2, images[:, ::-1], images)
    if num_views > 4:
        images = jnp.where(views & 4, images.swapaxes(1, 2), images)
    return images


def make_read(
    storage: str,
    stored_shape: tuple[int, int, int],
    num_views: int,
    task: Task,
    random_augment: RandomAugment | None = None,
):
    """Make the `read` of `step.MicroBatchReader` for {"images": [n, H * W * C], "labels": [originals]}.

    The storage gives a view of an original, which is then changed at random. Images lie as flat rows, since a TPU
    pads the last two dimensions of an array to its tile of 8 x 128.
    A stream has "rows": [originals] too: the rows in which originals lie, where they do.
    """

    def read(shard, examples, visit_keys):
        rows = originals = examples // num_views
        if storage == "expanded":
            rows = examples
        elif storage == "streamed":
            rows = take_rows(shard["rows"], originals)
        images = take_rows(shard["images"], rows).reshape(-1, *stored_shape)
        if storage != "expanded":
            images = select_views(images, examples % num_views, num_views)
        images, planes = split_planes(images, task.target_planes)
        if random_augment:
            images, planes = random_augment.apply(images, visit_keys), random_augment.move(planes, visit_keys)
        return images, planes if task.target_planes else take_rows(shard["labels"], originals)

    return read


def make_read_slice(stored_shape: tuple[int, int, int], num_views: int, task: Task):
    """Make the `read_slice` of `step.MicroBatchReader` for the same data in storage "expanded"."""

    def read_slice(shard, start, size):
        rows = lax.dynamic_slice_in_dim(shard["images"], start, size)
        images, planes = split_planes(rows.reshape(-1, *stored_shape), task.target_planes)
        originals = (start + jnp.arange(size)) // num_views
        return images, planes if task.target_planes else take_rows(shard["labels"], originals)

    return read_slice
