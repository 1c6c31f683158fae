"""Which examples are for training, validation and test: published, listed in a file, or split by us."""

import numpy as np
import pytest

from largebatch.data.sources.splits import assign_splits, read_split_file, split_indices
from largebatch.util import BadSetting

CLASS_NAMES = ["cat", "dog"]


def examples(**counts: int):
    """Ids, labels and splits of so many images of each split, in a random order."""
    names = [(split, i % 2, i) for split, count in counts.items() for i in range(count)]
    order = np.random.default_rng(0).permutation(len(names))
    names = [names[i] for i in order]
    ids = [f"{split}/{CLASS_NAMES[label]}/{i:04d}.png" for split, label, i in names]
    return ids, np.array([label for _, label, _ in names]), [split for split, _, _ in names]


def members(ids, splits) -> dict[str, list[str]]:
    return {split: [ids[row] for row in rows] for split, rows in splits.items()}


@pytest.mark.parametrize(("there", "cut"), [("test", "val"), ("val", "test")])
def test_what_is_missing_is_a_tenth_of_train(there, cut):
    ids, labels, published = examples(train=57, **{there: 8})

    def split(seed, ids=ids, labels=labels, published=published):
        return members(ids, assign_splits(ids, labels, CLASS_NAMES, published=published, seed=seed))

    found = split(0)
    assert {name: len(part) for name, part in found.items()} == {"train": 52, cut: 5, there: 8}
    assert found[there] == sorted(name for name in ids if name.startswith(there))
    train = sorted(name for name in ids if name.startswith("train"))
    assert sorted(found["train"] + found[cut]) == train
    assert all(part == sorted(part) for part in found.values())
    # The seeded permutation of the training images sorted by id, whose last tenth is cut.
    expected = np.random.default_rng(0).permutation(57)[-5:]
    assert found[cut] == sorted(train[i] for i in expected)
    assert split(1)[cut] != found[cut]
    again = np.random.default_rng(1).permutation(len(ids))
    assert found == split(0, [ids[i] for i in again], labels[again], [published[i] for i in again])


def test_own_ignores_published_splits_and_a_split_file_goes_before_them(tmp_path):
    ids, labels, published = examples(train=40, test=20)
    own = members(ids, split_indices(ids, 5))
    for options in ({"published": published, "choice": "own"}, {"published": None, "choice": "auto"}):
        assert members(ids, assign_splits(ids, labels, CLASS_NAMES, seed=5, **options)) == own
    rows = [f"{name},{['train', 'train', 'val', 'test'][i % 4]}" for i, name in enumerate(sorted(ids))]
    listed = read_split_file(write(tmp_path / "split.csv", "id,split", *rows))
    splits = assign_splits(ids, labels, CLASS_NAMES, published=published, split_file=listed)
    assert members(ids, splits)["test"] == sorted(ids)[3::4]


def test_a_class_that_is_not_measured_is_told_in_one_line(caplog):
    ids, labels, published = examples(train=12, val=4, test=4)
    assign_splits(ids, labels, CLASS_NAMES, published=published)
    assert caplog.messages == []
    labels = [{"val": 0, "test": 1}.get(split, label) for label, split in zip(labels, published, strict=True)]
    assign_splits(ids, labels, CLASS_NAMES, published=published)
    assert caplog.messages == ["dataset: no validation image of class dog; no test image of class cat"]


# ---- split files -------------------------------------------------------------------------------------

IDS = ["cat/1.tif", "cat/2.tif", "dog/1.tif", "dog/3.tif", "dog/4.tif"]


def write(path, *lines: str) -> str:
    path.write_text("\n".join(lines))
    return str(path)


def match(path: str, ids=IDS) -> dict[str, list[int]]:
    return read_split_file(path).match(ids)


