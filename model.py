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
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
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
    patches = _from_bits(_patches(_bits(x), height, width, stride), x.dtype)
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
        functools.partial(_patches, height=height, width=width, stride=stride),
        jax.ShapeDtypeStruct((len(grad), *no_x.shape[1:]), jnp.float32),
    )
    (x_grad,) = add_up(patches_grad)
    return x_grad.astype(no_x.dtype), kernel_grad.reshape(kernel.shape)


conv_as_dot.defvjp(_conv_as_dot_forward, _conv_as_dot_backward)


def _patches(x, height: int, width: int, stride: int):
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
        x = CONVS[self.implementation](x.astype(self.dtype), kernel, self.stride)
        if self.use_bias:
            x += self.param("bias", nn.initializers.zeros, (self.features,)).astype(x.dtype)
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


@functools.cache  # tracing takes half a second
def training_costs(network: nn.Module, image_shape: tuple[int, int, int]) -> Costs:
    """Counts one image's gradient from the traced program, so on any platform.

    FLOPs are 2 per multiply-add of each matrix product, forward and backward, with convolutions written as
    products (taps over the padding count); elementwise work does not count. Bytes are an estimate: the
    output of each product and of the activation after it, and for "dot" the patches too.
    """
    as_dot = network.clone(conv="dot")
    images = jax.ShapeDtypeStruct((1, *image_shape), network.dtype)
    variables = jax.eval_shape(as_dot.init, jax.random.key(0), images)

    def total(variables, images):
        return as_dot.apply(variables, images).sum()

    kept = 0
    for _, operand, out in _products(jax.make_jaxpr(total)(variables, images).jaxpr):
        if network.conv == "dot":
            kept += 2 * out.size * 4 + operand.size * network.dtype.itemsize
        else:
            kept += 2 * out.size * network.dtype.itemsize
    both = _products(jax.make_jaxpr(jax.value_and_grad(total))(variables, images).jaxpr)
    return Costs(float(sum(flops for flops, _, _ in both)), kept)


def _products(jaxpr):
    """(FLOPs, left operand, output) of every matrix product that a jaxpr's outputs need, inner jaxprs' too."""
    needed, found = set(jaxpr.outvars), []
    for equation in reversed(jaxpr.eqns):
        if not needed.intersection(equation.outvars):
            continue  # the gradient of the images, which XLA drops too
        needed.update(v for v in equation.invars if not isinstance(v, jax.extend.core.Literal))
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            operand, out = equation.invars[0].aval, equation.outvars[0].aval
            flops = 2 * out.size * math.prod(operand.shape[axis] for axis in contracted)
            found.append((flops, operand, out))
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += _products(inner)
    return found


# ---- from uint8 images to the loss -----------------------------------------------------------------


def make_normalise(network, image_shape, mean, std):
    """uint8 images [M, H * W * C] -> [M, H, W, C] in the network's dtype, normalised where they are read."""
    mean, scale = np.float32(mean), np.float32(1 / np.asarray(std))

    def normalise(images):
        images = images.reshape(-1, *image_shape)
        return ((images.astype(jnp.float32) - mean) * scale).astype(network.dtype)

    return normalise


def make_logits_fn(network, image_shape, mean, std):
    """(params, uint8 images [M, H * W * C]) -> float32 logits."""
    normalise = make_normalise(network, image_shape, mean, std)
    return lambda params, images: network.apply({"params": params}, normalise(images))


def make_layer_outputs(network, image_shape, mean, std):
    """(params, uint8 images) -> {"000 Conv_0": output, ...} of every layer, numbered from input to output."""
    normalise = make_normalise(network, image_shape, mean, std)

    def layer_outputs(params, images):
        _, kept = network.apply(
            {"params": params}, normalise(images), capture_intermediates=True, mutable=["intermediates"]
        )
        flat = traverse_util.flatten_dict(kept["intermediates"])
        names = ["/".join(path[:-1]) or "logits" for path in flat]
        return {
            f"{i:03d} {name}": outputs[0]
            for i, (name, outputs) in enumerate(zip(names, flat.values(), strict=True))
        }

    return layer_outputs


def cross_entropy(logits_fn):
    """The `loss_fn` of the step: sums over a micro-batch of weighted cross-entropy and of hits."""

    def loss_fn(params, batch):
        logits = logits_fn(params, batch.images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        hits = jnp.argmax(logits, axis=-1) == batch.labels
        return jnp.sum(losses * batch.weights), {"accuracy": jnp.sum(hits * batch.weights)}

    return loss_fn


def init_params(network, image_shape, seed: int):
    """float32 parameters, the same for the same seed on every host."""
    images = jnp.zeros((1, *image_shape), network.dtype)
    return jax.jit(network.init)(jax.random.key(seed), images)["params"]
