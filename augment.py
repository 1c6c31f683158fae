"""The offline step: load -> split -> expand -> cache on disk; and the views of an image on the devices.

    python augment.py --config configs/eurosat.py --config.dataset.path EuroSAT.zip
    python augment.py --config configs/eurosat.py --preview views.png
    python augment.py --config configs/scenes_tiny.py --export scenes

With V views (8, 2 or 1 by augment.views), example `i` of the training set is view `i % V` of original `i // V`.
Storage "expanded" keeps all views on the devices; "on_device" keeps the originals and makes the view when a
micro-batch is read; "streamed" does so with the images that the next steps visit.
"""

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from etils import epath
from ml_collections import config_dict

from largebatch.config import rules
from largebatch.config.dicts import RULES
from largebatch.config.fields import Config
from largebatch.data.cache import (
    Cache,
    DamagedCache,
    DatasetInfo,
    digest_of,
    discard_cache,
    manifests,
    open_cache,
    open_sound_cache,
)
from largebatch.data.cache_build import CachePlan, build_together
from largebatch.data.pictures import draw_preview, export
from largebatch.data.random_augment import RandomAugment
from largebatch.data.sources import scenes
from largebatch.data.sources.files import stamp_of
from largebatch.data.sources.find import find_dataset, places_of
from largebatch.data.sources.splits import SplitFile, assign_splits, read_split_file
from largebatch.hosts import collectives
from largebatch.tasks.kinds import KINDS
from largebatch.tasks.planes import PixelTargets
from largebatch.training.views import VIEW_COUNTS, apply_view, expand, inverse_view
from largebatch.util import BadSetting, UserError, expanded

T = TypeVar("T")

log = logging.getLogger("largebatch")


def check_data(config: Config, image_shape: tuple[int, int, int], targets: PixelTargets, description: str) -> None:
    """Raise BadSetting where a data set, of this `description`, does not go with `augment`, `eval` or `task`."""
    targets.check_task(config.task.name, description)
    height, width, _ = image_shape
    if config.augment.views == "all" and height != width:
        raise BadSetting(
            f"augment.views: 'all' with images of {width}x{height} pixels; allowed: flip | none, or "
            "dataset.image_size for square images"
        )
    RandomAugment.from_config(config.augment, mean=()).check(image_shape)
    shift, side = config.eval.shift_average, min(height, width)
    if shift >= side:
        raise BadSetting(f"eval.shift_average: {shift}; allowed: below {side}, the size of an image")


# ---- averages over views and shifts -----------------------------------------------------------------


def average_over_copies(
    logits_fn: Callable, *, num_views: int = 1, shift: int = 0, gives_maps: bool = False
) -> Callable:
    """Make a `logits_fn` of the mean logits of copies of an image (Krizhevsky et al. 2012, section 4.1).

    Copies are the image in its first `num_views` views. With a shift, these have half of the weight, and a quarter
    each have those of the image moved by `shift` pixels up and left, and down and right, with its edges reflected
    (Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", section 3.5).

    Args:
      logits_fn: (variables, images [M, H, W, C]) -> logits [M, num_classes], or dense [M, H, W, channels].
      gives_maps: whether logits are dense; those of a view are turned back before averaging. Excludes a shift.
    """
    weights = [0.5, 0.25, 0.25] if shift else [1.0]

    def averaged(variables, images):
        copies, (height, width) = [images], images.shape[1:3]
        if shift:
            padded = jnp.pad(images, ((0, 0), (shift, shift), (shift, shift), (0, 0)), mode="reflect")
            copies += [padded[:, 2 * shift :, 2 * shift :], padded[:, :height, :width]]
        views = [apply_view(copy, view) for copy in copies for view in range(num_views)]
        # The copies go through a loop, so that the network is compiled once.
        logits = jax.lax.map(lambda copy: logits_fn(variables, copy), jnp.stack(views))
        if gives_maps:
            logits = jnp.stack([apply_view(of_view, inverse_view(view)) for view, of_view in enumerate(logits)])
        weights_of_views = np.repeat(np.float32(weights) / num_views, num_views)
        return jnp.sum(logits * weights_of_views.reshape(-1, *[1] * (logits.ndim - 1)), axis=0)

    return averaged


