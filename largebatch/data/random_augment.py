"""Random changes of training images on the device: crop, shift, brightness, contrast, cutout.

Each change is a pure function of the visit's key. So an image is changed alike on any number of devices and in a
resumed run, and differently in every epoch.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from largebatch.config.fields import AugmentConfig
from largebatch.data.batching import shuffle_key
from largebatch.util import BadSetting

# Salts of a visit's key, by the value that is drawn. Draws of equal salt would be dependent.
SHIFT_ROWS, SHIFT_COLUMNS = 0, 1
CROP_AREA, CROP_RATIO, CROP_TOP, CROP_LEFT = 2, 3, 4, 5
BRIGHTNESS, CONTRAST = 6, 7
CUTOUT_ROW, CUTOUT_COLUMN = 8, 9

MOST_LOG_RATIO = math.log(4 / 3)  # largest logarithm of a crop's width over its height


@dataclasses.dataclass(frozen=True)
class RandomAugment:
    """Random changes of images and their strength, as fields of a config's `augment`; none by default."""

    crop_scale: float = 1.0  # smallest share of the area that a crop keeps
    shift: int = 0  # pixels
    brightness: float = 0.0
    contrast: float = 0.0
    cutout: int = 0  # pixels
    fill: tuple[float, ...] = ()  # value of cut-out pixels, by channel: the mean of the training images

    @classmethod
    def from_config(cls, fields: AugmentConfig, mean: tuple[float, ...]) -> "RandomAugment":
        """Take the changes from a config's `augment`; `mean` is that of the training images, by channel."""
        changes = ("crop_scale", "shift", "brightness", "contrast", "cutout")
        return cls(**{name: getattr(fields, name) for name in changes}, fill=mean)

    @property
    def is_on(self) -> bool:
        """True where any image may be changed."""
        return self != RandomAugment(fill=self.fill)

    def check(self, image_shape: tuple[int, int, int]) -> None:
        """Raise BadSetting where an image is too small for a change."""
        smallest = min(image_shape[:2])
        if self.shift >= smallest:  # more than a reflected edge fills
            raise BadSetting(f"augment.shift: {self.shift}; allowed: below {smallest}, the size of an image")
        if self.cutout > smallest:
            raise BadSetting(f"augment.cutout: {self.cutout}; allowed: up to {smallest}, the size of an image")

    def apply(self, images: jax.Array, visit_keys: jax.Array) -> jax.Array:
        """Change images at random.

        Args:
          images: uint8 or uint16 [M, H, W, C].
          visit_keys: uint32 [M]; see `batching.MicroBatchIndices`.
        Returns:
          [M, H, W, C] on the same scale: float32 if anything but the shift is on.
        """
        largest = np.iinfo(images.dtype).max
        if self.crop_scale < 1:
            images = cropped(images, visit_keys, self.crop_scale)
        if self.shift:
            images = shifted(images, visit_keys, self.shift)
        if self.brightness:
            images = brightened(images, visit_keys, self.brightness, largest)
        if self.contrast:
            images = contrasted(images, visit_keys, self.contrast, largest)
        if self.cutout:
            images = cut_out(images, visit_keys, self.cutout, self.fill)
        return images

    def move(self, planes: jax.Array, visit_keys: jax.Array) -> jax.Array:
        """Move the dense targets of pixels as `apply` moves the pixels of the image; keep their dtype.

        A crop copies the nearest pixel, because classes cannot be averaged.
        """
        if self.crop_scale < 1:
            planes = cropped(planes, visit_keys, self.crop_scale, nearest=True).astype(planes.dtype)
        if self.shift:
            planes = shifted(planes, visit_keys, self.shift)
        return planes


def uniform(visit_keys: jax.Array, salt: int) -> jax.Array:
    """Draw a float32 in [0, 1) for each key: the upper 24 bits, which a float32 holds exactly."""
    return (shuffle_key(visit_keys, salt) >> 8).astype(jnp.float32) * np.float32(2**-24)


# ---- crop -------------------------------------------------------------------------------------------


class Crops(NamedTuple):
    """Parts of images, in pixels; float32 [M]."""

    top: jax.Array
    left: jax.Array
    height: jax.Array
    width: jax.Array


def draw_crops(visit_keys: jax.Array, height: int, width: int, smallest_share: float) -> Crops:
    """Draw crops within images of this size (Szegedy et al. 2015, section 6; torchvision's RandomResizedCrop).

    The share of the area is uniform in [smallest_share, 1], the logarithm of width / height uniform between those
    of 3/4 and 4/3, the place uniform. Where such a crop would leave the image, width / height becomes the nearest
    that fits. (torchvision draws all again, so it has fewer of the large crops.)
    """
    share = smallest_share + (1 - smallest_share) * uniform(visit_keys, CROP_AREA)
    ratio = jnp.exp(MOST_LOG_RATIO * (2 * uniform(visit_keys, CROP_RATIO) - 1))
    ratio = jnp.clip(ratio, share * (width / height), (width / height) / share)
    area = share * (height * width)
    crop_height = jnp.minimum(jnp.sqrt(area / ratio), height)  # above it by rounding alone
    crop_width = jnp.minimum(jnp.sqrt(area * ratio), width)
    top = uniform(visit_keys, CROP_TOP) * (height - crop_height)
    left = uniform(visit_keys, CROP_LEFT) * (width - crop_width)
    return Crops(top, left, crop_height, crop_width)


