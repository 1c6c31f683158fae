"""The networks, by name: the seed's convolution stack, two with residuals, ResNet-8 for CIFAR and ResNet-50.

All take float images [N, H, W, C], and while training weights [N], 0 for padding; they give float32 logits
[N, num_classes]. Parameters are float32; `dtype` is what the arithmetic runs in. What is not trained is in
collections of its own: the statistics of batch normalisation and the whitening of the stem.
"""

import dataclasses
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

from largebatch.nn import normalisation
from largebatch.nn.convolution import Conv
from largebatch.nn.normalisation import FROZEN, NORMS, STATISTICS, WhitenedPatches

WHITENED = (3, 2)  # size and stride of the patches that stem "whitened" looks at
WHITENING_EPSILON = 1e-2


def resolve_conv(name: str, platform: str) -> str:
    """`"auto"` is "dot" on CPU, where it was measured to win, and "lax" elsewhere."""
    if name == "auto":
        return "dot" if platform == "cpu" else "lax"
    return name


class ConvNet(nn.Module):
    """The seed network: 3x3 convolutions of stride 2, gelu, global mean, two dense layers.

    422,602 parameters on 3-channel images with 10 classes. (Brain of Mat Kelcey, "crazy large batch
    sizes", 2021.) gelu is the tanh form: the erf form is 9-16% slower on CPU.

    `blocks` are residual convolutions of stride 1, x + gelu(norm(conv(x))), after each strided one; `hidden` is the
    width of the dense layer before the head, None for none.
    """

    num_classes: int
    dtype: jnp.dtype = jnp.float32
    conv: str = "lax"
    norm: str = "none"
    stem: str = "conv"
    zero_head: bool = False
    features: tuple[int, ...] = (32, 64, 128, 256)
    blocks: tuple[int, ...] = (0, 0, 0, 0)
    hidden: int | None = 128

    @nn.compact
    def __call__(self, x, weights=None):
        conv = functools.partial(Conv, dtype=self.dtype, implementation=self.conv)

        def activated(x):
            return nn.gelu(NORMS[self.norm]()(x, weights))

        for index, (features, blocks) in enumerate(zip(self.features, self.blocks, strict=True)):
            if index == 0 and self.stem == "whitened":
                x = WhitenedPatches(*WHITENED, self.dtype, self.conv)(x)
                x = activated(conv(features, kernel_size=1)(x))
            else:
                x = activated(conv(features, stride=2)(x))
            for _ in range(blocks):
                x += activated(conv(features)(x))
        x = jnp.mean(x, axis=(1, 2))
        if self.hidden:
            x = nn.gelu(nn.Dense(self.hidden, dtype=self.dtype)(x))
        return make_head(self.num_classes, self.dtype, self.zero_head)(x).astype(jnp.float32)


