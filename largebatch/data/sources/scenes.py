"""Scenes generated from seeds: objects on a floor before a wall, with masks and depths."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from largebatch.data.dataset import Dataset, dataset_of_files
from largebatch.data.decode import DecodeOptions
from largebatch.data.pictures import to_rgb8
from largebatch.tasks import planes
from largebatch.tasks.planes import PixelTargets
from largebatch.util import UserError

FARTHEST = 12.0  # metres, depth 1
CAMERA_HEIGHT = 1.25  # metres above the floor; the same in all scenes, or no picture would reveal its scale
FOCAL_LENGTH = 1.0  # in sides of the picture
HORIZONS = 0.28, 0.32  # in sides, from above; a wider range would hide the distance of the wall
PERIODS = 0.6, 1.0  # metres, of patterns; a wider range would hide their distance
FEWEST_OBJECTS, MOST_OBJECTS = 3, 8
SHAPES = ("arch", "box", "ellipse", "triangle")
BACKGROUND_PATTERNS, OBJECT_PATTERNS = ("stripes", "waves"), ("checks", "dots")
TILE_METRES = 2.0  # of an image that textures floor and wall
NOISE = 6.0  # standard deviation, of 255

# (metres to the right, metres up or away, both [S, S]; a generator of numbers) -> colours [S, S, 3], 0 to 255
Texture = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class Scene:
    """Picture of S x S pixels with its dense targets."""

    image: np.ndarray  # uint8 [S, S, 3]
    mask: np.ndarray  # bool [S, S]: True where an object is
    depth: np.ndarray  # float64 [S, S], above 0, up to 1


def make_scene(size: int, seed: tuple[int, ...], background: Texture, objects: Texture) -> Scene:
    """Generate the scene of a seed: a floor that ends at a wall, and objects that stand on it.

    Args:
      background, objects: textures of floor and wall, and of the objects before them.
    """
    rng = np.random.default_rng(seed)
    horizon, focal = rng.uniform(*HORIZONS) * size, FOCAL_LENGTH * size  # pixels, the horizon from above
    rows, columns = np.mgrid[:size, :size] + 0.5
    rays_right, rays_up = (columns - size / 2) / focal, (horizon - rows) / focal  # metres, at a distance of one
    wall = rng.uniform(0.5, 0.95) * FARTHEST
    floor = np.divide(CAMERA_HEIGHT, -rays_up, out=np.full_like(rays_up, np.inf), where=rays_up < 0)
    depth = np.minimum(floor, wall)
    on_floor = background(rays_right * depth, depth, rng)
    on_wall = background(rays_right * wall, rays_up * wall, rng)
    image, mask = np.where((depth < wall)[..., None], on_floor, on_wall), np.zeros((size, size), bool)
    nearest = focal * CAMERA_HEIGHT / (size - horizon)  # metres to the floor at the lowest row
    for _ in range(rng.integers(FEWEST_OBJECTS, MOST_OBJECTS + 1)):
        distance = rng.uniform(nearest, 0.95 * wall)
        width, height = rng.uniform(0.5, 1.6), rng.uniform(0.5, 2.0)  # metres
        left = rng.uniform(-0.5, 0.5) * size * distance / focal - width / 2
        scale = focal / distance
        bottom, first = horizon + scale * CAMERA_HEIGHT, size / 2 + scale * left
        top, last = horizon + scale * (CAMERA_HEIGHT - height), size / 2 + scale * (left + width)
        box = _pixels_between(top, bottom, size), _pixels_between(first, last, size)
        right, up = rays_right[box] * distance - left, rays_up[box] * distance + CAMERA_HEIGHT
        is_inside = _is_inside(str(rng.choice(SHAPES)), right / width, up / height)
        is_seen = is_inside & (distance < depth[box])
        image[box] = np.where(is_seen[..., None], objects(right, up, rng), image[box])
        depth[box] = np.where(is_seen, distance, depth[box])
        mask[box] |= is_seen
    image += NOISE * rng.standard_normal((size, size, 3), np.float32)
    return Scene(np.clip(np.rint(image), 0, 255).astype(np.uint8), mask, depth / FARTHEST)


def _pixels_between(begin: float, end: float, size: int) -> slice:
    """Return the rows or columns of a picture that an object between two places touches."""
    first = max(math.floor(begin), 0)
    return slice(first, max(first, min(math.ceil(end), size)))


def _is_inside(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return True for points in a shape that fills the unit square; y is 0 where the shape stands."""
    if shape == "ellipse":
        return (2 * x - 1) ** 2 + (2 * y - 1) ** 2 < 1
    is_within = (x >= 0) & (x < 1) & (y >= 0) & (y < 1)
    if shape == "triangle":
        return is_within & (np.abs(2 * x - 1) < 1 - y)
    if shape == "arch":
        return is_within & ((y < 0.6) | ((2 * x - 1) ** 2 + ((y - 0.6) / 0.4) ** 2 < 1))
    return is_within


