"""The networks' gelu, which keeps one array for its gradient."""

import flax.linen as nn
import jax
from jax import lax


@jax.custom_vjp
def gelu(x):
    """gelu in its tanh form (Hendrycks & Gimpel 2016); the gradient is computed from `x` alone.

    By itself XLA keeps the tanh too on a GPU: another kernel that writes an array as large as `x`, which two others
    read. That is a quarter of all bytes that an update of the convnet moves there (docs/hardware.md).
    """
    return nn.gelu(x)


def _forward(x):
    return nn.gelu(x), x


def _backward(x, cotangent):
    # Behind the barrier the compiler does not find that it has had this tanh before. On TPUs it computes it anew
    # without being told; on CPUs that is slower.
    x = lax.platform_dependent(x, cuda=lax.optimization_barrier, default=lambda x: x)
    return jax.vjp(nn.gelu, x)[1](cotangent)


gelu.defvjp(_forward, _backward)
