"""The offline step: load -> split -> expand 8x -> cache on disk; then load the cache onto devices.

    python augment.py --config configs/eurosat.py --config.dataset.path EuroSAT.zip
    python augment.py --config configs/eurosat.py --preview views.png

Example `i` of the training set is view `i % 8` of original `i // 8`. Storage "expanded" keeps all views
as uint8 on the devices; "on_device" keeps the originals and makes the view when a micro-batch is read.
"""

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from etils import epath

from largebatch.data import sources
from largebatch.data.batching import Deal, shuffle_key
from largebatch.data.cache import Cache, DamagedCache, cache_key, discard_cache, one_view, open_or_build
from largebatch.data.split import SPLITS
from largebatch.errors import BadSetting, UserError
from largebatch.hosts import collectives, memory, replicas
from largebatch.training.evaluation import rows_of_device

NUM_VIEWS = 8


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


def expand(images: np.ndarray) -> np.ndarray:
    """All views of images [n, H, W, C], as [n, 8, H, W, C]."""
    views = np.empty((len(images), NUM_VIEWS, *images.shape[1:]), images.dtype)
    for view in range(NUM_VIEWS):
        views[:, view] = apply_view(images, view)
    return views


def select_views(images: jax.Array, views: jax.Array) -> jax.Array:
    """`apply_view` with one traced view per image: images [M, H, W, C], views int32 [M]."""
    views = views[:, None, None, None]
    images = jnp.where(views & 1, images[:, :, ::-1], images)
    images = jnp.where(views & 2, images[:, ::-1], images)
    return jnp.where(views & 4, images.swapaxes(1, 2), images)


def shifted(images: jax.Array, visits: jax.Array, limit: int) -> jax.Array:
    """Images [M, H, W, C], each moved by up to `limit` pixels each way, with its edges reflected.

    By how much follows from the keys of the visits, uint32 [M]; all moves are as likely.
    """
    padded = jnp.pad(images, ((0, 0), (limit, limit), (limit, limit), (0, 0)), mode="reflect")
    rows, columns = (shuffle_key(visits, axis) % (2 * limit + 1) for axis in range(2))

    def cut(image, row, column):
        return jax.lax.dynamic_slice(image, (row, column, 0), images.shape[1:])

    return jax.vmap(cut)(padded, rows.astype(jnp.int32), columns.astype(jnp.int32))


