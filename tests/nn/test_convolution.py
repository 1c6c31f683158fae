"""Convolutions in their three forms, and where they look: padding of kernel // 2 on both sides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from largebatch.nn import convolution


@pytest.mark.parametrize(
    ("kernel", "padding", "stride", "size"),
    [
        (1, 0, 2, (9, 11)),
        (2, 0, 1, (9, 8)),
        (2, 0, 4, (9, 11)),
        (3, 1, 1, (8, 8)),
        (3, 1, 2, (8, 8)),
        (3, 1, 2, (9, 11)),
        (7, 3, 2, (8, 9)),
        (7, 3, 4, (9, 11)),
    ],
)
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

    @functools.partial(jax.jit, static_argnums=0)
    def output_and_gradients(conv, x):
        out, pull = jax.vjp(lambda x, k: conv(x, k, stride, 1), x, k)
        grad = jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(jnp.bfloat16).astype(jnp.float32)
        return out, *pull(grad)

    exact, x_exact, kernel_exact = output_and_gradients(convolution.conv_lax, x.astype(jnp.float32))
    out, x_grad, kernel_grad = output_and_gradients(convolution.conv_as_dot, x)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact, atol=1e-5 * float(jnp.abs(exact).max()))
    assert (x_grad.dtype, kernel_grad.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(kernel_grad, kernel_exact, atol=1e-5 * float(jnp.abs(kernel_exact).max()))
    np.testing.assert_allclose(x_grad.astype(jnp.float32), x_exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("conv", convolution.CONVS)
def test_an_odd_kernel_gives_a_stride_th_of_the_pixels_rounded_up(conv):
    for kernel, stride, height, width in ((1, 2, 8, 33), (3, 2, 21, 20), (5, 4, 35, 9), (7, 2, 8, 33)):
        k = jax.ShapeDtypeStruct((kernel, kernel, 3, 4), jnp.float32)
        x = jax.ShapeDtypeStruct((2, height, width, 3), jnp.float32)
        convolve = functools.partial(convolution.CONVS[conv], stride=stride, padding=kernel // 2)
        assert jax.eval_shape(convolve, x, k).shape == (2, -(-height // stride), -(-width // stride), 4)


@pytest.mark.parametrize("conv", convolution.CONVS)
def test_images_are_padded_in_front_first(conv):
    """Where sizes are even XLA's "SAME", which gives 9, 6, 6 and 4, pads one pixel behind instead."""
    out = convolution.CONVS[conv](jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 1)), 2, 1)
    assert out.ravel().tolist() == [4, 6, 6, 9]
