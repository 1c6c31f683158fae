"""The network of this folder in PyTorch.

    from pytorch_model import outputs
    outputs(torch.from_numpy(images))

Images are integers [N, H, W, C] as they come out of a file. The result is float32: logits [N, classes], or for
dense prediction [N, H, W, channels of all targets]. Needs torch and safetensors. On a GPU set
torch.backends.cudnn.allow_tf32 = False, or PyTorch rounds what it multiplies.
"""

import collections
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional as F

FOLDER = Path(__file__).parent
ABOUT = json.loads((FOLDER / "model.json").read_text())
NET = ABOUT["network"]
ARRAYS = load_file(FOLDER / "model.safetensors")  # {name: array.to(device)} for another device


def rounded(x):
    """Round what is multiplied in a network of bfloat16; sums are float32."""
    return x.bfloat16().float() if NET["dtype"] == "bfloat16" else x


def normalised(images):
    """Return integers [N, H, W, C] as float32 [N, C, H, W], by the mean and deviation of the training images."""
    x, channels = images.float(), images.shape[-1]
    mean, std = (ABOUT["data"][name][:channels] for name in ("mean", "std"))
    return ((x - x.new_tensor(mean)) * x.new_tensor([1 / s for s in std])).permute(0, 3, 1, 2)


def convolved(x, kernel, stride=1, bias=None, padding=None, operand=rounded):
    """Convolve x [N, C, H, W] with a kernel [h, w, C, D], by default padded so that stride 1 keeps H and W."""
    padding = kernel.shape[0] // 2 if padding is None else padding
    return F.conv2d(operand(x), operand(kernel).permute(3, 2, 0, 1), bias, stride, padding)


def gelu(x):
    """Apply GELU by its tanh formula, as flax does."""
    return F.gelu(x, approximate="tanh")


