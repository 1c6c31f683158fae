"""A data set on disk, ready for the devices: .npy arrays and a manifest, every byte under a SHA-256.

    FOLDER/manifest.json                    source, counts, class names, statistics, digests; seals itself
    FOLDER/{train,val,test}_images.npy      uint8; of `train` all views of an original stand together
    FOLDER/{train,val,test}_labels.npy      int32, one per original
    FOLDER/{train,val,test}_ids.npy         text
    FOLDER/{train,val,test}_digests.npy     SHA-256 of each original's bytes in the images file

A folder is written under a temporary name and renamed, so under its own name it is whole.
"""

import contextlib
import hashlib
import io
import json
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from etils import epath

from largebatch import files, untrusted
from largebatch.data.images import Dataset, Source
from largebatch.data.split import SPLITS, split_indices
from largebatch.data.threads import iterate_batches, run_ranges
from largebatch.errors import UserError

log = logging.getLogger("largebatch")

CACHE_VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 2**24
MANIFEST_FIELDS = {"class_names", "counts", "num_views", "image_shape", "mean", "std", "source", "sha256"}

# Originals [n, H, W, C] -> all their views [n, views, H, W, C].
Expand = Callable[[np.ndarray], np.ndarray]


def one_view(images: np.ndarray) -> np.ndarray:
    """The `Expand` that keeps the originals alone."""
    return images[:, None]


class DamagedCache(Exception):
    """The cache does not hold what its manifest says; the text names the file."""


