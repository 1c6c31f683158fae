from largebatch.exports.pytorch.layers import ARRAYS, F


def norm(layers, x):
    name = layers.next("BatchNorm")
    scale, bias = (ARRAYS[f"params.{name}.{part}"] for part in ("scale", "bias"))
    mean, variance = (ARRAYS[f"batch_stats.{name}.{part}"] for part in ("mean", "variance"))
    return F.batch_norm(x, mean, variance, scale, bias, eps=1e-5)
