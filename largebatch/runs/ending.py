"""How a run ends, whatever happened: summary.json and the last event; or how it goes back instead."""

import contextlib
import logging

import numpy as np

from largebatch.errors import UserError
from largebatch.hosts import collectives, preemption

log = logging.getLogger("largebatch")


class Diverged(Exception):
    """A loss or gradient is not finite, and the run cannot go on."""


class Pruned(Exception):
    """A sweep ended the run early, for others do better."""


@contextlib.contextmanager
def recorded_end(progress):
    """Writes summary.json and the last event, however the block ends; saves first if it was stopped.

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


# ---- back to a validated checkpoint, after numerical trouble ------------------------------------------


def roll_back(progress, from_step: int, reason: str) -> None:
    """Goes back to the last validated checkpoint with the learning rate cut, on all hosts.

    Args:
      progress: the run's RunProgress.
      from_step: the update that was in trouble.
    Raises:
      Diverged: it was rolled back as often as the config allows.
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
    """One by one: the same roundings whatever was saved in between."""
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
