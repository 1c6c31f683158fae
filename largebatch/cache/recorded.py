"""The data that a run was trained on, found again in the caches of a folder."""

import json
import logging

import numpy as np
from etils import epath

from largebatch.cache.cache import Cache, DamagedCache, open_cache
from largebatch.decoding.images import Dataset
from largebatch.errors import BadSetting
from largebatch.hosts import collectives
from largebatch.paths import expanded

log = logging.getLogger("largebatch")


def find_split(cache_dir: str, split: str, recorded: dict) -> Dataset | None:
    """A split of just the data of `recorded` (see `Cache.identity`), from a sound cache in `cache_dir`.

    Changes nothing there. None on every host, if one of them has no such cache.
    """
    dataset = None
    try:
        cache = find_cache(cache_dir, split, recorded)
        if cache:
            dataset = read_split(cache, split)
    except DamagedCache as damage:
        log.warning("damaged cache: %s", damage)
    except (OSError, ValueError, ImportError, BadSetting):  # nothing there that this host can read, or no path
        pass
    on_every_host = all(map(json.loads, collectives.gather_text(json.dumps(dataset is not None))))
    return dataset if on_every_host else None


def find_cache(cache_dir: str, split: str, recorded: dict) -> Cache | None:
    """The first cache in `cache_dir` with a split of just the data of `recorded`; others there may be damaged."""
    for manifest in sorted(epath.Path(expanded(cache_dir)).glob("[!.]*/manifest.json")):
        try:
            cache = open_cache(manifest.parent)
        except DamagedCache:  # of some data set; who needs it will say so
            continue
        if cache.is_part and split == "train":
            continue
        identity = cache.identity()
        recorded_too = identity.keys() & recorded.keys()  # older code had no digest of the pixels alone
        if "ids" in recorded_too and all(recorded[name] == identity[name] for name in recorded_too):
            return cache
    return None


def read_split(cache: Cache, split: str) -> Dataset:
    """Images and labels of a split.

    Raises:
      DamagedCache: they are not what was written.
    """
    pixels = cache.read_rows(split, np.arange(cache.count(split)))
    labels, ids = cache.small_array(f"{split}_labels"), cache.small_array(f"{split}_ids")
    return Dataset(pixels.reshape(-1, *cache.image_shape), labels, cache.class_names, ids.tolist())
