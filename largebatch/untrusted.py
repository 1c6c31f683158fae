"""Reading files that a user names, which may be anything.

Only regular files are opened, links are followed but not in circles, and the entries of a zip are checked.
"""

import errno
import io
import os
import stat
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from etils import epath

from largebatch.util import BadSetting, UserError, expanded

KINDS = {
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFDIR: "folder",
}
# Compression methods of which zipfile unpacks no more than it is asked to. With the others a few bytes may become
# gigabytes.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
HIDDEN = (".", "__MACOSX")
MAX_TEXT_BYTES = 2**26
# What stands before the content of an entry of a zip: a signature, and last the lengths of name and extra field.
LOCAL_HEADER, LOCAL_SIGNATURE = struct.Struct("<4s22xHH"), b"PK\x03\x04"
LOCAL_HEADER_BYTES = 512  # that are read before the content; few entries have more there
SPARE_BYTES = 2**16  # by which packing may make an entry larger


def stat_regular(path: Path) -> os.stat_result:
    """`stat` of a regular file.

    Raises:
      OSError: there is no such file, or it is not a regular one; `strerror` says what it is.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "special file")
        raise OSError(errno.EINVAL, f"a {kind}, no regular file", str(path))
    return status


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading; raises as `stat_regular`."""
    stat_regular(path)
    # O_NONBLOCK: should a FIFO have taken its place by now, this does not wait for a writer.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")


def open_any(path) -> BinaryIO:
    """Opens an `epath.Path` for reading: an object of a bucket, or a regular file."""
    return path.open("rb") if "://" in str(path) else open_regular(Path(path))


def list_folder(root: Path, field: str) -> dict[str, Path]:
    """All files and folders under `root`.

    Links are followed. What is hidden is left out, with all that lies in it.

    Args:
      field: the config field or flag that `root` comes from, for messages.
    Returns:
      Paths by their names relative to `root`, sorted; names of folders end in "/".
    Raises:
      UserError: a folder cannot be read; or a link leads nowhere, to a folder that it lies in, or to one that
        another link leads to.
    """
    try:
        folders = dict(_walk(root, field))
    except OSError as error:
        raise UserError(f"{field}: {error.filename} cannot be read ({error.strerror})") from error
    return {path.relative_to(root).as_posix() + "/" * folders[path]: path for path in sorted(folders)}


def _walk(root: Path, field: str) -> Iterator[tuple[Path, bool]]:
    """Yields paths in no order, each with whether it is a folder."""
    linked = set()  # folders that links led to: with two links in each of many folders, paths would multiply
    waiting = [(root, {_identity(root): root})]  # folders to read, each with itself and those it lies in
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
                        raise UserError(
                            f"{field}: {path} is a link to {path.resolve()}, which another link leads to as well"
                        )
                    linked.add(identity)
                waiting.append((path, {**above, identity: path}))


def _identity(folder: Path) -> tuple[int, int]:
    """What is the same for all paths to one folder."""
    status = folder.stat()
    return status.st_dev, status.st_ino


def list_zip(path, field: str) -> list[zipfile.ZipInfo]:
    """The entries of a zip. Their names all stay inside the folder that it would be unpacked to.

    Args:
      path: an `epath.Path`, which may lie in a bucket.
      field: the config field or flag that `path` comes from, for messages.
    Raises:
      UserError: the zip cannot be read, or holds a name that leads elsewhere.
    """
    try:
        with open_any(path) as file, zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except Exception as error:  # zipfile raises a dozen kinds on damaged input
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{field}: {path} is not a readable zip file ({reason})") from error
    for name in (entry.filename for entry in entries):
        parts = name.replace("\\", "/").split("/")
        if name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]:
            raise UserError(f"{field}: {path} holds the unsafe name {name!r}; allowed: relative names")
    return entries


def check_entry(entry: zipfile.ZipInfo, where: str) -> None:
    """Refuses an entry that a `ZipReader` would not read.

    Raises:
      UserError: it is encrypted or compressed by another method; the text begins with `where`.
    """
    if entry.flag_bits & 0x41:
        raise UserError(f"{where}: {entry.filename} is encrypted; allowed: entries that need no password")
    if entry.compress_type not in METHODS:
        raise UserError(
            f"{where}: {entry.filename} is compressed by method {entry.compress_type}; allowed: stored or deflated"
        )


class ZipReader:
    """Reads entries that `list_zip` gave; several threads may at once.

    Args:
      path, field: as for `list_zip`.
    Raises:
      UserError: the zip cannot be opened.
    """

    def __init__(self, path, field: str):
        try:
            self._file = open_any(path)
        except OSError as error:  # gone since it was listed
            raise UserError(f"{field}: {path} cannot be read ({error.strerror or error})") from error
        self._archive = None
        self._opening = threading.Lock()

    def read(self, entry: zipfile.ZipInfo) -> bytes:
        """The content of an entry; unpacks no more bytes than the zip's directory says it has.

        Raises:
          zipfile.BadZipFile, and a dozen others: the entry is damaged.
        """
        content = self._read_plain(entry)
        if content is not None:
            return content
        with self._opening:
            if self._archive is None:
                self._archive = zipfile.ZipFile(self._file)
        with self._archive.open(entry) as file:
            return file.read(entry.file_size)

    def _read_plain(self, entry: zipfile.ZipInfo) -> bytes | None:
        """The content of an entry of a local file, mostly by one system call; None where zipfile should judge.

        The Python code of zipfile takes longer than decoding a small image, and lets one thread in at a time.
        """
        if entry.file_size == 0 or entry.compress_size > entry.file_size + SPARE_BYTES:
            return None
        try:
            descriptor = self._file.fileno()
            beginning = os.pread(descriptor, LOCAL_HEADER_BYTES + entry.compress_size, entry.header_offset)
            signature, name_bytes, extra_bytes = LOCAL_HEADER.unpack_from(beginning)
            if signature != LOCAL_SIGNATURE:
                return None
            start = LOCAL_HEADER.size + name_bytes + extra_bytes
            content = beginning[start : start + entry.compress_size]
            if len(content) < entry.compress_size:  # a long name, or much that is extra
                content = os.pread(descriptor, entry.compress_size, entry.header_offset + start)
            if entry.compress_type == zipfile.ZIP_DEFLATED:
                content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, entry.file_size)
        except (OSError, ValueError, AttributeError, struct.error, zlib.error):
            return None
        is_sound = len(content) == entry.file_size and zlib.crc32(content) == entry.CRC
        return content if is_sound else None

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def read_regular(path: Path, num_bytes: int) -> bytes:
    """The first `num_bytes` of a regular file."""
    with open_regular(path) as file:
        return file.read(num_bytes)


def read_text(path: str, field: str) -> str:
    """The content of a text file in UTF-8, of at most MAX_TEXT_BYTES.

    Args:
      field: the config field or flag that `path` comes from, for messages.
    Raises:
      BadSetting: it cannot be read, is larger or is no text.
    """
    found = epath.Path(expanded(path, field))
    try:
        with open_any(found) as file:
            content = file.read(MAX_TEXT_BYTES + 1)
    except (OSError, ValueError, ImportError) as error:  # the path may be none
        raise BadSetting(f"{field}: {path} cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if len(content) > MAX_TEXT_BYTES:
        raise BadSetting(f"{field}: {path} is too large; allowed: up to {MAX_TEXT_BYTES} bytes of text")
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise BadSetting(f"{field}: {path} cannot be read (it is no text)") from error
