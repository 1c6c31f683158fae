"""What a run has reached and must not lose: saved, taken up again after a stop, rolled back after trouble."""

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from largebatch.config import fields
from largebatch.errors import UserError
from largebatch.hosts import collectives, preemption, replicas
from largebatch.hosts.clock import Clock
from largebatch.runs import checkpoints
from largebatch.runs.folder import RunFolder, jsonable
from largebatch.runs.summary import empty_summary

log = logging.getLogger("largebatch")

WHOLE_AVERAGE = 1_000_000  # updates, after which no moving average remembers its start
ENDS = ("done", "diverged", "pruned", "interrupted", "failed")


class Diverged(Exception):
    """A loss or gradient is not finite, and the run cannot go on."""


class Pruned(Exception):
    """A sweep ended the run early, for others do better."""


def open_run(plain: dict, workdir: str) -> tuple[RunFolder, dict | None]:
    """The run folder; with its summary where it holds an ended run. The same answer on every host.

    Raises:
      UserError: the folder cannot be written, is in use, or holds a run of another config.
    """
    run = RunFolder(workdir, tensorboard=plain["log"]["tensorboard"])
    summary = collectives.agreed(lambda: _look_at_folder(run, plain), collectives.is_primary())
    return run, collectives.json_from_primary(summary)


def _look_at_folder(run: RunFolder, plain: dict) -> dict | None:
    theirs, summary = run.read("config.json"), run.read("summary.json")
    if theirs:
        changed = fields.differences(fields.identity(plain), fields.identity(theirs), ("here", "there"))
        if changed:
            raise UserError(f"--workdir: {run.path} holds a run of another config: {changed}")
    if theirs and summary and summary.get("status") in ("done", "diverged", "pruned"):
        return summary
    if theirs is None and (run.path / "metrics.jsonl").exists():
        raise UserError(f"--workdir: {run.path} holds metrics.jsonl but no config.json; give a new folder")
    run.lock()
    return None


