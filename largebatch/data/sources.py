"""Where images come from: TFDS, a zip, a folder of class folders, or a generator."""

import contextlib
import functools
import hashlib
import http.client
import logging
import os
import pathlib
import re
import urllib.request
import zipfile
from pathlib import PurePosixPath

from etils import epath

from largebatch import untrusted
from largebatch.data import images
from largebatch.data.synthetic import synthetic
from largebatch.data.threads import iterate_batches
from largebatch.errors import UserError
from largebatch.files import remove_stale, replacing

log = logging.getLogger("largebatch")

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff")
# Control characters, line ends, and what stands for bytes that are no UTF-8: no line of text can hold them.
UNSAFE_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

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
EUROSAT_TFDS_NAME = "eurosat/rgb"


def find_source(
    name: str,
    source: str = "auto",
    path: str | None = None,
    *,
    image_size: int | None = None,
    tfds_split: str = "train",
    num_examples: int = 960,
    seed: int = 0,
    cache_dir: str = "~/.cache/largebatch",
    max_image_pixels: int = images.MAX_IMAGE_PIXELS,
) -> images.Source:
    """Finds a data set without decoding it.

    Args:
      name: "eurosat", "synthetic", a TFDS name, or what to call the images of a zip or folder.
      source: "tfds", "zip", "folder", "synthetic", or "auto" to tell from `name` and `path`.
      path: the zip, the folder of class folders, or the TFDS data directory. EuroSAT needs none: a
        prepared TFDS set is used if there is one, else the zip is downloaded to `cache_dir`.
      image_size: side in pixels to resize to; needed where images differ in size.
      tfds_split: which TFDS split (or "train+test") is read, before our own split.
      num_examples, seed: of the synthetic set.
      max_image_pixels: above which an image is refused; its file may have 4 bytes for each.

    Raises:
      UserError: nothing there, or it is not what `source` says.
    """
    if source == "auto":
        source = _guess_source(name, path)
    if source == "synthetic":
        size = image_size or 32
        return images.Source(
            f"synthetic ({num_examples} images, seed {seed})",
            f"synthetic-1 {num_examples} {size} {seed}",
            lambda: synthetic(num_examples, size, seed),
        )
    options = images.DecodeOptions((image_size, image_size) if image_size else None)
    if source == "tfds":
        tfds_name = EUROSAT_TFDS_NAME if name == "eurosat" else name
        return _tfds_source(tfds_name, path, tfds_split, options, max_image_pixels)
    if path is None:
        if name != "eurosat":
            raise UserError(f"dataset.path: not given; dataset.source {source!r} of {name!r} needs one")
        path = download_eurosat(epath.Path(cache_dir).expanduser())
    root = epath.Path(path).expanduser()
    if not root.exists():
        raise UserError(f"dataset.path: {path} does not exist")
    if source == "zip":
        return _zip_source(root, options, max_image_pixels)
    return _folder_source(root, options, max_image_pixels)


def _guess_source(name: str, path: str | None) -> str:
    if name == "eurosat" and path is None:
        # An unprepared or unreadable TFDS set is no reason not to download.
        builder = _prepared_tfds(EUROSAT_TFDS_NAME, None)
        return "tfds" if builder and _is_readable(builder) else "zip"
    if path is None:
        return "synthetic" if name == "synthetic" else "tfds"
    root = epath.Path(path).expanduser()
    if not root.is_dir():
        return "zip"
    tfds_name = EUROSAT_TFDS_NAME if name == "eurosat" else name
    return "tfds" if (root / tfds_name.split(":")[0]).is_dir() else "folder"


# ---- TFDS -------------------------------------------------------------------------------------------


