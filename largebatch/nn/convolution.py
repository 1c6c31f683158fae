"""Convolutions: as one matrix product, which is fast on CPUs, and by XLA."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

TENSOR_CORE_CHANNELS = 8  # cuDNN takes tensor cores for a multiple of so many 16-bit channels


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def conv_as_dot(x: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Convolve by strided slices, one concatenate and one matrix product; for CPUs.

    Gradients of `lax.conv` inside a loop miss XLA's fast path on CPU (about 50x slower: jax issue 12868). With
    bfloat16 operands all three products (output and both gradients) stay in the one form that XLA hands to its
    bfloat16 kernels, rows times columns with sums in float32: 1.5x the float32 step (LOG.md). Reverse mode only.

    Args:
      x: [N, H, W, C]; its dtype is that of the arithmetic.
      kernel: float32 [K, K, C, C_out]; its gradient is not rounded.
      padding: rows and columns of zeros on each side of x.
    Returns:
      float32 [N, OH, OW, C_out], sizes as `output_size` gives them.
    """
    return _conv_as_dot_forward(x, kernel, stride, padding)[0]


def _conv_as_dot_forward(x, kernel, stride, padding):
    size, _, channels, features = kernel.shape
    patches = lax.bitcast_convert_type(extract_patches(_bits(x), size, stride, padding), x.dtype)
    rows, kernel = patches.reshape(-1, size**2 * channels), kernel.astype(x.dtype)
    out = _dot(rows, kernel.reshape(-1, features), 0).reshape(*patches.shape[:3], features)
    return out, (rows, kernel, x[:0])  # of x the backward pass needs only shape and dtype


def _conv_as_dot_backward(stride, padding, residuals, grad):
    patches, kernel, no_x = residuals
    features = kernel.shape[-1]
    rows = grad.reshape(-1, features).astype(kernel.dtype)
    if patches.shape[1] < 32:  # a first layer: its product is too small to pay for a transposition
        kernel_grad = patches.astype(jnp.float32).T @ rows.astype(jnp.float32)
    else:
        # The barriers keep XLA from folding the transpositions into the product, which would turn it into a
        # form without bfloat16 kernel; a flat vector has but one layout, so the transposition really happens.
        columns = lax.optimization_barrier(_bits(rows).T.ravel()).reshape(features, -1)
        columns = lax.bitcast_convert_type(columns, rows.dtype)
        kernel_grad = lax.optimization_barrier(_dot(columns, patches, 0)).T
    patches_grad = _dot(rows, kernel.reshape(-1, features), 1).reshape(*grad.shape[:3], -1)
    extract = functools.partial(extract_patches, size=len(kernel), stride=stride, padding=padding)
    x = jax.ShapeDtypeStruct((len(grad), *no_x.shape[1:]), jnp.float32)
    (x_grad,) = jax.linear_transpose(extract, x)(patches_grad)
    return x_grad.astype(no_x.dtype), kernel_grad.reshape(kernel.shape)


conv_as_dot.defvjp(_conv_as_dot_forward, _conv_as_dot_backward)


def extract_patches(x, size: int, stride: int, padding: int):
    """Return the pixels that each output of a convolution sees: [N, H, W, C] -> [N, OH, OW, size * size * C]."""
    n, _, _, channels = x.shape
    row_end, column_end = ((output_size(length, size, stride, padding) - 1) * stride + 1 for length in x.shape[1:3])
    x = _pad_to(x, padding, (row_end - 1 + size, column_end - 1 + size))
    taps = [
        lax.slice(x, (0, i, j, 0), (n, i + row_end, j + column_end, channels), (1, stride, stride, 1))
        for i in range(size)
        for j in range(size)
    ]
    return jnp.concatenate(taps, axis=-1)


