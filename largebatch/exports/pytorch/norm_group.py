from largebatch.exports.pytorch.layers import ARRAYS, F


def norm(layers, x):
    name = f"params.{layers.next('GroupNorm')}.group"
    most = max(min(32, x.shape[1] // 2), 1)
    groups = next(n for n in range(most, 0, -1) if x.shape[1] % n == 0)
    return F.group_norm(x, groups, ARRAYS[f"{name}.scale"], ARRAYS[f"{name}.bias"], eps=1e-6)
