"""Labelled images from TFDS, a zip, a folder or a generator, and the split that all of them share."""

import concurrent.futures
import functools
import hashlib
import io
import itertools
import logging
import os
import pathlib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
from etils import epath
from PIL import Image

from largebatch import UserError

log = logging.getLogger("largebatch")

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff")
SPLITS = ("train", "val", "test")

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


class Dataset(NamedTuple):
    """images uint8 [N, H, W, 3], labels int32 [N]; `example_ids` are `Class/file` where there are files."""

    images: np.ndarray
    labels: np.ndarray
    class_names: list[str]
    example_ids: list[str]


class Source(NamedTuple):
    """A data set that can be loaded; `fingerprint` changes when what `load` returns would."""

    description: str
    fingerprint: str
    load: Callable[[], Dataset]


def find_source(
    name: str,
    source: str = "auto",
    path: str | None = None,
    *,
    image_size: int | None = None,
    tfds_split: str = "train",
    num_examples: int = 1000,
    seed: int = 0,
    cache_dir: str = "~/.cache/largebatch",
) -> Source:
    """Finds a data set without decoding it.

    Args:
      name: "eurosat", "synthetic", a TFDS name, or what to call the images of a zip or folder.
      source: "tfds", "zip", "folder", "synthetic", or "auto" to tell from `name` and `path`.
      path: the zip, the folder of class folders, or the TFDS data directory. EuroSAT needs none: a
        prepared TFDS set is used if there is one, else the zip is downloaded to `cache_dir`.
      image_size: side in pixels to resize to; needed where images differ in size.
      tfds_split: which TFDS split (or "train+test") is read, before our own split.
      num_examples, seed: of the synthetic set.

    Raises:
      UserError: nothing there, or it is not what `source` says.
    """
    if source == "auto":
        source = _guess_source(name, path)
    if source == "synthetic":
        size = image_size or 32
        return Source(
            f"synthetic ({num_examples} images, seed {seed})",
            f"synthetic-1 {num_examples} {size} {seed}",
            lambda: synthetic(num_examples, size, seed),
        )
    if source == "tfds":
        return _tfds_source(EUROSAT_TFDS_NAME if name == "eurosat" else name, path, tfds_split, image_size)
    if path is None:
        if name != "eurosat":
            raise UserError(f"dataset.path: not given; dataset.source {source!r} of {name!r} needs one")
        path = download_eurosat(epath.Path(cache_dir).expanduser())
    root = epath.Path(path).expanduser()
    if not root.exists():
        raise UserError(f"dataset.path: {path} does not exist")
    return (_zip_source if source == "zip" else _folder_source)(root, image_size)


def _guess_source(name: str, path: str | None) -> str:
    if name == "eurosat" and path is None:
        # Not only the folder: an unprepared or half-prepared set is no reason not to download.
        return "tfds" if _prepared_tfds(EUROSAT_TFDS_NAME, None) else "zip"
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

    # Given explicitly, for TFDS reads the variable only once, when it is imported.
    data_dir = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    try:
        return tfds.core.read_only_builder.builder_from_files(name, data_dir=epath.Path(data_dir).expanduser())
    except tfds.core.DatasetNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UserError(f"dataset.name: TFDS cannot open {name!r} ({' '.join(str(error).split())})") from error


def _tfds_source(name: str, data_dir: str | None, split: str, image_size: int | None) -> Source:
    import tensorflow_datasets as tfds

    where = data_dir or "~/tensorflow_datasets"
    prepare = (
        'to prepare it: pip install tensorflow importlib_resources, then python -c "import '
        f"tensorflow_datasets as tfds; tfds.builder('{name}', data_dir='{where}', "
        "file_format='array_record').download_and_prepare()\""
    )
    builder = _prepared_tfds(name, data_dir)
    if builder is None:
        raise UserError(f"dataset.name: TFDS set {name!r} is not prepared in {where}; {prepare}")
    info = builder.info
    if info.file_format is None or info.file_format.value != "array_record":
        # TFDS 4.9.10 reads tfrecord with TensorFlow only, and writes parquet sets that lack examples.
        found = info.file_format and info.file_format.value
        raise UserError(f"dataset.name: TFDS set {name!r} is prepared as {found}, not array_record; {prepare}")
    if not {"image", "label"} <= info.features.keys():
        found = ", ".join(info.features)
        raise UserError(f"dataset.name: TFDS set {name!r} has features {found}; allowed: sets with image and label")
    try:
        rows = builder.as_data_source(split=split, decoders={"image": tfds.decode.SkipDecoding()})
    except ValueError as error:
        raise UserError(f"dataset.tfds_split: {split!r}: {' '.join(str(error).split())}") from error
    class_names = list(info.features["label"].names)

    def load() -> Dataset:
        files = []
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
                files.append(ImageFile(example_id, label, lambda image=row["image"]: image))
        return _dataset(files, class_names, image_size)

    description = f"TFDS {info.full_name} [{split}]"
    return Source(description, f"tfds {info.full_name} {builder.data_dir} {split} {len(rows)} {image_size}", load)


