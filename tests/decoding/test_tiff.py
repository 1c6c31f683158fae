"""TIFFs of many bands and 16 bits: every packing gives the pixels written, and a hostile file is little work."""

import io
import random
import struct
import time
import tracemalloc

import imagecodecs
import numpy as np
import pytest
import tifffile

from largebatch.decoding import images
from largebatch.decoding.images import DecodeOptions, ImageFile, Limits, decode
from largebatch.util import UserError

AS_IT_IS = DecodeOptions()


def read(content: bytes, options: DecodeOptions = AS_IT_IS, max_pixels: int = 10**6) -> np.ndarray:
    return decode(ImageFile("a/0.tif", 0, len(content), lambda: content), options, Limits(max_pixels))


def refused(content: bytes, **arguments) -> str:
    """The one line that says why."""
    with pytest.raises(UserError) as error:
        read(content, **arguments)
    assert len(str(error.value).splitlines()) == 1
    assert str(error.value).startswith("a/0.tif: ")
    return str(error.value)


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


# ---- what is read ------------------------------------------------------------------------------------

PACKINGS = {
    "plain": {},
    "big endian": {"byteorder": ">"},
    "tiles": {"tile": (16, 16)},
    "strips": {"rowsperstrip": 4, "compression": "lzw"},
    "predictor": {"compression": "deflate", "predictor": True},
    "zstd": {"compression": "zstd", "tile": (16, 16), "predictor": True},
    "lzma": {"compression": "lzma"},
    "packbits": {"compression": "packbits"},
}


@pytest.mark.parametrize("layout", ["interleaved", "planar", "pages"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_bands_are_those_that_were_written(layout, packing):
    for channels, dtype in ((13, np.uint16), (4, np.uint8), (2, np.uint16)):
        options = dict(PACKINGS[packing])
        pixels = random_pixels(channels, dtype)
        if options.pop("byteorder", None):
            buffer = io.BytesIO()
            with tifffile.TiffWriter(buffer, byteorder=">", bigtiff=True) as writer:
                writer.write(pixels, photometric="minisblack", planarconfig="contig", metadata=None)
            content = buffer.getvalue()
        else:
            content = write_bands(pixels, layout, **options)
        found = read(content)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, pixels)


@pytest.mark.parametrize("codec", ["jpeg2000", "jpeg"])
def test_image_codecs_are_read(codec):
    pixels = np.repeat(np.linspace(0, 250, 32).astype(np.uint8)[:, None, None], 32, axis=1).repeat(4, axis=2)
    content = write_bands(
        pixels, "planar", compression=codec, compressionargs={"level": 95} if codec == "jpeg" else {}
    )
    assert np.abs(read(content).astype(int) - pixels).max() <= 4
    if codec == "jpeg2000":
        np.testing.assert_array_equal(read(content), pixels)


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
    bands = write_bands(pixels, "interleaved")
    assert "4 channels; allowed: 3, by dataset.channels or as the images of the run" in refused(
        bands, options=DecodeOptions(channels=3)
    )
    np.testing.assert_array_equal(read(bands, DecodeOptions(channels=4)), pixels)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_a_png_of_16_bits_keeps_them_without_alpha(channels):
    pixels = random_pixels(channels, np.uint16)
    content = imagecodecs.png_encode(pixels if channels > 1 else pixels[..., 0])
    found = read(content)
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, pixels[..., : 3 if channels > 2 else 1])


# ---- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int16", "uint32", "float64", "int8", "complex64"])
def test_other_pixels_are_named(dtype):
    line = refused(packed(np.zeros((8, 8, 5), dtype), photometric="minisblack", planarconfig="contig"))
    assert line == f"a/0.tif: pixels are {dtype}; allowed: uint8 and uint16"


def test_pixels_of_12_bits_are_named():
    content = packed(np.zeros((8, 8), np.uint16), bitspersample=12, photometric="minisblack")
    assert "pixels are 12 bits of sample format 1; allowed: uint8 and uint16" in refused(content)


