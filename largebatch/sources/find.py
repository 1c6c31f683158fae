"""Lookup of the source that a config names; EuroSAT is downloaded where no path is given."""

import functools
import hashlib
import http.client
import urllib.request

from etils import epath

from largebatch.decoding import images
from largebatch.sources.file_sets import FolderFiles, ZipFiles, class_source, open_set
from largebatch.sources.map_folders import map_source
from largebatch.sources.source import Source, source_in_memory
from largebatch.sources.synthetic import (
    CLASSES,
    PATTERNS,
    SCENES_VERSION,
    scenes_source,
    synthetic,
    synthetic_labels,
)
from largebatch.sources.tfds_source import is_readable, prepared_builder, tfds_dir, tfds_source
from largebatch.util import UserError, expanded, remove_stale, replacing

# The 27,000 RGB JPEGs of Helber et al. 2019, tried in this order. The first is the authors' record, the
# second torchvision's pinned copy of the original archive, whose SHA-256 is also the one TFDS checks.
EUROSAT_MIRRORS = (
    (
        "https://zenodo.org/records/7711810/files/EuroSAT_RGB.zip",
        "b4f5b234ecb7d7ff9c6cddb046543b4717c53fd6e9815be6c0e80cc614f51b90",
    ),
    (
        "https://huggingface.co/datasets/torchgeo/eurosat/resolve/c877bcd43f099cd0196738f714544e355477f3fd/EuroSAT.zip",
        "8ebea626349354c5328b142b96d0430e647051f26efc2dc974c843f25ecf70bd",
    ),
)


def eurosat_path(cache_dir: epath.Path) -> epath.Path:
    """Return the path of the EuroSAT zip after its download."""
    return cache_dir / "EuroSAT.zip"


def download_eurosat(cache_dir: epath.Path) -> epath.Path:
    """Return the path of the official zip in `cache_dir`; download it and check its SHA-256 if it is missing."""
    target = eurosat_path(cache_dir)
    if target.exists():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        remove_stale(target)
        with replacing(target) as part:
            part.touch()
            _download_from_a_mirror(part)
    except OSError as error:
        raise UserError(f"augment.cache_dir: cannot write {target} ({error.strerror or error})") from error
    return target


def _download_from_a_mirror(part: epath.Path) -> None:
    """Download the zip from the first mirror that works; raise UserError if none has it with its SHA-256."""
    problems = []
    for url, sha256 in EUROSAT_MIRRORS:
        try:
            sha256_of_file = _download(url, part)
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            problems.append(f"{url} cannot be fetched ({getattr(error, 'reason', error)})")
            continue
        if sha256_of_file == sha256:
            return
        problems.append(f"{url} has SHA-256 {sha256_of_file}, expected {sha256}")
    raise UserError(
        f"dataset.path: not given, and EuroSAT could not be downloaded: {'; '.join(problems)}. "
        "Give the path of EuroSAT.zip or of its unpacked folder"
    )