# ---- zip and folder ---------------------------------------------------------------------------------


class ImageFile(NamedTuple):
    """One image still encoded: its id, its class and how to read its bytes."""

    example_id: str
    label: int
    read: Callable[[], bytes]


def _zip_source(path: epath.Path, image_size: int | None) -> Source:
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(f"dataset.path: {path} is not a readable zip file ({error})") from error
    names = [entry.filename for entry in entries]
    for name in names:
        parts = name.replace("\\", "/").split("/")
        if name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]:
            raise UserError(f"dataset.path: {path} holds the unsafe name {name!r}; allowed: relative names")
    labels, class_names = _labels_of(names, str(path))
    # The directory of a zip holds the CRC-32 and size of every file: hashing it stands for the content.
    listing = [f"{entry.filename} {entry.file_size} {entry.CRC}" for entry in entries]

    def load() -> Dataset:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            return _load(labels, class_names, archive.read, image_size)

    return Source(str(path), _fingerprint(listing, image_size), load)


def _folder_source(path: epath.Path, image_size: int | None) -> Source:
    if not path.is_dir():
        raise UserError(f"dataset.path: {path} is not a folder; dataset.source 'folder' needs one")
    names, listing = [], []
    for found in sorted(pathlib.Path(path).rglob("*")):
        name = found.relative_to(path).as_posix()
        names.append(f"{name}/" if found.is_dir() else name)
        listing.append(f"{name} {found.stat().st_size} {found.stat().st_mtime_ns}")
    labels, class_names = _labels_of(names, str(path))

    def load() -> Dataset:
        return _load(labels, class_names, lambda name: (path / name).read_bytes(), image_size)

    return Source(str(path), _fingerprint(listing, image_size), load)


def _fingerprint(listing: list[str], image_size: int | None) -> str:
    return f"files {hashlib.sha256(chr(10).join(listing).encode()).hexdigest()} {image_size}"


def _labels_of(names: list[str], where: str) -> tuple[dict[str, int], list[str]]:
    """Labels of the images among `names` (those that end in "/" are folders), and the class names.

    Classes are the folders that hold the images; folders around all of them are left off.
    """
    images, folders, ignored = {}, set(), 0
    for name in names:
        path = PurePosixPath(name)
        if any(part.startswith((".", "__MACOSX")) for part in path.parts):
            continue
        if name.endswith("/"):
            folders.add(path)
        elif path.suffix.lower() not in IMAGE_SUFFIXES:
            ignored += 1
        elif name in images:
            raise UserError(f"dataset.path: {where} holds {name!r} twice")
        else:
            images[name] = path
    if ignored:
        log.info("%s: ignored %d files that are not %s", where, ignored, "/".join(IMAGE_SUFFIXES))
    parents = {path.parent for path in images.values()}
    outers = {parent.parent for parent in parents}
    if not images or PurePosixPath(".") in parents:
        raise UserError(f"dataset.path: {where} has no class folders; expected Class/image.jpg")
    if len(outers) > 1:
        found = ", ".join(sorted(str(outer) for outer in outers)[:4])
        raise UserError(f"dataset.path: {where} has class folders at several places ({found}); give one of them")
    for folder in sorted(folders - parents):
        if folder.parent in outers:
            raise UserError(f"dataset.path: {where}: class {folder.name!r} has no images")
    class_names = sorted(parent.name for parent in parents)
    if len(class_names) < 2:
        raise UserError(f"dataset.path: {where} has one class, {class_names[0]!r}; at least 2 are needed")
    return {name: class_names.index(path.parent.name) for name, path in images.items()}, class_names


def _load(labels: dict[str, int], class_names: list[str], read, image_size: int | None) -> Dataset:
    files = [
        ImageFile(f"{class_names[label]}/{PurePosixPath(name).name}", label, functools.partial(read, name))
        for name, label in labels.items()
    ]
    return _dataset(files, class_names, image_size)


def _dataset(files: list[ImageFile], class_names: list[str], image_size: int | None) -> Dataset:
    images = decode_all(files, image_size)
    labels = np.array([file.label for file in files], np.int32)
    return Dataset(images, labels, class_names, [file.example_id for file in files])


def decode_all(files: list[ImageFile], image_size: int | None) -> np.ndarray:
    """Decodes to uint8 [N, H, W, 3] on all cores, into one array.

    Raises:
      UserError: an image is damaged, not 8 bits deep, or of another size than the first; it is named.
    """
    first = decode(files[0], image_size)
    images = np.empty((len(files), *first.shape), np.uint8)

    def decode_range(begin: int, end: int) -> None:
        for i in range(begin, end):
            image = decode(files[i], image_size)
            if image.shape != first.shape:
                raise UserError(
                    f"dataset.image_size: {files[i].example_id} is {image.shape[1]}x{image.shape[0]} pixels, "
                    f"{files[0].example_id} is {first.shape[1]}x{first.shape[0]}; set a size to resize to"
                )
            images[i] = image

    run_ranges(decode_range, len(files))
    return images


