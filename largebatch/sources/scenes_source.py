"""Scenes as a data set: made when they are read, each from a number of its own."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from largebatch.decoding import images
from largebatch.decoding.colours import to_rgb8
from largebatch.errors import UserError
from largebatch.sources.scenes import BACKGROUND_PATTERNS, OBJECT_PATTERNS, Texture, make_scene, patterns, tiles
from largebatch.sources.source import ReadPixels, Source
from largebatch.tasks import planes
from largebatch.tasks.planes import PixelTargets

VERSION = 5  # of the scenes: another wherever a seed gives another scene
DEFAULT_SIZE = 48  # pixels
CLASSES = ("background", "object")
# Scenes of the splits come from different ranges of seeds, whatever their number.
FIRST_SEEDS = {"train": 0, "val": 2**30, "test": 2**31}
SHARES = {"val": 0.1, "test": 0.1}  # of the scenes, and of the images whose pieces they stand on
# By the name of the set: the patterns of floor and wall, and those of objects.
PATTERNS = {
    "scenes": (BACKGROUND_PATTERNS, OBJECT_PATTERNS),
    "scenes_swapped": (OBJECT_PATTERNS, BACKGROUND_PATTERNS),
}


def scenes_source(
    name: str, num_examples: int, seed: int, options: images.DecodeOptions, ground: Source | None = None
) -> Source:
    """The source of so many scenes.

    Args:
      name: a key of PATTERNS.
      ground: images whose pieces are floor and wall, in place of patterns. Each split has images of its own.
    Raises:
      UserError: they are to be of no square, or not of 3 channels.
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
    return Source(
        description=f"{name} ({num_examples} of {height} pixels, seed {seed}){on}",
        fingerprint=f"{name}-{VERSION} {num_examples} {height} {seed} {ground.fingerprint if ground else ''}",
        ids=[f"{number:010d}" for _, number in numbers],
        labels=np.zeros(num_examples, np.int32),
        class_names=["scene"],
        open=open_pixels,
        splits=[split for split, _ in numbers],
        targets=PixelTargets(CLASSES, has_depth=True),
    )


def split_counts(count: int) -> dict[str, int]:
    """How many of so many things each split has."""
    others = {split: int(share * count) for split, share in SHARES.items()}
    return {"train": count - sum(others.values()), **others}


@contextlib.contextmanager
def opened_ground(ground: Source, seed: int) -> Iterator[Callable[[str, int], Texture]]:
    """Gives the texture of floor and wall by split and number of a scene: an image of that split."""
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
    """uint8 [H, W, 6]."""
    depth = np.rint(scene.depth * planes.LARGEST_DEPTH).astype(np.uint16)
    return planes.join(scene.image, scene.mask, depth)
