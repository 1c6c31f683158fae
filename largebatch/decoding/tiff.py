"""Decoder of TIFFs of any number of bands, 8 or 16 bits deep, which Pillow does not read.

A file may come from anyone. Its pages are counted, and the bytes of their tags, before tifffile sees it. tifffile
is shown only the tags that locate the pixels and their codec: it also knows the tags of many microscopes, whose
readers need not be trusted for that.
"""

import io
import logging
import math
import struct
import warnings
from dataclasses import dataclass

import imagecodecs
import numpy as np
import tifffile
from PIL import Image

logging.getLogger("tifffile").disabled = True  # our errors name bad images
warnings.filterwarnings("ignore", module="tifffile")

SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MAX_BANDS = MAX_PAGES = 1024  # a page for each band, or for a smaller copy
MAX_TAGS = 512  # of a page
DTYPES = ("uint8", "uint16")
BYTES_BY_TYPE = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}  # of others, 1
# Tags of subfile type, size, bits, compression, photometric, fill order, strips, samples, planes, predictor,
# colour map, tiles, extra samples, sample format, JPEG tables, sub-sampling. Their values take memory.
TAGS = {254, 256, 257, 258, 259, 262, 266, 273, 277, 278, 279, 284, 317, 320}
TAGS |= {322, 323, 324, 325, 338, 339, 347, 530}
HIDDEN_TAG = 65_535
REDUCED_OR_MASK = 0b101  # bits of the subfile type: an overview or a mask, which is no band

# Codecs that return no more bytes than requested, and two whose size is known beforehand. With other codecs of
# imagecodecs a small file may take any amount of memory.
JPEG, JPEG_2000 = (7,), (33003, 33004, 33005, 34712)
CODECS = {
    "none": (1,),
    "LZW": (5,),
    "deflate": (8, 32946),
    "packbits": (32773,),
    "LZMA": (34925,),
    "zstd": (50000, 34926),
    "JPEG": JPEG,
    "JPEG 2000": JPEG_2000,
}
MIN_IS_WHITE, MIN_IS_BLACK, RGB = 0, 1, 2


class Refused(Exception):
    """Raised for a sound file that is not supported; the message says what was found and what is allowed."""


class OverRead(Exception):
    """Raised when the header and metadata of a file are larger than its pixels explain."""


@dataclass(frozen=True)
class _Layout:
    """Layout of the numbers in a TIFF's directories."""

    order: str  # of bytes, as in `struct`
    offset: str  # format of an offset, and of the count of a tag
    num_tags: str
    tag_bytes: int

    @classmethod
    def of(cls, content: bytes) -> "_Layout":
        order = "<" if content[:2] == b"II" else ">"
        return cls(order, "Q", "Q", 20) if content[2:4].strip(b"\0") == b"+" else cls(order, "L", "H", 12)

    def read(self, code: str, content: bytes, position: int) -> int:
        try:
            return struct.unpack_from(self.order + code, content, position)[0]
        except struct.error as error:
            raise ValueError(f"nothing at byte {position:,} of {len(content):,}") from error


