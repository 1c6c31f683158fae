"""A data set on the host: what its examples are called and show, and how their pixels are read."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from largebatch.tasks.planes import NO_TARGETS, PixelTargets
from largebatch.util import UserError, run_ranges

SPLITS = ("train", "val", "test")
UNKNOWN = -1  # the label of an example whose class or dense targets are not known

# Decodes the examples of these indices, in their order; several threads call it at once.
Decode = Callable[[Sequence[int]], Iterable[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Examples on the host, all of one shape and dtype. Their pixels may be encoded in files, cached or in memory.

    Attributes:
      description: name and place of the set, for people.
      ids: names of the examples; "Class/file" where there are files.
      labels: int32 [N]; UNKNOWN where a target is not known.
      class_names: names by label.
      fill: function (examples, out, num_threads=None) that reads the examples of these indices, int [n], into a
        contiguous array [n, H, W, C], in one thread per core by default. It raises UserError for an image that is
        damaged or of another shape or dtype than `out`, DamagedCache where a cache does not hold what was written.
      read_one: function that returns an image [H, W, C], uint8 or uint16, by its index, to tell the shape of all.
      splits: one of SPLITS for each example where the set is published in splits; else None.
      targets: dense targets, which are the last channels of the images.
    """

    description: str
    ids: Sequence[str]
    labels: np.ndarray
    class_names: list[str]
    fill: Callable[..., None]
    read_one: Callable[[int], np.ndarray]
    splits: list[str] | None = None
    targets: PixelTargets = NO_TARGETS

    @functools.cached_property
    def _first(self) -> np.ndarray:
        return self.read_one(0)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image as it is stored, with its dense targets."""
        return self._first.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the pixels, uint8 or uint16."""
        return self._first.dtype

    def images(self, examples: np.ndarray) -> np.ndarray:
        """Read examples, on all cores: [n, H, W, C]."""
        out = np.empty((len(examples), *self.image_shape), self.dtype)
        self.fill(examples, out)
        return out

    def take(self, examples: np.ndarray | slice) -> "Dataset":
        """Return the data set of some examples, whose first one tells the shape of an image."""
        indices = np.arange(len(self.ids))[examples]

        def fill(chosen: np.ndarray, out: np.ndarray, num_threads: int | None = None) -> None:
            self.fill(indices[chosen], out, num_threads)

        return dataclasses.replace(
            self,
            ids=np.asarray(self.ids)[examples],
            labels=self.labels[examples],
            fill=fill,
            read_one=lambda example: self.read_one(indices[example]),
            splits=None,
        )


def dataset_of_arrays(
    images: np.ndarray, labels: np.ndarray, class_names: list[str], ids: Sequence[str], description: str = "images"
) -> Dataset:
    """Return the data set of images [N, H, W, C] in memory."""

    def fill(examples: np.ndarray, out: np.ndarray, num_threads: int | None = None) -> None:
        np.take(images, examples, axis=0, out=out, mode="clip")  # any other mode takes a copy

    return Dataset(description, ids, labels, class_names, fill, images.__getitem__)


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
    """Return the data set of encoded images."""
    first_id = None  # name of the image that told the shape of all

    def fill(examples: np.ndarray, out: np.ndarray, num_threads: int | None = None) -> None:
        def fill_range(begin: int, end: int) -> None:
            chosen = examples[begin:end].tolist()
            for example, place, image in zip(chosen, out[begin:end], decode(chosen), strict=True):
                if image.shape != place.shape or image.dtype != place.dtype:
                    found, wanted = (
                        "{1}x{0} pixels of {2} channels".format(*one.shape) + f" of {8 * one.dtype.itemsize} bits"
                        for one in (image, place)
                    )
                    raise UserError(
                        f"dataset: {ids[example]} has {found}, {first_id} has {wanted}; allowed: the same in all "
                        "images, dataset.image_size to resize, or dataset.channels 1 or 3 to convert grey and "
                        "colour"
                    )
                place[...] = image

        run_ranges(fill_range, len(examples), num_threads)

    def read_one(example: int) -> np.ndarray:
        nonlocal first_id
        first_id = first_id or ids[example]
        (image,) = decode([int(example)])
        return image

    labels = np.asarray(labels, np.int32)
    return Dataset(description, ids, labels, class_names, fill, read_one, splits, targets)
