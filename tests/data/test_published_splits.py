"""Sets that are published in splits keep them, whether they come from a zip, a folder or TFDS."""

import zipfile

import numpy as np
import pytest
from conftest import ROOT, find_set, typed
from ml_collections import config_dict
from test_sources import contents_of, png, write_prepared_tfds, write_zip

from largebatch.data.sources.splits import assign_splits
from largebatch.util import UserError

CIFAR10 = ROOT.parent / "shared" / "data" / "CIFAR-10-jpeg.zip"
CLASS_NAMES = ["cat", "dog"]


def published_files(counts: dict[str, int]) -> dict[str, bytes]:
    """Images by their names, as "train/cat/0001.png": so many in each class of each split."""
    names = [
        f"{split}/{label}/{i:04d}.png" for split in counts for label in CLASS_NAMES for i in range(counts[split])
    ]
    return {name: png(seed=number) for number, name in enumerate(names)}


def write_files(folder, files) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def write_tfds(folder, name: str, files, class_names, split_names) -> None:
    """The same files as a TFDS set, in another order; each row has a name without folders."""
    rows = {theirs: [] for theirs in split_names.values()}
    files = list(files.items())
    for number in np.random.default_rng(0).permutation(len(files)):
        path, content = files[number]
        split, label, file = path.split("/")[-3:]
        rows[split_names[split]].append((content, class_names.index(label), file))
    write_prepared_tfds(folder, name, rows, class_names)


def splits_of(source, **options) -> dict[str, list[str]]:
    """The ids of each split, in its order."""
    options = {"published": source.splits, **options}
    splits = assign_splits(source.ids, source.labels, source.class_names, **options)
    return {split: [source.ids[row] for row in rows] for split, rows in splits.items()}


def labels_by_id(source) -> dict[str, str]:
    return {name: source.class_names[label] for name, label in zip(source.ids, source.labels, strict=True)}


def test_zip_folder_and_tfds_give_the_same_published_splits(tmp_path):
    files = published_files({"train": 11, "validation": 2, "test": 3})
    write_files(tmp_path / "folder" / "outer", files)
    write_zip(tmp_path / "set.zip", {f"a/b/{name}": content for name, content in files.items()})
    write_tfds(
        tmp_path / "tfds", "pets", files, CLASS_NAMES, {name: name for name in ("test", "validation", "train")}
    )
    paths = [tmp_path / "folder", tmp_path / "set.zip", tmp_path / "tfds"]
    found = [find_set("pets", path) for path in paths]
    ours = {name.replace("validation/", "val/"): content for name, content in files.items()}
    for source in found:
        assert splits_of(source) == {
            split: sorted(name for name in ours if name.startswith(split)) for split in ("train", "val", "test")
        }
        contents = contents_of(source)
        assert {name: label for name, (label, _) in contents.items()} == {name: name.split("/")[1] for name in ours}
        assert contents == contents_of(found[0])
        assert splits_of(source, choice="own") == splits_of(found[0], choice="own")
    assert len({image for _, image in contents.values()}) == len(files)


def test_what_tfds_does_not_publish_is_cut_from_train_as_it_is_from_folders(tmp_path):
    files = published_files({"train": 20, "test": 3})
    write_files(tmp_path / "folder", files)
    write_tfds(tmp_path / "tfds", "pets", files, CLASS_NAMES, {"train": "train", "test": "test"})
    found = [splits_of(find_set("pets", tmp_path / name)) for name in ("folder", "tfds")]
    assert found[0] == found[1]
    assert {split: len(ids) for split, ids in found[0].items()} == {"train": 36, "val": 4, "test": 6}
    assert all(name.startswith("train/") for name in found[0]["val"])


def test_a_tfds_split_that_is_named_is_split_by_us(tmp_path):
    files = published_files({"train": 10, "test": 4})
    write_tfds(tmp_path, "pets", files, CLASS_NAMES, {"train": "train", "test": "test"})

    def find(split):
        return find_set("pets", tmp_path, tfds_split=split)

    source = find("train")
    assert source.splits is None
    assert sorted(source.ids) == sorted(name.removeprefix("train/") for name in files if name.startswith("train"))
    assert {split: len(ids) for split, ids in splits_of(source).items()} == {"train": 16, "val": 2, "test": 2}
    with pytest.raises(UserError, match=r"two images have the id '.*'; allowed: each id once"):
        splits_of(find("train+test"))


def test_other_splits_of_tfds_are_left_out_and_told(tmp_path, caplog):
    files = published_files({"train": 2, "test": 1, "extra": 3})
    names = {name: name for name in ("extra", "train", "test")}
    write_tfds(tmp_path, "pets", files, CLASS_NAMES, names)
    source = find_set("pets", tmp_path)
    assert sorted(source.ids) == sorted(name for name in files if not name.startswith("extra"))
    assert "TFDS set pets: left out the splits extra (6 images); dataset.tfds_split reads them" in caplog.text


