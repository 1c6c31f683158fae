"""Textures generated from a seed, whose classes are patterns."""

import numpy as np

from largebatch.data.dataset import Dataset, dataset_of_arrays
from largebatch.data.decode import DecodeOptions
from largebatch.util import UserError

CLASSES = ("checks", "disks", "noise", "rings", "stripes")
DEFAULT_SIZE = 32  # pixels


def synthetic_dataset(num_examples: int, seed: int, options: DecodeOptions) -> Dataset:
    """Return the data set of a number of textures.

    Raises:
      UserError: the channels in `options` are not 3.
    """
    height, width = options.size or (DEFAULT_SIZE, DEFAULT_SIZE)
    if options.channels not in (None, 3):
        raise UserError(f"dataset.channels: {options.channels}; allowed: 3 with synthetic images")
    images = synthetic(num_examples, max(height, width), seed)[:, :height, :width]
    ids = [f"{number:06d}" for number in range(num_examples)]
    description = f"synthetic ({num_examples} images, seed {seed})"
    return dataset_of_arrays(images, synthetic_labels(num_examples), list(CLASSES), ids, description)


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