def make_head(num_classes: int, dtype, zero: bool) -> nn.Dense:
    """The last layer; from zero, all classes start equal: Zhang et al. 2019, "Fixup Initialization", section 3."""
    kernel_init = nn.initializers.zeros if zero else nn.initializers.lecun_normal()
    return nn.Dense(num_classes, dtype=dtype, kernel_init=kernel_init, name="head")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut (He et al. 2015)."""

    features: int
    stride: int
    conv: Callable
    norm: Callable

    @nn.compact
    def __call__(self, x, weights):
        y = nn.relu(self.norm()(self.conv(self.features, stride=self.stride)(x), weights))
        y = self.norm()(self.conv(self.features)(y), weights)
        if x.shape != y.shape:
            x = self.norm()(self.conv(self.features, kernel_size=1, stride=self.stride)(x), weights)
        return nn.relu(x + y)


class BottleneckBlock(nn.Module):
    """1x1, 3x3 (strided, as in ResNet v1.5), 1x1 to four times the features (He et al. 2015)."""

    features: int
    stride: int
    conv: Callable
    norm: Callable

    @nn.compact
    def __call__(self, x, weights):
        y = nn.relu(self.norm()(self.conv(self.features, kernel_size=1)(x), weights))
        y = nn.relu(self.norm()(self.conv(self.features, stride=self.stride)(y), weights))
        # From zero, so that the block starts as its shortcut: Goyal et al. 2017, section 5.1.
        y = self.norm(scale_init=nn.initializers.zeros)(self.conv(self.features * 4, kernel_size=1)(y), weights)
        if x.shape != y.shape:
            x = self.norm()(self.conv(self.features * 4, kernel_size=1, stride=self.stride)(x), weights)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Residual network.

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
    norm: str = "group"
    zero_head: bool = False

    @nn.compact
    def __call__(self, x, weights=None):
        conv = functools.partial(Conv, use_bias=False, dtype=self.dtype, implementation=self.conv)
        norm = NORMS[self.norm]
        if self.imagenet_stem:
            x = nn.relu(norm()(conv(self.width, kernel_size=7, stride=2)(x), weights))
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        else:
            x = nn.relu(norm()(conv(self.width)(x), weights))
        for stage, num_blocks in enumerate(self.stage_sizes):
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                x = self.block(self.width * 2**stage, stride, conv, norm)(x, weights)
        x = jnp.mean(x, axis=(1, 2))
        return make_head(self.num_classes, self.dtype, self.zero_head)(x).astype(jnp.float32)


MODELS = {
    "convnet": ConvNet,
    "resconvnet": functools.partial(ConvNet, features=(32, 64, 96, 128), blocks=(0, 0, 1, 1), hidden=None),
    "resconvnet7": functools.partial(ConvNet, features=(32, 64, 96, 112), blocks=(0, 1, 1, 1), hidden=None),
    "resnet8": functools.partial(ResNet, stage_sizes=(1, 1, 1), width=16, block=BasicBlock, imagenet_stem=False),
    "resnet50": functools.partial(
        ResNet, stage_sizes=(3, 4, 6, 3), width=64, block=BottleneckBlock, imagenet_stem=True
    ),
}

# What each network can be told, by its name: "norm", "zero_head", "stem", ...
OPTIONS: dict[str, frozenset[str]] = {
    name: frozenset(field.name for field in dataclasses.fields(getattr(network, "func", network)))
    for name, network in MODELS.items()
}


def create_model(name: str, num_classes: int, dtype: str, conv: str, **options) -> nn.Module:
    """The network called `name` (a key of MODELS), computing in `dtype`, convolving by CONVS[conv].

    Args:
      options: of OPTIONS[name]: norm (a key of NORMS), zero_head, stem ("conv" or "whitened").
    """
    return MODELS[name](num_classes=num_classes, dtype=jnp.dtype(dtype), conv=conv, **options)


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
    rest = dict(jax.eval_shape(as_dot.init, jax.random.key(0), images))
    params = rest.pop("params")

    def total(params, rest, images):
        return as_dot.apply({"params": params, **rest}, images).sum()

    kept = 0
    for _, operand, out in _products(jax.make_jaxpr(total)(params, rest, images).jaxpr):
        if network.conv == "dot":
            kept += 2 * out.size * 4 + operand.size * network.dtype.itemsize
        else:
            kept += 2 * out.size * network.dtype.itemsize
    both = _products(jax.make_jaxpr(jax.value_and_grad(total))(params, rest, images).jaxpr)
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
    """(variables, uint8 images [M, H * W * C]) -> float32 logits, as for evaluation.

    Variables are {"params": ..., and the collections of `init_variables`}.
    """
    normalise = make_normalise(network, image_shape, mean, std)
    return lambda variables, images: network.apply(variables, normalise(images))


def make_layer_outputs(network, image_shape, mean, std):
    """(params, model state, batch) -> {"000 Conv_0": output, ...} of every layer, numbered from input to output."""
    normalise = make_normalise(network, image_shape, mean, std)

    def layer_outputs(params, model_state, batch):
        _, kept = network.apply(
            {"params": params, **model_state},
            normalise(batch.images),
            batch.weights,
            capture_intermediates=True,
            mutable=["intermediates", STATISTICS],
        )
        flat = traverse_util.flatten_dict(kept["intermediates"])
        names = ["/".join(path[:-1]) or "logits" for path in flat]
        return {
            f"{i:03d} {name}": outputs[0]
            for i, (name, outputs) in enumerate(zip(names, flat.values(), strict=True))
        }

    return layer_outputs


def make_loss_fn(network, image_shape, mean, std, label_smoothing: float = 0.0):
    """The `loss_fn` of the step: cross-entropy against labels smoothed as by Szegedy et al. 2016, section 7.

    Args:
      label_smoothing: the share of a label that is spread evenly over all classes.
    Returns:
      (params, model state, batch) -> sum over the micro-batch of weight * loss; such sums of hits by the name
      "accuracy", and the micro-batch's statistics times its sum of weights.
    """
    normalise = make_normalise(network, image_shape, mean, std)

    def loss_fn(params, model_state, batch):
        logits, statistics = network.apply(
            {"params": params, **model_state}, normalise(batch.images), batch.weights, mutable=[STATISTICS]
        )
        if label_smoothing:
            targets = optax.smooth_labels(jax.nn.one_hot(batch.labels, logits.shape[-1]), label_smoothing)
            losses = optax.softmax_cross_entropy(logits, targets)
        else:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        hits = jnp.argmax(logits, axis=-1) == batch.labels
        statistics = jax.tree.map(lambda x: x * batch.weights.sum(), statistics)
        return jnp.sum(losses * batch.weights), ({"accuracy": jnp.sum(hits * batch.weights)}, statistics)

    return loss_fn


def init_variables(network, image_shape, seed) -> tuple[dict, dict]:
    """Parameters, float32, the same for the same seed on every host; and the collections that are not trained."""
    images = jnp.zeros((1, *image_shape), network.dtype)
    variables = dict(jax.jit(network.init)(jax.random.key(seed), images))
    return variables.pop("params"), variables


def whitening_shape(image_shape: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Shape of the frozen kernel of stem "whitened"."""
    size, channels = WHITENED[0], image_shape[-1]
    return size, size, channels, size * size * channels


def whitening_kernel(images: np.ndarray, mean, std) -> np.ndarray:
    """The frozen kernel of stem "whitened" for uint8 training images [N, H, W, C]."""
    images = (images.astype(np.float32) - np.float32(mean)) / np.float32(std)
    return normalisation.whitening_kernel(images, *WHITENED, WHITENING_EPSILON)


def with_whitening(model_state: dict, kernel: np.ndarray | None) -> dict:
    """`model_state` with the kernel in its place; as it is where there is no such place."""
    if FROZEN not in model_state:
        return model_state
    return model_state | {FROZEN: jax.tree.map(lambda _: kernel, model_state[FROZEN])}
