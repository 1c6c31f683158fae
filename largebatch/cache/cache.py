"""Decoded data set on disk, ready for the devices: .npy arrays and a manifest, every byte under a SHA-256.

    FOLDER/manifest.json                    source, counts, class names, statistics, digests; seals itself
    FOLDER/{train,val,test}_images-00000.npy, ...   uint8 or uint16 [rows, H, W, C], the images
    FOLDER/{train,val,test}_labels.npy      int32, one per image
    FOLDER/{train,val,test}_ids.npy         text
    FOLDER/{train,val,test}_digests.npy     SHA-256 of each image's bytes in the images files
    FOLDER/train_rows.npy                   int64, ascending: only in a host's part, see below

Rows are the images of a split in its order, `rows_per_file` in every file but the last. Augmented views are made
where they are needed. A *part* is the cache of hosts that share no file system with the others: its images files
and digests have the training rows of `train_rows.npy` alone, all else is as in the whole cache.

`build.py` writes a cache; it appears under its own name when it is whole.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import os
import threading
import weakref

import numpy as np
from etils import epath

from largebatch import untrusted, util
from largebatch.hosts import memory
from largebatch.sources.source import Source
from largebatch.sources.split import SPLITS
from largebatch.tasks.planes import PixelTargets
from largebatch.util import UserError, iterate_batches, run_ranges

log = logging.getLogger("largebatch")

CACHE_VERSION = 2
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 2**24
MANIFEST_FIELDS = {
    "class_names",
    "counts",
    "image_shape",
    "image_dtype",
    "rows_per_file",
    "mean",
    "std",
    "pixels",
    "source",
    "built",
    "sha256",
}
ROWS_AT_ONCE = 1024  # rows that `verify` reads at once


class DamagedCache(Exception):
    """Raised when a cache does not hold what its manifest says; the message names the file."""


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Layout of the rows of each split in images files, and the shape and type of a row."""

    counts: dict[str, int]  # rows of each split
    rows_per_file: int
    image_shape: tuple[int, int, int]  # height, width, channels; including those of `Source.targets`
    dtype: np.dtype  # uint8 or uint16

    @property
    def row_bytes(self) -> int:
        """Bytes of one image."""
        return int(np.prod(self.image_shape)) * self.dtype.itemsize

    def num_files(self, split: str) -> int:
        """Return the number of images files of a split."""
        return -(-self.counts[split] // self.rows_per_file)

    def rows_of_file(self, split: str, number: int) -> range:
        """Return the rows of a split that lie in images file `number`."""
        first = number * self.rows_per_file
        return range(first, min(first + self.rows_per_file, self.counts[split]))

    def header(self, split: str, number: int) -> bytes:
        """Return the NumPy header of images file `number`."""
        shape = (len(self.rows_of_file(split, number)), *self.image_shape)
        buffer = io.BytesIO()
        fields = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(buffer, fields)
        return buffer.getvalue()


def images_file(split: str, number: int) -> str:
    """Return the name of an images file."""
    return f"{split}_images-{number:05d}.npy"


class Cache:
    """Cache folder whose manifest was checked.

    Attributes:
      folder: path of the cache.
      manifest: source, counts, class names, mean, std, digests of the arrays.
      manifest_bytes: the file as it was read, which tells this build of the cache from every other.
      is_part: True if some training images are missing, which are on other hosts.
      layout: layout of the rows that are on this host.
    """

    def __init__(self, folder: epath.Path, manifest: dict, manifest_bytes: bytes):
        self.folder, self.manifest, self.manifest_bytes = folder, manifest, manifest_bytes
        self.is_part = "part" in manifest
        stored = dict(manifest["counts"])
        if self.is_part:
            stored["train"] = manifest["part"]["rows"]
        self.layout = RowLayout(
            stored,
            manifest["rows_per_file"],
            tuple(manifest["image_shape"]),
            np.dtype(manifest["image_dtype"]),
        )
        self._open_file = functools.cache(self._open_file_once)
        self._digests = functools.cache(lambda split: self.small_array(f"{split}_digests"))
        self._rows_of_part = functools.cache(lambda: self.small_array("train_rows"))

    @property
    def class_names(self) -> list[str]:
        """Class names by label."""
        return self.manifest["class_names"]

    def count(self, split: str) -> int:
        """Return the number of images of a split, before augmentation."""
        return self.manifest["counts"][split]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of a stored image, dense targets included."""
        return self.layout.image_shape

    @property
    def targets(self) -> PixelTargets:
        """Dense targets that are stored behind the channels of the images."""
        return PixelTargets.recorded_in(self.manifest)

    @property
    def image_dtype(self) -> np.dtype:
        """Type of the pixels: uint8 or uint16."""
        return self.layout.dtype

    def identity(self) -> dict:
        """Return what a network trained on this cache needs elsewhere, and digests that tell data sets apart."""
        kept = {name: self.manifest[name] for name in ("class_names", "image_shape", "image_dtype", "mean", "std")}
        kept |= self.targets.record()
        for name in ("ids", "labels"):
            digests = "".join(self.manifest["sha256"][f"{split}_{name}.npy"] for split in SPLITS)
            kept[name] = hashlib.sha256(digests.encode()).hexdigest()
        pixels = "".join(self.manifest["pixels"][split] for split in SPLITS)
        kept["pixels"] = hashlib.sha256(pixels.encode()).hexdigest()
        return kept

    @functools.cached_property
    def class_counts(self) -> np.ndarray:
        """Training images of each class, int64 [classes]; cached, since every run of a study logs them."""
        return np.bincount(self.small_array("train_labels"), minlength=len(self.class_names))

    def rows_here(self, split: str) -> np.ndarray:
        """Return the rows of a split whose images are on this host, ascending."""
        return self._rows_of_part() if self.is_part and split == "train" else np.arange(self.count(split))

    def _places(self, split: str, rows: np.ndarray) -> np.ndarray:
        """Return the positions of rows in the images files, counted over all files of a split."""
        if not (self.is_part and split == "train"):
            return rows
        here = self._rows_of_part()
        places = np.minimum(np.searchsorted(here, rows), len(here) - 1)
        if not np.array_equal(here[places], rows):
            row = rows[here[places] != rows][0]
            raise IndexError(f"{self.folder} is a part of the training images: row {row} is on another host")
        return places

    def small_array(self, name: str) -> np.ndarray:
        """Read labels, ids or digests, verified whole (the header too: NumPy's parser trips over a damaged one)."""
        path = self.folder / f"{name}.npy"
        try:
            with untrusted.open_any(path) as file:
                content = file.read()
        except OSError as error:
            raise DamagedCache(f"{path} cannot be read ({error.strerror or error})") from error
        if hashlib.sha256(content).hexdigest() != self.manifest["sha256"][path.name]:
            raise DamagedCache(f"{path} does not match its SHA-256")
        return np.load(io.BytesIO(content), allow_pickle=False)

    def read_images(self, split: str, rows: np.ndarray, out: np.ndarray, num_threads: int | None = None) -> None:
        """Read the images `rows` of a split into `out`, uint8 [n, bytes of an image], without gaps.

        Each image is verified against its SHA-256. Only these rows are read, so that each host of a pod touches
        its own part of the files.

        Args:
          num_threads: threads that read and hash; None takes every core.
        Raises:
          DamagedCache: a row differs from what was written.
        """
        assert out.flags.c_contiguous
        row_bytes, rows_per_file = self.layout.row_bytes, self.layout.rows_per_file
        places = self._places(split, rows)
        digests = self._digests(split)[places].tobytes()
        content = memoryview(out.reshape(-1))  # a view of bytes costs less than one of NumPy
        in_order = np.argsort(places, kind="stable").tolist()  # a disk is read in one direction
        places = places.tolist()

        def read_range(begin: int, end: int) -> None:
            for position in in_order[begin:end]:
                number, row_of_file = divmod(places[position], rows_per_file)
                file = self._open_file(split, number)
                row = content[position * row_bytes : (position + 1) * row_bytes]
                file.read_row(row_of_file, row)
                if hashlib.sha256(row).digest() != digests[32 * position : 32 * position + 32]:
                    raise DamagedCache(f"{file.path}: example {rows[position]} does not match its SHA-256")

        run_ranges(read_range, len(rows), num_threads)

    def read_rows(self, split: str, rows: np.ndarray, padding: int = 0) -> np.ndarray:
        """Read images as [rows + padding, H * W * C] of the cache's dtype; padding is zeros.

        Raises:
          DamagedCache: a row differs from what was written.
        """
        out = memory.aligned_empty((len(rows) + padding, self.layout.row_bytes), np.uint8)
        self.read_images(split, rows, out[: len(rows)])
        out[len(rows) :] = 0
        return out.view(self.image_dtype)

    def _open_file_once(self, split: str, number: int) -> "_ImagesFile":
        header = self.layout.header(split, number)
        return _ImagesFile(self.folder / images_file(split, number), header, self.layout.row_bytes)

    def verify(self) -> None:
        """Verify every byte of every array; raise DamagedCache if one differs."""
        for name in self.manifest["sha256"]:
            self.small_array(name.removesuffix(".npy"))
        for split in SPLITS:
            rows_here = self.rows_here(split)
            for part in iterate_batches(len(rows_here), ROWS_AT_ONCE):
                rows = rows_here[part]
                self.read_images(split, rows, np.empty((len(rows), self.layout.row_bytes), np.uint8))


class _ImagesFile:
    """Open images file that several threads may read.

    It is read by system calls, not mapped: a file that is cut short while it is mapped kills the process.
    """

    def __init__(self, path: epath.Path, header: bytes, row_bytes: int):
        self.path, self._header_bytes, self._row_bytes = path, len(header), row_bytes
        self._lock = threading.Lock()
        start = bytearray(len(header))
        self._is_local = "://" not in os.fspath(path)
        try:
            self._file = untrusted.open_any(path)
        except OSError as error:
            raise self._unreadable(error) from error
        weakref.finalize(self, self._file.close)  # else its garbage collection is a ResourceWarning
        if self._read_at(0, memoryview(start)) != len(header) or start != header:
            raise DamagedCache(f"{path} does not start as an array of the manifest's images")

    def read_row(self, row: int, out: memoryview) -> None:
        """Read one row into `out`; raise DamagedCache if it cannot be read."""
        length = self._read_at(self._header_bytes + row * self._row_bytes, out)
        if length != self._row_bytes:  # else the hash is of what was in memory before
            raise DamagedCache(f"{self.path} ends within its row {row}")

    def _read_at(self, offset: int, out: memoryview) -> int:
        try:
            if self._is_local:
                return os.preadv(self._file.fileno(), [out], offset)
            with self._lock:
                self._file.seek(offset)
                return self._file.readinto(out)
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> DamagedCache:
        return DamagedCache(f"{self.path} cannot be read ({error.strerror or error})")


# ---- keys and manifests -----------------------------------------------------------------------------


def cache_key(source: Source, splits: dict[str, np.ndarray]) -> str:
    """Return a hash of everything that shapes the cache, except the version of the code that writes it."""
    digest = hashlib.sha256(source.fingerprint.encode())
    for split in SPLITS:
        digest.update(f" {split} {len(splits[split])} ".encode())
        digest.update(np.ascontiguousarray(splits[split], np.int64))
    return digest.hexdigest()[:16]


def open_cache(folder: epath.Path) -> Cache:
    """Open a cache and check its manifest, which holds a SHA-256 of its other fields."""
    return check_manifest(folder, read_manifest(folder))


def read_manifest(folder: epath.Path) -> bytes | None:
    """Return the bytes of the manifest file, or None where it cannot be read."""
    try:
        with untrusted.open_any(folder / MANIFEST) as file:
            return file.read(MAX_MANIFEST_BYTES)
    except OSError:
        return None


def check_manifest(folder: epath.Path, content: bytes | None) -> Cache:
    """Return the cache whose manifest has this content; raise DamagedCache if it is damaged."""
    path = folder / MANIFEST
    if content is None:
        raise DamagedCache(f"{path} is missing or cannot be read")
    try:
        manifest = json.loads(content)
        seal = manifest.pop("manifest_sha256")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedCache(f"{path} cannot be read ({error!r})") from error
    if seal != seal_of(manifest):
        raise DamagedCache(f"{path} does not match its SHA-256")
    if manifest.get("cache_version") != CACHE_VERSION:
        raise DamagedCache(f"{path} is of cache version {manifest.get('cache_version')}, this is {CACHE_VERSION}")
    if missing := MANIFEST_FIELDS - manifest.keys():
        raise DamagedCache(f"{path} lacks {', '.join(sorted(missing))}")
    return Cache(folder, manifest, content)


def seal_of(manifest: dict) -> str:
    """Compute the SHA-256 of the fields of a manifest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def open_sound_cache(folder: epath.Path) -> Cache | None:
    """Open the cache in `folder`, or return None; remove it if it is damaged or of another version."""
    while folder.exists():
        looked_at = read_manifest(folder)
        try:
            return check_manifest(folder, looked_at)
        except DamagedCache as damage:
            discard_cache(folder, looked_at, damage)
    return None


def discard_cache(folder: epath.Path, looked_at: bytes | None, damage: DamagedCache) -> None:
    """Log the damage and remove the folder, so that the cache is built again.

    The folder stays if another process has meanwhile put a new build in its place.

    Args:
      looked_at: the manifest's bytes, or None, of the build that was found to be damaged.
    Raises:
      UserError: the folder cannot be removed.
    """
    if read_manifest(folder) != looked_at:
        return
    trash = util.beside(folder)
    try:
        folder.rename(trash)  # atomically: hosts that share the file system do this at the same time
        if read_manifest(trash) != looked_at:  # the new build came between the two lines above
            with contextlib.suppress(OSError):  # yet another process has built: one is enough
                trash.rename(folder)
                return
        else:
            log.warning("damaged cache: %s; building it again", damage)
        util.remove(trash)
    except FileNotFoundError:
        return  # another process was first
    except OSError as error:
        raise UserError(f"augment.cache_dir: cannot remove {folder} ({error.strerror or error})") from error
