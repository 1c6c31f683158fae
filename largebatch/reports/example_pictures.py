"""Small pictures of single examples, read from the folder or zip that a run's config names.

A run may come from someone else. Only images are read, for the ids that are asked for, and nothing outside the
place of `picture_place`.
"""

import base64
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from largebatch.data.decode import DecodeOptions, decode
from largebatch.data.pictures import to_rgb8
from largebatch.data.sources.files import IMAGE_SUFFIXES, open_files
from largebatch.data.sources.splits import split_named
from largebatch.runs.reader import Run, lies_in
from largebatch.util import UserError, expanded

MAX_SIDE = 96  # pixels of a picture, on its longer side
# An id is Class/file, or split/Class/file where a set is published in splits, whose folders may have other names.
ID_PARTS = (2, 3)
MAX_DECODED = 1 << 24  # pixels


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
        """Return the file of an id Class/file or split/Class/file, which leads nowhere else, not by a link either.

        Raises:
          FileNotFoundError: there is no such image.
        """
        name = PurePosixPath(example_id)
        if name.is_absolute() or len(name.parts) not in ID_PARTS or ".." in name.parts:
            raise FileNotFoundError(example_id)
        if name.suffix.lower() not in IMAGE_SUFFIXES:
            raise FileNotFoundError(example_id)
        for path in self._candidates(name):
            if path.is_file() and lies_in(path, self._root):
                return path.read_bytes()
        raise FileNotFoundError(example_id)

    def _candidates(self, name: PurePosixPath) -> Iterator[Path]:
        """Yield where an image may lie: class folders, or those of the splits, may be in a folder of their own."""
        class_and_file = Path(*name.parts[-2:])
        for outer in (self._root, *_folders_in(self._root)):
            if len(name.parts) == 2:
                yield outer / class_and_file
            else:
                yield from (
                    folder / class_and_file
                    for folder in _folders_in(outer)
                    if split_named(folder.name) == name.parts[0]
                )


def _folders_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


class ImageZip:
    """A zip of class folders. An id is the last two parts of a name in it, or three with the folder of a split."""

    def __init__(self, path: Path):
        self._files = open_files(str(path), "dataset.path", "zip")
        self._names = {}
        for name in self._files.names:
            *folders, file = name.split("/")
            class_and_file = "/".join([*folders[-1:], file])
            self._names[class_and_file] = name
            if len(folders) > 1 and (split := split_named(folders[-2])):
                self._names[f"{split}/{class_and_file}"] = name

    def read(self, example_id: str) -> bytes:
        """Return the file of an id Class/file or split/Class/file.

        Raises:
          KeyError: there is no such file.
          UserError: it is damaged, or packed in a way that cannot be read.
        """
        return self._files.read(self._names[example_id])


def open_images(place: Place) -> ImageFolder | ImageZip:
    """Return what reads the image files of a place.

    Raises:
      NoPictures: there is neither a folder nor a readable zip.
    """
    try:
        path = Path(expanded(place.path))
        exists, is_folder = path.exists(), path.is_dir()
    except (OSError, ValueError, UserError):  # "~nobody", a NUL
        exists = False
    if not exists:
        raise NoPictures(f"{place.field} {place.path} does not exist here")
    if is_folder:
        return ImageFolder(path)
    try:
        return ImageZip(path)
    except UserError as error:
        raise NoPictures(str(error)) from error


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
        source = open_images(place)
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
    """Return a small PNG as a data: URI, or None where the file is not there, no image, damaged or too large."""
    from PIL import Image

    try:
        content = source.read(example_id)
        image = Image.fromarray(to_rgb8(decode(example_id, content, DecodeOptions(max_pixels=MAX_DECODED))))
    except (OSError, KeyError, UserError):  # a page without this picture is still a page
        return None
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
