"""What others take from a run: the checkpoint with its best validation."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from largebatch.errors import UserError
from largebatch.runs import checkpoints

log = logging.getLogger("largebatch")


@dataclass(frozen=True)
class BestCheckpoint:
    """Arrays by name, and checkpoint.json: step, config, description of the data, ..."""

    arrays: dict[str, np.ndarray]
    description: dict


def best_checkpoint(run: Path) -> BestCheckpoint:
    """The checkpoint with the best validation score of a run.

    Raises:
      UserError: there is none, or it is damaged.
    """
    if not (run / "config.json").exists():
        raise UserError(f"{run} is no run folder: it has no config.json")
    saved = checkpoints.Checkpoints(run / "checkpoints", keep=1)
    best_step = None
    for step in reversed(saved.steps()):  # the newest sound one tells which was best
        try:
            best_step = checkpoints.check(saved.path(step))["summary"]["best_step"]
            break
        except checkpoints.DamagedCheckpoint as damage:
            log.warning("damaged checkpoint: %s", damage)
    if best_step is None:
        raise UserError(f"{run} has no sound checkpoint of a validated step")
    try:
        arrays, description = checkpoints.read_arrays(saved.path(best_step))
    except checkpoints.DamagedCheckpoint as damage:
        raise UserError(f"{run}: its best checkpoint is damaged: {damage}") from damage
    return BestCheckpoint(arrays, description)


def arrays_of(parts: Iterable[str], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint that belong to these parts of the state, as "params", by names without "state"."""
    parts = set(parts)
    names = {name: name.removeprefix("state.") for name in arrays if name.startswith("state.")}
    return {short: arrays[name] for name, short in names.items() if short.partition(".")[0] in parts}