# ---- the cache ----------------------------------------------------------------------------------------


class CacheRequest(NamedTuple):
    """The cache that a config asks for."""

    cache_dir: Path
    prefix: str  # first part of the cache folder's name; the stamp of the files follows
    places: list[epath.Path]  # folders and files that the data are read from
    split_file: SplitFile | None

    @classmethod
    def of(cls, config: Config) -> "CacheRequest":
        """Read what a config asks for.

        Raises:
          BadSetting: a path or the split file cannot be read.
        """
        fields, cache_dir = config.dataset, config.augment.cache_dir
        split_file = None if fields.split_file is None else read_split_file(fields.split_file)
        values = dataclasses.asdict(fields).items()
        settings = {name: value for name, value in values if RULES[f"dataset.{name}"].identity}
        for name in ("path", "split_file"):
            path = settings[name]
            if path is not None and "://" not in path:
                settings[name] = str(Path(expanded(path, f"dataset.{name}")).absolute())
        settings |= {
            "split_file_digest": split_file and split_file.digest,
            "tfds_data_dir": os.environ.get("TFDS_DATA_DIR"),
            "of_pixels": KINDS[config.task.name].of_pixels,
        }
        if fields.name in scenes.PATTERNS:
            settings["scenes_version"] = scenes.SCENES_VERSION
        if "://" in cache_dir:
            allowed = "a folder of this machine, or of a file system that all hosts mount"
            raise BadSetting(f"augment.cache_dir: {cache_dir}; allowed: {allowed}")
        readable = "".join(c if c.isalnum() else "_" for c in fields.name)
        prefix = f"{readable}-{digest_of(settings)[:12]}"
        return cls(Path(expanded(cache_dir, "augment.cache_dir")), prefix, places_of(fields, cache_dir), split_file)

    def folder(self, stamp: str | None) -> Path:
        """Return the folder of the cache of files with this stamp, see `sources.files.stamp_of`."""
        return self.cache_dir / f"{self.prefix}-{(stamp or 'unknown')[:12]}"

    def find(self) -> Cache | None:
        """Return the sound cache of the files as they are; where they cannot be read, the latest one."""
        stamp = stamp_of(self.places)
        if stamp is not None:
            return open_sound_cache(self.folder(stamp))
        latest = self.latest()
        cache = latest and open_sound_cache(latest)
        if cache is not None:
            where, built = " and ".join(map(str, self.places)), cache.manifest["built"]
            log.warning("dataset: %s cannot be read; takes the cache %s of %s", where, cache.folder, built)
        return cache

    def latest(self) -> Path | None:
        """Return the folder of the cache that was built last, whatever the files were."""
        built = {folder: manifest["built"] for folder, manifest in manifests(self.cache_dir, f"{self.prefix}-*")}
        return max(built, key=built.get, default=None)


def prepare_cache(config: Config) -> Cache:
    """Return the cache of `config`, built where it is missing, damaged or of other files. Collective.

    Raises:
      UserError: on every host, if the data set is bad or missing on any of them, or differs between them.
    """
    request, cache = _find_cache(config)
    if not _on_all_hosts(cache):
        plan = _plan_on_hosts(config, request, missing=cache is None)
        build_together(plan)
        cache = collectives.agreed(lambda: _open_built(plan.folder), plan is not None) or cache
    content = json.dumps([cache.identity(), cache.manifest["counts"]], sort_keys=True)
    if len(set(collectives.gather_text(content))) > 1:
        raise UserError(f"dataset: hosts hold different data under {config.dataset.path or config.dataset.name!r}")
    return cache


def plan_cache(config: Config) -> CachePlan | None:
    """Plan the cache of `config`, without building it; None where all hosts have it. Collective.

    Raises:
      UserError: on every host, if the data set is bad or missing on any of them.
    """
    request, cache = _find_cache(config)
    return None if _on_all_hosts(cache) else _plan_on_hosts(config, request, missing=True)


