"""What a run takes over from another one (train.init_from), as a TrainState of NumPy arrays."""

from pathlib import Path

import numpy as np

from largebatch.errors import UserError
from largebatch.runs import best, checkpoints, provenance

WHOLE_AVERAGE = 1_000_000  # updates, after which no moving average remembers its start


def best_parameters(run: Path, state, network_version: int):
    """Return `state` with the parameters of a run's best checkpoint, and what the network has beside them.

    Raises:
      UserError: there is none, or it is of another network, or of another version of the networks.
    """
    like = {"params": state.params, "model_state": state.model_state}
    found = best.best_checkpoint(run)
    provenance.refuse_other_network(found.description["data"], network_version, run)
    variables = checkpoints.fill(like, best.arrays_of(like, found.arrays), str(run))
    # The averages that come along are whole: the first update must not take their place.
    whole = np.full_like(state.num_averaged, WHOLE_AVERAGE)
    return state.replace(**variables, ema=None if state.ema is None else variables, num_averaged=whole)


def branch(run: Path, step: int, state, network_version: int):
    """Return `state` with all that a run had learned after update `step`: parameters, moments and averages.

    Updates are counted from 0 again. Hyper-parameters, seed, the noise that is measured and the outer momentum of
    local steps are those of `state`.

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
    provenance.refuse_other_network(description["data"], network_version, run)
    learned = checkpoints.fill(learned, best.arrays_of(learned, arrays), str(saved.path(step)))
    learned["opt_state"] = learned["opt_state"]._replace(hyperparams=state.opt_state.hyperparams)
    return state.replace(**learned)
