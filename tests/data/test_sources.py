"""One data set from a folder, a zip and TFDS; EuroSAT's download; and what a set's files are called."""

import hashlib
import io
import os
import sys
import zipfile

import numpy as np
import pytest
from conftest import decode_all, find_set, make_folder
from etils import epath
from PIL import Image

from largebatch.data.sources import find
from largebatch.data.sources.files import open_files, stamp_of
from largebatch.data.sources.splits import split_indices
from largebatch.util import UserError

CLASSES = {"Forest": 12, "River": 9, "SeaLake": 9}


def png(size=(8, 8), seed=0, mode="RGB") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, "PNG")
    return buffer.getvalue()


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_zip(path, entries):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def zip_of(folder, path, prefix=""):
    files = {f"{prefix}{p.relative_to(folder)}": p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return write_zip(path, files)


def write_prepared_tfds(data_dir, name, rows, class_names=None, **other_features):
    """Write a prepared array_record set without TensorFlow.

    Args:
      rows: (encoded image, label, file name) of the split train, or a dict of such rows by split.
      other_features: in place of an image, a class label and a text; those of other names are the same image again.
    """
    import tensorflow_datasets as tfds

    set_name, _, config = name.partition("/")
    folder = data_dir / name / "1.0.0"
    folder.mkdir(parents=True)
    identity = tfds.core.dataset_info.DatasetIdentity(
        name=set_name,
        config_name=config or None,
        version=tfds.core.Version("1.0.0"),
        data_dir=str(folder),
        module_name=__name__,
    )
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(),
            "label": tfds.features.ClassLabel(names=class_names),
            "filename": tfds.features.Text(),
        }
        | other_features
    )
    info = tfds.core.DatasetInfo(builder=identity, features=features, supervised_keys=("image", "label"))
    writer = tfds.core.SequentialWriter(info, max_examples_per_shard=1000, file_format="array_record")
    rows_of_split = rows if isinstance(rows, dict) else {"train": rows}
    writer.initialize_splits(list(rows_of_split))
    for split, rows in rows_of_split.items():
        others = features.keys() - {"image", "label", "filename"}
        writer.add_examples(
            {split: [{"image": i, "label": n, "filename": f, **dict.fromkeys(others, i)} for i, n, f in rows]}
        )
    writer.close_all()
    return folder


def contents_of(dataset) -> dict[str, tuple[str, bytes]]:
    """Return the class and the pixels of every example, by its id."""
    images = decode_all(dataset)
    return {
        name: (dataset.class_names[label], image.tobytes())
        for name, label, image in zip(dataset.ids, dataset.labels, images, strict=True)
    }


def test_zip_folder_and_tfds_give_the_same_splits(tmp_path):
    folder = make_folder(tmp_path / "images", CLASSES)
    outer = make_folder(tmp_path / "outer" / "2750", CLASSES).parent
    plain = zip_of(folder, tmp_path / "plain.zip")
    nested = zip_of(folder, tmp_path / "nested.zip", prefix="2750/")
    dotted = zip_of(folder, tmp_path / "dotted.zip", prefix="./")
    zipfile.ZipFile(dotted, "a").mkdir("./")
    entries = {str(p.relative_to(folder)).replace("/", "\\"): p.read_bytes() for p in folder.rglob("*.png")}
    windows = write_zip(tmp_path / "windows.zip", entries)
    names = sorted(CLASSES)
    rows = [(p.read_bytes(), names.index(p.parent.name), p.name) for p in folder.rglob("*.png")]
    np.random.default_rng(1).shuffle(rows)
    write_prepared_tfds(tmp_path / "tfds", "eurosat/rgb", rows, names)
    paths = (folder, outer, plain, nested, dotted, windows, tmp_path / "tfds")
    found = [find_set("eurosat", path) for path in paths]
    contents = [contents_of(dataset) for dataset in found]
    assert len(contents[0]) == len({image for _, image in contents[0].values()}) == 30
    assert all(other == contents[0] for other in contents[1:])
    splits = [split_ids(dataset.ids) for dataset in found]
    assert {name: len(ids) for name, ids in splits[0].items()} == {"train": 24, "val": 3, "test": 3}
    assert all(other == splits[0] for other in splits[1:])
    assert split_ids(found[0].ids, seed=1) != splits[0]


def split_ids(ids, seed=0) -> dict[str, list[str]]:
    return {name: [ids[row] for row in rows] for name, rows in split_indices(ids, seed).items()}


def test_split_is_80_10_10_of_every_example_once():
    ids = np.array([f"{i:05d}" for i in range(27_000)])
    split = split_indices(ids, 0)
    assert {name: len(rows) for name, rows in split.items()} == {"train": 21_600, "val": 2_700, "test": 2_700}
    assert sorted(np.concatenate(list(split.values()))) == list(range(27_000))
    shuffled = np.random.default_rng(0).permutation(ids)
    assert shuffled[split_indices(shuffled, 0)["val"]].tolist() == ids[split["val"]].tolist()


