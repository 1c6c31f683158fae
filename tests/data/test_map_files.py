"""Images with masks and depths in folders and zips."""

import shutil

import numpy as np
import pytest
from conftest import decode_all, find_set
from PIL import Image
from test_bad_data import DEPTHS, IMAGES, MASKS, with_maps  # noqa: F401 (a fixture)
from test_bad_data import SIZE_OF_IMAGES as SIZE
from test_sources import save, zip_of

from largebatch.data.decode import DecodeOptions
from largebatch.data.sources.maps import find_maps
from largebatch.tasks import planes
from largebatch.tasks.planes import PixelTargets
from largebatch.util import UserError


@pytest.fixture
def folder(with_maps):  # noqa: F811
    return with_maps


def read(root, **fields):
    return find_set(path=root, of_pixels=True, **fields)


def save_all(folder, kind, pictures, suffix=".png"):
    for number, pixels in enumerate(pictures):
        save(folder / kind / "a" / f"{number}{suffix}", pixels)


@pytest.mark.parametrize("as_zip", [False, True])
def test_pixels_masks_and_depths_are_those_of_the_files(folder, tmp_path, as_zip):
    source = read(zip_of(folder, tmp_path / "set.zip", "some/where/") if as_zip else folder)
    assert source.ids == [f"a/{number}" for number in range(4)]
    assert (source.splits, source.targets.classes, source.targets.planes) == (None, ("background", "object"), 3)
    found = decode_all(source)
    np.testing.assert_array_equal(found[..., :3], IMAGES)
    np.testing.assert_array_equal(planes.classes_of(found[..., 3:]), MASKS)
    np.testing.assert_array_equal(planes.depths_of(found[..., 3:]), DEPTHS / np.float32(65_535))


def test_depths_of_8_bits_alone_reach_as_far_as_those_of_16(folder):
    for kind in ("masks", "depths"):
        shutil.rmtree(folder / kind)
    save_all(folder, "depths", (DEPTHS >> 8).astype(np.uint8))
    source = read(folder)
    assert (source.targets, source.targets.kind.name) == (PixelTargets((), has_depth=True), "depth")
    np.testing.assert_allclose(planes.depths_of(decode_all(source)[..., 3:]), (DEPTHS >> 8) / 255, rtol=1e-6)


def test_masks_alone_have_classes_of_names_and_a_palette_holds_the_numbers_of_its_colours(folder):
    shutil.rmtree(folder / "depths")
    (folder / "classes.txt").write_text("sky\nroad\ntree\n", encoding="utf-8-sig")
    for number in range(4):
        picture = Image.fromarray(MASKS[number] + 1, mode="P")
        picture.putpalette([0, 0, 0, 200, 30, 60, 10, 20, 30])
        picture.save(folder / "masks" / "a" / f"{number}.png")
    source = read(folder)
    assert (source.targets.classes, source.targets.planes) == (("sky", "road", "tree"), 1)
    np.testing.assert_array_equal(decode_all(source)[..., 3], MASKS + 1)


@pytest.mark.parametrize("are_around", [False, True])
def test_split_folders_are_splits_around_or_within_the_kinds(folder, are_around):
    names = {"0": "train", "1": "train", "2": "valid", "3": "test"}
    for kind in ("images", "masks", "depths"):
        for path in list((folder / kind / "a").iterdir()):
            split = names[path.stem]
            target = folder / split / kind if are_around else folder / kind / split
            target.mkdir(parents=True, exist_ok=True)
            path.rename(target / path.name)
        (folder / kind / "a").rmdir()
    source, val = read(folder), "val" if are_around else "valid"
    assert source.ids == ["test/3", "train/0", "train/1", f"{val}/2"]
    assert source.splits == ["test", "train", "train", "val"]


def test_a_mask_of_one_bit_holds_its_numbers(folder):
    """Pillow would stretch them over 8 bits."""
    (folder / "classes.txt").write_text("sky\nroad\ntree\n")
    for number in range(4):
        Image.fromarray(MASKS[number] == 1).save(folder / "masks" / "a" / f"{number}.png")
    np.testing.assert_array_equal(decode_all(read(folder))[..., 3], MASKS)


def test_resized_masks_have_no_new_values(folder):
    found = decode_all(read(folder, image_size=6))
    assert found.shape == (4, 6, 6, 6)
    assert set(np.unique(found[..., 3])) == {0, 1}
    depths = planes.depths_of(found[..., 3:])
    assert np.isin(np.rint(depths * 65_535).astype(int), DEPTHS).all()


# ---- images to predict ------------------------------------------------------------------------------

BOTH = PixelTargets(("background", "object"), has_depth=True)


def find(root, channels=3, targets=BOTH):
    return find_maps(str(root), targets, channels, DecodeOptions())


def test_images_with_their_maps_are_known_and_others_have_their_backgrounds(folder, tmp_path):
    found = find(folder)
    np.testing.assert_array_equal(decode_all(found), decode_all(read(folder)))
    assert found.labels.tolist() == [0, 0, 0, 0]
    save_all(folder, "backgrounds", IMAGES[::-1])
    np.testing.assert_array_equal(decode_all(read(folder))[..., 3:6], IMAGES[::-1])
    for kind in ("masks", "depths"):
        shutil.rmtree(folder / kind)
    found = find(folder, channels=6)
    np.testing.assert_array_equal(decode_all(found)[..., :6], np.concatenate([IMAGES, IMAGES[::-1]], axis=-1))
    assert not decode_all(found)[..., 6:].any()
    assert found.labels.tolist() == [-1, -1, -1, -1]
    save(tmp_path / "here" / "1.png", IMAGES[1])  # in any folder
    found = find(tmp_path / "here")
    assert (decode_all(found).shape, found.labels.tolist()) == ((1, *SIZE, 6), [-1])


def test_images_that_do_not_go_with_a_run_are_named(folder):
    with pytest.raises(UserError, match=r"has masks of background, object and depths; allowed: depths, as the run"):
        find(folder, targets=PixelTargets((), has_depth=True))
    with pytest.raises(UserError, match="has images of 3 channels; allowed: 6, as the run"):
        find(folder, channels=6)
    save(folder / "images/a/3.png", IMAGES[3][..., 0])
    with pytest.raises(UserError, match=r"a/3 has 12x10 pixels of 4 channels .*, a/0 has .* of 6"):
        decode_all(find(folder))
