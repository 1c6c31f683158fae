"""The offline step: load -> split -> expand 8x -> cache on disk; then load the cache onto devices.

    python augment.py --config configs/eurosat.py --config.dataset.path EuroSAT.zip
    python augment.py --config configs/eurosat.py --preview views.png

Example `i` of the training set is view `i % 8` of original `i // 8`. Storage "expanded" keeps all views
as uint8 on the devices; "on_device" keeps the originals and makes the view when a micro-batch is read.
"""

import hashlib
import json
import logging
import os
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from etils import epath

from largebatch import UserError, data, devices
from largebatch.batching import Deal
from largebatch.evaluation import rows_of_device

log = logging.getLogger("largebatch")

NUM_VIEWS = 8
CACHE_VERSION = 1
STALE_SEC = 3600


# ---- the 8 views ------------------------------------------------------------------------------------


def apply_view(images, view: int):
    """View `view` of images [..., H, W, C]: bit 0 flips left/right, bit 1 up/down, bit 2 transposes.

    These are the 8 symmetries of the square (four rotations, each with and without a flip); 0 is the
    identity. NumPy and JAX arrays alike.
    """
    if view & 1:
        images = images[..., :, ::-1, :]
    if view & 2:
        images = images[..., ::-1, :, :]
    if view & 4:
        images = images.swapaxes(-3, -2)
    return images


def select_views(images: jax.Array, views: jax.Array) -> jax.Array:
    """`apply_view` with one traced view per image: images [M, H, W, C], views int32 [M]."""
    views = views[:, None, None, None]
    images = jnp.where(views & 1, images[:, :, ::-1], images)
    images = jnp.where(views & 2, images[:, ::-1], images)
    return jnp.where(views & 4, images.swapaxes(1, 2), images)


def make_read(storage: str):
    """The `read` of `step.make_inner_loop` for {"images": [n, H, W, C], "labels": [originals]}."""

    def take(array, index):
        return array.at[index].get(mode="promise_in_bounds")

    def read_expanded(shard, examples):
        return take(shard["images"], examples), take(shard["labels"], examples // NUM_VIEWS)

    def read_on_device(shard, examples):
        originals = examples // NUM_VIEWS
        images = select_views(take(shard["images"], originals), examples % NUM_VIEWS)
        return images, take(shard["labels"], originals)

    return {"expanded": read_expanded, "on_device": read_on_device}[storage]


# ---- the cache --------------------------------------------------------------------------------------


class DamagedCache(Exception):
    """The cache does not hold what its manifest says; the text names the file."""


class Cache(NamedTuple):
    """A checked cache folder. `manifest` has source, counts, class_names, mean, std and array digests."""

    folder: epath.Path
    manifest: dict

    @property
    def class_names(self) -> list[str]:
        return self.manifest["class_names"]

    def count(self, split: str) -> int:
        """Original images in `split`."""
        return self.manifest["counts"][split]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return tuple(self.manifest["image_shape"])

    def small_array(self, name: str) -> np.ndarray:
        """Labels, ids or digests, verified whole."""
        path = self.folder / f"{name}.npy"
        try:
            with path.open("rb") as file:
                array = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DamagedCache(f"{path} cannot be read ({error})") from error
        if _digest(array) != self.manifest["sha256"][name]:
            raise DamagedCache(f"{path} does not match its SHA-256")
        return array

    def read_images(self, split: str, examples: np.ndarray, out: np.ndarray) -> None:
        """Reads originals `examples`, with their views, into out [n, bytes of one original's views].

        Each is verified against its SHA-256. Only these rows are read, so that each host of a pod touches its own part of the file.
        """
        path = self.folder / f"{split}_images.npy"
        digests = self.small_array(f"{split}_digests")
        try:
            with path.open("rb") as file:
                np.lib.format.read_magic(file)
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                begin = file.tell()
        except (OSError, ValueError, EOFError) as error:
            raise DamagedCache(f"{path} cannot be read ({error})") from error
        if int(np.prod(shape)) != len(digests) * out.shape[1] or dtype != np.uint8:
            raise DamagedCache(f"{path} holds {dtype} {shape}, not {len(digests)} originals of {out.shape[1]} bytes")

        def read_range(first: int, last: int) -> None:
            with path.open("rb") as file:
                for row in range(first, last):
                    file.seek(begin + int(examples[row]) * out.shape[1])
                    file.readinto(out[row].data)
                    if hashlib.sha256(out[row]).digest() != digests[examples[row]].tobytes():
                        raise DamagedCache(f"{path}: example {examples[row]} does not match its SHA-256")

        data.run_ranges(read_range, len(examples))


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array)).hexdigest()


