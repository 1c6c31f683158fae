"""A data set on the host: what its examples are called and show, and how their pixels are read."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from largebatch.tasks.planes import NO_TARGETS, PixelTargets
from largebatch.util import UserError, run_ranges

SPLITS = ("train", "val", "test")
UNKNOWN = -1  # the label of an example whose class or dense targets are not known

# Decodes the examples of these indices, in their order; several threads call it at once.
Decode = Callable[[Sequence[int]], Iterable[np.ndarray]]


@dataclass(frozen=True)
class Dataset:
    """Examples on the host, all of one shape and dtype. Their pixels may be encoded in files, cached or in memory.

    Attributes:
      description: name and place of the set, for people.
      ids: names of the examples; "Class/file" where there are files.
      labels: int32 [N]; UNKNOWN where a target is not known.
      class_names: names by label.
      fill: function (examples, out, num_threads=None) that reads the examples of these indices, int [n], into a
        contiguous array [n, H, W, C], in one thread per core by default. It raises UserError for an image that is
        damaged or unlike the first, DamagedCache where a cache does not hold what was written.
      first: function that returns an image [H, W, C], uint8 or uint16; all others have its shape and dtype.
      splits: one of SPLITS for each example where the set is published in splits; else None.
      targets: dense targets, which are the last channels of the images.
    """

    description: str
    ids: Sequence[str]
    labels: np.ndarray
    class_names: list[str]
    fill: Callable[..., None]
    first: Callable[[], np.ndarray]
    splits: list[str] | None = None
    targets: PixelTargets = NO_TARGETS

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image as it is stored, with its dense targets."""
        return self.first().shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the pixels, uint8 or uint16."""
        return self.first().dtype

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
    splits: list[str] | None = None,
    targets: PixelTargets = NO_TARGETS,
) -> Dataset:
    """Return the data set of encoded images; the first one is decoded when the shape of an image is asked for."""

    @functools.cache
    def first_image() -> np.ndarray:
        (image,) = decode([0])
        return image

    def fill(examples: np.ndarray, out: np.ndarray, num_threads: int | None = None) -> None:
        first = first_image()

        def fill_range(begin: int, end: int) -> None:
            chosen = examples[begin:end].tolist()
            for example, place, image in zip(chosen, out[begin:end], decode(chosen), strict=True):
                if image.shape != first.shape or image.dtype != first.dtype:
                    raise _unlike_first(ids[example], image, ids[0], first)
                place[...] = image

        run_ranges(fill_range, len(examples), num_threads)

    return Dataset(description, ids, np.asarray(labels, np.int32), class_names, fill, first_image, splits, targets)


def _unlike_first(name: str, image: np.ndarray, first_name: str, first: np.ndarray) -> UserError:
    """Return the error for an image that differs from the first one."""
    found, wanted = (
        "{1}x{0} pixels of {2} channels".format(*one.shape) + f" of {8 * one.dtype.itemsize} bits"
        for one in (image, first)
    )
    return UserError(
        f"dataset: {name} has {found}, {first_name} has {wanted}; allowed: the same in all images, "
        "dataset.image_size to resize, or dataset.channels 1 or 3 to convert grey and colour"
    )
