"""Decoding of image files; expected values come from Pillow, tifffile and NumPy."""

import io
import itertools
import struct
import zlib

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image, ImageFile, WebPImagePlugin

from largebatch.data.decode import DecodeOptions, decode, resized
from largebatch.util import UserError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (21, 34, 3), np.uint8)


def saved(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def read(content: bytes, **options) -> np.ndarray:
    return decode("a/0.png", content, DecodeOptions(**options))


def refused(content: bytes, **options) -> str:
    """Return the one line that says why a file is refused."""
    with pytest.raises(UserError) as error:
        read(content, **options)
    assert len(str(error.value).splitlines()) == 1
    assert str(error.value).startswith("a/0.png: ")
    return str(error.value).removeprefix("a/0.png: ")


# ---- channels and sizes ------------------------------------------------------------------------------

CHANNELS = {  # files of these kinds and Pillow's modes; web data sets hold any kind under the name of a JPEG
    1: ["PNG 1", "PNG L", "PNG LA", "JPEG L", "TIFF L"],
    3: ["PNG P", "PNG RGB", "PNG RGBA", "JPEG RGB", "JPEG CMYK", "TIFF P", "TIFF RGB", "TIFF CMYK", "TIFF YCbCr"],
    4: ["TIFF RGBA"],
}
CHANNELS[3] += ["GIF P", "BMP RGB", "WEBP RGB"]


@pytest.mark.parametrize(("own", "file"), [(own, file) for own, files in CHANNELS.items() for file in files])
def test_channels_are_those_of_the_file_or_what_is_asked_for(own, file):
    kind, mode = file.split()
    content = saved(Image.fromarray(PIXELS).convert(mode), kind)
    with Image.open(io.BytesIO(content)) as opened:
        rgb, grey, first = opened.convert("RGB"), opened.convert("L"), opened.copy()
    found = read(content)
    assert found.dtype == np.uint8
    expected = {1: grey, 3: rgb, 4: first}[own]
    np.testing.assert_array_equal(found, np.asarray(expected).reshape(21, 34, own))
    np.testing.assert_array_equal(read(content, channels=3), np.asarray(rgb))
    if mode not in ("P", "CMYK", "YCbCr"):  # from which Pillow has other ways
        np.testing.assert_array_equal(read(content, channels=1)[..., 0], np.asarray(grey))
    assert refused(content, channels=13).startswith(f"{own} channels; allowed: 13, by dataset.channels or as")


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_a_png_of_16_bits_keeps_them_without_alpha(channels):
    pixels = random_pixels(channels, np.uint16)
    content = imagecodecs.png_encode(pixels if channels > 1 else pixels[..., 0])
    found = read(content)
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, pixels[..., : 3 if channels > 2 else 1])
    if channels == 3:
        luminance = pixels.astype(float) @ np.array([0.299, 0.587, 0.114])
        np.testing.assert_allclose(read(content, channels=1)[..., 0], luminance, atol=3)


@pytest.mark.parametrize("size", [(8, 8), (30, 50)])
def test_every_band_is_stretched_as_by_pillow(size):
    expected = Image.fromarray(PIXELS).resize(size[::-1], Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(read(saved(Image.fromarray(PIXELS)), size=size), np.asarray(expected))
    more = np.concatenate([PIXELS, PIXELS], axis=-1)
    np.testing.assert_array_equal(resized(more, size, "stretch")[..., 3:], np.asarray(expected))
    pixels = RNG.integers(0, 65_535, (20, 17, 13), np.uint16, endpoint=True)
    found = resized(pixels, size, "stretch")
    for band in range(13):
        plane = Image.fromarray(pixels[..., band].astype(np.float32))
        expected = np.asarray(plane.resize(size[::-1], Image.Resampling.BILINEAR))
        np.testing.assert_allclose(found[..., band], expected, atol=0.51)
    assert (resized(np.full((8, 9, 2), 65_535, np.uint16), size, "stretch") == 65_535).all()


@pytest.mark.parametrize(
    ("shape", "size", "box", "inner"),
    [
        ((20, 60), (12, 12), (20, 0, 40, 20), (4, 0, 4, 12)),
        ((60, 20), (12, 12), (0, 20, 20, 40), (0, 4, 12, 4)),
        ((30, 30), (8, 16), (0, 7.5, 30, 22.5), (0, 4, 8, 8)),
    ],
)
def test_crop_takes_the_central_part_and_pad_adds_black_bars_evenly(shape, size, box, inner):
    pixels, how = RNG.integers(1, 256, (*shape, 3), np.uint8), Image.Resampling.BILINEAR
    expected = Image.fromarray(pixels).resize(size[::-1], how, box=box)
    np.testing.assert_array_equal(resized(pixels, size, "crop"), np.asarray(expected))
    top, left, height, width = inner
    part, padded = np.s_[top : top + height, left : left + width], np.zeros((*size, 3), np.uint8)
    padded[part] = np.asarray(Image.fromarray(pixels).resize((width, height), how))
    np.testing.assert_array_equal(resized(pixels, size, "pad"), padded)


# ---- files that are too large or damaged ---------------------------------------------------------------


def png_of_a_header(width: int, height: int, depth: int) -> bytes:
    """Return a PNG of so many pixels, none of which are there."""
    chunks = (b"IHDR", struct.pack(">LLBBBBB", width, height, depth, 2, 0, 0, 0)), (b"IDAT", b"")
    packed = [struct.pack(">L", len(c)) + kind + c + struct.pack(">L", zlib.crc32(kind + c)) for kind, c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "deep PNG", "GIF", "WEBP", "TIFF", "deep TIFF"])
