import torch

from largebatch.exports.pytorch.layers import ARRAYS, NET, F, Layers, convolved, normalised
from largebatch.exports.pytorch.norm_group import norm


def block(layers, x, stride=1):
    y = F.relu(norm(layers, layers.conv(x, stride)))
    y = norm(layers, layers.conv(y))
    if x.shape != y.shape:
        x = norm(layers, layers.conv(x, stride))
    return F.relu(x + y)


def decoded(layers, levels):
    *finer, x = levels
    for beside in reversed(finer):
        x = F.relu(norm(layers, layers.conv(x))).repeat_interleave(2, 2).repeat_interleave(2, 3)
        x = x[:, :, : beside.shape[2], : beside.shape[3]]
        x = x + beside if NET["merge"] == "add" else torch.cat([x, beside], 1)
        x = block(Layers(f"{layers.next('BasicBlock')}."), x)
    kernel, bias = (ARRAYS[f"params.{layers.name}head.{part}"] for part in ("kernel", "bias"))
    x = convolved(x, kernel, 1, bias, operand=lambda x: x)  # the head is float32
    n, channels, height, width = x.shape
    patch = NET["patch"]
    x = x.reshape(n, patch, patch, channels // patch**2, height, width).permute(0, 4, 1, 5, 2, 3)
    return x.reshape(n, height * patch, width * patch, -1)


def maps(images):  # integers [N, H, W, C] -> [N, H, W, channels of all maps]
    layers, x = Layers(), normalised(images)
    x = F.relu(norm(layers, layers.conv(x, NET["patch"])))
    levels = []
    for level, blocks in enumerate(NET["blocks"]):
        for index in range(blocks):
            stride = 2 if level > 0 and index == 0 else 1
            x = block(Layers(f"{layers.next('BasicBlock')}."), x, stride)
        levels.append(x)
    found = [decoded(Layers(f"{layers.next('Decoder')}."), levels) for _ in NET["outputs"]]
    return torch.cat(found, -1)[:, : images.shape[1], : images.shape[2]]
