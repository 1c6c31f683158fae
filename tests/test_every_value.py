"""Every named value of every field trains, and so does every pair of the values that shape data and programs.

Each case is a run of one or two steps on a few images of 8 pixels, of a network with few features, compiled without
optimisations. Losses of masks and depths differ in a function alone, which test_losses has.
"""

import dataclasses
import functools
import itertools
import math
import re

import jax
import numpy as np
import pytest
from conftest import make_folder
from PIL import Image
from test_sources import png, write_prepared_tfds, zip_of
from test_train import rows_of

import model as models
import train
from build import ProgramCache
from configs import default
from largebatch.config import rules
from largebatch.config.dicts import flatten
from largebatch.util import UserError

DEFAULTS = flatten(default.get_config().to_dict())
SMALL = {
    "dataset.num_examples": 50,
    "dataset.image_size": 8,
    "batch.size": 16,
    "batch.micro_batch_size": 4,
    "model.conv": "lax",  # compiles in half the time of "dot", which has a case of its own
    "train.inner_steps": 1,
    "train.outer_steps": 1,
    "log.tensorboard": False,
}
OF_PIXELS = {"dataset.name": "mine", "augment.views": "flip", "model.name": "resunet_tiny"}
# By task, the data and the network that it needs. FOLDER and other words in capitals stand for sets; see `paths`.
TASKS = {
    "segmentation": OF_PIXELS | {"dataset.path": "MASKS"},
    "depth": OF_PIXELS | {"dataset.path": "DEPTHS"},
    "mask_depth": OF_PIXELS | {"dataset.name": "scenes"},
}
MASKS = {**TASKS["segmentation"], "task.name": "segmentation"}
TWO_STEPS = {"train.inner_steps": 2}
GROWING = {"schedule.name": "step", "schedule.decay_steps": (1,), **TWO_STEPS}
# What a value needs beside it: values of other fields without which a config with it is refused.
BESIDE = {
    "dataset.source": {
        "folder": {"dataset.name": "mine", "dataset.path": "FOLDER"},
        "zip": {"dataset.name": "mine", "dataset.path": "ZIP"},
        "tfds": {"dataset.name": "tiny", "dataset.path": "TFDS"},
    },
    "dataset.splits": {"published": {"dataset.name": "mine", "dataset.path": "PUBLISHED"}},
    "task.name": TASKS,
    "model.name": {"resunet": MASKS, "resunet_tiny": MASKS, "unet_tiny": MASKS},
    "batch.hold_last": {True: {"batch.trace": (8, 16)}},
    "optimizer.nesterov": {True: {"optimizer.name": "sgd"}},
    "optimizer.momentum_correction": {False: {"optimizer.name": "sgd"}},
    "schedule.name": {"step": {"schedule.decay_steps": (1,), **TWO_STEPS}},
    "schedule.scaling": {"adascale": {"optimizer.name": "sgd", "schedule.reference_batch_size": 8}},
    "schedule.decay_by": {"batch": GROWING, "seesaw": GROWING},
    "schedule.decay_over": {"images": {"schedule.name": "linear"}},
    "sync.mode": {"post_local": {"sync.start_step": 1, **TWO_STEPS}},
    "sync.optimizer_state": {"keep": {"sync.mode": "local"}, "reset": {"sync.mode": "local"}},
}
NOT_HERE = {("devices.platform", "gpu"), ("devices.platform", "tpu")}
LOSSES = ("task.mask_loss", "task.depth_loss")
# The fields that shape data and programs, each with the values that take different ways through them.
SHAPING = {
    "augment.views": ("all", "flip", "none"),
    "augment.storage": ("expanded", "on_device", "streamed"),
    "batch.size": (16, "full"),
    "model.norm": ("none", "batch"),
    "optimizer.name": ("lamb", "soap"),
    "sync.mode": ("every_step", "local", "post_local"),
}
# The networks with fewer features and blocks: other fields do not ask how large a network is.
_CONVNET = {"features": (4, 8, 8), "blocks": (0, 1, 0), "hidden": None}
_UNET = {"features": (8, 16), "blocks": (1, 2)}
NARROW = {
    **dict.fromkeys(("convnet", "resconvnet", "resconvnet7", "resconvnet_wide"), _CONVNET),
    **dict.fromkeys(("resunet", "resunet_tiny", "unet_tiny"), _UNET),
    **{name: {"features": (8, 8)} for name in ("airbench", "airbench_small")},
    "resnet8": {"width": 8},
    "resnet50": {"width": 8, "stage_sizes": (1, 2)},
}


def config_of(fields: dict):
    """The default config with these fields."""
    config = default.get_config()
    with config.ignore_type():
        config.update_from_flattened_dict(fields)
    return config


# ---- single values --------------------------------------------------------------------------------------


def named_values() -> dict[str, list]:
    """The values that each field takes by name, as the messages of the config list them."""
    found = {}
    for field, rule in rules.rules(models.MODELS).items():
        if field in LOSSES:
            continue
        names = rule.text.split(" | ") if " | " in rule.text else re.findall(r", or '(\w+)'", rule.text)
        if names:
            found[field] = [{"true": True, "false": False}.get(name, name) for name in names]
    return found


