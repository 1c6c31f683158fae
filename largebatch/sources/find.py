"""Where images come from: TFDS, a zip, a folder of class folders, or a generator."""

import functools

from etils import epath

from largebatch.decoding import images
from largebatch.errors import UserError
from largebatch.sources.download import download_eurosat
from largebatch.sources.file_sources import folder_source, zip_source
from largebatch.sources.source import Source, source_in_memory
from largebatch.sources.synthetic import CLASSES, synthetic, synthetic_labels
from largebatch.sources.tfds_source import is_readable, prepared_builder, tfds_source

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
) -> Source:
    """Finds and lists a data set without decoding it.

    Args:
      name: "eurosat", "synthetic", a TFDS name, or what to call the images of a zip or folder.
      source: "tfds", "zip", "folder", "synthetic", or "auto" to tell from `name` and `path`.
      path: the zip, the folder of class folders, or the TFDS data directory. EuroSAT needs none: a
        prepared TFDS set is used if there is one, else the zip is downloaded to `cache_dir`.
      options: how images are decoded; a size is needed where they differ in it.
      tfds_split: which TFDS split (or "train+test") is read, to be split by us; None reads the published ones.
      num_examples, seed: of the synthetic set.
      max_image_pixels: above which an image is refused; its file may have 4 bytes for each.

    Raises:
      UserError: nothing there, or it is not what `source` says.
    """
    if source == "auto":
        source = _guess_source(name, path)
    if source == "synthetic":
        return _synthetic_source(num_examples, seed, options)
    if source == "tfds":
        tfds_name = EUROSAT_TFDS_NAME if name == "eurosat" else name
        return tfds_source(tfds_name, path, tfds_split, options, max_image_pixels)
    if path is None:
        if name != "eurosat":
            raise UserError(f"dataset.path: not given; dataset.source {source!r} of {name!r} needs one")
        path = download_eurosat(epath.Path(cache_dir).expanduser())
    root = epath.Path(path).expanduser()
    if not root.exists():
        raise UserError(f"dataset.path: {path} does not exist")
    if source == "zip":
        return zip_source(root, options, max_image_pixels)
    return folder_source(root, options, max_image_pixels)


def _guess_source(name: str, path: str | None) -> str:
    if name == "eurosat" and path is None:
        # An unprepared or unreadable TFDS set is no reason not to download.
        builder = prepared_builder(EUROSAT_TFDS_NAME, None)
        return "tfds" if builder and is_readable(builder) else "zip"
    if path is None:
        return "synthetic" if name == "synthetic" else "tfds"
    root = epath.Path(path).expanduser()
    if not root.is_dir():
        return "zip"
    tfds_name = EUROSAT_TFDS_NAME if name == "eurosat" else name
    return "tfds" if (root / tfds_name.split(":")[0]).is_dir() else "folder"


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
