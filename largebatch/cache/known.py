"""Which cache belongs to which settings, so that a start from a warm cache does not list the source.

A cache's folder is named by what the source holds. To know that, the source has to be listed, which takes long for
millions of files. So CACHE_DIR/.known/KEY.json notes the folder for the settings that it was found by, with the
stamp of the source (see `stamp_of`) before it was listed. Where the stamp is another now, it is listed again.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path

import jax
from etils import epath

from largebatch import untrusted
from largebatch.cache.cache import Cache, open_sound_cache
from largebatch.files import replacing
from largebatch.hosts import replicas
from largebatch.paths import expanded

FOLDER = ".known"
MAX_NOTE_BYTES = 2**16
# Fields of a config's `dataset` that shape no cache.
NOT_IN_KEY = ("max_image_pixels",)
PATHS = ("path", "split_file")


def request_of(fields: dict, split_file_digest: str | None = None) -> dict:
    """What the settings ask for: a config's `dataset`, with paths as they are from everywhere.

    Args:
      split_file_digest: of the content of the split file, if there is one.
    """
    request = {name: value for name, value in fields.items() if name not in NOT_IN_KEY}
    for name in PATHS:
        path = request.get(name)
        if path is not None and "://" not in path:
            request[name] = str(Path(expanded(path, f"dataset.{name}")).absolute())
    request["split_file_digest"] = split_file_digest
    request["TFDS_DATA_DIR"] = os.environ.get("TFDS_DATA_DIR")
    return request


def request_of_part(request: dict, virtual_shards: int | None) -> dict:
    """The same for the part that this host needs to train, where hosts share no file system.

    Args:
      virtual_shards: a config's batch.virtual_shards, by which images are dealt to devices.
    """
    devices = {"devices": jax.device_count(), "of_this_host": replicas.local_indices()}
    return {**request, **devices, "virtual_shards": virtual_shards}


def known_folder(cache_dir: epath.Path, request: dict) -> epath.Path | None:
    """The folder that was noted for a request, or None."""
    return _read_note(cache_dir, request)[0]


def known_cache(cache_dir: epath.Path, request: dict, stamp: str | None) -> Cache | None:
    """The sound cache that was noted for a request, or None.

    Args:
      stamp: of the source as it is now, which must be as noted; None takes any.
    """
    folder, noted_stamp = _read_note(cache_dir, request)
    return open_sound_cache(folder) if folder is not None and stamp in (None, noted_stamp) else None


def _read_note(cache_dir: epath.Path, request: dict) -> tuple[epath.Path | None, object]:
    """Return the folder and the stamp that were noted; notes of older code have no stamp."""
    try:
        with untrusted.open_any(_note_path(cache_dir, request)) as file:
            noted = json.loads(file.read(MAX_NOTE_BYTES))
        name, stamp = noted["folder"], noted.get("stamp")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or damaged: the source is listed
        return None, None
    if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
        return None, None
    return cache_dir / name, stamp


def note(cache_dir: epath.Path, request: dict, cache: Cache, stamp: str | None) -> None:
    """Notes the cache that a request was answered with, and the stamp of the source before it was listed."""
    path = _note_path(cache_dir, request)
    content = json.dumps({"folder": cache.folder.name, "stamp": stamp, "request": request}, indent=1)
    with contextlib.suppress(OSError):  # a folder that is read only: the next start lists the source again
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(content)


def _note_path(cache_dir: epath.Path, request: dict) -> epath.Path:
    key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir / FOLDER / f"{key}.json"
