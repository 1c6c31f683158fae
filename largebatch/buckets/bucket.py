"""Run folder in a bucket, as gs://BUCKET/run or s3://BUCKET/run: a folder on this machine that is copied there.

The run is written on this machine, and copied after every checkpoint and at its end. No object can be renamed, and
a copy may end anywhere. So each copy writes what changed below a name of its own, and then one object, the pointer:

    gs://BUCKET/run/COPY/checkpoints/00000300/...  files of the folder that COPY found changed
    gs://BUCKET/run/tensorboard/...                in their place, where TensorBoard follows them
    gs://BUCKET/run/pointer.json                   {"id": of the last copy, "files": {name: [COPY, size, time]}}

What the pointer does not name is no part of the run, and is removed. A process that finds another id in it than its
own stops: another process writes to the same place.
"""

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import fsspec

from largebatch import util
from largebatch.util import UserError, expanded, one_line

log = logging.getLogger("largebatch")

POINTER, STATE, LOCK, CHECKPOINTS = "pointer.json", ".copied.json", "lock", "checkpoints"
LIVE = "tensorboard/"  # files that TensorBoard follows in the bucket, and no run needs to resume
LOCAL_FOLDERS = "~/.cache/largebatch/runs"
PROBE = "probe"  # object that shows that the bucket can be written
NOTHING = {"id": None, "files": {}}
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
    copy = Bucket(url).read_pointer()["id"]
    if copy is None:
        raise UserError(f"{path}: no run is there; allowed: what train.py --workdir {path} has written")
    return _copy_for_reading(url, copy)