def cache_key(source: data.Source, split_seed: int, storage: str) -> str:
    """Hash of everything that shapes the cache."""
    text = f"v{CACHE_VERSION} {source.fingerprint} split {split_seed} {storage}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def open_cache(folder: epath.Path) -> Cache:
    """Checks the manifest, which seals itself by a SHA-256 over its other fields."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        seal = manifest.pop("manifest_sha256")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DamagedCache(f"{path} cannot be read ({error!r})") from error
    if seal != _seal(manifest):
        raise DamagedCache(f"{path} does not match its SHA-256")
    return Cache(folder, manifest)


def _seal(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def build_cache(folder: epath.Path, source: data.Source, split_seed: int, storage: str) -> None:
    """Loads, splits, expands and writes the cache under a temporary name, then renames it to `folder`."""
    started = time.perf_counter()
    log.info("loading %s", source.description)
    dataset = source.load()
    height, width, _ = dataset.images.shape[1:]
    if height != width:
        raise UserError(
            f"dataset.image_size: images are {width}x{height} pixels; rotations need square ones: set a size"
        )
    loaded = time.perf_counter()
    splits = data.split_indices(dataset.example_ids, split_seed)
    missing = set(range(len(dataset.class_names))) - set(dataset.labels[splits["train"]].tolist())
    if missing:
        names = ", ".join(dataset.class_names[i] for i in sorted(missing))
        raise UserError(f"dataset: no training image is left for class {names}; add images or change split_seed")
    _remove_stale(folder)
    temporary = folder.parent / f".tmp-{folder.name}-{os.uname().nodename}-{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        manifest = _write_arrays(temporary, dataset, splits, storage)
        manifest |= {
            "source": source.description,
            "split_seed": split_seed,
            "storage": storage,
            "cache_version": CACHE_VERSION,
        }
        manifest["manifest_sha256"] = _seal(manifest)
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first, with the same content
                raise
    except OSError as error:
        raise UserError(f"augment.cache_dir: cannot write {folder} ({error.strerror or error})") from error
    finally:
        if temporary.exists():
            temporary.rmtree()
    done = time.perf_counter()
    log.info("decoded in %.1f s, expanded and cached in %.1f s: %s", loaded - started, done - loaded, folder)


def _write_arrays(folder: epath.Path, dataset: data.Dataset, splits: dict, storage: str) -> dict:
    """Writes images, labels, ids and digests of every split; returns their part of the manifest."""
    sha256, ids = {}, np.array(dataset.example_ids)
    for split, rows in splits.items():
        views = NUM_VIEWS if split == "train" and storage == "expanded" else 1
        digests = _write_images(folder / f"{split}_images.npy", dataset.images, rows, views)
        small = {"labels": dataset.labels[rows], "ids": ids[rows], "digests": digests}
        for name, array in small.items():
            with (folder / f"{split}_{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
            sha256[f"{split}_{name}"] = _digest(array)
    mean, std = channel_statistics(dataset.images, splits["train"])
    return {
        "image_shape": list(dataset.images.shape[1:]),
        "counts": {split: len(rows) for split, rows in splits.items()},
        "class_names": dataset.class_names,
        "mean": mean.tolist(),
        "std": std.tolist(),
        "sha256": sha256,
    }


def _write_images(path: epath.Path, images: np.ndarray, rows: np.ndarray, views: int) -> np.ndarray:
    """Writes `views` views of each of `rows`; returns a SHA-256 per original, uint8 [n, 32]."""
    digests = np.empty((len(rows), 32), np.uint8)
    shape = (len(rows) * views, *images.shape[1:])
    block_shape = (views, *images.shape[1:])
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in data.iterate_batches(len(rows), 1024):
            block = np.empty((part.stop - part.start, *block_shape), np.uint8)

            def expand(begin: int, end: int, part=part, block=block) -> None:
                originals = images[rows[part][begin:end]]
                for view in range(views):
                    block[begin:end, view] = apply_view(originals, view)
                for i in range(begin, end):
                    digests[part.start + i] = np.frombuffer(hashlib.sha256(block[i]).digest(), np.uint8)

            data.run_ranges(expand, len(block))
            file.write(block.data)
    return digests


def channel_statistics(images: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel over images[rows], on the scale 0..255; exact sums."""
    counts = np.zeros((images.shape[-1], 256), np.int64)
    for part in data.iterate_batches(len(rows), 1024):
        block = images[rows[part]]
        for channel in range(images.shape[-1]):
            counts[channel] += np.bincount(block[..., channel].ravel(), minlength=256)
    levels, total = np.arange(256), counts.sum(axis=1)
    mean = counts @ levels / total
    variance = counts @ levels**2 / total - mean**2
    return mean, np.sqrt(np.maximum(variance, 1.0))


