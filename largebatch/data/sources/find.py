"""Lookup of the data set that a config names; EuroSAT is downloaded where no path is given."""

import dataclasses
import hashlib
import http.client
import logging
import re
import urllib.request

import numpy as np
from etils import epath

from largebatch.config.fields import DatasetConfig
from largebatch.data.cache import DatasetInfo, RowLayout
from largebatch.data.dataset import Dataset
from largebatch.data.decode import DecodeOptions
from largebatch.data.sources.class_folders import class_folders
from largebatch.data.sources.files import open_files
from largebatch.data.sources.maps import maps
from largebatch.data.sources.scenes import PATTERNS, scenes_dataset
from largebatch.data.sources.splits import (
    NO_PUBLISHED_SPLITS,
    complete_sizes,
    read_split_file,
    split_named,
)
from largebatch.data.sources.synthetic import synthetic_dataset
from largebatch.data.sources.tfds_source import FORMAT, file_format, prepared_builder, tfds_dataset, tfds_dir
from largebatch.util import BadSetting, UserError, expanded, remove_stale, replacing, writing

log = logging.getLogger("largebatch")

EUROSAT_TFDS_NAME = "eurosat/rgb"


def find_dataset(fields: DatasetConfig, cache_dir: str, *, of_pixels: bool) -> Dataset:
    """Find and list a data set. No image is decoded yet; synthetic images are made.

    EuroSAT needs no path: a prepared TFDS set is used if there is one, else the zip is downloaded to `cache_dir`.

    Args:
      fields: config.dataset. Scenes stand on the images of `path`, if it is given.
      of_pixels: True for dense targets, False for one target per image.
    Raises:
      UserError: nothing is there, or it is not of the kind of `fields.source`.
    """
    options, source = DecodeOptions.from_config(fields), _source_of(fields)
    name, path, num_examples, seed = fields.name, fields.path, fields.num_examples, fields.split_seed
    if source == "scenes":
        if fields.source not in ("auto", "synthetic"):
            raise UserError(f"dataset.source: {fields.source!r}; allowed: auto | synthetic with {name!r}")
        as_colours = DecodeOptions(channels=3, max_pixels=options.max_pixels)
        ground = class_folders(open_files(path, "dataset.path"), as_colours) if path else None
        return scenes_dataset(name, num_examples, seed, options, ground)
    if source == "eurosat":
        builder = prepared_builder(EUROSAT_TFDS_NAME, None)
        # An unprepared or unreadable TFDS set is no reason not to download.
        source = "tfds" if builder and file_format(builder) == FORMAT else "zip"
    if source == "synthetic":
        return synthetic_dataset(num_examples, seed, options)
    if source == "tfds":
        return tfds_dataset(_tfds_name(name), path, fields.tfds_split, options)
    if path is None:
        if name != "eurosat":
            raise UserError(f"dataset.path: not given; dataset.source {source!r} of {name!r} needs one")
        path = str(download_eurosat(epath.Path(expanded(cache_dir, "augment.cache_dir"))))
    return (maps if of_pixels else class_folders)(open_files(path, "dataset.path", source), options)


def places_of(fields: DatasetConfig, cache_dir: str) -> list[epath.Path]:
    """Return the folders and files that `find_dataset` would read.

    They need not exist. There are none where images are generated, and two where EuroSAT may be either of them.
    """
    source, prepared = _source_of(fields), _prepared_folder(fields)
    if source == "synthetic":
        return []
    if source == "tfds":
        return [prepared]
    if fields.path is not None:
        return [epath.Path(expanded(fields.path, "dataset.path"))]
    downloaded = epath.Path(expanded(cache_dir, "augment.cache_dir")) / EUROSAT_ZIP
    return [] if source == "scenes" else [prepared, downloaded]


def _source_of(fields: DatasetConfig) -> str:
    """Return the source of a data set: a value of dataset.source, "scenes", or "eurosat" for a set without path."""
    if fields.name in PATTERNS:
        return "scenes"
    if fields.source != "auto":
        return fields.source
    if fields.path is None:
        return fields.name if fields.name in ("eurosat", "synthetic") else "tfds"
    if not _is_folder(epath.Path(expanded(fields.path, "dataset.path"))):
        return "zip"
    return "tfds" if _is_folder(_prepared_folder(fields)) else "folder"


def _prepared_folder(fields: DatasetConfig) -> epath.Path:
    """Return the folder of a TFDS set, whether it is there or not."""
    return epath.Path(expanded(tfds_dir(fields.path), "dataset.path")) / _tfds_name(fields.name).split(":")[0]


def _is_folder(path: epath.Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError, RuntimeError, ImportError):  # a bucket that cannot be reached
        return False


