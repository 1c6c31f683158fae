"""The splits of published sets, from a zip, a folder and TFDS."""

import itertools
import zipfile

import numpy as np
import pytest
from conftest import find_set
from test_sources import contents_of, png, write_prepared_tfds, write_zip

from largebatch.data.sources.splits import assign_splits
from largebatch.util import UserError

CLASS_NAMES = ["cat", "dog"]


def published_files(counts: dict[str, int]) -> dict[str, bytes]:
    """Return images by their names, as "train/cat/0001.png": so many in each class of each split."""
    names = [
        f"{split}/{label}/{i:04d}.png" for split in counts for label in CLASS_NAMES for i in range(counts[split])
    ]
    return {name: png(seed=number) for number, name in enumerate(names)}


def write_tfds(folder, files) -> None:
    """Write the files as a TFDS set, in another order; each row has a name without folders."""
    rows, files = {}, list(files.items())
    for number in np.random.default_rng(0).permutation(len(files)):
        path, content = files[number]
        split, label, file = path.split("/")
        rows.setdefault(split, []).append((content, CLASS_NAMES.index(label), file))
    write_prepared_tfds(folder, "pets", rows, CLASS_NAMES)


def splits_of(source, **options) -> dict[str, list[str]]:
    """Return the ids of each split, in its order."""
    options = {"published": source.splits, **options}
    splits = assign_splits(source.ids, source.labels, source.class_names, **options)
    return {split: [source.ids[row] for row in rows] for split, rows in splits.items()}


SPLITS = ("train", "val", "test")


@pytest.mark.parametrize("counts", [{"train": 11, "validation": 2, "test": 3}, {"train": 20, "test": 3}])
def test_zip_folder_and_tfds_give_the_same_published_splits(counts, tmp_path):
    """Splits that are not published are cut from train."""
    files = published_files(counts)
    write_zip(tmp_path / "set.zip", {f"a/b/{name}": content for name, content in files.items()})
    zipfile.ZipFile(tmp_path / "set.zip").extractall(tmp_path / "folder")
    write_tfds(tmp_path / "tfds", files)
    found = [find_set("pets", tmp_path / name) for name in ("folder", "set.zip", "tfds")]
    ours = {name.replace("validation/", "val/"): content for name, content in files.items()}
    expected = {split: sorted(name for name in ours if name.startswith(split)) for split in SPLITS}
    if "validation" not in counts:
        expected["val"] = splits_of(found[0])["val"]
        expected["train"] = sorted(set(expected["train"]) - set(expected["val"]))
        assert (len(expected["val"]), len(expected["train"])) == (4, 36)
    for source in found:
        assert splits_of(source) == expected
        contents = contents_of(source)
        assert {name: label for name, (label, _) in contents.items()} == {name: name.split("/")[1] for name in ours}
        assert contents == contents_of(found[0])
        assert splits_of(source, choice="own") == splits_of(found[0], choice="own")
    assert len({image for _, image in contents.values()}) == len(files)


def test_a_tfds_split_that_is_named_or_alone_is_split_by_us(tmp_path):
    files = published_files({"train": 10, "test": 4})
    write_tfds(tmp_path, files)
    source = find_set("pets", tmp_path, tfds_split="train")
    assert source.splits is None
    assert sorted(source.ids) == sorted(name.removeprefix("train/") for name in files if name.startswith("train"))
    assert {split: len(ids) for split, ids in splits_of(source).items()} == {"train": 16, "val": 2, "test": 2}
    with pytest.raises(UserError, match=r"two images have the id '.*'; allowed: each id once"):
        splits_of(find_set("pets", tmp_path, tfds_split="train+test"))
    write_tfds(tmp_path / "alone", published_files({"test": 6}))
    source = find_set("pets", tmp_path / "alone")
    assert (source.splits, source.ids[0].count("/")) == (None, 1)


def test_tfds_splits_of_other_names_or_without_labels_are_left_out_and_told(tmp_path, caplog):
    sizes = {"train": (40, None), "validation": (3, None), "test": (5, -1), "extra": (6, None)}
    rows, number = {}, itertools.count()
    for split, (size, label) in sizes.items():
        rows[split] = [(png(seed=next(number)), label or i % 2, f"{i}.png") for i in range(size)]
    write_prepared_tfds(tmp_path, "tiny", rows, ["a", "b"])
    splits = splits_of(find_set("tiny", tmp_path))
    # The test images are cut from train: a tenth would be 4, but validation has 3.
    assert {name: len(ids) for name, ids in splits.items()} == {"train": 37, "val": 3, "test": 3}
    assert all(example_id.startswith("train/") for example_id in splits["test"])
    left_out = "TFDS set tiny: left out the splits test (5 images), extra (6 images); dataset.tfds_split reads them"
    assert left_out in caplog.text
