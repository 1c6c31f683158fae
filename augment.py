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
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from etils import epath
from ml_collections import config_dict

from largebatch.cache import known
from largebatch.cache.build import build_together, hosts_sharing
from largebatch.cache.cache import Cache, DamagedCache, cache_key, discard_cache, open_cache, open_sound_cache
from largebatch.cache.estimate import BuildEstimate, estimate_build
from largebatch.cache.plan import CachePlan, plan_layout
from largebatch.config import rules
from largebatch.config.dicts import RULES
from largebatch.config.fields import Config
from largebatch.data.batching import choose_sharding
from largebatch.data.pictures import draw_preview, export
from largebatch.data.placement import originals_of_hosts
from largebatch.data.random_augment import RandomAugment
from largebatch.hosts import collectives
from largebatch.sources.find import places_of, source_of, version_of
from largebatch.sources.source import stamp_of
from largebatch.sources.split import SPLITS, SplitFile, assign_splits, read_split_file
from largebatch.tasks.kinds import KINDS
from largebatch.tasks.planes import PixelTargets
from largebatch.training.views import VIEW_COUNTS, apply_view, expand, inverse_view
from largebatch.util import BadSetting, UserError, expanded

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
        moved = [images, *_moved_both_ways(images, shift)] if shift else [images]
        views = [apply_view(copy, view) for copy in moved for view in range(num_views)]
        # The copies go through a loop, so that the network is compiled once.
        logits = jax.lax.map(lambda copy: logits_fn(variables, copy), jnp.stack(views))
        if gives_maps:
            logits = jnp.stack([apply_view(of_view, inverse_view(view)) for view, of_view in enumerate(logits)])
        weights_of_views = np.repeat(np.float32(weights) / num_views, num_views)
        return jnp.sum(logits * weights_of_views.reshape(-1, *[1] * (logits.ndim - 1)), axis=0)

    return averaged


def _moved_both_ways(images: jax.Array, pixels: int) -> list[jax.Array]:
    """Move images [M, H, W, C] up and left, and down and right; edges are reflected."""
    height, width = images.shape[1:3]
    padded = jnp.pad(images, ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)), mode="reflect")
    return [padded[:, 2 * pixels :, 2 * pixels :], padded[:, :height, :width]]


# ---- the cache ----------------------------------------------------------------------------------------


def prepare_cache(config: Config, *, look_at_source: bool | None = None, to_train: bool = False) -> Cache:
    """Return the cache of `config`, built where it is missing, damaged or of other files. Collective.

    Args:
      to_train: hosts that share no file system need the training images of their own devices alone.
      look_at_source: whether to list the source where its cache is known; None if files changed on any host.
    Raises:
      UserError: on every host, if the data set is bad or missing on any of them, or differs between them.
    """
    cache_dir, places = collectives.agreed(lambda: _places(config))
    request, split_file = _request(config)
    requests = [request, known.request_of_part(request, config.batch.virtual_shards)] if to_train else [request]
    cache, stamp = None, None if look_at_source is False else stamp_of(places)
    for asked in requests:
        if cache is None and not look_at_source:
            cache = _known_on_all(config, cache_dir, asked, stamp)
    if cache is None:
        cache = _list_and_build(config, cache_dir, requests, split_file, stamp)
    elif stamp is None and look_at_source is None:
        where, built = " and ".join(map(str, places)), cache.manifest["built"]
        log.warning("dataset: %s cannot be read; takes the cache %s of %s", where, cache.folder, built)
    content = [cache.identity(), cache.manifest["counts"]]
    if len(set(collectives.gather_text(json.dumps(content, sort_keys=True)))) > 1:
        raise UserError(f"dataset: hosts hold different data under {config.dataset.path or config.dataset.name!r}")
    return cache


def _places(config: Config) -> tuple[epath.Path, list[epath.Path]]:
    """Return the folder of caches, and the folders and files that the data are read from."""
    cache_dir = epath.Path(expanded(config.augment.cache_dir, "augment.cache_dir"))
    return cache_dir, places_of(config.dataset, config.augment.cache_dir)


