"""The files of a folder or a zip: listed once, and read by their names."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from etils import epath

from largebatch import untrusted
from largebatch.errors import UserError
from largebatch.paths import expanded


@dataclass(frozen=True)
class EncodedFile:
    """One file that can be read; several threads may read at once."""

    num_bytes: int
    read: Callable[[], bytes]


class FileSet(Protocol):
    """Files by their names, with "/" between the parts; the names of folders end in "/".

    Attributes:
      path: of the folder or zip.
      where: the same behind the field that says it, for messages.
    """

    path: str
    where: str
    names: list[str]

    def stamps(self, names: list[str]) -> list[str]:
        """A line for each of these files, which is another one when its content is.

        Raises:
          UserError: one of them cannot be read.
        """

    def opened(self) -> contextlib.AbstractContextManager[Callable[[str], EncodedFile]]:
        """Within a `with`, gives files by their names."""


class FolderFiles:
    """The files under a folder; see `FileSet`.

    Args:
      field: the config field or flag that says where it is, for messages.
    Raises:
      UserError: it is no folder, or something in it cannot be read.
    """

    def __init__(self, path: epath.Path, field: str):
        self.path, self.where, self._field = str(path), f"{field}: {path}", field
        self._paths = untrusted.list_folder(pathlib.Path(path), field)
        self.names = list(self._paths)
        self._stats: dict[str, os.stat_result] = {}

    def stamps(self, names: list[str]) -> list[str]:
        """See `FileSet`."""
        stats = {name: self._stat(name) for name in names}
        return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats.items()]

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str], EncodedFile]]:
        """See `FileSet`."""
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
    """The files in a zip; see `FileSet`. Arguments and errors are those of `FolderFiles`."""

    def __init__(self, path: epath.Path, field: str):
        self.path, self.where = str(path), f"{field}: {path}"
        self._root, self._field = path, field
        entries = untrusted.list_zip(path, field)
        self.names = [entry.filename for entry in entries]
        self._entries = {entry.filename: entry for entry in entries}

    def stamps(self, names: list[str]) -> list[str]:
        """By what the directory of the zip says: the CRC-32 and the size of every file."""
        entries = [self._entries[name] for name in names]
        for entry in entries:
            untrusted.check_entry(entry, self.where)
        return [f"{entry.filename} {entry.file_size} {entry.CRC}" for entry in entries]

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[str], EncodedFile]]:
        """See `FileSet`."""
        with untrusted.ZipReader(self._root, self._field) as reader:

            def file_of(name: str) -> EncodedFile:
                entry = self._entries[name]
                return EncodedFile(entry.file_size, functools.partial(reader.read, entry))

            yield file_of


def open_set(path: str, field: str) -> FileSet:
    """The files of a folder or zip.

    Raises:
      UserError: there is none, or it cannot be read.
    """
    root = epath.Path(expanded(path, field))
    if not root.exists():
        raise UserError(f"{field}: {path} does not exist")
    return FolderFiles(root, field) if root.is_dir() else ZipFiles(root, field)
