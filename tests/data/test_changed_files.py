"""A set whose files changed, or are gone, since its cache was made."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import make_folder, typed
from test_sources import png, save, write_prepared_tfds, zip_of

import augment
from largebatch.util import UserError


def times_of(folder: Path, ns: int) -> None:
    """Give all files one time, as an archive does."""
    for path in folder.rglob("*"):
        os.utime(path, ns=(ns, ns))


class OwnImages:
    """A folder of images, and what its owner may do to it."""

    def __init__(self, root: Path):
        self.path = make_folder(root / "images", {"a": 12, "b": 12})

    @classmethod
    def at(cls, path: str) -> "OwnImages":
        """Return the images that are there."""
        images = cls.__new__(cls)
        images.path = Path(path)
        return images

    def add(self):
        save(self.path / "a" / "new.png", np.zeros((16, 16, 3), np.uint8))

    def delete(self):
        (self.path / "a" / "a_3.png").unlink()

    def move(self):
        (self.path / "a" / "a_3.png").rename(self.path / "b" / "a_3.png")

    def rename_class(self):
        (self.path / "a").rename(self.path / "c")

    def replace(self):
        (self.path / "a" / "a_3.png").write_bytes(png((16, 16), seed=99))

    def touch(self):
        os.utime(self.path / "a" / "a_3.png", ns=(1, 1))


class LinkToImages(OwnImages):
    """A link to a folder, and to another one that differs in one name."""

    def __init__(self, root: Path):
        self.first = make_folder(root / "first", {"a": 12, "b": 12})
        self.second = shutil.copytree(self.first, root / "second")
        (self.second / "a" / "a_3.png").rename(self.second / "b" / "a_3.png")
        for folder in (self.first, self.second):
            times_of(folder, 10**18)
        self.path = root / "images"
        self.path.symlink_to(self.first)

    def point(self):
        self.path.unlink()
        self.path.symlink_to(self.second)


class LinkWithinImages(LinkToImages):
    """A folder whose classes are links."""

    def __init__(self, root: Path):
        super().__init__(root)
        self.path = root / "links"
        self.path.mkdir()
        for label in "ab":
            (self.path / label).symlink_to(self.first / label)

    def point(self):
        (self.path / "b").unlink()
        (self.path / "b").symlink_to(self.second / "b")


class Zip(OwnImages):
    """A zip."""

    def __init__(self, root: Path):
        super().__init__(root)
        self.folder, self.path = self.path, root / "images.zip"
        zip_of(self.folder, self.path)

    def new_content(self):
        (self.folder / "a" / "a_3.png").write_bytes(png((16, 16), seed=99))
        zip_of(self.folder, self.path)

    def point(self):
        other = self.path.rename(self.path.with_name("other.zip"))
        self.path.symlink_to(other)
        self.new_content()


class Maps(OwnImages):
    """Images with masks."""

    task = "segmentation"

    def __init__(self, root: Path):
        self.path = root / "maps"
        for number in range(12):
            save(self.path / "images" / f"{number}.png", np.full((16, 16, 3), 20 * number, np.uint8))
            save(self.path / "masks" / f"{number}.png", np.eye(16, dtype=np.uint8) * 255)

    def new_mask(self):
        save(self.path / "masks" / "3.png", np.tri(16, dtype=np.uint8) * 255)

    def names(self):
        (self.path / "classes.txt").write_text("ground\ntree\n")


class Prepared(OwnImages):
    """A prepared TFDS set."""

    name = "tiny"

    def __init__(self, root: Path):
        self.path = root / "tfds"
        self.prepare(0)

    def prepare(self, seed=1):
        shutil.rmtree(self.path, ignore_errors=True)
        rows = [(png((16, 16), seed=24 * seed + i), i % 2, f"{i}.png") for i in range(24 + seed)]
        write_prepared_tfds(self.path, "tiny", rows, ["a", "b"])


CHANGES = [
    (OwnImages, "add"),
    (OwnImages, "delete"),
    (OwnImages, "move"),
    (OwnImages, "rename_class"),
    (OwnImages, "replace"),
    (OwnImages, "touch"),
    (LinkToImages, "point"),
    (LinkWithinImages, "point"),
    (Zip, "new_content"),
    (Zip, "point"),
    (Maps, "new_mask"),
    (Maps, "names"),
    (Prepared, "prepare"),
]


def configure(config, images, cache_dir: Path):
    config.dataset.name, config.dataset.path = getattr(images, "name", "mine"), str(images.path)
    config.task.name = getattr(images, "task", "classification")
    config.model.name = "convnet" if config.task.name == "classification" else "unet_tiny"
    config.augment.cache_dir = str(cache_dir)
    return config


@pytest.mark.parametrize(("kind", "change"), CHANGES)
def test_files_that_changed_are_decoded_again_and_said_in_a_line(
    kind, change, small_config, tmp_path, caplog, monkeypatch
):
    images = kind(tmp_path)
    config = configure(small_config, images, tmp_path / "caches")
    before = augment.prepare_cache(typed(config))
    assert augment.prepare_cache(typed(config)).folder == before.folder
    getattr(images, change)()
    after = augment.prepare_cache(typed(config))
    assert after.folder != before.folder
    assert after.manifest["build"] != before.manifest["build"]
    changed = [record.getMessage() for record in caplog.records if "changed since" in record.getMessage()]
    assert len(changed) == 1
    assert changed[0].startswith("dataset: ")
    assert changed[0].endswith(f"changed since {before.folder} was made")
    before.verify()  # is left, for runs on the files as they were
    monkeypatch.setattr(augment, "find_dataset", lambda *_, **__: pytest.fail("listed the source"))
    assert augment.prepare_cache(typed(config)).folder == after.folder


@pytest.mark.parametrize("kind", [OwnImages, LinkToImages, Zip, Maps, Prepared])
def test_of_files_that_are_gone_one_line_says_which_cache_is_used(kind, small_config, tmp_path, caplog):
    images = kind(tmp_path)
    config = configure(small_config, images, tmp_path / "caches")
    cache = augment.prepare_cache(typed(config))
    caplog.clear()
    images.path.rename(tmp_path / "away")
    assert augment.prepare_cache(typed(config)).folder == cache.folder
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(f"dataset: {images.path}")
    assert line.endswith(f" cannot be read; takes the cache {cache.folder} of {cache.manifest['built']}")
    (tmp_path / "away").rename(images.path)
    assert augment.prepare_cache(typed(config)).folder == cache.folder
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


@pytest.mark.parametrize("name", [".DS_Store", ".hidden/x.png", "Thumbs.db", "a/desktop.ini"])
def test_what_systems_leave_in_folders_makes_no_other_cache(name, small_config, tmp_path, caplog):
    images = OwnImages(tmp_path)
    config = configure(small_config, images, tmp_path / "caches")
    before = augment.prepare_cache(typed(config))
    (images.path / name).parent.mkdir(exist_ok=True)
    (images.path / name).write_bytes(b"1")
    after = augment.prepare_cache(typed(config))
    assert (after.folder, after.manifest) == (before.folder, before.manifest)
    assert "changed since" not in caplog.text


def test_a_warm_start_does_not_list_the_source(small_config, tmp_path, monkeypatch):
    images = OwnImages(tmp_path)
    config = configure(small_config, images, tmp_path / "caches")
    folder = augment.prepare_cache(typed(config)).folder
    with monkeypatch.context() as patch:
        patch.setattr(augment, "find_dataset", lambda *_, **__: pytest.fail("listed the source"))
        assert augment.prepare_cache(typed(config)).folder == folder
        config.dataset.max_image_pixels += 1  # which shapes no cache
        assert augment.prepare_cache(typed(config)).folder == folder
        images.path.rename(tmp_path / "moved")
        assert augment.prepare_cache(typed(config)).folder == folder
    config.dataset.split_seed = 1  # another cache
    with pytest.raises(UserError, match=r"dataset.path: .*images does not exist"):
        augment.prepare_cache(typed(config))
