import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import typed
from flax import linen as nn

import model as models
from configs import default
from largebatch.nn import layers
from largebatch.nn.convolution import CONVS
from largebatch.nn.layers import max_pool
from largebatch.tasks.task import Classification
from largebatch.training.costs import training_costs
from largebatch.training.loss import Batch, make_logits_fn, make_loss_fn, make_normalise
from largebatch.training.state import count_params
from largebatch.util import UserError
from plan import make_network

COUNTS = {
    # By hand: 896 + 18,496 + 73,856 + 295,168 + 32,896 + 1,290.
    "convnet": ((64, 64, 3), 10, 422_602),
    # 896 + 18,496 + 55,392 + 83,040 (residual) + 110,720 + 147,584 (residual) + 1,290.
    "resconvnet": ((64, 64, 3), 10, 417_418),
    # 896 + 18,496 + 36,928 (residual) + 55,392 + 83,040 (residual) + 96,880 + 113,008 (residual) + 1,130.
    "resconvnet7": ((64, 64, 3), 10, 405_770),
    # 432 (stem) + 4,608 + 13,824 + 512 + 55,296 + 2,048 (blocks, with 1x1 projections) + 650 (dense), and 672
    # scales and biases of 9 group normalisations.
    "resnet8": ((32, 32, 3), 10, 78_042),
    # 1,344 + 41,568 + 110,720 + 147,584 (residual) + 184,480 + 230,560 (residual) + 1,610.
    "resconvnet_wide": ((64, 64, 3), 10, 717_866),
    # 288 (stem), 13,824 + 36,864 + 147,456 + 3 x 589,824, 2,304 scales and biases, 2,570 (dense).
    "airbench": ((32, 32, 3), 10, 1_972_778),
    # 288, 6,912 + 9,216 + 36,864 + 3 x 147,456, 1,152, 1,290.
    "airbench_small": ((32, 32, 3), 10, 498_090),
    # As torchvision's resnet50 (BatchNorm and GroupNorm have equally many parameters).
    "resnet50": ((64, 64, 3), 1000, 25_557_032),
}


# A mask of two classes and a depth, with batch layers.
MAP_COUNTS = {"resunet": 30_225_132, "resunet_tiny": 492_768, "unet_tiny": 477_776}


def shapes_of(network, image_shape):
    """Shapes of the outputs for two images, and of the variables."""
    images = jax.ShapeDtypeStruct((2, *image_shape), jnp.float32)
    return jax.eval_shape(network.init_with_output, jax.random.key(0), images)


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_as_many_as_counted_and_float32_as_the_logits(name):
    image_shape, num_classes, count = COUNTS[name]
    logits, variables = shapes_of(models.create_model(name, num_classes, "bfloat16", "lax"), image_shape)
    assert set(variables) == {"params"}
    assert count_params(variables["params"]) == count
    assert (logits.shape, logits.dtype) == ((2, num_classes), jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}


def test_every_network_is_counted():
    assert set(models.MODELS) == set(COUNTS) | set(MAP_COUNTS)


@pytest.mark.parametrize("name", MAP_COUNTS)
def test_maps_are_as_large_as_the_image(name):
    network = models.create_model(name, (2, 1), "bfloat16", "lax", norm="batch")
    maps, variables = shapes_of(network, (51, 38, 3))
    assert (maps.shape, maps.dtype) == ((2, 51, 38, 3), jnp.float32)
    assert count_params(variables["params"]) == MAP_COUNTS[name]


def test_a_pixel_becomes_a_square_of_its_channels():
    """The numbers of a pixel are its upper left, upper right, lower left and lower right, of both maps each."""
    pixels = np.arange(2 * 3 * 8).reshape(1, 2, 3, 8)
    found = np.asarray(models.shuffled(jnp.asarray(pixels), 2))
    assert found.shape == (1, 4, 6, 2)
    for row, column, part in itertools.product(range(2), range(3), range(4)):
        place = 0, 2 * row + part // 2, 2 * column + part % 2
        np.testing.assert_array_equal(found[place], pixels[0, row, column, 2 * part : 2 * part + 2])


def test_enlarged_pixels_end_at_the_size_that_is_wanted():
    pixels = np.arange(6).reshape(1, 2, 3, 1)
    found = np.asarray(models.enlarged(jnp.asarray(pixels), (3, 6)))[0, ..., 0]
    assert found.tolist() == [[0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5]]


@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (3, 1), (16, 8), (112, 28), (254, 2), (256, 32)])
def test_group_normalisation_has_equal_groups_of_two_channels_or_more(channels, groups):
    assert layers.number_of_groups(channels) == groups


