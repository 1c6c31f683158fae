"""How image files become arrays; expected values from Pillow, tifffile and NumPy."""

import io
import itertools
import struct
import zlib

import imagecodecs
import numpy as np
import pytest
import tifffile
from conftest import CASES
from PIL import Image, ImageFile, WebPImagePlugin

from largebatch.config.fields import DatasetConfig
from largebatch.data.decode import MAX_IMAGE_PIXELS, DecodeOptions, decode, resized
from largebatch.util import UserError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (21, 34, 3), np.uint8)


def saved(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def read(content: bytes, options: DecodeOptions | None = None, out=None) -> np.ndarray:
    return decode("a/0.png", content, options or DecodeOptions(), out)


def refused(content: bytes, options: DecodeOptions | None = None) -> str:
    """The one line that says why."""
    with pytest.raises(UserError) as error:
        read(content, options)
    assert len(str(error.value).splitlines()) == 1
    assert str(error.value).startswith("a/0.png: ")
    return str(error.value).removeprefix("a/0.png: ")


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


@pytest.mark.parametrize("size", [None, 32, (24, 40)])
def test_options_from_a_config(size):
    fields = DatasetConfig(image_size=size, resize="pad", channels=13, max_image_pixels=99)
    assert DecodeOptions.from_config(fields) == DecodeOptions((32, 32) if size == 32 else size, "pad", 13, 99)
    assert DatasetConfig().max_image_pixels == MAX_IMAGE_PIXELS == 89_478_485


# ---- kinds of files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["GIF", "BMP", "WEBP", "JPEG", "TIFF", "PNG"])
def test_the_kind_of_a_file_is_told_by_its_content(kind):
    """Web data sets hold GIF, BMP and WebP files that are named .jpg."""
    content = saved(Image.fromarray(PIXELS), kind)
    with Image.open(io.BytesIO(content)) as image:
        np.testing.assert_array_equal(read(content), np.asarray(image.convert("RGB")))


def png_of_a_header(width: int, height: int, depth: int) -> bytes:
    """A PNG of so many pixels, none of which are there."""
    chunks = (b"IHDR", struct.pack(">LLBBBBB", width, height, depth, 2, 0, 0, 0)), (b"IDAT", b"")
    packed = [struct.pack(">L", len(c)) + kind + c + struct.pack(">L", zlib.crc32(kind + c)) for kind, c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def gif_of_a_large_frame() -> bytes:
    """16 x 16 pixels, whose first frame has 60,000 x 60,000 that Pillow would clear when it opens the file."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 16, 16, 0x80, 0, 0) + bytes(6)
    control = b"!\xf9\x04\x08\x00\x00\x00\x00"
    return screen + control + b"," + struct.pack("<HHHHB", 0, 0, 60_000, 60_000, 0) + b"\x02\x01\x00\x00;"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "deep PNG", "GIF", "WEBP", "TIFF", "deep TIFF"])
def test_the_limit_on_pixels_holds_in_both_directions(kind, monkeypatch):
    deep = PIXELS.astype(np.uint16)
    if kind == "deep PNG":
        content = imagecodecs.png_encode(deep)
    elif kind == "deep TIFF":
        content = packed(deep, photometric="rgb")
    else:
        content = saved(Image.fromarray(PIXELS), kind)
    assert read(content, DecodeOptions(max_pixels=21 * 34)).shape == (21, 34, 3)
    decoders = (imagecodecs, "jpeg8_decode"), (imagecodecs, "png_decode"), (tifffile.TiffPage, "asarray")
    for place, name in (*decoders, (ImageFile.ImageFile, "load"), (WebPImagePlugin.WebPImageFile, "load")):
        monkeypatch.setattr(place, name, lambda *_, **__: pytest.fail("decoded"))
    allowed = "pixels; allowed: up to 713, or a larger dataset.max_image_pixels"
    assert refused(content, DecodeOptions(max_pixels=713)) == f"714 {allowed}"


def test_too_many_pixels_are_refused_before_they_are_decoded():
    for content in (
        png_of_a_header(40_000, 40_000, 8),
        png_of_a_header(40_000, 40_000, 16),
        gif_of_a_large_frame(),
    ):
        assert refused(content).startswith("over 178,956,970 pixels; allowed: up to 89,478,485")


def test_a_script_under_an_images_name_is_not_run():
    """Pillow would start Ghostscript."""
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n"
    assert refused(script) == "damaged image (no JPEG, PNG, TIFF, GIF, BMP or WebP)"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "GIF", "BMP", "WEBP"])
def test_a_cut_file_is_damaged(kind):
    content = saved(Image.fromarray(np.repeat(PIXELS, 4, axis=0)), kind)
    for keep in (0, 3, 30, len(content) // 2):
        assert refused(content[:keep]).startswith("damaged image (")


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_a_png_of_16_bits_keeps_them_without_alpha(channels):
    pixels = random_pixels(channels, np.uint16)
    found = read(imagecodecs.png_encode(pixels if channels > 1 else pixels[..., 0]))
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, pixels[..., : 3 if channels > 2 else 1])


# ---- TIFFs -------------------------------------------------------------------------------------------


def random_pixels(channels: int, dtype, shape=(19, 23)) -> np.ndarray:
    rng = np.random.default_rng(channels)
    return rng.integers(0, np.iinfo(dtype).max, (*shape, channels), dtype, endpoint=True)


def packed(pixels: np.ndarray, **options) -> bytes:
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, pixels, **options)
    return buffer.getvalue()


def write_bands(pixels: np.ndarray, layout: str, **options) -> bytes:
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
        found = read(write_bands(pixels, layout, **PACKINGS[packing]))
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, pixels)


def test_bands_packed_by_jpeg_are_nearly_those_that_were_written():
    smooth = np.add.outer(np.arange(64), np.arange(48))[..., None] + np.arange(0, 50, 10)
    found = read(write_bands(smooth.astype(np.uint8), "planar", compression="jpeg"))
    assert found.shape == smooth.shape
    np.testing.assert_allclose(found, smooth, atol=4)


def test_jpeg_2000_in_a_tiff_is_read_and_other_codecs_are_named():
    if not CASES.exists():
        pytest.skip(f"the cases are not at {CASES}")
    content = (CASES / "jpeg2000_rgb8.tif").read_bytes()
    np.testing.assert_array_equal(read(content), tifffile.imread(io.BytesIO(content)))
    line = refused((CASES / "lerc_rgb8.tif").read_bytes())
    assert line.startswith("compressed by LERC; allowed: none, LZW, deflate")


@pytest.mark.parametrize(("code", "name"), [(50002, "JPEGXL"), (34887, "LERC"), (12345, "method 12345")])
def test_other_codecs_are_named(code, name):
    content = bytearray(write_bands(random_pixels(5, np.uint16), "interleaved"))
    (start,) = struct.unpack_from("<L", content, 4)
    at = content.index(struct.pack("<HH", 259, 3), start)
    struct.pack_into("<L", content, at + 8, code)
    assert refused(bytes(content)).startswith(f"compressed by {name}; allowed: none, LZW, deflate")


def test_one_band_of_16_bits_and_grey_of_8_are_one_channel():
    for dtype in (np.uint8, np.uint16):
        pixels = random_pixels(1, dtype)
        np.testing.assert_array_equal(read(packed(pixels[..., 0])), pixels)
        white = packed(np.iinfo(dtype).max - pixels[..., 0], photometric="miniswhite")
        np.testing.assert_array_equal(read(white), pixels)


def test_overviews_and_masks_are_no_bands():
    pixels = random_pixels(13, np.uint16)
    buffer = io.BytesIO()
    with tifffile.TiffWriter(buffer) as writer:
        writer.write(pixels, photometric="minisblack", planarconfig="contig")
        writer.write(pixels[::2, ::2], photometric="minisblack", planarconfig="contig", subfiletype=1)
    np.testing.assert_array_equal(read(buffer.getvalue()), pixels)


def test_a_tiff_in_red_green_blue_and_more_gives_colours_where_they_are_asked_for():
    pixels = random_pixels(4, np.uint8)
    content = packed(pixels, photometric="rgb", extrasamples=["unassalpha"])
    np.testing.assert_array_equal(read(content), pixels)
    np.testing.assert_array_equal(read(content, DecodeOptions(channels=3)), pixels[..., :3])
    assert refused(write_bands(pixels, "interleaved"), DecodeOptions(channels=3)).startswith("4 channels; allowed")


@pytest.mark.parametrize("dtype", ["float32", "int16", "uint32", "float64", "int8", "complex64"])
def test_other_pixels_are_named(dtype):
    line = refused(packed(np.zeros((8, 8, 5), dtype), photometric="minisblack", planarconfig="contig"))
    assert line == f"pixels are {dtype}; allowed: uint8 and uint16"


def test_what_else_a_tiff_may_hold_is_named():
    twelve = packed(np.zeros((8, 8), np.uint16), bitspersample=12, photometric="minisblack")
    assert refused(twelve) == "pixels are 12 bits of sample format 1; allowed: uint8 and uint16"
    buffer = io.BytesIO()
    with tifffile.TiffWriter(buffer) as writer:
        for size in (8, 9):
            writer.write(np.zeros((size, size, 3), np.uint8), photometric="rgb")
    pages = "2 pages (8x8 pixels of 3 x uint8, 9x9 pixels of 3 x uint8); allowed: one, or pages of one band each"
    assert refused(buffer.getvalue()).startswith(pages)
    bands = write_bands(random_pixels(13, np.uint16), "interleaved")
    for damaged in (bands[:-100], bands[:40], b"II*\0" + bytes(8), b"II*\0" + struct.pack("<L", 2**31) + bytes(8)):
        assert refused(damaged).startswith("damaged image (")


def test_random_damage_is_one_line_or_pixels():
    rng = np.random.default_rng(0)
    sound = [
        write_bands(random_pixels(5, np.uint16), layout, **options)
        for layout in ("interleaved", "planar", "pages")
        for options in ({}, {"compression": "lzw", "predictor": True}, {"compression": "deflate", "tile": (16, 16)})
    ]
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


def test_an_image_that_memory_does_not_hold_is_named(monkeypatch):
    def too_large(*_):
        raise MemoryError

    monkeypatch.setattr("largebatch.data.decode._read_pixels", too_large)
    with pytest.raises(UserError, match=r"^a\.png: does not fit into memory$"):
        decode("a.png", b"", DecodeOptions())
