"""Images with masks and depths in folders and zips."""

import shutil
import struct
import zlib

import numpy as np
import pytest
from conftest import decode_all, find_set
from PIL import Image
from test_bad_data import DEPTHS, IMAGES, MASKS, RNG, with_maps  # noqa: F401 (a fixture)
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


stored = decode_all


@pytest.mark.parametrize("as_zip", [False, True])
def test_pixels_masks_and_depths_are_those_of_the_files(folder, tmp_path, as_zip):
    root = zip_of(folder, tmp_path / "set.zip", "some/where/") if as_zip else folder
    source = read(root)
    assert source.ids == [f"a/{number}" for number in range(4)]
    assert (source.splits, source.targets.classes, source.targets.planes) == (None, ("background", "object"), 3)
    found = stored(source)
    np.testing.assert_array_equal(found[..., :3], IMAGES)
    np.testing.assert_array_equal(planes.classes_of(found[..., 3:]), MASKS)
    np.testing.assert_array_equal(planes.depths_of(found[..., 3:]), DEPTHS / np.float32(65_535))


def test_depths_of_8_bits_reach_as_far(folder):
    for number in range(4):
        (folder / "depths" / "a" / f"{number}.tif").unlink()
        save(folder / "depths" / "a" / f"{number}.png", (DEPTHS[number] >> 8).astype(np.uint8))
    found = planes.depths_of(stored(read(folder))[..., 3:])
    np.testing.assert_allclose(found, (DEPTHS >> 8) / 255, rtol=1e-6)


def test_masks_alone_are_a_segmentation_of_named_classes(folder):
    for path in (folder / "depths" / "a").iterdir():
        path.unlink()
    (folder / "classes.txt").write_text("sky\nroad\ntree\n")
    for number in range(4):
        save(folder / "masks" / "a" / f"{number}.png", MASKS[number] + 1)
    source = read(folder)
    assert (source.targets.classes, source.targets.planes) == (("sky", "road", "tree"), 1)
    np.testing.assert_array_equal(stored(source)[..., 3], MASKS + 1)


def test_a_mask_with_a_palette_holds_the_numbers_of_its_colours(folder):
    for number in range(4):
        picture = Image.fromarray(MASKS[number], mode="P")
        picture.putpalette([0, 0, 0, 200, 30, 60])
        picture.save(folder / "masks" / "a" / f"{number}.png")
    np.testing.assert_array_equal(stored(read(folder))[..., 3], MASKS)


def test_a_background_is_three_more_channels(folder):
    for number in range(4):
        save(folder / "backgrounds" / "a" / f"{number}.png", IMAGES[3 - number])
    np.testing.assert_array_equal(stored(read(folder))[..., 3:6], IMAGES[::-1])


def test_split_folders_are_splits(folder):
    for kind in ("images", "masks", "depths"):
        for split, numbers in {"train": "01", "valid": "2", "test": "3"}.items():
            target = folder / split / kind
            target.mkdir(parents=True)
            for number in numbers:
                (path,) = (folder / kind / "a").glob(f"{number}.*")
                path.rename(target / path.name)
        (folder / kind / "a").rmdir()
        (folder / kind).rmdir()
    source = read(folder)
    assert dict(zip(source.ids, source.splits, strict=True)) == {
        "test/3": "test", "train/0": "train", "train/1": "train", "val/2": "val",
    }  # fmt: skip


def test_split_folders_may_lie_within_the_kinds(folder):
    for kind in ("images", "masks", "depths"):
        for split, numbers in {"train": "01", "test": "23"}.items():
            for number in numbers:
                (path,) = (folder / kind / "a").glob(f"{number}.*")
                (folder / kind / split).mkdir(exist_ok=True)
                path.rename(folder / kind / split / path.name)
        (folder / kind / "a").rmdir()
    source = read(folder)
    assert dict(zip(source.ids, source.splits, strict=True)) == {
        "test/2": "test", "test/3": "test", "train/0": "train", "train/1": "train",
    }  # fmt: skip


