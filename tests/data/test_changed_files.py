"""A set whose files changed, or are gone, since its cache was made."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import make_folder, typed
from test_sources import png, save, write_prepared_tfds, zip_of

import augment


def make_images(root: Path) -> Path:
    return make_folder(root / "images", {"a": 12, "b": 12})


def move_image(path: Path) -> None:
    (path / "a" / "a_3.png").rename(path / "b" / "a_3.png")


def make_link(root: Path) -> Path:
    """A link to a folder, beside another one."""
    make_images(root / "first")
    move_image(Path(shutil.copytree(root / "first", root / "second")) / "images")
    (root / "images").symlink_to(root / "first" / "images")
    return root / "images"


def point_to_another_folder(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "second" / "images")


def make_zip(root: Path) -> Path:
    return zip_of(make_images(root / "packed"), root / "images.zip")


def pack_others(path: Path) -> None:
    (path.parent / "packed" / "images" / "a" / "a_3.png").write_bytes(png((16, 16), seed=99))
    zip_of(path.parent / "packed" / "images", path)


def make_maps(root: Path) -> Path:
    """Images with masks."""
    for number in range(12):
        save(root / "maps" / "images" / f"{number}.png", np.full((16, 16, 3), 20 * number, np.uint8))
        save(root / "maps" / "masks" / f"{number}.png", np.eye(16, dtype=np.uint8) * 255)
    return root / "maps"


def name_classes(path: Path) -> None:
    (path / "classes.txt").write_text("ground\ntree\n")


def make_prepared(root: Path) -> Path:
    prepare(root / "tfds", 0)
    return root / "tfds"


def prepare(path: Path, seed=1) -> None:
    shutil.rmtree(path, ignore_errors=True)
    rows = [(png((16, 16), seed=24 * seed + i), i % 2, f"{i}.png") for i in range(24 + seed)]
    write_prepared_tfds(path, "mine", rows, ["a", "b"])


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (make_images, move_image),
        (make_link, point_to_another_folder),
        (make_zip, pack_others),
        (make_maps, name_classes),
        (make_prepared, prepare),
    ],
)
def test_files_that_changed_are_decoded_again_and_of_files_that_are_gone_the_cache_is_used(
    make, change, small_config, tmp_path, caplog, monkeypatch
):
    path, config = make(tmp_path), small_config
    config.dataset.name, config.dataset.path = "mine", str(path)
    config.augment.cache_dir = str(tmp_path / "caches")
    if make is make_maps:
        config.task.name, config.model.name = "segmentation", "unet_tiny"

    def prepared():
        """Return the cache, and the warnings about it."""
        caplog.clear()
        cache = augment.prepare_cache(typed(config))
        return cache, [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    before, _ = prepared()
    change(path)
    after, told = prepared()
    assert after.folder != before.folder
    (line,) = [line for line in told if "changed since" in line]
    assert line.startswith("dataset: ")
    assert line.endswith(f"changed since {before.folder} was made")
    before.verify()  # is left, for runs on the files as they were
    monkeypatch.setattr(augment, "find_dataset", lambda *_, **__: pytest.fail("listed the source"))
    config.dataset.max_image_pixels += 1  # which shapes no cache
    again, told = prepared()
    assert (again.folder, told) == (after.folder, [])
    path.rename(tmp_path / "away")
    latest, (line,) = prepared()
    assert latest.manifest["built"] == max(cache.manifest["built"] for cache in (before, after))
    assert line.startswith(f"dataset: {path}")
    assert line.endswith(f" cannot be read; takes the cache {latest.folder} of {latest.manifest['built']}")
