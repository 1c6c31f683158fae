"""Helpers of all packages: errors that a user can correct, paths, atomic writes, work on all cores."""

import argparse
import collections
import concurrent.futures
import contextlib
import os
import pathlib
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from etils import epath

STALE_SEC = 3600


# ---- errors ------------------------------------------------------------------------------------------


def printable(text: object) -> str:
    """Escape control characters: names in a file that others made must not control a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def one_line(error: object) -> str:
    """Return the text of an error in one line; its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


class UserError(Exception):
    """A mistake that the user can correct. Its text is one line, printed without a traceback."""


class BadSetting(UserError):
    """A value that is allowed in general, but not with this data or on these devices."""


# ---- paths ------------------------------------------------------------------------------------------


def expanded(path: str | os.PathLike, name: str = "") -> str:
    """Return a path with the home folder in place of ~ or ~USER at its beginning. URLs stay as they are.

    Args:
      name: the flag or config field that gave it, for the message.
    Raises:
      BadSetting: there is no such home folder.
    """
    text = os.fspath(path)
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError as error:
        home, given = text.split("/")[0], f"{name}: {text}" if name else text
        raise BadSetting(f"{given}: there is no home folder {home}; allowed: ~, ~USER, or ./{home} here") from error


def address_argument(text: str) -> str:
    """Return the path or URL that an argument of argparse is; for its `type`."""
    try:
        return expanded(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def path_argument(text: str) -> Path:
    """Return the path of this machine that an argument of argparse is; for its `type`."""
    return Path(address_argument(text))


def read_text(path: str, field: str) -> str:
    """Return the content of a text file in UTF-8, local or in a bucket, with or without a byte order mark.

    Args:
      field: the config field or flag that gives it, for the message.
    Raises:
      BadSetting: it cannot be read, or is no text.
    """
    try:
        return epath.Path(expanded(path, field)).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSetting(f"{field}: {path} cannot be read (it is no text)") from error
    except (OSError, ValueError, ImportError) as error:  # the path may be none
        raise BadSetting(f"{field}: {path} cannot be read ({getattr(error, 'strerror', None) or error})") from error


# ---- files: paths of pathlib or of epath (gs://) -----------------------------------------------------


def beside(path):
    """Return a hidden path beside `path` for its replacement, which no other process gets.

    Its name is random, since containers that mount one folder may have the same host name and pid.
    """
    return path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"


@contextlib.contextmanager
def replacing(path):
    """Yield a path to write to. The file replaces `path` if the block ends well, and is removed otherwise."""
    temporary = beside(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path, field: str = "--workdir"):
    """Turn errors of the disk into a UserError of one line that names the field or flag, and the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{field}: cannot write {path} ({error.strerror or error})") from error


def write_through(path, content) -> None:
    """Write bytes to a file that is on disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def remove_stale(path) -> None:
    """Remove what killed processes left `beside` `path`, where this process may.

    What was written to in the last `STALE_SEC` stays: a process on another host may be at work on it.
    """
    remove_stale_in(path.parent, re.escape(path.name))


def remove_stale_in(folder, name: str = ".*") -> None:
    """Remove what killed processes left `beside` any file of a folder that belongs to this code.

    Args:
      name: regular expression of the files' names.
    """
    for candidate in folder.iterdir() if folder.exists() else ():
        with contextlib.suppress(OSError):  # another process removes it too, or it is another user's
            is_leftover = re.fullmatch(rf"\.{name}\.[0-9a-f]{{32}}\.tmp", candidate.name)
            if is_leftover and time.time() - _last_written(candidate) > STALE_SEC:
                remove(candidate)


def remove(path) -> None:
    """Remove a file or a whole folder, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        if isinstance(path, pathlib.Path) and path.is_dir():
            shutil.rmtree(path)
        elif path.is_dir():
            path.rmtree()
        else:
            path.unlink()


def _last_written(path) -> float:
    """Return the time of the last change of a path or of anything in it; a growing file changes no folder."""
    # Folders of a bucket have no time. Elsewhere epath asks for the owner's name, which a container may not know.
    is_url = "://" in os.fspath(path)
    modified = (path.stat().mtime or 0) if is_url else pathlib.Path(path).stat().st_mtime
    return max([modified, *map(_last_written, path.iterdir() if path.is_dir() else ())])


def path_within(folder, name: str, field: str) -> pathlib.Path:
    """Return the path of an example in a folder; names of examples may come from someone else.

    Args:
      field: the flag that gives the folder, for messages.
    Raises:
      UserError: the path would lie outside.
    """
    inner = pathlib.PurePosixPath(name)
    if inner.is_absolute() or ".." in inner.parts:
        raise UserError(f"{field}: the example {name!r} would lie outside; allowed: relative names")
    return pathlib.Path(folder) / inner


# ---- ranges of examples ------------------------------------------------------------------------------


def run_ranges(work: Callable[[int, int], None], length: int, num_threads: int | None = None) -> None:
    """Run `work(begin, end)` over pieces of range(length) in threads; the first error wins.

    Args:
      num_threads: number of threads; None takes one per core.
    """
    num_workers = num_threads or os.cpu_count() or 1
    if num_workers == 1:
        return work(0, length)
    edges = np.unique(np.linspace(0, length, 4 * num_workers + 1).astype(int)).tolist()
    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        collections.deque(pool.map(work, edges[:-1], edges[1:]), maxlen=0)  # an error cancels the rest


def iterate_batches(length: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices that cover range(length)."""
    for begin in range(0, length, size):
        yield slice(begin, min(begin + size, length))
