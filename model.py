"""The networks, by name: the baseline's convolution stack, three with residuals, airbench, ResNets and U-Nets.

All take float images [N, H, W, C], and while training weights [groups, N / groups], 0 for padding, whose rows are
the groups that batch normalisation takes together; they return float32 logits [N, num_classes]. Parameters are
float32; `dtype` is that of the arithmetic. Untrained variables are in collections of their own: the statistics of
batch normalisation and the whitening of the stem.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from largebatch.nn import layers
from largebatch.nn.convolution import Conv
from largebatch.nn.layers import FROZEN, NORMS, SIDE_LOGITS, Patches, SideHead, WhitenedPatches, gelu, max_pool

WHITENING_EPSILON = 1e-2
# It changes where the same parameters give other outputs. Version 1 padded strided convolutions on one side alone.
NETWORK_VERSION = 2


def resolve_conv(name: str, platform: str) -> str:
    """Return the key of CONVS that model.conv means: with "auto" "dot" on CPUs, where it was measured to win."""
    return {"cpu": "dot", "gpu": "lax_blocks"}.get(platform, "lax") if name == "auto" else name


class ConvNet(nn.Module):
    """The baseline network: 3x3 convolutions of stride 2, gelu, global mean, two dense layers.

    It has 422,602 parameters on 3-channel images with 10 classes. (Brain of Mat Kelcey, "crazy large batch
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
    side_heads: bool = False  # auxiliary heads behind the inner strided convolutions
    features: tuple[int, ...] = (32, 64, 128, 256)
    blocks: tuple[int, ...] = (0, 0, 0, 0)
    hidden: int | None = 128
    patches: ClassVar = Patches(size=3, stride=2, padding=1)  # patches of stem "whitened"

    @nn.compact
    def __call__(self, x, weights=None):
        conv = functools.partial(Conv, dtype=self.dtype, implementation=self.conv)

        def activated(x):
            return gelu(NORMS[self.norm]()(x, weights))

        for index, (features, blocks) in enumerate(zip(self.features, self.blocks, strict=True)):
            if index == 0 and self.stem == "whitened":
                x = WhitenedPatches(self.patches, self.dtype, self.conv)(x)
                x = activated(conv(features, kernel_size=1)(x))
            else:
                x = activated(conv(features, stride=2)(x))
            for _ in range(blocks):
                x += activated(conv(features)(x))
            if self.side_heads and 0 < index < len(self.features) - 1:
                SideHead(self.num_classes, self.dtype, head_init(self.zero_head))(x)
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
        if self.hidden:
            x = gelu(nn.Dense(self.hidden, dtype=self.dtype)(x))
        return make_head(self.num_classes, self.zero_head)(x)


class AirbenchNet(nn.Module):
    """Whitened patches, three blocks of two convolutions with a max-pool after the first, and a linear head.

    Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", section 3.1. With images of 32 x 32 and its
    `features` it takes 0.7 GFLOP per training image.
    """

    num_classes: int
    dtype: jnp.dtype = jnp.float32
    conv: str = "lax"
    norm: str = "group"
    stem: str = "conv"
    zero_head: bool = False
    features: tuple[int, ...] = (64, 256, 256)
    patches: ClassVar = Patches(size=2, stride=1, padding=0)

    @nn.compact
    def __call__(self, x, weights=None):
        conv = functools.partial(Conv, use_bias=False, dtype=self.dtype, implementation=self.conv)

        def activated(x):
            return gelu(NORMS[self.norm]()(x, weights))

        if self.stem == "whitened":
            x = WhitenedPatches(self.patches, self.dtype, self.conv)(x)
            x = jnp.concatenate([x, -x], axis=-1)
        else:
            x = conv(24, kernel_size=self.patches.size, padding=self.patches.padding)(x)
        x = gelu(x)
        for features in self.features:
            x = activated(max_pool(conv(features)(x)))
            x = activated(conv(features)(x))
        x = jnp.max(x, axis=(1, 2))
        return make_head(self.num_classes, self.zero_head)(x)


def make_head(num_classes: int, zero: bool) -> nn.Dense:
    """Make the last layer, in float32 whatever the network's dtype.

    That is less than a thousandth of the work, and exported networks return the same logits.
    """
    return nn.Dense(
        num_classes,
        dtype=jnp.float32,
        precision=jax.lax.Precision.HIGHEST,
        kernel_init=head_init(zero),
        name="head",
    )


def head_init(zero: bool) -> nn.initializers.Initializer:
    """Return the initialiser of a head; with zeros all classes start equal: Zhang et al. 2019, "Fixup", sec. 3."""
    return nn.initializers.zeros if zero else nn.initializers.lecun_normal()


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
    """Convolutions of 1x1, 3x3 (strided, as in ResNet v1.5) and 1x1 to four times the features (He et al. 2015)."""

    features: int
    stride: int
    conv: Callable
    norm: Callable

    @nn.compact
    def __call__(self, x, weights):
        y = nn.relu(self.norm()(self.conv(self.features, kernel_size=1)(x), weights))
        y = nn.relu(self.norm()(self.conv(self.features, stride=self.stride)(y), weights))
        # A zero scale lets the block start as its shortcut: Goyal et al. 2017, section 5.1.
        y = self.norm(scale_init=nn.initializers.zeros)(self.conv(self.features * 4, kernel_size=1)(y), weights)
        if x.shape != y.shape:
            x = self.norm()(self.conv(self.features * 4, kernel_size=1, stride=self.stride)(x), weights)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A residual network.

    `stage_sizes` blocks per stage, features doubling from `width`. `imagenet_stem` starts with a 7x7
    convolution of stride 2 and a max-pool; else the network starts with a 3x3 one, as for CIFAR.
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
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        else:
            x = nn.relu(norm()(conv(self.width)(x), weights))
        for stage, num_blocks in enumerate(self.stage_sizes):
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                x = self.block(self.width * 2**stage, stride, conv, norm)(x, weights)
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
        return make_head(self.num_classes, self.zero_head)(x)


class Decoder(nn.Module):
    """A decoder from the coarsest features of a ResUNet back to the size of the image, with `channels` outputs.

    Each level takes the one below it, enlarged, and what the encoder had there: their sum, or both side by side.
    """

    channels: int
    patch: int
    merge: str
    conv: Callable
    norm: Callable

    @nn.compact
    def __call__(self, levels, weights):
        *finer, x = levels
        for beside in reversed(finer):
            features = beside.shape[-1]
            x = enlarged(nn.relu(self.norm()(self.conv(features, kernel_size=1)(x), weights)), beside.shape[1:3])
            x = x + beside if self.merge == "add" else jnp.concatenate([x, beside], axis=-1)
            x = BasicBlock(features, 1, self.conv, self.norm)(x, weights)
        # The head is in float32: between a half and one bfloat16 has 128 depths.
        head = self.conv(self.patch**2 * self.channels, dtype=jnp.float32, name="head")
        return shuffled(head(x), self.patch)


def shuffled(x, patch: int):
    """Rearrange each pixel as a square of pixels: [N, h, w, patch^2 C] -> [N, patch h, patch w, C].

    Shi et al. 2016, "Real-Time Single Image and Video Super-Resolution Using an Efficient Sub-Pixel CNN".
    """
    n, height, width, _ = x.shape
    x = x.reshape(n, height, width, patch, patch, -1).swapaxes(2, 3)
    return x.reshape(n, patch * height, patch * width, -1)


def enlarged(x, size: tuple[int, int]):
    """Repeat each pixel four times, up to `size`: [N, h, w, C] -> [N, H, W, C]."""
    x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
    return x[:, : size[0], : size[1]]


class ResUNet(nn.Module):
    """A residual encoder, and a decoder for each of `outputs`, the channels of a dense target.

    Ronneberger et al. 2015, "U-Net", with residual blocks; sums in place of concatenations need fewer activations.
    The outputs are side by side, [N, H, W, sum of outputs].
    """

    outputs: tuple[int, ...]
    dtype: jnp.dtype = jnp.float32
    conv: str = "lax"
    norm: str = "group"
    features: tuple[int, ...] = (64, 128, 256, 512)  # features of each level, at half the size of the one before
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    patch: int = 2  # pixels of an image to a side of a pixel of the first level
    merge: str = "add"  # add | concatenate

    @nn.compact
    def __call__(self, x, weights=None):
        conv = functools.partial(Conv, dtype=self.dtype, implementation=self.conv)
        norm, (height, width) = NORMS[self.norm], x.shape[1:3]
        x = nn.relu(norm()(conv(self.features[0], kernel_size=self.patch + 1, stride=self.patch)(x), weights))
        levels = []
        for level, (features, blocks) in enumerate(zip(self.features, self.blocks, strict=True)):
            for index in range(blocks):
                stride = 2 if level > 0 and index == 0 else 1
                x = BasicBlock(features, stride, conv, norm)(x, weights)
            levels.append(x)
        maps = [Decoder(channels, self.patch, self.merge, conv, norm)(levels, weights) for channels in self.outputs]
        return jnp.concatenate(maps, axis=-1)[:, :height, :width].astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A network that a config can name."""

    module: Callable[..., nn.Module]  # takes its outputs, and by name dtype, conv and `options`
    options: frozenset[str]  # further fields of a config's `model` that it takes
    of_pixels: bool = False  # whether outputs are dense, for tasks of pixels


OPTIONS = {"norm", "zero_head", "stem", "side_heads"}


def _architecture(module: type[nn.Module], **fields) -> Architecture:
    """Return the architecture of a module with some fields filled in; it takes those of OPTIONS that it has."""
    options = OPTIONS & {field.name for field in dataclasses.fields(module)}
    return Architecture(functools.partial(module, **fields), frozenset(options), issubclass(module, ResUNet))


MODELS = {
    "convnet": _architecture(ConvNet),
    "resconvnet": _architecture(ConvNet, features=(32, 64, 96, 128), blocks=(0, 0, 1, 1), hidden=None),
    "resconvnet7": _architecture(ConvNet, features=(32, 64, 96, 112), blocks=(0, 1, 1, 1), hidden=None),
    "resconvnet_wide": _architecture(ConvNet, features=(48, 96, 128, 160), blocks=(0, 0, 1, 1), hidden=None),
    "airbench": _architecture(AirbenchNet),
    "airbench_small": _architecture(AirbenchNet, features=(32, 128, 128)),
    "resnet8": _architecture(ResNet, stage_sizes=(1, 1, 1), width=16, block=BasicBlock, imagenet_stem=False),
    "resnet50": _architecture(
        ResNet, stage_sizes=(3, 4, 6, 3), width=64, block=BottleneckBlock, imagenet_stem=True
    ),
    "resunet": _architecture(ResUNet, features=(80, 160, 320, 640), blocks=(2, 2, 2, 3)),
    "resunet_tiny": _architecture(ResUNet, features=(48, 64, 80), blocks=(1, 1, 1), patch=4),
    "unet_tiny": _architecture(ResUNet, features=(40, 56, 72), blocks=(1, 1, 1), patch=4, merge="concatenate"),
}


def create_model(name: str, outputs: int | tuple[int, ...], dtype: str, conv: str, **options) -> nn.Module:
    """Create the network called `name` (a key of MODELS), computing in `dtype`, convolving by CONVS[conv].

    Args:
      outputs: the number of classes, or the channels of each dense target.
      options: those of its Architecture: norm (a key of NORMS), zero_head, side_heads, stem ("conv" or "whitened").
    """
    return MODELS[name].module(outputs, dtype=jnp.dtype(dtype), conv=conv, **options)


def init_variables(network, image_shape, seed) -> tuple[dict, dict]:
    """Initialise the float32 parameters, the same for a seed on every host, and the untrained collections."""
    images = jnp.zeros((1, *image_shape), network.dtype)
    variables = dict(jax.jit(network.init)(jax.random.key(seed), images))
    variables.pop(SIDE_LOGITS, None)
    return variables.pop("params"), variables


def whitening_shape(network, image_shape: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Return the shape of the frozen kernel of a network's stem "whitened"."""
    size, channels = network.patches.size, image_shape[-1]
    return size, size, channels, size * size * channels


def whitening_kernel(network, images: np.ndarray, mean, std) -> np.ndarray:
    """Return the frozen kernel of a network's stem "whitened" for integer training images [N, H, W, C]."""
    images = (images.astype(np.float32) - np.float32(mean)) / np.float32(std)
    return layers.whitening_kernel(images, network.patches, WHITENING_EPSILON)


def with_whitening(model_state: dict, kernel: np.ndarray | None) -> dict:
    """Return `model_state` with the kernel in its place; unchanged where there is no such place."""
    if FROZEN not in model_state:
        return model_state
    return {**model_state, FROZEN: jax.tree.map(lambda _: kernel, model_state[FROZEN])}