@pytest.mark.parametrize("column", ["id", "Filename"])
def test_a_row_has_an_id_and_a_split_and_other_columns_do_not_matter(tmp_path, column):
    path = write(
        tmp_path / "split.csv",
        f"label,Split,{column}",
        "9,test,dog/3.tif",
        '"a, b",Validation,"dog/1.tif"',
        "",
        "9, train ,cat/2.tif",
        "9,dev,cat/1.tif",
        "9,TRAIN,dog/4.tif",
    )
    assert match(path) == {"train": [1, 4], "val": [2, 0], "test": [3]}


@pytest.mark.parametrize(
    ("ids", "lines", "expected"),
    [
        (IDS, ["cat/1.jpg,train", "2.tif,train", "dog/1,val", "3.jpg,test", "4,test"], [[0, 1], [2], [3, 4]]),
        # What stands before a point is only left off if it is a suffix.
        (["a/x.1.png", "a/x.2.png", "b/y.3.png"], ["x.1,train", "x.2.jpg,val", "b/y.3,test"], [[0], [1], [2]]),
        # A name is taken whole first.
        (["a/1.png", "a/1.tif", "b/2.png"], ["a/1.tif,train", "1.png,val", "2,test"], [[1], [0], [2]]),
    ],
)
def test_an_id_may_be_the_file_name_and_lack_its_suffix_or_have_another(tmp_path, ids, lines, expected):
    assert list(match(write(tmp_path / "s.csv", "id,split", *lines), ids).values()) == expected


def test_images_that_are_not_named_are_left_out_and_counted(tmp_path, caplog):
    path = write(tmp_path / "s.csv", "id,split", "cat/1.tif,train", "dog/1.tif,val", "dog/3.tif,test")
    with caplog.at_level("WARNING", "largebatch"):
        assert match(path) == {"train": [0], "val": [2], "test": [3]}
    assert caplog.messages == [f"{path}: left out 2 of 5 images, which it does not name"]


# ---- one file per split -----------------------------------------------------------------------------


def write_three(folder, train, val, test) -> str:
    for split, lines in (("train", train), ("val", val), ("test", test)):
        write(folder / f"eurosat-{split}.txt", *lines)
    return str(folder / "eurosat-{split}.txt")


@pytest.mark.parametrize(
    "lines",
    [
        (["2.jpg", "4.jpg"], ["cat/1.jpg"], ["3.jpg"]),  # as TorchGeo
        (["cat/2.tif,cat", "dog/4.tif,dog"], ["cat/1.tif,cat"], ["dog/3.tif,dog"]),  # as AiTLAS
        (["2.tif,image", "4.tif,image"], ["cat/1.tif,image"], ["3.tif,path"]),
        (["file,label", "2.tif,0", "4.tif,1"], ["file,label", "cat/1.tif,0"], ["file,label", "3.tif,1"]),
        ([",Filename,Label", "0,2.tif,7", "1,4.tif,8"], [",Filename", "0,cat/1.tif"], [",Filename", "0,3.tif"]),
        (["cat/2", "dog/4"], ["cat/1"], ["dog/3"]),
    ],
)
def test_a_file_per_split_lists_ids_in_its_first_column_or_a_named_one(tmp_path, lines):
    assert match(write_three(tmp_path, *lines)) == {"train": [1, 4], "val": [0], "test": [3]}


def test_a_bad_line_is_that_of_its_file_and_the_digest_is_of_all_files(tmp_path):
    path = write_three(tmp_path, ["2.tif", "4.tif"], ["cat/1.tif"], ["3.tif"])
    before = read_split_file(path).digest
    assert read_split_file(path).digest == before
    write_three(tmp_path, ["2.tif", "4.tif"], ["cat/1.tif"], ["3.tif", "2.tif"])
    assert read_split_file(path).digest != before
    with pytest.raises(BadSetting) as error:
        match(path)
    assert str(error.value) == (
        f"dataset.split_file: {tmp_path}/eurosat-test.txt, line 2: '2.tif' is in test, and in train by "
        f"{tmp_path}/eurosat-train.txt, line 1; allowed: each image once"
    )
    (tmp_path / "eurosat-val.txt").unlink()
    with pytest.raises(BadSetting, match=r"eurosat-val.txt cannot be read \(No such file"):
        match(path)