def _pad_to(x, padding: int, lengths: tuple[int, int]):
    """Pad images with zeros in front, and behind to these lengths; pixels that no output sees are cut off."""
    behind = (new - old - padding for new, old in zip(lengths, x.shape[1:3], strict=True))
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((padding, high, 0) for high in behind), (0, 0, 0)])


def output_size(length: int, size: int, stride: int, padding: int) -> int:
    """Return the number of outputs of a convolution along an axis: ceil(length / stride) for padding size // 2."""
    return (length + 2 * padding - size) // stride + 1


def _dot(rows, matrix, contracted: int):
    """Multiply rows [M, K] by a matrix, over its axis `contracted`; sums are in float32."""
    return lax.dot_general(rows, matrix, (((1,), (contracted,)), ((), ())), preferred_element_type=jnp.float32)


def _bits(x):
    """Return the bits as unsigned integers, which XLA moves as they are; on CPUs it moves bfloat16 as float32."""
    return lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])


def conv_lax(x: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Convolve by `lax.conv_general_dilated`, in and out in the dtype of x; see `conv_as_dot`."""
    kernel, pads = kernel.astype(x.dtype), [(padding, padding)] * 2
    return lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def conv_lax_blocks(x: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Convolve as `conv_lax` does, but over blocks of pixels where channels do not fill tensor cores; for GPUs.

    cuDNN has no tensor-core kernel for 3 channels of bfloat16, and XLA pads channels for float16 alone: as it is, a
    first layer took 54 of the 153 ms of a full-batch step (docs/hardware.md). So blocks of stride x stride pixels
    become pixels with stride^2 times the channels, padded to a multiple of TENSOR_CORE_CHANNELS by zeros, and the
    kernel a smaller one of stride 1. The sums are the same, in another order.
    """
    size, _, channels, features = kernel.shape
    if channels % TENSOR_CORE_CHANNELS == 0:
        return conv_lax(x, kernel, stride, padding)
    blocks = -(-size // stride)  # number of blocks to a side of the kernel
    lengths = [(output_size(length, size, stride, padding) - 1 + blocks) * stride for length in x.shape[1:3]]
    x = _pad_to(x, padding, lengths)
    larger = blocks * stride - size
    kernel = jnp.pad(kernel, ((0, larger), (0, larger), (0, 0), (0, 0)))
    x = x.reshape(len(x), -1, stride, x.shape[2] // stride, stride, channels).transpose(0, 1, 3, 2, 4, 5)
    kernel = kernel.reshape(blocks, stride, blocks, stride, channels, features).transpose(0, 2, 1, 3, 4, 5)
    x, kernel = x.reshape(*x.shape[:3], -1), kernel.reshape(blocks, blocks, -1, features)
    missing = -x.shape[-1] % TENSOR_CORE_CHANNELS
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing)))
    return conv_lax(x, jnp.pad(kernel, ((0, 0), (0, 0), (0, missing), (0, 0))), 1, 0)


CONVS = {"dot": conv_as_dot, "lax": conv_lax, "lax_blocks": conv_lax_blocks}


class Conv(nn.Module):
    """A square convolution; its parameters are those of `nn.Conv`.

    By default the image is padded by kernel_size // 2 on every side, as in PyTorch, so an odd kernel gives
    ceil(size / stride) outputs. cuDNN pads both sides alike: for XLA's "SAME", which pads one side more where sizes
    are even, each activation would be copied into a larger array first.
    """

    features: int
    kernel_size: int = 3
    stride: int = 1
    padding: int | None = None  # None for kernel_size // 2
    use_bias: bool = True
    dtype: jnp.dtype = jnp.float32
    implementation: str = "lax"

    @nn.compact
    def __call__(self, x):
        shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        padding = self.kernel_size // 2 if self.padding is None else self.padding
        x = CONVS[self.implementation](x.astype(self.dtype), kernel, self.stride, padding)
        if self.use_bias:
            x += self.param("bias", nn.initializers.zeros, (self.features,)).astype(x.dtype)
        return x
