"""Bad sets of images: each is answered by one line that says what was found, where, and what is allowed."""

import shutil

import imagecodecs
import numpy as np
import pytest
from conftest import decode_all, find_set
from test_sources import png, save, write_prepared_tfds, write_zip
from test_splits import IDS

from largebatch.data.sources.splits import assign_splits, read_split_file
from largebatch.util import UserError


def error_of(find) -> str:
    """Return the one line that finding and decoding a set ends in."""
    with pytest.raises(UserError) as error:
        decode_all(find())
    line = str(error.value)
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    return line


# ---- zips ------------------------------------------------------------------------------------------------

TWO = ["train/a/1.png", "train/b/1.png", "test/a/1.png", "test/b/1.png"]
NAMES = {
    "has no class folders; expected Class/image.jpg": ["1.png", "2.png"],
    "'1.png' is in no class folder; expected Class/image.jpg": ["1.png", "train/a/1.png"],
    "has one class, 'a'; at least 2 are needed": ["train/a/1.png", "test/a/1.png"],
    "class 'c' is only in test; allowed: the same classes in every split": [*TWO, "test/c/1.png"],
    "class 'd' has no images": ["a/1.png", "b/1.png", "d/1.gif"],
    "split folder 'val' has no images": [*TWO, "val/a/1.gif"],
    "has images in the folders Train, test, train; give one of them, or let": [*TWO, "Train/a/1.png"],
    "has images in the folders test, val; give one of them, or let them be train": ["val/a/1.png", "test/a/1.png"],
    r"holds the unsafe name 'a/x\ny.png'; allowed: no control characters, UTF-8": ["a/x\ny.png", "b/1.png"],
    "is not a readable zip file (File is not a zip file)": [],
    "a/1.png cannot be read (Bad CRC-32 for file": ["a/1.png", "b/1.png"],
}


@pytest.mark.parametrize("message", NAMES)
def test_bad_zips(message, tmp_path):
    path = write_zip(tmp_path / "set.zip", dict.fromkeys(NAMES[message], png()))
    content = bytearray(path.read_bytes())
    if "CRC-32" in message:
        content[content.find(b"IDAT") + 20] ^= 1
    path.write_bytes(content if NAMES[message] else b"hello")
    line = error_of(lambda: find_set(path=path))
    assert line.startswith(f"dataset.path: {path}")
    assert message in line


# ---- folders -----------------------------------------------------------------------------------------

SIZE_OF_IMAGES = (10, 12)  # height, width
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (4, *SIZE_OF_IMAGES, 3), np.uint8)
DEEP = IMAGES[0].astype(np.uint16)
MASKS = RNG.integers(0, 2, (4, *SIZE_OF_IMAGES), np.uint8)
DEPTHS = RNG.integers(0, 65_536, (4, *SIZE_OF_IMAGES), np.uint16)


@pytest.fixture
def folder(tmp_path):
    """Ten images in two classes."""
    for number in range(10):
        save(tmp_path / "set" / "ab"[number % 2] / f"{number}.png", IMAGES[number % 4])
    return tmp_path / "set"


def put(name, pixels):
    """Return the function that saves this picture in a set."""
    return lambda root: save(root / name, pixels)


def write(name, content: bytes):
    return lambda root: (root / name).write_bytes(content)


def link(name):
    return lambda root: (root / name).symlink_to(root / "nowhere")


FILES = {
    "b/3.png: damaged image (no JPEG, PNG, TIFF, GIF, BMP or WebP)": write("b/3.png", b"not an image"),
    "b/3.png: damaged image (": write("b/3.png", png()[:60]),
    "b/4.png cannot be read (No such file or directory)": link("b/4.png"),
    ": c is a link to nowhere": link("c"),
    "b/3.png has 12x9 pixels of 3 channels of 8 bits, a/0.png has 12x10 pixels": put("b/3.png", IMAGES[0][1:]),
    "b/3.png has 12x10 pixels of 1 channels of 8 bits, a/0.png": put("b/3.png", IMAGES[0][..., 0]),
    "b/3.png has 12x10 pixels of 3 channels of 16 bits": write("b/3.png", imagecodecs.png_encode(DEEP)),
}
FIELDS = {
    "dataset.path: nowhere does not exist": {"path": "nowhere"},
    "is not a folder; dataset.source 'folder' needs one": {"path": __file__, "source": "folder"},
    "dataset.path: not given; dataset.source 'folder' of 'mine' needs one": {"path": None, "source": "folder"},
    "dataset.source: 'zip'; allowed: auto | synthetic with 'scenes'": {"name": "scenes", "source": "zip"},
    "dataset.image_size: (16, 20); allowed: a square with scenes": {"name": "scenes", "image_size": (16, 20)},
    "dataset.channels: 1; allowed: 3 with scenes": {"name": "scenes", "channels": 1},
    "dataset.name: TFDS set 'cifar10' is not prepared in ": {"name": "cifar10", "path": ".", "source": "tfds"},
    "3 channels; allowed: 13, by dataset.channels": {"channels": 13},
    "120 pixels; allowed: up to 119, or a larger": {"max_image_pixels": 119},
}


