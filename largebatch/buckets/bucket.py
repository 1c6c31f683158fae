"""Run folder in a bucket, as gs://BUCKET/run or s3://BUCKET/run: a folder on this machine that is copied there.

The run is written on this machine, and copied after every checkpoint and at its end. An object cannot be renamed,
and a copy may end anywhere. So one object, the pointer, is written last and names the checkpoints that are whole:

    gs://BUCKET/run/checkpoints/00000300/...   the files of the folder, under their names
    gs://BUCKET/run/pointer.json               {"id": of this copy, "checkpoints": {"00000300": SHA-256, ...}}

A checkpoint that the pointer does not name counts as missing. A process that finds another id in it than its own
stops: another process writes to the same place.
"""

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

import fsspec

from largebatch import util
from largebatch.buckets.pointer import Pointer
from largebatch.util import UserError, expanded

log = logging.getLogger("largebatch")

POINTER, STATE = "pointer.json", ".copied.json"
CHECKPOINTS, SUMS, SUMMARY = "checkpoints", "description/metadata", "summary.json"
LOCAL_FOLDERS = "~/.cache/largebatch/runs"
PROBE = "probe-"  # prefix of temporary objects
LOCK = "lock"
ATTEMPTS = 5  # to read or copy files that a process changes meanwhile
NEVER_COPIED = [-1, -1]  # in place of size and time
NOISY = ("gcsfs", "s3fs", "google", "aiobotocore", "botocore")  # loggers of errors that are raised too


class Unreachable(UserError):
    """Raised when the bucket cannot be read or written just now."""


def is_url(path) -> bool:
    """Return True if a path is a URL, as of a bucket."""
    return "://" in str(path)


def local_copy(path) -> Path:
    """Return a folder to read a run from: `path` itself, or a copy of its current content if it is in a bucket.

    Raises:
      UserError: the bucket cannot be read, or has no run at this path.
    """
    if not is_url(path):
        return Path(expanded(path))
    found = Bucket(str(path))
    pointer = found.read_pointer()
    if pointer.id is None:
        raise UserError(f"{path}: no run is there; allowed: what train.py --workdir {path} has written")
    copies = found.folder.with_name(f"{found.folder.name}.read")
    folder = copies / pointer.id / PurePosixPath(found.url).name
    if not folder.exists():
        temporary = util.beside(copies / pointer.id)
        try:
            copy = Bucket(found.url, temporary / folder.name)
            copy.pull()
            copy.date_back()
            temporary.rename(copies / pointer.id)
        except OSError as error:
            if not folder.exists():  # else another process was quicker
                raise UserError(f"cannot write {temporary} ({error.strerror or error})") from error
        finally:
            util.remove(temporary)
        _remove_old(copies)
    return folder


