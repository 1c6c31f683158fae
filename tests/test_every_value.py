"""Every named value of every field trains, and so does every pair of the values that shape data and programs.

Each case is a process of train.py that makes an update on a few images of 8 pixels, compiled quickly.
"""

import functools
import itertools
import json
import math
import re

import numpy as np
import pytest
from conftest import make_folder, run_script
from PIL import Image
from test_sources import png, write_prepared_tfds, zip_of

import model as models
from configs import default
from largebatch.config import rules
from largebatch.config.dicts import flatten
from largebatch.util import UserError

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
MASKS, DEPTHS = ({**TASKS[name], "task.name": name} for name in ("segmentation", "depth"))
TWO_UPDATES = {"train.inner_steps": 2}
GROWING = {"schedule.name": "step", "schedule.decay_steps": (1,), **TWO_UPDATES}
# What a value needs beside it: values of other fields without which a config with it is refused.
BESIDE = {
    "dataset.source": {
        "folder": {"dataset.name": "mine", "dataset.path": "FOLDER"},
        "zip": {"dataset.name": "mine", "dataset.path": "ZIP"},
        "tfds": {"dataset.name": "tiny", "dataset.path": "TFDS"},
    },
    "dataset.splits": {"published": {"dataset.name": "mine", "dataset.path": "PUBLISHED"}},
    "task.name": TASKS,
    "task.mask_loss": {"dice": MASKS, "cross_entropy_dice": MASKS, "focal": MASKS},
    "task.depth_loss": {"berhu": DEPTHS, "gradient": DEPTHS},
    "model.name": {"resunet": MASKS, "resunet_tiny": MASKS, "unet_tiny": MASKS},
    "batch.hold_last": {True: {"batch.trace": (8, 16)}},
    "optimizer.nesterov": {True: {"optimizer.name": "sgd"}},
    "optimizer.momentum_correction": {False: {"optimizer.name": "sgd"}},
    "schedule.name": {"step": {"schedule.decay_steps": (1,), **TWO_UPDATES}},
    "schedule.scaling": {"adascale": {"optimizer.name": "sgd", "schedule.reference_batch_size": 8}},
    "schedule.decay_by": {"batch": GROWING, "seesaw": GROWING},
    "schedule.decay_over": {"images": {"schedule.name": "linear"}},
    "sync.mode": {"post_local": {"sync.start_step": 1, **TWO_UPDATES}},
    "sync.optimizer_state": {"keep": {"sync.mode": "local"}, "reset": {"sync.mode": "local"}},
}
NOT_HERE = {("devices.platform", "gpu"), ("devices.platform", "tpu")}


def named_values() -> dict[str, list]:
    """The values that each field takes by name, as the messages of the config list them."""
    found = {}
    for field, rule in rules.rules(models.MODELS).items():
        names = rule.text.split(" | ") if " | " in rule.text else re.findall(r", or '(\w+)'", rule.text)
        if names:
            found[field] = [{"true": True, "false": False}.get(name, name) for name in names]
    return found


def single_cases() -> dict[str, dict]:
    """For each named value a config, as fields beside the default's; each config once.

    Values of SHAPING are left out: each is in several configs of the covering array.
    """
    cases, small = {}, flatten(default.get_config().to_dict()) | SMALL
    for field, values in named_values().items():
        for value in values:
            if (field, value) in NOT_HERE or value in SHAPING.get(field, ()):
                continue
            fields = SMALL | BESIDE.get(field, {}).get(value, {}) | {field: value}
            changed = {name: other for name, other in fields.items() if other != small[name]}
            name = f"{field}={value}" if changed else "as it is"
            if fields not in cases.values():
                cases[name] = fields
    return cases


def merged_cases() -> dict[str, dict]:
    """The single cases, put together where they neither contradict nor are refused beside each other."""
    default_values = flatten(default.get_config().to_dict())

    def is_allowed(fields: dict) -> bool:
        nested = {}
        for name, value in (default_values | fields).items():
            section, _, field = name.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[field] = value
        try:
            rules.check(nested, models.MODELS)
        except UserError:
            return False
        return True

    def data(fields: dict) -> dict:
        return {
            field: value for field, value in fields.items() if field.startswith("dataset.") and field not in SMALL
        }

    merged = {}
    for name, fields in single_cases().items():
        changed = {field: value for field, value in fields.items() if SMALL.get(field, "not there") != value}
        for names, others in merged.items():
            agree = all(others.get(field, value) in (value, SMALL.get(field)) for field, value in changed.items())
            # Of what files there are only the run itself knows what goes together.
            of_one_set = not data(others) or not data(changed) or data(others) == data(changed)
            if agree and of_one_set and name != "as it is" and is_allowed(others | changed):
                merged[f"{names},{name}"] = merged.pop(names) | changed
                break
        else:
            merged[name] = fields
    return merged


# ---- pairs of values ----------------------------------------------------------------------------------

