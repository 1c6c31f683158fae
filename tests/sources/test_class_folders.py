"""Classes and published splits, from names of files alone."""

import numpy as np
import pytest
from test_map_files import save
from test_sources import zip_of

from largebatch.sources.class_folders import parse_names
from largebatch.sources.find import find_source
from largebatch.tasks.kinds import KINDS
from largebatch.util import UserError


def test_the_folders_that_hold_images_are_the_classes():
    names = [
        "2750/",
        "2750/b/2.png",
        "2750/readme.txt",
        "2750/a/1.JPG",
        "2750/b/.hidden.png",
        "__MACOSX/2750/a/1.JPG",
    ]
    parsed = parse_names(names, "dataset.path: set")
    assert parsed.names == ["2750/b/2.png", "2750/a/1.JPG"]
    assert parsed.ids == ["b/2.png", "a/1.JPG"]
    assert parsed.labels == [1, 0]
    assert parsed.class_names == ["a", "b"]
    assert parsed.splits is None


@pytest.mark.parametrize("outer", ["", "cifar10/", "data/cifar10/"])
@pytest.mark.parametrize("val", ["val", "Validation", "valid", "DEV"])
def test_split_folders_are_splits_below_any_common_folders(outer, val):
    names = [f"{outer}{split}/{label}/0001.png" for split in ("Train", val, "test") for label in ("cat", "dog")]
    parsed = parse_names(names, "dataset.path: set")
    assert parsed.names == names
    assert parsed.splits == ["train", "train", "val", "val", "test", "test"]
    assert parsed.ids == [
        "train/cat/0001.png",
        "train/dog/0001.png",
        "val/cat/0001.png",
        "val/dog/0001.png",
        "test/cat/0001.png",
        "test/dog/0001.png",
    ]
    assert parsed.labels == [0, 1] * 3
    assert parsed.class_names == ["cat", "dog"]


def test_a_train_folder_alone_publishes_no_split():
    parsed = parse_names(["train/a/1.png", "train/b/1.png"], "dataset.path: set")
    assert parsed.splits is None
    assert parsed.ids == ["a/1.png", "b/1.png"]


def test_classes_may_be_named_as_splits_are():
    parsed = parse_names(["bus/1.png", "train/1.png", "test/1.png"], "dataset.path: set")
    assert parsed.splits is None
    assert parsed.class_names == ["bus", "test", "train"]


IN_SPLITS = ("names of splits, not of classes", "train/CLASS/image.jpg", "dataset.split_file")
OF_MAPS = ("names of images and their maps, not of classes", "masks/NAME.png", "class folders")


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        (["train", "test"], IN_SPLITS),
        (["Training", "VALIDATION", "testing"], IN_SPLITS),
        (["train_1", "train-2", "test2"], IN_SPLITS),
        (["train2017", "val2017", "test-dev2017", "unlabeled2017"], IN_SPLITS),
        (["data/train", "data/dev", "data/holdout"], IN_SPLITS),
        (["train_images", "TestImages"], IN_SPLITS),
        (["images/train", "images/valid"], IN_SPLITS),
        (["train"], IN_SPLITS),
        (["images", "masks"], OF_MAPS),
        (["Images_256", "labels-256"], OF_MAPS),
        (["img", "gt"], OF_MAPS),
        (["image", "depth", "seg", "annotations"], OF_MAPS),
        (["train_images", "train_masks", "test_images"], OF_MAPS),
        (["train/images", "train/masks", "val/images", "val/masks"], OF_MAPS),
        (["images_1", "images_2"], OF_MAPS),
    ],
)
@pytest.mark.parametrize("as_zip", [False, True])
def test_folders_of_splits_or_of_maps_are_no_classes(folders, words, as_zip, tmp_path):
    root = tmp_path / "set"
    for folder in folders:
        save(root / folder / "1.png", np.zeros((4, 4, 3), np.uint8))
    (root / "labels.csv").write_text("image,label")
    where = zip_of(root, tmp_path / "set.zip") if as_zip else root
    names = sorted({folder.rpartition("/")[2] for folder in folders})
    with pytest.raises(UserError) as error:
        find_source("mine", path=str(where))
    text = str(error.value)
    assert text.startswith(f"dataset.path: {where} has its images in {', '.join(map(repr, names))}, ")
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_the_tasks_that_fit_images_with_masks_are_named(tmp_path):
    for kind in ("images", "masks"):
        save(tmp_path / kind / "1.png", np.zeros((4, 4), np.uint8))
    with pytest.raises(UserError) as error:
        find_source("mine", path=str(tmp_path))
    of_pixels = [kind.name for kind in KINDS.values() if kind.of_pixels]
    assert f"task.name {' | '.join(of_pixels)} with images/" in str(error.value)
    assert find_source("mine", path=str(tmp_path), of_pixels=True).targets.classes


