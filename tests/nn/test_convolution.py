"""Convolutions in their three forms, and where they look: padding of kernel // 2 on both sides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import model as models
from largebatch.nn import convolution


@pytest.mark.parametrize(("kernel", "padding"), [(1, 0), (2, 0), (3, 1), (7, 3)])
@pytest.mark.parametrize(("stride", "size"), [(1, (8, 8)), (2, (8, 8)), (2, (9, 11)), (4, (9, 11))])
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


@pytest.mark.parametrize(("stride", "channels"), [(1, 8), (2, 3)])
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
    for height, width in ((8, 33), (21, 20), (35, 9)):
        x = jax.ShapeDtypeStruct((2, height, width, 3), jnp.float32)
        out = jax.eval_shape(lambda x, k: convolution.CONVS[conv](x, k, stride, kernel // 2), x, k)
        assert out.shape == (2, -(-height // stride), -(-width // stride), 4)


def test_a_convnet_is_the_mirror_image_of_one_with_same_padding(monkeypatch):
    """Where sizes of images are even, XLA's "SAME" pads one pixel behind, and kernel // 2 counts one in front."""
    images = np.random.default_rng(0).standard_normal((3, 64, 32, 3)).astype(np.float32)
    network = models.create_model("resconvnet7", 10, "float32", "lax")
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
    """The patches of 2x2 pixels of airbench, without those that would see XLA's padding."""
    rng = np.random.default_rng(0)
    x, kernel = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 9, 8, 3), (2, 2, 3, 24)))
    same = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    for conv in convolution.CONVS.values():
        np.testing.assert_allclose(conv(x, jnp.asarray(kernel), 1, 0), same[:, :-1, :-1], rtol=0, atol=1e-5)
