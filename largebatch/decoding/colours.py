"""Conversion of images of any number of channels, masks and depths to colours for a screen."""

import numpy as np

# Indices of red, green and blue, by the number of bands. Sentinel-2 has B04, B03 and B02 behind B01 in all 13 bands
# (level 1C) and in the 12 without B10 (level 2A); the 10 of BigEarthNet begin with B02.
BANDS = {10: (2, 1, 0), 12: (3, 2, 1), 13: (3, 2, 1)}
PERCENTILES = (2, 98)  # of a picture's values: darker ones become black, brighter ones white
BACKGROUND = np.uint8([32, 34, 40])  # the first class
# Colours of the other classes, repeated after the last.
CLASS_COLOURS = np.uint8(
    [[86, 156, 255], [255, 173, 70], [92, 200, 132], [214, 110, 190], [240, 226, 90], [150, 120, 230]]
)
# Colour map for depths and their errors, from dark to bright, evenly spaced.
SHADES = np.float32([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]])


def to_rgb8(pixels: np.ndarray, bands: tuple[int, int, int] | None = None) -> np.ndarray:
    """Convert pixels uint8 or uint16 [H, W, C] to uint8 [H, W, 3] for display.

    8-bit grey and RGB stay as they are. Others are stretched between PERCENTILES of the three bands together, so
    that the colours keep their relation: measurements rarely fill the range of their integers.

    Args:
      bands: indices of red, green and blue. By default those of BANDS, else the first three; of one or two channels
        the first, as grey.
    """
    channels = pixels.shape[-1]
    if bands is None:
        bands = BANDS.get(channels, (0, 1, 2) if channels >= 3 else (0, 0, 0))
    chosen = pixels[..., list(bands)]
    if pixels.dtype == np.uint8 and channels in (1, 3):
        return chosen
    low, high = np.percentile(chosen, PERCENTILES)
    if low == high:  # one colour: scaled by the range of its integers
        low, high = 0, np.iinfo(pixels.dtype).max
    scaled = (chosen.astype(np.float32) - low) * (255 / (high - low))
    return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)


def picture_of(image: np.ndarray) -> np.ndarray:
    """Convert an image [H, W, C] by `to_rgb8`, without the background that channels 4 to 6 may hold."""
    return to_rgb8(image[..., :3] if image.shape[-1] == 6 else image)


def class_colours(classes: np.ndarray) -> np.ndarray:
    """Convert classes [H, W] to colours uint8 [H, W, 3]."""
    others = CLASS_COLOURS[(classes - 1) % len(CLASS_COLOURS)]
    return np.where((classes == 0)[..., None], BACKGROUND, others)


def shaded(values: np.ndarray) -> np.ndarray:
    """Convert numbers [H, W], clipped to 0 to 1, to colours uint8 [H, W, 3]."""
    places = np.linspace(0, 1, len(SHADES))
    channels = [np.interp(values, places, SHADES[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).astype(np.uint8)
