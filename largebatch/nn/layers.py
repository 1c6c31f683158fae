"""Activation, pooling, auxiliary heads, normalisation, and whitened patches."""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from largebatch.nn.convolution import CONVS, extract_patches


@jax.custom_vjp
def gelu(x):
    """Apply gelu in its tanh form (Hendrycks & Gimpel 2016); the gradient is computed from `x` alone.

    By itself XLA keeps the tanh too on a GPU: another kernel writes an array as large as `x`, and two others read
    it. That is a sixth of all bytes that a step of the convnet moves there (docs/hardware.md).
    """
    return nn.gelu(x)


def _gelu_backward(x, cotangent):
    # The barrier hides from the compiler that it has computed this tanh before. On TPUs it recomputes it without a
    # barrier; on CPUs that is slower.
    x = lax.platform_dependent(x, cuda=lax.optimization_barrier, default=lambda x: x)
    return jax.vjp(nn.gelu, x)[1](cotangent)


gelu.defvjp(lambda x: (nn.gelu(x), x), _gelu_backward)


def max_pool(x):
    """Return the largest of each 2 x 2 pixels: [N, H, W, C] -> [N, H // 2, W // 2, C].

    An odd row or column is left out; a single one stays. `flax.linen.max_pool` gives the same, with a gradient that
    is four to five times slower on CPUs (LOG.md).
    """
    for axis in (1, 2):
        if even_size := x.shape[axis] // 2 * 2:
            x = jnp.maximum(*(lax.slice_in_dim(x, start, even_size, 2, axis) for start in (0, 1)))
    return x


SIDE_LOGITS = "side_logits"  # the collection of auxiliary heads' logits, where the loss asks for it


class SideHead(nn.Module):
    """An auxiliary head, linear in the mean over all pixels: Lee et al. 2015, "Deeply-Supervised Nets"."""

    num_classes: int
    dtype: jnp.dtype
    kernel_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x) -> None:
        head = nn.Dense(self.num_classes, dtype=self.dtype, kernel_init=self.kernel_init)
        self.sow(SIDE_LOGITS, "logits", head(jnp.mean(x, axis=(1, 2))).astype(jnp.float32))


STATISTICS, FROZEN = "batch_stats", "frozen"  # the collections of untrained variables
EPSILON = 1e-5


class BatchNorm(nn.Module):
    """Batch normalisation (Ioffe and Szegedy 2015) by the statistics of ghost batches.

    Ghost batches (Hoffer et al. 2017, "Train longer, generalize better") are groups of the images that a device
    takes at once, so nothing crosses devices. `weights` [groups, images of a group] say which images are together,
    and keep padding out of the statistics. With weights, "batch_stats" is set to the mean over images of their
    groups' means and variances, which the step averages over the batch and smooths over steps; without weights, the
    smoothed statistics normalise.
    """

    scale_init: Callable = nn.initializers.ones

    @nn.compact
    def __call__(self, x, weights=None):
        shape, features, dtype = x.shape, x.shape[-1:], x.dtype
        mean = self.variable(STATISTICS, "mean", jnp.zeros, features)
        variance = self.variable(STATISTICS, "variance", jnp.ones, features)
        scale = self.param("scale", self.scale_init, features)
        bias = self.param("bias", nn.initializers.zeros, features)
        x = x.astype(jnp.float32)
        if weights is not None:
            # On a CPU an axis of one group makes XLA do more.
            weights = weights[0] if len(weights) == 1 else weights
            own_mean, own_variance = _statistics_of_groups(x, weights)
            if not self.is_initializing():
                mean.value, variance.value = own_mean, own_variance
            if weights.ndim == 2:
                if not self.is_initializing():
                    of_all = (weights.sum(1) / jnp.maximum(weights.sum(), 1.0))[:, None]
                    mean.value, variance.value = jnp.sum(own_mean * of_all, 0), jnp.sum(own_variance * of_all, 0)
                x = x.reshape(*weights.shape, *shape[1:])
                of_group = (len(weights), *[1] * (x.ndim - 2), *features)
                own_mean, own_variance = own_mean.reshape(of_group), own_variance.reshape(of_group)
        else:
            own_mean, own_variance = mean.value, variance.value
        factor = scale * jax.lax.rsqrt(own_variance + EPSILON)
        return (x * factor + (bias - own_mean * factor)).astype(dtype).reshape(shape)


