"""Begin, end and rollback of a run."""

import contextlib
import functools
import importlib.util
import logging

import numpy as np

from largebatch.config import dicts
from largebatch.hosts import collectives, preemption
from largebatch.runs.folder import RunFolder
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
    if config["log"]["wandb"] and importlib.util.find_spec("wandb") is None:
        raise UserError("log.wandb: wandb is not installed; allowed: after pip install -r requirements-cloud.txt")
    stored, summary = _stored_config(run, config), run.read("summary.json")
    if stored and summary and _has_ended(summary, stored, config):
        here, there = dicts.flatten(config), dicts.flatten(stored)
        for name in dicts.DATA_PATHS:
            if here[name] != there[name]:
                end = "has ended, with %s %s; %s was not looked at"
                log.warning(f"%s {end}", run.address, name, there[name], here[name])
        return summary
    try:
        run.lock()
        # Checked again: this machine may hold a run that has not been copied to its bucket yet.
        if _stored_config(run, config) is None and (run.path / "metrics.jsonl").exists():
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
    here, there = dicts.identity_of_run(config), dicts.identity_of_run(stored)
    schedule, trace = config["schedule"], config["batch"]["trace"]
    if schedule["name"] == "constant" and schedule["scaling"] != "adascale" and trace is None:
        there[LENGTH] = max(there[LENGTH], here[LENGTH])
    if changed := dicts.difference(here, there, ("here", "there")):
        hint = f"; {LONGER_HINT}" if here[LENGTH] != there[LENGTH] else ""
        raise UserError(f"--workdir: {run.address} holds a run of another config: {changed}{hint}")
    return stored


def _has_ended(summary: dict, stored: dict, config: dict) -> bool:
    """Return True if there is nothing left to train, unless `config` asks for a longer run than the stored one."""
    is_longer = config["train"]["outer_steps"] > stored["train"]["outer_steps"]
    goes_on = is_longer and summary["steps_to_target"] is None
    return summary["status"] in ("diverged", "pruned") or (summary["status"] == "done" and not goes_on)


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
        reason = str(stopped)
        progress.finish_saving()
        progress.summary["status"] = "interrupted"
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
    # One factor after the other: equal roundings whatever was saved in between.
    factors = [np.float32(options["rollback_factor"])] * (len(rollbacks) + 1)
    scale = functools.reduce(np.multiply, factors)
    for name in snapshot.keys() & {"state", "replicas"}:
        scales = np.full_like(snapshot[name].learning_rate_scale, scale)
        snapshot[name] = snapshot[name].replace(learning_rate_scale=scales)
    progress.restore(snapshot, description)
    rollback = {
        "from_step": from_step,
        "to_step": progress.validated_step,
        "learning_rate_scale": float(scale),
        "reason": reason,
    }
    progress.summary["rollbacks"] = [*rollbacks, rollback]
    log.warning("%s; rolled back to step %d, learning rate x %g", reason, progress.validated_step, scale)
    progress.note_event("rollback", **rollback)
