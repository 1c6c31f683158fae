"""Steps at which a run's rate would decay, and the batch may grow in its place."""

import bisect
import dataclasses
from collections.abc import Callable

import numpy as np

from largebatch.optim.piecewise import PiecewiseConstant

# What is decayed at a step, and the power of the batch's growth by which the rate rises again: nothing grows with
# "rate". With "batch" rate / batch falls as it would have: Smith et al. 2018, "Don't Decay the Learning Rate,
# Increase the Batch Size". With "seesaw" rate / root of batch does: Meterez et al. 2025, "Seesaw".
DECAY_BY = {"rate": 0.0, "batch": 1.0, "seesaw": 0.5}


@dataclasses.dataclass(frozen=True)
class DecayPlan:
    """The part of a Schedule that decay steps shape."""

    num_updates: int
    batch_sizes: PiecewiseConstant
    rate_batch_sizes: PiecewiseConstant  # by which the scaling rule sets the peak rate
    decay_factors: PiecewiseConstant | None  # of the peak rate; None where it goes by a shape


@dataclasses.dataclass(frozen=True)
class Steps:
    """Where a rate decays, in updates of the first batch size."""

    starts: np.ndarray  # int64 [stages], the first update of each stage, ascending from 0
    factors: np.ndarray  # float64 [stages], of the peak rate; 1 in the first stage
    end: int  # the number of updates


def given_steps(decay_steps: tuple[int, ...], factor: float, num_updates: int) -> Steps:
    """A decay by `factor` at each of `decay_steps`."""
    starts = np.array([0, *decay_steps], np.int64)
    # Python's power: NumPy's last digit is another on another CPU.
    return Steps(starts, np.array([factor**step for step in range(len(starts))]), num_updates)


def steps_along(shape: Callable[[int], float], factor: float, num_updates: int) -> Steps:
    """Steps in place of a shape that falls: the rate is multiplied by `factor` whenever the shape has fallen by it.

    They end where a batch that grew by 1 / `factor` at each would have a stage without an update, or fewer than two
    updates up to the end of the run.

    Args:
      shape: update -> part of the peak rate, which never rises.
    """
    starts, factors = [0], [1.0]
    while True:
        next_factor = factors[-1] * factor
        start = bisect.bisect_left(range(num_updates), -next_factor, key=lambda update: -shape(update))
        if (start - starts[-1]) * factors[-1] < 1 or (num_updates - start) * next_factor < 2:
            return Steps(np.array(starts, np.int64), np.array(factors), num_updates)
        starts.append(start)
        factors.append(next_factor)


def plan_decay(steps: Steps, decay_by: str, batch_sizes: PiecewiseConstant, examples_per_epoch: int) -> DecayPlan:
    """What decays: the rate; or the batch grows, and fewer updates see as many examples between two steps.

    What the data set is too small for is cut from the rate.

    Args:
      decay_by: a key of DECAY_BY.
      batch_sizes: one stage only, where the batch grows.
    """
    if decay_by == "rate":
        return DecayPlan(steps.end, batch_sizes, batch_sizes, PiecewiseConstant(steps.starts, steps.factors))
    batch_size = int(batch_sizes.values[0])
    sizes = np.minimum(np.rint(batch_size / steps.factors), examples_per_epoch).astype(np.int64)
    starts, seen = [0], 0
    for end, size in zip([*steps.starts[1:].tolist(), steps.end], sizes.tolist(), strict=True):
        left = max(end * batch_size - seen, 0)  # the stage before may have seen too much
        updates = -(-left // size)
        starts.append(starts[-1] + updates)
        seen += updates * size
    factors = steps.factors * (sizes / batch_size) ** DECAY_BY[decay_by]
    has_updates = np.diff(starts) > 0
    starts, num_updates = np.array(starts[:-1], np.int64)[has_updates], starts[-1]
    return DecayPlan(
        num_updates=num_updates,
        batch_sizes=PiecewiseConstant(starts, sizes[has_updates]),
        rate_batch_sizes=PiecewiseConstant.constant(batch_size),
        decay_factors=PiecewiseConstant(starts, factors[has_updates]),
    )