def _request(config: Config) -> tuple[dict, SplitFile | None]:
    """Return the request of a config (see `known`), and its split file, read on every host."""
    path = config.dataset.split_file
    split_file = collectives.agreed(lambda: None if path is None else read_split_file(path))
    digest = None if split_file is None else split_file.digest
    fields = dataclasses.asdict(config.dataset)
    asked = {name: value for name, value in fields.items() if RULES[f"dataset.{name}"].identity}
    asked |= version_of(config.dataset.name)
    if KINDS[config.task.name].of_pixels:
        asked["targets"] = "of pixels"
    return known.request_of(asked, digest), split_file


def _known_on_all(config, cache_dir: epath.Path, request: dict, stamp: str | None) -> Cache | None:
    """Return the cache noted for a request; None on every host, if one has none or other files."""
    cache = collectives.agreed(lambda: _named_errors(config, lambda: known.known_cache(cache_dir, request, stamp)))
    return None if _missing_somewhere(cache) else cache


def _missing_somewhere(cache: Cache | None) -> bool:
    return "none" in collectives.gather_text("none" if cache is None else "there")


def _list_and_build(
    config, cache_dir: epath.Path, requests: list[dict], split_file: SplitFile | None, stamp: str | None
) -> Cache:
    """List the source and open its cache, which is built on the hosts where there is none.

    Args:
      requests: for the whole cache, and for this host's part, if that serves.
      stamp: stamp of the source before it is listed.
    """
    plan, request = _find_plan(config, cache_dir, split_file), requests[0]
    cache = collectives.agreed(lambda: open_sound_cache(plan.folder))
    sharing = hosts_sharing(cache_dir) if _missing_somewhere(cache) else []
    all_share = len(sharing) in (0, jax.process_count())
    if len(requests) > 1 and "apart" in collectives.gather_text("together" if all_share else "apart"):
        num_originals = len(plan.splits["train"])
        sharding = choose_sharding(config.batch.virtual_shards, num_originals, jax.device_count(), views=1)
        plan = plan.part(originals_of_hosts(sharding, sharing, config.dataset.split_seed))
        cache, request = collectives.agreed(lambda: open_sound_cache(plan.folder)), requests[1]
    before = known.known_folder(cache_dir, request)
    if before is not None and before != plan.folder:
        log.warning("dataset: %s changed since %s was made", plan.source.description, before)
    if sharing:
        source, shape = plan.source, plan_layout(plan).image_shape
        # This check comes before hours of work.
        collectives.agreed(lambda: check_data(config, shape, source.targets, source.description))
        build_together(plan, sharing, missing=cache is None)
        cache = collectives.agreed(functools.partial(_open_built, plan.folder), cache is None) or cache
    known.note(cache_dir, request, cache, stamp)
    return cache


def estimate_cache(config: Config) -> BuildEstimate | None:
    """Estimate from a sample what building the cache of `config` takes; None where all hosts have it. Collective.

    Raises:
      UserError: on every host, if the data set is bad or missing on any of them.
    """
    cache_dir, places = collectives.agreed(lambda: _places(config))
    request, split_file = _request(config)
    of_part = known.request_of_part(request, config.batch.virtual_shards)
    stamp = stamp_of(places)
    if any(_known_on_all(config, cache_dir, asked, stamp) for asked in (request, of_part)):
        return None
    plan = _find_plan(config, cache_dir, split_file)
    return collectives.agreed(lambda: estimate_build(plan))


def _open_built(folder: epath.Path) -> Cache:
    try:
        return open_cache(folder)
    except DamagedCache as damage:  # another process removed it, or a network file system is late
        raise UserError(f"augment.cache_dir: {damage}, right after it was built; start again") from damage


def _named_errors(config, act: Callable):
    try:
        return act()
    except ImportError as error:  # the package of a file system, as gs://
        raise UserError(f"augment.cache_dir: {config.augment.cache_dir} needs a package ({error})") from error


