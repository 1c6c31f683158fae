"""Begin, end and rollback of a run."""

import contextlib
import logging

import numpy as np

from largebatch.config.dicts import DATA_PATHS, difference, identity_of_run
from largebatch.hosts import collectives, preemption
from largebatch.runs.folder import RunFolder
from largebatch.runs.trackers import check_installed
from largebatch.util import UserError

log = logging.getLogger("largebatch")

LENGTH = "train.outer_steps"
LONGER_HINT = (
    "allowed: more of them where schedule.name is constant (without a trace or adascale), or a new run that starts "
    "from this one's parameters (train.init_from)"
)


def open_run(config: dict, workdir: str) -> tuple[RunFolder, dict | None]:
    """Open and lock the run folder, or return it with the summary of its ended run; equal on every host.

    Args:
      config: config as plain JSON.
    Raises:
      UserError: the folder cannot be written, is in use, or holds a run of another config; or a tracker that the
        config asks for is not installed.
    """
    run = RunFolder(workdir)
    summary = collectives.agreed(lambda: _ended_or_locked(run, config), collectives.is_primary())
    return run, collectives.json_from_primary(summary)


def _ended_or_locked(run: RunFolder, config: dict) -> dict | None:
    check_installed(config["log"])
    stored, summary = _stored_config(run, config), run.read("summary.json")
    status = summary and stored and summary.get("status")
    goes_on = stored and _length(stored) < _length(config) and summary and summary.get("steps_to_target") is None
    if status in ("diverged", "pruned") or (status == "done" and not goes_on):
        for name, here in config["dataset"].items():
            there = stored["dataset"][name]
            if f"dataset.{name}" in DATA_PATHS and here != there:
                log.warning(
                    "%s has ended, with dataset.%s %s; %s was not looked at", run.address, name, there, here
                )
        return summary
    try:
        run.lock()
        # Checked again: this machine may hold a run that has not been copied to its bucket yet.
        if _stored_config(run, config) is None and run.holds("metrics.jsonl"):
            raise UserError(f"--workdir: {run.address} holds metrics.jsonl but no config.json; give a new folder")
    except UserError:
        run.close()
        raise
    return None


def _stored_config(run: RunFolder, config: dict) -> dict | None:
    """Return the config of the run in the folder, if there is one; refuse a run of another config.

    The place of the data does not matter: checkpoints have their digests. A longer run is the same
    run, if its first steps are the same.
    """
    stored = run.read_config()
    if stored is None:
        return None
    here, there = identity_of_run(config), identity_of_run(stored)
    schedule, trace = config["schedule"], config["batch"]["trace"]
    may_be_longer = schedule["name"] == "constant" and schedule["scaling"] != "adascale" and trace is None
    if may_be_longer and isinstance(there.get(LENGTH), int):
        there[LENGTH] = max(there[LENGTH], here[LENGTH])
    changed = difference(here, there, ("here", "there"))
    if changed:
        hint = f"; {LONGER_HINT}" if here[LENGTH] != there.get(LENGTH) else ""
        raise UserError(f"--workdir: {run.address} holds a run of another config: {changed}{hint}")
    return stored


def _length(config: dict) -> int:
    return config["train"]["outer_steps"]


class Diverged(Exception):
    """Raised when a loss or gradient is not finite and the run cannot continue."""


class Pruned(Exception):
    """Raised when a sweep ends the run early, since others do better."""


@contextlib.contextmanager
def recorded_end(progress):
    """Write summary.json and the last event, however the block ends; save first if it was stopped.

    Args:
      progress: the run's RunProgress.
    """
    progress.summary["status"], reason = "failed", None
    try:
        with collectives.named_collective_errors():
            yield
            progress.finish_saving()
        progress.summary["status"] = "done"
    except (Diverged, Pruned) as error:
        progress.summary["status"], reason = type(error).__name__.lower(), str(error)
        raise
    except preemption.Stopped as stopped:
        try:
            progress.finish_saving()
        except UserError as error:
            reason = f"{stopped}, and then: {error}"
            raise
        progress.summary["status"], reason = "interrupted", str(stopped)
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise
    finally:
        progress.write_end(reason)


# ---- rollback to a validated checkpoint ---------------------------------------------------------------


def roll_back(progress, from_step: int, reason: str) -> None:
    """Roll back to the last validated checkpoint with a lower learning rate, on all hosts.

    Args:
      progress: the run's RunProgress.
      from_step: the step with the non-finite or diverging loss.
    Raises:
      Diverged: the run was rolled back `max_nonfinite` times before.
      UserError: the checkpoint is damaged.
    """
    options, rollbacks = progress.config["train"], progress.summary["rollbacks"]
    limit = options["max_nonfinite"]
    if len(rollbacks) >= limit:
        raise Diverged(f"diverged: {reason}; rolled back {limit} times before (train.max_nonfinite)")
    snapshot, description = progress.read_validated()
    cuts_to_make = len(rollbacks) + 1 - len(description["summary"]["rollbacks"])
    scale = _cut(snapshot["state"].learning_rate_scale, options["rollback_factor"], cuts_to_make)
    progress.restore(_with_learning_rate_scale(snapshot, scale), description)
    rollback = {
        "from_step": from_step,
        "to_step": progress.validated_step,
        "learning_rate_scale": float(scale),
        "reason": reason,
    }
    progress.summary["rollbacks"] = [*rollbacks, rollback]
    log.warning("%s; rolled back to update %d, learning rate x %g", reason, progress.validated_step, scale)
    progress.note_event("rollback", **rollback)


def _cut(scale, factor: float, times: int) -> np.float32:
    """Multiply by `factor` one time after the other: equal roundings whatever was saved in between."""
    scale = np.float32(scale)
    for _ in range(times):
        scale = np.float32(scale * np.float32(factor))
    return scale


def _with_learning_rate_scale(snapshot: dict, scale: np.float32) -> dict:
    changed = {**snapshot, "state": snapshot["state"].replace(learning_rate_scale=scale)}
    if "replicas" in snapshot:
        scales = np.full_like(snapshot["replicas"].learning_rate_scale, scale)
        changed["replicas"] = snapshot["replicas"].replace(learning_rate_scale=scales)
    return changed