@pytest.mark.parametrize("conv", ["dot", "lax"])
def test_the_head_of_a_bfloat16_network_is_float32(conv):
    """Products of bfloat16 numbers would be rounded to 8 bits."""
    network = models.create_model("resconvnet", 10, "bfloat16", conv)
    params, _ = models.init_variables(network, (16, 16, 3), 0)
    images = np.random.default_rng(0).standard_normal((8, 16, 16, 3)).astype(np.float32)
    apply = functools.partial(network.apply, mutable=["intermediates"], capture_intermediates=True)
    logits, state = jax.jit(apply)({"params": params}, images)
    np.testing.assert_array_equal(logits, state["intermediates"]["head"]["__call__"][0])
    assert float(jnp.abs(logits - logits.astype(jnp.bfloat16)).max()) > 1e-5


@pytest.mark.parametrize("name", COUNTS)
def test_every_network_takes_any_channels_and_rectangles(name):
    """Only the first layer depends on the channels."""
    options = {"norm": "batch"} if "norm" in models.MODELS[name].options else {}
    network, sizes = models.create_model(name, 7, "float32", "dot", **options), {}
    for image_shape in ((17, 8, 1), (9, 13, 4)):  # odd sizes and rectangles
        logits, variables = shapes_of(network, image_shape)
        assert logits.shape == (2, 7)
        sizes[image_shape[-1]] = count_params(variables["params"])
    first = next(leaf.shape for leaf in jax.tree.leaves(variables["params"]) if leaf.shape[2:3] == (4,))
    assert sizes[4] - sizes[1] == 3 * first[0] * first[1] * first[3]


def test_whitened_stems_of_13_channels_are_equal_under_all_convolutions():
    rng, image_shape = np.random.default_rng(0), (9, 14, 13)
    images = rng.standard_normal((2, *image_shape)).astype(np.float32)
    options = {"num_classes": 5, "stem": "whitened", "features": (4,), "blocks": (1,), "hidden": None}
    networks = [models.ConvNet(conv=conv, **options) for conv in CONVS]
    kernel = rng.standard_normal(models.whitening_shape(networks[0], image_shape)).astype(np.float32)
    params, model_state = models.init_variables(networks[0], image_shape, 0)
    variables = {"params": params, **models.with_whitening(model_state, kernel)}

    def gradient(network):
        loss = jax.grad(lambda variables: jnp.square(network.apply(variables, images)).sum())
        return jax.tree.leaves(jax.jit(loss)(variables)["params"])

    expected, *others = map(gradient, networks)
    for ours in others:
        for a, b in zip(ours, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.abs(b).max()))


def test_whitening_of_13_channels_has_the_identity_as_covariance():
    """The images have 16 bits and are no squares. The rest is what WHITENING_EPSILON adds to each eigenvalue."""
    rng = np.random.default_rng(0)
    mixed = rng.standard_normal((16, 21, 34, 13)) @ rng.standard_normal((13, 13))
    images = np.clip(20_000 + 3_000 * mixed, 0, 65_535).astype(np.uint16)
    mean, std = images.mean((0, 1, 2)), images.std((0, 1, 2))
    kernel = models.whitening_kernel(models.ConvNet, images, mean, std)
    assert kernel.shape == models.whitening_shape(models.ConvNet, images.shape[1:]) == (3, 3, 13, 117)
    windows = np.lib.stride_tricks.sliding_window_view((images - mean) / std, (3, 3), (1, 2))
    # A convolution of stride 2 looks from row and column -1 on. Patches with padding, also behind, do not count.
    patches = windows[:, 1:19:2, 1:33:2].transpose(0, 1, 2, 4, 5, 3).reshape(-1, 117)
    whitened = patches @ kernel.reshape(117, 117).astype(np.float64)
    values = np.linalg.eigvalsh(np.cov(patches.T, bias=True))[::-1]
    expected = np.diag(values / (values + models.WHITENING_EPSILON))
    np.testing.assert_allclose(np.cov(whitened.T, bias=True), expected, atol=1e-3)
    assert np.median(np.diag(expected)) > 0.97


