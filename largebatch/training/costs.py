"""Costs of training: FLOPs and memory."""

import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.extend.core

from largebatch.hardware.chips import Hardware
from largebatch.training.state import count_params

# Factor for unfused intermediates on a GPU. By XLA's figures for an H200 the convnet needs 1.1 to 1.4 times its
# activations at micro-batches of 32 to 1,350, ResNet-8 1.2 times.
ACTIVATIONS_ON_GPU = 1.4


def flops_utilisation(flops_per_image: float, images_per_sec: float, hardware: Hardware) -> float | None:
    """Return the model FLOPs utilisation, FLOPs over the devices' peak (Chowdhery et al. 2022, appendix B).

    The peak is that of bfloat16, whatever the network's precision. Work that is done twice or on padding does not
    count.

    Args:
      flops_per_image: FLOPs of an image, forward and backward.
      images_per_sec: images per second of all devices together.
    Returns:
      From 0 to 1; None where the peak of a device is not known, as for CPUs.
    """
    if hardware.chip is None:
        return None
    return flops_per_image * images_per_sec / (hardware.num_devices * hardware.chip.peak_flops)


def bytes_beside_images(network, state, image_shape, micro_batch_size: int, platform: str) -> dict[str, int]:
    """Estimate the bytes that a step needs on a device beside the images, by part; `state` may be shapes."""
    costs = training_costs(network, image_shape)
    factor = ACTIVATIONS_ON_GPU if platform == "gpu" else 1
    return {
        "parameters and optimizer": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        "gradients": 3 * 4 * count_params(state.params),  # one micro-batch's, their sum, the flat vector
        f"activations of {micro_batch_size} images": int(factor * micro_batch_size * costs.activation_bytes),
    }


class Costs(NamedTuple):
    """FLOPs and activation memory per training image."""

    flops: float  # of all matrix products, forward and backward
    activation_bytes: int  # activations kept for the backward pass


@functools.cache  # tracing takes half a second
def training_costs(network: nn.Module, image_shape: tuple[int, int, int]) -> Costs:
    """Count the costs of one image's gradient from the traced program, equal on all platforms.

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

    activation_bytes = 0
    for _, operand, output in _products(jax.make_jaxpr(total)(params, rest, images).jaxpr):
        if network.conv == "dot":
            activation_bytes += 2 * output.size * 4 + operand.size * network.dtype.itemsize
        else:
            activation_bytes += 2 * output.size * network.dtype.itemsize
    forward_and_backward = _products(jax.make_jaxpr(jax.value_and_grad(total))(params, rest, images).jaxpr)
    return Costs(float(sum(flops for flops, _, _ in forward_and_backward)), activation_bytes)


def _products(jaxpr) -> list[tuple[int, Any, Any]]:
    """Return FLOPs, left factor and output of all matrix products that a jaxpr's outputs need, inner jaxprs too."""
    needed, products = set(jaxpr.outvars), []
    for equation in reversed(jaxpr.eqns):
        if not needed.intersection(equation.outvars):
            continue  # such as the gradient of the images, which XLA drops too
        needed.update(v for v in equation.invars if not isinstance(v, jax.extend.core.Literal))
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            operand, output = equation.invars[0].aval, equation.outvars[0].aval
            flops = 2 * output.size * math.prod(operand.shape[axis] for axis in contracted)
            products.append((flops, operand, output))
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                products += _products(inner)
    return products
