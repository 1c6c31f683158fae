"""Images of any number of channels as colours that a screen shows."""

import numpy as np

# Red, green and blue among the bands, by how many there are. Sentinel-2 has B04, B03 and B02 behind B01 in all 13
# bands (level 1C) and in the 12 without B10 (level 2A); the 10 of BigEarthNet begin with B02.
BANDS = {10: (2, 1, 0), 12: (3, 2, 1), 13: (3, 2, 1)}
PERCENTILES = (2, 98)  # of a picture's values: what is darker becomes black, what is brighter white


def to_rgb8(pixels: np.ndarray, bands: tuple[int, int, int] | None = None) -> np.ndarray:
    """Pixels uint8 or uint16 [H, W, C] as uint8 [H, W, 3], for someone to look at.

    8-bit grey and RGB stay as they are. Others are stretched between PERCENTILES of the three bands together, so
    that the colours keep their relation: measurements rarely fill the range of their integers.

    Args:
      bands: which are red, green and blue. By default those of BANDS, else the first three; of one or two channels
        the first, as grey.
    """
    channels = pixels.shape[-1]
    if bands is None:
        bands = BANDS.get(channels, (0, 1, 2) if channels >= 3 else (0, 0, 0))
    chosen = pixels[..., list(bands)]
    if pixels.dtype == np.uint8 and channels in (1, 3):
        return chosen
    low, high = np.percentile(chosen, PERCENTILES)
    if low == high:  # of one colour: where it is in the range of its integers
        low, high = 0, np.iinfo(pixels.dtype).max
    scaled = (chosen.astype(np.float32) - low) * (255 / (high - low))
    return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)