def test_the_limit_on_pixels_holds_before_they_are_decoded(kind, monkeypatch):
    deep = PIXELS.astype(np.uint16)
    if kind == "deep PNG":
        content = imagecodecs.png_encode(deep)
    elif kind == "deep TIFF":
        content = packed(deep, photometric="rgb")
    else:
        content = saved(Image.fromarray(PIXELS), kind)
    assert read(content, max_pixels=21 * 34).shape == (21, 34, 3)
    decoders = (imagecodecs, "jpeg8_decode"), (imagecodecs, "png_decode"), (tifffile.TiffPage, "asarray")
    for place, name in (*decoders, (ImageFile.ImageFile, "load"), (WebPImagePlugin.WebPImageFile, "load")):
        monkeypatch.setattr(place, name, lambda *_, **__: pytest.fail("decoded"))
    allowed = "pixels; allowed: up to 713, or a larger dataset.max_image_pixels"
    assert refused(content, max_pixels=713) == f"714 {allowed}"
    assert refused(png_of_a_header(40_000, 40_000, 16)).startswith("1,600,000,000 pixels; allowed: up to 89,478")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "GIF", "BMP", "WEBP"])
def test_a_cut_file_is_damaged(kind):
    content = saved(Image.fromarray(np.repeat(PIXELS, 4, axis=0)), kind)
    for keep in (0, 3, 30, len(content) // 2):
        assert refused(content[:keep]).startswith("damaged image (")


def test_a_script_under_an_images_name_is_not_run():
    """Pillow would start Ghostscript."""
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n"
    assert refused(script) == "damaged image (no JPEG, PNG, TIFF, GIF, BMP or WebP)"


def test_random_damage_is_one_line_or_pixels():
    rng = np.random.default_rng(0)
    options = {}, {"compression": "lzw", "predictor": True}, {"compression": "deflate", "tile": (16, 16)}
    sound = [write_bands(random_pixels(5, np.uint16), *both) for both in itertools.product(LAYOUTS, options)]
    sound += [saved(Image.fromarray(PIXELS), "JPEG")]
    outcomes = set()
    for _ in range(400):
        content = bytearray(sound[rng.integers(len(sound))])
        for _ in range(rng.integers(1, 5)):
            content[rng.integers(len(content))] = rng.integers(256)
        try:
            outcomes.add(read(bytes(content)).ndim)
        except UserError as error:
            outcomes.add(f"{len(str(error).splitlines())} line")
    assert outcomes == {3, "1 line"}


# ---- TIFFs -------------------------------------------------------------------------------------------


def random_pixels(channels: int, dtype, shape=(19, 23)) -> np.ndarray:
    rng = np.random.default_rng(channels)
    return rng.integers(0, np.iinfo(dtype).max, (*shape, channels), dtype, endpoint=True)


def packed(pixels: np.ndarray, **options) -> bytes:
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, pixels, **options)
    return buffer.getvalue()