def _remove_stale(folder: epath.Path) -> None:
    """Removes what killed builds of this cache left behind, if it is old enough to be nobody's."""
    if folder.parent.exists():
        for path in folder.parent.glob(f".tmp-{folder.name}-*"):
            if time.time() - path.stat().mtime > STALE_SEC:
                path.rmtree()


def prepare_cache(config) -> Cache:
    """The cache of `config`, built where it is missing or damaged; same folder name on all hosts.

    The primary host builds first; hosts that then see no cache (no shared file system) build their own.
    """
    fields = config.dataset
    source = data.find_source(
        fields.name,
        fields.source,
        fields.path,
        image_size=fields.image_size,
        tfds_split=fields.tfds_split,
        num_examples=fields.num_examples,
        seed=fields.split_seed,
        cache_dir=config.augment.cache_dir,
    )
    key = cache_key(source, fields.split_seed, config.augment.storage)
    name = "".join(c if c.isalnum() else "_" for c in fields.name)
    folder = epath.Path(config.augment.cache_dir).expanduser() / f"{name}-{key}"
    for turn in ("primary", "others"):
        if devices.is_primary() == (turn == "primary"):
            cache = _open_or_build(folder, source, fields.split_seed, config.augment.storage)
        devices.barrier(f"cache {turn}")
    return cache


def _open_or_build(folder, source, split_seed, storage) -> Cache:
    if folder.exists():
        try:
            return open_cache(folder)
        except DamagedCache as damage:
            discard(folder, damage)
    build_cache(folder, source, split_seed, storage)
    return open_cache(folder)


def discard(folder: epath.Path, damage: DamagedCache) -> None:
    """Says what is damaged and removes the folder, so that it is built again."""
    log.warning("damaged cache: %s; building it again", damage)
    try:
        folder.rmtree()
    except FileNotFoundError:
        pass  # another host on the same file system was first


# ---- placing ----------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """What is on the devices: pytrees with a leading local-device axis, and what they hold."""

    train: dict
    val_images: jax.Array
    val_labels: np.ndarray
    val_ids: np.ndarray
    deal: Deal