def _walk(content: bytes, max_bytes: int) -> tuple[bytes, int]:
    """Return the file without the tags that are not needed, and the number of its pages.

    Args:
      max_bytes: limit of the bytes of the values of all tags that are needed.
    Raises:
      ValueError: a page or a value lies outside of the file, or pages lead in a circle.
      Refused: too many pages or tags.
      OverRead: the values take more than `max_bytes`.
    """
    layout, shown = _Layout.of(content), bytearray(content)
    seen: set[int] = set()
    offset_bytes = struct.calcsize("=" + layout.offset)
    position, left = layout.read(layout.offset, content, 8 if offset_bytes == 8 else 4), max_bytes
    while position:
        if position in seen:
            raise ValueError("its pages lead in a circle")
        seen.add(position)
        if len(seen) > MAX_PAGES:
            raise Refused(f"over {MAX_PAGES:,} pages; allowed: up to {MAX_PAGES:,}")
        num_tags = layout.read(layout.num_tags, content, position)
        if num_tags > MAX_TAGS:
            raise Refused(f"a page of {num_tags:,} tags; allowed: up to {MAX_TAGS}")
        position += struct.calcsize("=" + layout.num_tags)
        for begin in range(position, position + num_tags * layout.tag_bytes, layout.tag_bytes):
            code, kind = (layout.read("H", content, begin + at) for at in (0, 2))
            if code not in TAGS:
                struct.pack_into(layout.order + "HH", shown, begin, HIDDEN_TAG, 1)
                struct.pack_into(layout.order + layout.offset, shown, begin + 4, 1)  # one byte, in the tag itself
                continue
            num_bytes = BYTES_BY_TYPE.get(kind, 1) * layout.read(layout.offset, content, begin + 4)
            left -= num_bytes
            if left < 0:
                raise OverRead
            where = layout.read(layout.offset, content, begin + 4 + offset_bytes)
            if num_bytes > offset_bytes and where + num_bytes > len(content):
                raise ValueError(f"tag {code} lies outside of the file")
        position = layout.read(layout.offset, content, position + num_tags * layout.tag_bytes)
    return bytes(shown), len(seen)


@dataclass(frozen=True)
class Bands:
    """TIFF whose pixels are not decoded yet."""

    pages: list[tifffile.TiffPage]  # all of one size and dtype; several pages have one band each
    height: int
    width: int
    num_bytes: int  # memory that decoding takes

    @property
    def is_rgb(self) -> bool:
        """True if the first three bands are red, green and blue."""
        return len(self.pages) == 1 and self.pages[0].photometric == RGB

    def read(self) -> np.ndarray:
        """Decode the pixels [H, W, bands].

        Raises:
          ValueError: the file is damaged.
        """
        bands = [_read_page(page) for page in self.pages]
        return bands[0] if len(bands) == 1 else np.concatenate(bands, axis=-1)


def open_bands(content: bytes, max_header_bytes: int) -> Bands | None:
    """Inspect a TIFF without decoding it; return None if Pillow reads all of its bands.

    Args:
      max_header_bytes: limit of the bytes of the tags that locate the pixels.
    Raises:
      Refused: pixels other than uint8 and uint16, or a compression that is not one of CODECS, among others.
      OverRead: the tags take more than `max_header_bytes`.
      ValueError: the file is damaged.
    """
    shown, num_pages = _walk(content, max_header_bytes)
    opened = tifffile.TiffFile(io.BytesIO(shown))
    pages = [opened.pages[index] for index in range(num_pages)]
    pages = [page for page in pages if not page.subfiletype & REDUCED_OR_MASK]
    if not pages:
        raise ValueError("no page")
    if len(pages) == 1 and _is_a_picture(pages[0]):
        return None
    first = pages[0]
    for page in pages:
        _check_page(page)
    if len(pages) > 1 and not all(_is_band_beside(page, first) for page in pages):
        found = ", ".join(_describe(page) for page in pages[:3])
        raise Refused(f"{len(pages)} pages ({found}); allowed: one, or pages of one band each and the same size")
    pixels = first.imagelength * first.imagewidth
    segment = math.prod(first.chunks)  # a strip or tile, which may be larger than the picture
    num_bytes = (len(pages) * first.samplesperpixel * pixels + segment) * first.dtype.itemsize
    return Bands(pages, first.imagelength, first.imagewidth, num_bytes)


def _is_a_picture(page: tifffile.TiffPage) -> bool:
    """Return True if Pillow reads a page unchanged: grey, palette or RGB of up to 8 bits, or CMYK and the like."""
    if page.bitspersample not in range(1, 9) or page.sampleformat != 1:
        return False
    if page.photometric in (MIN_IS_WHITE, MIN_IS_BLACK):
        return page.samplesperpixel == 1
    return page.photometric != RGB or page.samplesperpixel == 3


