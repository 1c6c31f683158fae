"""Files in a folder or zip, and the source of images in class folders."""

import contextlib
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol

import numpy as np
from etils import epath

from largebatch import untrusted
from largebatch.decoding import images
from largebatch.sources.class_folders import IMAGE_SUFFIXES, is_hidden, is_image, parse_names
from largebatch.sources.source import Source
from largebatch.util import UserError, expanded


@dataclass(frozen=True)
class EncodedFile:
    """File that can be read by several threads at once."""

    num_bytes: int
    read: Callable[[], bytes]


class FileSet(Protocol):
    """Set of files by their names, with "/" between the parts; the names of folders end in "/".

    Attributes:
      path: path of the folder or zip.
      where: the path behind the field that names it, for messages.
    """

    path: str
    where: str
    names: list[str]

    def stamps(self, names: list[str]) -> list[str]:
        """Return a line for each of these files, which changes when its content does.

        Raises:
          UserError: a file cannot be read.
        """

    def opened(self) -> contextlib.AbstractContextManager[Callable[[str], EncodedFile]]:
        """Return a context manager of a function that returns files by their names."""


class FolderFiles:
    """File set of a folder; see `FileSet`.

    Args:
      field: the config field or flag that names the folder, for messages.
    Raises:
      UserError: the path is no folder, or something in it cannot be read.
    """

    def __init__(self, path: epath.Path, field: str):
        self.path, self.where, self._field = str(path), f"{field}: {path}", field
        self._paths = untrusted.list_folder(pathlib.Path(path), field)
        self.names = list(self._paths)
        self._stats: dict[str, os.stat_result] = {}

    def stamps(self, names: list[str]) -> list[str]:
        """Return name, size and time of the last change of each file."""
        stats = {name: self._stat(name) for name in names}
        return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats.items()]

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str], EncodedFile]]:
        """Yield a function that returns files by their names."""
        yield self._file

    def _file(self, name: str) -> EncodedFile:
        num_bytes = self._stat(name).st_size
        return EncodedFile(num_bytes, functools.partial(untrusted.read_regular, self._paths[name], num_bytes))

    def _stat(self, name: str) -> os.stat_result:
        if name not in self._stats:
            path = self._paths[name]
            try:
                self._stats[name] = untrusted.stat_regular(path)
            except OSError as error:
                raise UserError(f"{self._field}: {path} cannot be read ({error.strerror})") from error
        return self._stats[name]


class ZipFiles:
    """File set of a zip; see `FileSet`. Arguments and errors are those of `FolderFiles`."""

    def __init__(self, path: epath.Path, field: str):
        self.path, self.where = str(path), f"{field}: {path}"
        self._root, self._field = path, field
        entries = untrusted.list_zip(path, field)
        self.names = [entry.filename for entry in entries]
        self._entries = {entry.filename: entry for entry in entries}

    def stamps(self, names: list[str]) -> list[str]:
        """Return name, size and CRC-32 of each file, from the directory of the zip."""
        entries = [self._entries[name] for name in names]
        for entry in entries:
            untrusted.check_entry(entry, self.where)
        return [f"{entry.filename} {entry.file_size} {entry.CRC}" for entry in entries]

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str], EncodedFile]]:
        """Yield a function that returns files by their names."""
        with untrusted.ZipReader(self._root, self._field) as reader:

            def file_of(name: str) -> EncodedFile:
                entry = self._entries[name]
                return EncodedFile(entry.file_size, functools.partial(reader.read, entry))

            yield file_of


def open_set(path: str, field: str) -> FileSet:
    """Open the files of a folder or zip.

    Raises:
      UserError: the path does not exist or cannot be read.
    """
    root = epath.Path(expanded(path, field))
    if not root.exists():
        raise UserError(f"{field}: {path} does not exist")
    return FolderFiles(root, field) if root.is_dir() else ZipFiles(root, field)


def class_source(files: FileSet, options: images.DecodeOptions, max_pixels: int) -> Source:
    """Create the source of class folders.

    Raises:
      UserError: the files are not in class folders, or a file cannot be read.
    """
    parsed = parse_names(files.names, files.where)
    listing = files.stamps(parsed.names)

    @contextlib.contextmanager
    def open_pixels():
        limits = images.Limits(max_pixels)
        with files.opened() as file_of, images.pillow_limited_to(max_pixels):

            def decode(index: int, place):
                file = _image_file(file_of(parsed.names[index]), parsed.ids[index], parsed.labels[index])
                return images.decode(file, options, limits, place)

            def read(indices, out=None):
                places = [None] * len(indices) if out is None else out
                return [decode(index, place) for index, place in zip(indices, places, strict=True)]

            yield read

    return Source(
        description=files.path,
        fingerprint=fingerprint_of(listing, options),
        ids=parsed.ids,
        labels=np.array(parsed.labels, np.int32),
        class_names=parsed.class_names,
        open=open_pixels,
        splits=parsed.splits,
    )


def fingerprint_of(listing: list[str], options: images.DecodeOptions) -> str:
    """Return a fingerprint that changes when a file or its decoding does."""
    return f"files {hashlib.sha256(chr(10).join(listing).encode()).hexdigest()} {options}"


def _image_file(file: EncodedFile, example_id: str, label: int) -> images.ImageFile:
    return images.ImageFile(example_id, label, file.num_bytes, file.read)


def find_images(
    path: str,
    class_names: list[str],
    options: images.DecodeOptions,
    max_image_pixels: int = images.MAX_IMAGE_PIXELS,
) -> images.Dataset:
    """Decode all images in a folder or zip of any layout; label -1 where the folder is none of `class_names`.

    Raises:
      UserError: no images, or an image is damaged or has more than `max_image_pixels`.
    """
    files, where = open_set(path, "--images"), f"--images: {path}"
    names = sorted(name for name in files.names if is_image(name, where) and not is_hidden(PurePosixPath(name)))
    if not names:
        raise UserError(f"{where} holds no {'/'.join(IMAGE_SUFFIXES)} files")
    files.stamps(names)  # refuses files that cannot be read
    label_of = {name: label for label, name in enumerate(class_names)}
    with files.opened() as file_of:
        encoded = [
            _image_file(file_of(name), name, label_of.get(PurePosixPath(name).parent.name, -1)) for name in names
        ]
        return images.decode_dataset(encoded, class_names, options, max_image_pixels)