def bytes_per_device(cache: Cache, storage: str, num_devices: int) -> dict[str, int]:
    """Bytes of images that placing needs on the fullest device."""
    image = int(np.prod(cache.image_shape))
    views = NUM_VIEWS if storage == "expanded" else 1
    return {
        "training images": -(-cache.count("train") // num_devices) * views * image,
        "validation images": -(-cache.count("val") // num_devices) * image,
    }


def load_onto_devices(config) -> tuple[Cache, Placed]:
    """Prepares the cache and places it; a cache that turns out damaged is named and built again, once.

    Raises:
      UserError: it does not fit, or the fresh cache is damaged too.
    """
    for attempt in range(2):
        cache, damage = prepare_cache(config), ""
        sizes = bytes_per_device(cache, config.augment.storage, jax.device_count())
        devices.check_fits(sizes, hint="augment.storage = 'on_device' keeps an eighth; or use more devices")
        try:
            placed = place(cache, config.augment.storage, config.seed)
        except DamagedCache as error:
            damage = str(error)
        found = [text for text in devices.gather_text(damage) if text]
        if not found:
            return cache, placed
        if attempt == 0 and damage:
            discard(cache.folder, DamagedCache(damage))
        devices.barrier("damaged cache")
    raise UserError(f"augment.cache_dir: damaged again right after it was rebuilt: {found[0]}")


def place(cache: Cache, storage: str, seed: int) -> Placed:
    """Reads this host's rows of the cache, device by device, so that no second copy is held."""
    num_devices = jax.device_count()
    deal = Deal(cache.count("train"), num_devices, NUM_VIEWS)
    views = NUM_VIEWS if storage == "expanded" else 1
    labels = cache.small_array("train_labels")
    train, val = [], []
    for index, device in zip(devices.local_indices(), jax.local_devices(), strict=True):
        originals = deal.originals_of(index, seed)
        padding = deal.max_originals - len(originals)
        train.append(
            {
                "images": _place_images(cache, "train", originals, padding, views, device),
                "labels": jax.device_put(np.pad(labels[originals], (0, padding))[None], device),
            }
        )
        rows = rows_of_device(cache.count("val"), num_devices, index)
        val.append(_place_images(cache, "val", rows, 0, 1, device))
    return Placed(
        devices.stack(train),
        devices.stack(val),
        cache.small_array("val_labels"),
        cache.small_array("val_ids"),
        deal,
    )


def _place_images(cache: Cache, split: str, examples, padding: int, views: int, device) -> jax.Array:
    """uint8 [1, n * views, H, W, C] on `device`."""
    shape = cache.image_shape
    out = devices.aligned_empty((len(examples) + padding, views * int(np.prod(shape))), np.uint8)
    cache.read_images(split, examples, out[: len(examples)])
    out[len(examples) :] = 0
    return jax.device_put(out.reshape(1, -1, *shape), device)


# ---- the command ------------------------------------------------------------------------------------


def draw_preview(cache: Cache, path: str, num_images: int = 6, scale: int = 2) -> None:
    """Writes a picture: one row per image, one column per view."""
    from PIL import Image

    size = cache.image_shape[0]
    step = cache.count("train") // num_images or 1
    rows = np.arange(0, cache.count("train"), step)[:num_images]
    stored = NUM_VIEWS if cache.manifest["storage"] == "expanded" else 1
    images = np.empty((len(rows), stored * int(np.prod(cache.image_shape))), np.uint8)
    cache.read_images("train", rows, images)
    originals = images.reshape(len(rows), stored, *cache.image_shape)[:, 0]
    gap = 2
    sheet = np.full((len(rows) * (size + gap) - gap, NUM_VIEWS * (size + gap) - gap, 3), 255, np.uint8)
    for row, original in enumerate(originals):
        for view in range(NUM_VIEWS):
            y, x = row * (size + gap), view * (size + gap)
            sheet[y : y + size, x : x + size] = apply_view(original, view)
    picture = Image.fromarray(sheet)
    picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST).save(path)


def main(config) -> None:
    cache = prepare_cache(config)
    counts = ", ".join(f"{cache.count(split)} {split}" for split in data.SPLITS)
    print(f"cache   {cache.folder}")
    print(f"images  {counts}; training set {cache.count('train') * NUM_VIEWS} views")
    print(f"classes {', '.join(cache.class_names)}")
    if flags.FLAGS.preview:
        draw_preview(cache, flags.FLAGS.preview)
        print(f"preview {flags.FLAGS.preview}")


if __name__ == "__main__":
    from largebatch.config import run_script

    flags.DEFINE_string("preview", None, "Draw some training images with their 8 views to this PNG.")
    run_script(main)