def make_read(storage: str, image_shape: tuple[int, int, int], shift: int = 0):
    """The `read` of `step.make_inner_loop` for {"images": [n, H * W * C], "labels": [originals]}.

    Images lie as flat rows: a TPU pads the last two dimensions of an array to its tile of 8 x 128.

    Args:
      shift: pixels by which images are moved at most, each way; see `shifted`.
    Raises:
      BadSetting: that is as far as an image is large, which a reflected edge does not fill.
    """
    if shift >= min(image_shape[:2]):
        raise BadSetting(f"augment.shift: {shift}; allowed: below {min(image_shape[:2])}, the size of an image")

    def take(array, index):
        return array.at[index].get(mode="promise_in_bounds")

    def read_expanded(shard, examples):
        images = take(shard["images"], examples).reshape(-1, *image_shape)
        return images, take(shard["labels"], examples // NUM_VIEWS)

    def read_on_device(shard, examples):
        originals = examples // NUM_VIEWS
        images = take(shard["images"], originals).reshape(-1, *image_shape)
        return select_views(images, examples % NUM_VIEWS), take(shard["labels"], originals)

    still = {"expanded": read_expanded, "on_device": read_on_device}[storage]

    def read(shard, examples, visits):
        images, labels = still(shard, examples)
        return shifted(images, visits, shift) if shift else images, labels

    return read


def average_over_views(logits_fn: Callable, image_shape: tuple[int, int, int]) -> Callable:
    """A `logits_fn` of the mean of the logits of all views (of crops: Krizhevsky et al. 2012, section 4.1)."""

    def averaged(variables, images):
        images = images.reshape(-1, *image_shape)
        views = (apply_view(images, view).reshape(len(images), -1) for view in range(NUM_VIEWS))
        return sum(logits_fn(variables, view) for view in views) / NUM_VIEWS

    return averaged


# ---- cache and devices --------------------------------------------------------------------------------


def prepare_cache(config) -> Cache:
    """The cache of `config`, built where it is missing or damaged; the same content on all hosts.

    The primary host builds first; hosts that then see no cache (no shared file system) build their own.

    Raises:
      UserError: on every host, if the data set is bad or missing on any of them.
    """
    cache = None
    for turn in ("primary", "others"):
        error = None
        if collectives.is_primary() == (turn == "primary"):
            try:
                cache = _prepare_own_cache(config)
            except UserError as found:
                error = found
            except ImportError as found:
                error = UserError(f"augment.cache_dir: {config.augment.cache_dir} needs a package ({found})")
        collectives.share_error(error)
    content = [cache.manifest[key] for key in ("sha256", "counts", "class_names")]
    if len(set(collectives.gather_text(json.dumps(content, sort_keys=True)))) > 1:
        raise UserError(f"dataset: hosts hold different data under {config.dataset.path or config.dataset.name!r}")
    return cache


def with_cache(config, use: Callable[[Cache], Any]) -> tuple[Cache, Any]:
    """The cache of `config` and `use(cache)`; a cache that `use` finds damaged is built again, once.

    All hosts call this, and all call `use` again if any of them finds damage.

    Raises:
      UserError: on every host, if the fresh cache is damaged too; what `prepare_cache` and `use` raise.
    """
    for attempt in range(2):
        cache, result, damage = prepare_cache(config), None, None
        try:
            result = use(cache)
        except DamagedCache as found:
            damage = found
        found = [text for text in collectives.gather_text(str(damage or "")) if text]
        if not found:
            return cache, result
        discard = functools.partial(discard_cache, cache.folder, cache.manifest_bytes, damage)
        collectives.agreed(discard, damage is not None and not attempt)
    raise UserError(f"augment.cache_dir: damaged again right after it was built: {found[0]}")


def _prepare_own_cache(config) -> Cache:
    fields, storage = config.dataset, config.augment.storage
    source = sources.find_source(
        fields.name,
        fields.source,
        fields.path,
        image_size=fields.image_size,
        tfds_split=fields.tfds_split,
        num_examples=fields.num_examples,
        seed=fields.split_seed,
        cache_dir=config.augment.cache_dir,
        max_image_pixels=fields.max_image_pixels,
    )
    name = "".join(c if c.isalnum() else "_" for c in fields.name)
    folder = f"{name}-{cache_key(source, fields.split_seed, storage)}"
    folder = epath.Path(config.augment.cache_dir).expanduser() / folder
    views = expand if storage == "expanded" else one_view
    return open_or_build(folder, source, fields.split_seed, storage, views)


class Placed(NamedTuple):
    """What is on the devices: pytrees with a leading local-device axis, and what they hold.

    Images are flat uint8 rows [local devices, n, H * W * C].
    """

    train: dict
    val_images: jax.Array
    val_labels: np.ndarray
    val_ids: np.ndarray
    deal: Deal


def bytes_per_device(cache: Cache, num_devices: int) -> dict[str, int]:
    """Bytes of images that placing needs on the fullest device."""
    image = int(np.prod(cache.image_shape))
    return {
        "training images": -(-cache.count("train") // num_devices) * cache.num_views * image,
        "validation images": -(-cache.count("val") // num_devices) * image,
    }


def load_onto_devices(config, other_bytes=lambda cache: {}, *, packed: bool = False) -> tuple[Cache, Placed]:
    """Prepares the cache and places it; a cache that turns out damaged is named and built again, once.

    Args:
      other_bytes: cache -> bytes per device of whatever else must fit, by part.
      packed: see `place`.
    Raises:
      UserError: it does not fit, or the fresh cache is damaged too.
    """

    def check_and_place(cache):
        sizes = bytes_per_device(cache, 1 if packed else jax.device_count()) | other_bytes(cache)
        hint = "augment.storage = 'on_device' keeps an eighth of the images; or use more devices"
        collectives.agreed(lambda: memory.check_fits(sizes, hint))
        return place(cache, config.dataset.split_seed, packed=packed)

    return with_cache(config, check_and_place)


def place(cache: Cache, seed: int, *, packed: bool = False) -> Placed:
    """Reads this host's rows of the cache, device by device, so that no second copy is held.

    Args:
      seed: of the deal. Not the run's, so that runs that differ by seed share what is placed.
      packed: all of the set on each device, as if it were the only one.
    """
    num_devices = 1 if packed else jax.device_count()
    deal = Deal(cache.count("train"), num_devices, NUM_VIEWS)
    labels = cache.small_array("train_labels")

    def read(index):
        originals = deal.originals_of(index, seed)
        padding = deal.max_originals - len(originals)
        train = {
            "images": _read_images(cache, "train", originals, padding, cache.num_views),
            "labels": np.pad(labels[originals], (0, padding))[None],
        }
        return train, _read_images(cache, "val", rows_of_device(cache.count("val"), num_devices, index), 0, 1)

    if packed:
        read = functools.cache(read)  # CPU devices then share one copy, which `aligned_empty` makes possible
    indices = [0] * jax.local_device_count() if packed else replicas.local_indices()
    train, val = zip(
        *(jax.device_put(read(index), device) for index, device in zip(indices, jax.local_devices(), strict=True)),
        strict=True,
    )
    return Placed(
        replicas.stack(list(train)),
        replicas.stack(list(val)),
        cache.small_array("val_labels"),
        cache.small_array("val_ids"),
        deal,
    )


def _read_images(cache: Cache, split: str, examples, padding: int, views: int) -> np.ndarray:
    """uint8 [1, n * views, H * W * C]."""
    image = int(np.prod(cache.image_shape))
    out = memory.aligned_empty((len(examples) + padding, views * image), np.uint8)
    cache.read_images(split, examples, out[: len(examples)])
    out[len(examples) :] = 0
    return out.reshape(1, -1, image)


def read_originals(cache: Cache, num_images: int) -> np.ndarray:
    """The first `num_images` training images as they are, uint8 [num_images, H, W, C]."""
    rows = np.empty((num_images, cache.num_views * int(np.prod(cache.image_shape))), np.uint8)
    cache.read_images("train", np.arange(num_images), rows)
    return rows.reshape(num_images, cache.num_views, *cache.image_shape)[:, 0]


# ---- the command ------------------------------------------------------------------------------------


def draw_preview(cache: Cache, path: str, num_images: int = 4, scale: int = 2) -> None:
    """Writes a picture: one row per image, each of another class, and one column per view."""
    from PIL import Image

    size, labels = cache.image_shape[0], cache.small_array("train_labels")
    shown = np.unique(np.linspace(0, len(cache.class_names) - 1, num_images).astype(int))
    rows = np.array([np.flatnonzero(labels == label)[0] for label in shown])
    images = np.empty((len(rows), cache.num_views * int(np.prod(cache.image_shape))), np.uint8)
    cache.read_images("train", rows, images)
    originals = images.reshape(len(rows), cache.num_views, *cache.image_shape)[:, 0]
    gap = 2
    sheet = np.full((len(rows) * (size + gap) - gap, NUM_VIEWS * (size + gap) - gap, 3), 255, np.uint8)
    for row, original in enumerate(originals):
        for view in range(NUM_VIEWS):
            y, x = row * (size + gap), view * (size + gap)
            sheet[y : y + size, x : x + size] = apply_view(original, view)
    picture = Image.fromarray(sheet)
    try:
        picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST).save(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--preview: cannot write {path} ({getattr(error, 'strerror', None) or error})") from error


def main(config) -> None:
    """Prepares the cache, verifies every byte of it, says what is in it and draws the preview."""
    cache, _ = with_cache(config, Cache.verify)
    counts = ", ".join(f"{cache.count(split)} {split}" for split in SPLITS)
    print(f"cache   {cache.folder}")
    print(f"images  {counts}; training set {cache.count('train') * NUM_VIEWS} views")
    print(f"classes {', '.join(cache.class_names)}")
    if flags.FLAGS.preview:
        draw_preview(cache, flags.FLAGS.preview)
        print(f"preview {flags.FLAGS.preview}")


if __name__ == "__main__":
    import model as models
    from largebatch.cli import run_script

    flags.DEFINE_string("preview", None, "Draw some training images with their 8 views to this PNG.")
    run_script(main, models.OPTIONS)
