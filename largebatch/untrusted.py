"""Files that a user names, which may be anything: only regular ones are opened, links followed, zips checked."""

import contextlib
import errno
import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from largebatch.errors import UserError

KINDS = {
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFDIR: "folder",
}
# What zipfile unpacks no further than it is asked to. Of the others a few bytes may become gigabytes.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
HIDDEN = (".", "__MACOSX")


def stat_regular(path: Path) -> os.stat_result:
    """`stat` of a regular file.

    Raises:
      OSError: there is none, or something else; `strerror` says what.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "special file")
        raise OSError(errno.EINVAL, f"a {kind}, no regular file", str(path))
    return status


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file to read; see `stat_regular`."""
    stat_regular(path)
    # Does not wait for a writer, if a FIFO has taken its place.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")


def open_any(path) -> BinaryIO:
    """Opens an `epath.Path` to read: an object of a bucket, or a regular file."""
    return path.open("rb") if "://" in str(path) else open_regular(Path(path))


def list_folder(root: Path, field: str) -> dict[str, Path]:
    """All that lies under `root`, by its name there, in order; names of folders end in "/".

    Links are followed; what is hidden is left out, with all that lies in it.

    Raises:
      UserError: a folder cannot be read, a link leads nowhere, to a folder that it lies in or to one that another
        link leads to; names it, after `field`.
    """
    try:
        folders = dict(_walk(root, field))
    except OSError as error:
        raise UserError(f"{field}: {error.filename} cannot be read ({error.strerror})") from error
    return {path.relative_to(root).as_posix() + "/" * folders[path]: path for path in sorted(folders)}


def _walk(root: Path, field: str) -> Iterator[tuple[Path, bool]]:
    """Paths, and whether each is a folder; without order.

    Remembers where links led, or two links in each of many folders would multiply.
    """
    linked = set()
    waiting = [(root, {_identity(root): root})]
    while waiting:
        folder, above = waiting.pop()
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith(HIDDEN):
                    continue
                path = folder / entry.name
                if entry.is_symlink():
                    path.stat()  # fails where it leads nowhere
                yield path, entry.is_dir()
                if not entry.is_dir():
                    continue
                identity = _identity(path)
                if entry.is_symlink():
                    if identity in above:
                        raise UserError(f"{field}: {path} is a link to {above[identity]}, where it lies itself")
                    if identity in linked:
                        problem = f"{path} is a link to {path.resolve()}, which another link leads to as well"
                        raise UserError(f"{field}: {problem}")
                    linked.add(identity)
                waiting.append((path, above | {identity: path}))


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def list_zip(path, field: str) -> list[zipfile.ZipInfo]:
    """The entries of a zip, with names that stay inside a folder.

    Args:
      path: an `epath.Path`, which may lie in a bucket.
    Raises:
      UserError: it cannot be read, or holds another name; names it, after `field`.
    """
    try:
        with open_zip(path) as archive:
            entries = archive.infolist()
    except Exception as error:  # zipfile raises a dozen kinds on damaged input
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{field}: {path} is not a readable zip file ({reason})") from error
    for name in (entry.filename for entry in entries):
        parts = name.replace("\\", "/").split("/")
        if name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]:
            raise UserError(f"{field}: {path} holds the unsafe name {name!r}; allowed: relative names")
    return entries


@contextlib.contextmanager
def open_zip(path) -> Iterator[zipfile.ZipFile]:
    """A zip, in a bucket too; raises what `open_regular` and zipfile do."""
    with open_any(path) as file, zipfile.ZipFile(file) as archive:
        yield archive


def check_entry(entry: zipfile.ZipInfo, where: str) -> None:
    """Raises UserError, that begins with `where`, for an entry that `read_entry` would not read."""
    if entry.flag_bits & 0x41:
        raise UserError(f"{where}: {entry.filename} is encrypted; allowed: entries that need no password")
    if entry.compress_type not in METHODS:
        raise UserError(
            f"{where}: {entry.filename} is compressed by method {entry.compress_type}; allowed: stored or deflated"
        )


def read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """The content of an entry: no more of it is unpacked than the zip's directory says it has."""
    with archive.open(entry) as file:
        return file.read(entry.file_size)


def read_regular(path: Path, num_bytes: int) -> bytes:
    """The first `num_bytes` of a regular file."""
    with open_regular(path) as file:
        return file.read(num_bytes)
