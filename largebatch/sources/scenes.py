"""Scenes with an exact mask and an exact depth: textured objects that stand on a floor before a wall, from a seed.

A pinhole camera looks along the floor, from one height, as on a vehicle, and up or down a little. A row of pixels
below the horizon sees the floor at the depth focal length * height of the camera / rows below the horizon. A wall
closes the view. Objects are flat, upright and face the camera, so each has one depth; what is nearer hides what is
behind. Colours tell nothing. Where an object stands, its size and how fine its texture is tell how far it is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FARTHEST = 12.0  # metres, depth 1
CAMERA_HEIGHT = 1.25  # metres above the floor; were it another in each scene, no picture would tell its size
FOCAL_LENGTH = 1.0  # of the side of the picture
HORIZONS = 0.28, 0.32  # of the side, from above; over a wider range nobody could tell how far the wall is
PERIODS = 0.6, 1.0  # metres, of patterns; over a wider range they would not tell how far they are
FEWEST_OBJECTS, MOST_OBJECTS = 3, 8
SHAPES = ("arch", "box", "ellipse", "triangle")
BACKGROUND_PATTERNS, OBJECT_PATTERNS = ("stripes", "waves"), ("checks", "dots")
NOISE = 6.0  # standard deviation, of 255

# (metres to the right, metres up or away, both [S, S]; a generator of numbers) -> colours [S, S, 3], 0 to 255
Texture = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class Scene:
    """A picture of S x S pixels, and what is to be found in it."""

    image: np.ndarray  # uint8 [S, S, 3]
    background: np.ndarray  # uint8 [S, S, 3]: the same without objects
    mask: np.ndarray  # bool [S, S]: where an object is
    depth: np.ndarray  # float64 [S, S], above 0, up to 1


class _View:
    """What a camera at some place sees of each pixel."""

    def __init__(self, size: int, rng: np.random.Generator):
        self.size = size
        self.horizon = rng.uniform(*HORIZONS) * size  # pixels from above
        self.focal = FOCAL_LENGTH * size  # pixels
        rows, columns = np.mgrid[:size, :size] + 0.5
        self.right, self.up = (columns - size / 2) / self.focal, (self.horizon - rows) / self.focal  # at one metre

    def floor_depths(self) -> np.ndarray:
        """Metres to the floor at each pixel; infinite above the horizon."""
        return np.divide(CAMERA_HEIGHT, -self.up, out=np.full_like(self.up, np.inf), where=self.up < 0)

    @property
    def nearest_floor(self) -> float:
        """Metres to what the lowest row sees."""
        return self.focal * CAMERA_HEIGHT / (self.size - self.horizon)

    def box(self, left: float, width: float, height: float, distance: float) -> tuple[slice, slice]:
        """Rows and columns that see a rectangle that stands on the floor; in metres, `left` from the middle."""
        scale = self.focal / distance
        rows = self.horizon + scale * (CAMERA_HEIGHT - height), self.horizon + scale * CAMERA_HEIGHT
        columns = self.size / 2 + scale * left, self.size / 2 + scale * (left + width)
        top, first = (max(math.floor(ends[0]), 0) for ends in (rows, columns))
        bottom, last = (min(math.ceil(ends[1]), self.size) for ends in (rows, columns))
        return slice(top, bottom), slice(first, max(first, last))


def make_scene(size: int, seed: tuple[int, ...], background: Texture, objects: Texture) -> Scene:
    """The scene of a seed.

    Args:
      background, objects: textures of floor and wall, and of what stands before them.
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
    """Which points lie in a shape that fills the unit square; y is 0 where it stands."""
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
    """Patterns of these kinds in random colours, directions and periods."""

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
    """Pieces of images [N, H, W, 3], each repeated every so many metres."""

    def texture(right, up, rng):
        image = images[rng.integers(len(images))]
        height, width = image.shape[:2]
        rows, columns = np.floor(up / metres * height).astype(int), np.floor(right / metres * width).astype(int)
        return image[rows % height, columns % width].astype(float)

    return texture