def cropped(images: jax.Array, visit_keys: jax.Array, smallest_share: float, *, nearest: bool = False) -> jax.Array:
    """Crop a random part of each image [M, H, W, C] and resize it to H x W, bilinearly or by the nearest pixel.

    Returns float32, by two small matrix products per image, since gathers are slow on a TPU.
    """
    height, width = images.shape[1:3]
    crops = draw_crops(visit_keys, height, width, smallest_share)
    by_row = interpolation(crops.top, crops.height, height, nearest=nearest)
    by_column = interpolation(crops.left, crops.width, width, nearest=nearest)
    # A TPU would round to bfloat16 otherwise.
    precision = jax.lax.Precision.HIGHEST
    images = jnp.einsum("mih,mhwc->miwc", by_row, images.astype(jnp.float32), precision=precision)
    return jnp.einsum("mjw,miwc->mijc", by_column, images, precision=precision)


def interpolation(start: jax.Array, length: jax.Array, size: int, *, nearest: bool = False) -> jax.Array:
    """Return the weights by which [start, start + length) of `size` pixels is stretched to `size` pixels.

    They are bilinear, or with `nearest` those of the nearest pixel, of two at the same distance the latter. A
    pixel's value is that of its centre; beyond the outermost centres an edge pixel goes on.

    Args:
      start, length: float32 [M].
    Returns:
      float32 [M, size, size]: for every pixel after, the weight of every pixel before.
    """
    pixels = jnp.arange(size, dtype=jnp.float32)
    places = start[:, None] + (pixels + 0.5) * (length[:, None] / size) - 0.5
    places = jnp.clip(places, 0, size - 1)
    if nearest:
        places = jnp.floor(places + 0.5)
    return jnp.maximum(0, 1 - jnp.abs(places[:, :, None] - pixels))


# ---- shift, brightness, contrast, cutout --------------------------------------------------------------


def shifted(images: jax.Array, visit_keys: jax.Array, limit: int) -> jax.Array:
    """Move images [M, H, W, C], each by up to `limit` pixels each way, with their edges reflected.

    All moves are equally likely.
    """
    padded = jnp.pad(images, ((0, 0), (limit, limit), (limit, limit), (0, 0)), mode="reflect")
    rows, columns = (shuffle_key(visit_keys, salt) % (2 * limit + 1) for salt in (SHIFT_ROWS, SHIFT_COLUMNS))

    def cut(image, row, column):
        return jax.lax.dynamic_slice(image, (row, column, 0), images.shape[1:])

    return jax.vmap(cut)(padded, rows.astype(jnp.int32), columns.astype(jnp.int32))


def brightened(images: jax.Array, visit_keys: jax.Array, most: float, largest: int) -> jax.Array:
    """Multiply images by a factor that is uniform in [1 - most, 1 + most], clipped to [0, largest]; float32."""
    factors = _factors(visit_keys, BRIGHTNESS, most)
    return jnp.clip(images.astype(jnp.float32) * factors, 0, largest)


def contrasted(images: jax.Array, visit_keys: jax.Array, most: float, largest: int) -> jax.Array:
    """Multiply distances from the mean of an image's channel by such a factor as in `brightened`; float32."""
    factors = _factors(visit_keys, CONTRAST, most)
    images = images.astype(jnp.float32)
    mean = images.mean(axis=(1, 2), keepdims=True)
    return jnp.clip(mean + (images - mean) * factors, 0, largest)


def _factors(visit_keys: jax.Array, salt: int, most: float) -> jax.Array:
    """Draw factors float32 [M, 1, 1, 1], uniform in [1 - most, 1 + most]."""
    return (1 + most * (2 * uniform(visit_keys, salt) - 1))[:, None, None, None]


def cut_out(images: jax.Array, visit_keys: jax.Array, side: int, fill: tuple[float, ...]) -> jax.Array:
    """Set a square of `side` pixels of each image to `fill`, which is by channel; float32.

    The square lies around a pixel drawn uniformly, and ends at the image's border (DeVries and Taylor 2017,
    "Improved Regularization of Convolutional Neural Networks with Cutout").
    """

    def is_cut(salt, size):
        first = (shuffle_key(visit_keys, salt) % size).astype(jnp.int32)[:, None] - side // 2
        pixels = jnp.arange(size)
        return (first <= pixels) & (pixels < first + side)

    rows, columns = is_cut(CUTOUT_ROW, images.shape[1]), is_cut(CUTOUT_COLUMN, images.shape[2])
    in_square = (rows[:, :, None] & columns[:, None, :])[..., None]
    return jnp.where(in_square, jnp.float32(fill), images.astype(jnp.float32))
