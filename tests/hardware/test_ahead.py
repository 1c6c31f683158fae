"""Programs are compiled ahead for the shapes that a run has."""

import jax
import numpy as np
import pytest
from conftest import typed

import examine
from build import ProgramCache
from largebatch.data import sharded_split
from largebatch.data.placement import train_shapes
from largebatch.hardware.chips import TPUS, Hardware
from largebatch.hosts import memory
from largebatch.util import BadSetting
from plan import choose_plan


def shapes(tree):
    """Return the shapes and dtypes of a device's arrays."""
    return jax.tree.map(lambda x: (tuple(x.shape), np.dtype(x.dtype)), tree)


def without_devices(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


@pytest.mark.parametrize(("storage", "stays"), [("expanded", True), ("on_device", False), ("streamed", False)])
def test_data_have_the_shapes_that_are_compiled_for(small_config, monkeypatch, storage, stays):
    monkeypatch.setattr(sharded_split, "stays_on_devices", lambda *_: stays)
    monkeypatch.setattr(sharded_split, "BLOCK_BYTES", 1)
    small_config.augment.storage = storage
    plan, data = ProgramCache().load(typed(small_config))
    layout, size = plan.data.layout, plan.micro_batches.predicted_at_once
    train = train_shapes(layout, plan.sharding, plan.stored_views, plan.buffer_rows)
    assert shapes(train) == shapes(without_devices(data.train.arrays))
    block = sharded_split.block_shapes(layout, plan.num_devices, size, 0)
    assert shapes(block) == shapes(without_devices(next(data.validation.blocks(size))))


def test_all_programs_of_a_run_are_lowered(small_config):
    small_config.sync.mode, small_config.eval.view_average = "post_local", True
    small_config.sync.every = small_config.sync.start_step = 2
    plan = ProgramCache().load(typed(small_config)).plan
    lowered = examine.lower_plan(plan, memory.available_bytes(), jax.devices())
    assert list(lowered) == ["step", "local step", "average", "validation", "validation of copies"]


@pytest.mark.parametrize(
    ("name", "splits", "train", "val", "test"),
    [
        ("eurosat", "auto", 21_600, 2_700, 2_700),
        ("cifar10", "published", 45_000, 5_000, 10_000),
        ("cifar10", "own", 48_000, 6_000, 6_000),
        ("imagenet2012", "auto", 1_231_167, 50_000, 50_000),
    ],
)
def test_a_published_set_that_is_not_here_has_its_splits(small_config, name, splits, train, val, test):
    small_config.dataset.name, small_config.dataset.splits = name, splits
    sizes = {"train": train, "val": val, "test": test}
    assert examine.dataset_info(typed(small_config)).layout.counts == sizes


def test_listed_splits_of_a_set_that_is_not_here(small_config, tmp_path):
    small_config.dataset.name, small_config.dataset.splits = "eurosat", "published"
    with pytest.raises(BadSetting, match=r"^dataset\.splits: "):
        examine.dataset_info(typed(small_config))
    small_config.dataset.splits = "auto"
    small_config.dataset.name, small_config.dataset.tfds_split = "cifar10", "train+test"
    assert examine.dataset_info(typed(small_config)).num_images == 48_000
    small_config.dataset.tfds_split, path = None, tmp_path / "split.csv"
    path.write_text("\n".join(["id,split", *(f"{i}.png,{'train' if i < 80 else 'val'}" for i in range(90))]))
    small_config.dataset.split_file = str(path)
    with pytest.raises(BadSetting, match=r"^dataset.split_file: .*split.csv: no test images"):
        examine.dataset_info(typed(small_config))
    path.write_text(path.read_text() + "\n90.png,test")
    counts = examine.dataset_info(typed(small_config)).layout.counts
    assert counts == {"train": 80, "val": 10, "test": 1}


@pytest.mark.parametrize(
    ("storage", "hint"),
    [
        ("auto", "smaller batch"),
        ("expanded", "'on_device' or 'streamed' needs less"),
        ("on_device", "'streamed' needs less"),
        ("streamed", "smaller batch"),
    ],
)
def test_every_storage_fits_or_says_by_how_much_it_does_not_and_what_helps(small_config, storage, hint):
    small_config.dataset.name, small_config.dataset.image_size = "imagenet2012", 224
    small_config.augment.storage = storage
    config, hardware = typed(small_config), Hardware("tpu", "TPU v3", 32)
    data = examine.dataset_info(config)

    def chosen(free_bytes):
        return choose_plan(config, data, hardware, free_bytes=free_bytes).storage

    with pytest.raises(BadSetting, match=rf"does not fit on a device: .* MB too few; .*{hint}"):
        chosen(1000)
    assert chosen(10**14) == ("expanded" if storage == "auto" else storage)
    if storage == "auto":
        assert chosen(TPUS["TPU v3"].memory_bytes) == "on_device"
