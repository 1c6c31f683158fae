"""Files and folders that appear whole or not at all: written beside their place, then renamed.

Paths may be those of pathlib or of epath (gs://).
"""

import contextlib
import os
import pathlib
import re
import time
import uuid

STALE_SEC = 3600


def beside(path):
    """A hidden path beside `path` for what will take its place; no process has it but the caller.

    Host name and pid would not do: containers that mount one folder may have both in common.
    """
    return path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"


@contextlib.contextmanager
def replacing(path):
    """Gives a path to write a file to, which takes the place of `path` if the block ends well and else goes."""
    temporary = beside(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_stale(path) -> None:
    """Removes what processes that were killed left `beside` `path`, as far as that can be done.

    That is, what nobody has written to for `STALE_SEC`: its own process may be at work on another host.
    """
    if not path.parent.exists():
        return
    name = re.escape(path.name)
    left_behind = re.compile(rf"\.{name}\.[0-9a-f]{{32}}\.tmp|\.tmp-{name}-.*")  # the second as older code named it
    for left in path.parent.iterdir():
        with contextlib.suppress(OSError):  # another process removes it too, or it is another user's
            if left_behind.fullmatch(left.name) and time.time() - _last_written(left) > STALE_SEC:
                remove(left)


def remove(path) -> None:
    """Removes a file, or a folder with all that is in it, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir():
            path.rmtree()
        else:
            path.unlink()


def _last_written(path) -> float:
    """Time of the last change; of a folder or of anything in it, for its own stands still while a file grows."""
    inside = path.iterdir() if path.is_dir() else ()
    return max(_modified(path), *map(_last_written, inside), 0)


def _modified(path) -> float:
    if "://" in os.fspath(path):
        return path.stat().mtime or 0  # folders there have none
    return pathlib.Path(path).stat().st_mtime  # epath's asks for the owner's name, which a container may not know