def merged_cases() -> dict[str, dict]:
    """Configs that together have every named value but those of SHAPING, which the covering array has.

    A value joins the first config that it neither contradicts nor is refused beside.
    """
    merged = {}
    for field, values in named_values().items():
        for value in values:
            if (field, value) in NOT_HERE or value in SHAPING.get(field, ()) or value == (DEFAULTS | SMALL)[field]:
                continue
            changed = BESIDE.get(field, {}).get(value, {}) | {field: value}
            name = next((name for name, others in merged.items() if go_together(others, changed)), None)
            others = merged.pop(name, SMALL)
            merged[", ".join(filter(None, [name, f"{field}={value}"]))] = others | changed
    return merged


def go_together(others: dict, changed: dict) -> bool:
    """Tell whether a config with the fields `others` may have the fields `changed`, too."""

    def data(fields: dict) -> dict:
        return {name: value for name, value in fields.items() if name.startswith("dataset.") and name not in SMALL}

    if any(others.get(name, value) not in (value, SMALL.get(name, value)) for name, value in changed.items()):
        return False
    if data(others) and data(changed) and data(others) != data(changed):  # only a run knows which of these agree
        return False
    try:
        rules.check(config_of(others | changed).to_dict(), models.MODELS)
    except UserError:
        return False
    return True


# ---- pairs of values ------------------------------------------------------------------------------------


def pairs_of(fields: dict) -> set:
    """The pairs of (field, value) in a config."""
    return set(itertools.combinations(fields.items(), 2))


@functools.cache
def covering_array() -> list[dict]:
    """Configs that together have every pair of the values in SHAPING, chosen greedily."""
    combinations = [dict(zip(SHAPING, values, strict=True)) for values in itertools.product(*SHAPING.values())]
    candidates = [(fields, pairs_of(fields)) for fields in combinations]
    uncovered, chosen = set().union(*(pairs for _, pairs in candidates)), []
    while uncovered:
        fields, pairs = max(candidates, key=lambda candidate: len(candidate[1] & uncovered))
        chosen.append(fields)
        uncovered = uncovered - pairs
    return chosen


def with_what_it_needs(fields: dict) -> dict:
    """A config of the covering array, with the fields that its values need."""
    beside = SMALL | BESIDE["sync.mode"].get(fields["sync.mode"], {})
    if fields["optimizer.name"] == "soap" and fields["sync.mode"] != "every_step":
        beside["sync.optimizer_state"] = "keep"
    return beside | fields


# ---- runs -----------------------------------------------------------------------------------------------


def write_png(path, *, seed: int, below: int = 256, shape=(8, 8, 3)) -> None:
    """Write an image of random values from 0 to `below` - 1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, below, shape, np.uint8)).save(path)


@pytest.fixture(scope="session")
def paths(tmp_path_factory) -> dict[str, str]:
    """Small sets of images of each kind of source, by the word that stands for each in the tables."""
    root = tmp_path_factory.mktemp("sets")
    zip_of(make_folder(root / "folder", {"cat": 25, "dog": 25}, size=(8, 8)), root / "zip")
    for split in ("train", "val", "test"):
        make_folder(root / "published" / split, {"cat": 12, "dog": 12}, size=(8, 8))
    for kind in ("masks", "depths"):
        for number in range(50):
            write_png(root / kind / "images" / f"{number}.png", seed=number)
            write_png(root / kind / kind / f"{number}.png", seed=number, below=2, shape=(8, 8))
    rows = [(png(seed=number), number % 2, f"{number}.png") for number in range(50)]
    write_prepared_tfds(root / "tfds", "tiny", rows, ["cat", "dog"])
    return {word: str(root / word.lower()) for word in ("FOLDER", "ZIP", "TFDS", "PUBLISHED", "MASKS", "DEPTHS")}


@pytest.fixture
def assert_trains(paths, session_cache, tmp_path, monkeypatch):
    """assert_trains(fields): a run of the config takes its steps, with finite losses, and ends as done."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name, fields in NARROW.items():
        architecture = models.MODELS[name]
        module = functools.partial(architecture.module, **fields)
        monkeypatch.setitem(models.MODELS, name, dataclasses.replace(architecture, module=module))

    def assert_trains(fields: dict) -> None:
        config = config_of({name: paths.get(value, value) for name, value in fields.items()})
        config.augment.cache_dir = str(session_cache)
        summary = train.train_and_evaluate(config, str(tmp_path / "run"), shared=ProgramCache())
        row = rows_of(tmp_path / "run")[-1]
        assert (summary["status"], summary["steps"]) == ("done", row["step"])
        assert row["step"] >= 1
        assert all(math.isfinite(row[loss]) for loss in ("train_loss", "val_loss"))

    jax.config.update("jax_disable_most_optimizations", True)
    yield assert_trains
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.full
@pytest.mark.parametrize("fields", merged_cases().values(), ids=merged_cases())
def test_every_value_trains(fields, assert_trains):
    assert_trains(fields)


@pytest.mark.full
@pytest.mark.parametrize("fields", covering_array(), ids=lambda fields: "-".join(map(str, fields.values())))
def test_every_pair_of_shaping_values_trains(fields, assert_trains):
    assert_trains(with_what_it_needs(fields))


def test_the_tables_name_values_that_there_are():
    named = named_values()
    for field, values in [*BESIDE.items(), *SHAPING.items()]:
        assert set(values) - {16} <= set(named[field]), field