@pytest.mark.parametrize(("code", "name"), [(50002, "JPEGXL"), (34887, "LERC"), (12345, "method 12345")])
def test_other_codecs_are_named(code, name):
    content = patched(write_bands(random_pixels(5, np.uint16), "interleaved"), 259, code)
    line = refused(content)
    assert line.startswith(f"a/0.tif: compressed by {name}; allowed: none, LZW, deflate")


def test_pages_that_are_no_bands_are_named():
    buffer = io.BytesIO()
    with tifffile.TiffWriter(buffer) as writer:
        for size in (8, 9):
            writer.write(np.zeros((size, size, 3), np.uint8), photometric="rgb")
    assert "2 pages (8x8 pixels of 3 x uint8, 9x9 pixels of 3 x uint8); allowed: one, or" in refused(
        buffer.getvalue()
    )


# ---- hostile files -----------------------------------------------------------------------------------


def tags_of(content: bytes) -> dict[int, int]:
    """Positions of the tags of the first page of a small little-endian TIFF."""
    (start,) = struct.unpack_from("<L", content, 4)
    (count,) = struct.unpack_from("<H", content, start)
    return {struct.unpack_from("<H", content, start + 2 + 12 * i)[0]: start + 2 + 12 * i for i in range(count)}


def patched(content: bytes, tag: int, value: int, count: int = 1) -> bytes:
    """The tag of the first page says something else, as LONG."""
    changed = bytearray(content)
    struct.pack_into("<HLL", changed, tags_of(content)[tag] + 2, 4, count, value)
    return bytes(changed)


def many_pages(count: int) -> bytes:
    """Pages of one tag each."""
    page = struct.Struct("<HHHLLL")
    pages = [page.pack(1, 256, 3, 1, 16, 8 + page.size * (i + 1)) for i in range(count)]
    return b"II*\0\x08\0\0\0" + b"".join(pages)


def circle() -> bytes:
    content = bytearray(many_pages(3))
    struct.pack_into("<L", content, len(content) - 4, 8)
    return bytes(content)


def deflate_bomb() -> bytes:
    """A strip of 16 x 16 pixels that unpacks to 64 MiB."""
    strip = imagecodecs.zlib_encode(bytes(2**26), level=9)
    content = write_bands(np.zeros((16, 16, 5), np.uint16), "interleaved", compression="deflate")
    return patched(patched(content + strip, 273, len(content)), 279, len(strip))


def picture_bomb(codec: str) -> bytes:
    """Four strips of 16 x 16 pixels, in each of which a codec finds 4,000 x 4,000."""
    if codec == "jpeg":
        strip = imagecodecs.jpeg_encode(np.zeros((4000, 4000), np.uint8))
    else:
        strip = imagecodecs.jpeg2k_encode(np.zeros((4000, 4000), np.uint8), codecformat="j2k")
    content = write_bands(np.zeros((16, 16, 4), np.uint8), "planar", compression=codec, rowsperstrip=16)
    positions = struct.pack("<8L", *[len(content) + 32] * 4, *[len(strip)] * 4)
    content = patched(patched(content, 273, len(content), 4), 279, len(content) + 16, 4)
    return content + positions + strip