def write_bands(pixels: np.ndarray, layout: str, options: dict) -> bytes:
    options = {"photometric": "minisblack", "metadata": None, **options}
    if layout == "interleaved":
        return packed(pixels, planarconfig="contig", **options)
    planes = np.moveaxis(pixels, -1, 0)
    if layout == "planar":
        return packed(planes, planarconfig="separate", **options)
    buffer = io.BytesIO()
    with tifffile.TiffWriter(buffer) as writer:
        for plane in planes:
            writer.write(plane, contiguous=False, **options)
    return buffer.getvalue()


PACKINGS = {
    "plain": {},
    "big endian": {"byteorder": ">", "bigtiff": True},
    "tiles": {"tile": (16, 16)},
    "strips": {"rowsperstrip": 4, "compression": "lzw"},
    "predictor": {"compression": "deflate", "predictor": True},
    "zstd": {"compression": "zstd", "tile": (16, 16), "predictor": True},
    "lzma": {"compression": "lzma"},
    "packbits": {"compression": "packbits"},
    "jpeg2000": {"compression": "jpeg2000"},
}
LAYOUTS = ("interleaved", "planar", "pages")
NOT_WRITTEN = (("big endian", "pages"), ("jpeg2000", "interleaved"))  # by tifffile


@pytest.mark.parametrize(
    ("packing", "layout"), [pair for pair in itertools.product(PACKINGS, LAYOUTS) if pair not in NOT_WRITTEN]
)
def test_bands_are_those_that_were_written(packing, layout):
    for channels, dtype in ((13, np.uint16), (4, np.uint8), (2, np.uint16)):
        pixels = random_pixels(channels, dtype)
        found = read(write_bands(pixels, layout, PACKINGS[packing]))
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, pixels)


def test_bands_packed_by_jpeg_are_nearly_those_that_were_written():
    smooth = np.add.outer(np.arange(64), np.arange(48))[..., None] + np.arange(0, 50, 10)
    found = read(write_bands(smooth.astype(np.uint8), "planar", {"compression": "jpeg"}))
    np.testing.assert_allclose(found, smooth, atol=4)


def test_grey_overviews_and_colours_of_a_tiff():
    for dtype in (np.uint8, np.uint16):
        pixels = random_pixels(1, dtype)
        np.testing.assert_array_equal(read(packed(pixels[..., 0])), pixels)
        white = packed(np.iinfo(dtype).max - pixels[..., 0], photometric="miniswhite")
        np.testing.assert_array_equal(read(white), pixels)
    pixels, buffer = random_pixels(13, np.uint16), io.BytesIO()
    with tifffile.TiffWriter(buffer) as writer:
        writer.write(pixels, photometric="minisblack", planarconfig="contig")
        writer.write(pixels[::2, ::2], photometric="minisblack", planarconfig="contig", subfiletype=1)
    np.testing.assert_array_equal(read(buffer.getvalue()), pixels)  # an overview is no band
    pixels = random_pixels(4, np.uint8)
    content = packed(pixels, photometric="rgb", extrasamples=["unassalpha"])
    np.testing.assert_array_equal(read(content), pixels)
    np.testing.assert_array_equal(read(content, channels=3), pixels[..., :3])
    assert refused(write_bands(pixels, "interleaved", {}), channels=3).startswith("4 channels; allowed")


def two_pages() -> bytes:
    buffer = io.BytesIO()
    with tifffile.TiffWriter(buffer) as writer:
        for size in (8, 9):
            writer.write(np.zeros((size, size, 3), np.uint8), photometric="rgb")
    return buffer.getvalue()


BANDS = write_bands(random_pixels(13, np.uint16), "interleaved", {})
REFUSED = {
    "pixels are 12 bits of sample format 1; allowed: uint8 and uint16": packed(
        np.zeros((8, 8), np.uint16), bitspersample=12, photometric="minisblack"
    ),
    "2 pages (8x8 pixels of 3 x uint8, 9x9 pixels of 3 x uint8); allowed: one, or pages of one band": two_pages(),
    "damaged image (failed to read": BANDS[:-100],
    **{
        f"pixels are {dtype}; allowed: uint8 and uint16": packed(np.zeros((8, 8), dtype), photometric="minisblack")
        for dtype in ("float32", "int16", "uint32", "complex64")
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_else_a_tiff_may_hold_is_named(message):
    assert refused(REFUSED[message]).startswith(message)
