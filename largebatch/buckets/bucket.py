"""Run folder in a bucket, as gs://BUCKET/run or s3://BUCKET/run: a folder on this machine that is copied there.

The run is written on this machine, and copied after every checkpoint and at its end. No object can be renamed, and
a copy may end anywhere. So each copy writes what changed below a name of its own, and then one object, the pointer:

    gs://BUCKET/run/COPY/checkpoints/00000300/...  files of the folder that COPY found changed
    gs://BUCKET/run/tensorboard/...                in their place, where TensorBoard follows them
    gs://BUCKET/run/pointer.json                   {"id": of the last copy, "files": {name: COPY that has it}, ...}

What the pointer does not name is no part of the run, and is removed. A process that finds another id in it than its
own stops: another process writes to the same place.
"""

import atexit
import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import fsspec

from largebatch import util
from largebatch.util import UserError, expanded

log = logging.getLogger("largebatch")

POINTER, STATE, LOCK, CHECKPOINTS = "pointer.json", ".copied.json", "lock", "checkpoints"
LIVE = "tensorboard/"  # files that TensorBoard follows in the bucket, and no run needs to go on
LOCAL_FOLDERS = "~/.cache/largebatch/runs"
PROBE = "probe-"  # prefix of temporary objects
ATTEMPTS = 5  # to read or copy files that a process changes meanwhile
NOTHING = {"id": None, "seconds": 0, "files": {}}
NOISY = ("gcsfs", "s3fs", "google", "aiobotocore", "botocore")  # loggers of errors that are raised too


class Unreachable(UserError):
    """Raised when the bucket cannot be read or written just now."""


def is_url(path) -> bool:
    """Return True if a path is a URL, as of a bucket."""
    return "://" in str(path)


def local_copy(path) -> Path:
    """Return a folder to read a run from: `path` itself, or a copy until this process ends if it is in a bucket.

    Raises:
      UserError: the bucket cannot be read, or has no run at this path.
    """
    if not is_url(path):
        return Path(expanded(path))
    url = str(path).rstrip("/")
    if (copy := Bucket(url).read_pointer()["id"]) is None:
        raise UserError(f"{path}: no run is there; allowed: what train.py --workdir {path} has written")
    return _copy_for_reading(url, copy)


@functools.cache
def _copy_for_reading(url: str, copy: str) -> Path:
    del copy  # another one is fetched again
    parent = tempfile.mkdtemp(prefix="largebatch-")
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    found = Bucket(url, Path(parent) / PurePosixPath(url).name)
    try:
        found.pull()
    except OSError as error:
        raise UserError(f"cannot write {parent} ({error.strerror or error})") from error
    seconds = found.read_pointer()["seconds"]  # files tell when the run last gave a sign of life
    for file in found.folder.rglob("*"):
        os.utime(file, (seconds, seconds))
    return found.folder


