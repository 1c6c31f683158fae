"""Training on another number of devices is the same training, to rounding; on EuroSAT."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import rounding
from conftest import run_script
from updates_on_devices import NUM_UPDATES, OPTIMIZERS

SCRIPT = Path(__file__).parent / "updates_on_devices.py"
SEVERAL = 7  # which cannot hold the 480 virtual shards evenly


@pytest.fixture(scope="module")
def updates(tmp_path_factory, eurosat_zip, session_cache):
    """updates(devices) is what updates_on_devices.py writes; gradients start from the parameters of one device."""
    folder, done = tmp_path_factory.mktemp("updates"), {}

    def run(devices: int) -> dict[str, np.ndarray]:
        if devices not in done:
            starts = "-"
            if devices > 1:
                run(1)
                starts = folder / "1.npz"
            path = folder / f"{devices}.npz"
            result = run_script(
                SCRIPT, path, starts, session_cache, eurosat_zip, env={"JAX_NUM_CPU_DEVICES": str(devices)}
            )
            assert result.returncode == 0, result.stderr
            done[devices] = dict(np.load(path))
        return done[devices]

    return run


def leaves(one: dict, several: dict, optimizer: str) -> list[rounding.Leaf]:
    """The arrays of the parameters over the updates, with the errors that more devices make in the gradients."""
    shapes = [tuple(shape) for _, shape in json.loads(str(one["shapes"]))]
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    weights = one[f"{optimizer}_params"][:NUM_UPDATES].astype(np.float64)
    grads = one[f"{optimizer}_grads"].astype(np.float64)
    errors = np.abs(several[f"{optimizer}_grads"] - grads)
    parts = [np.split(values, ends, axis=1) for values in (weights, grads, errors)]
    return [rounding.Leaf(*leaf) for leaf in zip(shapes, *parts, strict=True)]


def distance_at_end(one: dict, several: dict, optimizer: str) -> float:
    """Of all parameters, relative to their norm."""
    name = f"{optimizer}_params"
    return float(np.linalg.norm(several[name][-1] - one[name][-1]) / np.linalg.norm(one[name][-1]))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_of_every_update(updates, optimizer):
    one, several = (updates(count)[f"{optimizer}_grads"] for count in (1, SEVERAL))
    largest = np.abs(one).max(axis=1, keepdims=True)
    assert (np.abs(several - one) / largest).max() < 2e-6


@pytest.mark.full
def test_parameters_after_20_updates_of_sgd(updates):
    params = updates(1)["sgd_params"]
    assert distance_at_end(updates(1), updates(SEVERAL), "sgd") < 1e-5
    assert np.linalg.norm(params[-1] - params[0]) > 1e-2 * np.linalg.norm(params[0])  # it moved


@pytest.mark.full
@pytest.mark.parametrize(("optimizer", "bound_of"), [("muon", rounding.muon_bound), ("lamb", rounding.lamb_bound)])
def test_parameters_after_20_updates_of_others(updates, optimizer, bound_of):
    one, several = updates(1), updates(SEVERAL)
    bounds = [bound_of(leaf, OPTIMIZERS[optimizer]) for leaf in leaves(one, several, optimizer)]
    bound = float(np.linalg.norm(bounds) / np.linalg.norm(one[f"{optimizer}_params"][-1]))
    distance = distance_at_end(one, several, optimizer)
    print(f"{optimizer}: {distance:.2e}, bound {bound:.2e}")
    assert distance < bound < 1e-4
