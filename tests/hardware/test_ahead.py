"""Programs are compiled ahead for the shapes that a run has."""

import jax
import numpy as np
import pytest
from conftest import typed

import examine
from build import ProgramCache
from largebatch.data import sharded_split
from largebatch.data.placement import train_shapes
from largebatch.data.sources.find import SIZES
from largebatch.data.sources.splits import assign_splits
from largebatch.hardware.chips import TPUS, Hardware
from largebatch.hosts import memory
from largebatch.util import BadSetting
from plan import choose_plan


def shapes(tree):
    """Of one device, of arrays or of shapes that have no device axis."""
    return jax.tree.map(lambda x: (tuple(x.shape), np.dtype(x.dtype)), tree)


def without_devices(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


@pytest.mark.parametrize("storage", ["expanded", "on_device", "streamed"])
def test_training_data_have_the_shapes_that_are_compiled_for(small_config, storage):
    small_config.augment.storage = storage
    placed = ProgramCache().load(typed(small_config))
    plan = placed.plan
    announced = train_shapes(plan.data.layout, plan.sharding, plan.stored_views, plan.buffer_rows)
    assert shapes(announced) == shapes(without_devices(placed.data.train.arrays))


@pytest.mark.parametrize("stays", [True, False])
def test_validation_has_the_shapes_that_are_compiled_for(small_config, monkeypatch, stays):
    monkeypatch.setattr(sharded_split, "stays_on_devices", lambda *_: stays)
    monkeypatch.setattr(sharded_split, "BLOCK_BYTES", 1)
    placed = ProgramCache().load(typed(small_config))
    plan, size = placed.plan, placed.plan.micro_batches.predicted_at_once
    block = next(placed.data.validation.blocks(size))
    announced = sharded_split.block_shapes(plan.data.layout, plan.num_devices, size, 0)
    assert shapes(announced) == shapes(without_devices(block))


@pytest.mark.parametrize("mode", ["every_step", "local", "post_local"])
def test_all_programs_of_a_run_are_lowered(small_config, mode):
    small_config.sync.mode, small_config.eval.view_average = mode, True
    small_config.sync.every = 1 if mode == "every_step" else 2
    small_config.sync.start_step = 2 if mode == "post_local" else 0
    plan = ProgramCache().load(typed(small_config)).plan
    lowered = examine.lower_plan(plan, memory.available_bytes(), jax.devices())
    updates = {"every_step": ["update"], "local": ["local update", "average"]}
    updates["post_local"] = updates["every_step"] + updates["local"]
    assert list(lowered) == [*updates[mode], "validation", "validation of copies"]


def test_a_set_that_is_known_needs_no_images(small_config):
    small_config.dataset.name, small_config.dataset.image_size = "imagenet2012", 224
    data = examine.dataset_info(typed(small_config))
    assert (data.num_images, data.image_shape, data.num_classes) == (1_231_167, (224, 224, 3), 1000)


def sizes_in_a_run(name, splits):
    """The sizes of the splits that a run makes of a published set."""
    published = [split for split, count in SIZES[name].counts.items() for _ in range(count)]
    ids, labels = [f"{number:06d}" for number in range(len(published))], np.arange(len(published)) % 10
    of_set = published if len(SIZES[name].counts) > 1 else None
    parts = assign_splits(ids, labels, list("abcdefghij"), published=of_set, choice=splits)
    return {split: len(rows) for split, rows in parts.items()}


@pytest.mark.parametrize(
    ("name", "splits", "train", "val", "test"),
    [
        ("eurosat", "auto", 21_600, 2_700, 2_700),
        ("eurosat", "own", 21_600, 2_700, 2_700),
        ("cifar10", "auto", 45_000, 5_000, 10_000),
        ("cifar10", "published", 45_000, 5_000, 10_000),
        ("cifar10", "own", 48_000, 6_000, 6_000),
        ("imagenet2012", "auto", 1_231_167, 50_000, 50_000),
        ("imagenet2012", "own", 1_064_935, 133_116, 133_116),
    ],
)
def test_a_set_that_is_not_here_is_split_as_by_a_run(small_config, name, splits, train, val, test):
    small_config.dataset.name, small_config.dataset.splits = name, splits
    sizes = {"train": train, "val": val, "test": test}
    assert examine.dataset_info(typed(small_config)).layout.counts == sizes
    if name != "imagenet2012":  # which takes seconds
        assert sizes_in_a_run(name, splits) == sizes


def test_splits_that_a_set_does_not_have_are_refused_as_by_a_run(small_config):
    small_config.dataset.name, small_config.dataset.splits = "eurosat", "published"
    with pytest.raises(BadSetting) as without_images:
        examine.dataset_info(typed(small_config))
    with pytest.raises(BadSetting) as in_a_run:
        sizes_in_a_run("eurosat", "published")
    assert str(without_images.value) == str(in_a_run.value)


def test_listed_splits_of_a_set_that_is_not_here(small_config, tmp_path):
    small_config.dataset.name, small_config.dataset.tfds_split = "cifar10", "train+test"
    assert examine.dataset_info(typed(small_config)).num_images == 48_000
    small_config.dataset.tfds_split = "train[:10%]"
    refused = (
        r"^dataset.tfds_split: 'train\[:10%\]' of 'cifar10' without images; allowed: train and test, joined by \+"
    )
    with pytest.raises(BadSetting, match=refused):
        examine.dataset_info(typed(small_config))
    small_config.dataset.tfds_split, path = None, tmp_path / "split.csv"
    path.write_text("\n".join(["id,split", *(f"{i}.png,{'train' if i < 80 else 'val'}" for i in range(90))]))
    small_config.dataset.split_file = str(path)
    with pytest.raises(BadSetting, match=r"^dataset.split_file: .*split.csv: no test images"):
        examine.dataset_info(typed(small_config))
    path.write_text(path.read_text() + "\n90.png,test")
    counts = examine.dataset_info(typed(small_config)).layout.counts
    assert counts == {"train": 80, "val": 10, "test": 1}


def test_what_does_not_fit_there_says_by_how_much_and_what_helps(small_config):
    small_config.dataset.name, small_config.augment.storage = "imagenet2012", "expanded"
    small_config.dataset.image_size = 224
    hardware, free = Hardware("tpu", "TPU v3", 32), TPUS["TPU v3"].memory_bytes
    with pytest.raises(BadSetting, match=r"does not fit on a device: training images .* MB too few; .*'on_device'"):
        choose_plan(typed(small_config), examine.dataset_info(typed(small_config)), hardware, free_bytes=free)
    small_config.augment.storage = "auto"
    plan = choose_plan(typed(small_config), examine.dataset_info(typed(small_config)), hardware, free_bytes=free)
    assert plan.storage == "on_device"


@pytest.mark.parametrize("views", ["all", "flip", "none"])
@pytest.mark.parametrize(
    ("storage", "hint"),
    [
        ("auto", "smaller batch"),
        ("expanded", "'streamed' needs less"),
        ("on_device", "'streamed' needs less"),
        ("streamed", "smaller batch"),
    ],
)
def test_every_storage_fits_or_says_what_needs_less(small_config, views, storage, hint):
    small_config.dataset.name, small_config.dataset.image_size = "imagenet2012", 224
    small_config.augment.views, small_config.augment.storage = views, storage
    data, hardware = examine.dataset_info(typed(small_config)), Hardware("tpu", "TPU v3", 32)
    with pytest.raises(BadSetting, match=rf"does not fit on a device: .* MB too few; .*{hint}") as error:
        choose_plan(typed(small_config), data, hardware, free_bytes=1000)
    assert ("'on_device' or" in str(error.value)) == (views != "none" and storage == "expanded")
    assert choose_plan(typed(small_config), data, hardware, free_bytes=10**14).storage == (
        "expanded" if storage == "auto" else storage
    )
