"""Progress of a run that must survive a stop: its rows, its checkpoints, and its resumption."""

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from largebatch.hosts import collectives
from largebatch.hosts.clock import Clock
from largebatch.predictions.files import Outcome
from largebatch.runs import checkpoints, load
from largebatch.runs.folder import RunFolder, jsonable
from largebatch.runs.reader import COUNTED_SECTIONS, ENDED, read_lines
from largebatch.runs.summary import add_to_summary, empty_summary, environment_of, refuse_other_data
from largebatch.runs.trackers import TrackedRun, Trackers
from largebatch.tasks.kinds import kind_of
from largebatch.util import UserError

log = logging.getLogger("largebatch")


class RunProgress:
    """Link between a trainer and its run folder. Every host has one; host 0 reads and writes.

    A checkpoint holds the trainer's `snapshot`, the config, and as plain JSON the summary so far, the clock, and
    the length of metrics.jsonl.

    Args:
      trainer: object with `snapshot`, `restore`, `step`, `schedule` and `state` (see `trainer.Trainer`).
      config: config as plain JSON.
      data: properties of the data that the network needs elsewhere, and those that must not change; plain JSON.
      summary: summary before the first step.
    """

    def __init__(self, run: RunFolder, trainer, clock: Clock, config: dict, data: dict, summary: dict):
        self._run, self._trainer, self._clock, self._data = run, trainer, clock, data
        self.config, self.summary = config, summary
        self._kind = kind_of(self.config)
        self.validated_step = 0  # step of the last checkpoint after a validation, or of the first
        self.seconds_before: dict[str, float] = {}  # clock.seconds at the begin of the running outer loop
        self.batch_sizes: list[list[int]] | None = None  # of the restored checkpoint; see `BatchSchedule.state`
        folder, keep = run.path / load.CHECKPOINTS, config["checkpoint"]["keep"]
        self._checkpoints = checkpoints.Checkpoints(folder, keep, after_save=run.copy)
        self._trackers: Trackers | None = None  # on host 0, once the run has started
        self._saved_step, self._saved_time = None, time.monotonic()
        self._like = trainer.snapshot()  # structure, shapes and types

    @property
    def reached_target(self) -> bool:
        """True if a validation has reached the target."""
        return self.summary["steps_to_target"] is not None

    # ---- start ----------------------------------------------------------------------------------

    def resume(self) -> None:
        """Resume from the newest sound checkpoint of the run folder, or start at step 0.

        A run that is refused stays unchanged, except that damaged checkpoints are set aside.

        Raises:
          UserError: the checkpoint or metrics.jsonl do not fit this program; on every host.
        """
        with self._clock.measure("checkpoint"):
            snapshot, description = self._read_on_primary(self._read_start)
        if description is None:
            self._trainer.restore(snapshot)
        else:
            self.restore(snapshot, description)
            self._saved_step = self._trainer.step
            self._clock.add(description["clock"])
        collectives.agreed(lambda: self._write_start(description), collectives.is_primary())
        if description is None:
            self.save(after_validation=True)

    def _read_on_primary(self, read: Callable[[], tuple]) -> tuple[dict, dict | None]:
        """Return the snapshot and description that host 0 reads, on every host; raise its UserError on all."""
        snapshot, description = collectives.agreed(read, collectives.is_primary()) or (self._like, None)
        description = collectives.json_from_primary(description)
        if description is None and not self.config["train"]["init_from"]:
            return self._like, None  # every host has made it
        return collectives.from_primary(snapshot), description

    def _read_start(self) -> tuple[dict, dict | None]:
        newest = checkpoints.read_newest(self._checkpoints.folder)
        if newest is not None:
            refuse_other_data(newest.description["data"], self._data, self._run.path)
            return self._for_restore(newest)
        self._run.cut_rows(0)
        snapshot, train = dict(self._like), self.config["train"]
        if train["init_from"]:
            version, state = self._data["network_version"], snapshot["state"]
            try:
                state = load.initial_state(train["init_from"], train["init_step"], state, version)
            except UserError as error:
                raise UserError(f"train.init_from: {error}") from error
            snapshot["state"] = state
            if "replicas" in snapshot:
                snapshot["replicas"] = replicas_from_mean(state, snapshot["replicas"])
        return snapshot, None

    def _for_restore(self, checkpoint: checkpoints.LoadedCheckpoint) -> tuple[dict, dict]:
        """Cut the rows back to those of a checkpoint; return its snapshot, for these devices, and description.

        Where the number of devices changed, all replicas start from the mean.
        """
        arrays, description = checkpoint
        path = checkpoints.path_of(self._checkpoints.folder, description["step"])
        snapshot = checkpoints.fill(self._like, arrays, str(path))
        self._run.cut_rows(description["rows"])
        if "replicas" in snapshot and len(snapshot["replicas"].step) != len(self._like["replicas"].step):
            snapshot["replicas"] = replicas_from_mean(snapshot["state"], self._like["replicas"])
        return snapshot, description

    def restore(self, snapshot: dict, description: dict) -> None:
        """Restore a checkpoint, on all hosts."""
        self._trainer.restore(snapshot)
        self.batch_sizes = description["batch_sizes"]
        self.summary.update((name, description["summary"][name]) for name in empty_summary())
        self.seconds_before, self.validated_step = description["before"], description["boundary"]
        self._saved_step = None

    def _write_start(self, description: dict | None) -> None:
        if events := read_lines(self._run.path / "events.jsonl", problems=[]):
            self._log_what_happened(events[-1], description)
        run_id = self._run.begin(self.config)
        seconds = {
            "start_sec": self._clock.since_made(),
            "counted_sec": sum(self._clock.seconds[section] for section in COUNTED_SECTIONS),
        }
        self._run.log_event("start", step=self._trainer.step, **environment_of(self.summary), **seconds)
        name, config = Path(self._run.address).name, jsonable(self.config)
        self._trackers = Trackers(TrackedRun(self._run.path, run_id, name, config))

    def _log_what_happened(self, last: dict, description: dict | None) -> None:
        """Log how the process before ended, by its last event, and what differs from a run without a stop."""
        if last["event"] in ENDED:
            reason = f" ({last['reason']})" if last["reason"] else ""
            end = f"the process before ended as {last['event']}{reason}"
        else:
            end = f"the process before (pid {last['pid']} on {last['node']}) was killed, or a host died"
        if description is None:
            log.info("starting again at step 0, for there is no sound checkpoint; %s", end)
            return
        log.info("resuming at step %d; %s", self._trainer.step, end)
        then, now = environment_of(description["summary"]), environment_of(self.summary)
        changes = [f"{name} {now[name]}, was {then.get(name)}" for name in now if now[name] != then.get(name)]
        if changes:
            order = "the examples come in the same order as before, but results will not be bitwise those of"
            log.warning("resuming with %s: %s an uninterrupted run", "; ".join(changes), order)

    # ---- rows -----------------------------------------------------------------------------------

    def record(self, row: dict, outcome: Outcome) -> bool:
        """Add the row of an outer loop to the run, with its outcome if that is the best so far.

        Args:
          outcome: predictions of the validation. They are copied to the host only if they are written, in parts, by
            all hosts together.
        Returns:
          True if the validation score is the best so far.
        Raises:
          UserError: the disk is full; on every host.
        """
        improved = add_to_summary(self.summary, row, self._kind)

        def write(parts):
            self._run.append_row(row)
            self._trackers.row(jsonable(row))
            if improved:
                self._run.write_outcome(outcome, parts)

        collectives.primary_takes(write, outcome.parts() if improved else iter(()))
        if row["skipped_steps"]:
            log.warning("outer loop %d: %d steps skipped, not finite", row["outer"], row["skipped_steps"])
            self.note_event("skipped", step=row["step"], steps=row["skipped_steps"])
        self.seconds_before = dict(self._clock.seconds)
        return improved

    def note_event(self, event: str, **details) -> None:
        """Append a line to events.jsonl; raise a failure on every host."""
        collectives.agreed(lambda: self._run.log_event(event, **details), collectives.is_primary())

    # ---- checkpoints ----------------------------------------------------------------------------

    def save(self, *, after_validation: bool) -> None:
        """Save in the background; `after_validation` is after the row of an outer loop, else inside one.

        Host 0 may have to wait for the previous save, and the others with it.

        Raises:
          UserError: this save or the one before it failed; on every host.
        """
        if after_validation:
            self.validated_step = self._trainer.step
        self._saved_step, self._saved_time = self._trainer.step, time.monotonic()
        with self._clock.measure("checkpoint"):
            snapshot = self._trainer.snapshot()  # replicas are averaged for it, on all hosts
            collectives.agreed(lambda: self._save(snapshot), collectives.is_primary())

    def _save(self, snapshot: dict) -> None:
        description = {
            "config": self.config,
            "data": self._data,
            "summary": jsonable(self.summary),
            "clock": self._clock.saved(),
            "before": self.seconds_before,
            "boundary": self.validated_step,
            "rows": self._run.rows_bytes(),
            "batch_sizes": self._trainer.schedule.batch_sizes.state(),
        }
        protect = {self.validated_step, self.summary["best_step"]} - {None}
        self._checkpoints.save(self._trainer.step, snapshot, description, protect)

    def save_if_due(self) -> None:
        """Save, between two calls inside an outer loop, if `checkpoint.every_sec` have passed since the last save.

        Raises:
          UserError: the previous save failed; on every host.
        """
        is_due = time.monotonic() - self._saved_time >= self.config["checkpoint"]["every_sec"]
        if collectives.from_primary(np.int32(is_due)):
            self.save(after_validation=False)

    def read_validated(self) -> tuple[dict, dict]:
        """Return the snapshot and description of the last validated checkpoint on every host; remove later ones.

        Raises:
          UserError: the checkpoint is damaged; on every host.
        """

        def read():
            self._checkpoints.discard_after(self.validated_step)
            path = checkpoints.path_of(self._checkpoints.folder, self.validated_step)
            return self._for_restore(checkpoints.read_arrays(path))

        return self._read_on_primary(read)

    # ---- end ------------------------------------------------------------------------------------

    def finish_saving(self) -> None:
        """Save the current step and wait for it; raise a failure on all hosts."""
        if self._saved_step != self._trainer.step:
            self.save(after_validation=False)
        collectives.agreed(self._checkpoints.wait)

    def write_end(self, reason: str | None) -> None:
        """Write the current summary and the last event, as the last action of a run."""
        self.summary["seconds"] = {**self._clock.seconds, "total": self._clock.total()}
        has_failed = self.summary["status"] == "failed"

        def write():
            try:
                self._run.write_json("summary.json", self.summary)
                self._run.log_event(self.summary["status"], step=self._trainer.step, reason=reason)
            finally:
                if self._trackers:
                    self._trackers.finish(jsonable(self.summary))
            self._run.copy(at_end=not has_failed)

        self._checkpoints.close()
        if not has_failed:
            collectives.agreed(write, collectives.is_primary())
        elif collectives.is_primary():  # the other hosts may not come here
            with contextlib.suppress(UserError):  # the failure itself (a full disk?) is reported to the user
                write()


def replicas_from_mean(mean, like):
    """Return as many replicas as `like` has, all equal to `mean`, as if they had just synchronised.

    Args:
      mean: the TrainState of one device that takes local steps, of NumPy arrays.
      like: TrainState of replicas, arrays [devices, ...].
    """
    synchronised = jax.tree.map(np.zeros_like, mean.local)
    synchronised = synchronised.replace(anchor=mean.params, velocity=mean.local.velocity)
    mean = mean.replace(local=synchronised)
    return jax.tree.map(lambda leaf, replicas: np.broadcast_to(leaf, replicas.shape), mean, like)
