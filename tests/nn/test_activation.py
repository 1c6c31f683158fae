"""gelu with a gradient of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from largebatch.nn.layers import gelu


def numpy_gelu(x):
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + np.tanh(inner))


def test_value_and_gradient_are_those_of_the_formula():
    x = np.linspace(-6, 6, 101)
    step = 1e-4
    slope = (numpy_gelu(x + step) - numpy_gelu(x - step)) / (2 * step)
    values, gradients = jax.vmap(jax.value_and_grad(gelu))(x.astype(np.float32))
    np.testing.assert_allclose(values, numpy_gelu(x), atol=1e-6)
    np.testing.assert_allclose(gradients, slope, atol=4e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_keeps_its_input_alone(dtype):
    x = jnp.zeros((4, 8), dtype)
    _, backward = jax.vjp(gelu, x)
    kept = [leaf for leaf in jax.tree.leaves(backward) if leaf.shape]
    assert [(leaf.shape, leaf.dtype) for leaf in kept] == [(x.shape, x.dtype)]