def _download(url: str, target: epath.Path) -> str:
    """Download with a progress bar; return the SHA-256 of the received bytes."""
    from rich import progress

    digest = hashlib.sha256()
    columns = (
        progress.TextColumn("downloading {task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
    )
    with (
        urllib.request.urlopen(url, timeout=30) as response,
        target.open("wb") as file,
        progress.Progress(*columns) as bar,
    ):
        task = bar.add_task(url, total=int(response.headers.get("Content-Length", 0)) or None)
        while block := response.read(1 << 20):
            file.write(block)
            digest.update(block)
            bar.advance(task, len(block))
    return digest.hexdigest()


EUROSAT_TFDS_NAME = "eurosat/rgb"
DEFAULT_SIZE = 32  # pixels, of synthetic images


def find_source(
    name: str,
    source: str = "auto",
    path: str | None = None,
    *,
    options: images.DecodeOptions = images.AS_THEY_ARE,
    tfds_split: str | None = None,
    num_examples: int = 960,
    seed: int = 0,
    cache_dir: str = "~/.cache/largebatch",
    max_image_pixels: int = images.MAX_IMAGE_PIXELS,
    of_pixels: bool = False,
) -> Source:
    """Find and list a data set without decoding it.

    Args:
      name: "eurosat", "synthetic", "scenes", a TFDS name, or any name for the images of a zip or folder.
      source: "tfds", "zip", "folder", "synthetic", or "auto" to tell from `name` and `path`.
      path: the zip, the folder of class folders or of masks and depths, or the TFDS data directory. EuroSAT
        needs none: a prepared TFDS set is used if there is one, else the zip is downloaded to `cache_dir`. Scenes
        stand on the images of a zip or folder.
      options: how images are decoded; a size is needed where images differ in it.
      tfds_split: the TFDS split (or "train+test") to read before our own split; None reads the published ones.
      num_examples, seed: number of images and seed of the synthetic set.
      max_image_pixels: most pixels of an image; a file may have 4 bytes for each.
      of_pixels: True for dense targets, False for one target per image.

    Raises:
      UserError: nothing there, or it is not of the kind of `source`.
    """
    if name in PATTERNS:
        if source not in ("auto", "synthetic"):
            raise UserError(f"dataset.source: {source!r}; allowed: auto | synthetic with {name!r}")
        as_colours = images.DecodeOptions(channels=3)
        ground = class_source(open_set(path, "dataset.path"), as_colours, max_image_pixels) if path else None
        return scenes_source(name, num_examples, seed, options, ground)
    if source == "auto":
        source = _guess_source(name, path)
    if source == "synthetic":
        return _synthetic_source(num_examples, seed, options)
    if source == "tfds":
        return tfds_source(_tfds_name(name), path, tfds_split, options, max_image_pixels)
    if path is None:
        if name != "eurosat":
            raise UserError(f"dataset.path: not given; dataset.source {source!r} of {name!r} needs one")
        path = download_eurosat(epath.Path(expanded(cache_dir, "augment.cache_dir")))
    root = epath.Path(expanded(path, "dataset.path"))
    if not root.exists():
        raise UserError(f"dataset.path: {path} does not exist")
    files = ZipFiles(root, "dataset.path") if source == "zip" else _folder(root)
    make_source = map_source if of_pixels else class_source
    return make_source(files, options, max_image_pixels)


def version_of(name: str) -> dict[str, int]:
    """Return the versions of the code that makes a set, which invalidate its caches: {} for images in files."""
    return {"scenes_version": SCENES_VERSION} if name in PATTERNS else {}


def source_of(fields, cache_dir: str, *, of_pixels: bool) -> Source:
    """Return the source of a config's `dataset`, found by `find_source`."""
    return find_source(
        fields.name,
        fields.source,
        fields.path,
        options=images.DecodeOptions.from_config(fields),
        tfds_split=fields.tfds_split,
        num_examples=fields.num_examples,
        seed=fields.split_seed,
        cache_dir=cache_dir,
        max_image_pixels=fields.max_image_pixels,
        of_pixels=of_pixels,
    )


def places_of(fields, cache_dir: str) -> list[epath.Path]:
    """Return the folders and files that `source_of` would read.

    They need not exist. There are none where images are generated, and two where EuroSAT may be either of them.
    """
    name, source, path = fields.name, fields.source, fields.path
    given = [] if path is None else [epath.Path(expanded(path, "dataset.path"))]
    if name in PATTERNS:
        return given
    if source == "synthetic" or (name == "synthetic" and path is None):
        return []
    prepared = epath.Path(expanded(tfds_dir(path), "dataset.path")) / _tfds_name(name).split(":")[0]
    if given and (source in ("zip", "folder") or (source == "auto" and not _is_there(prepared))):
        return given
    places = [prepared]
    if name == "eurosat" and not given and source != "tfds":
        places.append(eurosat_path(epath.Path(expanded(cache_dir, "augment.cache_dir"))))
    return places


def _is_there(folder: epath.Path) -> bool:
    try:
        return folder.is_dir()
    except (OSError, ValueError, RuntimeError, ImportError):  # a bucket that cannot be reached
        return False


def _tfds_name(name: str) -> str:
    return EUROSAT_TFDS_NAME if name == "eurosat" else name


def _folder(path: epath.Path) -> FolderFiles:
    if not path.is_dir():
        raise UserError(f"dataset.path: {path} is not a folder; dataset.source 'folder' needs one")
    return FolderFiles(path, "dataset.path")


def _guess_source(name: str, path: str | None) -> str:
    if name == "eurosat" and path is None:
        # An unprepared or unreadable TFDS set is no reason not to download.
        builder = prepared_builder(EUROSAT_TFDS_NAME, None)
        return "tfds" if builder and is_readable(builder) else "zip"
    if path is None:
        return "synthetic" if name == "synthetic" else "tfds"
    root = epath.Path(expanded(path, "dataset.path"))
    if not root.is_dir():
        return "zip"
    return "tfds" if (root / _tfds_name(name).split(":")[0]).is_dir() else "folder"


def _synthetic_source(num_examples: int, seed: int, options: images.DecodeOptions) -> Source:
    height, width = options.size or (DEFAULT_SIZE, DEFAULT_SIZE)
    if options.channels not in (None, 3):
        raise UserError(f"dataset.channels: {options.channels}; allowed: 3 with synthetic images")

    @functools.cache
    def pixels():
        return synthetic(num_examples, max(height, width), seed)[:, :height, :width]

    return source_in_memory(
        description=f"synthetic ({num_examples} images, seed {seed})",
        fingerprint=f"synthetic-1 {num_examples} {height}x{width} {seed}",
        ids=[f"{number:06d}" for number in range(num_examples)],
        labels=synthetic_labels(num_examples),
        class_names=list(CLASSES),
        pixels=pixels,
    )
