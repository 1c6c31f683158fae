"""Classes and published splits, from names of files alone."""

import pytest

from largebatch.errors import UserError
from largebatch.sources.class_folders import parse_names


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
