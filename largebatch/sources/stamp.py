"""A digest of the files of a data set, which tells without opening them that they changed."""

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from largebatch import untrusted


def stamp_of(places: list[epath.Path]) -> str | None:
    """Return a digest of (relative name, size, time of the last change) of all files in some places.

    Links are followed, and what is hidden is left out, as where these files are listed. Times are in ns, but in a
    bucket in seconds.

    This takes one `stat` a file, 4 us on a local disk: 0.11 s for 27,000 files. On a network
    disk it takes as long as that answers so many.

    Args:
      places: folders and files; none of a set that is made, not read.
    Returns:
      None where nothing is there, or nothing that can be read.
    """
    digest, is_there = hashlib.sha256(), not places
    for place in places:
        digest.update(b"\0")
        for line in _lines(place):
            digest.update(line)
            is_there = True
    return digest.hexdigest() if is_there else None


def _lines(place: epath.Path) -> Iterator[bytes]:
    """Yield a line for each file and folder of a place, in an order that follows from their names."""
    is_local = "://" not in os.fspath(place)
    with contextlib.suppress(OSError, ValueError, RuntimeError, ImportError):  # nothing that this host can read
        yield from _local_lines(os.fspath(place)) if is_local else _lines_of_bucket(place)


def _lines_of_bucket(place: epath.Path) -> Iterator[bytes]:
    for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
        status = path.stat()
        yield f"{os.fspath(path).removeprefix(os.fspath(place))} {status.length} {status.mtime}\n".encode()


def _local_lines(root: str) -> Iterator[bytes]:
    status = Path(root).stat()
    if not stat.S_ISDIR(status.st_mode):
        yield _line("", status)
        return
    linked = set()  # folders that links led to: links in a circle have no end
    waiting = [("", root)]
    while waiting:
        prefix, folder = waiting.pop()
        entries = []
        with contextlib.suppress(OSError), os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if entry.name.startswith(untrusted.HIDDEN):
                continue
            name, status = prefix + entry.name, None
            with contextlib.suppress(OSError):  # as of a link that leads nowhere, which is named where it is read
                status = entry.stat()
            if status is None or not stat.S_ISDIR(status.st_mode):
                yield _line(name, status)
                continue
            yield os.fsencode(f"{name}/\n")
            identity = status.st_dev, status.st_ino
            if not entry.is_symlink() or identity not in linked:
                waiting.append((f"{name}/", entry.path))
            if entry.is_symlink():
                linked.add(identity)


def _line(name: str, status: os.stat_result | None) -> bytes:
    return os.fsencode(name) + (f" {status.st_size} {status.st_mtime_ns}\n" if status else " unreadable\n").encode()