class Layers:
    """Layers below a name, numbered for each kind in the order of their calls."""

    def __init__(self, name=""):
        self.name, self.counts = name, collections.Counter()

    def next(self, kind):
        self.counts[kind] += 1
        return f"{self.name}{kind}_{self.counts[kind] - 1}"

    def below(self, kind):
        return Layers(f"{self.next(kind)}.")

    def conv(self, x, stride=1, padding=None):
        name = f"params.{self.next('Conv')}"
        return convolved(x, ARRAYS[f"{name}.kernel"], stride, ARRAYS.get(f"{name}.bias"), padding)

    def norm(self, x):
        if NET["norm"] == "none":
            return x
        if NET["norm"] == "batch":
            name = self.next("BatchNorm")
            scale, bias = (ARRAYS[f"params.{name}.{part}"] for part in ("scale", "bias"))
            mean, variance = (ARRAYS[f"batch_stats.{name}.{part}"] for part in ("mean", "variance"))
            return F.batch_norm(x, mean, variance, scale, bias, eps=1e-5)
        name = f"params.{self.next('GroupNorm')}.group"
        most = max(min(32, x.shape[1] // 2), 1)
        groups = next(n for n in range(most, 0, -1) if x.shape[1] % n == 0)
        return F.group_norm(x, groups, ARRAYS[f"{name}.scale"], ARRAYS[f"{name}.bias"], eps=1e-6)

    def head(self, x):
        return x @ ARRAYS["params.head.kernel"] + ARRAYS["params.head.bias"]


def convnet(images):
    """Return the logits of a ConvNet."""
    layers, x, stride = Layers(), normalised(images), 2
    if NET["stem"] == "whitened":
        x, stride = convolved(x, ARRAYS["frozen.WhitenedPatches_0.kernel"], 2), 1
    for blocks in NET["blocks"]:
        x, stride = gelu(layers.norm(layers.conv(x, stride))), 2
        for _ in range(blocks):
            x = x + gelu(layers.norm(layers.conv(x)))
    x = x.mean((2, 3))
    if NET["hidden"]:
        kernel, bias = (rounded(ARRAYS[f"params.Dense_0.{part}"]) for part in ("kernel", "bias"))
        x = rounded(gelu(rounded(rounded(x) @ kernel + bias)))
    return layers.head(x)


def airbench_net(images):
    """Return the logits of an AirbenchNet."""
    layers, x = Layers(), normalised(images)
    if NET["stem"] == "whitened":
        x = convolved(x, ARRAYS["frozen.WhitenedPatches_0.kernel"], padding=0)
        x = torch.cat([x, -x], 1)
    else:
        x = layers.conv(x, padding=0)
    x = gelu(x)
    for _ in NET["features"]:
        x = layers.conv(x)
        x = F.max_pool2d(x, (min(2, x.shape[2]), min(2, x.shape[3])))
        x = gelu(layers.norm(x))
        x = gelu(layers.norm(layers.conv(x)))
    return layers.head(x.amax((2, 3)))


def residual_block(layers, x, stride=1):
    """Apply a basic or bottleneck block, with a convolution on its shortcut where the shape changes."""
    is_bottleneck = NET.get("block") == "BottleneckBlock"
    y = F.relu(layers.norm(layers.conv(x, 1 if is_bottleneck else stride)))
    y = layers.norm(layers.conv(y, stride if is_bottleneck else 1))
    if is_bottleneck:
        y = layers.norm(layers.conv(F.relu(y)))
    if x.shape != y.shape:
        x = layers.norm(layers.conv(x, stride))
    return F.relu(x + y)


def resnet(images):
    """Return the logits of a ResNet."""
    layers, x = Layers(), normalised(images)
    x = F.relu(layers.norm(layers.conv(x, 2 if NET["imagenet_stem"] else 1)))
    if NET["imagenet_stem"]:
        x = F.max_pool2d(x, 3, 2, padding=1)
    for stage, blocks in enumerate(NET["stage_sizes"]):
        for index in range(blocks):
            stride = 2 if stage > 0 and index == 0 else 1
            x = residual_block(layers.below(NET["block"]), x, stride)
    return layers.head(x.mean((2, 3)))


def decoded(layers, levels):
    """Return one output of a ResUNet, [N, H, W, channels], from the levels of its encoder, finest first."""
    *finer, x = levels
    for beside in reversed(finer):
        x = F.relu(layers.norm(layers.conv(x))).repeat_interleave(2, 2).repeat_interleave(2, 3)
        x = x[:, :, : beside.shape[2], : beside.shape[3]]
        x = x + beside if NET["merge"] == "add" else torch.cat([x, beside], 1)
        x = residual_block(layers.below("BasicBlock"), x)
    kernel, bias = (ARRAYS[f"params.{layers.name}head.{part}"] for part in ("kernel", "bias"))
    x = convolved(x, kernel, 1, bias, operand=lambda x: x)  # the head is float32
    n, channels, height, width = x.shape
    patch = NET["patch"]
    x = x.reshape(n, patch, patch, channels // patch**2, height, width).permute(0, 4, 1, 5, 2, 3)
    return x.reshape(n, height * patch, width * patch, -1)


def resunet(images):
    """Return the dense outputs of a ResUNet."""
    layers, x = Layers(), normalised(images)
    x = F.relu(layers.norm(layers.conv(x, NET["patch"])))
    levels = []
    for level, blocks in enumerate(NET["blocks"]):
        for index in range(blocks):
            x = residual_block(layers.below("BasicBlock"), x, 2 if level > 0 and index == 0 else 1)
        levels.append(x)
    found = [decoded(layers.below("Decoder"), levels) for _ in NET["outputs"]]
    return torch.cat(found, -1)[:, : images.shape[1], : images.shape[2]]


NETWORKS = {"ConvNet": convnet, "AirbenchNet": airbench_net, "ResNet": resnet, "ResUNet": resunet}
outputs = NETWORKS[NET["class"]]
