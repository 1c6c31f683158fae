"""Begin, end and rollback of a run."""

import contextlib
import logging
from pathlib import Path

import numpy as np

from largebatch.config.dicts import DATA_PATHS, difference, identity_of_run
from largebatch.hosts import collectives, preemption
from largebatch.runs.folder import RunFolder
from largebatch.runs.trackers import check_installed
from largebatch.util import UserError, expanded

log = logging.getLogger("largebatch")


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
    is_begun, summary = _holds_this_run(run, config), run.read("summary.json")
    if is_begun and summary and summary.get("status") in ("done", "diverged", "pruned"):
        _name_other_places(run, config)
        return summary
    run.lock()
    try:
        # Checked again: this machine may hold a run that has not been copied to its bucket yet.
        if not _holds_this_run(run, config) and run.holds("metrics.jsonl"):
            raise UserError(f"--workdir: {run.address} holds metrics.jsonl but no config.json; give a new folder")
    except UserError:
        run.close()
        raise
    return None


def _holds_this_run(run: RunFolder, config: dict) -> bool:
    """Return True if a run of this config is in the folder; refuse a run of another config.

    The place of the data does not matter: checkpoints have their digests.
    """
    stored = run.read_config()
    if stored is None:
        return False
    changed = difference(identity_of_run(config), identity_of_run(stored), ("here", "there"))
    if changed:
        raise UserError(f"--workdir: {run.address} holds a run of another config: {changed}")
    return True


def _name_other_places(run: RunFolder, config: dict) -> None:
    """Warn if an ended run had its data from other places: the data in the new places are not checked."""
    there = run.read("config.json")["dataset"]
    for name in (path.removeprefix("dataset.") for path in DATA_PATHS):
        if _place(there.get(name)) != _place(here := config["dataset"][name]):
            log.warning(
                "%s has ended, with dataset.%s %s; %s was not looked at", run.address, name, there.get(name), here
            )


def _place(path: str | None) -> str | None:
    if path is None or "://" in path:
        return path
    try:
        return str(Path(expanded(path)).resolve())
    except UserError:  # "~USER" of another machine
        return path


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
    progress.take_up(_with_learning_rate_scale(snapshot, scale), description)
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