def test_side_heads_count_in_the_loss_alone():
    """Their losses are averaged; logits without the loss are those of a network without them."""
    images = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), np.uint8)
    shape, scale, task = (16, 16, 3), (120.0, 70.0), Classification(5, 0.1)
    weights = jnp.array([1.0, 1, 1, 1, 0, 0])
    batch = Batch(jnp.asarray(images.reshape(6, -1)), jnp.arange(6) % 5, weights[None])
    options = {"num_classes": 5, "features": (4, 8, 12, 16), "norm": "batch"}
    network, plain = models.ConvNet(side_heads=True, **options), models.ConvNet(**options)
    params, model_state = models.init_variables(network, shape, 0)
    assert set(model_state) == {"batch_stats"}
    variables = {"params": params, **model_state}
    with_heads, without = (
        jax.jit(make_logits_fn(net, shape, *scale))(variables, batch.images) for net in (network, plain)
    )
    np.testing.assert_array_equal(with_heads, without)
    pixels = make_normalise(network, shape, *scale)(batch.images)
    apply = jax.jit(functools.partial(network.apply, mutable=["batch_stats", "side_logits"]))
    _, collections = apply(variables, pixels, weights[None])
    one, other = (
        jnp.sum(weights * task.losses(x, batch.targets)) for x in jax.tree.leaves(collections["side_logits"])
    )
    loss, expected = (
        jax.jit(make_loss_fn(net, shape, *scale, task))(params, model_state, batch)[0] for net in (network, plain)
    )
    np.testing.assert_allclose(loss, expected + (one + other) / 2, rtol=1e-5)
    assert abs(one - other) > 1e-3


@pytest.mark.parametrize(("height", "width"), [(31, 31), (2, 3)])
def test_max_pool_is_that_of_flax(height, width):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, height, width, 5)), jnp.float32)

    def values_and_gradient(pool):
        values, pull_back = jax.vjp(pool, x)
        return values, pull_back(jnp.arange(1.0, values.size + 1).reshape(values.shape))[0]

    ours = values_and_gradient(max_pool)
    theirs = values_and_gradient(lambda x: nn.max_pool(x, (2, 2), (2, 2)))
    assert ours[0].shape == (2, height // 2, width // 2, 5)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_images_of_16_bits_are_normalised_without_overflow(dtype):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 65_536, (3, 5, 7, 13), np.uint16)
    images[0], images[1] = 0, 65_535
    mean, std = rng.uniform(0, 65_535, 13), rng.uniform(100, 20_000, 13)
    network = models.create_model("convnet", 10, dtype, "lax")
    found = make_normalise(network, (5, 7, 13), mean, std)(jnp.asarray(images.reshape(3, -1)))
    assert found.dtype == dtype
    expected = (images.astype(np.float64) - mean) / std
    tolerance = 1e-5 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=tolerance, atol=1e-3)


def test_training_costs_by_hand():
    # 2 x out pixels x 9 x in x out features, three times (forward, kernel, input), the first layer's input not.
    layers = [(32, 3, 32), (16, 32, 64), (8, 64, 128), (4, 128, 256)]
    products = [2 * side**2 * 9 * inputs * outputs for side, inputs, outputs in layers]
    products += [2 * 256 * 128, 2 * 128 * 10]
    kept = sum(side**2 * outputs for side, _, outputs in layers) + 128 + 10
    patches = sum(side**2 * 9 * inputs for side, inputs, _ in layers) + 256 + 128
    expected = {
        ("lax", "float32"): 2 * 4 * kept,
        ("lax", "bfloat16"): 2 * 2 * kept,
        ("dot", "float32"): 2 * 4 * kept + 4 * patches,
        ("dot", "bfloat16"): 2 * 4 * kept + 2 * patches,  # products give float32 there
    }
    for (conv, dtype), num_bytes in expected.items():
        costs = training_costs(models.create_model("convnet", 10, dtype, conv), (64, 64, 3))
        assert costs.flops == 3 * sum(products) - products[0] == 88_677_888
        assert costs.activation_bytes == num_bytes


def test_auto_convolution():
    assert models.resolve_conv("auto", "cpu") == "dot"
    assert models.resolve_conv("auto", "tpu") == "lax"
    assert models.resolve_conv("auto", "gpu") == "lax_blocks"
    assert models.resolve_conv("lax", "cpu") == "lax"


def test_a_network_takes_no_option_that_it_does_not_name(monkeypatch):
    class Plain(nn.Module):
        num_classes: int
        dtype: jnp.dtype
        conv: str

    monkeypatch.setitem(models.MODELS, "plain", models.Architecture(Plain, frozenset()))
    config = default.get_config()
    config.model.name = "plain"
    network = make_network(typed(config), Classification(7), "cpu")
    assert network == Plain(7, jnp.dtype("float32"), models.resolve_conv("auto", "cpu"))
    config.model.norm, config.model.zero_head = "group", True
    refused = r"model.norm: 'group'; allowed: 'auto' with model 'plain'; model.zero_head: True; allowed: False with"
    with pytest.raises(UserError, match=refused):
        typed(config)