@pytest.mark.parametrize("kind", ["classes", "numbers", "texts"])
def test_classes_numbers_and_texts_are_labels_of_a_tfds_set(kind, tmp_path, monkeypatch):
    """No picture is decoded where labels are listed, and a second picture of each row never."""
    import tensorflow_datasets as tfds

    feature, labels = {
        "classes": (tfds.features.ClassLabel(names=["cat", "dog"]), ["cat", "dog"]),
        "numbers": (tfds.features.Scalar(np.int64), [7, 10]),
        "texts": (tfds.features.Text(), ["cat", "dog"]),
    }[kind]
    rows = [(png(seed=i), labels[i % 2], f"{i}.png") for i in range(12)]
    write_prepared_tfds(tmp_path, "tiny", rows, label=feature, preview=tfds.features.Image())
    monkeypatch.setattr(tfds.features.Image, "decode_example_np", lambda *_: pytest.fail("decoded an image"))
    dataset = find_set("tiny", tmp_path)
    assert dataset.class_names == [str(label) for label in labels]
    assert dataset.labels.tolist() == [0, 1] * 6
    assert dataset.ids[:2] == [f"{labels[0]}/0.png", f"{labels[1]}/1.png"]
    images = [np.asarray(Image.open(io.BytesIO(content))) for content, _, _ in rows]
    np.testing.assert_array_equal(decode_all(dataset), images)
    assert "tensorflow" not in sys.modules


# ---- folders and zips --------------------------------------------------------------------------------


def set_of(tmp_path, *names):
    """Return the data set of images of these names; those that end in "/" are folders."""
    files = {name: b"" if name.endswith(("/", ".txt")) else png() for name in names}
    return find_set(path=write_zip(tmp_path / "set.zip", files))


@pytest.mark.parametrize("val", ["Validation", "DEV"])
def test_split_folders_are_splits_below_any_common_folders(val, tmp_path):
    names = [f"data/set/{split}/{label}/1.png" for split in ("Train", val, "test") for label in ("cat", "dog")]
    found = set_of(tmp_path, *names)
    assert found.splits == ["train", "train", "val", "val", "test", "test"]
    assert found.ids == [f"{split}/{name}/1.png" for split in ("train", "val", "test") for name in ("cat", "dog")]
    assert (found.labels.tolist(), found.class_names) == ([0, 1] * 3, ["cat", "dog"])


@pytest.mark.parametrize(
    "folders",
    [
        ["train/a", "train/b"],  # a train folder alone publishes no split
        ["bus", "train", "test"],
        ["valid", "invalid"],
        ["20", "images"],
        ["train/test", "train/exam", "test/test", "test/exam"],
        ["train/a", "train/b", "val/a", "test/a", "test/b"],  # one of three splits lacks a class
    ],
)
def test_names_that_only_partly_look_like_splits_or_maps_are_classes(folders, tmp_path):
    found = set_of(tmp_path, *(f"{folder}/{number}.png" for folder in folders for number in range(2)))
    assert found.class_names == sorted({folder.rpartition("/")[2] for folder in folders})
    assert (found.splits is None) == (len(folders) < 4)


HIDDEN = (".x.png", "__MACOSX/a/._1.png", "a/Thumbs.db", "a/desktop.ini", "@eaDir/a/1.png", ".git/a.png")


@pytest.mark.parametrize("as_zip", [False, True])
def test_what_systems_leave_beside_images_is_passed_over(tmp_path, as_zip):
    names = ["a/1.png", "b/1.png", *HIDDEN]
    write_zip(tmp_path / "set.zip", dict.fromkeys(names, png()))
    if not as_zip:
        zipfile.ZipFile(tmp_path / "set.zip").extractall(tmp_path / "set")
    files = open_files(str(tmp_path / ("set.zip" if as_zip else "set")), "dataset.path")
    assert [name for name in files.names if not name.endswith("/")] == ["a/1.png", "b/1.png"]


def test_links_suffixes_and_sizes_of_images(tmp_path):
    real, linked = make_folder(tmp_path / "images", {"a": 6, "b": 6}), tmp_path / "linked"
    Image.open(real / "a" / "a_0.png").save(real / "a" / "tif.tif")
    Image.open(real / "a" / "a_0.png").save(real / "b" / "upper.JPG", "JPEG")
    (linked / "b").mkdir(parents=True)
    (linked / "a").symlink_to(real / "a")
    for path in (real / "b").iterdir():
        (linked / "b" / path.name).symlink_to(path)
    (linked / "b" / "back").symlink_to(linked)  # is passed over
    contents = contents_of(find_set(path=real))
    assert contents == contents_of(find_set(path=linked))
    assert len(contents) == 14
    assert contents["a/tif.tif"] == contents["a/a_0.png"]
    (real / "b" / "odd.png").write_bytes(png((8, 12)))
    small = decode_all(find_set(path=real, image_size=8))
    assert small.shape == (15, 8, 8, 3)
    means = np.asarray(Image.open(real / "a" / "a_0.png"), float).reshape(8, 2, 8, 2, 3).mean((1, 3))
    assert np.abs(small[0] - means).mean() < 20  # an average of neighbours, not a crop


