"""Masks and depths of a cache as files: what is exported is read back, a preview shows what belongs together."""

import numpy as np
import pytest
from conftest import decode_all, typed
from PIL import Image

import augment
from configs import default
from largebatch.data import pictures
from largebatch.data.decode import DecodeOptions
from largebatch.data.pictures import class_colours, shaded, to_rgb8
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
    "mask_depth with backgrounds": {"images": IMAGES, "masks": MASKS, "depths": DEPTHS, "backgrounds": BACKGROUNDS},
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
    cache = cache_of(make_set(tmp_path / "set", SETS["mask_depth with backgrounds"]), "mask_depth", tmp_path)
    path, step = str(tmp_path / "preview.png"), SIZE + pictures.GAP
    pictures.draw_preview(cache.split("train"), lambda images: augment.expand(images, 2), path)
    sheet = np.asarray(Image.open(path))[::2, ::2]
    assert sheet.shape == (12 * step - pictures.GAP, 2 * step - pictures.GAP, 3)
    numbers = [int(name) for name in cache.split("train").ids[[0, 4, 8, 12]]]
    for row, number in enumerate(numbers):
        expected = IMAGES[number], class_colours(MASKS[number]), shaded(DEPTHS[number] / np.float32(65_535))
        for line, picture in enumerate(expected):
            top = (3 * row + line) * step
            np.testing.assert_array_equal(sheet[top : top + SIZE, :SIZE], picture)
            np.testing.assert_array_equal(sheet[top : top + SIZE, step:], picture[:, ::-1])


def test_pictures_that_cannot_be_written_are_named(tmp_path):
    split = cache_of(make_set(tmp_path / "set", SETS["depth"]), "depth", tmp_path).split("test")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^--export: cannot write .*file"):
        pictures.export(split, str(tmp_path / "file"))
    for name, words in (("no/x.png", "No such file"), ("x.foo", "unknown file extension")):
        with pytest.raises(UserError, match=rf"^--preview: cannot write .*{name} \({words}"):
            pictures.draw_preview(split, lambda images: augment.expand(images, 1), str(tmp_path / name))


def test_masks_of_one_class_alone_are_refused(tmp_path):
    kinds = {"images": IMAGES, "masks": np.full_like(MASKS, 2)}
    words = "all pixels of the training masks of .*set are of class 'tree'; allowed: two classes or more"
    with pytest.raises(UserError, match=words):
        cache_of(make_set(tmp_path / "set", kinds), "segmentation", tmp_path)
    assert not list((tmp_path / "caches").iterdir())
    kinds["masks"][7] = MASKS[7]  # one image with others is enough, where it is in the training set
    assert cache_of(make_set(tmp_path / "other", kinds), "segmentation", tmp_path).layout.counts["train"] == 16


def test_another_task_is_refused_before_anything_is_decoded(tmp_path, monkeypatch):
    root = make_set(tmp_path / "set", SETS["depth"])
    monkeypatch.setattr(augment, "build_together", lambda *_, **__: pytest.fail("builds"))
    with pytest.raises(UserError, match=r"task\.name: 'segmentation'; allowed: 'depth' with .*, which has depths"):
        cache_of(root, "segmentation", tmp_path)


# ---- colours -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "bands"), [(13, (3, 2, 1)), (12, (3, 2, 1)), (10, (2, 1, 0)), (4, (0, 1, 2)), (2, (0, 0, 0))]
)
def test_red_green_and_blue_are_the_bands_they_should_be(channels, bands):
    """Band b is b + 1 at one place and 0 elsewhere; the brightest of the three comes out white."""
    pixels = np.zeros((4, channels, channels), np.uint16)
    for band in range(channels):
        pixels[:, band, band] = 1000
    shown = to_rgb8(pixels)
    for colour, band in enumerate(bands):
        np.testing.assert_array_equal(shown[0, :, colour], 255 * (np.arange(channels) == band))


def test_8_bits_stay_and_measurements_are_neither_black_nor_clipped():
    """Values in a narrow range, as reflectances have, with one glint; a red picture is red."""
    rng = np.random.default_rng(0)
    stays = rng.integers(0, 256, (5, 7, 3), np.uint8)
    np.testing.assert_array_equal(to_rgb8(stays), stays)
    np.testing.assert_array_equal(to_rgb8(stays[..., :1]), np.repeat(stays[..., :1], 3, axis=-1))
    for channels, dtype, level in ((1, np.uint16, 30), (4, np.uint8, 30), (13, np.uint16, 150)):
        pixels = rng.normal(level, level / 10, (64, 64, channels))
        pixels[0, 0] = np.iinfo(dtype).max
        shown = to_rgb8(np.clip(pixels, 0, np.iinfo(dtype).max).astype(dtype))
        assert (shown.shape, shown.dtype) == ((64, 64, 3), np.uint8)
        assert 90 < shown.mean() < 165
        assert 40 < shown.std() < 80
        assert np.isin(shown, (0, 255)).mean() < 0.06
    red = to_rgb8(rng.integers(100, 200, (16, 16, 3), np.uint16) + np.array([800, 0, 0], np.uint16))
    assert red[..., 0].min() > red[..., 1:].max()
    assert set(to_rgb8(np.full((4, 4, 3), 32768, np.uint16)).ravel()) == {128}