def test_depths_alone_are_a_set_too(folder):
    shutil.rmtree(folder / "masks")
    source = read(folder)
    assert (source.targets, source.targets.kind.name) == (PixelTargets((), has_depth=True), "depth")
    np.testing.assert_array_equal(planes.depths_of(stored(source)[..., 3:]), DEPTHS / np.float32(65_535))


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_mask_of_few_bits_holds_its_numbers(folder, bits):
    """Pillow would stretch them over 8 bits."""
    classes = RNG.integers(0, 2**bits, (4, 8, 16), np.uint8)
    (folder / "classes.txt").write_text("".join(f"class {value}\n" for value in range(2**bits)))
    for number in range(4):
        save(folder / "images" / "a" / f"{number}.png", RNG.integers(0, 256, (8, 16, 3), np.uint8))
        (folder / "depths" / "a" / f"{number}.tif").unlink()
        write_grey_png(folder / "masks" / "a" / f"{number}.png", classes[number], bits)
    np.testing.assert_array_equal(stored(read(folder))[..., 3], classes)


def write_grey_png(path, pixels, bits):
    """As other programs write them: so many bits a pixel."""
    packed = [np.packbits(np.unpackbits(row[:, None], axis=1)[:, -bits:].ravel()).tobytes() for row in pixels]

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], bits, 0, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in packed))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b""))


def test_names_of_classes_may_begin_with_a_mark_of_their_encoding(folder):
    (folder / "classes.txt").write_text("sky\nroad\n", encoding="utf-8-sig")
    assert read(folder).targets.classes == ("sky", "road")


def test_resized_masks_have_no_new_values(folder):
    found = stored(read(folder, image_size=6))
    assert found.shape == (4, 6, 6, 6)
    assert set(np.unique(found[..., 3])) == {0, 1}
    depths = planes.depths_of(found[..., 3:])
    assert np.isin(np.rint(depths * 65_535).astype(int), DEPTHS).all()


# ---- images to predict ------------------------------------------------------------------------------

BOTH = PixelTargets(("background", "object"), has_depth=True)


def find(root, channels=3, targets=BOTH, **options):
    return find_maps(str(root), targets, channels, DecodeOptions(**options))


def test_images_with_their_maps_are_known(folder):
    found = find(folder)
    np.testing.assert_array_equal(stored(found), stored(read(folder)))
    assert found.labels.tolist() == [0, 0, 0, 0]


def test_images_alone_are_unknown_and_have_their_backgrounds(folder):
    for number in range(4):
        save(folder / "backgrounds" / "a" / f"{number}.png", IMAGES[3 - number])
    for kind in ("masks", "depths"):
        shutil.rmtree(folder / kind)
    found = find(folder, channels=6)
    np.testing.assert_array_equal(stored(found)[..., :6], np.concatenate([IMAGES, IMAGES[::-1]], axis=-1))
    assert not stored(found)[..., 6:].any()
    assert found.labels.tolist() == [-1, -1, -1, -1]


def test_images_in_any_folders_are_unknown(tmp_path):
    save(tmp_path / "here" / "1.png", IMAGES[1])
    found = find(tmp_path)
    assert (stored(found).shape, found.labels.tolist()) == ((1, *SIZE, 6), [-1])


def test_images_that_do_not_go_with_a_run_are_named(folder):
    with pytest.raises(UserError, match=r"has masks of background, object and depths; allowed: depths, as the run"):
        find(folder, targets=PixelTargets((), has_depth=True))
    with pytest.raises(UserError, match="has images of 3 channels; allowed: 6, as the run"):
        find(folder, channels=6)
    save(folder / "images/a/3.png", IMAGES[3][..., 0])
    with pytest.raises(UserError, match=r"a/3 has 4 channels, a/0 has 6; allowed: the same in all"):
        stored(find(folder))
