"""Where images come from: TFDS, a zip, a folder of class folders, or a generator."""

import functools

from etils import epath

from largebatch.decoding import images
from largebatch.errors import UserError
from largebatch.paths import expanded
from largebatch.sources.download import download_eurosat, eurosat_path
from largebatch.sources.file_sets import FolderFiles, ZipFiles, open_set
from largebatch.sources.file_sources import class_source
from largebatch.sources.map_files import map_source
from largebatch.sources.scenes_source import PATTERNS, scenes_source
from largebatch.sources.scenes_source import VERSION as SCENES_VERSION
from largebatch.sources.source import Source, source_in_memory
from largebatch.sources.synthetic import CLASSES, synthetic, synthetic_labels
from largebatch.sources.tfds_source import is_readable, prepared_builder, tfds_dir, tfds_source

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
    """Finds and lists a data set without decoding it.

    Args:
      name: "eurosat", "synthetic", "scenes", a TFDS name, or what to call the images of a zip or folder.
      source: "tfds", "zip", "folder", "synthetic", or "auto" to tell from `name` and `path`.
      path: the zip, the folder of class folders or of masks and depths, or the TFDS data directory. EuroSAT
        needs none: a prepared TFDS set is used if there is one, else the zip is downloaded to `cache_dir`. Scenes
        stand on the images of a zip or folder.
      options: how images are decoded; a size is needed where they differ in it.
      tfds_split: which TFDS split (or "train+test") is read, to be split by us; None reads the published ones.
      num_examples, seed: of the synthetic set.
      max_image_pixels: above which an image is refused; its file may have 4 bytes for each.
      of_pixels: whether what is to be predicted is of each pixel, and not of the image.

    Raises:
      UserError: nothing there, or it is not what `source` says.
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
    """What a cache of this set has to be made anew for, beside the fields of the config: {} of images in files."""
    return {"scenes_version": SCENES_VERSION} if name in PATTERNS else {}


def source_of(fields, cache_dir: str, *, of_pixels: bool) -> Source:
    """Return the source of a config's `dataset`; see `find_source`."""
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

    They need not exist. There are none where images are made, and two where EuroSAT may be either of them.
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
    except (OSError, ValueError, RuntimeError, ImportError):  # of a bucket that cannot be reached
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
