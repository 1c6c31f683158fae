"""Convolutions: as one matrix product, as fast on CPUs as they allow, and by XLA."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def conv_as_dot(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """A "SAME" convolution as strided slices, one concatenate and one matrix product; for CPUs.

    Gradients of `lax.conv` inside a loop miss XLA's fast path on CPU (about 50x slower: jax issue 12868);
    matrix products do not. With bfloat16 operands all three products (output and both gradients) stay in
    the one form that XLA hands to its bfloat16 kernels, bfloat16 x bfloat16 -> float32 with rows times
    columns: 1.5x the float32 step (LOG.md). Reverse mode only.

    Args:
      x: [N, H, W, C]; its dtype is that of the arithmetic.
      kernel: float32 [KH, KW, C, C_out]; its gradient is not rounded.
    Returns:
      float32 [N, ceil(H / stride), ceil(W / stride), C_out].
    """
    return _conv_as_dot_forward(x, kernel, stride)[0]


def _conv_as_dot_forward(x, kernel, stride):
    height, width, channels, features = kernel.shape
    patches = _from_bits(extract_patches(_bits(x), height, width, stride), x.dtype)
    out_shape = (*patches.shape[:3], features)
    patches = patches.reshape(-1, height * width * channels)
    kernel = kernel.astype(x.dtype)
    out = _dot(patches, kernel.reshape(-1, features), 0).reshape(out_shape)
    return out, (patches, kernel, x[:0])  # of x, the backward pass needs but shape and dtype


def _conv_as_dot_backward(stride, residuals, grad):
    patches, kernel, no_x = residuals
    height, width, _, features = kernel.shape
    rows = grad.reshape(-1, features).astype(kernel.dtype)
    if patches.shape[1] < 32:  # a first layer: its product is too small to pay for a transposition
        kernel_grad = patches.astype(jnp.float32).T @ rows.astype(jnp.float32)
    else:
        # The barriers keep XLA from folding the transpositions into the product, which would turn it into a
        # form without bfloat16 kernel; a flat vector has but one layout, so the transposition really happens.
        columns = _from_bits(lax.optimization_barrier(_bits(rows).T.ravel()).reshape(features, -1), rows.dtype)
        kernel_grad = lax.optimization_barrier(_dot(columns, patches, 0)).T
    patches_grad = _dot(rows, kernel.reshape(-1, features), 1).reshape(*grad.shape[:3], -1)
    add_up = jax.linear_transpose(
        functools.partial(extract_patches, height=height, width=width, stride=stride),
        jax.ShapeDtypeStruct((len(grad), *no_x.shape[1:]), jnp.float32),
    )
    (x_grad,) = add_up(patches_grad)
    return x_grad.astype(no_x.dtype), kernel_grad.reshape(kernel.shape)


conv_as_dot.defvjp(_conv_as_dot_forward, _conv_as_dot_backward)


def extract_patches(x, height: int, width: int, stride: int):
    """[N, H, W, C] -> [N, OH, OW, height * width * C]: what each output of a "SAME" convolution sees."""
    n, in_height, in_width, channels = x.shape
    (out_height, *pad_height) = _same_padding(in_height, height, stride)
    (out_width, *pad_width) = _same_padding(in_width, width, stride)
    x = jnp.pad(x, ((0, 0), pad_height, pad_width, (0, 0)))
    taps = [
        lax.slice(
            x,
            (0, i, j, 0),
            (n, i + (out_height - 1) * stride + 1, j + (out_width - 1) * stride + 1, channels),
            (1, stride, stride, 1),
        )
        for i in range(height)
        for j in range(width)
    ]
    return jnp.concatenate(taps, axis=-1)


def _dot(rows, matrix, contracted: int):
    """rows [M, K] times matrix, over its axis `contracted`; the sum is in float32."""
    return lax.dot_general(rows, matrix, (((1,), (contracted,)), ((), ())), preferred_element_type=jnp.float32)


def _bits(x):
    """The same bits as unsigned integers: XLA moves bfloat16 on CPU as float32, twice the bytes and two
    conversions, but integers as they are."""
    return lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])


def _from_bits(x, dtype):
    return lax.bitcast_convert_type(x, dtype)


def conv_lax(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """The same convolution by `lax.conv_general_dilated`, in and out in the dtype of x."""
    kernel = kernel.astype(x.dtype)
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def conv_lax_padded(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """`conv_lax` with fewer than 8 input channels padded to 8 by zeros, as tensor cores want them.

    On GPU, XLA does so by itself for float16 but not for bfloat16. Not measured yet: `bench.py step` on a
    GPU times it beside "lax".
    """
    missing = max(0, 8 - x.shape[-1])
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing)))
    return conv_lax(x, jnp.pad(kernel, ((0, 0), (0, 0), (0, missing), (0, 0))), stride)


CONVS = {"dot": conv_as_dot, "lax": conv_lax, "lax_padded": conv_lax_padded}


def _same_padding(size: int, kernel: int, stride: int) -> tuple[int, int, int]:
    """Output size and the padding before and after, as XLA's "SAME"."""
    out = -(-size // stride)
    total = max((out - 1) * stride + kernel - size, 0)
    return out, total // 2, total - total // 2


class Conv(nn.Module):
    """A square convolution with "SAME" padding; its parameters are those of `nn.Conv`."""

    features: int
    kernel_size: int = 3
    stride: int = 1
    use_bias: bool = True
    dtype: jnp.dtype = jnp.float32
    implementation: str = "lax"

    @nn.compact
    def __call__(self, x):
        shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        x = CONVS[self.implementation](x.astype(self.dtype), kernel, self.stride)
        if self.use_bias:
            x += self.param("bias", nn.initializers.zeros, (self.features,)).astype(x.dtype)
        return x