def _statistics_of_groups(x, weights) -> tuple[jax.Array, jax.Array]:
    """Return mean and variance of each group, float32 [groups, C], or of the only one, [C].

    Args:
      x: float32 [M, ..., C].
      weights: float32 [groups, M / groups] or [M]; where a group's are all zero, its padding counts, so that what
        the network makes of it stays finite. No loss sees it.
    """
    totals = weights.sum(-1, keepdims=True)
    share = jnp.where(totals > 0, weights / jnp.maximum(totals, 1.0), 1 / weights.shape[-1])[..., None]
    spatial, grouped = tuple(range(1, x.ndim - 1)), (*weights.shape, -1)
    # The mean is over pixels first and then over groups, or XLA reads all of x twice on a GPU. It comes before the
    # squares, since for both at once XLA makes a loop that is slower on a CPU.
    mean = jnp.sum(x.mean(spatial).reshape(grouped) * share, axis=-2)
    mean_square = jnp.sum(jnp.square(x).mean(spatial).reshape(grouped) * share, axis=-2)
    # This loses digits only where the mean is far from zero; after a convolution it is not.
    return mean, jnp.maximum(mean_square - mean**2, 0.0)


class GroupNorm(nn.Module):
    """Group normalisation (Wu and He 2018), which does not depend on the batch.

    There are as many groups of equal size as possible, up to the paper's 32, each of at least 2 channels.
    """

    scale_init: Callable = nn.initializers.ones

    @nn.compact
    def __call__(self, x, weights=None):
        groups = number_of_groups(x.shape[-1])
        return nn.GroupNorm(num_groups=groups, dtype=x.dtype, scale_init=self.scale_init, name="group")(x)


def number_of_groups(channels: int) -> int:
    """Return the largest divisor of `channels` that is at most 32 and leaves 2 channels or more to a group."""
    most = max(min(32, channels // 2), 1)
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)


# Classes of layers that take (x, weights); "none" is the identity.
NORMS = {"none": lambda scale_init=None: lambda x, weights=None: x, "batch": BatchNorm, "group": GroupNorm}


class Patches(NamedTuple):
    """The squares of an image that a convolution sees, in pixels."""

    size: int
    stride: int
    padding: int


class WhitenedPatches(nn.Module):
    """A frozen convolution after which the training images' patches have the identity as covariance.

    Its kernel, from `whitening_kernel`, is in the collection "frozen" and stays as it is (Page 2018, "How to train
    your ResNet"; Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU").
    """

    patches: Patches
    dtype: jnp.dtype
    implementation: str

    @nn.compact
    def __call__(self, x):
        size, stride, padding = self.patches
        shape = (size, size, x.shape[-1], size**2 * x.shape[-1])
        kernel = self.variable(FROZEN, "kernel", jnp.zeros, shape)
        return CONVS[self.implementation](x.astype(self.dtype), kernel.value, stride, padding)


def whitening_kernel(images: np.ndarray, patches: Patches, epsilon: float) -> np.ndarray:
    """Return the kernel of `WhitenedPatches`, from those patches of images that hold no padding.

    It consists of the eigenvectors of the patches' covariance, each over the root of its eigenvalue.

    Args:
      images: float32 [N, H, W, C], normalised as for the network.
      epsilon: added to the eigenvalues, or the faintest directions, mostly noise, would be as loud as the others.
    Returns:
      float32 [size, size, C, size * size * C]; filters in the order of falling eigenvalues.
    """
    size, stride, padding = patches
    first = -padding % stride  # row and column of the first patch without padding
    total, count = 0.0, 0
    for begin in range(0, len(images), 128):
        inside = jnp.asarray(images[begin : begin + 128, first:, first:])
        rows = np.asarray(extract_patches(inside, size, stride, 0)).reshape(-1, size**2 * images.shape[-1])
        rows = np.concatenate([rows, np.ones_like(rows[:, :1])], axis=1).astype(np.float64)
        total, count = total + rows.T @ rows, count + len(rows)
    moments = total / count  # with the means in the last column
    values, vectors = np.linalg.eigh(moments[:-1, :-1] - np.outer(moments[:-1, -1], moments[:-1, -1]))
    order = np.argsort(-values)
    vectors = vectors[:, order] * np.sign(vectors[:, order].sum(axis=0) + 1e-12)  # the sign is arbitrary
    kernel = vectors / np.sqrt(values[order] + epsilon)
    return kernel.reshape(size, size, images.shape[-1], -1).astype(np.float32)
