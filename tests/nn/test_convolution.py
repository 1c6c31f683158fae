"""Convolutions in their three forms, and where they look: padding of kernel // 2 on both sides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import model as models
from largebatch.nn import convolution
from largebatch.nn.layers import FROZEN

SIZES = range(8, 71)


@pytest.mark.parametrize(("kernel", "padding"), [(1, 0), (2, 0), (3, 1), (5, 2), (7, 3)])
@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("size", [(8, 8), (9, 11)])
def test_convolutions_are_equal_in_output_and_gradient(kernel, padding, stride, size):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, *size, 3)).astype(np.float32)
    k = rng.standard_normal((kernel, kernel, 3, 4)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)  # op by op it takes ten times as long
    def outputs(conv):
        y, pull = jax.vjp(lambda x, k: conv(x, k, stride, padding), x, k)
        return y, *pull(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    for other in (convolution.conv_as_dot, convolution.conv_lax_blocks):
        for ours, theirs in zip(outputs(other), outputs(convolution.conv_lax), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6 * float(jnp.abs(theirs).max()))


@pytest.mark.parametrize("channels", [3, 8])
@pytest.mark.parametrize("stride", [1, 2])
def test_the_bfloat16_convolution_rounds_its_operands_alone(stride, channels):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 8, 8, channels)), jnp.bfloat16)
    k = jnp.asarray(rng.standard_normal((3, 3, channels, 4)), jnp.bfloat16).astype(jnp.float32)
    exact, pull_exact = jax.vjp(lambda x, k: convolution.conv_lax(x, k, stride, 1), x.astype(jnp.float32), k)
    out, pull = jax.vjp(lambda x, k: convolution.conv_as_dot(x, k, stride, 1), x, k)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact, atol=1e-5 * float(jnp.abs(exact).max()))
    grad = jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(jnp.bfloat16).astype(jnp.float32)
    (x_grad, kernel_grad), (x_exact, kernel_exact) = pull(grad), pull_exact(grad)
    assert (x_grad.dtype, kernel_grad.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(kernel_grad, kernel_exact, atol=1e-5 * float(jnp.abs(kernel_exact).max()))
    np.testing.assert_allclose(x_grad.astype(jnp.float32), x_exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("conv", convolution.CONVS)
@pytest.mark.parametrize(("kernel", "stride"), [(1, 2), (3, 1), (3, 2), (5, 4), (7, 2)])
def test_an_odd_kernel_gives_a_stride_th_of_the_pixels_rounded_up(conv, kernel, stride):
    k = jax.ShapeDtypeStruct((kernel, kernel, 3, 4), jnp.float32)
    for height, width in zip(SIZES, reversed(SIZES), strict=True):
        x = jax.ShapeDtypeStruct((2, height, width, 3), jnp.float32)
        out = jax.eval_shape(lambda x, k: convolution.CONVS[conv](x, k, stride, kernel // 2), x, k)
        assert out.shape == (2, -(-height // stride), -(-width // stride), 4)


HALVINGS = {"convnet": 4, "resnet8": 2, "resnet50": 5, "resunet": 4, "resunet_tiny": 4}
HALVINGS |= dict.fromkeys(("resconvnet", "resconvnet7", "resconvnet_wide", "unet_tiny"), 4)
LARGE = ("resnet50", "resunet")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in LARGE else []) for n in HALVINGS])
def test_every_network_halves_sizes_rounded_up(name):
    """Of every height and width from 8 to 70: airbench alone rounds down, as its pooling leaves pixels out."""
    outputs = (2, 1) if models.MODELS[name].of_pixels else 7
    network, first = models.create_model(name, outputs, "float32", "lax"), None
    for height, width in zip(SIZES, reversed(SIZES), strict=True):
        if height > width and height % 3:  # both orders of the larger ones would add but time
            continue
        images, found = jax.ShapeDtypeStruct((1, height, width, 3), jnp.float32), set()

        def record(next_function, args, kwargs, context, found=found):
            result = next_function(*args, **kwargs)
            if type(context.module).__name__ in ("Conv", "BasicBlock", "BottleneckBlock"):
                found.add(result.shape[1:3])
            return result

        with models.nn.intercept_methods(record):
            result = jax.eval_shape(network.init_with_output, jax.random.key(0), images)[0]
        sizes = {(-(-height // 2**level), -(-width // 2**level)) for level in range(HALVINGS[name] + 1)}
        first = first or len(found & sizes)
        assert found <= sizes
        assert (-(-height // 2 ** HALVINGS[name]), -(-width // 2 ** HALVINGS[name])) in found
        if models.MODELS[name].of_pixels:
            assert result.shape == (1, height, width, 3)


@pytest.mark.parametrize("name", ["convnet", "resconvnet7"])
def test_a_convnet_is_the_mirror_image_of_one_with_same_padding(name, monkeypatch):
    """Of images of even sizes: there XLA's "SAME" pads one pixel behind, and kernel // 2 counts one in front."""
    images = np.random.default_rng(0).standard_normal((3, 64, 32, 3)).astype(np.float32)
    network = models.create_model(name, 10, "float32", "lax")
    params, _ = models.init_variables(network, images.shape[1:], 0)
    ours = jax.jit(lambda params, images: network.apply({"params": params}, images))(params, images)

    def conv_same(x, kernel, stride, padding):
        strides = (stride, stride)
        return lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    monkeypatch.setitem(convolution.CONVS, "lax", conv_same)
    plain = jax.jit(lambda params, images: network.apply({"params": params}, images))
    rotated = jax.tree.map(lambda leaf: leaf[::-1, ::-1] if leaf.ndim == 4 else leaf, params)
    mirrored = plain(rotated, images[:, ::-1, ::-1])
    scale = float(jnp.abs(ours).max())
    np.testing.assert_allclose(ours, mirrored, rtol=0, atol=1e-6 * scale)
    assert float(jnp.abs(ours - plain(params, images)).max()) > 1e-2 * scale


