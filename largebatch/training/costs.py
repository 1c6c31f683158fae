"""What training costs: FLOPs, memory, bytes between devices."""

import functools
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.extend.core
import numpy as np


def bytes_sent(num_devices: int, put_in: tuple[int, int], values: dict[str, np.ndarray]) -> float:
    """What each device sends per update, by a ring: 2 (D - 1) / D of the bytes that it puts into all-reduces.

    Args:
      put_in: by a synchronous update, and by a synchronisation after local steps.
      values: metrics of every update; "local" is 1 for local steps, "synced" where a synchronisation followed.
    """
    updates, (update, sync) = len(values["loss"]), put_in
    local, synced = (values[name].sum() if name in values else 0 for name in ("local", "synced"))
    return float(2 * (num_devices - 1) / num_devices * (update * (updates - local) + sync * synced) / updates)


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
