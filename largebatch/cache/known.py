"""Lookup of existing caches: by the settings of a request, and by the data that a run recorded."""

import contextlib
import hashlib
import json
import logging
import os
from pathlib import Path

import jax
import numpy as np
from etils import epath

from largebatch import untrusted
from largebatch.cache.cache import Cache, DamagedCache, open_cache, open_sound_cache
from largebatch.decoding.images import Dataset
from largebatch.hosts import collectives, replicas
from largebatch.util import BadSetting, expanded, replacing

log = logging.getLogger("largebatch")

FOLDER = ".known"
MAX_NOTE_BYTES = 2**16
PATHS = ("path", "split_file")


def request_of(fields: dict, split_file_digest: str | None = None) -> dict:
    """Return the settings that identify a cache, with absolute paths.

    Args:
      fields: fields of a config's `dataset` that shape a cache.
      split_file_digest: digest of the content of the split file, if there is one.
    """
    request = dict(fields)
    for name in PATHS:
        path = request.get(name)
        if path is not None and "://" not in path:
            request[name] = str(Path(expanded(path, f"dataset.{name}")).absolute())
    request["split_file_digest"] = split_file_digest
    request["TFDS_DATA_DIR"] = os.environ.get("TFDS_DATA_DIR")
    return request


def request_of_part(request: dict, virtual_shards: int | None) -> dict:
    """Return the request for the part of a cache that this host trains on, where hosts share no file system.

    Args:
      virtual_shards: a config's batch.virtual_shards, by which images are sharded over devices.
    """
    devices = {"devices": jax.device_count(), "of_this_host": replicas.local_indices()}
    return {**request, **devices, "virtual_shards": virtual_shards}


def known_folder(cache_dir: epath.Path, request: dict) -> epath.Path | None:
    """Return the folder that was noted for a request, or None."""
    return _read_note(cache_dir, request)[0]


def known_cache(cache_dir: epath.Path, request: dict, stamp: str | None) -> Cache | None:
    """Return the sound cache that was noted for a request, or None.

    Args:
      stamp: stamp of the source as it is now, which must be as noted; None accepts any.
    """
    folder, noted_stamp = _read_note(cache_dir, request)
    return open_sound_cache(folder) if folder is not None and stamp in (None, noted_stamp) else None


def _read_note(cache_dir: epath.Path, request: dict) -> tuple[epath.Path | None, object]:
    """Return the folder and the stamp that were noted; notes of older code have no stamp."""
    try:
        with untrusted.open_any(_note_path(cache_dir, request)) as file:
            noted = json.loads(file.read(MAX_NOTE_BYTES))
        name, stamp = noted["folder"], noted.get("stamp")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no sound note: the source is listed
        return None, None
    if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
        return None, None
    return cache_dir / name, stamp


def note(cache_dir: epath.Path, request: dict, cache: Cache, stamp: str | None) -> None:
    """Record the cache that answers a request, and the stamp of the source before it was listed."""
    path = _note_path(cache_dir, request)
    content = json.dumps({"folder": cache.folder.name, "stamp": stamp, "request": request}, indent=1)
    with contextlib.suppress(OSError):  # a read-only folder: the next start lists the source again
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(content)


def _note_path(cache_dir: epath.Path, request: dict) -> epath.Path:
    key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir / FOLDER / f"{key}.json"


def find_split(cache_dir: str, split: str, recorded: dict) -> Dataset | None:
    """Read a split of exactly the data of `recorded` (see `Cache.identity`) from a sound cache in `cache_dir`.

    Nothing in `cache_dir` changes. The result is None on every host if one of them has no such cache.
    """
    dataset = None
    try:
        cache = find_cache(cache_dir, split, recorded)
        if cache:
            dataset = read_split(cache, split)
    except DamagedCache as damage:
        log.warning("damaged cache: %s", damage)
    except (OSError, ValueError, ImportError, BadSetting):  # nothing that this host can read, or no path
        pass
    on_every_host = all(map(json.loads, collectives.gather_text(json.dumps(dataset is not None))))
    return dataset if on_every_host else None


def find_cache(cache_dir: str, split: str, recorded: dict) -> Cache | None:
    """Return the first cache in `cache_dir` with a split of exactly the data of `recorded`; skip damaged ones."""
    for manifest in sorted(epath.Path(expanded(cache_dir)).glob("[!.]*/manifest.json")):
        try:
            cache = open_cache(manifest.parent)
        except DamagedCache:  # its user will report it
            continue
        if cache.is_part and split == "train":
            continue
        identity = cache.identity()
        recorded_too = identity.keys() & recorded.keys()  # older code had no digest of the pixels alone
        if "ids" in recorded_too and all(recorded[name] == identity[name] for name in recorded_too):
            return cache
    return None


def read_split(cache: Cache, split: str) -> Dataset:
    """Read the images and labels of a split.

    Raises:
      DamagedCache: an image, label or id differs from what was written.
    """
    pixels = cache.read_rows(split, np.arange(cache.count(split)))
    labels, ids = cache.small_array(f"{split}_labels"), cache.small_array(f"{split}_ids")
    return Dataset(pixels.reshape(-1, *cache.image_shape), labels, cache.class_names, ids.tolist())
