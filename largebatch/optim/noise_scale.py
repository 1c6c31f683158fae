"""The noise of the gradient, measured between parts of a step's batch.

A batch is summed in groups: the micro-batches of all devices, which may be smaller in a step that measures
(`NoisePlan`). Group k has n_k of the B examples and the gradient sum s_k; G is the mean gradient. S is the
covariance of a single example's gradient and g the true gradient, that of the training set. Batches are drawn from
its N images without replacement, pass by pass, and whole passes have no noise: c, the finite population correction
(`sampling`), is 1 - B / N within a pass. Then E |s_k|^2 / n_k = n_k |g|^2 + tr S for small groups and
E |G|^2 = |g|^2 + c tr S / B. So with K groups

    tr S = (sum_k |s_k|^2 / n_k - B |G|^2) / (K - B / N - c)    and    |g|^2 = |G|^2 - c tr S / B

are unbiased, whatever the groups' sizes. For an endless set c is 1 and B / N is 0: McCandlish et al. 2018, "An
Empirical Model of Large-Batch Training", appendix A.1, for more than two batch sizes; a scale computed so would be
too large by 1 / (1 - scale / N). Neither estimate needs another gradient. A device's whole share would not do as
a group: in a batch of more than one pass it holds several views of an image, whose gradients differ less than those
of two images (LOG.md). So c counts the views of an image as one example.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from largebatch.optim.averages import smooth

# Fewest degrees of freedom per group that give an estimate. Groups that are whole passes have none.
LEAST_FREEDOM = 0.01


@struct.dataclass
class Noise:
    """Moving averages of both estimates, the noise and the signal, over measurements."""

    variance: jax.Array  # float32, tr S
    signal: jax.Array  # float32, |g|^2
    count: jax.Array  # int32, measurements that the averages hold


def sampling(offset, batch_size, num_images: int) -> tuple[jax.Array, jax.Array]:
    """Return B / N and c of the batch at [offset, offset + batch_size) of an epoch, in passes over N images.

    Only the parts of passes at its two ends have noise: the mean of n of N that are drawn without replacement has
    1 - n / N of the variance of n independent ones (Cochran 1977, "Sampling Techniques", section 2.5).
    """
    head = jnp.minimum(batch_size, num_images - offset % num_images)
    tail = (batch_size - head) % num_images
    noisy = sum(part * (1 - part / num_images) for part in (head, tail))
    return batch_size / num_images, noisy / batch_size


@dataclasses.dataclass(frozen=True)
class NoisePlan:
    """The steps that measure the noise, and the sizes of their micro-batches."""

    decay: float  # of the moving averages, per measurement: their errors depend on how many measurements they hold
    every: int  # steps from one measurement to the next
    sizes: tuple[int, ...]  # sizes of micro-batches in a step that measures, falling
    least_groups: int  # a device takes the largest size that gives it so many groups, else the last size

    def choice(self, num_groups: list[jax.Array]) -> jax.Array:
        """Return the index in `sizes` of the size that a device takes, int32.

        Args:
          num_groups: numbers of groups that the sizes would give there, int32.
        """
        too_few = [groups < self.least_groups for groups in num_groups[:-1]]
        return sum(too_few, jnp.zeros_like(num_groups[-1]))


def _squares(x) -> jax.Array:
    """Return |x|^2, in full float32 on every platform.

    A convolution on a CPU leaves its kernel's gradient transposed. Transposed once more it is read as it lies; else
    XLA copies it first. The barrier keeps two sums from becoming one, whose order XLA does not change there.
    """
    rows = x.reshape(-1, x.shape[-1]).T if x.ndim > 1 else x.ravel()
    return jnp.sum(lax.optimization_barrier(jnp.sum(jnp.square(rows), axis=-1)))


def group_term(gradient_sum, count) -> jax.Array:
    """Return |s|^2 / n of one group; 0 for an empty one."""
    squares = sum(map(_squares, jax.tree.leaves(gradient_sum)))
    return jnp.where(count > 0, squares / jnp.maximum(count, 1), 0.0)


def measure(group_terms, num_groups, mean_gradient_norm, batch_size, drawn=(0.0, 1.0)):
    """Estimate the noise and the signal of one step's gradient.

    Args:
      group_terms: the sum of `group_term` over groups.
      num_groups: number of groups that hold examples.
      mean_gradient_norm: |G|.
      drawn: B / N and c, from `sampling`; by default of an endless set.
    Returns:
      tr S and |g|^2, and whether the groups gave an estimate.
    """
    passes, correction = drawn
    squared = jnp.square(mean_gradient_norm)
    degrees_of_freedom = num_groups - passes - correction
    enough = (num_groups > 1) & (degrees_of_freedom > LEAST_FREEDOM * num_groups)
    variance = (group_terms - batch_size * squared) / jnp.where(enough, degrees_of_freedom, 1)
    signal = squared - correction * variance / batch_size
    return variance, signal, enough & jnp.isfinite(variance)


def add(noise: Noise, variance, signal, valid, decay: float) -> Noise:
    """Return the moving averages with the estimates of one more step, where they are valid.

    As in the paper, each estimate is smoothed by itself, not their quotient.
    """
    variance, signal = smooth((noise.variance, noise.signal), (variance, signal), decay, noise.count)
    return jax.tree.map(lambda a, b: jnp.where(valid, a, b), Noise(variance, signal, noise.count + 1), noise)


def gain(noise: Noise, batch_size, reference_batch_size: int) -> jax.Array:
    """Return the number of steps of the reference batch that one step of this batch is worth.

    AdaScale's gain ratio, Johnson et al. 2020, "AdaScale SGD", eq. 4: with the scale B / B_ref, sigma^2 =
    tr S / B_ref and mu^2 = |g|^2 it is (sigma^2 + mu^2) / (sigma^2 / scale + mu^2), from 1 where all is signal to
    the scale where all is noise. An estimate below zero counts as zero. As in the paper both batches are drawn
    independently: a batch that is a large part of a pass has less noise than that, and is worth more.
    """
    variance, signal = jnp.maximum(noise.variance, 0), jnp.maximum(noise.signal, 0)
    here = variance / batch_size + signal
    ratio = (variance / reference_batch_size + signal) / jnp.where(here > 0, here, 1)
    return jnp.where((here > 0) & (batch_size != reference_batch_size), ratio, 1.0)


def noise_scale(noise: Noise) -> float | None:
    """Return the simple noise scale tr S / |g|^2 in examples (McCandlish et al., eq. 2.9).

    It estimates the critical batch size of SGD, not of other optimizers: docs/batches.md compares the two.

    Args:
      noise: NumPy numbers.
    Returns:
      None where nothing was measured; infinity where the signal is lost in the noise.
    """
    if not noise.count:
        return None
    return float(np.maximum(noise.variance, 0) / noise.signal) if noise.signal > 0 else np.inf
