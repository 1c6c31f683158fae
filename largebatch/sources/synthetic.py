"""Images generated from seeds: textures, and scenes with masks and depths."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from largebatch.decoding import images
from largebatch.decoding.colours import to_rgb8
from largebatch.sources.source import ReadPixels, Source
from largebatch.tasks import planes
from largebatch.tasks.planes import PixelTargets
from largebatch.util import UserError

CLASSES = ("checks", "disks", "noise", "rings", "stripes")


def synthetic_labels(num_examples: int) -> np.ndarray:
    """Return the labels of the synthetic images, int32 [N]: the classes in turn."""
    return np.arange(num_examples, dtype=np.int32) % len(CLASSES)


def synthetic(num_examples: int, size: int, seed: int) -> np.ndarray:
    """Generate textures in random colours, uint8 [N, size, size, 3].

    The class is the pattern, which the mean colour does not reveal. Every pattern looks alike under the 8 flips and
    rotations, has random phase, scale and contrast, and carries noise.
    """
    rng = np.random.default_rng(seed)
    images = np.empty((num_examples, size, size, 3), np.uint8)
    for i, label in enumerate(synthetic_labels(num_examples)):
        pattern = _pattern(CLASSES[label], size, rng)
        mean, contrast = rng.uniform(90, 165, 3), rng.uniform(15, 50, 3) * rng.choice((-1, 1))
        pixels = mean + contrast * (pattern - pattern.mean())[..., None] + rng.normal(0, 12, (size, size, 3))
        images[i] = np.clip(pixels, 0, 255)
    return images


def _pattern(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """Generate one texture of +1 and -1, [size, size]."""
    y, x = np.mgrid[:size, :size].astype(np.float32)
    period = rng.uniform(6, 10)
    along_x, along_y = (np.sin(2 * np.pi * axis / period + rng.uniform(0, 2 * np.pi)) for axis in (x, y))
    radius = np.hypot(x - rng.uniform(0.3, 0.7) * size, y - rng.uniform(0.3, 0.7) * size)
    if kind == "checks":
        wave = along_x * along_y
    elif kind == "disks":
        wave = rng.uniform(0.15, 0.3) * size - radius
    elif kind == "noise":
        wave = rng.standard_normal((size, size))
    elif kind == "rings":
        wave = np.sin(2 * np.pi * radius / period + rng.uniform(0, 2 * np.pi))
    else:
        wave = along_x if rng.random() < 0.5 else along_y
    return np.where(wave > 0, 1.0, -1.0)


FARTHEST = 12.0  # metres, depth 1
CAMERA_HEIGHT = 1.25  # metres above the floor; the same in all scenes, or no picture would reveal its scale
FOCAL_LENGTH = 1.0  # in sides of the picture
HORIZONS = 0.28, 0.32  # in sides, from above; a wider range would hide the distance of the wall
PERIODS = 0.6, 1.0  # metres, of patterns; a wider range would hide their distance
FEWEST_OBJECTS, MOST_OBJECTS = 3, 8
SHAPES = ("arch", "box", "ellipse", "triangle")
BACKGROUND_PATTERNS, OBJECT_PATTERNS = ("stripes", "waves"), ("checks", "dots")
NOISE = 6.0  # standard deviation, of 255

# (metres to the right, metres up or away, both [S, S]; a generator of numbers) -> colours [S, S, 3], 0 to 255
Texture = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class Scene:
    """Picture of S x S pixels with its dense targets."""

    image: np.ndarray  # uint8 [S, S, 3]
    background: np.ndarray  # uint8 [S, S, 3]: the picture without objects
    mask: np.ndarray  # bool [S, S]: True where an object is
    depth: np.ndarray  # float64 [S, S], above 0, up to 1


class _View:
    """Rays of the pixels of a camera with a random horizon."""

    def __init__(self, size: int, rng: np.random.Generator):
        self.size = size
        self.horizon = rng.uniform(*HORIZONS) * size  # pixels from above
        self.focal = FOCAL_LENGTH * size  # pixels
        rows, columns = np.mgrid[:size, :size] + 0.5
        self.right, self.up = (columns - size / 2) / self.focal, (self.horizon - rows) / self.focal  # at one metre

    def floor_depths(self) -> np.ndarray:
        """Return metres to the floor at each pixel, float [S, S]; infinite above the horizon."""
        return np.divide(CAMERA_HEIGHT, -self.up, out=np.full_like(self.up, np.inf), where=self.up < 0)

    @property
    def nearest_floor(self) -> float:
        """Metres to the floor at the lowest row of pixels."""
        return self.focal * CAMERA_HEIGHT / (self.size - self.horizon)

    def box(self, left: float, width: float, height: float, distance: float) -> tuple[slice, slice]:
        """Return rows and columns that see a rectangle on the floor; in metres, `left` from the middle."""
        scale = self.focal / distance
        rows = self.horizon + scale * (CAMERA_HEIGHT - height), self.horizon + scale * CAMERA_HEIGHT
        columns = self.size / 2 + scale * left, self.size / 2 + scale * (left + width)
        top, first = (max(math.floor(ends[0]), 0) for ends in (rows, columns))
        bottom, last = (min(math.ceil(ends[1]), self.size) for ends in (rows, columns))
        return slice(top, bottom), slice(first, max(first, last))


def make_scene(size: int, seed: tuple[int, ...], background: Texture, objects: Texture) -> Scene:
    """Generate the scene of a seed.

    Args:
      background, objects: textures of floor and wall, and of the objects before them.
    """
    rng = np.random.default_rng(seed)
    view = _View(size, rng)
    wall = rng.uniform(0.5, 0.95) * FARTHEST
    depth = np.minimum(view.floor_depths(), wall)
    on_floor, on_wall = (
        background(view.right * depth, depth, rng),
        background(view.right * wall, view.up * wall, rng),
    )
    empty = np.where((depth < wall)[..., None], on_floor, on_wall)
    image, mask = empty.copy(), np.zeros((size, size), bool)
    for _ in range(rng.integers(FEWEST_OBJECTS, MOST_OBJECTS + 1)):
        distance = rng.uniform(view.nearest_floor, 0.95 * wall)
        width, height = rng.uniform(0.5, 1.6), rng.uniform(0.5, 2.0)  # metres
        left = rng.uniform(-0.5, 0.5) * size * distance / view.focal - width / 2
        box = view.box(left, width, height, distance)
        right, up = view.right[box] * distance - left, view.up[box] * distance + CAMERA_HEIGHT
        is_inside = _is_inside(str(rng.choice(SHAPES)), right / width, up / height)
        is_seen = is_inside & (distance < depth[box])
        image[box] = np.where(is_seen[..., None], objects(right, up, rng), image[box])
        depth[box] = np.where(is_seen, distance, depth[box])
        mask[box] |= is_seen
    noise = NOISE * rng.standard_normal((size, size, 3), np.float32)
    return Scene(_to_bytes(image + noise), _to_bytes(empty + noise), mask, depth / FARTHEST)


def _to_bytes(image: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


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


def tiles(images: np.ndarray, metres: float = 2.0) -> Texture:
    """Create a texture of images [N, H, W, 3], each repeated every `metres`."""

    def texture(right, up, rng):
        image = images[rng.integers(len(images))]
        height, width = image.shape[:2]
        rows, columns = np.floor(up / metres * height).astype(int), np.floor(right / metres * width).astype(int)
        return image[rows % height, columns % width].astype(float)

    return texture


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


def scenes_source(
    name: str, num_examples: int, seed: int, options: images.DecodeOptions, ground: Source | None = None
) -> Source:
    """Create the source of a number of scenes.

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

    def read_with(ground_of: Callable[[str, int], Texture]) -> ReadPixels:
        def read(indices, out=None):
            scenes = []
            for index in indices:
                split, number = numbers[index]
                scenes.append(make_scene(height, (seed, number), ground_of(split, number), objects))
            return [_stored(scene) for scene in scenes]

        return read

    @contextlib.contextmanager
    def open_pixels():
        if ground is None:
            yield read_with(lambda split, number: background)
            return
        with opened_ground(ground, seed) as ground_of:
            yield read_with(ground_of)

    on = f" on {ground.description}" if ground else ""
    photos = ground.fingerprint if ground else ""
    return Source(
        description=f"{name} ({num_examples} of {height} pixels, seed {seed}){on}",
        fingerprint=f"{name}-{SCENES_VERSION} {num_examples} {height} {seed} {photos}",
        ids=[f"{number:010d}" for _, number in numbers],
        labels=np.zeros(num_examples, np.int32),
        class_names=["scene"],
        open=open_pixels,
        splits=[split for split, _ in numbers],
        targets=PixelTargets(SCENE_CLASSES, has_depth=True),
    )


def split_counts(count: int) -> dict[str, int]:
    """Return how many of `count` scenes or images each split has."""
    others = {split: int(share * count) for split, share in SHARES.items()}
    return {"train": count - sum(others.values()), **others}


@contextlib.contextmanager
def opened_ground(ground: Source, seed: int) -> Iterator[Callable[[str, int], Texture]]:
    """Yield a function that returns the ground texture, an image of the split, by split and number of a scene."""
    order = np.random.default_rng(seed).permutation(len(ground.ids))
    ends = np.cumsum(list(split_counts(len(order)).values()))
    images_of: dict[str, Sequence[int]] = dict(zip(FIRST_SEEDS, np.split(order, ends[:-1]), strict=True))
    with ground.open() as read:

        def ground_of(split: str, number: int) -> Texture:
            of_split = images_of[split]
            (image,) = read([of_split[number % len(of_split)]])
            return tiles(to_rgb8(image)[None])

        yield ground_of


def _stored(scene) -> np.ndarray:
    """Return a scene as it is stored, uint8 [H, W, 6]: image, mask and depth."""
    depth = np.rint(scene.depth * planes.LARGEST_DEPTH).astype(np.uint16)
    return planes.join(scene.image, scene.mask, depth)