def decode(file: ImageFile, image_size: int | None) -> np.ndarray:
    """One image as uint8 [H, W, 3]; grey and palette images become RGB."""
    try:
        with Image.open(io.BytesIO(file.read())) as image:
            if image.mode.startswith(("I", "F")):
                raise UserError(f"{file.example_id}: pixels are of mode {image.mode}; allowed: 8 bits a channel")
            image = image.convert("RGB")
    except UserError:
        raise
    except Exception as error:  # Pillow and zipfile raise a dozen kinds on damaged input
        raise UserError(f"{file.example_id}: damaged image ({error})") from error
    if image_size and image.size != (image_size, image_size):
        image = image.resize((image_size, image_size), Image.Resampling.BILINEAR, reducing_gap=None)
    return np.asarray(image)


def run_ranges(work: Callable[[int, int], None], length: int) -> None:
    """Runs `work(begin, end)` over pieces of range(length) on one thread per core; first error wins."""
    num_workers = os.cpu_count() or 1
    edges = np.linspace(0, length, 4 * num_workers + 1).astype(int).tolist()
    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        futures = [pool.submit(work, a, b) for a, b in itertools.pairwise(edges) if a < b]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


# ---- download ---------------------------------------------------------------------------------------


def download_eurosat(cache_dir: epath.Path) -> epath.Path:
    """Path of the official zip in `cache_dir`, downloaded, checked against its SHA-256 and kept."""
    target = cache_dir / "EuroSAT.zip"
    if target.exists():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    problems = []
    for url, sha256 in EUROSAT_MIRRORS:
        part = cache_dir / f".EuroSAT.zip.{os.getpid()}"
        try:
            found = _download(url, part)
            if found == sha256:
                part.rename(target)
                return target
            problems.append(f"{url} has SHA-256 {found}, expected {sha256}")
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            problems.append(f"{url} cannot be reached ({getattr(error, 'reason', error)})")
        finally:
            part.unlink(missing_ok=True)
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


# ---- synthetic --------------------------------------------------------------------------------------

SYNTHETIC_CLASSES = ("checks", "disks", "noise", "rings", "stripes")


def synthetic(num_examples: int, size: int, seed: int) -> Dataset:
    """Textures in random colours: the class is the pattern, which mean colour does not tell.

    Every pattern looks alike under the 8 views, has random phase, scale and contrast, and carries noise.
    """
    rng = np.random.default_rng(seed)
    labels = np.arange(num_examples, dtype=np.int32) % len(SYNTHETIC_CLASSES)
    images = np.empty((num_examples, size, size, 3), np.uint8)
    for i, label in enumerate(labels):
        pattern = _pattern(SYNTHETIC_CLASSES[label], size, rng)
        mean, contrast = rng.uniform(90, 165, 3), rng.uniform(15, 50, 3) * rng.choice((-1, 1))
        pixels = mean + contrast * (pattern - pattern.mean())[..., None] + rng.normal(0, 12, (size, size, 3))
        images[i] = np.clip(pixels, 0, 255)
    return Dataset(images, labels, list(SYNTHETIC_CLASSES), [f"{i:06d}" for i in range(num_examples)])


def _pattern(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """One texture of +1 and -1, [size, size]."""
    y, x = np.mgrid[:size, :size].astype(np.float32)
    period = rng.uniform(6, 10)
    along_x, along_y = (np.sin(2 * np.pi * axis / period + rng.uniform(0, 2 * np.pi)) for axis in (x, y))
    radius = np.hypot(x - rng.uniform(0.3, 0.7) * size, y - rng.uniform(0.3, 0.7) * size)
    if kind == "checks":
        wave = along_x * along_y
    elif kind == "disks":
        wave = rng.uniform(0.15, 0.3) * size - radius
    elif kind == "noise":
        wave = rng.standard_normal((size, size))
    elif kind == "rings":
        wave = np.sin(2 * np.pi * radius / period + rng.uniform(0, 2 * np.pi))
    else:
        wave = along_x if rng.random() < 0.5 else along_y
    return np.where(wave > 0, 1.0, -1.0)


# ---- split ------------------------------------------------------------------------------------------


def split_indices(example_ids: list[str], seed: int) -> dict[str, np.ndarray]:
    """80/10/10 split: a seeded permutation of the examples sorted by id, so every source gives the same.

    Returns:
      For each of SPLITS the indices into `example_ids`.
    Raises:
      UserError: fewer than 10 examples, which would leave a part empty.
    """
    count = len(example_ids)
    if count < 10:
        raise UserError(f"the data set has {count} examples; at least 10 are needed for an 80/10/10 split")
    by_id = np.argsort(np.array(example_ids))
    order = by_id[np.random.default_rng(seed).permutation(count)]
    tenth = count // 10
    train, val, test = np.split(order, [count - 2 * tenth, count - tenth])
    return {"train": train, "val": val, "test": test}


def iterate_batches(length: int, size: int) -> Iterator[slice]:
    """Consecutive slices that cover range(length)."""
    for begin in range(0, length, size):
        yield slice(begin, min(begin + size, length))