def _prepared_tfds(name: str, data_dir: str | None):
    """The TFDS builder of a prepared set, or None. Needs no TensorFlow."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow_datasets as tfds

    data_dir = epath.Path(_tfds_dir(data_dir)).expanduser()
    try:
        return tfds.core.read_only_builder.builder_from_files(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UserError(f"dataset.name: TFDS cannot open {name!r} ({' '.join(str(error).split())})") from error


def _tfds_dir(data_dir: str | None) -> str:
    """Given explicitly, for TFDS reads the variable only once, when it is imported."""
    return data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"


def _is_readable(builder) -> bool:
    """TFDS 4.9.10 reads tfrecord with TensorFlow only, and writes parquet sets that lack examples."""
    return builder.info.file_format is not None and builder.info.file_format.value == "array_record"


def _tfds_source(
    name: str, data_dir: str | None, split: str, options: images.DecodeOptions, max_pixels: int
) -> images.Source:
    import tensorflow_datasets as tfds

    where = _tfds_dir(data_dir)
    prepare = (
        'to prepare it: pip install tensorflow importlib_resources, then python -c "import '
        f"tensorflow_datasets as tfds; tfds.builder('{name}', data_dir='{where}', "
        "file_format='array_record').download_and_prepare()\"; or give your own images by dataset.path"
    )
    builder = _prepared_tfds(name, data_dir)
    if builder is None:
        raise UserError(f"dataset.name: TFDS set {name!r} is not prepared in {where}; {prepare}")
    info = builder.info
    if not _is_readable(builder):
        file_format = info.file_format and info.file_format.value
        raise UserError(
            f"dataset.name: TFDS set {name!r} is prepared as {file_format}, not array_record; {prepare}"
        )
    if not {"image", "label"} <= info.features.keys():
        features = ", ".join(info.features)
        raise UserError(
            f"dataset.name: TFDS set {name!r} has features {features}; allowed: sets with image and label"
        )
    try:
        rows = builder.as_data_source(split=split, decoders={"image": tfds.decode.SkipDecoding()})
    except ValueError as error:
        raise UserError(f"dataset.tfds_split: {split!r}: {' '.join(str(error).split())}") from error
    class_names = list(info.features["label"].names)

    def load() -> images.Dataset:
        encoded = []
        for part in iterate_batches(len(rows), 256):  # in blocks: half the time of one by one
            try:
                block = rows.__getitems__(range(part.start, part.stop))
            except RuntimeError as error:
                raise UserError(f"dataset.path: TFDS set {name!r} is damaged ({error})") from error
            for number, row in enumerate(block, part.start):
                label = int(row["label"])
                if label < 0:
                    raise UserError(f"dataset.tfds_split: {split!r} of TFDS set {name!r} has rows without label")
                file = row.get("filename", f"{number:09d}".encode()).decode()
                example_id = file if "/" in file else f"{class_names[label]}/{file}"
                image = row["image"]
                encoded.append(images.ImageFile(example_id, label, len(image), lambda image=image: image))
        return images.decode_dataset(encoded, class_names, options, max_pixels)

    description = f"TFDS {info.full_name} [{split}]"
    return images.Source(
        description, f"tfds {info.full_name} {builder.data_dir} {split} {len(rows)} {options}", load
    )


# ---- zip and folder ---------------------------------------------------------------------------------


def _zip_source(path: epath.Path, options: images.DecodeOptions, max_pixels: int) -> images.Source:
    entries = untrusted.list_zip(path, "dataset.path")
    labels, class_names = _labels_of([entry.filename for entry in entries], str(path))
    entries = {entry.filename: entry for entry in entries if entry.filename in labels}
    for entry in entries.values():
        untrusted.check_entry(entry, f"dataset.path: {path}")
    # The directory of a zip holds the CRC-32 and size of every file: hashing it stands for the content.
    listing = [f"{e.filename} {e.file_size} {e.CRC}" for e in entries.values()]

    def load() -> images.Dataset:
        with untrusted.open_zip(path) as archive:
            encoded = [
                _from_zip(archive, entries[name], _example_id(name, class_names[label]), label)
                for name, label in labels.items()
            ]
            return images.decode_dataset(encoded, class_names, options, max_pixels)

    return images.Source(str(path), _fingerprint(listing, options), load)


def _folder_source(path: epath.Path, options: images.DecodeOptions, max_pixels: int) -> images.Source:
    if not path.is_dir():
        raise UserError(f"dataset.path: {path} is not a folder; dataset.source 'folder' needs one")
    paths = untrusted.list_folder(pathlib.Path(path), "dataset.path")
    labels, class_names = _labels_of(list(paths), str(path))
    stats = {name: _stat(paths[name], "dataset.path") for name in labels}
    listing = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats.items()]

    def load() -> images.Dataset:
        encoded = [
            _from_folder(paths[name], stats[name].st_size, _example_id(name, class_names[label]), label)
            for name, label in labels.items()
        ]
        return images.decode_dataset(encoded, class_names, options, max_pixels)

    return images.Source(str(path), _fingerprint(listing, options), load)


def _from_folder(path: pathlib.Path, num_bytes: int, example_id: str, label: int) -> images.ImageFile:
    return images.ImageFile(
        example_id, label, num_bytes, functools.partial(untrusted.read_regular, path, num_bytes)
    )


def _from_zip(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, example_id: str, label: int) -> images.ImageFile:
    return images.ImageFile(
        example_id, label, entry.file_size, functools.partial(untrusted.read_entry, archive, entry)
    )


def _stat(path: pathlib.Path, field: str) -> os.stat_result:
    try:
        return untrusted.stat_regular(path)
    except OSError as error:
        raise UserError(f"{field}: {path} cannot be read ({error.strerror})") from error


def _example_id(name: str, class_name: str) -> str:
    return f"{class_name}/{PurePosixPath(name).name}"


def _fingerprint(listing: list[str], options: images.DecodeOptions) -> str:
    return f"files {hashlib.sha256(chr(10).join(listing).encode()).hexdigest()} {options}"


def _labels_of(names: list[str], where: str) -> tuple[dict[str, int], list[str]]:
    """Labels of the images among `names` (those that end in "/" are folders), and the class names.

    Classes are the folders that hold the images; folders around all of them are left off.
    """
    paths, folders, ignored = {}, set(), 0
    for name in names:
        path = PurePosixPath(name)
        if _is_hidden(path):
            continue
        if name.endswith("/"):
            folders.add(path)
        elif not _is_image(name, f"dataset.path: {where}"):
            folders.add(path.parent)
            ignored += 1
        elif name in paths:
            raise UserError(f"dataset.path: {where} holds {name!r} twice")
        else:
            paths[name] = path
    if ignored:
        log.info("%s: ignored %d files that are not %s", where, ignored, "/".join(IMAGE_SUFFIXES))
    parents = {path.parent for path in paths.values()}
    outers = {parent.parent for parent in parents}
    if not paths or PurePosixPath(".") in parents:
        raise UserError(f"dataset.path: {where} has no class folders; expected Class/image.jpg")
    if len(outers) > 1:
        places = ", ".join(sorted(str(outer) for outer in outers)[:4])
        raise UserError(f"dataset.path: {where} has class folders at several places ({places}); give one of them")
    for folder in sorted(folders - parents):
        if folder.parent in outers and folder not in outers:
            raise UserError(f"dataset.path: {where}: class {folder.name!r} has no images")
    class_names = sorted(parent.name for parent in parents)
    if len(class_names) < 2:
        raise UserError(f"dataset.path: {where} has one class, {class_names[0]!r}; at least 2 are needed")
    return {name: class_names.index(path.parent.name) for name, path in paths.items()}, class_names


def _is_hidden(path: PurePosixPath) -> bool:
    return any(part.startswith(untrusted.HIDDEN) for part in path.parts)


def _is_image(name: str, where: str) -> bool:
    """By the end of its name, which must fit into one line of text."""
    if name.endswith("/") or PurePosixPath(name).suffix.lower() not in IMAGE_SUFFIXES:
        return False
    if UNSAFE_CHARACTERS.search(name):
        raise UserError(f"{where} holds the unsafe name {name!a}; allowed: no control characters, UTF-8")
    return True


def find_images(
    path: str,
    class_names: list[str],
    options: images.DecodeOptions,
    max_image_pixels: int = images.MAX_IMAGE_PIXELS,
) -> images.Dataset:
    """All images in a folder or zip, whatever its folders; label -1 where the folder is none of `class_names`.

    Raises:
      UserError: nothing there, or an image is damaged or has more than `max_image_pixels`.
    """
    root, where = epath.Path(path).expanduser(), f"--images: {path}"
    if not root.exists():
        raise UserError(f"{where} does not exist")
    with contextlib.ExitStack() as stack:
        if root.is_dir():
            paths = untrusted.list_folder(pathlib.Path(root), "--images")
            names = [name for name in paths if _is_image(name, where)]
            sizes = {name: _stat(paths[name], "--images").st_size for name in names}
            make = {name: functools.partial(_from_folder, paths[name], sizes[name]) for name in names}
        else:
            entries = {entry.filename: entry for entry in untrusted.list_zip(root, "--images")}
            names = sorted(
                name for name in entries if _is_image(name, where) and not _is_hidden(PurePosixPath(name))
            )
            for name in names:
                untrusted.check_entry(entries[name], where)
            archive = stack.enter_context(untrusted.open_zip(root))
            make = {name: functools.partial(_from_zip, archive, entries[name]) for name in names}
        if not names:
            raise UserError(f"{where} holds no {'/'.join(IMAGE_SUFFIXES)} files")
        index = {name: label for label, name in enumerate(class_names)}
        encoded = [make[name](name, index.get(PurePosixPath(name).parent.name, -1)) for name in names]
        return images.decode_dataset(encoded, class_names, options, max_image_pixels)


# ---- download ---------------------------------------------------------------------------------------


def download_eurosat(cache_dir: epath.Path) -> epath.Path:
    """Path of the official zip in `cache_dir`, downloaded, checked against its SHA-256 and kept."""
    target = cache_dir / "EuroSAT.zip"
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
    """Raises UserError if none has the file with its SHA-256."""
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
    """Downloads with a progress bar; returns the SHA-256 of what came."""
    from rich import progress

    digest = hashlib.sha256()
    columns = (
        progress.TextColumn("downloading {task.description}"),
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
