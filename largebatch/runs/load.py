"""Loader of run folders: rows, config and summary without JAX, parameters on request."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.buckets import bucket
from largebatch.runs import reader
from largebatch.runs.folder import RunFolder
from largebatch.util import UserError

if TYPE_CHECKING:
    import numpy as np

    from largebatch.runs import checkpoints

log = logging.getLogger("largebatch")

CHECKPOINTS = "checkpoints"
WHOLE_AVERAGE = 1_000_000  # steps, after which no moving average remembers its start


def load(path) -> reader.Run | reader.Study:
    """Load a run, finished or not, or a study: config, rows, events and summary.

    What is damaged or missing is listed in `problems`. `best_checkpoint` reads the parameters.

    Args:
      path: folder, or URL of a run in a bucket, which is copied to this machine.
    Raises:
      UserError: there is neither a run nor a study.
    """
    return reader.read(bucket.local_copy(path))


# ---- checkpoints; these import JAX -------------------------------------------------------------------


def steps_of(run: Path) -> list[int]:
    """Return the steps of which a run has checkpoints, oldest first.

    Raises:
      UserError: there is no run, or another version of the code wrote it.
    """
    from largebatch.runs import checkpoints

    if RunFolder(run).read_config() is None:
        raise UserError(f"{run} is no run folder: it has no config.json")
    return checkpoints.saved_steps(run / CHECKPOINTS)


def best_checkpoint(run: Path) -> "checkpoints.LoadedCheckpoint":
    """Read the checkpoint with the best validation score of a run.

    Raises:
      UserError: the run has none, or it is damaged.
    """
    from largebatch.runs import checkpoints

    for step in reversed(steps_of(run)):  # the newest sound one records which was best
        try:
            newest = checkpoints.read_description(checkpoints.path_of(run / CHECKPOINTS, step))
        except checkpoints.DamagedCheckpoint as damage:
            log.warning("%s", damage)
            continue
        if (best := newest["summary"]["best_step"]) is not None:
            return checkpoints.read_arrays(checkpoints.path_of(run / CHECKPOINTS, best))
        break
    raise UserError(f"{run} has no sound checkpoint of a validated step")


def arrays_of(parts: Iterable[str], arrays: "dict[str, np.ndarray]") -> "dict[str, np.ndarray]":
    """Return the arrays of some parts of a checkpointed state ("params", ...), by names without "state."."""
    parts = set(parts)
    names = {name: name.removeprefix("state.") for name in arrays if name.startswith("state.")}
    return {short: arrays[name] for name, short in names.items() if short.partition(".")[0] in parts}


# ---- the start of another run (train.init_from) --------------------------------------------------------


def initial_state(address: str, step: int | None, state, network_version: int):
    """Return `state` with what another run had learned.

    With `step` that is all after so many steps (parameters, moments and averages), and steps are counted from 0
    again. Without, it is the variables of the network from the best checkpoint. Hyper-parameters, seed, the noise
    that is measured and the outer momentum of local steps are those of `state`.

    Args:
      address: folder of the other run, or its URL in a bucket.
      state: a TrainState of NumPy arrays.
    Raises:
      UserError: there is no such checkpoint, or it is of another network or optimizer, or of another version of the
        networks.
    """
    import numpy as np

    from largebatch.runs import checkpoints, summary

    run = bucket.local_copy(address)
    if step:
        if step not in (saved := steps_of(run)):
            allowed = ", ".join(f"{step:,}" for step in saved) or "none"
            raise UserError(f"{run} has no checkpoint of step {step:,}; allowed as train.init_step: {allowed}")
        loaded = checkpoints.read_arrays(checkpoints.path_of(run / CHECKPOINTS, step))
    else:
        loaded = best_checkpoint(run)
    summary.refuse_other_network(loaded.description["data"], network_version, run)
    parts = ["params", "model_state", *(("ema", "opt_state", "num_averaged") if step else ())]
    like = {part: getattr(state, part) for part in parts}
    learned = checkpoints.fill(like, arrays_of(like, loaded.arrays), str(run))
    if step:
        learned["opt_state"] = learned["opt_state"]._replace(hyperparams=state.opt_state.hyperparams)
        return state.replace(**learned)
    # The restored averages are complete: the first step must not replace them.
    whole = np.full_like(state.num_averaged, WHOLE_AVERAGE)
    return state.replace(**learned, ema=None if state.ema is None else learned, num_averaged=whole)
