"""Files of a data set in a folder or a zip, read by their names, and a digest that tells when they change."""

import contextlib
import functools
import hashlib
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from largebatch.util import UserError, expanded, one_line

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff")
# What operating systems and disk stations leave beside the user's files.
HIDDEN_PREFIXES, SYSTEM_FILES = (".", "__MACOSX"), ("thumbs.db", "desktop.ini", "@eadir")
# Control characters, line ends and surrogate escapes of bytes that are no UTF-8.
UNSAFE_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True)
class FileSet:
    """Files by their names, without those that systems hide.

    Attributes:
      path: path of the folder or zip.
      where: the path behind the field or flag that gives it, for messages.
      names: relative names with "/" between the parts; those of folders end in "/".
      read: function that returns the content of a file; threads may call it at once. It raises UserError.
    """

    path: str
    where: str
    names: list[str]
    read: Callable[[str], bytes]


def open_files(path: str, field: str, kind: str = "auto") -> FileSet:
    """Open the files of a folder or zip, or a single image.

    Args:
      path: a local path of a folder, zip or image, or a URL of a zip in a bucket.
      field: the config field or flag that gives it, for messages.
      kind: "folder", "zip" or "auto".
    Raises:
      UserError: the path does not exist, or cannot be read, or is not of that kind.
    """
    root = epath.Path(expanded(path, field))
    if not root.exists():
        raise UserError(f"{field}: {path} does not exist")
    if kind == "folder" and not root.is_dir():
        raise UserError(f"{field}: {path} is not a folder; dataset.source 'folder' needs one")
    where = f"{field}: {path}"
    if kind != "zip" and root.is_dir():
        return _open_folder(os.fspath(root), where)
    if kind == "auto" and "://" not in path and is_image(root.name, field):
        return FileSet(os.fspath(root), where, [root.name], functools.partial(_read, os.fspath(root.parent), where))
    return _open_zip(root, where)


def is_hidden(name: str) -> bool:
    """Return True for the name of a file or folder that is not the user's own."""
    return name.startswith(HIDDEN_PREFIXES) or name.lower() in SYSTEM_FILES


def is_image(name: str, where: str) -> bool:
    """Return True if the suffix of a name is that of an image.

    Raises:
      UserError: the name does not fit into one line of UTF-8 text; the message begins with `where`.
    """
    if not name.lower().endswith(IMAGE_SUFFIXES):
        return False
    if UNSAFE_CHARACTERS.search(name):
        raise UserError(f"{where} holds the unsafe name {name!a}; allowed: no control characters, UTF-8")
    return True


def image_names(files: FileSet) -> list[str]:
    """Return the sorted names of all images among files; raise UserError if there are none."""
    names = sorted(name for name in files.names if is_image(name, files.where))
    if not names:
        raise UserError(f"{files.where} holds no {'/'.join(IMAGE_SUFFIXES)} files")
    return names


def walk(root: str, on_error: Callable[[OSError], None] | None = None) -> Iterator[str]:
    """Yield the names of all files and folders below `root`; names of folders end in "/".

    Links are followed, but for those to a folder that they lie in.

    Args:
      on_error: called with the error of a folder that cannot be read, which is passed over.
    """
    for folder, folders, files in os.walk(root, onerror=on_error, followlinks=True):
        prefix = folder[len(root) :].strip("/")
        prefix += "/" * bool(prefix)
        within = Path(os.path.realpath(folder))
        folders[:] = [name for name in folders if not is_hidden(name) and not _leads_back(folder, name, within)]
        yield from (f"{prefix}{name}/" for name in folders)
        yield from (prefix + name for name in files if not is_hidden(name))


def _leads_back(folder: str, name: str, within: Path) -> bool:
    """Return True if an entry of `folder`, which is really `within`, is a link to a folder around it."""
    path = Path(folder, name)
    return path.is_symlink() and within.is_relative_to(os.path.realpath(path))


def _read(folder: str, where: str, name: str) -> bytes:
    try:
        return Path(folder, name).read_bytes()
    except OSError as error:
        raise UserError(f"{where}: {name} cannot be read ({error.strerror})") from error


def _open_folder(root: str, where: str) -> FileSet:
    def refuse(error: OSError) -> None:
        raise UserError(f"{where}: {error.filename} cannot be read ({error.strerror})") from error

    names = sorted(walk(root, refuse), key=lambda name: name.split("/"))
    for name in names:  # a link to a folder of images that is gone would otherwise count as a file of another kind
        if not name.lower().endswith((*IMAGE_SUFFIXES, "/")) and not Path(root, name).exists():
            raise UserError(f"{where}: {name} is a link to nowhere")
    return FileSet(root, where, names, functools.partial(_read, root, where))


def _open_zip(path: epath.Path, where: str) -> FileSet:
    try:
        is_local = "://" not in os.fspath(path)
        archive = zipfile.ZipFile(os.fspath(path) if is_local else path.open("rb"))
    except Exception as error:  # zipfile raises a dozen kinds on damaged input
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"{where} is not a readable zip file ({reason})") from error
    entries = [(_plain_name(entry.filename), entry) for entry in archive.infolist()]
    entries = [(name, entry) for name, entry in entries if name and not any(map(is_hidden, name.split("/")))]
    entry_of = dict(entries)

    def read(name: str) -> bytes:
        try:
            return archive.read(entry_of[name])
        except Exception as error:  # the same dozen, also for a password or an unknown compression
            raise UserError(f"{where}: {name} cannot be read ({' '.join(str(error).split())})") from error

    return FileSet(os.fspath(path), where, [name for name, _ in entries], read)


def _plain_name(name: str) -> str:
    """Return the name of an entry with "/" between its parts, where Windows writes "\\", and without "." parts."""
    return "/".join(part for part in name.replace("\\", "/").split("/") if part != ".")


# ---- changes -----------------------------------------------------------------------------------------


def stamp_of(places: list[epath.Path]) -> str | None:
    """Return a digest of (relative name, size, time of the last change) of all files in some places.

    Times are in ns, but in a bucket in seconds. It takes one `stat` a file, 5 us on a local disk.

    Args:
      places: folders and files; empty for a set that is generated, not read.
    Returns:
      The digest, or None if nothing is there that can be read.
    """
    digest, is_there = hashlib.sha256(), not places
    for place in places:
        digest.update(b"\0")
        # Nothing is there, or nothing that this host can read.
        with contextlib.suppress(OSError, ValueError, RuntimeError, ImportError):
            for line in _lines(place):
                digest.update(os.fsencode(line))
                is_there = True
    return digest.hexdigest() if is_there else None


def _lines(place: epath.Path) -> Iterator[str]:
    """Yield a line for a file, or for each file and folder below a folder, in an order that depends on names."""
    root = os.fspath(place)
    if "://" in root:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            status = path.stat()
            yield f"{os.fspath(path).removeprefix(root)} {status.length} {status.mtime}\n"
        return
    for name in sorted(walk(root)) if Path(root).is_dir() else [""]:
        line = name
        if not name.endswith("/"):
            with contextlib.suppress(OSError if name else ()):  # a dangling link, which is reported when it is read
                status = os.stat(f"{root}/{name}" if name else root)  # noqa: PTH116 (half the time of a Path)
                line = f"{name} {status.st_size} {status.st_mtime_ns}"
        yield f"{line}\n"