@pytest.mark.parametrize("message", [*FILES, *FIELDS])
def test_bad_files_and_fields(message, folder):
    if message in FILES:
        FILES[message](folder)
    fields = {"path": folder} | FIELDS.get(message, {})
    assert message in error_of(lambda: find_set(**fields))


# ---- masks and depths --------------------------------------------------------------------------------


@pytest.fixture
def with_maps(tmp_path):
    """Four images with a mask and a depth."""
    root = tmp_path / "set"
    for number in range(4):
        save(root / "images" / "a" / f"{number}.png", IMAGES[number])
        save(root / "masks" / "a" / f"{number}.png", 255 * MASKS[number])
        save(root / "depths" / "a" / f"{number}.tif", DEPTHS[number])
    return root


def with_void(mask):
    """Return the mask with a first row that is not labelled."""
    return np.concatenate([np.full_like(mask[:1], 255), mask[1:]])


def three_classes_and(mask):
    def write(root):
        (root / "classes.txt").write_text("sky\nroad\ntree\n")
        for number in range(4):
            save(root / f"masks/a/{number}.png", MASKS[number])
        save(root / "masks/a/1.png", mask)

    return write


NEITHER = "allowed: 0 and 1, or 0 and 255"
MAPS = {
    "masks/a/1.png: 130 pixels; allowed: up to 120": put("masks/a/1.png", np.zeros((10, 13), np.uint8)),
    "1 of 4 images have no file in masks/, as others have; the first is images/a/2": lambda root: (
        root / "masks/a/2.png"
    ).unlink(),
    "masks/a/9.png belongs to no image": put("masks/a/9.png", MASKS[0]),
    "masks/a/1.png is of 11x10 pixels; allowed: 12x10, as its image": put("masks/a/1.png", MASKS[1][:, 1:]),
    f"masks/a/1.png has the values 0, 7; {NEITHER}": put("masks/a/1.png", 7 * MASKS[1]),
    # 255 beside 1 means that a pixel is not labelled.
    f"masks/a/1.png has the values 0, 1, 255; {NEITHER}": put("masks/a/1.png", with_void(MASKS[1])),
    f"masks/a/1.png has the value 1, and masks/a/0.png the value 255; {NEITHER}": put("masks/a/1.png", MASKS[1]),
    "masks/a/1.png has the values 0, 4; allowed: 0 to 2": three_classes_and(4 * MASKS[1]),
    "masks/a/1.png has 3 channels; allowed: 1": put("masks/a/1.png", IMAGES[1]),
    "masks/a/1.png is of uint16; allowed: uint8": put("masks/a/1.png", DEPTHS[1]),
    "depths/a/1.tif: pixels are float32": put("depths/a/1.tif", DEPTHS[1].astype(np.float32)),
    "classes.txt names 'road' twice": write("classes.txt", b"road\nroad\n"),
    "has 2 files classes.txt; allowed: one": lambda root: [
        (root / "other").mkdir(),
        *(write(name, b"sky\nroad\ntree\n")(root) for name in ("classes.txt", "other/classes.txt")),
    ],
    "masks/notes.npy is no image; allowed in masks/: images alone": write("masks/notes.npy", b"1"),
    "has neither masks/ nor depths/": lambda root: [shutil.rmtree(root / name) for name in ("masks", "depths")],
    "has no folder images/": lambda root: (root / "images").rename(root / "pictures"),
    "holds images/a/1.jpg and images/a/1.png; allowed: one of them": put("images/a/1.jpg", IMAGES[1]),
}


@pytest.mark.parametrize("message", MAPS)
def test_bad_masks_and_depths(message, with_maps):
    MAPS[message](with_maps)
    assert message in error_of(lambda: find_set(path=with_maps, of_pixels=True, max_image_pixels=120))


# ---- sets of other people ----------------------------------------------------------------------------

FOLDERS = [
    ["Training", "VALIDATION", "testing"],
    ["train2017", "val2017", "test-dev2017", "unlabeled2017"],
    ["image", "depth", "seg", "annotations"],
    ["train/images", "train/masks", "val/images", "val/masks"],
]


@pytest.mark.parametrize("folders", FOLDERS)
def test_folders_of_splits_or_of_maps_are_no_classes(folders, tmp_path):
    for folder in folders:
        save(tmp_path / folder / "1.png", IMAGES[0])
    (tmp_path / "labels.csv").write_text("image,label")
    names = sorted({folder.rpartition("/")[2] for folder in folders})
    line = error_of(lambda: find_set(path=tmp_path))
    assert line.startswith(f"dataset.path: {tmp_path} has its images in {', '.join(map(repr, names))}, ")
    for words in ("which name splits, images or maps", "train/CLASS/image.jpg", "split_file", "task.name segment"):
        assert words in line


# ---- TFDS --------------------------------------------------------------------------------------------


