"""The networks, by name: the seed's convolution stack, ResNet-8 for CIFAR and ResNet-50.

All take float images [N, H, W, C] and give float32 logits [N, num_classes]. Parameters are float32;
`dtype` is what the arithmetic runs in.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


def conv_as_dot(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """A "SAME" convolution as strided slices, one concatenate and one matrix product.

    On CPU, XLA runs the matrix product at full speed anywhere, while gradients of `lax.conv` inside a
    loop miss the fast path (about 20x slower: jax issue 12868). LOG.md has the figures.

    Args:
      x: [N, H, W, C].
      kernel: [KH, KW, C, C_out].
    Returns:
      [N, ceil(H / stride), ceil(W / stride), C_out].
    """
    n, height, width, channels = x.shape
    kernel_height, kernel_width, _, features = kernel.shape
    (out_height, *pad_height) = _same_padding(height, kernel_height, stride)
    (out_width, *pad_width) = _same_padding(width, kernel_width, stride)
    x = jnp.pad(x, ((0, 0), pad_height, pad_width, (0, 0)))
    taps = [
        lax.slice(
            x,
            (0, i, j, 0),
            (n, i + (out_height - 1) * stride + 1, j + (out_width - 1) * stride + 1, channels),
            (1, stride, stride, 1),
        )
        for i in range(kernel_height)
        for j in range(kernel_width)
    ]
    patches = jnp.concatenate(taps, axis=-1).reshape(-1, kernel_height * kernel_width * channels)
    return (patches @ kernel.reshape(-1, features)).reshape(n, out_height, out_width, features)


def conv_lax(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """The same convolution by `lax.conv_general_dilated`."""
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


CONVS = {"dot": conv_as_dot, "lax": conv_lax}


def resolve_conv(name: str, platform: str) -> str:
    """`"auto"` is "dot" on CPU, where it was measured to win, and "lax" elsewhere."""
    if name == "auto":
        return "dot" if platform == "cpu" else "lax"
    return name


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
        x = CONVS[self.implementation](x.astype(self.dtype), kernel.astype(self.dtype), self.stride)
        if self.use_bias:
            x += self.param("bias", nn.initializers.zeros, (self.features,)).astype(self.dtype)
        return x


class ConvNet(nn.Module):
    """The seed network: 3x3 convolutions of stride 2, gelu, global mean, two dense layers.

    422,602 parameters on 3-channel images with 10 classes. (Brain of Mat Kelcey, "crazy large batch
    sizes", 2021.) gelu is the tanh form: the erf form is 9-16% slower on CPU.
    """

    num_classes: int
    dtype: jnp.dtype = jnp.float32
    conv: str = "lax"
    features: tuple[int, ...] = (32, 64, 128, 256)

    @nn.compact
    def __call__(self, x):
        for features in self.features:
            x = Conv(features, stride=2, dtype=self.dtype, implementation=self.conv)(x)
            x = nn.gelu(x)
        x = jnp.mean(x, axis=(1, 2))
        x = nn.gelu(nn.Dense(128, dtype=self.dtype)(x))
        return nn.Dense(self.num_classes, dtype=self.dtype)(x).astype(jnp.float32)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut (He et al. 2015)."""

    features: int
    stride: int
    conv: Callable
    norm: Callable

    @nn.compact
    def __call__(self, x):
        y = nn.relu(self.norm()(self.conv(self.features, stride=self.stride)(x)))
        y = self.norm()(self.conv(self.features)(y))
        if x.shape != y.shape:
            x = self.norm()(self.conv(self.features, kernel_size=1, stride=self.stride)(x))
        return nn.relu(x + y)


class BottleneckBlock(nn.Module):
    """1x1, 3x3 (strided, as in ResNet v1.5), 1x1 to four times the features (He et al. 2015)."""

    features: int
    stride: int
    conv: Callable
    norm: Callable

    @nn.compact
    def __call__(self, x):
        y = nn.relu(self.norm()(self.conv(self.features, kernel_size=1)(x)))
        y = nn.relu(self.norm()(self.conv(self.features, stride=self.stride)(y)))
        y = self.norm(scale_init=nn.initializers.zeros)(self.conv(self.features * 4, kernel_size=1)(y))
        if x.shape != y.shape:
            x = self.norm()(self.conv(self.features * 4, kernel_size=1, stride=self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Residual network with group normalisation (Wu and He 2018), which knows no batch size.

    `stage_sizes` blocks per stage, features doubling from `width`. `imagenet_stem` starts with a 7x7
    convolution of stride 2 and a max-pool; otherwise with a 3x3 convolution, as for CIFAR.
    """

    num_classes: int
    stage_sizes: tuple[int, ...]
    width: int
    block: type[nn.Module]
    imagenet_stem: bool
    dtype: jnp.dtype = jnp.float32
    conv: str = "lax"

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(Conv, use_bias=False, dtype=self.dtype, implementation=self.conv)
        norm = functools.partial(nn.GroupNorm, num_groups=32 if self.width % 32 == 0 else 8, dtype=self.dtype)
        if self.imagenet_stem:
            x = nn.relu(norm()(conv(self.width, kernel_size=7, stride=2)(x)))
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        else:
            x = nn.relu(norm()(conv(self.width)(x)))
        for stage, num_blocks in enumerate(self.stage_sizes):
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                x = self.block(self.width * 2**stage, stride, conv, norm)(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(self.num_classes, dtype=self.dtype)(x).astype(jnp.float32)


MODELS = {
    "convnet": ConvNet,
    "resnet8": functools.partial(ResNet, stage_sizes=(1, 1, 1), width=16, block=BasicBlock, imagenet_stem=False),
    "resnet50": functools.partial(
        ResNet, stage_sizes=(3, 4, 6, 3), width=64, block=BottleneckBlock, imagenet_stem=True
    ),
}


def create_model(name: str, num_classes: int, dtype: str, conv: str) -> nn.Module:
    """The network called `name` (a key of MODELS), computing in `dtype`, convolving by CONVS[conv]."""
    return MODELS[name](num_classes=num_classes, dtype=jnp.dtype(dtype), conv=conv)


class Costs(NamedTuple):
    """Of one training image: FLOPs of all matrix products, and bytes kept for the backward pass."""

    flops: float
    activation_bytes: int


def training_costs(network: nn.Module, image_shape: tuple[int, int, int]) -> Costs:
    """Counts one image's gradient from the traced program, so on any platform.

    FLOPs are 2 per multiply-add of each matrix product, forward and backward, with convolutions written as
    products (taps over the padding count); elementwise work does not count. Bytes are an estimate: the
    output of each product and of the activation after it.
    """
    network = network.clone(conv="dot")
    images = jax.ShapeDtypeStruct((1, *image_shape), network.dtype)
    variables = jax.eval_shape(network.init, jax.random.key(0), images)

    def total(variables, images):
        return network.apply(variables, images).sum()

    forward = _products(jax.make_jaxpr(total)(variables, images).jaxpr)
    both = _products(jax.make_jaxpr(jax.grad(total))(variables, images).jaxpr)
    kept = sum(2 * out.size * out.dtype.itemsize for _, out in forward)
    return Costs(float(sum(flops for flops, _ in both)), kept)


def _products(jaxpr):
    """(FLOPs, output) of every matrix product of a jaxpr, those of inner jaxprs included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            operand, out = equation.invars[0].aval, equation.outvars[0].aval
            yield 2 * out.size * math.prod(operand.shape[axis] for axis in contracted), out
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _products(inner)
