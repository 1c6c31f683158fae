"""Every kind of network as a program and in PyTorch, with random arrays, against the network itself."""

import functools
import json
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import export

import model
from largebatch.exports import files
from largebatch.runs.checkpoints import named_leaves
from largebatch.training.loss import make_logits_fn

NUM_IMAGES = 5
SHAPE = (15, 18, 3)  # odd sizes have other paddings than even ones
MEAN, STD = [120.0, 110.0, 100.0], [60.0, 70.0, 80.0]
OPTIONS = {
    "convnet": {"stem": "whitened", "norm": "group", "side_heads": True},
    "resconvnet": {"norm": "batch"},
    "airbench_small": {"stem": "whitened", "norm": "batch"},
    "resnet8": {"norm": "batch"},
    "resnet50": {},
    "resunet_tiny": {},
    "unet_tiny": {"norm": "none"},
}
LAYERS = {  # fewer of them
    "resnet50": {"stage_sizes": (1, 2)},
    "resunet_tiny": {"features": (16, 24), "blocks": (1, 2)},
    "unet_tiny": {"features": (16, 24), "blocks": (1, 2)},
}
CASES = [*((name, "float32") for name in OPTIONS), ("convnet", "bfloat16"), ("unet_tiny", "bfloat16")]
TEXT = Path(files.__file__).with_name(files.PYTORCH)


def make(name: str, dtype: str, conv: str):
    outputs = (5, 1) if model.MODELS[name].of_pixels else 7
    network = model.create_model(name, outputs, dtype, conv, **OPTIONS.get(name, {}))
    return network.clone(**LAYERS.get(name, {}))


def random_variables(network, shape=SHAPE) -> dict:
    """Draw arrays of such sizes that values neither vanish nor explode over the layers."""
    params, state = model.init_variables(network, shape, 0)
    rng = np.random.default_rng(0)

    def fill(path, leaf):
        name = path[-1].key
        values = rng.normal(size=leaf.shape)
        if name in ("scale", "variance"):
            values = 1 + 0.2 * np.abs(values)
        elif name == "kernel":
            values /= np.sqrt(np.prod(leaf.shape[:-1]))
        else:
            values *= 0.2
        return values.astype(np.float32)

    return jax.tree_util.tree_map_with_path(fill, {"params": params, **state})


def call(function, *arguments) -> np.ndarray:
    """Call a function that is compiled in a third of the time."""
    options = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(function).lower(*arguments).compile(compiler_options=options)
    return np.asarray(compiled(*arguments))


@functools.cache
def made(name: str, dtype: str) -> SimpleNamespace:
    """Make a network with random arrays, and what it gives for random images."""
    networks = [make(name, dtype, conv) for conv in ("dot", "lax")]
    variables = random_variables(networks[0])
    functions = [make_logits_fn(network, SHAPE, MEAN, STD) for network in networks]
    images = np.random.default_rng(1).integers(0, 256, (NUM_IMAGES, *SHAPE), np.uint8)
    expected = call(functions[0], variables, images)
    return SimpleNamespace(
        network=networks[0], functions=functions, variables=variables, images=images, expected=expected
    )


def assert_close(found: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    assert found.dtype == np.float32
    largest = abs(expected).max()
    assert 0.1 < largest < 100
    tolerance = {"float32": 1e-5, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1.0, largest))


@pytest.mark.full  # tests/test_export.py has a convnet
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_program_is_the_network(name, dtype):
    one = made(name, dtype)
    loaded = export.deserialize(bytearray(files.serialized(*one.functions, one.variables, SHAPE, "uint8")))
    assert loaded.platforms == files.PLATFORMS
    assert_close(call(loaded.call, named_leaves(one.variables), one.images), one.expected, dtype)


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_text_for_pytorch_is_the_network(name, dtype, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: benchmarks/peers/torch_requirements.txt")
    one = made(name, dtype)
    (tmp_path / files.ARRAYS).write_bytes(files.arrays_as_bytes(one.variables))
    data = {"mean": [*MEAN, 0.0], "std": [*STD, 1.0]}  # of targets, too
    described = {"network": files.network_of(one.network), "data": data}
    (tmp_path / files.DESCRIPTION).write_text(json.dumps(described))
    shutil.copy(TEXT, tmp_path)
    found = runpy.run_path(str(tmp_path / files.PYTORCH))["outputs"](torch.from_numpy(one.images))
    assert_close(found.numpy(), one.expected, dtype)


def test_every_network_is_of_a_kind_that_the_text_for_pytorch_has():
    kinds = TEXT.read_text().split("NETWORKS = ")[1]
    for name in model.MODELS:
        assert f'"{files.network_of(make(name, "float32", "dot"))["class"]}":' in kinds, name


@pytest.mark.full
def test_images_of_16_bits_and_many_bands_have_a_program():
    shape, mean, std = (8, 8, 13), [2000.0] * 13, [900.0] * 13
    variables = random_variables(network := model.create_model("convnet", 3, "float32", "dot"), shape)
    logits_fn = make_logits_fn(network, shape, mean, std)
    loaded = export.deserialize(bytearray(files.serialized(logits_fn, logits_fn, variables, shape, "uint16")))
    images = np.random.default_rng(0).integers(0, 2**16, (3, *shape), np.uint16)
    found = call(loaded.call, named_leaves(variables), images)
    np.testing.assert_allclose(found, call(logits_fn, variables, images), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="uint8"):
        loaded.call(named_leaves(variables), images.astype(np.uint8))