def _tfds_name(name: str) -> str:
    """Return the name of a TFDS set as its folder has it; TFDS takes `Cifar10` for `cifar10`, too."""
    return EUROSAT_TFDS_NAME if name == "eurosat" else re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()


# ---- EuroSAT -----------------------------------------------------------------------------------------

EUROSAT_ZIP = "EuroSAT.zip"
# The 27,000 RGB JPEGs of Helber et al. 2019, tried in this order, with their SHA-256. The first is the authors'
# record, the second torchvision's pinned copy of the original archive, whose SHA-256 is also the one TFDS checks.
EUROSAT_MIRRORS = {
    "https://zenodo.org/records/7711810/files/EuroSAT_RGB.zip": (
        "b4f5b234ecb7d7ff9c6cddb046543b4717c53fd6e9815be6c0e80cc614f51b90"
    ),
    "https://huggingface.co/datasets/torchgeo/eurosat/resolve/"
    "c877bcd43f099cd0196738f714544e355477f3fd/EuroSAT.zip": (
        "8ebea626349354c5328b142b96d0430e647051f26efc2dc974c843f25ecf70bd"
    ),
}


def download_eurosat(cache_dir: epath.Path) -> epath.Path:
    """Return the path of the official zip in `cache_dir`; download it if it is missing.

    Raises:
      UserError: no mirror has the zip with its SHA-256, or the folder cannot be written.
    """
    target, problems = cache_dir / EUROSAT_ZIP, []
    if target.exists():
        return target
    with writing(target, "augment.cache_dir"):
        cache_dir.mkdir(parents=True, exist_ok=True)
        remove_stale(target)
        with replacing(target) as part:
            part.touch()
            for url, sha256 in EUROSAT_MIRRORS.items():
                log.info("downloading %s", url)
                try:
                    with urllib.request.urlopen(url, timeout=30) as response:
                        content = response.read()
                except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
                    problems.append(f"{url} cannot be fetched ({getattr(error, 'reason', error)})")
                    continue
                found = hashlib.sha256(content).hexdigest()
                if found == sha256:
                    part.write_bytes(content)
                    return target
                problems.append(f"{url} has SHA-256 {found}, expected {sha256}")
            what = f"not given, and EuroSAT could not be downloaded: {'; '.join(problems)}"
            raise UserError(f"dataset.path: {what}. Give the path of EuroSAT.zip or of its unpacked folder")


# ---- published sizes ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PublishedSize:
    """Size of a published set."""

    counts: dict[str, int]  # labelled images of each published split; "train" alone is a set without splits
    image_shape: tuple[int, int, int]  # height, width, channels; of sets of many sizes the most usual
    dtype: str
    num_classes: int


SIZES = {
    "eurosat": PublishedSize({"train": 27_000}, (64, 64, 3), "uint8", 10),
    "eurosat_ms": PublishedSize({"train": 27_000}, (64, 64, 13), "uint16", 10),
    "cifar10": PublishedSize({"train": 50_000, "test": 10_000}, (32, 32, 3), "uint8", 10),
    "imagenet2012": PublishedSize({"train": 1_281_167, "val": 50_000}, (375, 500, 3), "uint8", 1000),
}


def published_info(fields: DatasetConfig) -> DatasetInfo:
    """Describe a set of SIZES as a run has it: its images are as many, large and split as `fields` say.

    Raises:
      BadSetting: the set has no such splits, or the split file cannot be read.
    """
    size = SIZES[fields.name]
    height, width, channels = size.image_shape
    if fields.image_size is not None:
        height, width = np.broadcast_to(fields.image_size, 2).tolist()
    shape = (height, width, fields.channels or channels)
    layout = RowLayout.of(_published_counts(fields, size.counts), shape, np.dtype(size.dtype))
    return DatasetInfo.unread(layout, size.num_classes)


def _published_counts(fields: DatasetConfig, published: dict[str, int]) -> dict[str, int]:
    if fields.split_file is not None:
        return read_split_file(fields.split_file).sizes()
    if fields.tfds_split is not None:
        parts = [split_named(name.strip()) for name in fields.tfds_split.split("+")]
        if not published.keys() >= set(parts):
            allowed = f"{' and '.join(published)}, joined by +, or give dataset.path"
            found = f"{fields.tfds_split!r} of {fields.name!r} without images"
            raise BadSetting(f"dataset.tfds_split: {found}; allowed: {allowed}")
        return complete_sizes({"train": sum(published[part] for part in parts)})
    if fields.splits != "own" and len(published) > 1:
        return complete_sizes(published)
    if fields.splits == "published":
        raise BadSetting(NO_PUBLISHED_SPLITS)
    return complete_sizes({"train": sum(published.values())})
