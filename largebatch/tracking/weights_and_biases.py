"""Weights & Biases: rows go to a process of their own, whose faults and waits are not those of the run."""

import contextlib
import fcntl
import importlib.util
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

from largebatch import files
from largebatch.tracking.tracked_run import TrackedRun

RECORD = "wandb.json"  # in a run folder: the id of its record, the same at every start
FINISH_SEC, INTERRUPTED_SEC = 30.0, 3.0  # for the last rows to be sent; after a signal there is little time
PIPE_BYTES = 1 << 20  # rows that may wait: hundreds
ROOT = Path(__file__).resolve().parents[2]


def wandb_is_installed() -> bool:
    """Whether log.wandb can be turned on."""
    return importlib.util.find_spec("wandb") is not None


class WeightsAndBiases:
    """A `Tracker` that tells a process, `wandb_process`, of the run, by lines of JSON.

    Raises:
      OSError: from every method, if the process has ended or does not read.
    """

    def __init__(self, run: TrackedRun):
        record_id = _record_id(run.folder)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # In a session of its own: Ctrl-C is for the run, which then sends its last rows.
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
        """Sends a row."""
        self._send({"row": row})

    def went_back(self) -> None:
        """Nothing: the curves are drawn over `step`, and show both ways."""

    def end(self, summary: dict) -> None:
        """Sends the summary and waits for the process to end, but not for long; then it ends by itself."""
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
        """Writes a line and never waits: a process that hangs must not hold up the run."""
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
    """The id of a run's record, which is chosen once."""
    path = folder / RECORD
    if not path.exists():
        content = json.dumps({"id": secrets.token_hex(8)})
        with files.replacing(path) as temporary:
            files.write_through(temporary, content.encode())
    try:
        return json.loads(path.read_text())["id"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged") from error