def test_a_zip_in_a_bucket_is_read(tmp_path, monkeypatch):
    """Any path with :// stands for it here."""
    folder = make_folder(tmp_path / "images", CLASSES)
    content = zip_of(folder, tmp_path / "set.zip").read_bytes()

    class Remote(type(tmp_path)):
        def __fspath__(self):
            return "gs://bucket/set.zip"

        def exists(self):
            return True

        def open(self, _):
            return io.BytesIO(content)

    monkeypatch.setattr("largebatch.data.sources.files.epath.Path", Remote)
    files = open_files("gs://bucket/set.zip", "dataset.path")
    expected = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.png")}
    assert {name: files.read(name) for name in files.names} == expected


# ---- changes -----------------------------------------------------------------------------------------


def stamp(path) -> str | None:
    return stamp_of([epath.Path(path)])


def test_the_stamp_changes_with_the_files_but_not_with_those_of_systems(tmp_path):
    folder = make_folder(tmp_path / "images", {"a": 5, "b": 5})
    (tmp_path / "link").symlink_to(folder)
    before = stamp(folder)
    for name in (".DS_Store", ".hidden/x.png", "Thumbs.db", "a/desktop.ini"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"1")
    assert stamp(folder) == stamp(tmp_path / "link") == before
    stamps = {before}
    for change in (
        lambda: save(folder / "a" / "new.png", np.zeros((16, 16, 3), np.uint8)),
        (folder / "c").mkdir,
        (folder / "a" / "a_3.png").unlink,
        lambda: os.utime(folder / "a" / "a_2.png", ns=(1, 1)),
        lambda: (folder / "a").rename(folder / "d"),
    ):
        change()
        stamps.add(stamp(tmp_path / "link"))
    assert len(stamps) == 6
    assert stamp(tmp_path / "nowhere") is None


# ---- EuroSAT -----------------------------------------------------------------------------------------


def test_download_checks_the_sha256_and_is_kept(tmp_path, monkeypatch):
    archive = zip_of(make_folder(tmp_path / "images", CLASSES), tmp_path / "set.zip")
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    mirrors = {(tmp_path / "gone.zip").as_uri(): "0" * 64, archive.as_uri(): "1" * 64}
    monkeypatch.setattr(find, "EUROSAT_MIRRORS", mirrors)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "no_tfds"))
    with pytest.raises(UserError) as error:
        find_set("eurosat", cache_dir=tmp_path / "cache")
    for words in ("gone.zip cannot be fetched", f"has SHA-256 {sha256}, expected {'1' * 64}", "Give the path"):
        assert words in str(error.value)
    assert list((tmp_path / "cache").iterdir()) == []
    mirrors[archive.as_uri()] = sha256
    assert len(decode_all(find_set("eurosat", cache_dir=tmp_path / "cache"))) == 30
    archive.unlink()
    assert len(find_set("eurosat", cache_dir=tmp_path / "cache").ids) == 30


def test_eurosat_without_a_path_uses_a_prepared_tfds_set_that_is_readable(tmp_path, monkeypatch):
    rows = [(png(seed=i), i % 2, f"{i}.png") for i in range(12)]
    info = write_prepared_tfds(tmp_path, "eurosat/rgb", rows, ["a", "b"]) / "dataset_info.json"
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    archive = zip_of(make_folder(tmp_path / "images", CLASSES), tmp_path / "EuroSAT.zip")
    monkeypatch.setattr(find, "download_eurosat", lambda _: epath.Path(archive))
    assert find_set("eurosat").description == "TFDS eurosat/rgb/1.0.0 [train]"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    assert find_set("eurosat").description == str(archive)


def test_the_real_eurosat(eurosat_zip):
    dataset = find_set("eurosat", eurosat_zip)
    assert dataset.images(np.array([0, 26_999])).shape == (2, 64, 64, 3)
    assert dataset.class_names[0] == "AnnualCrop"
    assert np.bincount(dataset.labels).tolist() == [3000, 3000, 3000, 2500, 2500, 2000, 2500, 3000, 2500, 3000]
    assert dataset.ids[0] == "AnnualCrop/AnnualCrop_1.jpg"


def test_mean_colour_does_not_tell_the_synthetic_classes():
    """Means and deviations of colour differ less between classes than within them."""
    dataset = find_set("synthetic", num_examples=960)
    images = decode_all(dataset).astype(float)
    of_images = np.concatenate([images.mean((1, 2)), images.std((1, 2))], axis=1)
    of_classes = np.stack([of_images[dataset.labels == label].mean(0) for label in range(5)])
    assert np.bincount(dataset.labels).tolist() == [192] * 5
    assert (of_classes.std(0) < 0.5 * of_images.std(0)).all()