def _is_band_beside(page: tifffile.TiffPage, first: tifffile.TiffPage) -> bool:
    return page.samplesperpixel == 1 and page.shaped == first.shaped and page.dtype == first.dtype


def _describe(page: tifffile.TiffPage) -> str:
    return f"{page.imagewidth}x{page.imagelength} pixels of {page.samplesperpixel} x {page.dtype}"


def _check_page(page: tifffile.TiffPage) -> None:
    """Refuse a page that is not uint8 or uint16, has too many bands or an unknown codec, or lacks a strip."""
    if page.samplesperpixel > MAX_BANDS:
        raise Refused(f"{page.samplesperpixel:,} bands; allowed: up to {MAX_BANDS:,}")
    bits, sample_format = page.bitspersample, page.sampleformat
    if str(page.dtype) not in DTYPES or bits != 8 * page.dtype.itemsize:
        known = page.dtype is not None and bits == 8 * page.dtype.itemsize
        name = str(page.dtype) if known else f"{bits} bits of sample format {sample_format}"
        raise Refused(f"pixels are {name}; allowed: {' and '.join(DTYPES)}")
    if page.photometric not in (MIN_IS_WHITE, MIN_IS_BLACK, RGB):
        name = getattr(page.photometric, "name", page.photometric)
        raise Refused(f"{bits}-bit colours of kind {name}; allowed: grey, RGB or bands")
    if not any(page.compression in codes for codes in CODECS.values()):
        name = getattr(page.compression, "name", f"method {page.compression}")
        raise Refused(f"compressed by {name}; allowed: {', '.join(CODECS)}")
    if 0 in page.shaped or page.shaped[1] != 1:
        raise ValueError(f"{_describe(page)}")
    segments = math.prod(page.chunked)
    if len(page.dataoffsets) != segments or len(page.databytecounts) != segments or 0 in page.databytecounts:
        raise ValueError(f"not all of its {segments:,} strips or tiles are there")


def _read_page(page: tifffile.TiffPage) -> np.ndarray:
    """Decode a page to [H, W, samples]."""
    if page.compression in (*JPEG, *JPEG_2000):
        for begin, length in zip(page.dataoffsets, page.databytecounts, strict=True):
            page.parent.filehandle.seek(begin)
            _check_segment(page, page.parent.filehandle.read(length))
    planes = page.asarray(squeeze=False, maxworkers=1)  # [planes, 1, H, W, samples of a plane]
    pixels = np.moveaxis(planes[:, 0], 0, 2).reshape(page.imagelength, page.imagewidth, page.samplesperpixel)
    if page.photometric == MIN_IS_WHITE:
        pixels = np.iinfo(pixels.dtype).max - pixels
    return pixels


def _check_segment(page: tifffile.TiffPage, content: bytes) -> None:
    """Raise ValueError if an encoded strip or tile is larger than its page declares."""
    if page.compression in JPEG:
        with Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
            pixels, samples = image.width * image.height, len(image.getbands())
    else:
        if not content.startswith(b"\xff\x4f\xff\x51"):
            raise ValueError("no JPEG 2000 codestream")
        right, lower, left, upper = struct.unpack_from(">LLLL", content, 8)
        pixels, samples = (right - left) * (lower - upper), struct.unpack_from(">H", content, 40)[0]
    if not 0 < pixels * samples <= math.prod(page.chunks):
        raise ValueError(f"a strip or tile of {pixels:,} pixels of {samples} bands in {math.prod(page.chunks):,}")


def read_deep_png(content: bytes) -> np.ndarray:
    """Decode a PNG of 16 bits a channel, whose size was checked, to uint16 [H, W, 1 or 3]; drop alpha."""
    pixels = imagecodecs.png_decode(content)
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    return pixels[..., : 3 if pixels.shape[-1] >= 3 else 1]
