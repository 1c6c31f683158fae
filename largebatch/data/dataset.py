"""A data set on the host: what its examples are called and show, and how their pixels are read."""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from largebatch.tasks.planes import NO_TARGETS, PixelTargets
from largebatch.util import UserError, run_ranges

SPLITS = ("train", "val", "test")
UNKNOWN = -1  # the label of an example whose class or dense targets are not known
PIXEL_TYPES = (np.dtype(np.uint8), np.dtype(np.uint16))

# Decodes the examples of these indices; several threads call it at once. The second argument is None, or an array
# [n, H, W, C] that saves allocations: pixels that fit may be put there, and the results are then views of it.
Decode = Callable[[Sequence[int], np.ndarray | None], list[np.ndarray]]


class Fill(Protocol):
    """Function that reads the pixels of examples."""

    def __call__(self, examples: np.ndarray, out: np.ndarray, num_threads: int | None = None) -> None:
        """Read examples into an array.

        Args:
          examples: int [n], indices into the data set.
          out: contiguous [n, H, W, C] of the data set's dtype.
          num_threads: threads that read; None takes one per core.
        Raises:
          UserError: an image is damaged or unlike the first.
          DamagedCache: what is read from a cache is not what was written.
        """


@dataclass(frozen=True)
class Dataset:
    """Examples on the host, all of one shape and dtype. Their pixels may be encoded in files, cached or in memory.

    Attributes:
      description: name and place of the set, for people.
      ids: names of the examples; "Class/file" where there are files.
      labels: int32 [N]; UNKNOWN where a target is not known.
      class_names: names by label.
      fill: function that reads pixels.
      first: function that returns an image [H, W, C], uint8 or uint16, which all others are like.
      splits: one of SPLITS for each example where the set is published in splits; else None.
      targets: dense targets, which are the last channels of the images.
      decode: function that decodes the images where they are in files; else None.
    """

    description: str
    ids: Sequence[str]
    labels: np.ndarray
    class_names: list[str]
    fill: Fill
    first: Callable[[], np.ndarray]
    splits: list[str] | None = None
    targets: PixelTargets = NO_TARGETS
    decode: Decode | None = None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image as it is stored, with its dense targets."""
        return self.first().shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the pixels, uint8 or uint16."""
        return self.first().dtype

    def like(self, example: int) -> "Dataset":
        """Return the same data set, whose images must be like this one; only those in files may differ."""
        if self.decode is None:
            return self
        return dataset_of_files(
            self.description,
            self.ids,
            self.labels,
            self.class_names,
            self.decode,
            first=example,
            splits=self.splits,
            targets=self.targets,
        )

    def images(self, examples: np.ndarray) -> np.ndarray:
        """Read examples, on all cores: [n, H, W, C]."""
        out = np.empty((len(examples), *self.image_shape), self.dtype)
        self.fill(examples, out)
        return out


def dataset_of_arrays(
    images: np.ndarray, labels: np.ndarray, class_names: list[str], ids: Sequence[str], description: str = "images"
) -> Dataset:
    """Return the data set of images [N, H, W, C] in memory."""

    def fill(examples: np.ndarray, out: np.ndarray, num_threads: int | None = None) -> None:
        np.take(images, examples, axis=0, out=out, mode="clip")  # any other mode takes a copy

    blank = np.empty(images.shape[1:], images.dtype)
    return Dataset(description, ids, labels, class_names, fill, lambda: blank)


def dataset_of_files(
    description: str,
    ids: Sequence[str],
    labels: np.ndarray,
    class_names: list[str],
    decode: Decode,
    *,
    first: int = 0,
    splits: list[str] | None = None,
    targets: PixelTargets = NO_TARGETS,
) -> Dataset:
    """Return the data set of encoded images.

    Args:
      first: the example that all others must be like; decoded when the shape of an image is asked for.
    """

    @functools.cache
    def first_image() -> np.ndarray:
        (image,) = decode([first], None)
        if image.dtype not in PIXEL_TYPES:
            raise UserError(f"dataset: {ids[first]} has {image.dtype} pixels; allowed: uint8 | uint16")
        return image

    def fill(examples: np.ndarray, out: np.ndarray, num_threads: int | None = None) -> None:
        pattern = first_image()

        def fill_range(begin: int, end: int) -> None:
            chosen = examples[begin:end].tolist()
            images = decode(chosen, out[begin:end])
            for example, place, image in zip(chosen, out[begin:end], images, strict=True):
                if image.shape != pattern.shape or image.dtype != pattern.dtype:
                    raise _unlike_first(ids[example], image, ids[first], pattern)
                place[...] = image  # which may be there already

        run_ranges(fill_range, len(examples), num_threads or os.cpu_count() or 1)

    labels = np.asarray(labels, np.int32)
    return Dataset(description, ids, labels, class_names, fill, first_image, splits, targets, decode)


def _unlike_first(name: str, image: np.ndarray, first_name: str, first: np.ndarray) -> UserError:
    """Return the error for an image that differs from the first one."""
    (height, width, channels), (first_height, first_width, first_channels) = image.shape, first.shape
    if image.dtype != first.dtype:
        return UserError(
            f"dataset: {name} has {8 * image.dtype.itemsize} bits a channel, {first_name} has "
            f"{8 * first.dtype.itemsize}; allowed: the same in all images"
        )
    if channels != first_channels:
        return UserError(
            f"dataset.channels: {name} has {channels} channels, {first_name} has {first_channels}; allowed: the "
            "same in all images, or dataset.channels 1 or 3 to convert grey and colour"
        )
    return UserError(
        f"dataset.image_size: {name} is {width}x{height} pixels, {first_name} is {first_width}x{first_height}; "
        "set a size to resize to"
    )
