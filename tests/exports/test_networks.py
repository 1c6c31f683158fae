"""Every network as a program and in PyTorch, with random arrays, against the network itself."""

import json
import runpy
import shutil

import jax
import numpy as np
import pytest
from conftest import ROOT
from jax import export

import model
from largebatch.exports import files, program
from largebatch.runs.checkpoints import named_leaves
from largebatch.training.loss import make_logits_fn

pytestmark = pytest.mark.full  # tests/test_export.py has a convnet

NUM_IMAGES = 5
SHAPE = (15, 18, 3)  # odd sizes have other paddings than even ones
MEAN, STD = [120.0, 110.0, 100.0], [60.0, 70.0, 80.0]
MORE = {
    "convnet": {"stem": "whitened", "norm": "group", "side_heads": True},
    "resconvnet": {"norm": "batch"},
    "airbench_small": {"stem": "whitened", "norm": "batch"},
    "resnet8": {"norm": "batch"},
    "unet_tiny": {"norm": "none"},
}
OTHER_WIDTHS = {"resconvnet7", "resconvnet_wide", "airbench", "resunet"}  # of networks that are there
CASES = [
    *((name, "float32") for name in model.MODELS if name not in OTHER_WIDTHS),
    *((name, "bfloat16") for name in ("convnet", "unet_tiny")),
]


def make(name: str, dtype: str, conv: str):
    outputs = (5, 1) if model.MODELS[name].of_pixels else 7
    return model.create_model(name, outputs, dtype, conv, **MORE.get(name, {}))


def random_variables(network) -> dict:
    """Of the right sizes for values to keep theirs from layer to layer; scales and variances around 1."""
    params, state = model.init_variables(network, SHAPE, 0)
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


def assert_close(found: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    assert found.dtype == np.float32
    largest = abs(expected).max()
    assert 0.1 < largest < 100
    tolerance = {"float32": 1e-5, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1.0, largest))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_program_and_the_text_of_pytorch_are_the_network(name, dtype, tmp_path):
    networks = [make(name, dtype, conv) for conv in ("dot", "lax")]
    variables = random_variables(networks[0])
    functions = [make_logits_fn(network, SHAPE, MEAN, STD) for network in networks]
    images = np.random.default_rng(1).integers(0, 256, (NUM_IMAGES, *SHAPE), np.uint8)
    expected = np.asarray(jax.jit(functions[0])(variables, images))
    loaded = export.deserialize(bytearray(program.serialized(*functions, variables, SHAPE, "uint8")))
    assert loaded.platforms == program.PLATFORMS
    arrays = named_leaves(variables)
    assert_close(np.asarray(loaded.call(arrays, images)), expected, dtype)
    if dtype == "float32":
        assert_close(np.asarray(loaded.call(arrays, images[:1])), expected[:1], dtype)

    torch = pytest.importorskip("torch", reason="PyTorch is not installed: benchmarks/peers/torch_requirements.txt")
    (tmp_path / files.ARRAYS).write_bytes(files.arrays_as_bytes(variables))
    data = {"mean": [*MEAN, 0.0], "std": [*STD, 1.0]}  # of targets, too
    described = {"network": files.network_of(networks[0]), "data": data}
    (tmp_path / files.DESCRIPTION).write_text(json.dumps(described))
    shutil.copy(ROOT / "largebatch" / "exports" / files.PYTORCH, tmp_path)
    found = runpy.run_path(str(tmp_path / files.PYTORCH))["outputs"](torch.from_numpy(images))
    assert_close(found.numpy(), expected, dtype)


def test_images_of_16_bits_and_many_bands_have_a_program():
    shape, mean, std = (8, 8, 13), [2000.0] * 13, [900.0] * 13
    network = model.create_model("convnet", 3, "float32", "dot")
    params, state = model.init_variables(network, shape, 0)
    variables = {"params": params, **state}
    logits_fn = make_logits_fn(network, shape, mean, std)
    loaded = export.deserialize(bytearray(program.serialized(logits_fn, logits_fn, variables, shape, "uint16")))
    images = np.random.default_rng(0).integers(0, 2**16, (3, *shape), np.uint16)
    found = loaded.call(named_leaves(variables), images)
    np.testing.assert_allclose(found, jax.jit(logits_fn)(variables, images), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="uint8"):
        loaded.call(named_leaves(variables), images.astype(np.uint8))
