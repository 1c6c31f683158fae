"""A run folder in a bucket, as gs://BUCKET/run or s3://BUCKET/run: a folder on this machine, copied there.

The run is written here, and copied after every checkpoint and at its end. An object cannot be renamed, and a copy
may end anywhere. So one object, the pointer, is written last and names the checkpoints that are whole:

    gs://BUCKET/run/checkpoints/00000300/...   the files of the folder, under their names
    gs://BUCKET/run/pointer.json               {"id": of this copy, "checkpoints": {"00000300": SHA-256, ...}}

A checkpoint that it does not name is not there. A process that finds another id there than it wrote itself stops:
another one writes to the same place.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path

import fsspec

from largebatch import files
from largebatch.errors import UserError

log = logging.getLogger("largebatch")

POINTER, STATE = "pointer.json", ".copied.json"
CHECKPOINTS, SUMS, SUMMARY = "checkpoints", "SHA256SUMS", "summary.json"
LOCAL_FOLDERS = "~/.cache/largebatch/runs"
NOT_COPIED = ("lock",)
ATTEMPTS = 5  # to read what a process changes meanwhile
NOISY = ("gcsfs", "s3fs", "google", "aiobotocore", "botocore")  # what they log, they raise too


class Unreachable(UserError):
    """The bucket cannot be read or written just now."""


@dataclasses.dataclass(frozen=True)
class Pointer:
    """What the pointer says; without an id there is none yet.

    checkpoints: {name of the folder: SHA-256 of its SHA256SUMS}.
    """

    id: str | None = None
    checkpoints: dict[str, str] = dataclasses.field(default_factory=dict)


def is_url(path) -> bool:
    """Whether a path is that of a bucket."""
    return "://" in str(path)


def local_copy(path) -> Path:
    """A folder to read a run from: `path` itself, or where that is a bucket's, what it has now.

    Raises:
      UserError: the bucket cannot be read.
    """
    if not is_url(path):
        return Path(path).expanduser()
    folder = folder_for(str(path))
    folder = folder.with_name(f"{folder.name}.read")
    if not Bucket(str(path), folder).is_copied():
        temporary = files.beside(folder)
        Bucket(str(path), temporary).pull()
        files.remove(folder)
        temporary.rename(folder)
    return folder


def folder_for(url: str) -> Path:
    """Where a run of this machine is written before it is copied to `url`."""
    url = url.rstrip("/")
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    return Path(LOCAL_FOLDERS).expanduser() / f"{Path(url).name}-{digest}"


class Bucket:
    """The copy of a folder in a bucket.

    Raises:
      UserError: from the constructor, if no package for such a URL is installed.
      Unreachable: from every method that reads or writes, if that fails.
    """

    def __init__(self, url: str, folder: Path | None = None):
        self.url = url.rstrip("/")
        self.folder = folder or folder_for(url)
        for name in NOISY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            self._files, self._root = fsspec.url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            hint = "allowed: after pip install -r requirements-cloud.txt"
            raise UserError(f"--workdir: {url} needs a package ({error}); {hint}") from error
        except ValueError as error:
            raise UserError(f"--workdir: {url} ({error}); allowed: a folder, gs://... or s3://...") from error
        self._pointer = Pointer()
        self._copied: dict[str, list[int]] = {}  # files in the bucket, each as `_files_here` had it then

    # ---- reading --------------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        """One file as the bucket has it; None where it has none."""
        with self._reached():
            try:
                return self._files.cat_file(f"{self._root}/{name}")
            except FileNotFoundError:
                return None

    def probe(self) -> None:
        """Writes and removes an object: a bucket that is not there, or is read-only, is found before the work."""
        path = f"{self._root}/probe-{secrets.token_hex(8)}"
        with self._reached():
            self._files.pipe_file(path, b"probe")
            self._files.rm_file(path)

    def is_copied(self) -> bool:
        """Whether the folder is what was copied last, from it or to it, or has gone on from there."""
        return self._read_pointer().id in self._state()["ids"]

    def pull(self) -> None:
        """Makes the folder what the bucket has, unless it goes on from that."""
        state, self._pointer = self._state(), self._read_pointer()
        if self._pointer.id in state["ids"]:
            self._copied = state["copied"]
            return
        self._empty_folder()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with self._reached(pass_missing=attempt < ATTEMPTS):
                    self._download()
                break
            except FileNotFoundError:  # a checkpoint was removed since the pointer was read
                self._pointer = self._read_pointer()
        self._write_state(self._pointer.id)

    def _download(self) -> None:
        begin = f"{self._root}/"
        names = [path.removeprefix(begin) for path in self._files.find(self._root)]
        wanted = [name for name in names if self._is_whole(name)]
        targets = [files.path_within(self.folder, name, "--workdir") for name in wanted]
        self.folder.mkdir(parents=True, exist_ok=True)
        if wanted:
            self._files.get([begin + name for name in wanted], [str(target) for target in targets])
        here = self._files_here()
        # What is in the bucket alone, as half a checkpoint, is removed by the next copy.
        self._copied = {name: here.get(name, [-1, -1]) for name in names if name != POINTER}

    def _is_whole(self, name: str) -> bool:
        parts = name.split("/")
        if parts[0] == CHECKPOINTS:
            return parts[1] in self._pointer.checkpoints
        return name != POINTER

    def _empty_folder(self) -> None:
        if not self.folder.exists():
            return
        left = [path for path in self.folder.iterdir() if path.name not in NOT_COPIED]
        if left:
            what = "%s has something else than was copied from %s, which is replaced"
            log.warning(f"--workdir: {what}", self.url, self.folder)
        for path in left:
            files.remove(path)

    # ---- copying --------------------------------------------------------------------------------------

    def push(self) -> None:
        """Copies what has changed in the folder; wherever that ends, the bucket has a whole checkpoint.

        Raises:
          UserError: another process has copied to it since.
        """
        self._check_alone()
        # The summary may say that the run has ended. So it is copied once all the rest is there and named.
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
                    targets = [f"{self._root}/{name}" for name in changed]
                    self._files.put([str(self.folder / name) for name in changed], targets)
                break
            except FileNotFoundError:  # predictions are replaced while this copies
                continue
        self._copied.update({name: here[name] for name in changed})
        self._write_pointer(whole)
        self._remove_what_is_not_in(here)
        self._write_state(self._pointer.id)

    def _remove_what_is_not_in(self, here: dict[str, list[int]]) -> None:
        gone = [name for name in self._copied if name not in here]
        if gone:
            with self._reached():  # some may have gone before a process was killed
                left = set(self._files.find(self._root)) & {f"{self._root}/{name}" for name in gone}
                if left:
                    self._files.rm(sorted(left))
        for name in gone:
            del self._copied[name]

    def _check_alone(self) -> None:
        """Refuses to copy over what another process copied since this one began."""
        found = self._read_pointer().id
        if found != self._pointer.id:
            raise UserError(f"--workdir: another process trains in {self.url}: it has written there meanwhile")

    def _still_whole(self, here: dict[str, str]) -> dict[str, str]:
        """The named checkpoints that this copy leaves whole.

        Not those that it writes anew, nor those of later updates than the newest here: a rollback cut their rows.
        """
        newest = max(here, default="")
        return {
            name: digest
            for name, digest in self._pointer.checkpoints.items()
            if name <= newest and here.get(name, digest) == digest
        }

    def _files_here(self) -> dict[str, list[int]]:
        """{name: [size, time in ns]} of all files that are to be copied."""
        found = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder)
            hidden = name.parts[:2] if name.parts[0] == CHECKPOINTS else name.parts[:1]
            if any(part.startswith(".") for part in hidden) or name.parts[0] in NOT_COPIED:
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink():
                    stat = path.stat()
                    found[name.as_posix()] = [stat.st_size, stat.st_mtime_ns]
        return found

    def _checkpoints_here(self) -> dict[str, str]:
        sums = self.folder.glob(f"{CHECKPOINTS}/*/{SUMS}")
        whole = [path for path in sums if path.parent.name.isdigit()]
        return {path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in whole}

    # ---- pointer and state ----------------------------------------------------------------------------

    def _read_pointer(self) -> Pointer:
        content = self.read(POINTER)
        if content is None:
            return Pointer()
        try:
            return Pointer(**json.loads(content))
        except (ValueError, TypeError) as error:
            raise UserError(f"--workdir: {self.url}/{POINTER} is damaged ({error})") from error

    def _write_pointer(self, checkpoints: dict[str, str]) -> None:
        pointer = Pointer(secrets.token_hex(8), checkpoints)
        self._write_state(self._pointer.id, pointer.id)  # either, if the process is killed here
        with self._reached():
            content = json.dumps(dataclasses.asdict(pointer), indent=1)
            self._files.pipe_file(f"{self._root}/{POINTER}", content.encode())
        self._pointer = pointer

    def _state(self) -> dict:
        """What this machine knows of its last copy: the ids that the pointer may have, and `_copied`."""
        path = self.folder / STATE
        return json.loads(path.read_text()) if path.exists() else {"ids": [None], "copied": {}}

    def _write_state(self, *ids: str | None) -> None:
        state = {"ids": ids, "copied": self._copied}
        with files.replacing(self.folder / STATE) as temporary:
            files.write_through(temporary, json.dumps(state).encode())

    @contextlib.contextmanager
    def _reached(self, *, pass_missing: bool = False) -> Iterator[None]:
        """Names the bucket in whatever its library raises.

        Args:
          pass_missing: a FileNotFoundError is not one of the bucket.
        """
        try:
            yield
        except Exception as error:  # those of gcsfs, s3fs, aiohttp, botocore, google.auth, ...
            if isinstance(error, UserError) or (pass_missing and isinstance(error, FileNotFoundError)):
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise Unreachable(f"--workdir: {self.url} cannot be read or written ({reason[:300]})") from error