BANDS = write_bands(np.zeros((16, 16, 13), np.uint16), "interleaved")
HOSTILE = {
    "a million squared": (
        lambda: patched(patched(patched(BANDS, 256, 10**6), 257, 10**6), 278, 10**6),
        "1,000,000,000,000 pixels, which take as much as",
    ),
    "tile of 2 ** 40 pixels": (
        lambda: patched(
            patched(write_bands(np.zeros((16, 16, 5), np.uint16), "interleaved", tile=(16, 16)), 322, 2**20),
            323,
            2**20,
        ),
        "256 pixels, which take as much as",
    ),
    "60,000 bands": (lambda: patched(BANDS, 277, 60_000), "60,000 bands; allowed: up to 1,024"),
    "a million pages": (lambda: many_pages(1_000_000), "over 1,024 pages; allowed: up to 1,024"),
    "circle of pages": (circle, "damaged image (its pages lead in a circle)"),
    "page of 60,000 tags": (
        lambda: b"II*\0\x08\0\0\0" + struct.pack("<H", 60_000) + bytes(60_000 * 12 + 4),
        "a page of 60,000 tags; allowed: up to 512",
    ),
    "strips beyond the end": (lambda: patched(BANDS, 273, 10**6, 2**10), "damaged image (tag 273 lies outside"),
    "strips of 4 GB": (lambda: patched(BANDS, 273, 8, 2**30), "bytes of header and metadata"),
    "no strips": (lambda: patched(BANDS, 273, 0, 0), "damaged image"),
    "no bytes in a strip": (lambda: patched(BANDS, 279, 0), "damaged image (not all of its"),
    "first page beyond the end": (lambda: b"II*\0" + struct.pack("<L", 2**31) + bytes(8), "damaged image"),
    "no pages": (lambda: b"II*\0" + bytes(8), "damaged image (no page)"),
    "cut": (lambda: BANDS[: len(BANDS) - 100], "damaged image"),
    "cut in the header": (lambda: BANDS[:40], "damaged image"),
    "deflate bomb": (deflate_bomb, "damaged image"),
    "JPEG bomb": (lambda: picture_bomb("jpeg"), "damaged image (a strip or tile of 16,000,000 pixels"),
    "JPEG 2000 bomb": (lambda: picture_bomb("jpeg2000"), "damaged image (a strip or tile of 16,000,000 pixels"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tiffs_are_one_line_at_once_in_little_memory(name):
    make, words = HOSTILE[name]
    content = make()
    begin = time.perf_counter()
    tracemalloc.start()
    assert words in refused(content, max_pixels=89_478_485)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * len(content) + 2**21  # the file once more, without the tags that are not needed
    assert time.perf_counter() - begin < 5


def test_the_limits_hold_in_both_directions():
    """16 x 16 pixels of 13 bands and 16 bits take as much as 1,664 of 4 bytes, and one strip of them as well."""
    assert read(BANDS, max_pixels=3328).shape == (16, 16, 13)
    assert "3,328 of 4 bytes; allowed: up to 3,327" in refused(BANDS, max_pixels=3327)
    deep = imagecodecs.png_encode(np.zeros((16, 16, 3), np.uint16))
    assert read(deep, max_pixels=512).shape == (16, 16, 3)
    assert "a/0.tif: 256 pixels, of 8 bytes; allowed: up to 511" in refused(deep, max_pixels=511)


def test_bands_take_their_room_until_they_are_resized(monkeypatch):
    """Threads together hold no more pixels than one image may have."""
    limits, while_resizing = Limits(10**5), []

    def look(pixels, *_):
        while_resizing.append(10**5 - limits.pixels._left)
        return pixels

    monkeypatch.setattr(images, "resized", look)
    for content in (BANDS, imagecodecs.png_encode(np.zeros((16, 16), np.uint16))):
        decode(ImageFile("a", 0, len(content), lambda content=content: content), AS_IT_IS, limits)
    assert while_resizing == [3328, 512]
    assert limits.pixels._left == 10**5


def outcome_of(content: bytes) -> str:
    try:
        read(content)
    except UserError as error:
        return f"{len(str(error).splitlines())} line"
    return "pixels"


def test_random_damage_is_one_line_or_pixels():
    """1,000 files with some bytes changed, most of them in the tags."""
    rng = random.Random(0)
    sound = [
        write_bands(random_pixels(5, np.uint16), layout, **options)
        for layout in ("interleaved", "planar", "pages")
        for options in ({}, {"compression": "lzw", "predictor": True}, {"compression": "deflate", "tile": (16, 16)})
    ]
    begin, outcomes = time.perf_counter(), set()
    for _ in range(1000):
        content = bytearray(rng.choice(sound))
        tags = [position + at for position in tags_of(bytes(content)).values() for at in range(12)]
        for _ in range(rng.randrange(1, 5)):
            content[rng.choice(tags) if rng.random() < 0.8 else rng.randrange(len(content))] = rng.randrange(256)
        outcomes.add(outcome_of(bytes(content)))
    assert outcomes == {"pixels", "1 line"}
    assert time.perf_counter() - begin < 60