class Bucket:
    """Folder in a bucket, and the folder on this machine that is copied there.

    Args:
      folder: folder on this machine; None takes one named after the URL.
    Raises:
      UserError: from the constructor, if the URL names no folder in a bucket.
      Unreachable: from every method that reads or writes, if that fails.
    """

    def __init__(self, url: str, folder: Path | None = None):
        self.url = url.rstrip("/")
        if not re.fullmatch(r"[a-z0-9+]+://[^/]+(/[^/]+)+", self.url):
            raise UserError(f"--workdir: {url}; allowed: a folder, or gs://BUCKET/FOLDER or s3://BUCKET/FOLDER")
        digest = hashlib.sha256(self.url.encode()).hexdigest()[:12]
        own_folder = Path(expanded(LOCAL_FOLDERS)) / f"{PurePosixPath(self.url).name}-{digest}"
        self.folder = folder or own_folder
        self._pointer = NOTHING
        self._ids: list[str | None] = [None]  # possible ids of the pointer if no other process wrote it
        self._copied: dict[str, list] = {}  # {name: [copy, size, time in ns]} of files as they were copied

    @functools.cached_property
    def _files_and_root(self) -> tuple[fsspec.AbstractFileSystem, str]:
        for name in NOISY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            return fsspec.url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            hint = "allowed: after pip install -r requirements-cloud.txt"
            raise UserError(f"--workdir: {self.url} needs a package ({error}); {hint}") from error
        except ValueError as error:
            raise UserError(f"--workdir: {self.url} ({error}); allowed: gs://... or s3://...") from error

    @property
    def _files(self) -> fsspec.AbstractFileSystem:
        return self._files_and_root[0]

    def _at(self, name: str, copy: str | None = None) -> str:
        """Return the path of an object in the bucket, or of a file of the run in one of its copies."""
        within = name if copy is None or name.startswith(LIVE) else f"{copy}/{name}"
        return f"{self._files_and_root[1]}/{within}"

    # ---- reading --------------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        """Read one file of the run; return None where it has none."""
        copy = self.read_pointer()["files"].get(name)
        return copy and self._read(self._at(name, copy))

    def _read(self, path: str) -> bytes | None:
        with self._reached():
            try:
                return self._files.cat_file(path)
            except FileNotFoundError:
                return None

    def read_pointer(self) -> dict:
        """Read the current pointer; return NOTHING where there is none."""
        content = self._read(self._at(POINTER))
        if content is None:
            return NOTHING
        try:
            pointer = json.loads(content)
            if any(".." in name.split("/") or name.startswith("/") for name in pointer["files"]):
                raise ValueError("a name in it leads out of the folder")
            return {name: pointer[name] for name in NOTHING}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"--workdir: {self.url}/{POINTER} is damaged ({error})") from error

    def probe(self) -> None:
        """Write and remove an object, so that a missing or read-only bucket is found before the work."""
        path = self._at(f"{PROBE}{secrets.token_hex(8)}")
        with self._reached():
            self._files.pipe_file(path, b"probe")
            self._files.rm_file(path)

    def pull(self) -> None:
        """Bring the folder up to date with the bucket; put its files aside if they do not continue that run.

        Raises:
          OSError: the disk of this machine is full.
        """
        state = self.folder / STATE
        if state.exists():
            self._ids, self._copied = json.loads(state.read_bytes())
        self._pointer = self.read_pointer()
        if self._pointer["id"] in self._ids:
            return
        if left := self._own_files():
            aside = self.folder.with_name(f"{self.folder.name}.aside-{secrets.token_hex(4)}")
            aside.mkdir()
            for path in left:
                path.rename(aside / path.name)
            what = "has something else than was copied there from this machine, which is put aside"
            log.warning("--workdir: %s %s in %s", self.url, what, aside)
        self._until_whole(self._download)
        self._write_state(self._pointer["id"])

    def _download(self) -> None:
        self._pointer = self.read_pointer()
        for path in self._own_files():  # of an earlier attempt
            util.remove(path)
        files = self._pointer["files"]
        sources = [self._at(*entry) for entry in files.items()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files.get(sources, [str(self.folder / name) for name in files])
        here = self._files_here()
        self._copied = {name: [copy, *here[name]] for name, copy in files.items()}

    # ---- copying --------------------------------------------------------------------------------------

    def push(self) -> None:
        """Copy the changed files of the folder; wherever that ends, the bucket has this run or the one before.

        Raises:
          UserError: another process has copied to the bucket since.
          OSError: the disk of this machine is full.
        """
        self._check_alone()
        self._until_whole(functools.partial(self._upload, secrets.token_hex(8)))

    def _upload(self, copy: str) -> None:
        here, there = self._files_here(), self._pointer["files"]
        changed = [name for name, stat in here.items() if self._copied.get(name) != [there.get(name), *stat]]
        if not changed and here.keys() == there.keys():
            return
        self._files.put([str(self.folder / name) for name in changed], [self._at(name, copy) for name in changed])
        files = {name: there[name] for name in here.keys() - changed} | dict.fromkeys(changed, copy)
        pointer = {"id": copy, "seconds": time.time(), "files": files}
        self._check_alone()
        self._write_state(self._pointer["id"], copy)  # either one, if the process is killed or the answer is lost
        self._files.pipe_file(self._at(POINTER), json.dumps(pointer, indent=1).encode())
        self._pointer, self._copied = pointer, {name: [files[name], *stat] for name, stat in here.items()}
        self._write_state(copy)
        named = {self._at(POINTER), *(self._at(*entry) for entry in files.items())}
        for path in self._files.find(self._at("")):
            if path.startswith(self._at("")) and path not in named:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(path)

    def _check_alone(self) -> None:
        """Refuse to overwrite what another process copied since this one began."""
        found = self.read_pointer()
        if found["id"] not in self._ids:
            raise UserError(f"--workdir: another process trains in {self.url}: it has written there meanwhile")
        self._pointer = found

    # ---- this machine's folder ------------------------------------------------------------------------

    def _own_files(self) -> list[Path]:
        """Return the content of the folder without its lock."""
        return [path for path in self.folder.glob("*") if path.name != LOCK]

    def _files_here(self) -> dict[str, list[int]]:
        """Return {name: [size, time in ns]} of all files that are to be copied."""
        found = {}
        for path in self.folder.rglob("*"):
            parts = path.relative_to(self.folder).parts
            is_checkpoint = parts[0] != CHECKPOINTS or (len(parts) > 1 and parts[1].isdigit())
            if parts[0].startswith(".") or parts[0] == LOCK or not is_checkpoint:
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink():
                    stat = path.stat()
                    found["/".join(parts)] = [stat.st_size, stat.st_mtime_ns]
        return found

    def _write_state(self, *ids: str) -> None:
        self._ids = list(ids)
        with util.replacing(self.folder / STATE) as temporary:
            util.write_through(temporary, json.dumps([self._ids, self._copied]).encode())

    def _until_whole(self, copy: Callable[[], None]) -> None:
        """Call a function again where files are replaced while it copies them."""
        for attempt in range(1, ATTEMPTS + 1):
            with contextlib.suppress(FileNotFoundError), self._reached(pass_missing=attempt < ATTEMPTS):
                return copy()

    @contextlib.contextmanager
    def _reached(self, *, pass_missing: bool = False) -> Iterator[None]:
        """Turn the errors of the bucket's library into Unreachable, which names the bucket.

        Args:
          pass_missing: True to pass a FileNotFoundError unchanged.
        """
        try:
            yield
        except Exception as error:  # of gcsfs, s3fs, aiohttp, botocore, google.auth, ...
            is_missing = pass_missing and isinstance(error, FileNotFoundError)
            disk_is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            if isinstance(error, UserError) or is_missing or disk_is_full:
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise Unreachable(f"--workdir: {self.url} cannot be read or written ({reason[:300]})") from error
