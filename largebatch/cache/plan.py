"""What is to be built: a cache's folder, its rows and its files."""

import dataclasses
import functools
import hashlib

import numpy as np
from etils import epath

from largebatch.cache.cache import RowLayout, images_file
from largebatch.errors import UserError
from largebatch.sources.source import Source
from largebatch.sources.split import SPLITS

# A cache has up to MOST_FILES of images, of at least MIN_FILE_BYTES: a build that is killed does one of them again.
MOST_FILES, MIN_FILE_BYTES = 128, 2**24
PIXEL_TYPES = (np.dtype(np.uint8), np.dtype(np.uint16))
PARTS = "parts"  # folder of the part records
FIRST_ROWS = 2048  # training rows that every host has: what looks at some images takes the first ones


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """What is to be built, and where."""

    folder: epath.Path  # the finished cache's
    source: Source
    splits: dict[str, np.ndarray]  # indices into the source's examples, by split
    own_rows: np.ndarray | None = None  # training rows of this host's devices, ascending; None: the cache has all

    @functools.cached_property
    def layout(self) -> RowLayout:
        """See `plan_layout`; found once, for opening a zip of many files takes seconds."""
        return _find_layout(self)

    def part(self, own_rows: np.ndarray) -> "CachePlan":
        """The plan of a host's part, beside the whole cache: it has these training rows, and the first ones."""
        key = hashlib.sha256(f"{self.folder.name} ".encode() + own_rows.astype("<i8").tobytes()).hexdigest()[:16]
        name, _, _ = self.folder.name.rpartition("-")
        return dataclasses.replace(self, folder=self.folder.parent / f"{name}-{key}", own_rows=own_rows)

    @functools.cached_property
    def stored_rows(self) -> dict[str, np.ndarray]:
        """The rows of each split that are in the images files, ascending."""
        rows = {split: np.arange(len(examples)) for split, examples in self.splits.items()}
        if self.own_rows is not None:
            rows["train"] = np.union1d(self.own_rows, rows["train"][:FIRST_ROWS])
        return rows

    @functools.cached_property
    def stored_examples(self) -> dict[str, np.ndarray]:
        """The same as indices into the source's examples."""
        return {split: self.splits[split][rows] for split, rows in self.stored_rows.items()}

    @property
    def build_folder(self) -> epath.Path:
        """Where the cache is while it is not whole."""
        return self.folder.parent / f".{self.folder.name}.build"

    def is_written(self, task: "FileTask") -> bool:
        """Whether an images file is whole, as this host sees it."""
        build = self.build_folder
        return (build / task.images).exists() and (build / task.record).exists()


@dataclasses.dataclass(frozen=True)
class FileTask:
    """An images file that is to be written."""

    split: str
    number: int

    @property
    def images(self) -> str:
        """Its name in the build folder."""
        return images_file(self.split, self.number)

    @property
    def record(self) -> str:
        """The name of its part record in the build folder."""
        return f"{PARTS}/{self.split}-{self.number:05d}.npz"


def plan_layout(plan: CachePlan) -> RowLayout:
    """The layout of the rows; decodes the first training image, which all others must be like.

    Raises:
      UserError: the image is damaged, or of pixels that cannot be stored.
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
    """The layout for so many rows of a split."""
    row_bytes = int(np.prod(image_shape)) * dtype.itemsize
    rows_per_file = max(-(-MIN_FILE_BYTES // row_bytes), -(-sum(counts.values()) // MOST_FILES))
    return RowLayout(counts, rows_per_file, tuple(image_shape), dtype)


def all_tasks(layout: RowLayout) -> list[FileTask]:
    """Every images file of a cache."""
    return [FileTask(split, number) for split in SPLITS for number in range(layout.num_files(split))]
