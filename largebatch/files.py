"""Files and folders that appear whole or not at all: written beside the target under another name, then renamed.

Paths may be those of pathlib or of epath (gs://).
"""

import contextlib
import os
import pathlib
import re
import shutil
import time
import uuid

from largebatch.errors import UserError

STALE_SEC = 3600


def beside(path):
    """A hidden path beside `path`, for what will take its place. No other process gets the same one.

    A random name, since containers that mount one folder may have the same host name and pid.
    """
    return path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"


@contextlib.contextmanager
def replacing(path):
    """Gives a path to write a file to. It replaces `path` if the block ends well, and is removed otherwise."""
    temporary = beside(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_through(path, content) -> None:
    """Writes bytes to a file that is on disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def remove_stale(path) -> None:
    """Removes what killed processes left `beside` `path`, where this process may.

    Nothing that was written to in the last `STALE_SEC`: a process on another host may be at work on it.
    """
    name = re.escape(path.name)
    # The second is the name that older code gave.
    _remove_old(path.parent, re.compile(rf"\.{name}\.[0-9a-f]{{32}}\.tmp|\.tmp-{name}-.*"))


def remove_stale_in(folder) -> None:
    """The same for whatever they left in a folder that belongs to this code."""
    _remove_old(folder, re.compile(r"\..*\.[0-9a-f]{32}\.tmp"))


def _remove_old(folder, leftover: re.Pattern) -> None:
    if not folder.exists():
        return
    for candidate in folder.iterdir():
        with contextlib.suppress(OSError):  # another process removes it too, or it is another user's
            if leftover.fullmatch(candidate.name) and seconds_untouched(candidate) > STALE_SEC:
                remove(candidate)


def seconds_untouched(path) -> float:
    """Since the last change of a file, or of anything in a folder."""
    return time.time() - _last_written(path)


def remove(path) -> None:
    """Removes a file or a whole folder, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        if isinstance(path, pathlib.Path) and path.is_dir():
            shutil.rmtree(path)
        elif path.is_dir():
            path.rmtree()
        else:
            path.unlink()


def num_bytes(path) -> int:
    """Of a file, or of all in a folder."""
    if path.is_dir():
        return sum(map(num_bytes, path.iterdir()))
    return path.stat().length if "://" in os.fspath(path) else pathlib.Path(path).stat().st_size


def _last_written(path) -> float:
    """Time of the last change; for a folder that of anything in it: its own does not change while a file grows."""
    inside = path.iterdir() if path.is_dir() else ()
    return max(_modified(path), *map(_last_written, inside), 0)


def _modified(path) -> float:
    if "://" in os.fspath(path):
        return path.stat().mtime or 0  # folders of a bucket have none
    # Not epath's `stat`: it asks for the name of the owner, which a container may not know.
    return pathlib.Path(path).stat().st_mtime


def path_within(folder, name: str, field: str) -> pathlib.Path:
    """The path of an example in a folder; examples and their names may come from someone else.

    Args:
      field: the flag that says the folder, for messages.
    Raises:
      UserError: it would lie outside.
    """
    inner = pathlib.PurePosixPath(name)
    if inner.is_absolute() or ".." in inner.parts:
        raise UserError(f"{field}: the example {name!r} would lie outside; allowed: relative names")
    return pathlib.Path(folder) / inner
