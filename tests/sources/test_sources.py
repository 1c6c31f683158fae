import functools
import hashlib
import http.server
import io
import threading
import time
import zipfile

import numpy as np
import pytest
from conftest import decode_all, make_folder
from etils import epath
from PIL import Image

from largebatch.decoding.images import DecodeOptions
from largebatch.sources import find
from largebatch.sources.find import find_source
from largebatch.sources.split import split_indices
from largebatch.util import UserError

CLASSES = {"Forest": 12, "River": 9, "SeaLake": 9}


def png(size=(8, 8), seed=0, mode="RGB") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, "PNG")
    return buffer.getvalue()


def write_zip(path, entries):
    with zipfile.ZipFile(path, "w") as archive:
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
      other_features: in place of an image, a class label and a text.
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
        writer.add_examples({split: [{"image": i, "label": n, "filename": f} for i, n, f in rows]})
    writer.close_all()
    return folder


def split_contents(dataset, seed=0):
    """Per split, the id, label and pixels of every example, in the split's order."""
    return {
        name: [
            (dataset.example_ids[i], dataset.class_names[dataset.labels[i]], dataset.images[i].tobytes())
            for i in rows
        ]
        for name, rows in split_indices(dataset.example_ids, seed).items()
    }


def test_zip_folder_and_tfds_give_the_same_splits(tmp_path):
    folder = make_folder(tmp_path / "images", CLASSES)
    outer = make_folder(tmp_path / "outer" / "2750", CLASSES).parent
    plain = zip_of(folder, tmp_path / "plain.zip")
    nested = zip_of(folder, tmp_path / "nested.zip", prefix="2750/")
    names = sorted(CLASSES)
    rows = [(p.read_bytes(), names.index(p.parent.name), p.name) for p in folder.rglob("*.png")]
    np.random.default_rng(1).shuffle(rows)
    write_prepared_tfds(tmp_path / "tfds", "eurosat/rgb", rows, names)
    contents = [
        split_contents(decode_all(find_source("eurosat", path=str(path))))
        for path in (folder, outer, plain, nested, tmp_path / "tfds")
    ]
    assert {name: len(rows) for name, rows in contents[0].items()} == {"train": 24, "val": 3, "test": 3}
    for other in contents[1:]:
        assert other == contents[0]
    ids = [example_id for rows in contents[0].values() for example_id, *_ in rows]
    assert len(set(ids)) == 30
    assert split_contents(decode_all(find_source("x", path=str(folder))), seed=1) != contents[0]


def test_reading_tfds_does_not_import_tensorflow(tmp_path):
    import sys

    write_prepared_tfds(tmp_path, "tiny", [(png(seed=i), i % 2, f"{i}.png") for i in range(12)], ["a", "b"])
    dataset = decode_all(find_source("tiny", path=str(tmp_path)))
    assert dataset.example_ids[:2] == ["a/0.png", "b/1.png"]
    assert dataset.labels.tolist() == [0, 1] * 6
    assert "tensorflow" not in sys.modules


def test_a_tfds_set_that_is_not_prepared_says_how_to(tmp_path):
    with pytest.raises(UserError, match=r"'cifar10' is not prepared in .*pip install tensorflow"):
        find_source("cifar10", "tfds", str(tmp_path))


def test_a_tfds_set_prepared_as_tfrecord_is_refused(tmp_path):
    folder = write_prepared_tfds(tmp_path, "tiny", [(png(), 0, "a.png"), (png(), 1, "b.png")], ["a", "b"])
    info = folder / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(UserError, match=r"'tiny' is prepared as tfrecord, not array_record"):
        find_source("tiny", path=str(tmp_path))


