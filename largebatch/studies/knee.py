"""Fit of the critical batch size, above which larger batches save few steps."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Knee:
    """Fitted steps to the target over the batch size B: S(B) = min_steps (1 + critical_batch_size / B).

    Attributes:
      critical_batch_size: batch size that needs twice the fewest steps and twice the fewest examples. inf if
        steps still fall in proportion at the largest batch measured; 0 if they do not fall at all.
      low, high: ends of its 95 % interval; None if no batch size has two seeds.
      min_steps: the fewest steps to the target, at any batch size; None if critical_batch_size is inf.
      min_examples: the fewest examples to the target; None if critical_batch_size is 0.
    """

    critical_batch_size: float
    low: float | None
    high: float | None
    min_steps: float | None
    min_examples: float | None

    def steps_at(self, batch_size):
        """Return the steps to the target at a batch size, or an array of them."""
        if math.isinf(self.critical_batch_size):
            return self.min_examples / np.asarray(batch_size, np.float64)
        return self.min_steps * (1 + self.critical_batch_size / np.asarray(batch_size, np.float64))


def fit_knee(batch_sizes, steps, *, resamples: int = 1000, seed: int = 0) -> Knee | None:
    """Fit S(B) = S_min (1 + B_crit / B), that is (S / S_min - 1) (E / E_min - 1) = 1 with E = S B.

    McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", equations 2.11 and 5.1. Least squares in
    log S; the interval is the 2.5 and 97.5 percentile of a bootstrap over the seeds of each batch size.

    Args:
      batch_sizes, steps: batch size and steps to the target, one entry per seed, [N].
    Returns:
      The fit; None with fewer than 3 different batch sizes, since the curve has two parameters.
    """
    batch, steps = np.asarray(batch_sizes, np.float64), np.asarray(steps, np.float64)
    sizes = np.unique(batch)
    if len(sizes) < 3:
        return None
    # For a given B_crit the best log S_min is a mean, so only B_crit is searched. 100 times beyond the measured
    # sizes the curve is a straight line in the logarithms, and B_crit cannot be determined.
    log_critical = np.linspace(math.log(sizes[0] / 100), math.log(sizes[-1] * 100), 1000)  # [G]
    log_min_steps = np.log(steps) - np.log1p(np.exp(log_critical)[:, None] / batch)  # [G, N], by each seed
    critical = float(_best_critical(log_critical, log_min_steps, np.ones((1, len(batch))))[0])
    low = high = None
    if len(sizes) < len(batch):
        weights = _resample(batch, resamples, np.random.default_rng(seed))
        draws = _best_critical(log_critical, log_min_steps, weights)
        low, high = (float(end) for end in np.quantile(draws, [0.025, 0.975], method="inverted_cdf"))
    if math.isinf(critical):
        min_examples = float(np.exp(np.log(steps * batch).mean()))
        return Knee(critical, low, high, min_steps=None, min_examples=min_examples)
    min_steps = float(np.exp((np.log(steps) - np.log1p(critical / batch)).mean()))
    return Knee(critical, low, high, min_steps, min_examples=min_steps * critical or None)


def _best_critical(log_critical: np.ndarray, log_min_steps: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Find B_crit of least squares by a grid and then a parabola through the best point and its two neighbours.

    Args:
      log_critical: the grid, [G].
      log_min_steps: log S_min by each seed if B_crit is a point of the grid, [G, N].
      weights: how often each seed counts, for each of R fits, [R, N].
    Returns:
      B_crit of each fit, [R]; 0 or inf if the best is at an end of the grid.
    """
    last = len(log_critical) - 1
    # The weighted variance of log S_min over the seeds, times the sum of the weights: [R, G].
    sums = weights @ log_min_steps.T
    losses = weights @ (log_min_steps**2).T - sums**2 / weights.sum(1, keepdims=True)
    best = losses.argmin(1)
    inner = best.clip(1, last - 1)
    fits = np.arange(len(weights))
    left, middle, right = losses[fits, inner - 1], losses[fits, inner], losses[fits, inner + 1]
    curvature = left - 2 * middle + right
    shift = np.divide(left - right, 2 * curvature, out=np.zeros_like(middle), where=curvature > 0)
    spacing = log_critical[1] - log_critical[0]
    critical = np.exp(log_critical[inner] + shift.clip(-1, 1) * spacing)
    return np.select([best == 0, best == last], [0.0, np.inf], critical)


def _resample(batch: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw seeds with replacement among those of the same batch size; return the counts [count, N]."""
    weights = np.zeros((count, len(batch)))
    for size in np.unique(batch):
        seeds = np.flatnonzero(batch == size)
        weights[:, seeds] = rng.multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), size=count)
    return weights
