"""One data set from a folder, a zip and TFDS; EuroSAT's download; and what a set's files are called."""

import functools
import hashlib
import http.server
import io
import os
import shutil
import sys
import threading
import zipfile

import numpy as np
import pytest
from conftest import CASES, decode_all, find_set, make_folder
from etils import epath
from PIL import Image

from largebatch.data import decode
from largebatch.data.decode import DecodeOptions
from largebatch.data.sources import find
from largebatch.data.sources.class_folders import find_images
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


def write_zip(path, entries, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def zip_of(folder, path, prefix=""):
    files = {f"{prefix}{p.relative_to(folder)}": p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return write_zip(path, files)


def write_prepared_tfds(data_dir, name, rows, class_names=None, **other_features):
    """A prepared array_record set, written without TensorFlow.

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
    """The class and the pixels of every example, by its id."""
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


# ---- TFDS --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classes", "numbers", "texts"])
def test_classes_numbers_and_texts_are_labels_of_a_tfds_set(kind, tmp_path):
    import tensorflow_datasets as tfds

    feature, labels = {
        "classes": (tfds.features.ClassLabel(names=["cat", "dog"]), ["cat", "dog"]),
        "numbers": (tfds.features.Scalar(np.int64), [7, 10]),
        "texts": (tfds.features.Text(), ["cat", "dog"]),
    }[kind]
    rows = [(png(seed=i), labels[i % 2], f"{i}.png") for i in range(12)]
    write_prepared_tfds(tmp_path, "tiny", rows, label=feature)
    dataset = find_set("tiny", tmp_path)
    assert dataset.class_names == [str(label) for label in labels]
    assert dataset.labels.tolist() == [0, 1] * 6
    assert dataset.ids[:2] == [f"{labels[0]}/0.png", f"{labels[1]}/1.png"]
    images = [np.asarray(Image.open(io.BytesIO(content))) for content, _, _ in rows]
    np.testing.assert_array_equal(decode_all(dataset), images)
    assert "tensorflow" not in sys.modules


def test_only_what_is_asked_for_is_decoded_of_a_tfds_set(tmp_path, monkeypatch):
    """Labels are listed without images, and a second picture of each row is never decoded."""
    import tensorflow_datasets as tfds

    rows = [(png(seed=i), i % 2, 100 + i) for i in range(12)]
    features = {"filename": tfds.features.Scalar(np.int64), "preview": tfds.features.Image()}
    write_prepared_tfds(tmp_path, "tiny", rows, ["a", "b"], **features)
    monkeypatch.setattr(tfds.features.Image, "decode_example_np", lambda *_: pytest.fail("decoded an image"))
    dataset = find_set("tiny", tmp_path)
    assert dataset.ids[:2] == ["a/100", "b/101"]
    assert decode_all(dataset).shape == (12, 8, 8, 3)


def test_split_is_80_10_10_of_every_example_once():
    ids = [f"{i:05d}" for i in range(27_000)]
    split = split_indices(ids, 0)
    assert {name: len(rows) for name, rows in split.items()} == {"train": 21_600, "val": 2_700, "test": 2_700}
    assert sorted(np.concatenate(list(split.values()))) == list(range(27_000))
    shuffled = np.random.default_rng(0).permutation(27_000)
    again = split_indices([ids[i] for i in shuffled], 0)
    assert [ids[shuffled[i]] for i in again["val"]] == [ids[i] for i in split["val"]]


# ---- folders and zips --------------------------------------------------------------------------------


def test_image_size_resizes_mixed_sizes(tmp_path):
    folder = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    (folder / "b" / "odd.png").write_bytes(png((8, 12)))
    small = decode_all(find_set(path=folder, image_size=8))
    assert small.shape == (13, 8, 8, 3)
    large = np.asarray(Image.open(folder / "a" / "a_0.png"), np.float64)
    means = large.reshape(8, 2, 8, 2, 3).mean((1, 3))
    assert np.abs(small[0] - means).mean() < 20  # an average of neighbours, not a crop


def test_all_promised_kinds_of_image_are_read(tmp_path):
    folder = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    Image.open(folder / "a" / "a_0.png").save(folder / "a" / "tif.tif")
    Image.open(folder / "a" / "a_0.png").save(folder / "b" / "upper.JPG", "JPEG")
    (folder / "readme.txt").write_text("no image")
    contents = contents_of(find_set(path=folder))
    assert len(contents) == 14
    assert contents["a/tif.tif"] == contents["a/a_0.png"]


def set_of(tmp_path, *names):
    """The data set of images of these names; those that end in "/" are folders."""
    files = {name: b"" if name.endswith(("/", ".txt")) else png() for name in names}
    return find_set(path=write_zip(tmp_path / "set.zip", files))


def test_the_folders_that_hold_images_are_the_classes(tmp_path):
    found = set_of(tmp_path, "2750/", "2750/b/2.png", "2750/readme.txt", "2750/a/1.JPG")
    assert found.ids == ["b/2.png", "a/1.JPG"]
    assert found.labels.tolist() == [1, 0]
    assert (found.class_names, found.splits) == (["a", "b"], None)


@pytest.mark.parametrize("outer", ["", "data/cifar10/"])
@pytest.mark.parametrize("val", ["val", "Validation", "valid", "DEV"])
def test_split_folders_are_splits_below_any_common_folders(outer, val, tmp_path):
    labels = ("cat", "dog")
    found = set_of(
        tmp_path, *(f"{outer}{split}/{name}/1.png" for split in ("Train", val, "test") for name in labels)
    )
    assert found.splits == ["train", "train", "val", "val", "test", "test"]
    assert found.ids == [f"{split}/{name}/1.png" for split in ("train", "val", "test") for name in labels]
    assert (found.labels.tolist(), found.class_names) == ([0, 1] * 3, ["cat", "dog"])


@pytest.mark.parametrize(
    "folders",
    [
        ["train/a", "train/b"],  # a train folder alone publishes no split
        ["bus", "train", "test"],
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
def test_names_that_only_partly_look_like_splits_or_maps_are_classes(folders, tmp_path):
    found = set_of(tmp_path, *(f"{folder}/{number}.png" for folder in folders for number in range(2)))
    assert found.class_names == sorted({folder.rpartition("/")[2] for folder in folders})
    assert (found.splits is None) == (len(folders) < 4)


def test_a_class_that_one_of_three_splits_lacks_is_no_error(tmp_path):
    found = set_of(
        tmp_path, "train/a/1.png", "train/b/1.png", "val/a/1.png", "test/a/1.png", "test/b/1.png", "val/b/"
    )
    assert found.splits == ["train", "train", "val", "test", "test"]


HIDDEN = (".x.png", "__MACOSX/a/._1.png", "a/Thumbs.db", "a/desktop.ini", "@eaDir/a/1.png", ".git/a.png")


@pytest.mark.parametrize("as_zip", [False, True])
def test_what_systems_leave_beside_images_is_passed_over(tmp_path, as_zip):
    names = ["a/1.png", "b/1.png", *HIDDEN]
    write_zip(tmp_path / "set.zip", dict.fromkeys(names, png()))
    if not as_zip:
        zipfile.ZipFile(tmp_path / "set.zip").extractall(tmp_path / "set")
    files = open_files(str(tmp_path / ("set.zip" if as_zip else "set")), "dataset.path")
    assert [name for name in files.names if not name.endswith("/")] == ["a/1.png", "b/1.png"]


def test_cases_that_are_read():
    if not CASES.exists():
        pytest.skip(f"the cases are not at {CASES}")
    maps = find_set(path=CASES / "thumbs", of_pixels=True)
    assert len(maps.ids) == len(list((CASES / "thumbs" / "images").glob("*.png")))
    windows = find_set(path=CASES / "backslash.zip")
    assert windows.ids[0] == "cat/cat0_000.png"
    assert len(decode_all(windows)) == len(zipfile.ZipFile(CASES / "backslash.zip").namelist())


def test_class_folders_and_images_may_be_links(tmp_path):
    real = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    linked = tmp_path / "linked"
    (linked / "b").mkdir(parents=True)
    (linked / "a").symlink_to(real / "a")
    for path in (real / "b").iterdir():
        (linked / "b" / path.name).symlink_to(path)
    assert contents_of(find_set(path=linked)) == contents_of(find_set(path=real))


@pytest.mark.timeout(60)
def test_links_in_a_circle_add_nothing(tmp_path):
    folder = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    plain = contents_of(find_set(path=folder))
    (folder / "a" / "again").symlink_to(folder / "a")
    (folder / "a" / "other").symlink_to(folder / "b")
    (folder / "b" / "other").symlink_to(folder / "a")
    (folder / "b" / "above").symlink_to(tmp_path)
    assert len(open_files(str(folder), "dataset.path").names) < 40
    shutil.rmtree(folder)
    folder = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    (folder / "a" / "again").symlink_to(folder / "a")
    (folder / "a" / "above").symlink_to(tmp_path)
    assert contents_of(find_set(path=folder)) == plain
    assert len(find_images(str(folder), ["a", "b"], DecodeOptions()).ids) == 12


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_entry_is_read_as_zipfile_reads_it(tmp_path, method, monkeypatch):
    path, long_name = tmp_path / "x.zip", "x" * 999
    contents = {"a/0": b"", "a/1": b"abc" * 1000, "ä/2": bytes(range(256)) * 9, long_name: b"x"}
    write_zip(path, contents, method)
    path.write_bytes(b"something before the zip" + path.read_bytes())
    files = open_files(str(path), "dataset.path")
    assert files.names == list(contents)
    if method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # without zipfile, which is slow
        del contents["a/0"]
        monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("read by zipfile"))
    assert [files.read(name) for name in contents] == list(contents.values())


def test_a_zip_in_a_bucket_is_read(tmp_path, monkeypatch):
    """Its file has no descriptor; any path with :// stands for it here."""
    folder = make_folder(tmp_path / "images", CLASSES)
    content = zip_of(folder, tmp_path / "set.zip").read_bytes()

    class Remote:
        def __fspath__(self):
            return "gs://bucket/set.zip"

        def exists(self):
            return True

        def is_dir(self):
            return False

        def open(self, _):
            return io.BytesIO(content)

    monkeypatch.setattr("largebatch.data.sources.files.epath.Path", lambda _: Remote())
    files = open_files("gs://bucket/set.zip", "dataset.path")
    assert {name: files.read(name) for name in files.names} == {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.png")
    }


def test_images_of_any_layout_are_found_with_the_labels_that_are_known(tmp_path):
    folder = make_folder(tmp_path / "images", {"a": 2, "c": 1})
    save(folder / "0.png", np.zeros((16, 16, 3), np.uint8))
    packed = zip_of(folder, tmp_path / "images.zip")
    for path in (folder, packed):
        found = find_images(str(path), ["a", "b"], DecodeOptions())
        assert found.ids == ["0.png", "a/a_0.png", "a/a_1.png", "c/c_0.png"]
        assert found.labels.tolist() == [-1, 0, 0, -1]
        assert found.images(np.array([0])).max() == 0


def test_only_the_first_image_and_those_asked_for_are_decoded(tmp_path, monkeypatch):
    folder, decoded, read = make_folder(tmp_path / "images", {"a": 6, "b": 6}), [], decode.decode
    monkeypatch.setattr(decode, "decode", lambda name, *rest: decoded.append(name) or read(name, *rest))
    found = find_images(str(folder), ["a", "b"], DecodeOptions())
    found.images(np.array([3, 4]))
    assert sorted(decoded) == ["a/a_0.png", "a/a_3.png", "a/a_4.png"]


# ---- changes -----------------------------------------------------------------------------------------


def stamp(*paths) -> str | None:
    return stamp_of([epath.Path(path) for path in paths])


CHANGES = {
    "add": lambda root: save(root / "a" / "new.png", np.zeros((16, 16, 3), np.uint8)),
    "add an empty class": lambda root: (root / "c").mkdir(),
    "delete": lambda root: (root / "a" / "a_3.png").unlink(),
    "move": lambda root: (root / "a" / "a_3.png").rename(root / "b" / "a_3.png"),
    "rename a class": lambda root: (root / "a").rename(root / "c"),
    "replace": lambda root: (root / "a" / "a_3.png").write_bytes(png((16, 16), seed=99)),
    "touch": lambda root: os.utime(root / "a" / "a_3.png", ns=(1, 1)),
    "dangle": lambda root: (root / "a" / "x.png").symlink_to(root / "nowhere"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_stamp_changes_with_the_files(tmp_path, change):
    folder = make_folder(tmp_path / "images", {"a": 5, "b": 5})
    (tmp_path / "link").symlink_to(folder)
    before = stamp(folder)
    assert before == stamp(folder) == stamp(tmp_path / "link")
    CHANGES[change](folder)
    assert stamp(folder) not in (before, None)
    assert stamp(folder) == stamp(tmp_path / "link")


def test_the_stamp_of_zips_of_hidden_files_and_of_nothing(tmp_path):
    folder = make_folder(tmp_path / "images", {"a": 5, "b": 5})
    archive = zip_of(folder, tmp_path / "set.zip")
    before = stamp(folder), stamp(archive)
    for name in (".DS_Store", ".hidden/x.png", "Thumbs.db", "a/desktop.ini"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"1")
    assert (stamp(folder), stamp(archive)) == before
    archive.write_bytes(archive.read_bytes() + b"0")
    assert stamp(archive) != before[1]
    assert stamp(tmp_path / "nowhere") is None
    assert stamp() is not None
    assert stamp(tmp_path / "nowhere", archive) not in (None, stamp(archive))


# ---- EuroSAT -----------------------------------------------------------------------------------------


@pytest.fixture
def web(tmp_path):
    """A folder served on loopback, and its address."""
    root = tmp_path / "web"
    root.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield root, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_download_checks_the_sha256_and_is_kept(tmp_path, web, monkeypatch):
    root, address = web
    archive = zip_of(make_folder(tmp_path / "images", CLASSES), root / "EuroSAT.zip")
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    mirrors = {"http://127.0.0.1:1/gone.zip": "0" * 64, f"{address}/EuroSAT.zip": sha256}
    monkeypatch.setattr(find, "EUROSAT_MIRRORS", mirrors)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "no_tfds"))
    assert len(decode_all(find_set("eurosat", cache_dir=tmp_path / "cache"))) == 30
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["EuroSAT.zip"]
    archive.unlink()
    assert len(find_set("eurosat", cache_dir=tmp_path / "cache").ids) == 30


def test_a_wrong_checksum_or_no_network_keeps_nothing(tmp_path, web, monkeypatch):
    root, address = web
    (root / "EuroSAT.zip").write_bytes(b"something else")
    mirrors = {"http://127.0.0.1:1/gone.zip": "0" * 64, f"{address}/EuroSAT.zip": "1" * 64}
    monkeypatch.setattr(find, "EUROSAT_MIRRORS", mirrors)
    with pytest.raises(UserError) as error:
        find.download_eurosat(epath.Path(tmp_path / "cache"))
    found = hashlib.sha256(b"something else").hexdigest()
    assert "gone.zip cannot be fetched" in str(error.value)
    assert f"has SHA-256 {found}, expected {'1' * 64}" in str(error.value)
    assert "Give the path" in str(error.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_download_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "no_tfds"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"augment.cache_dir: cannot write .*Not a directory"):
        find_set("eurosat", cache_dir=tmp_path / "file" / "cache")


def test_an_unreadable_tfds_set_is_no_reason_not_to_download(tmp_path, monkeypatch):
    folder = write_prepared_tfds(tmp_path, "eurosat/rgb", [(png(), 0, "a.png"), (png(), 1, "b.png")], ["a", "b"])
    info = folder / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    archive = zip_of(make_folder(tmp_path / "images", CLASSES), tmp_path / "EuroSAT.zip")
    monkeypatch.setattr(find, "download_eurosat", lambda _: epath.Path(archive))
    assert find_set("eurosat").description == str(archive)


def test_eurosat_without_a_path_uses_a_prepared_tfds_set(tmp_path, monkeypatch):
    rows = [(png(seed=i), i % 2, f"{i}.png") for i in range(12)]
    write_prepared_tfds(tmp_path, "eurosat/rgb", rows, ["a", "b"])
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(find, "download_eurosat", lambda _: pytest.fail("downloaded"))
    assert find_set("eurosat").description == "TFDS eurosat/rgb/1.0.0 [train]"


def test_the_real_eurosat(eurosat_zip):
    dataset = find_set("eurosat", eurosat_zip)
    assert decode_all(dataset).shape == (27_000, 64, 64, 3)
    assert dataset.class_names[0] == "AnnualCrop"
    assert np.bincount(dataset.labels).tolist() == [3000, 3000, 3000, 2500, 2500, 2000, 2500, 3000, 2500, 3000]
    assert dataset.ids[0] == "AnnualCrop/AnnualCrop_1.jpg"
    split = split_indices(dataset.ids, 0)
    assert len(set(split["train"]) | set(split["val"]) | set(split["test"])) == 27_000


def test_places_are_what_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    (tmp_path / "data" / "pets").mkdir(parents=True)

    def places(name="mine", **fields):
        from largebatch.config.fields import DatasetConfig

        found = find.places_of(DatasetConfig(name=name, **fields), str(tmp_path / "cache"))
        return [str(path.relative_to(tmp_path)) for path in found]

    assert places("synthetic") == places("scenes") == places(source="synthetic") == []
    assert places(path=str(tmp_path / "x.zip")) == places("scenes", path=str(tmp_path / "x.zip")) == ["x.zip"]
    assert places("pets", path=str(tmp_path / "data")) == ["data/pets"]
    assert places("pets", path=str(tmp_path / "data"), source="folder") == ["data"]
    assert places("pets") == ["tfds/pets"]
    assert places("eurosat") == ["tfds/eurosat/rgb", "cache/EuroSAT.zip"]
    assert places("eurosat", source="tfds") == ["tfds/eurosat/rgb"]


def mean_colour_accuracy(train, val) -> float:
    """A softmax regression on each image's mean and deviation of colour, trained to convergence in NumPy."""
    (x, y), (test_x, test_y) = ((d[0].mean((1, 2)), d[1]) for d in (train, val))
    mean, deviation = x.mean(0), x.std(0)
    x, test_x = ((np.c_[(v - mean) / deviation, np.ones(len(v))]) for v in (x, test_x))
    x, test_x = (np.concatenate([v, v[:, :3] ** 2], axis=1) for v in (x, test_x))
    weights, targets = np.zeros((x.shape[1], y.max() + 1)), np.eye(y.max() + 1)[y]
    for _ in range(2000):
        scores = np.exp(x @ weights)
        weights += 0.2 * x.T @ (targets - scores / scores.sum(1, keepdims=True)) / len(x)
    return float(((test_x @ weights).argmax(1) == test_y).mean())


def test_mean_colour_does_not_tell_the_synthetic_classes():
    dataset = find_set("synthetic", num_examples=960)
    images, labels, split = decode_all(dataset), dataset.labels, split_indices(dataset.ids, 0)
    parts = [(images[rows].astype(np.float64), labels[rows]) for rows in split.values()]
    assert mean_colour_accuracy(parts[0], parts[1]) < 0.6
    assert np.bincount(labels).min() == 192
    tinted = images.astype(np.float64) + 30 * labels[:, None, None, None]
    parts = [(tinted[rows], labels[rows]) for rows in split.values()]
    assert mean_colour_accuracy(parts[0], parts[1]) > 0.6  # the classifier does find colour where it tells
