import torch

from largebatch.exports.pytorch.layers import ARRAYS, NET, F, Layers, convolved, normalised
from largebatch.exports.pytorch.norm_group import norm


def gelu(x):
    return F.gelu(x, approximate="tanh")


def pooled(x):
    return F.max_pool2d(x, (min(2, x.shape[2]), min(2, x.shape[3])))


def logits(images):  # integers [N, H, W, C] -> [N, classes]
    layers, x = Layers(), normalised(images)
    if NET["stem"] == "whitened":
        x = convolved(x, ARRAYS["frozen.WhitenedPatches_0.kernel"], padding=0)
        x = torch.cat([x, -x], 1)
    else:
        x = layers.conv(x, padding=0)
    x = gelu(x)
    for _ in NET["features"]:
        x = gelu(norm(layers, pooled(layers.conv(x))))
        x = gelu(norm(layers, layers.conv(x)))
    return layers.head(x.amax((2, 3)))
