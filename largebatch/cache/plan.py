"""Plan of a cache's content and files, made before an image is decoded."""

import dataclasses
import functools
import hashlib

import numpy as np
from etils import epath

from largebatch.cache.cache import Cache, RowLayout, images_file
from largebatch.sources.source import Source
from largebatch.sources.split import SPLITS
from largebatch.tasks.planes import NO_TARGETS, PixelTargets
from largebatch.util import UserError, printable

SHOWN_CLASSES = 10  # in the lines before the first step


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """Properties of a data set that are known before its images are read.

    Attributes:
      layout: layout of the images of all hosts, as they are stored.
      mean, std: mean and standard deviation of the training images, by channel.
      targets: dense targets, which the last stored channels hold.
    """

    layout: RowLayout
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    targets: PixelTargets = NO_TARGETS

    @classmethod
    def of(cls, cache: Cache) -> "DatasetInfo":
        """Take the properties from a cache."""
        channels = cache.image_shape[-1] - cache.targets.planes
        mean, std = (tuple(cache.manifest[name][:channels]) for name in ("mean", "std"))
        # The cache of a host may hold a part of the training images; its manifest counts them all.
        layout = dataclasses.replace(cache.layout, counts=cache.manifest["counts"])
        return cls(layout, len(cache.class_names), mean, std, cache.targets)

    @classmethod
    def unread(cls, layout: RowLayout, num_classes: int, targets: PixelTargets = NO_TARGETS) -> "DatasetInfo":
        """Create the properties of images whose pixels are not read, with middle values as mean and std."""
        channels, middle = layout.image_shape[-1] - targets.planes, np.iinfo(layout.dtype).max / 2
        return cls(layout, num_classes, (middle,) * channels, (middle / 2,) * channels, targets)

    @property
    def num_images(self) -> int:
        """Number of training images of all hosts, before they are expanded to augmented views."""
        return self.layout.counts["train"]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels that the network sees."""
        height, width, channels = self.layout.image_shape
        return height, width, channels - self.targets.planes


# A cache has up to MOST_FILES images files of at least MIN_FILE_BYTES: a killed build repeats one of them.
MOST_FILES, MIN_FILE_BYTES = 128, 2**24
PIXEL_TYPES = (np.dtype(np.uint8), np.dtype(np.uint16))
PARTS = "parts"  # folder of the part records
FIRST_ROWS = 2048  # training rows that every host has, for code that samples a few images


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """Content and folder of a cache that is to be built."""

    folder: epath.Path  # of the finished cache
    source: Source
    splits: dict[str, np.ndarray]  # indices into the source's examples, by split
    own_rows: np.ndarray | None = None  # training rows of this host's devices, ascending; None: all rows

    @functools.cached_property
    def layout(self) -> RowLayout:
        """Layout of the rows, as of `plan_layout`; cached, for opening a zip of many files takes seconds."""
        return _find_layout(self)

    def part(self, own_rows: np.ndarray) -> "CachePlan":
        """Return the plan of a host's part, beside the whole cache, with these training rows and the first ones."""
        key = hashlib.sha256(f"{self.folder.name} ".encode() + own_rows.astype("<i8").tobytes()).hexdigest()[:16]
        name, _, _ = self.folder.name.rpartition("-")
        return dataclasses.replace(self, folder=self.folder.parent / f"{name}-{key}", own_rows=own_rows)

    @functools.cached_property
    def stored_rows(self) -> dict[str, np.ndarray]:
        """Rows of each split that are in the images files, ascending."""
        rows = {split: np.arange(len(examples)) for split, examples in self.splits.items()}
        if self.own_rows is not None:
            rows["train"] = np.union1d(self.own_rows, rows["train"][:FIRST_ROWS])
        return rows

    @functools.cached_property
    def stored_examples(self) -> dict[str, np.ndarray]:
        """Indices into the source's examples of the stored rows of each split."""
        return {split: self.splits[split][rows] for split, rows in self.stored_rows.items()}

    @property
    def build_folder(self) -> epath.Path:
        """Folder of the cache while it is not whole."""
        return self.folder.parent / f".{self.folder.name}.build"

    def is_written(self, task: "FileTask") -> bool:
        """Return True if an images file is whole, as this host sees it."""
        build = self.build_folder
        return (build / task.images).exists() and (build / task.record).exists()


@dataclasses.dataclass(frozen=True)
class FileTask:
    """Images file that is to be written."""

    split: str
    number: int

    @property
    def images(self) -> str:
        """Name of the images file in the build folder."""
        return images_file(self.split, self.number)

    @property
    def record(self) -> str:
        """Name of the part record in the build folder."""
        return f"{PARTS}/{self.split}-{self.number:05d}.npz"


def plan_layout(plan: CachePlan) -> RowLayout:
    """Return the layout of the rows; decode the first training image, which all others must be like.

    Raises:
      UserError: the image is damaged, or has pixels of a type that cannot be stored.
    """
    return plan.layout


def _find_layout(plan: CachePlan) -> RowLayout:
    first = plan.splits["train"][0]
    with plan.source.open() as read:
        (pixels,) = read([first])
    if pixels.dtype not in PIXEL_TYPES:
        raise UserError(f"dataset: {plan.source.ids[first]} has {pixels.dtype} pixels; allowed: uint8 | uint16")
    counts = {split: len(plan.stored_rows[split]) for split in SPLITS}
    return make_layout(counts, pixels.shape, pixels.dtype)


def make_layout(counts: dict[str, int], image_shape: tuple[int, int, int], dtype: np.dtype) -> RowLayout:
    """Return the layout for the given number of rows of each split."""
    row_bytes = int(np.prod(image_shape)) * dtype.itemsize
    rows_per_file = max(-(-MIN_FILE_BYTES // row_bytes), -(-sum(counts.values()) // MOST_FILES))
    return RowLayout(counts, rows_per_file, tuple(image_shape), dtype)


def all_tasks(layout: RowLayout) -> list[FileTask]:
    """Return a task for every images file of a cache."""
    return [FileTask(split, number) for split in SPLITS for number in range(layout.num_files(split))]


def describe_targets(cache: Cache) -> str:
    """Describe the targets in one line: the first classes with their numbers of images, or the dense targets."""
    targets = cache.targets
    texts = list(map(printable, targets.classes or cache.class_names))
    if not targets.planes:
        texts = [f"{text} {count:,}" for text, count in zip(texts, cache.class_counts, strict=True)]
    more = f" and {len(texts) - SHOWN_CLASSES} more" if len(texts) > SHOWN_CLASSES else ""
    classes = f"{len(texts)} classes: {', '.join(texts[:SHOWN_CLASSES])}{more}"
    if not targets.planes:
        return f"training images of {classes}"
    masks = [f"masks of {classes}"] if targets.classes else []
    return " and ".join(["depths"] * targets.has_depth + masks)