@pytest.mark.parametrize("kind", ["numbers", "texts"])
@pytest.mark.xfail(
    strict=True, raises=UserError, reason="a label of a TFDS set that is a number or a text makes no classes yet"
)
def test_numbers_and_texts_are_labels_of_a_tfds_set(kind, tmp_path):
    import tensorflow_datasets as tfds

    feature, labels = {
        "numbers": (tfds.features.Scalar(np.int64), [7, 10]),
        "texts": (tfds.features.Text(), ["cat", "dog"]),
    }[kind]
    rows = [(png(seed=i), labels[i % 2], f"{i}.png") for i in range(12)]
    write_prepared_tfds(tmp_path, "tiny", rows, label=feature)
    source = find_source("tiny", path=str(tmp_path))
    assert source.class_names == [str(label) for label in labels]
    assert source.labels.tolist() == [0, 1] * 6
    assert source.ids[:2] == [f"{labels[0]}/0.png", f"{labels[1]}/1.png"]


def test_labels_and_images_of_a_tfds_set_that_are_none_are_refused(tmp_path):
    import tensorflow_datasets as tfds

    vector = tfds.features.Tensor(shape=(3,), dtype=np.float32)
    rows = [(png(seed=i), np.zeros(3, np.float32), f"{i}.png") for i in range(12)]
    write_prepared_tfds(tmp_path, "vectors", rows, label=vector)
    with pytest.raises(
        UserError, match=r"^dataset.name: TFDS set 'vectors' has label as Tensor; allowed: ClassLabel"
    ):
        find_source("vectors", path=str(tmp_path))
    tensor = tfds.features.Tensor(shape=(8, 8, 3), dtype=np.uint8)
    rows = [(np.zeros((8, 8, 3), np.uint8), i % 2, f"{i}.png") for i in range(12)]
    write_prepared_tfds(tmp_path, "tensors", rows, image=tensor, class_names=["a", "b"])
    with pytest.raises(UserError, match=r"^dataset.name: TFDS set 'tensors' has image as Tensor; allowed: Image"):
        find_source("tensors", path=str(tmp_path))


def test_file_names_of_a_tfds_set_may_be_numbers(tmp_path):
    import tensorflow_datasets as tfds

    rows = [(png(seed=i), i % 2, 100 + i) for i in range(12)]
    write_prepared_tfds(tmp_path, "tiny", rows, ["a", "b"], filename=tfds.features.Scalar(np.int64))
    assert decode_all(find_source("tiny", path=str(tmp_path))).example_ids[:2] == ["a/100", "b/101"]


def test_an_unknown_tfds_split_is_named(tmp_path):
    write_prepared_tfds(tmp_path, "tiny", [(png(), 0, "a.png"), (png(), 1, "b.png")], ["a", "b"])
    with pytest.raises(UserError, match=r"dataset.tfds_split: 'test'.*train"):
        find_source("tiny", path=str(tmp_path), tfds_split="test")


def test_split_is_80_10_10_of_every_example_once():
    ids = [f"{i:05d}" for i in range(27_000)]
    split = split_indices(ids, 0)
    assert {name: len(rows) for name, rows in split.items()} == {"train": 21_600, "val": 2_700, "test": 2_700}
    assert sorted(np.concatenate(list(split.values()))) == list(range(27_000))
    shuffled = np.random.default_rng(0).permutation(27_000)
    again = split_indices([ids[i] for i in shuffled], 0)
    assert [ids[shuffled[i]] for i in again["val"]] == [ids[i] for i in split["val"]]


def test_image_size_resizes_mixed_sizes(tmp_path):
    folder = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    (folder / "b" / "odd.png").write_bytes(png((8, 12)))
    small = decode_all(find_source("x", path=str(folder), options=DecodeOptions((8, 8)))).images
    assert small.shape == (13, 8, 8, 3)
    large = np.asarray(Image.open(folder / "a" / "a_0.png"), np.float64)
    means = large.reshape(8, 2, 8, 2, 3).mean((1, 3))
    assert np.abs(small[0] - means).mean() < 20  # an average of neighbours, not a crop


def test_all_promised_kinds_of_image_are_read(tmp_path):
    folder = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    Image.open(folder / "a" / "a_0.png").save(folder / "a" / "tif.tif")
    Image.open(folder / "a" / "a_0.png").save(folder / "b" / "upper.JPG", "JPEG")
    (folder / "readme.txt").write_text("no image")
    dataset = decode_all(find_source("x", path=str(folder)))
    assert dataset.images.shape == (14, 16, 16, 3)
    by_id = dict(zip(dataset.example_ids, dataset.images, strict=True))
    np.testing.assert_array_equal(by_id["a/tif.tif"], by_id["a/a_0.png"])