def test_a_tfds_split_without_labels_is_left_out_and_told(tmp_path, caplog):
    rows = {
        "train": [(png(seed=i), i % 2, f"{i}.png") for i in range(40)],
        "validation": [(png(seed=100 + i), i % 2, f"{i}.png") for i in range(3)],
        "test": [(png(seed=200 + i), -1, f"{i}.png") for i in range(5)],
    }
    write_prepared_tfds(tmp_path, "tiny", rows, ["a", "b"])
    splits = splits_of(find_set("tiny", tmp_path))
    # The test images are cut from train: a tenth would be 4, but validation has 3.
    assert {name: len(ids) for name, ids in splits.items()} == {"train": 37, "val": 3, "test": 3}
    assert all(example_id.startswith("train/") for example_id in splits["test"])
    assert "left out the splits test (5 images)" in caplog.text


def test_a_tfds_set_of_one_split_is_split_by_us(tmp_path):
    alone = tmp_path / "alone"
    write_tfds(alone, "pets", published_files({"test": 6}), CLASS_NAMES, {"test": "test"})
    source = find_set("pets", alone)
    assert source.splits is None
    assert source.ids[0].count("/") == 1


# ---- the cache --------------------------------------------------------------------------------------


def cache_of(tmp_path, **dataset):
    """Ids of each split in the cache of a config, and its folder."""
    import augment
    from configs import default

    config = config_dict.ConfigDict(default.get_config())
    config.augment.cache_dir = str(tmp_path / "cache")
    config.dataset.update({"name": "pets", **dataset})
    cache = augment.prepare_cache(typed(config))
    ids = {split: cache.split(split).ids.tolist() for split in ("train", "val", "test")}
    return ids, str(cache.folder)


def test_the_cache_follows_the_choice_and_the_content_of_the_split_file(tmp_path):
    files = published_files({"train": 10, "test": 4})
    write_files(tmp_path / "images", files)
    where = {"path": str(tmp_path / "images")}
    published, first = cache_of(tmp_path, **where)
    assert published["test"] == sorted(name for name in files if name.startswith("test/"))
    own, second = cache_of(tmp_path, splits="own", **where)
    assert {split: len(ids) for split, ids in own.items()} == {"train": 24, "val": 2, "test": 2}
    table, names = tmp_path / "split.csv", sorted(files)
    folders = {first, second}
    for swap in (
        {"train": "train", "val": "val", "test": "test"},
        {"train": "train", "val": "test", "test": "val"},
    ):
        listed = {"train": names[8:], "val": names[:4], "test": names[4:8]}
        table.write_text("id,split\n" + "".join(f"{name},{swap[s]}\n" for s in listed for name in listed[s]))
        found, folder = cache_of(tmp_path, split_file=str(table), **where)
        assert found == {split: sorted(listed[swap[split]]) for split in listed}
        folders.add(folder)
    assert len(folders) == 4
    assert cache_of(tmp_path, **where) == (published, first)


# ---- CIFAR-10 ---------------------------------------------------------------------------------------


def cifar10_everywhere(tmp_path, keep):
    """Folder, zip and TFDS set of those files of CIFAR-10 for which keep(number in the class)."""
    if not CIFAR10.exists():
        pytest.skip("needs CIFAR-10 at ../shared/data/CIFAR-10-jpeg.zip")
    with zipfile.ZipFile(CIFAR10) as archive:
        names = [name for name in archive.namelist() if name.endswith(".jpg") and keep(int(name[-8:-4]))]
        files = {name: archive.read(name) for name in names}
    class_names = sorted({name.split("/")[1] for name in files})
    write_files(tmp_path / "folder", files)
    write_zip(tmp_path / "cifar10.zip", files)
    write_tfds(tmp_path / "tfds", "cifar10", files, class_names, {"train": "train", "test": "test"})
    return [find_set("cifar10", tmp_path / name) for name in ("folder", "cifar10.zip", "tfds")]


def assert_cifar10(found, num_train: int, num_val: int, num_test: int) -> None:
    expected = splits_of(found[0])
    assert [len(expected[split]) for split in ("train", "val", "test")] == [num_train, num_val, num_test]
    assert all(name.startswith("test/") == (split == "test") for split, ids in expected.items() for name in ids)
    for source in found[1:]:
        assert splits_of(source) == expected
        assert labels_by_id(source) == labels_by_id(found[0])


def test_a_sample_of_cifar10_has_the_same_splits_from_everywhere(tmp_path):
    found = cifar10_everywhere(tmp_path, lambda number: number < 3)
    assert_cifar10(found, 27, 3, 30)


@pytest.mark.full
def test_cifar10_has_the_same_splits_from_everywhere(tmp_path):
    found = cifar10_everywhere(tmp_path, lambda number: True)
    assert_cifar10(found, 45_000, 5_000, 10_000)
    direct = find_set("cifar10", CIFAR10)
    assert splits_of(direct) == splits_of(found[0])