def test_a_stem_without_padding_is_one_with_padding_cut_off():
    """Of airbench: patches of 2x2 pixels, of which those that had seen XLA's padding were thrown away."""
    rng = np.random.default_rng(0)
    x, kernel = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 9, 8, 3), (2, 2, 3, 24)))
    same = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    for conv in convolution.CONVS.values():
        np.testing.assert_allclose(conv(x, jnp.asarray(kernel), 1, 0), same[:, :-1, :-1], rtol=0, atol=1e-5)


STEMS = {
    "convnet": ((17, 20, 3), {}),
    "convnet whitened": ((16, 20, 3), {"stem": "whitened"}),
    "convnet of 13 bands": ((16, 20, 13), {}),
    "airbench_small": ((15, 16, 3), {}),
    "airbench_small whitened": ((16, 16, 3), {"stem": "whitened"}),
    "resnet8": ((16, 17, 3), {}),
    "resnet50": ((33, 32, 3), {}),
    "resunet_tiny": ((18, 16, 3), {}),
    "unet_tiny": ((16, 16, 3), {}),
}


@pytest.mark.parametrize(
    "stem", [pytest.param(s, marks=pytest.mark.full if s == "resnet50" else []) for s in STEMS]
)
def test_a_stem_of_blocks_is_the_same_layer(stem):
    """Outputs and gradients of the first convolution, as a GPU computes it and as `lax`, in float32."""
    (shape, options), name = STEMS[stem], stem.partition(" ")[0]
    outputs = (2, 1) if models.MODELS[name].of_pixels else 7
    images = np.random.default_rng(0).standard_normal((4, *shape)).astype(np.float32)

    def run(conv):
        network = models.create_model(name, outputs, "float32", conv, **options)
        first = []

        def record(next_function, args, kwargs, context):
            result = next_function(*args, **kwargs)
            if type(context.module).__name__ in ("Conv", "WhitenedPatches") and not first:
                first.append(result)
            return result

        params, state = models.init_variables(network, shape, 0)
        kernel = np.random.default_rng(1).standard_normal(np.shape(jax.tree.leaves(state)[0])) if options else None
        state = models.with_whitening(state, None if kernel is None else kernel.astype(np.float32))

        def output(params):
            first.clear()
            with models.nn.intercept_methods(record):
                network.apply({"params": params, **state}, images)
            weights = jnp.cos(jnp.arange(first[0].size, dtype=jnp.float32)).reshape(first[0].shape)
            return jnp.sum(first[0] * weights), first[0]

        return jax.jit(jax.value_and_grad(output, has_aux=True))(params), FROZEN in state

    ((_, blocks), grads), frozen = run("lax_blocks")
    ((_, plain), expected), _ = run("lax")
    assert float(jnp.abs(plain).max()) > 0.1
    np.testing.assert_allclose(blocks, plain, rtol=0, atol=1e-6 * float(jnp.abs(plain).max()))
    moved = 0
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        moved += bool(jnp.any(theirs != 0))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * max(1.0, float(jnp.abs(theirs).max())))
    assert moved or frozen
