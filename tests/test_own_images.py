"""Own images, as their owner sees them: what a start says of them, and which run it goes on with."""

import contextlib
import shutil

import numpy as np
import pytest
from conftest import assert_one_line_error, make_folder, make_small_config, run_script
from test_changed_files import Maps, OwnImages
from test_map_files import save

import augment
import train


def configure(config, path, cache_dir):
    """Sets a config of own images; a run of it takes seconds."""
    config.dataset.name, config.dataset.path = "mine", str(path)
    config.augment.cache_dir, config.augment.views = str(cache_dir), "flip"
    config.train.outer_steps = 1
    return config


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A folder with images, a finished run on them, and what it printed."""
    root = tmp_path_factory.mktemp("first")
    config = configure(make_small_config(root), OwnImages(root).path, root / "caches")
    with (root / "printed").open("w") as file, contextlib.redirect_stdout(file):
        train.train_and_evaluate(config, str(root / "run"))
    return root


@pytest.fixture
def own(small_config, first, tmp_path):
    """The config of a copy of these images, with a copy of the run and caches of its own."""
    for name in ("images", "run"):
        shutil.copytree(first / name, tmp_path / name)
    return configure(small_config, tmp_path / "images", tmp_path / "caches")


def test_a_run_names_its_classes_with_their_images(first):
    assert "training images of 2 classes: a 10, b 10" in (first / "printed").read_text().splitlines()


def test_of_many_classes_the_first_ten_are_named_in_one_line(small_config, tmp_path):
    names = ["[red]", "a\u202eb", *(f"class {letter}" for letter in "abcdefghij")]
    counts = {name: 10 if name == "[red]" else 5 for name in names}
    make_folder(tmp_path / "images", counts)
    rows = ["id,split"]
    for name, count in counts.items():
        splits = ["val", "test", *["train"] * (count - 2)]
        rows += [f"{name}/{name}_{number}.png,{split}" for number, split in enumerate(splits)]
    (tmp_path / "split.csv").write_text("\n".join(rows))
    configure(small_config, tmp_path / "images", tmp_path / "caches")
    small_config.dataset.split_file = str(tmp_path / "split.csv")
    shown = ", ".join(f"class {letter} 3" for letter in "abcdefgh")
    line = train.what_is_learned(augment.prepare_cache(small_config))
    assert line == f"training images of 12 classes: [red] 8, a\\u202eb 3, {shown} and 2 more"


def test_a_run_names_the_classes_of_its_masks(small_config, tmp_path):
    maps = Maps(tmp_path)
    maps.names()
    small_config.task.name, small_config.dataset.name = "segmentation", "mine"
    small_config.dataset.path, small_config.augment.cache_dir = str(maps.path), str(tmp_path / "caches")
    assert train.what_is_learned(augment.prepare_cache(small_config)) == "masks of 2 classes: ground, tree"


# ---- by the command -----------------------------------------------------------------------------------


def flags_of(config, **changed) -> list[str]:
    values = {
        "dataset.name": "mine",
        "dataset.path": config.dataset.path,
        "augment.cache_dir": config.augment.cache_dir,
        "train.inner_steps": 1,
        "train.outer_steps": 1,
        "batch.micro_batch_size": 16,
        **changed,
    }
    return [f"--config.{name}={value}" for name, value in values.items()]


def test_a_set_without_classes_is_refused_and_nothing_is_written(own, tmp_path):
    for name, other in (("a", "train"), ("b", "test_1")):
        (tmp_path / "images" / name).rename(tmp_path / "images" / other)
    result = run_script("train.py", "--workdir", tmp_path / "new", *flags_of(own))
    words = (
        "dataset.path: ",
        "has its images in 'test_1', 'train', which are names of splits",
        "allowed: class folders",
    )
    assert_one_line_error(result, *words)
    assert not (tmp_path / "new").exists()


def test_masks_with_unlabelled_pixels_are_refused_and_leave_no_cache(own, tmp_path):
    maps = Maps(tmp_path)
    mask = np.eye(16, dtype=np.uint8)
    mask[0] = 255
    for number in range(12):
        save(maps.path / "masks" / f"{number}.png", mask)
    fields = {"dataset.path": maps.path, "task.name": "segmentation", "model.name": "unet_tiny"}
    result = run_script("train.py", "--workdir", tmp_path / "new", *flags_of(own, **fields))
    assert_one_line_error(result, ".png has the values 0, 1 and 255; allowed: 0 and 1, or 0 and 255, ")
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "caches").iterdir()] == []
