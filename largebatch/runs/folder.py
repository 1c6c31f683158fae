"""Run folder with the writers of its files, and its copy in a bucket."""

import contextlib
import datetime
import fcntl
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from largebatch import util
from largebatch.buckets import bucket
from largebatch.config.dicts import flatten
from largebatch.predictions.files import Outcome
from largebatch.runs import reader
from largebatch.util import UserError, expanded, writing

log = logging.getLogger("largebatch")

LAST_COPY_SEC, RETRY_SEC = 60.0, 5.0  # limit and pause of the copy to a bucket at the end of a run


def jsonable(value):
    """Return `value` with NumPy numbers as Python's and every non-finite number as None."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class InUse(UserError):
    """Raised when another process trains in the run folder."""


class RunFolder:
    """Folder of one run: run.json, config.json, metrics.jsonl, events.jsonl, summary.json and predictions.

    Only the primary host writes. Whole files are written under a temporary name and renamed; lines of the
    two .jsonl files are added one by one. A folder in a bucket is written on this machine; see `bucket`.

    Attributes:
      address: path or URL as the user gave it.
      path: folder on this machine that is written.
    """

    def __init__(self, address: str | os.PathLike):
        self.address = str(address)
        self._bucket = bucket.Bucket(self.address) if bucket.is_url(address) else None
        self.path = self._bucket.folder if self._bucket else Path(expanded(address, "--workdir"))
        self._lock = None
        self._is_new = False  # True if `lock` made the folder

    def read(self, name: str) -> dict | None:
        """Read a JSON file of the folder; return None where there is none."""
        path = self.path / name
        try:
            if self._bucket and not self._lock:  # `lock` has not fetched it yet
                text = self._bucket.read(name)
            else:
                text = path.read_bytes() if path.exists() else None
            return None if text is None else json.loads(text)
        except (OSError, ValueError) as error:
            raise UserError(f"--workdir: {self.address}/{name} cannot be read ({error})") from error

    def read_config(self) -> dict | None:
        """Read config.json; return None where no run has begun.

        Raises:
          UserError: it cannot be read, or is of a run that another version of the code wrote.
        """
        config = self.read("config.json")
        if config is None:
            return None
        reader.refuse_other_format(self.read("run.json"), self.address)
        # These two are read before the whole config is checked.
        if not isinstance(config, dict) or not {"model.dtype", "train.outer_steps"} <= flatten(config).keys():
            raise UserError(f"--workdir: {self.address}/config.json is damaged: it is no config of a run")
        return config

    def lock(self) -> None:
        """Create the folder, test it, and lock it against other processes until this one ends, however it ends.

        A folder in a bucket is brought up to date with the bucket. Processes of other machines are not locked out.

        Raises:
          UserError: the folder cannot be written.
          InUse: another process trains in the folder.
        """
        path = self.path / "lock"
        self._is_new = not self.path.exists()
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = path.open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat())):
                raise BlockingIOError  # removed by a process that has just ended; another may have made its own
        except BlockingIOError as error:
            lock.close()
            raise InUse(f"--workdir: another process is training in {self.address}") from error
        except OSError as error:  # some network file systems
            log.warning("--workdir: %s cannot be locked (%s): start one process in it only", path, error.strerror)
        self._lock = lock
        with writing(self.path):
            os.write(lock.fileno(), f"{os.getpid()}\n".encode())  # a full disk is found before the work
            # Files that a killed process left.
            for left in self.path.glob(".*.tmp"):
                util.remove(left)
        if self._bucket:
            what = "is copied to after every checkpoint, from %s; a bucket has no locks: start one run in it only"
            log.info(f"--workdir: %s {what}", self.address, self.path)
            self._bucket.probe()
            self._bucket.pull()

    def is_in_use(self) -> bool:
        """Return True if a process of any machine that locks files with this one trains in the folder."""
        try:
            with (self.path / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no run has begun, or a file system without locks
            return False
        return False

    def copy(self, *, at_end: bool = False) -> None:
        """Copy the folder to its bucket, if it has one; an outage is logged, and a later copy makes up for it.

        Args:
          at_end: True to try again and again, since there is no later copy.
        Raises:
          UserError: another process has copied to the bucket, or it was away for LAST_COPY_SEC at the end.
        """
        deadline = time.monotonic() + LAST_COPY_SEC
        while self._bucket:
            try:
                return self._bucket.push()
            except bucket.Unreachable as error:
                if not at_end:
                    log.warning("%s; the run goes on, and the next checkpoint is copied with this one", error)
                    return None
                if time.monotonic() > deadline:
                    hint = f"the whole run is in {self.path}; the same command on this machine copies it"
                    raise UserError(f"{error}; {hint}") from error
                time.sleep(RETRY_SEC)

    def begin(self, config: dict) -> str:
        """Write run.json, once, and config.json; remove the summary of an earlier start; return the run's id."""
        about = self.read("run.json")
        if about is None:
            about = {"format_version": reader.FORMAT_VERSION, "id": secrets.token_hex(8)}
            self.write_json("run.json", about)
        self.write_json("config.json", config)
        with writing(self.path):
            (self.path / "summary.json").unlink(missing_ok=True)
        return about["id"]

    def rows_bytes(self) -> int:
        """Return the current length of metrics.jsonl in bytes."""
        path = self.path / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

    def cut_rows(self, length: int) -> None:
        """Cut metrics.jsonl back to `length`, the `rows_bytes` of a checkpoint.

        Raises:
          UserError: the file is shorter.
        """
        path, found = self.path / "metrics.jsonl", self.rows_bytes()
        if found < length:
            hint = "put them back, or start a new run from this one's parameters with --config.train.init_from"
            raise UserError(
                f"--workdir: {path} has {found} bytes, where the checkpoint's rows have {length}; {hint}"
            )
        if found > length:
            with writing(path):
                os.truncate(path, length)

    def append_row(self, row: dict) -> None:
        """Append one line to metrics.jsonl, on disk before a checkpoint that goes with it."""
        self._append("metrics.jsonl", row)

    def log_event(self, event: str, **fields) -> None:
        """Append a line to events.jsonl, the history of the run: starts, stops, rollbacks."""
        process = {"pid": os.getpid(), "node": os.uname().nodename}
        now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
        self._append("events.jsonl", {"time": now, "event": event, **fields, **process})

    def _append(self, name: str, content: dict) -> None:
        path, line = self.path / name, json.dumps(jsonable(content), allow_nan=False).encode() + b"\n"
        with writing(path), path.open("ab+") as file:
            # A line that a killed process or a full disk left incomplete stays apart from the next.
            file.seek(max(file.tell() - 1, 0))
            end = b"\n" if file.read(1) not in (b"", b"\n") else b""
            file.write(end + line)
            file.flush()
            os.fsync(file.fileno())

    def write_json(self, name: str, content: dict) -> None:
        """Write or replace one JSON file."""
        target = self.path / name
        with writing(target):
            self.path.mkdir(parents=True, exist_ok=True)
            with util.replacing(target) as temporary:
                text = json.dumps(jsonable(content), indent=1, allow_nan=False)
                util.write_through(temporary, f"{text}\n".encode())

    def write_outcome(self, outcome: Outcome, parts: Iterator) -> None:
        """Replace the predictions of the best validation so far."""
        with writing(self.path / outcome.name):
            outcome.write(self.path, parts)

    def close(self) -> None:
        """Unlock the folder; remove it if it is new and empty."""
        if self._lock:
            (self.path / "lock").unlink(missing_ok=True)
            if self._is_new:
                with contextlib.suppress(OSError):  # not empty: the run began
                    self.path.rmdir()
            self._lock.close()
            self._lock = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