def _remove_old(copies: Path) -> None:
    """Remove all copies but the last two: another process may read the earlier one."""
    times = {}
    for copy in copies.iterdir():
        if not copy.name.startswith("."):
            with contextlib.suppress(FileNotFoundError):  # another reader removes it too
                times[copy] = copy.stat().st_mtime_ns
    for copy in sorted(times, key=times.get)[:-2]:
        hidden = util.beside(copy)  # half removed under its name, it would look newest to another reader
        with contextlib.suppress(FileNotFoundError):
            copy.rename(hidden)
            util.remove(hidden)
    util.remove_stale_in(copies)  # left by killed processes


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
        self._pointer = Pointer()
        self._ids: list[str | None] = [None]  # possible ids of the pointer if no other process wrote it
        self._copied: dict[str, list[int]] = {}  # files in the bucket, with size and time when copied

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

    def _at(self, name: str) -> str:
        """Return the path of an object in the bucket."""
        return f"{self._files_and_root[1]}/{name}"

    # ---- reading --------------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        """Read one file from the bucket; return None where it has none."""
        with self._reached():
            try:
                return self._files.cat_file(self._at(name))
            except FileNotFoundError:
                return None

    def read_pointer(self) -> Pointer:
        """Read the current pointer; return an empty one where there is none."""
        content = self.read(POINTER)
        if content is None:
            return Pointer()
        try:
            return Pointer.parse(content)
        except ValueError as error:
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
        ids, copied = self._read_state()
        self._pointer = self.read_pointer()
        self._ids = [self._pointer.id]
        if self._pointer.id in ids:
            self._copied = copied
            return
        self._put_aside()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with self._reached(pass_missing=attempt < ATTEMPTS):
                    self._download()
                if attempt == ATTEMPTS or not self._damaged():
                    break
                now = self.read_pointer()
                if now.id == self._pointer.id:
                    break
            except FileNotFoundError:
                now = self.read_pointer()
            # A checkpoint was removed or rewritten after the pointer was read.
            self._pointer, self._ids = now, [now.id]
        self._set_damaged_aside()
        self._write_state()

    def date_back(self) -> None:
        """Give the files that `pull` fetched the time at which the run was last copied to the bucket."""
        with self._reached():
            seconds = self._files.modified(self._at(POINTER)).timestamp()
        for path in self.folder.rglob("*"):
            os.utime(path, (seconds, seconds))

    def _download(self) -> None:
        for path in self._own_files():  # of an earlier attempt
            util.remove(path)
        begin = self._at("")
        names = [path.removeprefix(begin) for path in self._files.find(self._at("")) if path.startswith(begin)]
        for name in names:
            if ".." in name.split("/") or name.startswith("/"):
                raise UserError(f"--workdir: {self.url} has an object {name!r}; allowed: names within it")
        wanted = [name for name in names if self._is_part_of_run(name)]
        self.folder.mkdir(parents=True, exist_ok=True)
        if wanted:
            self._files.get([self._at(name) for name in wanted], [str(self.folder / name) for name in wanted])
        here = self._files_here()
        # Files in the bucket alone, as of half a checkpoint, are removed by the next copy.
        self._copied = {name: here.get(name, NEVER_COPIED) for name in names if name != POINTER}

    def _is_part_of_run(self, name: str) -> bool:
        parts = name.split("/")
        if parts[0] == CHECKPOINTS:
            return len(parts) > 2 and parts[1] in self._pointer.checkpoints
        return name != POINTER and not name.startswith(PROBE)

    def _damaged(self) -> list[str]:
        """Return the local checkpoints whose digests differ from the pointer's."""
        here = self._checkpoints_here()
        return [name for name, digest in self._pointer.checkpoints.items() if here.get(name) != digest]

    def _set_damaged_aside(self) -> None:
        """Put damaged checkpoints aside, so that they are not used."""
        for name in self._damaged():
            folder = self.folder / CHECKPOINTS / name
            log.warning("damaged checkpoint: %s of %s is not what %s names", name, self.url, POINTER)
            if folder.exists():
                folder.rename(folder.with_suffix(".damaged"))

    def _own_files(self) -> list[Path]:
        """Return the content of the folder without its lock."""
        return [path for path in self.folder.glob("*") if path.name != LOCK]

    def _put_aside(self) -> None:
        left = self._own_files()
        if left:
            aside = self.folder.with_name(f"{self.folder.name}.aside-{secrets.token_hex(4)}")
            aside.mkdir()
            for path in left:
                path.rename(aside / path.name)
            what = "has something else than was copied there from this machine, which is put aside"
            log.warning("--workdir: %s %s in %s", self.url, what, aside)

    # ---- copying --------------------------------------------------------------------------------------

    def push(self) -> None:
        """Copy the changed files of the folder; wherever that ends, the bucket has a whole checkpoint.

        Raises:
          UserError: another process has copied to the bucket since.
          OSError: the disk of this machine is full.
        """
        self._check_alone()
        # The summary may say that the run has ended. So it is copied after all other files and the pointer.
        if self._copied.get(SUMMARY) != self._files_here().get(SUMMARY):
            self._copy(leave_out=(SUMMARY,))
        self._copy()

    def _copy(self, leave_out: Collection[str] = ()) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            here = {name: stat for name, stat in self._files_here().items() if name not in leave_out}
            whole = self._checkpoints_here()
            if (still_whole := self._still_whole(whole)) != self._pointer.checkpoints:
                self._write_pointer(still_whole)
            changed = [name for name, stat in here.items() if self._copied.get(name) != stat]
            try:
                with self._reached(pass_missing=attempt < ATTEMPTS):
                    sources = [str(self.folder / name) for name in changed]
                    self._files.put(sources, [self._at(name) for name in changed])
                break
            except FileNotFoundError:  # predictions were replaced during the copy
                continue
        self._copied.update({name: here[name] for name in changed})
        self._write_pointer(whole)
        self._remove_what_is_not_in(here)
        self._write_state()

    def _remove_what_is_not_in(self, here: Collection[str]) -> None:
        gone = [name for name in self._copied if name not in here]
        if gone:
            with self._reached():  # some may be gone, if a process was killed
                left = set(self._files.find(self._at(""))) & {self._at(name) for name in gone}
                # `rm` would take these characters as patterns and remove all matches.
                patterns = {path for path in left if set(path) & set("*?[")}
                if left - patterns:
                    self._files.rm(sorted(left - patterns))
                for path in patterns:
                    self._files.rm_file(path)
        for name in gone:
            del self._copied[name]

    def _check_alone(self) -> None:
        """Refuse to overwrite files that another process copied since this one began.

        A pointer of this process may be in the bucket although its write was reported as failed.
        """
        found = self.read_pointer()
        if found.id not in self._ids:
            raise UserError(f"--workdir: another process trains in {self.url}: it has written there meanwhile")
        self._pointer = found

    def _still_whole(self, here: dict[str, str]) -> dict[str, str]:
        """Return the named checkpoints that this copy leaves whole.

        Rewritten checkpoints are not whole, nor those of later steps than the newest: a rollback cut their rows.
        """
        newest = max(map(int, here), default=-1)
        return {
            name: digest
            for name, digest in self._pointer.checkpoints.items()
            if int(name) <= newest and here.get(name, digest) == digest
        }

    def _write_pointer(self, checkpoints: dict[str, str]) -> None:
        self._check_alone()
        pointer = Pointer.new(checkpoints)
        self._ids = [self._pointer.id, pointer.id]  # either one, if the process is killed or the answer is lost
        self._write_state()
        with self._reached():
            self._files.pipe_file(self._at(POINTER), pointer.content())
        self._pointer, self._ids = pointer, [pointer.id]

    # ---- this machine's folder ------------------------------------------------------------------------

    def _files_here(self) -> dict[str, list[int]]:
        """Return {name: [size, time in ns]} of all files that are to be copied."""
        found = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder)
            hidden = name.parts[:2] if name.parts[0] == CHECKPOINTS else name.parts[:1]
            if any(part.startswith(".") or part.endswith("-tmp") for part in hidden) or name.parts[0] == LOCK:
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink():
                    stat = path.stat()
                    found[name.as_posix()] = [stat.st_size, stat.st_mtime_ns]
        return found

    def _checkpoints_here(self) -> dict[str, str]:
        sums = self.folder.glob(f"{CHECKPOINTS}/*/{SUMS}")
        whole = [path for path in sums if path.parents[1].name.isdigit()]
        return {path.parents[1].name: hashlib.sha256(path.read_bytes()).hexdigest() for path in whole}

    def _read_state(self) -> tuple[list, dict]:
        """Return the state of this machine's last copy: the ids that the pointer may have, and `_copied`.

        A folder that was never copied continues a bucket without a pointer.
        """
        path = self.folder / STATE
        if not path.exists():
            return [None], {}
        try:
            state = json.loads(path.read_bytes())
            return list(state["ids"]), dict(state["copied"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("%s is damaged (%s)", path, error)
            return [], {}

    def _write_state(self) -> None:
        state = {"ids": self._ids, "copied": self._copied}
        self.folder.mkdir(parents=True, exist_ok=True)
        with util.replacing(self.folder / STATE) as temporary:
            util.write_through(temporary, json.dumps(state).encode())

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
