"""Masks and depths of a cache as files: what is exported is read back, a preview shows what belongs together."""

import numpy as np
import pytest
from conftest import decode_all, typed
from PIL import Image

import augment
from configs import default
from largebatch.data import pictures
from largebatch.data.decode import DecodeOptions
from largebatch.data.pictures import class_colours, shaded
from largebatch.data.sources import find
from largebatch.data.sources.files import open_files
from largebatch.data.sources.maps import maps
from largebatch.util import UserError

COUNT, SIZE = 20, 8
RNG = np.random.default_rng(0)
MASKS = RNG.integers(0, 3, (COUNT, SIZE, SIZE), np.uint8)
DEPTHS = RNG.integers(0, 65_536, (COUNT, SIZE, SIZE), np.uint16)
IMAGES = RNG.integers(60, 120, (COUNT, SIZE, SIZE, 3), np.uint8)  # pale: nobody may stretch it


def make_set(root, kinds):
    for kind, of_kind in kinds.items():
        (root / kind).mkdir(parents=True)
        for number in range(COUNT):
            Image.fromarray(of_kind[number]).save(root / kind / f"{number:02d}.png")
    if "masks" in kinds:
        (root / "classes.txt").write_text("sky\nroad\ntree\n")
    return root


def cache_of(root, task, tmp_path):
    config = default.get_config()
    config.dataset.name, config.dataset.path, config.task.name = "mine", str(root), task
    config.model.name = "unet_tiny"
    config.augment.cache_dir = str(tmp_path / "caches")
    return augment.prepare_cache(typed(config))


BACKGROUNDS = IMAGES[::-1] + np.uint8(50)
SETS = {
    "mask_depth": {"images": IMAGES, "masks": MASKS, "depths": DEPTHS},
    "mask_depth with backgrounds": {"images": IMAGES, "masks": MASKS, "depths": DEPTHS, "backgrounds": BACKGROUNDS},
    "segmentation": {"images": IMAGES[..., 0], "masks": MASKS},
    "segmentation with backgrounds": {"images": IMAGES[..., 0], "masks": MASKS, "backgrounds": BACKGROUNDS[..., 0]},
    "depth": {"images": IMAGES, "depths": DEPTHS},
}


@pytest.mark.parametrize("name", SETS)
def test_what_is_exported_is_read_back(name, tmp_path):
    root = make_set(tmp_path / "set", SETS[name])
    cache = cache_of(root, name.split()[0], tmp_path)
    assert pictures.export(cache.split("test"), str(tmp_path / "out")) == 2
    exported, original = (
        maps(open_files(str(folder), "dataset.path"), DecodeOptions()) for folder in (tmp_path / "out", root)
    )
    assert exported.targets == original.targets
    stored = dict(zip(original.ids, decode_all(original), strict=True))
    for example_id, pixels in zip(exported.ids, decode_all(exported), strict=True):
        np.testing.assert_array_equal(pixels, stored[example_id])


def test_a_preview_shows_image_mask_and_depth_of_each_view(tmp_path):
    cache = cache_of(make_set(tmp_path / "set", SETS["mask_depth"]), "mask_depth", tmp_path)
    pictures.draw_preview(
        cache.split("train"),
        lambda images: augment.expand(images, 2),
        str(tmp_path / "preview.png"),
        num_images=2,
        scale=1,
    )
    sheet, step = np.asarray(Image.open(tmp_path / "preview.png")), SIZE + pictures.GAP
    assert sheet.shape == (6 * step - pictures.GAP, 2 * step - pictures.GAP, 3)
    numbers = [int(name) for name in cache.split("train").ids[[0, 8]]]
    for row, number in enumerate(numbers):
        expected = IMAGES[number], class_colours(MASKS[number]), shaded(DEPTHS[number] / np.float32(65_535))
        for line, picture in enumerate(expected):
            top = (3 * row + line) * step
            np.testing.assert_array_equal(sheet[top : top + SIZE, :SIZE], picture)
            np.testing.assert_array_equal(sheet[top : top + SIZE, step:], picture[:, ::-1])


def test_what_cannot_be_exported_is_named(tmp_path):
    cache = cache_of(make_set(tmp_path / "set", SETS["depth"]), "depth", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^--export: cannot write .*file"):
        pictures.export(cache.split("test"), str(tmp_path / "file"))


@pytest.mark.parametrize("value", [0, 2])
def test_masks_of_one_class_alone_are_refused(value, tmp_path):
    kinds = {"images": IMAGES, "masks": np.full_like(MASKS, value)}
    kinds["masks"][7] = MASKS[7] if value else value
    root = make_set(tmp_path / "set", kinds)
    name = ("sky", "road", "tree")[value]
    if value:  # one image with others is enough, where it is in the training set
        assert cache_of(root, "segmentation", tmp_path).layout.counts["train"] == 16
        return
    with pytest.raises(
        UserError, match=f"all pixels of the training masks of .*set are of class '{name}'; allowed"
    ):
        cache_of(root, "segmentation", tmp_path)
    assert not list((tmp_path / "caches").glob(".*build*"))


def test_another_task_is_refused_before_anything_is_decoded(tmp_path, monkeypatch):
    root = make_set(tmp_path / "set", SETS["depth"])
    monkeypatch.setattr(augment, "build_together", lambda *_, **__: pytest.fail("builds"))
    with pytest.raises(UserError, match=r"task\.name: 'segmentation'; allowed: 'depth' with .*, which has depths"):
        cache_of(root, "segmentation", tmp_path)


def test_scenes_of_another_version_are_made_anew(tmp_path, monkeypatch):
    def folder():
        config = default.get_config()
        config.dataset.name, config.task.name, config.model.name = "scenes", "mask_depth", "unet_tiny"
        config.dataset.num_examples, config.dataset.image_size = 50, 16
        config.augment.cache_dir = str(tmp_path)
        return augment.prepare_cache(typed(config)).folder

    before = folder()
    assert folder() == before
    monkeypatch.setattr(find, "SCENES_VERSION", 0)
    assert folder() != before