# ---- textures ---------------------------------------------------------------------------------------


def patterns(kinds: tuple[str, ...]) -> Texture:
    """Create a texture of patterns of these kinds in random colours, directions and periods."""

    def texture(right, up, rng):
        kind, angle, period = str(rng.choice(kinds)), rng.uniform(0, np.pi), rng.uniform(*PERIODS)
        along = np.cos(angle) * right + np.sin(angle) * up
        across = np.cos(angle) * up - np.sin(angle) * right
        along, across = (np.sin(2 * np.pi * (axis / period + rng.random())) for axis in (along, across))
        wave = {
            "stripes": along,
            "waves": np.sin(2 * along + across),
            "checks": along * across,
            "dots": along + across - 0.8,
        }[kind]
        mean, contrast = rng.uniform(40, 215, 3), rng.uniform(-60, 60, 3)
        return mean + contrast * np.tanh(3 * wave)[..., None]

    return texture


def tiles(image: np.ndarray) -> Texture:
    """Create a texture of an image [H, W, 3] that is repeated every TILE_METRES."""

    def texture(right, up, rng):
        height, width = image.shape[:2]
        rows = np.floor(up / TILE_METRES * height).astype(int)
        columns = np.floor(right / TILE_METRES * width).astype(int)
        return image[rows % height, columns % width].astype(float)

    return texture


# ---- data sets of scenes -----------------------------------------------------------------------------

SCENES_VERSION = 5  # of the scenes: increased whenever a seed gives another scene
DEFAULT_SIZE = 48  # pixels
SCENE_CLASSES = ("background", "object")
# First seed of the scenes of each split; the ranges do not overlap, whatever the number of scenes.
FIRST_SEEDS = {"train": 0, "val": 2**30, "test": 2**31}
SHARES = {"val": 0.1, "test": 0.1}  # of the scenes, and of the images that texture their floor and wall
# Patterns of floor and wall, and those of objects, by the name of the set.
PATTERNS = {
    "scenes": (BACKGROUND_PATTERNS, OBJECT_PATTERNS),
    "scenes_swapped": (OBJECT_PATTERNS, BACKGROUND_PATTERNS),
}


def scenes_dataset(
    name: str, num_examples: int, seed: int, options: DecodeOptions, ground: Dataset | None = None
) -> Dataset:
    """Return the data set of a number of scenes.

    Args:
      name: a key of PATTERNS.
      ground: images that texture floor and wall, in place of patterns. Each split has images of its own.
    Raises:
      UserError: the size in `options` is no square, or its channels are not 3.
    """
    height, width = options.size or (DEFAULT_SIZE, DEFAULT_SIZE)
    if height != width:
        raise UserError(f"dataset.image_size: ({height}, {width}); allowed: a square with scenes")
    if options.channels not in (None, 3):
        raise UserError(f"dataset.channels: {options.channels}; allowed: 3 with scenes")
    counts = split_counts(num_examples)
    numbers = [(split, FIRST_SEEDS[split] + number) for split, count in counts.items() for number in range(count)]
    background, objects = map(patterns, PATTERNS[name])
    ground_of = _ground_textures(ground, seed) if ground else lambda split, number: background

    def make(example: int) -> np.ndarray:
        split, number = numbers[example]
        scene = make_scene(height, (seed, number), ground_of(split, number), objects)
        depth = np.rint(scene.depth * planes.LARGEST_DEPTH).astype(np.uint16)
        return planes.join(scene.image, scene.mask, depth)

    on = f" on {ground.description}" if ground else ""
    return dataset_of_files(
        f"{name} ({num_examples} of {height} pixels, seed {seed}){on}",
        [f"{number:010d}" for _, number in numbers],
        np.zeros(num_examples, np.int32),
        ["scene"],
        lambda examples: map(make, examples),
        splits=[split for split, _ in numbers],
        targets=PixelTargets(SCENE_CLASSES, has_depth=True),
    )


def split_counts(count: int) -> dict[str, int]:
    """Return how many of `count` scenes or images each split has."""
    others = {split: int(share * count) for split, share in SHARES.items()}
    return {"train": count - sum(others.values()), **others}


def _ground_textures(ground: Dataset, seed: int) -> Callable[[str, int], Texture]:
    """Return the function that gives a scene, by its split and number, an image of its split as ground."""
    order = np.random.default_rng(seed).permutation(len(ground.ids))
    ends = np.cumsum(list(split_counts(len(order)).values()))
    images_of = dict(zip(FIRST_SEEDS, np.split(order, ends[:-1]), strict=True))

    def ground_of(split: str, number: int) -> Texture:
        of_split = images_of[split]
        return tiles(to_rgb8(ground.read_one(of_split[number % len(of_split)])))

    return ground_of