def tfds_set(root, label=1, splits=("train",)):
    """Write a TFDS set whose labels may be something else."""
    import tensorflow_datasets as tfds

    is_vector = label == "vector"
    features = {"label": tfds.features.Tensor(shape=(3,), dtype=np.float32)} if is_vector else {}
    label = np.zeros(3, np.float32) if is_vector else label
    rows = [(png(seed=i), label, f"{i}.png") for i in range(4)]
    return write_prepared_tfds(root, "tiny", dict.fromkeys(splits, rows), ["a", "b"], **features)


def described_by(before: str, after: str):
    """A set whose description has something else in one place."""

    def write(root):
        info = tfds_set(root) / "dataset_info.json"
        info.write_text(info.read_text().replace(before, after))

    return write


UNLABELLED = "'train' of TFDS set 'tiny' has rows without label; allowed: splits that have labels"
OTHER_SPLITS = "None, and TFDS set 'tiny' has the splits test, extra; allowed"
TFDS = {
    "label (Tensor)": lambda root: tfds_set(root, label="vector"),
    "is prepared as tfrecord, not array_record; to prepare it: pip": described_by("array_record", "tfrecord"),
    "dataset.name: TFDS cannot open 'tiny' (": described_by("{", ""),
    OTHER_SPLITS: lambda root: tfds_set(root, splits=("test", "extra")),
    UNLABELLED: lambda root: tfds_set(root, label=-1),
    "dataset.tfds_split: 'test'": tfds_set,
    "64 pixels; allowed: up to 63, or a larger dataset.max_image_pixels": tfds_set,
}


@pytest.mark.parametrize("message", TFDS)
def test_bad_tfds_sets(message, tmp_path):
    TFDS[message](tmp_path)
    split = "test" if message.endswith("'test'") else None
    assert message in error_of(lambda: find_set("tiny", tmp_path, tfds_split=split, max_image_pixels=63))


# ---- split files -------------------------------------------------------------------------------------

GOOD = "cat/1.tif,train|dog/1.tif,val|dog/3.tif,test"
SPLIT_FILES = {  # lines parted by |
    ", line 1: the columns id, part; allowed: split, and one of id, path": f"id,part|{GOOD}",
    ", line 5: unknown ids: 2, first 'cat/7.tif', 'emu'; allowed": f"id,split|{GOOD}|cat/7.tif,train|emu,val",
    ", line 6: 'cat/1.tif' is in train, and in train by FILE, line 2": f"id,split|{GOOD}||cat/1.tif,train",
    ", line 5: '3.jpg' is in val, and in test by FILE, line 4; allowed": f"id,split|{GOOD}|3.jpg,val",
    ", line 2: '1.tif' names 2 images, as 'cat/1.tif' and 'dog/1.tif'": f"id,split|1.tif,train|{GOOD}",
    ", line 2: split 'holdout'; allowed: train | val | validation": f"id,split|dog/1.tif,holdout|{GOOD}",
    ", line 2: 1 values; allowed: 2, as in the header": f"id,split|dog/1.tif|{GOOD}",
    ": no val images; allowed: some in each of train, val, test": "id,split|cat/1.tif,train|dog/3.tif,test",
    " is empty; allowed: a file that lists images": "| ",
    " cannot be read (it is no text)": "\udcff",
    ", line 5: no CSV (unexpected end of data)": f'id,split|{GOOD}|"cat/1.tif,train',
}


@pytest.mark.parametrize("message", SPLIT_FILES)
def test_bad_split_files(tmp_path, message):
    path = tmp_path / "split.csv"
    path.write_text(SPLIT_FILES[message].replace("|", "\n"), errors="surrogateescape")
    with pytest.raises(UserError) as error:
        read_split_file(str(path)).match(IDS)
    assert str(error.value).startswith(f"dataset.split_file: {path}{message.replace('FILE', str(path))}")


# ---- splits ------------------------------------------------------------------------------------------

CATS = [f"{number}.png" for number in range(20)]
SPLITS = {
    "dataset.splits: 'published', but this data set has no splits of its own": {"choice": "published"},
    "dataset: 9 training images; allowed: at least 10, to cut val": {"published": ["train"] * 9 + ["test"] * 11},
    "dataset: the published splits have no training images": {"published": ["val"] * 20},
    "dataset: no training image is left for class newt; add images": {"class_names": ["cat", "newt"]},
    "dataset: two images have the id '3.png'; allowed: each id once": {"example_ids": [*CATS[:-1], CATS[3]]},
    "dataset: 9 training images; allowed: at least 10, to cut val and test from": {"example_ids": CATS[:9]},
}


@pytest.mark.parametrize("message", SPLITS)
def test_examples_that_cannot_be_split(message):
    given = {"example_ids": CATS, "labels": np.zeros(20, int), "class_names": ["cat"], **SPLITS[message]}
    with pytest.raises(UserError) as error:
        assign_splits(**given)
    assert str(error.value).startswith(message)
