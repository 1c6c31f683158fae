"""What a run takes over from another one (train.init_from), as a TrainState of NumPy arrays."""

from pathlib import Path

import numpy as np

from largebatch.errors import UserError
from largebatch.runs import best, checkpoints

WHOLE_AVERAGE = 1_000_000  # updates, after which no moving average remembers its start


def best_parameters(run: Path, state):
    """`state` with the parameters of a run's best checkpoint, and what the network has beside them.

    Raises:
      UserError: there is none, or it is of another network.
    """
    like = {"params": state.params, "model_state": state.model_state}
    arrays = best.best_checkpoint(run).arrays
    variables = checkpoints.fill(like, best.arrays_of(like, arrays), str(run))
    # The averages that come along are whole: the first update must not take their place.
    whole = np.full_like(state.num_averaged, WHOLE_AVERAGE)
    return state.replace(**variables, ema=None if state.ema is None else variables, num_averaged=whole)


def branch(run: Path, step: int, state):
    """`state` with all that a run had learned after update `step`, moments of the optimizer and averages too.

    Updates are counted from 0 again. Hyper-parameters, seed, the noise that is measured and the outer momentum of
    local steps are those of `state`.

    Raises:
      UserError: there is no such checkpoint, or it is of another network or optimizer.
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
        arrays, _ = checkpoints.read_arrays(saved.path(step))
    except checkpoints.DamagedCheckpoint as damage:
        raise UserError(f"damaged checkpoint: {damage}") from damage
    learned = checkpoints.fill(learned, best.arrays_of(learned, arrays), str(saved.path(step)))
    learned["opt_state"] = learned["opt_state"]._replace(hyperparams=state.opt_state.hyperparams)
    return state.replace(**learned)