@pytest.mark.parametrize(
    "folders",
    [
        ["train", "bus"],
        ["mask", "no_mask"],
        ["with_mask", "without_mask"],
        ["depth", "shallow"],
        ["valid", "invalid"],
        ["0", "1"],
        ["20", "images"],
        ["2750/train", "2750/tränen"],
        ["train/test", "train/exam", "test/test", "test/exam"],
    ],
)
def test_names_that_only_partly_look_so_are_classes(folders):
    names = [f"{folder}/{number}.png" for folder in folders for number in range(2)]
    class_names = parse_names(names, "dataset.path: set").class_names
    assert class_names == sorted({folder.rpartition("/")[2] for folder in folders})


def test_a_class_that_one_of_three_splits_lacks_is_no_error():
    names = ["train/a/1.png", "train/b/1.png", "val/a/1.png", "test/a/1.png", "test/b/1.png", "val/b/"]
    assert parse_names(names, "dataset.path: set").splits == ["train", "train", "val", "test", "test"]


TWO = ["train/a/1.png", "train/b/1.png", "test/a/1.png", "test/b/1.png"]
BAD_NAMES = {
    "set holds 'train/a/1.png' twice": [*TWO, "train/a/1.png"],
    "set: class 'c' is only in test; allowed: the same classes in every split": [*TWO, "test/c/1.png"],
    "set: class 'c' is only in train; allowed: the same classes in every split": [*TWO, "train/c/1.png"],
    "set: class 'c' has no images": [*TWO, "train/c/"],
    "set: split folder 'val' has no images": [*TWO, "val/a/1.gif"],
    "set: split folder 'test' has no images": ["train/a/1.png", "train/b/1.png", "test/"],
    "set has two folders for val, valid and validation; allowed: one": [
        *TWO,
        "valid/a/1.png",
        "validation/a/1.png",
    ],
    "set has two folders for train, Train and train; allowed: one": [*TWO, "Train/a/1.png"],
    "set has the split folders test, val; allowed: train, with val, test or both": [
        "val/a/1.png",
        "val/b/1.png",
        "test/a/1.png",
    ],
    "set has class folders at several places (extra, test, train); give one of them, or let them be train, val and "
    "test": [*TWO, "extra/a/1.png"],
    "set has class folders at several places (test/deep, train); give one of them, or let them be train, val and "
    "test": ["train/a/1.png", "train/b/1.png", "test/deep/a/1.png"],
    "set has one class, 'a'; at least 2 are needed": ["train/a/1.png", "test/a/1.png"],
    "set has no class folders; expected Class/image.jpg": ["1.png", "2.png"],
    "set: '1.png' is in no class folder; expected Class/image.jpg": ["1.png", "train/a/1.png"],
    r"set: 'a\\1.png' is in no class folder; expected Class/image.jpg": [*TWO, "a\\1.png"],
}


@pytest.mark.parametrize("message", BAD_NAMES)
def test_names_that_say_nothing_clear_are_refused(message):
    with pytest.raises(UserError) as error:
        parse_names(BAD_NAMES[message], "dataset.path: set")
    assert str(error.value) == f"dataset.path: {message}"