# The fields that shape data and programs, each with the values that take different ways through them.
SHAPING = {
    "augment.views": ("all", "flip", "none"),
    "augment.storage": ("expanded", "on_device", "streamed"),
    "batch.size": (16, "full"),
    "task.name": ("classification", "mask_depth"),
    "model.norm": ("none", "batch", "group"),
    "optimizer.name": ("sgd", "lamb", "muon", "soap"),
    "sync.mode": ("every_step", "local", "post_local"),
}


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
    beside = SMALL | TASKS.get(fields["task.name"], {}) | BESIDE["sync.mode"].get(fields["sync.mode"], {})
    if fields["optimizer.name"] == "soap" and fields["sync.mode"] != "every_step":
        beside["sync.optimizer_state"] = "keep"
    return beside | fields


def name_of(fields: dict) -> str:
    return "-".join(str(value) for value in fields.values())


# ---- runs ---------------------------------------------------------------------------------------------


def write_png(path, *, seed: int, below: int = 256, shape=(8, 8, 3)) -> None:
    """Write an image of random values from 0 to `below` - 1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, below, shape, np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="session")
def paths(tmp_path_factory) -> dict[str, str]:
    """Small sets of images of each kind of source, by the word that stands for each in the tables."""
    root = tmp_path_factory.mktemp("sets")
    folder = make_folder(root / "folder", {"cat": 25, "dog": 25}, size=(8, 8))
    for split in ("train", "val", "test"):
        make_folder(root / "published" / split, {"cat": 12, "dog": 12}, size=(8, 8))
    for kind in ("masks", "depths"):
        for number in range(50):
            write_png(root / kind / "images" / f"{number}.png", seed=number)
            write_png(root / kind / kind / f"{number}.png", seed=number, below=2, shape=(8, 8))
    rows = [(png(seed=number), number % 2, f"{number}.png") for number in range(50)]
    write_prepared_tfds(root / "tfds", "tiny", rows, ["cat", "dog"])
    zip_of(folder, root / "set.zip")
    names = {"ZIP": "set.zip"}
    words = ("FOLDER", "ZIP", "TFDS", "PUBLISHED", "MASKS", "DEPTHS")
    return {word: str(root / names.get(word, word.lower())) for word in words}


def train(fields: dict, paths: dict, cache, workdir):
    """Run train.py with these fields on the command line."""
    values = {
        field: paths.get(value, value) if isinstance(value, str) else value for field, value in fields.items()
    }
    flags = [f"--config.{field}={value}" for field, value in values.items()]
    flags += [f"--config.augment.cache_dir={cache}", f"--workdir={workdir}"]
    environment = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "WANDB_MODE": "offline"}
    return run_script("train.py", *flags, env=environment)


def assert_trains(fields: dict, paths: dict, cache, workdir) -> None:
    """Assert that a run of the config makes its updates, with finite losses, and ends as done."""
    result = train(fields, paths, cache, workdir)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "Traceback" not in result.stderr, result.stderr
    summary = json.loads((workdir / "summary.json").read_text())
    row = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    assert (summary["status"], summary["steps"]) == ("done", row["step"])
    assert row["step"] >= 1
    assert all(math.isfinite(row[loss]) for loss in ("train_loss", "val_loss"))
    recorded = flatten(json.loads((workdir / "config.json").read_text()))
    for field in fields.keys() - {"dataset.path", "model.dtype"}:
        expected = fields[field]
        assert recorded[field] == (list(expected) if isinstance(expected, tuple) else expected)


@pytest.mark.full
@pytest.mark.parametrize("name", merged_cases(), ids=lambda name: name)
def test_every_value_trains(name, paths, session_cache, tmp_path):
    assert_trains(merged_cases()[name], paths, session_cache, tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize("fields", covering_array(), ids=name_of)
def test_every_pair_of_shaping_values_trains(fields, paths, session_cache, tmp_path):
    assert_trains(with_what_it_needs(fields), paths, session_cache, tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize(("field", "value"), sorted(NOT_HERE))
def test_platforms_that_are_not_here_are_refused(field, value, session_cache, tmp_path):
    fields = SMALL | {field: value}
    result = run_script(
        "train.py", *(f"--config.{name}={given}" for name, given in fields.items()), "--workdir", tmp_path / "run"
    )
    assert result.returncode == 1
    assert f"devices.platform: '{value}' has no device" in result.stderr


def test_the_tables_name_values_that_there_are():
    named = named_values()
    for field, values in BESIDE.items():
        assert set(values) <= set(named[field]), field
    for field, values in SHAPING.items():
        assert set(values) - {16} <= set(named[field]), field
    assert set(SHAPING["sync.mode"]) == set(named["sync.mode"])
    assert set(SHAPING["augment.views"]) == set(named["augment.views"])
    assert {*SHAPING["augment.storage"], "auto"} == set(named["augment.storage"])
