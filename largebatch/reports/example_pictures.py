"""Small pictures of single examples, read from the folder or zip that a run's config names.

A run may come from someone else. Only images are read, for the ids that are asked for, and nothing outside the
place of `picture_place`.
"""

import base64
import io
import stat
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from largebatch import untrusted
from largebatch.decoding import images
from largebatch.decoding.colours import to_rgb8
from largebatch.runs.reader import Run, lies_in
from largebatch.util import UserError, expanded

MAX_SIDE = 96  # pixels of a picture, on its longer side
# What is read of a file that a run names, and decoded of it.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff")
# An id is Class/file, or split/Class/file where a set is published in splits, whose folders may have other names.
ID_PARTS = (2, 3)
SPLIT_OF_FOLDER = {"validation": "val", "valid": "val", "dev": "val"}
MAX_DECODED = 1 << 24  # pixels
MAX_BYTES = images.BYTES_PER_PIXEL * MAX_DECODED  # of a file


class NoPictures(Exception):
    """No picture can be had; the text says why."""


@dataclass(frozen=True)
class Place:
    """Where a run's config says that its images are: a field of it, and the folder or zip that it means."""

    field: str
    path: str


def picture_place(run: Run) -> Place | None:
    """Where example pictures are read from, if the run names a place."""
    path, cache_dir = run.field("dataset.path"), run.field("augment.cache_dir")
    if is_synthetic(run):
        return None
    if isinstance(path, str):
        return Place("dataset.path", path)
    if path is None and run.field("dataset.name") == "eurosat" and isinstance(cache_dir, str):
        return Place("augment.cache_dir", f"{cache_dir}/EuroSAT.zip")  # where train.py keeps its download
    return None


def is_synthetic(run: Run) -> bool:
    """Whether the run's images were made up, so that there are no files of them."""
    return "synthetic" in (run.field("dataset.name"), run.field("dataset.source"))


# ---- folders and zips --------------------------------------------------------------------------------


class ImageFolder:
    """Class folders of images, perhaps in a folder of their own."""

    def __init__(self, root: Path):
        self._root = root

    def read(self, example_id: str) -> bytes:
        """The file of an id Class/file or split/Class/file, which leads nowhere else, not by a link either.

        Raises:
          FileNotFoundError: there is no such image.
          ValueError: it is too large.
        """
        name = PurePosixPath(example_id)
        if name.is_absolute() or len(name.parts) not in ID_PARTS or ".." in name.parts:
            raise FileNotFoundError(example_id)
        if name.suffix.lower() not in IMAGE_SUFFIXES:
            raise FileNotFoundError(example_id)
        for path in self._candidates(name):
            if path.is_file() and lies_in(path, self._root):
                _check_size(path.stat().st_size)
                return path.read_bytes()
        raise FileNotFoundError(example_id)

    def _candidates(self, name: PurePosixPath) -> Iterator[Path]:
        """Where an image may lie: class folders, or those of the splits, may be in a folder of their own."""
        class_and_file = Path(*name.parts[-2:])
        for outer in (self._root, *_folders_in(self._root)):
            if len(name.parts) == 2:
                yield outer / class_and_file
            else:
                yield from (
                    folder / class_and_file
                    for folder in _folders_in(outer)
                    if _split_named(folder.name) == name.parts[0]
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def _folders_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def _split_named(folder: str) -> str:
    return SPLIT_OF_FOLDER.get(folder.lower(), folder.lower())


class ImageZip:
    """A zip of class folders. An id is the last two parts of a name in it, or three with the folder of a split."""

    def __init__(self, path: Path):
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        self._reader = untrusted.ZipReader(path, "dataset.path")
        self._entries = {}
        for entry in entries:
            *folders, name = entry.filename.split("/")
            class_and_file = "/".join([*folders[-1:], name])
            self._entries[class_and_file] = entry
            if len(folders) > 1:
                self._entries[f"{_split_named(folders[-2])}/{class_and_file}"] = entry

    def read(self, example_id: str) -> bytes:
        """The file of an id Class/file or split/Class/file.

        Raises:
          KeyError: there is no such file.
          ValueError: it is too large.
          UserError: it is packed in a way that may unpack without bound.
        """
        entry = self._entries[example_id]
        untrusted.check_entry(entry, "dataset.path")
        _check_size(entry.file_size)
        return self._reader.read(entry)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._reader.close()


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise ValueError(f"{size} bytes; allowed for a picture: {MAX_BYTES}")


def open_images(place: Place) -> ImageFolder | ImageZip:
    """What gives the image files of a place; a context manager.

    Raises:
      NoPictures: there is neither a folder nor a readable zip.
    """
    try:
        path = Path(expanded(place.path))
        mode = path.stat().st_mode
    except (OSError, ValueError, UserError) as error:  # "~nobody", a NUL
        raise NoPictures(f"{place.field} {place.path} does not exist here") from error
    if stat.S_ISDIR(mode):
        return ImageFolder(path)
    try:
        if not stat.S_ISREG(mode):
            raise OSError("no regular file")
        return ImageZip(path)
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        raise NoPictures(f"{place.field} {path} is not a readable zip file ({error})") from error


# ---- pictures ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pictures:
    """Pictures as data: URIs, by example id; `missing` says why there are none, though some were asked for."""

    by_id: dict[str, str]
    missing: str | None = None


def read_pictures(run: Run, example_ids: Iterable[str]) -> Pictures:
    """Those of the pictures that can be read."""
    example_ids, by_id = list(example_ids), {}
    if not example_ids:
        return Pictures({})
    try:
        place = picture_place(run)
        if place is None:
            raise NoPictures(
                "synthetic images have no files" if is_synthetic(run) else "the run names no dataset.path"
            )
        with open_images(place) as source:
            for example_id in example_ids:
                picture = read_picture(source, example_id)
                if picture:
                    by_id[example_id] = picture
        if not by_id:
            raise NoPictures(f"no example was found in {place.path}")
    except NoPictures as reason:
        return Pictures({}, str(reason))
    return Pictures(by_id)


def read_picture(source: ImageFolder | ImageZip, example_id: str) -> str | None:
    """A small PNG as a data: URI, or None where the file is not there, no image, damaged or too large."""
    from PIL import Image

    try:
        content = source.read(example_id)
    except Exception:  # zipfile raises a dozen kinds; a page without this picture is still a page
        return None
    file = images.ImageFile(example_id, 0, len(content), lambda: content)
    try:
        with images.pillow_limited_to(MAX_DECODED):
            pixels = images.decode(file, images.AS_THEY_ARE, images.Limits(MAX_DECODED))
            image = Image.fromarray(to_rgb8(pixels))
    except UserError:
        return None
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