def with_cache(config: Config, use: Callable[[Cache], T]) -> T:
    """Return `use(cache)` of the cache of `config`; if it finds damage, build the cache again and try once more.

    Collective: all hosts call it, and all try again if any of them finds damage.

    Raises:
      UserError: on every host, if the fresh cache is damaged too; what `prepare_cache` raises.
    """
    for is_last in (False, True):
        cache, result, error = prepare_cache(config), None, None
        try:
            result = use(cache)
        except DamagedCache as damage:
            error = damage
        damages = [text for text in collectives.gather_text(str(error or "")) if text]
        if not damages:
            break
        if is_last:
            raise UserError(f"augment.cache_dir: damaged again right after it was built: {damages[0]}") from error
        collectives.agreed(functools.partial(discard_cache, cache, error), error is not None)
    return result


def _find_cache(config: Config) -> tuple[CacheRequest, Cache | None]:
    """Return what a config asks for, and the cache if this host has it. Collective."""
    request = collectives.agreed(lambda: CacheRequest.of(config))
    return request, collectives.agreed(request.find)


def _on_all_hosts(cache: Cache | None) -> bool:
    """Return True if no host lacks the cache. Collective."""
    return "none" not in collectives.gather_text("none" if cache is None else "there")


def _plan_on_hosts(config: Config, request: CacheRequest, *, missing: bool) -> CachePlan | None:
    """Plan the cache on the hosts where it is missing, on host 0 first, for it may download the set."""
    is_primary = collectives.is_primary()
    plan = functools.partial(_plan, config, request)
    of_primary = collectives.agreed(plan, missing and is_primary)
    return collectives.agreed(plan, missing and not is_primary) or of_primary


def _plan(config: Config, request: CacheRequest) -> CachePlan:
    """List the data set, and check it before hours of work."""
    stamp = stamp_of(request.places)
    dataset = find_dataset(config.dataset, config.augment.cache_dir, of_pixels=KINDS[config.task.name].of_pixels)
    splits = assign_splits(
        dataset.ids,
        dataset.labels,
        dataset.class_names,
        published=dataset.splits,
        choice=config.dataset.splits,
        seed=config.dataset.split_seed,
        split_file=request.split_file,
    )
    before = request.latest()
    if before not in (None, request.folder(stamp)):
        log.warning("dataset: %s changed since %s was made", dataset.description, before)
    if config.dataset.path is None:  # it may have been downloaded just now
        stamp = stamp_of(request.places)
    plan = CachePlan.of(request.folder(stamp), dataset, splits)
    *size, channels = plan.layout.image_shape
    check_data(config, (*size, channels - dataset.targets.planes), dataset.targets, dataset.description)
    return plan


def _open_built(folder: Path) -> Cache:
    try:
        return open_cache(folder)
    except DamagedCache as damage:  # another process removed it, or a network file system is late
        raise UserError(f"augment.cache_dir: {damage}, right after it was built; start again") from damage


# ---- the command ------------------------------------------------------------------------------------


def main(config: config_dict.ConfigDict) -> None:
    """Prepare the cache, verify every byte of it, say what is in it, and draw or export what is asked for."""
    import model as models

    config = rules.check(config.to_dict(), models.MODELS)
    cache = with_cache(config, Cache.verify)
    train, test = cache.split("train"), cache.split("test")
    check_data(config, DatasetInfo.of(cache).image_shape, cache.targets, f"dataset {config.dataset.name!r}")
    num_views = VIEW_COUNTS[config.augment.views]
    counts = ", ".join(f"{count} {split}" for split, count in cache.layout.counts.items())
    print(f"cache   {cache.folder}")
    print(f"images  {counts}; training set {len(train.ids) * num_views} views")
    print(f"classes {', '.join(cache.targets.classes or train.class_names)}")
    if flags.FLAGS.preview:
        draw_preview(train, functools.partial(expand, num_views=num_views), flags.FLAGS.preview)
        print(f"preview {flags.FLAGS.preview}")
    if flags.FLAGS.export:
        print(f"export  {export(test, flags.FLAGS.export)} test images in {flags.FLAGS.export}")


if __name__ == "__main__":
    import model as models
    from largebatch.cli import path_flag, run_script

    path_flag("preview", None, "Draw some training images with their views to this PNG.")
    path_flag("export", None, "Write the test images of a set of masks as PNG files to this folder.")
    run_script(main, models.MODELS)