class Progress:
    """Ties a trainer to its run folder. Every host has one; host 0 reads and writes.

    A checkpoint holds the trainer's `snapshot`, the config, and as plain JSON what the hosts gathered:
    the summary so far, the clock, and how long metrics.jsonl is.

    Args:
      trainer: with `snapshot`, `restore`, `step` and `state` (see `trainer.Trainer`).
      summary: what is known before the first update; filled in from there.
      config: of the whole run, as plain JSON.
      data: what someone needs to use the network elsewhere, and what must not change; plain JSON.
      reschedule: takes up the batch sizes (starts, values) that training has found; see `trainer.Trainer`.
    """

    def __init__(
        self,
        run: RunFolder,
        trainer,
        clock: Clock,
        summary: dict,
        config: dict,
        data: dict,
        reschedule: Callable[[np.ndarray, np.ndarray], None],
    ):
        self._reschedule = reschedule
        self._run, self._trainer, self._clock, self._config, self._data = run, trainer, clock, config, data
        self._checkpoints = checkpoints.Checkpoints(run.path / "checkpoints", config["checkpoint"]["keep"])
        self._every_sec = config["checkpoint"]["every_sec"]
        self._saved_step, self._saved_time, self._boundary = None, time.monotonic(), 0
        self.summary = summary
        self.before: dict[str, float] = {}  # clock.seconds when the running outer loop began
        self._like = trainer.snapshot()

    # ---- start ----------------------------------------------------------------------------------

    def resume(self) -> None:
        """Takes up the newest sound checkpoint of the run folder, or starts at update 0.

        A run that is refused stays as it is, but that damaged checkpoints are set aside.

        Raises:
          UserError: the checkpoint or metrics.jsonl do not go with this program; on every host.
        """

        def restore():
            found = self._checkpoints.restore_newest(self._like)
            if found:
                self._refuse_other_data(found[1]["data"])
            self._run.start_rows(found and found[1]["rows"])
            return found and (self._for_these_devices(found[0]), found[1])

        with self._clock.measure("checkpoint"):
            found = self._from_primary(collectives.agreed(restore, collectives.is_primary()))
            init_from = self._config["train"]["init_from"]
            if not found and init_from:
                self._start_from(Path(init_from).expanduser())
        snapshot, description = found or (None, None)
        if description:
            self._take_up(snapshot, description)
            self._clock.add(description["clock"])
        self._say_what_happened(description)
        collectives.agreed(self._note_start, collectives.is_primary())
        if not description:
            self.save(at_boundary=True)

    def _note_start(self) -> None:
        self._run.write_json("config.json", self._config)
        self._run.remove("summary.json")  # of the start before
        self._run.log_event("start", step=self._trainer.step, **self._layout(), code=_code(self.summary))

    def _for_these_devices(self, snapshot: dict) -> dict:
        """Of replicas that were more or fewer, each of the new ones starts from their mean."""
        if "replicas" in snapshot and len(snapshot["replicas"].step) != len(self._like["replicas"].step):
            mean = snapshot["state"]
            none = jax.tree.map(np.zeros_like, mean.local)
            mean = mean._replace(local=none._replace(anchor=mean.params, velocity=mean.local.velocity))
            snapshot["replicas"] = jax.tree.map(
                lambda leaf, like: np.broadcast_to(leaf, like.shape), mean, self._like["replicas"]
            )
        return snapshot

    def _start_from(self, run: Path) -> None:
        """Takes the parameters, and what goes with them, of another run's best checkpoint."""
        state = self._like["state"]
        like = {"params": state.params, "model_state": state.model_state}

        def read():
            try:
                return checkpoints.fill(like, arrays_of(like, best_checkpoint(run)[0]), str(run))
            except UserError as error:
                raise UserError(f"train.init_from: {error}") from error

        found = collectives.from_primary(collectives.agreed(read, collectives.is_primary()) or like)
        # The averages that come along are whole: the first update must not take their place.
        whole = np.full_like(state.averaged, WHOLE_AVERAGE)
        new = {**found, "ema": None if state.ema is None else found, "averaged": whole}
        start = self._like | {"state": state._replace(**new)}
        if "replicas" in start:
            replicas = start["replicas"]
            many = jax.tree.map(lambda x: np.broadcast_to(x, (len(replicas.step), *np.shape(x))), new)
            local = replicas.local._replace(anchor=many["params"])
            start["replicas"] = replicas._replace(**many, local=local)
        self._trainer.restore(start)

    def _from_primary(self, found: tuple | None) -> tuple | None:
        """Host 0's snapshot and description, on every host."""
        description = collectives.json_from_primary(found and found[1])
        if description is None:
            return None
        return collectives.from_primary(found[0] if found else self._like), description

    def _refuse_other_data(self, theirs: dict) -> None:
        """Raises UserError where training would go on with other examples than those of the checkpoint."""
        for name in ("ids", "labels"):
            if theirs[name] != self._data[name]:
                raise UserError(
                    f"dataset: its {name} changed since the checkpoint was saved ({theirs[name][:8]} then)"
                )
        if theirs.get("trace") != self._data.get("trace"):
            raise UserError(f"batch.trace: {self._config['batch']['trace']} changed since the checkpoint was saved")
        before, now = theirs.get("order_version", 1), self._data["order_version"]
        if before != now:
            raise UserError(
                f"--workdir: {self._run.path} takes its examples in order version {before}, this code in version "
                f"{now}: the run cannot go on; allowed: evaluate.py, report.py, or a new run with train.init_from"
            )

    def _take_up(self, snapshot: dict, description: dict) -> None:
        if description.get("batch_sizes"):
            self._reschedule(*(np.array(part, np.int64) for part in description["batch_sizes"]))
        self._trainer.restore(snapshot)
        self.summary |= {k: v for k, v in description["summary"].items() if k in empty_summary()}
        self.before, self._boundary = description["before"], description["boundary"]
        self._saved_step = self._trainer.step

    def _say_what_happened(self, description: dict | None) -> None:
        last = self._run.last_event() if collectives.is_primary() else None
        if last is None:
            return
        if last.get("event") in ENDS:
            reason = f" ({last['reason']})" if last.get("reason") else ""
            how = f"the process before {last['event']}{reason}"
        else:
            how = f"the process before (pid {last.get('pid')} on {last.get('node')}) was killed, or a host died"
        if description is None:
            log.info("starting again at update 0, for there is no sound checkpoint; %s", how)
            return
        log.info("resuming at update %d; %s", self._trainer.step, how)
        theirs = description["layout"] | {"decoded images": description["data"]["images"][:8]}
        ours = self._layout() | {"decoded images": self._data["images"][:8]}
        if changed := _changes(theirs, ours):
            dealt = (
                "; mini-batches hold other examples from here on, since each device takes its part of a batch from "
                "those it holds, and until this epoch ends some come twice and others not"
            )
            log.warning(
                "resuming with %s: results will not be bitwise those of an uninterrupted run, since sums are "
                "rounded in another order%s",
                changed,
                dealt if theirs["devices"] != ours["devices"] else "",
            )
        if changed := _changes(_code(description["summary"]), _code(self.summary)):
            log.warning("resuming with other code: %s: results may differ", changed)

    def _layout(self) -> dict:
        """What must be the same for bitwise the same results, beside the code."""
        return {
            "devices": replicas.count(self._trainer.state),
            "hosts": jax.process_count(),
            "platform": jax.devices()[0].device_kind,
        }

    # ---- save -----------------------------------------------------------------------------------

    def save(self, *, at_boundary: bool) -> None:
        """Saves in the background; `at_boundary` is after the row of an outer loop, else inside one.

        Host 0 may have to wait for the save before, and the others with it.

        Raises:
          UserError: this save or the one before it failed; on every host.
        """
        if at_boundary:
            self._boundary = self._trainer.step
        self._saved_step, self._saved_time = self._trainer.step, time.monotonic()
        with self._clock.measure("checkpoint"):
            snapshot = self._trainer.snapshot()  # replicas are averaged for it, on all hosts
            collectives.agreed(lambda: self._save(snapshot), collectives.is_primary())

    def _save(self, snapshot: dict) -> None:
        description = {
            "config": self._config,
            "data": self._data,
            "layout": self._layout(),
            "summary": jsonable(self.summary),
            "clock": self._clock.saved(),
            "before": self.before,
            "boundary": self._boundary,
            "rows": self._run.rows_mark(),
            "batch_sizes": self._grown(),
        }
        protect = {self._boundary, self.summary["best_step"]} - {None}
        self._checkpoints.save(self._trainer.step, snapshot, description, protect)

    def save_if_due(self) -> None:
        """Between two calls inside an outer loop: saves when `every_sec` have passed.

        Raises:
          UserError: the save before failed; on every host.
        """
        due, error = time.monotonic() - self._saved_time >= self._every_sec, None
        try:
            self._checkpoints.poll()
        except UserError as raised:
            error = raised
        # Nobody comes late to this collective, which costs less than a meeting.
        due, failed = collectives.from_primary(np.array([due, error is not None], np.int32))
        if failed:
            collectives.share_error(error)
        if due:
            self.save(at_boundary=False)

    def _grown(self) -> list | None:
        """The batch sizes so far, where training finds them itself."""
        stages = self._trainer.schedule.batch_sizes
        return [part.tolist() for part in stages] if self._config["batch"]["auto"] else None

    # ---- trouble --------------------------------------------------------------------------------

    def roll_back(self, from_step: int, reason: str) -> None:
        """Goes back to the last validated checkpoint with the learning rate cut, on all hosts.

        Raises:
          Diverged: it was rolled back as often as the config allows.
          UserError: the checkpoint is damaged.
        """
        limit, factor = self._config["train"]["max_nonfinite"], self._config["train"]["rollback_factor"]
        rollbacks = self.summary["rollbacks"]
        if len(rollbacks) >= limit:
            raise Diverged(f"diverged: {reason}; rolled back {limit} times before (train.max_nonfinite)")

        def restore():
            self._checkpoints.discard_after(self._boundary)
            try:
                found = checkpoints.restore(self._checkpoints.path(self._boundary), self._like)
                found = self._for_these_devices(found[0]), found[1]
            except checkpoints.DamagedCheckpoint as damage:
                raise UserError(str(damage)) from damage
            self._run.start_rows(found[1]["rows"])
            return found

        snapshot, description = self._from_primary(collectives.agreed(restore, collectives.is_primary()))
        since = len(rollbacks) + 1 - len(description["summary"]["rollbacks"])
        state = snapshot["state"]
        scale = np.float32(state.learning_rate_scale)
        for _ in range(since):  # one by one: the same roundings whatever was saved in between
            scale = np.float32(scale * np.float32(factor))
        snapshot["state"] = state._replace(learning_rate_scale=scale)
        if "replicas" in snapshot:
            replicas = snapshot["replicas"]
            scales = np.full_like(replicas.learning_rate_scale, scale)
            snapshot["replicas"] = replicas._replace(learning_rate_scale=scales)
        self._take_up(snapshot, description)
        entry = {"from_step": from_step, "to_step": self._boundary, "learning_rate_scale": float(scale)}
        self.summary["rollbacks"] = [*rollbacks, entry | {"reason": reason}]
        self._saved_step = None
        log.warning("%s; rolled back to update %d, learning rate x %g", reason, self._boundary, scale)
        last = self.summary["rollbacks"][-1]
        collectives.agreed(lambda: self._run.log_event("rollback", **last), collectives.is_primary())

    # ---- end ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recorded_end(self):
        """Writes summary.json and the last event, however the block ends; saves first if it was stopped."""
        self.summary["status"], reason = "failed", None
        try:
            with collectives.named_collective_errors():
                yield
                self._finish_saving()
            self.summary["status"] = "done"
        except (Diverged, Pruned) as error:
            self.summary["status"], reason = type(error).__name__.lower(), str(error)
            raise
        except preemption.Stopped as stopped:
            try:
                self._finish_saving()
            except UserError as error:
                reason = f"{stopped}, and then: {error}"
                raise
            self.summary["status"], reason = "interrupted", str(stopped)
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            raise
        finally:
            self.summary["seconds"] = self._clock.seconds | {"total": self._clock.total()}
            self._end(reason)

    def _finish_saving(self) -> None:
        """Saves where the run stands and waits for it; all hosts learn of a failure."""
        error = None
        try:
            if self._saved_step != self._trainer.step:
                self.save(at_boundary=False)
            self._checkpoints.wait()
        except UserError as raised:
            error = raised
        collectives.share_error(error)

    def _end(self, reason: str | None) -> None:
        def note():
            self._run.write_json("summary.json", self.summary)
            self._run.log_event(self.summary["status"], step=self._trainer.step, reason=reason)

        try:
            if self.summary["status"] != "failed":
                collectives.agreed(note, collectives.is_primary())
            elif collectives.is_primary():  # the others may not come here
                # The failure itself (a full disk?) is what the user has to know.
                with contextlib.suppress(UserError):
                    note()
        finally:
            self._checkpoints.close()