@functools.cache
def _copy_for_reading(url: str, copy: str) -> Path:
    del copy  # another one is fetched again
    parent = tempfile.mkdtemp(prefix="largebatch-")
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    fetched = Bucket(url, Path(parent) / PurePosixPath(url).name)
    fetched.pull()
    return fetched.folder


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
        for name in NOISY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            self._files, self._root = fsspec.url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            hint = "allowed: after pip install -r requirements-cloud.txt"
            raise UserError(f"--workdir: {self.url} needs a package ({error}); {hint}") from error
        except ValueError as error:
            raise UserError(f"--workdir: {self.url} ({error}); allowed: gs://... or s3://...") from error
        digest = hashlib.sha256(self.url.encode()).hexdigest()[:12]
        own_folder = Path(expanded(LOCAL_FOLDERS)) / f"{PurePosixPath(self.url).name}-{digest}"
        self.folder = folder or own_folder
        self._ids: list[str | None] = [None]  # possible ids of the pointer if no other process wrote it

    def _at(self, name: str, copy: str | None = None) -> str:
        """Return the path of an object in the bucket, or of a file of the run in one of its copies."""
        within = name if copy is None or name.startswith(LIVE) else f"{copy}/{name}"
        return f"{self._root}/{within}"

    # ---- reading --------------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        """Read one file of the run; return None where it has none."""
        entry = self.read_pointer()["files"].get(name)
        return entry and self._read(self._at(name, entry[0]))

    def _read(self, path: str) -> bytes | None:
        with self._reached(), contextlib.suppress(FileNotFoundError):
            return self._files.cat_file(path)

    def read_pointer(self) -> dict:
        """Read the current pointer; return NOTHING where there is none.

        Raises:
          UserError: it is damaged.
        """
        content = self._read(self._at(POINTER))
        try:
            pointer = NOTHING if content is None else json.loads(content)
            return {"id": pointer["id"], "files": dict(pointer["files"])}
        except (ValueError, TypeError, KeyError) as error:
            hint = "give another folder, or restore that object"
            raise UserError(f"--workdir: {self.url}/{POINTER} is damaged ({error!r}); {hint}") from error

    def probe(self) -> None:
        """Write an object, so that a missing or read-only bucket is found before the work; `push` removes it."""
        with self._reached():
            self._files.pipe_file(self._at(PROBE), b"probe")

    def pull(self) -> None:
        """Bring the folder up to date with the bucket; put its files aside if they do not continue that run."""
        state = self.folder / STATE
        if state.exists():
            self._ids = json.loads(state.read_bytes())
        if self.read_pointer()["id"] in self._ids:
            return
        if left := self._own_files():
            aside = self.folder.with_name(f"{self.folder.name}.aside-{secrets.token_hex(4)}")
            aside.mkdir()
            for path in left:
                path.rename(aside / path.name)
            what = "has something else than was copied there from this machine, which is put aside"
            log.warning("--workdir: %s %s in %s", self.url, what, aside)
        self._download()

    def _download(self) -> None:
        pointer = self.read_pointer()
        files = pointer["files"]
        sources = [self._at(name, entry[0]) for name, entry in files.items()]
        targets = [util.path_within(self.folder, name, "--workdir") for name in files]
        try:
            with self._reached():
                self.folder.mkdir(parents=True, exist_ok=True)
                self._files.get(sources, [str(target) for target in targets])
                for target, (_, _, time_ns) in zip(targets, files.values(), strict=True):
                    os.utime(target, ns=(time_ns, time_ns))
                self._write_state(pointer["id"])
        except Unreachable:
            if self.read_pointer() == pointer:
                raise
            for path in self._own_files():  # of a copy that a later one replaced meanwhile
                util.remove(path)
            self._download()

    # ---- copying --------------------------------------------------------------------------------------

    def push(self) -> None:
        """Copy the changed files of the folder; wherever that ends, the bucket has this run or the one before.

        Raises:
          UserError: another process has copied to the bucket since.
        """
        with self._reached():
            here, there = self._files_here(), self._own_pointer()["files"]
            changed = [name for name, stat in here.items() if there.get(name, [])[1:] != stat]
            if not changed and here.keys() == there.keys():
                return
            copy = secrets.token_hex(8)
            paths = [self._at(name, copy) for name in changed]
            self._files.put([str(self.folder / name) for name in changed], paths)
            files = {name: [copy, *stat] if name in changed else there[name] for name, stat in here.items()}
            # Either id may be there from now on, if the process is killed or the answer is lost.
            self._write_state(self._own_pointer()["id"], copy)
            pointer = json.dumps({"id": copy, "files": files}, indent=1)
            self._files.pipe_file(self._at(POINTER), pointer.encode())
            named = {self._at(POINTER), *(self._at(name, entry[0]) for name, entry in files.items())}
            for path in self._files.find(self._at("")):
                if path.startswith(self._at("")) and path not in named:
                    self._files.rm_file(path)

    def _own_pointer(self) -> dict:
        """Read the pointer; refuse to overwrite what another process copied since this one began."""
        pointer = self.read_pointer()
        if pointer["id"] not in self._ids:
            raise UserError(f"--workdir: another process trains in {self.url}: it has written there meanwhile")
        return pointer

    # ---- this machine's folder ------------------------------------------------------------------------

    def _own_files(self) -> list[Path]:
        """Return the content of the folder without its lock."""
        return [path for path in self.folder.glob("*") if path.name != LOCK]

    def _files_here(self) -> dict[str, list[int]]:
        """Return {name: [size, time in ns]} of all files that are to be copied."""
        found = {}
        for path in self.folder.rglob("*"):
            first, *rest = path.relative_to(self.folder).parts
            is_unfinished = first == CHECKPOINTS and rest and not rest[0].isdigit()
            if first.startswith(".") or first == LOCK or is_unfinished:
                continue
            if path.is_file() and not path.is_symlink():
                stat = path.stat()
                found["/".join([first, *rest])] = [stat.st_size, stat.st_mtime_ns]
        return found

    def _write_state(self, *ids: str) -> None:
        self._ids = list(ids)
        with util.replacing(self.folder / STATE) as temporary:
            util.write_through(temporary, json.dumps(self._ids).encode())

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Turn the errors of the bucket's library, and of this machine's disk, into Unreachable."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # of gcsfs, s3fs, aiohttp, botocore, google.auth, ...
            raise Unreachable(
                f"--workdir: {self.url} cannot be read or written ({one_line(error)[:300]})"
            ) from error
