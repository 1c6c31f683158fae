from largebatch.exports.pytorch.layers import NET, F, Layers, normalised
from largebatch.exports.pytorch.norm_group import norm


def block(layers, x, stride):
    y = norm(layers, layers.conv(x, 1 if NET["block"] == "BottleneckBlock" else stride))
    y = norm(layers, layers.conv(F.relu(y), stride if NET["block"] == "BottleneckBlock" else 1))
    if NET["block"] == "BottleneckBlock":
        y = norm(layers, layers.conv(F.relu(y)))
    if x.shape != y.shape:
        x = norm(layers, layers.conv(x, stride))
    return F.relu(x + y)


def logits(images):  # integers [N, H, W, C] -> [N, classes]
    layers, x = Layers(), normalised(images)
    x = F.relu(norm(layers, layers.conv(x, 2 if NET["imagenet_stem"] else 1)))
    if NET["imagenet_stem"]:
        x = F.max_pool2d(x, 3, 2, padding=1)
    for stage, blocks in enumerate(NET["stage_sizes"]):
        for index in range(blocks):
            x = block(Layers(f"{layers.next(NET['block'])}."), x, 2 if stage > 0 and index == 0 else 1)
    return layers.head(x.mean((2, 3)))