@dataclass(frozen=True)
class Cache:
    """A checked cache folder."""

    folder: epath.Path
    manifest: dict  # source, counts, class names, mean, std, digests of the arrays
    manifest_bytes: bytes  # the file as it was read, which tells this build of the cache from every other

    @property
    def class_names(self) -> list[str]:
        """Names by label."""
        return self.manifest["class_names"]

    def count(self, split: str) -> int:
        """Original images in `split`."""
        return self.manifest["counts"][split]

    @property
    def num_views(self) -> int:
        """Views of each training original in the images file."""
        return self.manifest["num_views"]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width, channels."""
        return tuple(self.manifest["image_shape"])

    def identity(self) -> dict:
        """What someone needs to use a network trained on this elsewhere, and digests that tell data apart."""
        kept = {name: self.manifest[name] for name in ("class_names", "image_shape", "mean", "std")}
        for name, part in (("ids", "ids"), ("labels", "labels"), ("images", "digests")):
            digests = "".join(self.manifest["sha256"][f"{split}_{part}.npy"] for split in SPLITS)
            kept[name] = hashlib.sha256(digests.encode()).hexdigest()
        return kept

    def small_array(self, name: str) -> np.ndarray:
        """Labels, ids or digests, verified whole (the header too: NumPy's parser trips over a damaged one)."""
        path = self.folder / f"{name}.npy"
        try:
            with untrusted.open_any(path) as file:
                content = file.read()
        except OSError as error:
            raise DamagedCache(f"{path} cannot be read ({error.strerror or error})") from error
        if hashlib.sha256(content).hexdigest() != self.manifest["sha256"][path.name]:
            raise DamagedCache(f"{path} does not match its SHA-256")
        return np.load(io.BytesIO(content), allow_pickle=False)

    def read_images(self, split: str, examples: np.ndarray, out: np.ndarray) -> None:
        """Reads originals `examples`, with their views, into out [n, bytes of one original's views].

        Each is verified against its SHA-256. Only these rows are read, so that each host of a pod touches
        its own part of the file.
        """
        path = self.folder / f"{split}_images.npy"
        digests = self.small_array(f"{split}_digests")
        num_views = out.shape[1] // int(np.prod(self.image_shape))
        header = _npy_header((len(digests) * num_views, *self.image_shape))
        try:
            with untrusted.open_any(path) as file:
                start_of_file = file.read(len(header))
        except OSError as error:
            raise DamagedCache(f"{path} cannot be read ({error.strerror or error})") from error
        if start_of_file != header:
            raise DamagedCache(f"{path} does not start as an array of {len(digests)} x {num_views} images")

        def read_range(first: int, last: int) -> None:
            with untrusted.open_any(path) as file:
                for row in range(first, last):
                    try:
                        file.seek(len(header) + int(examples[row]) * out.shape[1])
                        length = file.readinto(out[row].data)
                    except OSError as error:
                        raise DamagedCache(f"{path} cannot be read ({error.strerror or error})") from error
                    if length != out.shape[1]:  # or the hash would be of what was in memory before
                        raise DamagedCache(f"{path} ends within example {examples[row]}")
                    if hashlib.sha256(out[row]).digest() != digests[examples[row]].tobytes():
                        raise DamagedCache(f"{path}: example {examples[row]} does not match its SHA-256")

        run_ranges(read_range, len(examples))

    def verify(self) -> None:
        """Reads every byte of every array; raises DamagedCache."""
        image = int(np.prod(self.image_shape))
        for name in self.manifest["sha256"]:
            self.small_array(name.removesuffix(".npy"))
        for split, count in self.manifest["counts"].items():
            size = image * (self.num_views if split == "train" else 1)
            for part in iterate_batches(count, 1024):
                rows = np.arange(part.start, part.stop)
                self.read_images(split, rows, np.empty((len(rows), size), np.uint8))


def _npy_header(shape: tuple[int, ...]) -> bytes:
    """What a .npy file of uint8 `shape` starts with."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def cache_key(source: Source, split_seed: int, storage: str) -> str:
    """Hash of everything that shapes the cache, but the version of the code that writes it."""
    text = f"{source.fingerprint} split {split_seed} {storage}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def open_cache(folder: epath.Path) -> Cache:
    """Checks the manifest, which seals itself by a SHA-256 over its other fields."""
    return _check(folder, _read_manifest(folder))


def _read_manifest(folder: epath.Path) -> bytes | None:
    """The manifest's file as it is, or None where it cannot be read."""
    try:
        with untrusted.open_any(folder / MANIFEST) as file:
            return file.read(MAX_MANIFEST_BYTES)
    except OSError:
        return None


def _check(folder: epath.Path, content: bytes | None) -> Cache:
    path = folder / MANIFEST
    if content is None:
        raise DamagedCache(f"{path} is missing or cannot be read")
    try:
        manifest = json.loads(content)
        seal = manifest.pop("manifest_sha256")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedCache(f"{path} cannot be read ({error!r})") from error
    if seal != _seal(manifest):
        raise DamagedCache(f"{path} does not match its SHA-256")
    if manifest.get("cache_version") != CACHE_VERSION:
        raise DamagedCache(f"{path} is of cache version {manifest.get('cache_version')}, this is {CACHE_VERSION}")
    if missing := MANIFEST_FIELDS - manifest.keys():
        raise DamagedCache(f"{path} lacks {', '.join(sorted(missing))}")
    return Cache(folder, manifest, content)


def _seal(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def build_cache(folder: epath.Path, source: Source, split_seed: int, storage: str, expand: Expand) -> None:
    """Loads, splits, expands and writes the cache under a temporary name, then renames it to `folder`.

    Raises:
      UserError: bad images, images that are not square, a class without training images, a failing disk.
    """
    started = time.perf_counter()
    log.info("loading %s", source.description)
    dataset = source.load()
    height, width, _ = dataset.images.shape[1:]
    if height != width:
        raise UserError(
            f"dataset.image_size: images are {width}x{height} pixels; rotations need square ones: set a size"
        )
    loaded = time.perf_counter()
    splits = split_indices(dataset.example_ids, split_seed)
    missing = set(range(len(dataset.class_names))) - set(dataset.labels[splits["train"]].tolist())
    if missing:
        names = ", ".join(dataset.class_names[i] for i in sorted(missing))
        raise UserError(f"dataset: no training image is left for class {names}; add images or change split_seed")
    files.remove_stale(folder)
    temporary = files.beside(folder)
    try:
        temporary.mkdir(parents=True)
        manifest = _write_arrays(temporary, dataset, splits, expand)
        manifest["source"], manifest["split_seed"] = source.description, split_seed
        manifest["storage"], manifest["cache_version"] = storage, CACHE_VERSION
        manifest["build"] = uuid.uuid4().hex  # so that no two builds have the same manifest; see `discard_cache`
        manifest["manifest_sha256"] = _seal(manifest)
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first, with the same content
                raise
    except OSError as error:
        raise UserError(f"augment.cache_dir: cannot write {folder} ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):  # the disk is in trouble: it is stale one day
            files.remove(temporary)
    done = time.perf_counter()
    log.info("decoded in %.1f s, expanded and cached in %.1f s: %s", loaded - started, done - loaded, folder)


def _write_arrays(folder: epath.Path, dataset: Dataset, splits: dict, expand: Expand) -> dict:
    """Writes images, labels, ids and digests of every split; returns their part of the manifest."""
    sha256, ids = {}, np.array(dataset.example_ids)
    for split, rows in splits.items():
        expand_split = expand if split == "train" else one_view
        digests = _write_images(folder / f"{split}_images.npy", dataset.images, rows, expand_split)
        small = {"labels": dataset.labels[rows], "ids": ids[rows], "digests": digests}
        for name, array in small.items():
            buffer = io.BytesIO()
            np.save(buffer, array, allow_pickle=False)
            path = folder / f"{split}_{name}.npy"
            path.write_bytes(buffer.getvalue())
            sha256[path.name] = hashlib.sha256(buffer.getvalue()).hexdigest()
    mean, std = channel_statistics(dataset.images, splits["train"])
    return {
        "image_shape": list(dataset.images.shape[1:]),
        "num_views": expand(dataset.images[:1]).shape[1],
        "counts": {split: len(rows) for split, rows in splits.items()},
        "class_names": dataset.class_names,
        "mean": mean.tolist(),
        "std": std.tolist(),
        "sha256": sha256,
    }


def _write_images(path: epath.Path, images: np.ndarray, rows: np.ndarray, expand: Expand) -> np.ndarray:
    """Writes all views of each of `rows`, 1,024 at a time; returns a SHA-256 per original, uint8 [n, 32]."""
    digests = np.empty((len(rows), 32), np.uint8)
    num_views = expand(images[:1]).shape[1]
    with path.open("wb") as file:
        file.write(_npy_header((len(rows) * num_views, *images.shape[1:])))
        for part in iterate_batches(len(rows), 1024):
            block = np.empty((part.stop - part.start, num_views, *images.shape[1:]), np.uint8)

            def fill(begin: int, end: int, part=part, block=block) -> None:
                block[begin:end] = expand(images[rows[part][begin:end]])
                for i in range(begin, end):
                    digests[part.start + i] = np.frombuffer(hashlib.sha256(block[i]).digest(), np.uint8)

            run_ranges(fill, len(block))
            file.write(block.data)
    return digests


def channel_statistics(images: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel over images[rows], on the scale 0..255; exact sums."""
    counts = np.zeros((images.shape[-1], 256), np.int64)
    for part in iterate_batches(len(rows), 1024):
        block = images[rows[part]]
        for channel in range(images.shape[-1]):
            counts[channel] += np.bincount(block[..., channel].ravel(), minlength=256)
    levels, total = np.arange(256), counts.sum(axis=1)
    mean = counts @ levels / total
    variance = counts @ levels**2 / total - mean**2
    return mean, np.sqrt(np.maximum(variance, 1.0))


def open_or_build(folder: epath.Path, source: Source, split_seed: int, storage: str, expand: Expand) -> Cache:
    """The cache in `folder`, built where it is missing, damaged or of another version."""
    while folder.exists():
        looked_at = _read_manifest(folder)
        try:
            return _check(folder, looked_at)
        except DamagedCache as damage:
            discard_cache(folder, looked_at, damage)
    build_cache(folder, source, split_seed, storage, expand)
    return open_cache(folder)


def discard_cache(folder: epath.Path, looked_at: bytes | None, damage: DamagedCache) -> None:
    """Says what is damaged and removes the folder, so that it is built again.

    It stays if another process has meanwhile put a new build in its place.

    Args:
      looked_at: the manifest's bytes, or None, of the build that was found to be damaged.
    Raises:
      UserError: it cannot be removed.
    """
    if _read_manifest(folder) != looked_at:
        return
    trash = files.beside(folder)
    try:
        folder.rename(trash)  # at once, for hosts that share the file system do this at the same time
        if _read_manifest(trash) != looked_at:  # the new build came between the two lines above
            with contextlib.suppress(OSError):  # yet another process has built: one is enough
                trash.rename(folder)
                return
        else:
            log.warning("damaged cache: %s; building it again", damage)
        files.remove(trash)
    except FileNotFoundError:
        return  # another process was first
    except OSError as error:
        raise UserError(f"augment.cache_dir: cannot remove {folder} ({error.strerror or error})") from error
