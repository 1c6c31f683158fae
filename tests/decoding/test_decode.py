"""How pictures become arrays: channels, depth, and the three ways to another size; expected values from Pillow."""

import io

import numpy as np
import pytest
from ml_collections import config_dict
from PIL import Image

from largebatch.decoding.images import AS_THEY_ARE, DecodeOptions, ImageFile, Limits, decode, resized
from largebatch.util import UserError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (21, 34, 3), np.uint8)


def saved(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def read(content: bytes, options: DecodeOptions = AS_THEY_ARE, out=None) -> np.ndarray:
    return decode(ImageFile("a/0.png", 0, len(content), lambda: content), options, Limits(10**6), out)


CHANNELS = {  # of a file of this kind and Pillow's mode
    ("PNG", "1"): 1,
    ("PNG", "L"): 1,
    ("PNG", "LA"): 1,
    ("PNG", "P"): 3,
    ("PNG", "RGB"): 3,
    ("PNG", "RGBA"): 3,
    ("JPEG", "L"): 1,
    ("JPEG", "CMYK"): 3,
    ("TIFF", "L"): 1,
    ("TIFF", "P"): 3,
    ("TIFF", "RGB"): 3,
    ("TIFF", "CMYK"): 3,
    ("TIFF", "YCbCr"): 3,
    ("TIFF", "RGBA"): 4,
}


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_the_pixels_of_a_jpeg_are_put_where_they_fit(mode, channels):
    content = saved(Image.fromarray(PIXELS).convert(mode), "JPEG")
    expected = read(content)
    out = np.zeros((21, 34, channels), np.uint8)
    assert np.shares_memory(read(content, out=out), out)
    np.testing.assert_array_equal(out, expected)
    for other in (np.zeros((34, 21, channels), np.uint8), np.zeros((21, 34, channels), np.uint16)):
        np.testing.assert_array_equal(read(content, out=other), expected)
        assert not other.any()
    smaller, to_smaller = np.zeros((8, 8, channels), np.uint8), DecodeOptions((8, 8))
    np.testing.assert_array_equal(read(content, to_smaller, smaller), read(content, to_smaller))
    damaged = content[:-100] + b"\xff\xd9"  # Pillow judges it, whatever is in `out` by then
    np.testing.assert_array_equal(read(damaged, out=out), read(damaged))


def test_a_jpeg_of_another_size_than_its_first_header_says():
    content = saved(Image.fromarray(PIXELS), "JPEG")
    at = content.index(b"\xff\xc0") + 5
    taller = content[:at] + (22).to_bytes(2, "big") + content[at + 2 :]
    twice = content[:2] + taller[at - 5 : at + 14] + content[2:]  # two frame headers, of which one lies
    out = np.zeros((22, 34, 3), np.uint8)
    with pytest.raises(UserError, match=r"a/0.png: damaged image"):
        read(twice, out=out)


@pytest.mark.parametrize(("kind", "mode"), CHANNELS)
def test_channels_are_those_of_the_file_or_what_is_asked_for(kind, mode):
    content = saved(Image.fromarray(PIXELS).convert(mode), kind)
    own = CHANNELS[kind, mode]
    with Image.open(io.BytesIO(content)) as opened:
        rgb, grey, first = opened.convert("RGB"), opened.convert("L"), opened.copy()
    found = read(content)
    assert found.dtype == np.uint8
    expected = {1: grey, 3: rgb, 4: first}[own]
    np.testing.assert_array_equal(found, np.asarray(expected).reshape(21, 34, own))
    np.testing.assert_array_equal(read(content, DecodeOptions(channels=3)), np.asarray(rgb))
    if mode in ("1", "L", "LA", "RGB", "RGBA"):  # Pillow has other ways from a palette
        np.testing.assert_array_equal(read(content, DecodeOptions(channels=1))[..., 0], np.asarray(grey))
    with pytest.raises(UserError, match=rf"a/0.png: {own} channels; allowed: 13, by dataset.channels or as"):
        read(content, DecodeOptions(channels=13))


def test_luminance_of_16_bits_is_that_of_8_on_another_scale():
    import imagecodecs

    deep = imagecodecs.png_encode(PIXELS.astype(np.uint16) * 257)
    grey = read(deep, DecodeOptions(channels=1))
    assert grey.dtype == np.uint16
    weights = np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(grey[..., 0], PIXELS.astype(float) @ weights * 257, atol=3)


@pytest.mark.parametrize("size", [(8, 8), (13, 40), (21, 9), (21, 34)])
def test_eight_bits_are_stretched_as_by_pillow(size):
    expected = Image.fromarray(PIXELS).resize(size[::-1], Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(read(saved(Image.fromarray(PIXELS)), DecodeOptions(size)), np.asarray(expected))
    more = np.concatenate([PIXELS, PIXELS], axis=-1)  # band by band
    np.testing.assert_array_equal(resized(more, size, "stretch")[..., 3:], np.asarray(expected))


def antialiased(signal: np.ndarray, size: int) -> np.ndarray:
    """The last axis resized by a triangle as wide as a step, or as a pixel where that is wider."""
    scale = signal.shape[-1] / size
    support = max(scale, 1.0)
    centres = (np.arange(size) + 0.5) * scale
    distances = np.abs(np.arange(signal.shape[-1]) + 0.5 - centres[:, None]) / support
    weights = np.maximum(1 - distances, 0)
    return signal @ (weights / weights.sum(axis=1, keepdims=True)).T


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("size", [(7, 9), (30, 50)])
def test_every_band_is_resized_by_the_antialiased_triangle(dtype, size):
    pixels = RNG.integers(0, np.iinfo(dtype).max, (20, 17, 13), dtype, endpoint=True)
    rows = antialiased(np.moveaxis(pixels, -1, 0).astype(float), size[1])
    expected = np.moveaxis(antialiased(rows.swapaxes(1, 2), size[0]), 0, -1).swapaxes(0, 1)
    found = resized(pixels, size, "stretch")
    assert found.dtype == dtype
    np.testing.assert_allclose(found, expected, atol=1.5)


def test_resized_extremes_stay_in_range():
    pixels = np.zeros((8, 8, 1), np.uint16)
    pixels[::2] = 65_535
    assert resized(pixels, (32, 32), "stretch").max() == 65_535
    assert (resized(np.full((8, 9, 2), 65_535, np.uint16), (5, 5), "stretch") == 65_535).all()


def marked(height: int, width: int) -> np.ndarray:
    """Every pixel holds its column, and in a second band its row."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x, y], axis=-1).astype(np.uint16) * 100 + 50  # the place of its centre


@pytest.mark.parametrize(
    ("shape", "size", "box"),
    [
        ((20, 60), (10, 10), (0, 20, 20, 20)),
        ((60, 20), (10, 10), (20, 0, 20, 20)),
        ((30, 30), (10, 20), (7.5, 0, 15, 30)),
    ],
)
def test_crop_takes_the_central_part(shape, size, box):
    top, left, height, width = box
    found = resized(marked(*shape), size, "crop")
    assert found.shape == (*size, 2)
    columns = (left + (np.arange(size[1]) + 0.5) * width / size[1]) * 100
    rows = (top + (np.arange(size[0]) + 0.5) * height / size[0]) * 100
    np.testing.assert_allclose(found[size[0] // 2, 1:-1, 0], columns[1:-1], atol=5)  # a twentieth of a pixel
    np.testing.assert_allclose(found[1:-1, size[1] // 2, 1], rows[1:-1], atol=5)


@pytest.mark.parametrize(
    ("shape", "size", "inner"),
    [((20, 60), (12, 12), (4, 0, 4, 12)), ((60, 20), (12, 12), (0, 4, 12, 4)), ((30, 30), (8, 15), (0, 3, 8, 8))],
)
def test_pad_adds_black_bars_evenly(shape, size, inner):
    top, left, height, width = inner
    pixels = RNG.integers(1, 256, (*shape, 3), np.uint8)
    found = resized(pixels, size, "pad")
    part = np.s_[top : top + height, left : left + width]
    expected = Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(found[part], np.asarray(expected))
    found[part] = 0
    assert not found.any()


@pytest.mark.parametrize("how", ["stretch", "crop", "pad"])
def test_every_way_gives_the_size_from_any_shape(how):
    for shape in ((1, 1), (1, 300), (300, 1), (17, 13), (97, 101)):
        for size in ((8, 8), (8, 31), (97, 11)):
            assert resized(np.ones((*shape, 2), np.uint8), size, how).shape == (*size, 2)


@pytest.mark.parametrize(
    ("size", "expected"), [(None, None), (32, (32, 32)), ((24, 40), (24, 40)), ([24, 40], (24, 40))]
)
def test_options_from_a_config(size, expected):
    fields = config_dict.ConfigDict({"resize": "pad", "channels": 13})
    fields.image_size = size
    assert DecodeOptions.from_config(fields) == DecodeOptions(expected, "pad", 13)
