"""Loaders of run folders and exports: a trained network, or the state to start another run from."""

import dataclasses
import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from largebatch.runs import checkpoints, summary
from largebatch.runs.folder import RunFolder
from largebatch.util import UserError

log = logging.getLogger("largebatch")

WHOLE_AVERAGE = 1_000_000  # steps, after which no moving average remembers its start


# ---- the best checkpoint -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BestCheckpoint:
    """Checkpoint with arrays by name, and checkpoint.json (step, config, description of the data, ...)."""

    arrays: dict[str, np.ndarray]
    description: dict


def best_checkpoint(run: Path) -> BestCheckpoint:
    """Read the checkpoint with the best validation score of a run.

    Raises:
      UserError: the run has none, or it is damaged.
    """
    if RunFolder(run).read_config() is None:
        raise UserError(f"{run} is no run folder: it has no config.json")
    saved = checkpoints.Checkpoints(run / "checkpoints", keep=1)
    best_step = None
    for step in reversed(saved.steps()):  # the newest sound one records which was best
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
    """Return the arrays of some parts of a checkpointed state ("params", ...), by names without "state."."""
    parts = set(parts)
    names = {name: name.removeprefix("state.") for name in arrays if name.startswith("state.")}
    return {short: arrays[name] for name, short in names.items() if short.partition(".")[0] in parts}


# ---- the start of another run (train.init_from) --------------------------------------------------------


def best_parameters(run: Path, state, network_version: int):
    """Return `state` with all variables of the network from a run's best checkpoint.

    Args:
      state: a TrainState of NumPy arrays.
    Raises:
      UserError: the run has none, or it is of another network, or of another version of the networks.
    """
    like = {"params": state.params, "model_state": state.model_state}
    found = best_checkpoint(run)
    summary.refuse_other_network(found.description["data"], network_version, run)
    variables = checkpoints.fill(like, arrays_of(like, found.arrays), str(run))
    # The restored averages are complete: the first step must not replace them.
    whole = np.full_like(state.num_averaged, WHOLE_AVERAGE)
    return state.replace(**variables, ema=None if state.ema is None else variables, num_averaged=whole)


def branch(run: Path, step: int, state, network_version: int):
    """Return `state` with all that a run had learned after `step` steps: parameters, moments and averages.

    Steps are counted from 0 again. Hyper-parameters, seed, the noise that is measured and the outer momentum of
    local steps are those of `state`.

    Args:
      state: a TrainState of NumPy arrays.
    Raises:
      UserError: there is no such checkpoint, or it is of another network or optimizer, or of another version of the
        networks.
    """
    saved = checkpoints.Checkpoints(run / "checkpoints", keep=1)
    if step not in saved.steps():
        steps = ", ".join(f"{step:,}" for step in saved.steps()) or "none"
        raise UserError(f"{run} has no checkpoint of update {step:,}; allowed as train.init_step: {steps}")
    learned = {
        "params": state.params,
        "model_state": state.model_state,
        "ema": state.ema,
        "opt_state": state.opt_state,
        "num_averaged": state.num_averaged,
    }
    try:
        arrays, description = checkpoints.read_arrays(saved.path(step))
    except checkpoints.DamagedCheckpoint as damage:
        raise UserError(f"damaged checkpoint: {damage}") from damage
    summary.refuse_other_network(description["data"], network_version, run)
    learned = checkpoints.fill(learned, arrays_of(learned, arrays), str(saved.path(step)))
    learned["opt_state"] = learned["opt_state"]._replace(hyperparams=state.opt_state.hyperparams)
    return state.replace(**learned)
