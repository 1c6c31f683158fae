"""TensorBoard and Weights & Biases, which host 0 tells of a run."""

import concurrent.futures
import contextlib
import functools
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from largebatch.util import one_line

log = logging.getLogger("largebatch")

INIT_SEC = 15.0  # to reach the server of Weights & Biases
FINISH_SEC, INTERRUPTED_SEC = 30.0, 3.0  # to send its last rows; after a signal there is little time


class TrackedRun(NamedTuple):
    """Run that begins or resumes, as trackers see it."""

    folder: Path  # run folder; a tracker may write to a folder of its own name in it
    id: str  # the same whenever the run resumes
    name: str
    config: dict  # plain JSON


class TensorBoard:
    """Tracker that writes every number of a row as a TensorBoard scalar of its step."""

    def __init__(self, run: TrackedRun):
        self._folder = run.folder / "tensorboard"
        self._file, self._step = None, 0

    def row(self, row: dict) -> None:
        """Write a row."""
        # It also imports PyTorch if that is installed: 1.5 s before the first step.
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event

        if self._file is None or row["step"] <= self._step:
            self._begin_file(row["step"])
        self._step = row["step"]
        for name, value in row.items():
            if value is not None:
                scalar = summary.scalar(name, value)
                self._file.write_event(Event(wall_time=time.time(), step=row["step"], summary=scalar))
        self._file.flush()

    def _begin_file(self, step: int) -> None:
        """Begin a file from which on TensorBoard drops the rows of earlier files at `step` and later."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self.finish({})
        self._folder.mkdir(exist_ok=True)
        # The synchronous writer: SummaryWriter's thread would hang the run when the disk is full.
        # TensorBoard reads files by name, which has the second: a run may roll back and write again within it.
        self._file = EventsWriter(str(self._folder / "events"), f".{time.time_ns()}")
        start = SessionLog(status=SessionLog.START)
        self._file.write_event(Event(wall_time=time.time(), step=step, session_log=start))

    def finish(self, summary: dict) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


class WeightsAndBiases:
    """Tracker that calls Weights & Biases from a thread: a server that hangs holds nothing up but `finish`."""

    def __init__(self, run: TrackedRun):
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._record = self._last = self._thread.submit(_open_record, run)

    def row(self, row: dict) -> None:
        """Send a row in the background; raise the error of an earlier one."""
        if self._last.done():
            self._wait(0)
        values = {name: value for name, value in row.items() if value is not None}
        self._last = self._thread.submit(lambda: self._record.result().log(values))

    def finish(self, summary: dict) -> None:
        """Send the summary and wait a limited time until all is sent."""
        ended_well = summary["status"] in ("done", "pruned", "interrupted")

        def end():
            record = self._record.result()
            record.summary.update({name: value for name, value in summary.items() if not isinstance(value, list)})
            record.finish(exit_code=0 if ended_well else 1)

        self._last = self._thread.submit(end)
        self._wait(INTERRUPTED_SEC if summary["status"] == "interrupted" else FINISH_SEC)
        self._thread.shutdown()

    def _wait(self, seconds: float) -> None:
        try:
            self._last.result(seconds)
        except Exception as error:
            is_late = not self._last.done()
            self._thread.shutdown(wait=False, cancel_futures=True)
            _end_service()
            if is_late:
                raise OSError(f"still sends after {seconds:.0f} s; wandb sync sends the rest") from error
            raise


def _open_record(run: TrackedRun):
    """Open the record of a run, new or of its earlier processes; offline if there is no key or no server."""
    import wandb

    begin = functools.partial(
        wandb.init,
        id=run.id,
        resume="allow",
        project=run.config["log"]["wandb_project"],
        group=run.folder.parents[1].name if (run.folder / "trial.json").exists() else None,  # the study
        name=run.name,
        config=run.config,
        dir=str(run.folder),
        reinit="create_new",
        settings=wandb.Settings(
            console="off", silent=True, save_code=False, init_timeout=INIT_SEC, finish_timeout=FINISH_SEC
        ),
    )
    try:
        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
            raise wandb.Error("no API key is configured")
        record = begin()
    except (wandb.Error, OSError) as error:
        log.warning(
            "log.wandb: %s; offline: wandb sync %s/wandb/offline-run-* sends it", one_line(error), run.folder
        )
        wandb.teardown()  # else it knows the id already, and refuses it
        record = begin(mode="offline")
    record.define_metric("*", step_metric="step")
    return record


def _end_service() -> None:
    """Kill wandb's own process, for which its hook at exit would wait without a limit (on Linux)."""
    import wandb

    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)
    # It has just been killed: teardown fails, or asks to exit with the code of the killed process.
    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown()


# Trackers by the field of a config's `log` that enables them. Each is made of a TrackedRun; `row` gets a line of
# metrics.jsonl (after a rollback, steps come once more), and `finish` gets summary.json. All of them may raise.
TRACKERS: dict[str, Callable] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


class Trackers:
    """Trackers that a run's config enables; one that fails is logged once and then dropped."""

    def __init__(self, run: TrackedRun):
        self._trackers: dict = {}
        for name, make in TRACKERS.items():
            if run.config["log"].get(name):
                with self._dropped_if_it_fails(name):
                    self._trackers[name] = make(run)

    def row(self, row: dict) -> None:
        """Send a line of metrics.jsonl to all trackers."""
        self._send("row", row)

    def finish(self, summary: dict) -> None:
        """Send summary.json to all trackers."""
        self._send("finish", summary)

    def _send(self, method: str, content: dict) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._dropped_if_it_fails(name):
                getattr(tracker, method)(content)

    @contextlib.contextmanager
    def _dropped_if_it_fails(self, name: str):
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            reason = getattr(error, "strerror", None) or one_line(error)
            log.warning("log.%s: %s; the run goes on without it", name, reason)
