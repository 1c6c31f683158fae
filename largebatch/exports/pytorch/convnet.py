from largebatch.exports.pytorch.layers import ARRAYS, NET, F, Layers, convolved, normalised, rounded
from largebatch.exports.pytorch.norm_group import norm


def logits(images):  # integers [N, H, W, C] -> [N, classes]
    layers, x, stride = Layers(), normalised(images), 2
    if NET["stem"] == "whitened":
        x, stride = convolved(x, ARRAYS["frozen.WhitenedPatches_0.kernel"], 2), 1
    for blocks in NET["blocks"]:
        x, stride = F.gelu(norm(layers, layers.conv(x, stride)), approximate="tanh"), 2
        for _ in range(blocks):
            x = x + F.gelu(norm(layers, layers.conv(x)), approximate="tanh")
    x = x.mean((2, 3))
    if NET["hidden"]:
        kernel, bias = (rounded(ARRAYS[f"params.Dense_0.{part}"]) for part in ("kernel", "bias"))
        x = rounded(F.gelu(rounded(rounded(x) @ kernel + bias), approximate="tanh"))
    return layers.head(x)
