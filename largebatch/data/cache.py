"""Decoded data set on disk: images, arrays and a manifest, verified when they are read.

    FOLDER/manifest.json          description, counts, class names, statistics, a SHA-256 of each .npy file
    FOLDER/images-00000.raw, ...  uint8 or uint16 [rows, H, W, C] without a header, the images
    FOLDER/crc32.npy              uint32, CRC-32 of each image's bytes
    FOLDER/labels.npy             int32, one per image
    FOLDER/ids.npy                text

Rows are the training images, the validation images and the test images, each in the order of their split, with
`rows_per_file` in every file but the last. Augmented views are made where they are needed. A cache appears
under its own name when it is whole; see `cache_build.py`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import math
import os
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from largebatch import util
from largebatch.data.dataset import SPLITS, Dataset
from largebatch.tasks.planes import NO_TARGETS, PixelTargets
from largebatch.util import UserError, expanded, printable, run_ranges

log = logging.getLogger("largebatch")

CACHE_VERSION = 3
MANIFEST = "manifest.json"
ARRAYS = ("ids", "labels", "crc32")
ROWS_AT_ONCE = 1024  # rows that `Cache.verify` reads at once
SHOWN_CLASSES = 10  # in the lines before the first step
# A cache has up to MOST_FILES images files of at least MIN_FILE_BYTES: a killed build repeats one of them.
MOST_FILES, MIN_FILE_BYTES = 128, 2**24


class DamagedCache(Exception):
    """Raised when a cache does not hold what was written; the message names the file."""


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Layout of the rows in images files, and the shape and dtype of a row."""

    counts: dict[str, int]  # rows of each split
    rows_per_file: int
    image_shape: tuple[int, int, int]  # height, width and channels, including those of dense targets
    dtype: np.dtype  # uint8 or uint16

    @classmethod
    def of(cls, counts: dict[str, int], image_shape: tuple[int, int, int], dtype: np.dtype) -> "RowLayout":
        """Choose the layout for a number of rows of each split."""
        row_bytes = math.prod(image_shape) * dtype.itemsize
        rows_per_file = max(-(-MIN_FILE_BYTES // row_bytes), -(-sum(counts.values()) // MOST_FILES))
        return cls(counts, rows_per_file, tuple(image_shape), dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one image."""
        return math.prod(self.image_shape) * self.dtype.itemsize

    @property
    def num_rows(self) -> int:
        """Rows of all splits."""
        return sum(self.counts.values())

    @property
    def num_files(self) -> int:
        """Number of images files."""
        return -(-self.num_rows // self.rows_per_file)

    def rows_of_split(self, split: str) -> slice:
        """Return the rows of a split among all rows."""
        first = sum(self.counts[before] for before in SPLITS[: SPLITS.index(split)])
        return slice(first, first + self.counts[split])

    def rows_of_file(self, number: int) -> range:
        """Return the rows that lie in images file `number`."""
        first = number * self.rows_per_file
        return range(first, min(first + self.rows_per_file, self.num_rows))


def images_file(number: int) -> str:
    """Return the name of an images file."""
    return f"images-{number:05d}.raw"


class Cache:
    """Cache folder whose manifest was checked.

    Attributes:
      folder: path of the cache.
      manifest: fields of manifest.json.
      layout: layout of the images files.
      targets: dense targets, which are the last channels of the images.
    """

    def __init__(self, folder: Path, manifest: dict):
        self.folder, self.manifest = folder, manifest
        shape, dtype = tuple(manifest["image_shape"]), np.dtype(manifest["image_dtype"])
        self.layout = RowLayout(manifest["counts"], manifest["rows_per_file"], shape, dtype)
        self.targets = PixelTargets.recorded_in(manifest)
        self.array, self._file = functools.cache(self._read_array), functools.cache(self._open_file)

    def split(self, split: str) -> Dataset:
        """Return the data set of a split, whose images are read and verified when they are asked for.

        Raises:
          DamagedCache: ids, labels or CRCs differ from what was written.
        """
        blank = np.empty(self.layout.image_shape, self.layout.dtype)
        dataset = Dataset(
            description=f"{split} split of {self.manifest['source']}",
            ids=self.array("ids"),
            labels=self.array("labels"),
            class_names=self.manifest["class_names"],
            fill=self.fill,
            read_one=lambda _: blank,
            targets=self.targets,
        )
        return dataset.take(self.layout.rows_of_split(split))

    def identity(self) -> dict:
        """Return what a network trained on this cache needs elsewhere, and digests that tell data sets apart."""
        kept = {name: self.manifest[name] for name in ("class_names", "image_shape", "image_dtype", "mean", "std")}
        sha256 = self.manifest["sha256"]
        digests = {"ids": sha256["ids"], "labels": sha256["labels"], "pixels": sha256["crc32"]}
        return kept | self.targets.record() | digests

    def verify(self) -> "Cache":
        """Verify all images, and return the cache; raise DamagedCache if one differs."""
        rows = np.arange(self.layout.num_rows)
        for some in util.iterate_batches(len(rows), ROWS_AT_ONCE):
            self.fill(rows[some], np.empty((len(rows[some]), *self.layout.image_shape), self.layout.dtype))
        return self

    def _read_array(self, name: str) -> np.ndarray:
        """Read ids, labels or CRCs, verified whole."""
        path = self.folder / f"{name}.npy"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DamagedCache(f"{path} cannot be read ({error.strerror or error})") from error
        if hashlib.sha256(content).hexdigest() != self.manifest["sha256"][name]:
            raise DamagedCache(f"{path} does not match its SHA-256")
        return np.load(io.BytesIO(content))

    def fill(self, rows: np.ndarray, out: np.ndarray, num_threads: int | None = None) -> None:
        """Read and verify rows of all splits, and only these; see `Dataset.fill`."""
        row_bytes = self.layout.row_bytes
        content = memoryview(out).cast("B") if len(rows) else None  # a view of bytes costs less than one of NumPy
        crcs = self.array("crc32")[rows].tolist()
        in_order = np.argsort(rows, kind="stable").tolist()  # a disk is read in one direction
        rows = rows.tolist()

        def read_range(begin: int, end: int) -> None:
            for position in in_order[begin:end]:
                row = content[position * row_bytes : (position + 1) * row_bytes]
                self._read_row(rows[position], crcs[position], row)

        run_ranges(read_range, len(rows), num_threads)

    def _read_row(self, row: int, crc: int, out: memoryview) -> None:
        """Read and verify a row; several threads may.

        It is read by system calls, not mapped: a file that is cut short while it is mapped kills the process.
        """
        number, row_of_file = divmod(row, self.layout.rows_per_file)
        try:
            length = os.preadv(self._file(number), [out], row_of_file * len(out))
        except OSError as error:
            raise DamagedCache(f"{self.folder / images_file(number)} cannot be read ({error.strerror})") from error
        if length != len(out):
            raise DamagedCache(f"{self.folder / images_file(number)} ends within its row {row_of_file}")
        if zlib.crc32(out) != crc:
            raise DamagedCache(
                f"{self.folder / images_file(number)}: its row {row_of_file} does not match its CRC-32"
            )

    def _open_file(self, number: int) -> int:
        """Return the descriptor of an images file, which is closed with this object."""
        file = (self.folder / images_file(number)).open("rb")
        weakref.finalize(self, file.close)
        return file.fileno()


# ---- manifests ----------------------------------------------------------------------------------------


def seal(fields: dict) -> bytes:
    """Return the content of a manifest file, with a SHA-256 of its fields."""
    return json.dumps(fields | {"manifest_sha256": digest_of(fields)}, indent=1).encode()


def digest_of(fields: dict) -> str:
    """Return the SHA-256 of plain JSON."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict:
    """Read the manifest of a cache.

    Raises:
      DamagedCache: it is missing, was changed, or is of another version.
    """
    path = folder / MANIFEST
    try:
        fields = json.loads(path.read_bytes())
        is_sound = fields.pop("manifest_sha256") == digest_of(fields)
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise DamagedCache(f"{path} cannot be read ({error!r})") from error
    if not is_sound:
        raise DamagedCache(f"{path} does not match its SHA-256")
    if fields["cache_version"] != CACHE_VERSION:
        raise DamagedCache(f"{path} is of cache version {fields['cache_version']}, this is {CACHE_VERSION}")
    return fields


def open_cache(folder: Path) -> Cache:
    """Open a cache, and read and verify all of it but the images; raise DamagedCache."""
    cache = Cache(folder, read_manifest(folder))
    for name in ARRAYS:
        cache.array(name)
    return cache


def open_sound_cache(folder: Path) -> Cache | None:
    """Open the cache in `folder`, or return None; remove it if it is damaged or of another version.

    Damaged images are found when they are read.
    """
    if not folder.exists():
        return None
    try:
        return open_cache(folder)
    except DamagedCache as damage:
        _discard(folder, damage)
        return None


def discard_cache(cache: Cache, damage: DamagedCache) -> None:
    """Log the damage and remove a cache, so that it is built again.

    It stays if another process has meanwhile put a new build in its place.

    Raises:
      UserError: the folder cannot be removed.
    """
    with contextlib.suppress(DamagedCache):
        if read_manifest(cache.folder) != cache.manifest:
            return
    _discard(cache.folder, damage)


def _discard(folder: Path, damage: DamagedCache) -> None:
    trash = util.beside(folder)
    try:
        folder.rename(trash)  # atomically: hosts that share the file system do this at the same time
        log.warning("damaged cache: %s; building it again", damage)
        util.remove(trash)
    except FileNotFoundError:
        return  # another process was first
    except OSError as error:
        raise UserError(f"augment.cache_dir: cannot remove {folder} ({error.strerror or error})") from error


# ---- lookup -------------------------------------------------------------------------------------------


def manifests(cache_dir: Path, pattern: str) -> Iterator[tuple[Path, dict]]:
    """Yield the folders of a pattern that are caches, with their manifests; change nothing."""
    for path in sorted(cache_dir.glob(f"{pattern}/{MANIFEST}")):
        with contextlib.suppress(DamagedCache):  # whoever uses it will report it
            yield path.parent, read_manifest(path.parent)


def find_recorded(cache_dir: str, recorded: dict) -> Cache | None:
    """Return the first sound cache in a folder of the data that a run recorded, see `Cache.identity`."""
    for folder, manifest in manifests(Path(expanded(cache_dir)), "[!.]*"):
        identity = Cache(folder, manifest).identity()
        if all(recorded.get(name) == identity[name] for name in ("ids", "labels", "pixels")):
            with contextlib.suppress(DamagedCache):
                return open_cache(folder)
    return None


# ---- what is known before images are read -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """Properties of a data set that are known before its images are read.

    Attributes:
      layout: layout of the images as they are stored.
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
        channels = cache.layout.image_shape[-1] - cache.targets.planes
        mean, std = (tuple(cache.manifest[name][:channels]) for name in ("mean", "std"))
        return cls(cache.layout, len(cache.manifest["class_names"]), mean, std, cache.targets)

    @classmethod
    def unread(cls, layout: RowLayout, num_classes: int, targets: PixelTargets = NO_TARGETS) -> "DatasetInfo":
        """Create the properties of images whose pixels are not read, with middle values as mean and std."""
        channels, middle = layout.image_shape[-1] - targets.planes, np.iinfo(layout.dtype).max / 2
        return cls(layout, num_classes, (middle,) * channels, (middle / 2,) * channels, targets)

    @property
    def num_images(self) -> int:
        """Number of training images, before they are expanded to augmented views."""
        return self.layout.counts["train"]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels that the network sees."""
        height, width, channels = self.layout.image_shape
        return height, width, channels - self.targets.planes


def describe_targets(dataset: Dataset) -> str:
    """Describe the targets in one line: the first classes with their numbers of images, or the dense targets."""
    targets = dataset.targets
    texts = list(map(printable, targets.classes or dataset.class_names))
    if not targets.planes:
        counts = np.bincount(dataset.labels, minlength=len(texts))
        texts = [f"{text} {count:,}" for text, count in zip(texts, counts, strict=True)]
    more = f" and {len(texts) - SHOWN_CLASSES} more" if len(texts) > SHOWN_CLASSES else ""
    classes = f"{len(texts)} classes: {', '.join(texts[:SHOWN_CLASSES])}{more}"
    if not targets.planes:
        return f"training images of {classes}"
    masks = [f"masks of {classes}"] if targets.classes else []
    return " and ".join(["depths"] * targets.has_depth + masks)