BAD_ZIPS = {
    "not a zip": (b"hello", "is not a readable zip file"),
    "traversal": ({"a/../../x.png": png()}, r"unsafe name 'a/\.\./\.\./x.png'"),
    "absolute": ({"/etc/x.png": png()}, "unsafe name '/etc/x.png'"),
    "drive": ({"C:\\a\\x.png": png()}, "unsafe name"),
    "no classes": ({"x.png": png(), "y.png": png()}, "has no class folders"),
    "no images": ({"a/readme.txt": b"x"}, "has no class folders"),
    "one class": ({"a/x.png": png()}, "has one class, 'a'"),
    "empty class": ({"a/x.png": png(), "b/x.png": png(), "c/": b""}, "class 'c' has no images"),
    "class of other files": ({"a/x.png": png(), "b/x.png": png(), "c/x.gif": b"x"}, "class 'c' has no images"),
    "several places": ({"one/a/x.png": png(), "two/a/x.png": png()}, r"several places \(one, two\)"),
}


@pytest.mark.parametrize("name", BAD_ZIPS)
def test_bad_zips_are_refused(tmp_path, name):
    content, message = BAD_ZIPS[name]
    path = tmp_path / "set.zip"
    path.write_bytes(content) if isinstance(content, bytes) else write_zip(path, content)
    with pytest.raises(UserError, match=message):
        find_source("x", path=str(path))


def test_a_zip_with_the_same_name_twice_is_refused(tmp_path):
    path = tmp_path / "set.zip"
    write_zip(path, {"a/x.png": png(), "b/x.png": png()})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("a/x.png", png())
    with pytest.raises(UserError, match=r"holds 'a/x.png' twice"):
        find_source("x", path=str(path))


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"dataset.path: .*nowhere does not exist"):
        find_source("x", "folder", str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no class folders"):
        find_source("x", path=str(tmp_path / "empty"))
    folder = make_folder(tmp_path / "images", {"a": 5, "b": 5})
    (folder / "c").mkdir()
    with pytest.raises(UserError, match="class 'c' has no images"):
        find_source("x", path=str(folder))
    with pytest.raises(UserError, match=r"dataset.path: not given"):
        find_source("x", "folder")


@pytest.mark.parametrize("keep", [0, 30, 100])
def test_a_truncated_or_corrupt_image_is_named(tmp_path, keep):
    folder = make_folder(tmp_path / "images", {"a": 5, "b": 5}, suffix=".jpg")
    broken = folder / "b" / "b_3.jpg"
    broken.write_bytes(broken.read_bytes()[:keep] if keep else b"not an image")
    with pytest.raises(UserError, match=r"b/b_3.jpg: damaged image"):
        decode_all(find_source("x", path=str(folder)))


def test_a_flipped_byte_inside_a_zip_is_named(tmp_path):
    path = zip_of(make_folder(tmp_path / "images", {"a": 5, "b": 5}), tmp_path / "set.zip")
    content = bytearray(path.read_bytes())
    content[content.find(b"IDAT") + 20] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"\w/\w_\d.png: damaged image"):
        decode_all(find_source("x", path=str(path)))


def test_fewer_than_ten_examples_are_refused():
    with pytest.raises(UserError, match="dataset: 9 images; allowed: at least 10"):
        split_indices([str(i) for i in range(9)], 0)