def _code(summary: dict) -> dict:
    """What a summary was written by: files, commit and libraries."""
    files = (summary.get("code_sha256") or "not recorded")[:12]
    return {"files": files, "commit": summary["git_commit"], **summary["versions"]}


def _changes(before: dict, now: dict) -> str:
    """What of `now` is not as it was, in one line; empty where all is."""
    return "; ".join(f"{name} {now[name]}, was {before.get(name)}" for name in now if now[name] != before.get(name))


# ---- the results of another run ------------------------------------------------------------------


def best_checkpoint(run: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Arrays and description of the checkpoint with the best validation accuracy of a run.

    Raises:
      UserError: there is none, or it is damaged.
    """
    if not (run / "config.json").exists():
        raise UserError(f"{run} is no run folder: it has no config.json")
    kept, best = checkpoints.Checkpoints(run / "checkpoints", keep=1), None
    for step in reversed(kept.steps()):
        try:
            best = checkpoints.check(kept.path(step))["summary"]["best_step"]
            break
        except checkpoints.DamagedCheckpoint as damage:
            log.warning("damaged checkpoint: %s", damage)
    if best is None:
        raise UserError(f"{run} has no sound checkpoint of a validated step")
    try:
        return checkpoints.read_arrays(kept.path(best))
    except checkpoints.DamagedCheckpoint as damage:
        raise UserError(f"{run}: its best checkpoint is damaged: {damage}") from damage


def arrays_of(parts, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint that belong to these parts of the state, as "params", by names without "state"."""
    prefixes = tuple(f"state.{part}." for part in parts)
    return {name.removeprefix("state."): array for name, array in arrays.items() if name.startswith(prefixes)}
