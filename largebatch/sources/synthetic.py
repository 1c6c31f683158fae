"""The embedded data set: textures of five kinds, from a seed."""

import numpy as np

CLASSES = ("checks", "disks", "noise", "rings", "stripes")


def synthetic_labels(num_examples: int) -> np.ndarray:
    """The classes in turn, int32 [N]."""
    return np.arange(num_examples, dtype=np.int32) % len(CLASSES)


def synthetic(num_examples: int, size: int, seed: int) -> np.ndarray:
    """Textures in random colours, uint8 [N, size, size, 3].

    The class is the pattern, which mean colour does not tell. Every pattern looks alike under the 8 views, has
    random phase, scale and contrast, and carries noise.
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
    """One texture of +1 and -1, [size, size]."""
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