def test_the_fingerprint_changes_with_the_content(tmp_path):
    folder = make_folder(tmp_path / "images", {"a": 5, "b": 5})
    archive = zip_of(folder, tmp_path / "set.zip")
    before = [find_source("x", path=str(p)).fingerprint for p in (folder, archive)]
    assert before == [find_source("x", path=str(p)).fingerprint for p in (folder, archive)]
    time.sleep(0.01)
    (folder / "a" / "a_0.png").write_bytes(png((16, 16), seed=9))
    zip_of(folder, archive)
    after = [find_source("x", path=str(p)).fingerprint for p in (folder, archive)]
    assert not set(before) & set(after)
    assert find_source("x", path=str(folder), options=DecodeOptions((8, 8))).fingerprint not in before + after


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
    mirrors = (("http://127.0.0.1:1/gone.zip", "0" * 64), (f"{address}/EuroSAT.zip", sha256))
    monkeypatch.setattr(find, "EUROSAT_MIRRORS", mirrors)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "no_tfds"))
    source = find_source("eurosat", cache_dir=str(tmp_path / "cache"))
    assert len(decode_all(source).labels) == 30
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["EuroSAT.zip"]
    archive.unlink()
    assert find_source("eurosat", cache_dir=str(tmp_path / "cache")).fingerprint == source.fingerprint


def test_a_wrong_checksum_or_no_network_keeps_nothing(tmp_path, web, monkeypatch):
    root, address = web
    (root / "EuroSAT.zip").write_bytes(b"something else")
    mirrors = (("http://127.0.0.1:1/gone.zip", "0" * 64), (f"{address}/EuroSAT.zip", "1" * 64))
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
        find_source("eurosat", cache_dir=str(tmp_path / "file" / "cache"))


def test_an_unreadable_tfds_set_is_no_reason_not_to_download(tmp_path, monkeypatch):
    folder = write_prepared_tfds(tmp_path, "eurosat/rgb", [(png(), 0, "a.png"), (png(), 1, "b.png")], ["a", "b"])
    info = folder / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    archive = zip_of(make_folder(tmp_path / "images", CLASSES), tmp_path / "EuroSAT.zip")
    monkeypatch.setattr("largebatch.sources.find.download_eurosat", lambda _: epath.Path(archive))
    assert find_source("eurosat").description == str(archive)


def test_a_zip_that_is_gone_since_it_was_listed_is_named(tmp_path):
    archive = zip_of(make_folder(tmp_path / "images", CLASSES), tmp_path / "x.zip")
    source = find_source("x", path=str(archive))
    archive.unlink()
    with pytest.raises(UserError, match=r"^dataset.path: .*x.zip cannot be read \(No such file"), source.open():
        pass


def test_a_dangling_link_is_named(tmp_path):
    folder = make_folder(tmp_path / "images", {"a": 5, "b": 5})
    (folder / "a" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(UserError, match=r"a/gone.png cannot be read"):
        find_source("x", path=str(folder))


def test_eurosat_without_a_path_uses_a_prepared_tfds_set(tmp_path, monkeypatch):
    rows = [(png(seed=i), i % 2, f"{i}.png") for i in range(12)]
    write_prepared_tfds(tmp_path, "eurosat/rgb", rows, ["a", "b"])
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("largebatch.sources.find.download_eurosat", lambda _: pytest.fail("downloaded"))
    assert find_source("eurosat").description == "TFDS eurosat/rgb/1.0.0 [train]"


def test_the_real_eurosat(eurosat_zip):
    dataset = decode_all(find_source("eurosat", path=str(eurosat_zip)))
    assert dataset.images.shape == (27_000, 64, 64, 3)
    assert dataset.class_names[0] == "AnnualCrop"
    assert np.bincount(dataset.labels).tolist() == [3000, 3000, 3000, 2500, 2500, 2000, 2500, 3000, 2500, 3000]
    assert dataset.example_ids[0] == "AnnualCrop/AnnualCrop_1.jpg"
    split = split_indices(dataset.example_ids, 0)
    assert len(set(split["train"]) | set(split["val"]) | set(split["test"])) == 27_000


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
    dataset = decode_all(find_source("synthetic"))
    split = split_indices(dataset.example_ids, 0)
    parts = [(dataset.images[rows].astype(np.float64), dataset.labels[rows]) for rows in split.values()]
    assert mean_colour_accuracy(parts[0], parts[1]) < 0.6
    assert np.bincount(dataset.labels).min() == 192
    tinted = dataset.images.astype(np.float64) + 30 * dataset.labels[:, None, None, None]
    parts = [(tinted[rows], dataset.labels[rows]) for rows in split.values()]
    assert mean_colour_accuracy(parts[0], parts[1]) > 0.6  # the classifier does find colour where it tells