def _find_plan(config, cache_dir: epath.Path, split_file: SplitFile | None) -> CachePlan:
    """List the source on every host."""
    is_primary = collectives.is_primary()
    find = functools.partial(_named_errors, config, functools.partial(_plan_cache, config, cache_dir, split_file))
    of_primary = collectives.agreed(find, is_primary)  # first, for it may download the set
    of_other = collectives.agreed(find, not is_primary)
    return of_primary if is_primary else of_other


def _plan_cache(config, cache_dir: epath.Path, split_file: SplitFile | None) -> CachePlan:
    fields = config.dataset
    source = source_of(fields, config.augment.cache_dir, of_pixels=KINDS[config.task.name].of_pixels)
    splits = assign_splits(
        source.ids,
        source.labels,
        source.class_names,
        published=source.splits,
        choice=fields.splits,
        seed=fields.split_seed,
        split_file=split_file,
    )
    name = "".join(c if c.isalnum() else "_" for c in fields.name)
    return CachePlan(cache_dir / f"{name}-{cache_key(source, splits)}", source, splits)


class CacheAttempt:
    """A single try at reading the cache; see `cache_attempts`."""

    def __init__(self, config, *, is_last: bool, **options: bool | None):
        self._is_last = is_last
        self._cache = prepare_cache(config, **options)
        self.succeeded = False

    def __enter__(self) -> Cache:
        return self._cache

    def __exit__(self, kind, error, traceback) -> bool:
        if error is not None and not isinstance(error, DamagedCache):
            return False
        damages = [text for text in collectives.gather_text(str(error or "")) if text]
        if damages and self._is_last:
            raise UserError(f"augment.cache_dir: damaged again right after it was built: {damages[0]}") from error
        if damages:
            discard = functools.partial(discard_cache, self._cache.folder, self._cache.manifest_bytes, error)
            collectives.agreed(discard, error is not None)
        self.succeeded = not damages
        return True


def cache_attempts(
    config: Config, *, look_at_source: bool | None = None, to_train: bool = False
) -> Iterator[CacheAttempt]:
    """Yield the cache of `config`, to be read within a `with`; rebuild it for one more try where it is damaged.

        for attempt in cache_attempts(config):
            with attempt as cache:
                ...

    All hosts do this, and all try again if any of them finds damage.

    Args:
      look_at_source, to_train: see `prepare_cache`.
    Raises:
      UserError: on every host, if the fresh cache is damaged too; what `prepare_cache` raises.
    """
    for is_last in (False, True):
        attempt = CacheAttempt(config, is_last=is_last, look_at_source=look_at_source, to_train=to_train)
        yield attempt
        if attempt.succeeded:
            return


# ---- the command ------------------------------------------------------------------------------------


def main(config: config_dict.ConfigDict) -> None:
    """Prepare the cache, verify every byte of it, say what is in it, and draw or export what is asked for."""
    import model as models

    config = rules.check(config.to_dict(), models.MODELS)
    for attempt in cache_attempts(config, look_at_source=True):
        with attempt as cache:
            cache.verify()
    check_data(config, cache.image_shape, cache.targets, f"dataset {config.dataset.name!r}")
    num_views = VIEW_COUNTS[config.augment.views]
    counts = ", ".join(f"{cache.count(split)} {split}" for split in SPLITS)
    print(f"cache   {cache.folder}")
    print(f"images  {counts}; training set {cache.count('train') * num_views} views")
    print(f"classes {', '.join(cache.targets.classes or cache.class_names)}")
    if flags.FLAGS.preview:
        draw_preview(cache, functools.partial(expand, num_views=num_views), flags.FLAGS.preview)
        print(f"preview {flags.FLAGS.preview}")
    if flags.FLAGS.export:
        print(f"export  {export(cache, 'test', flags.FLAGS.export)} test images in {flags.FLAGS.export}")


if __name__ == "__main__":
    import model as models
    from largebatch.cli import path_flag, run_script

    path_flag("preview", None, "Draw some training images with their views to this PNG.")
    path_flag("export", None, "Write the test images of a set of masks as PNG files to this folder.")
    run_script(main, models.MODELS)
