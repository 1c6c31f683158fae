"""Trackers of a run in TensorBoard and Weights & Biases."""

import contextlib
import dataclasses
import fcntl
import importlib.util
import json
import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from largebatch import util
from largebatch.util import UserError

log = logging.getLogger("largebatch")


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """Run that begins or resumes, as trackers see it.

    Attributes:
      folder: run folder; a tracker may write to a folder of its own name in it.
      name: name of the run.
      group: the study that it is a trial of, or None.
      config: config as plain JSON.
    """

    folder: Path
    name: str
    group: str | None
    config: dict


class TensorBoard:
    """Tracker that writes every number of a row as a TensorBoard scalar of its step."""

    def __init__(self, run: TrackedRun):
        self._folder = run.folder / "tensorboard"
        self._events, self._num_files = None, 0

    def row(self, row: dict) -> None:
        """Write a row."""
        # Imported late: it also imports PyTorch if that is installed, 1.5 s before the first step.
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        if self._events is None:
            self._folder.mkdir(exist_ok=True)
            # The synchronous writer: SummaryWriter's thread would hang the run when the disk is full.
            # Its file names have the second, in which a run may roll back and write again.
            self._events = EventsWriter(str(self._folder / "events"), f".{os.getpid()}.{self._num_files:04d}")
            self._num_files += 1
            # TensorBoard drops the rows of earlier files from this step on.
            start = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(wall_time=time.time(), step=row["step"], session_log=start))
        for name, value in row.items():
            if value is not None:
                scalar = summary.scalar(name, value)
                self._events.write_event(Event(wall_time=time.time(), step=row["step"], summary=scalar))
        self._events.flush()

    def went_back(self) -> None:
        """Close the file; the next row begins another one, which replaces later steps."""
        events, self._events = self._events, None
        if events:
            events.close()

    def end(self, summary: dict) -> None:
        """Close the file."""
        self.went_back()


RECORD = "wandb.json"  # in a run folder: the id of its record, the same at every start
FINISH_SEC, INTERRUPTED_SEC = 30.0, 3.0  # for the last rows to be sent; after a signal there is little time
PIPE_BYTES = 1 << 20  # room for hundreds of rows
ROOT = Path(__file__).resolve().parents[2]


def wandb_is_installed() -> bool:
    """Return True if log.wandb can be turned on."""
    return importlib.util.find_spec("wandb") is not None


class WeightsAndBiases:
    """Tracker that reports the run to a process, `wandb_process`, by lines of JSON.

    Raises:
      OSError: from every method, if the process has ended or does not read.
    """

    def __init__(self, run: TrackedRun):
        record_id = _record_id(run.folder)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # The process has its own session: Ctrl-C is for the run, which then sends its last rows.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "largebatch.tracking.wandb_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            bufsize=0,
            start_new_session=True,
        )
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):  # Linux
            with contextlib.suppress(PermissionError):  # this user has many pipes
                fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        begin = {
            "folder": str(run.folder),
            "id": record_id,
            "project": run.config["log"]["wandb_project"],
            "name": run.name,
            "group": run.group,
            "config": run.config,
        }
        self._send({"begin": begin})

    def row(self, row: dict) -> None:
        """Send a row."""
        self._send({"row": row})

    def went_back(self) -> None:
        """Do nothing: the curves are drawn over `step`, and show the steps before and after the rollback."""

    def end(self, summary: dict) -> None:
        """Send the summary and wait a limited time for the process to end; a slower one ends by itself."""
        self._send({"end": summary})
        self._process.stdin.close()
        limit = INTERRUPTED_SEC if summary["status"] == "interrupted" else FINISH_SEC
        try:
            code = self._process.wait(limit)
        except subprocess.TimeoutExpired as error:
            raise OSError(f"its process still sends after {limit:.0f} s, and goes on by itself") from error
        if code:
            raise OSError(f"its process ended with exit code {code}")

    def _send(self, message: dict) -> None:
        """Write a line without waiting: a process that hangs must not block the run."""
        line = json.dumps(message, allow_nan=False).encode() + b"\n"
        try:
            num_written = os.write(self._pipe, line)
        except BrokenPipeError as error:
            self._process.stdin.close()
            raise OSError(f"its process ended with exit code {self._process.wait()}") from error
        except BlockingIOError:
            num_written = 0
        if num_written < len(line):
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            raise OSError("its process does not read")


def _record_id(folder: Path) -> str:
    """Return the id of a run's record, which is chosen once."""
    path = folder / RECORD
    if not path.exists():
        content = json.dumps({"id": secrets.token_hex(8)})
        with util.replacing(path) as temporary:
            util.write_through(temporary, content.encode())
    try:
        return json.loads(path.read_text())["id"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged") from error


GOES_ON = "the run goes on without it"


class Tracker(Protocol):
    """Receiver of a run's rows on host 0, in plain JSON; one that raises is dropped, and the run continues."""

    def row(self, row: dict) -> None:
        """Receive a line of metrics.jsonl."""

    def went_back(self) -> None:
        """Receive notice of a rollback to a checkpoint: rows of later steps come once more."""

    def end(self, summary: dict) -> None:
        """Receive summary.json as the last call, when this process has done its part of the run."""


# Trackers by the field of a config's `log` that enables them.
TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check_installed(options: dict) -> None:
    """Refuse trackers that are not installed, before a run begins.

    Args:
      options: a config's `log`.
    Raises:
      UserError: a package is missing.
    """
    if options.get("wandb") and not wandb_is_installed():
        raise UserError("log.wandb: wandb is not installed; allowed: after pip install -r requirements-cloud.txt")


class Trackers:
    """Trackers that a run's config enables; one that fails is logged once and then dropped."""

    def __init__(self, run: TrackedRun):
        self._trackers: dict[str, Tracker] = {}
        for name, make in TRACKERS.items():
            if run.config["log"].get(name):
                try:
                    self._trackers[name] = make(run)
                except Exception as error:
                    _say_why(name, error)

    def row(self, row: dict) -> None:
        """Send a line of metrics.jsonl to all trackers."""
        self._tell(lambda tracker: tracker.row(row))

    def went_back(self) -> None:
        """Notify all trackers of a rollback."""
        self._tell(lambda tracker: tracker.went_back())

    def end(self, summary: dict) -> None:
        """Send summary.json to all trackers."""
        self._tell(lambda tracker: tracker.end(summary), then="the run itself is whole")

    def _tell(self, tell: Callable[[Tracker], None], then: str = GOES_ON) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tell(tracker)
            except Exception as error:
                del self._trackers[name]
                _say_why(name, error, then)


def _say_why(name: str, error: Exception, then: str = GOES_ON) -> None:
    reason = " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())
    log.warning("log.%s: %s; %s", name, reason, then)
