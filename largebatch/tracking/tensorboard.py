"""Event files for TensorBoard, in the folder tensorboard/ of a run."""

import os
import time

from largebatch.tracking.tracked_run import TrackedRun


class TensorBoard:
    """A `Tracker` that writes every number of a row as a scalar of its step."""

    def __init__(self, run: TrackedRun):
        self._folder = run.folder / "tensorboard"
        self._events, self._num_files = None, 0

    def row(self, row: dict) -> None:
        """Writes a row."""
        # Imported only now: where PyTorch is installed it comes along, 1.5 s before the first update.
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        if self._events is None:
            self._folder.mkdir(exist_ok=True)
            # The synchronous writer: SummaryWriter's thread would hang the run when the disk is full.
            # Its names have the second, in which a run may go back and write again.
            self._events = EventsWriter(str(self._folder / "events"), f".{os.getpid()}.{self._num_files:04d}")
            self._num_files += 1
            # TensorBoard drops what an earlier file has from this step on.
            start = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(wall_time=time.time(), step=row["step"], session_log=start))
        for name, value in row.items():
            if value is not None:
                scalar = summary.scalar(name, value)
                self._events.write_event(Event(wall_time=time.time(), step=row["step"], summary=scalar))
        self._events.flush()

    def went_back(self) -> None:
        """Lets the next row begin a file, which takes the place of later steps."""
        events, self._events = self._events, None
        if events:
            events.close()

    def end(self, summary: dict) -> None:
        """Closes the file."""
        self.went_back()
