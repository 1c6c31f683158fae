"""Decoder from the bytes of an image file to pixels of the wanted size and channels."""

import io
import logging
import math
import struct
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import imagecodecs
import numpy as np
import tifffile
from PIL import Image, TiffImagePlugin, UnidentifiedImageError

from largebatch.config.fields import DatasetConfig
from largebatch.data.dataset import Decode
from largebatch.util import UserError

MAX_IMAGE_PIXELS = 89_478_485  # Pillow's own limit
# Formats that Pillow decodes without other programs. Web data sets hold any of them under the name of a JPEG.
FORMATS = ("JPEG", "PNG", "TIFF", "GIF", "BMP", "WEBP")
TOO_LARGE = "{} pixels; allowed: up to {:,}, or a larger dataset.max_image_pixels"
GREY_MODES = ("1", "L", "LA", "La")
PNG_DEPTH = 24  # position of the number of bits per channel in a PNG

warnings.filterwarnings("ignore", module=r"PIL\.|tifffile")  # our errors name bad images
logging.getLogger("tifffile").disabled = True


@dataclass(frozen=True)
class DecodeOptions:
    """Options for the conversion of a file's pixels.

    Attributes:
      size: (height, width) in pixels to resize to; None keeps the size.
      resize: "stretch" | "crop" | "pad": how a resized image gets the wanted aspect ratio.
      channels: None takes the file's own. 3 makes RGB of grey, 1 makes grey of RGB; any other number must be the
        file's own.
      max_pixels: most pixels of an image, checked before it is decoded.
      indices: True to return the numbers in the file, as masks need: palette indices instead of colours, and values
        of fewer than 8 bits unscaled.
    """

    size: tuple[int, int] | None = None
    resize: str = "stretch"
    channels: int | None = None
    max_pixels: int = MAX_IMAGE_PIXELS
    indices: bool = False

    @classmethod
    def from_config(cls, fields: DatasetConfig) -> "DecodeOptions":
        """Create options from config.dataset; an `image_size` of one integer is a square."""
        size = fields.image_size
        if size is not None:
            size = (size, size) if isinstance(size, int) else tuple(size)
        return cls(size, fields.resize, fields.channels, fields.max_image_pixels)


class _Refused(Exception):
    """Raised for a sound file that is not supported; the message says what was found and what is allowed."""


def decode(name: str, content: bytes, options: DecodeOptions, out: np.ndarray | None = None) -> np.ndarray:
    """Decode an image to uint8 or uint16 [H, W, C].

    C is 1 for grey images, 3 for coloured ones (palette, CMYK and YCbCr become RGB), and for other TIFFs the number
    of their bands. Transparency is dropped, but a TIFF keeps all of its bands.

    Args:
      name: name of the image, for messages.
      content: the file.
      out: [H, W, C], a buffer for the pixels if they fit; a view of it is returned then.
    Raises:
      UserError: the image is damaged, too large, or not of the wanted number of channels; the message names it.
    """
    try:
        pixels = with_channels(_read_pixels(content, options, out), options.channels)
        return resized(pixels, options.size, options.resize)
    except _Refused as error:
        raise UserError(f"{name}: {error}") from error
    except Image.DecompressionBombError as error:
        text = TOO_LARGE.format(f"over {2 * Image.MAX_IMAGE_PIXELS:,}", options.max_pixels)
        raise UserError(f"{name}: {text}") from error
    except UnidentifiedImageError as error:
        raise UserError(f"{name}: damaged image (no JPEG, PNG, TIFF, GIF, BMP or WebP)") from error
    except MemoryError as error:
        raise UserError(f"{name}: does not fit into memory") from error
    except Exception as error:  # the libraries raise a dozen kinds on damaged input
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{name}: damaged image ({reason})") from error


def decoder(ids: Sequence[str], read: Callable[[Sequence[int]], Iterable[bytes]], options: DecodeOptions) -> Decode:
    """Return the function that decodes the examples of a data set.

    Args:
      ids: names of the examples.
      read: function that returns the files of these examples.
    """

    def decode_examples(examples: Sequence[int], out: np.ndarray | None = None) -> list[np.ndarray]:
        places = [None] * len(examples) if out is None else out
        files = zip(examples, read(examples), places, strict=True)
        return [decode(ids[example], content, options, place) for example, content, place in files]

    return decode_examples


def _read_pixels(content: bytes, options: DecodeOptions, out: np.ndarray | None) -> np.ndarray:
    """Decode a file to pixels [H, W, C] of its own size."""
    shape = _jpeg_shape(content)
    if shape is not None:
        _check_size(shape[0] * shape[1], options)
        pixels = _read_jpeg(content, shape, out)
        if pixels is not None:
            return pixels
    pixels = _read_bands(content, options) if content[:4] in TIFF_SIGNATURES else None
    return _read_by_pillow(content, options) if pixels is None else pixels


def _check_size(num_pixels: int, options: DecodeOptions) -> None:
    if num_pixels > options.max_pixels:
        raise _Refused(TOO_LARGE.format(f"{num_pixels:,}", options.max_pixels))


def _read_by_pillow(content: bytes, options: DecodeOptions) -> np.ndarray:
    """Decode any kind of FORMATS to 1 or 3 channels of 8 bits; PNGs keep 16."""
    if Image.MAX_IMAGE_PIXELS is not None:  # Pillow's own limit, of the whole process
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, options.max_pixels)
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        _check_size(image.width * image.height, options)
        if image.format == "PNG" and content[PNG_DEPTH] == 16:  # Pillow would return 8
            pixels = imagecodecs.png_decode(content)
            pixels = pixels.reshape(*pixels.shape[:2], -1)
            return pixels[..., : 3 if pixels.shape[-1] >= 3 else 1]  # without alpha
        image.load()
        mode = "L" if image.mode in GREY_MODES else "RGB"
        if options.indices and image.mode == "P":
            mode = "P"
        pixels = np.asarray(image if image.mode == mode else image.convert(mode))
        if options.indices and image.format == "PNG" and mode == "L" and content[PNG_DEPTH] < 8:
            pixels = pixels // (255 // (2 ** content[PNG_DEPTH] - 1))  # Pillow has multiplied by this
        return pixels.reshape(image.height, image.width, -1)


# ---- JPEG: by libjpeg-turbo alone, two to six times as fast as Pillow's Python code around it --------------

JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
# Markers of frame headers, which hold the size: baseline, extended and progressive, Huffman coded.
JPEG_FRAMES = (0xC0, 0xC1, 0xC2)
JPEG_SCAN = 0xDA


def _jpeg_shape(content: bytes) -> tuple[int, int, int] | None:
    """Return the [H, W, C] of a grey or YCbCr JPEG of 8 bits, from its frame header; None for anything else."""
    if not content.startswith(JPEG_START):
        return None
    position = len(JPEG_START)
    while position + 10 <= len(content) and content[position] == 0xFF:
        marker = content[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        if marker in JPEG_FRAMES:
            depth, height, width, components = struct.unpack_from(">BHHB", content, position + 4)
            return (height, width, components) if depth == 8 and components in (1, 3) else None
        if marker == JPEG_SCAN or not 0xC4 <= marker <= 0xFE or 0xD0 <= marker <= 0xD9:
            return None
        position += 2 + int.from_bytes(content[position + 2 : position + 4], "big")
    return None


def _read_jpeg(content: bytes, shape: tuple[int, int, int], out: np.ndarray | None) -> np.ndarray | None:
    """Decode a JPEG to pixels uint8 of `shape`, equal to Pillow's; return None for a damaged one, left to Pillow.

    Args:
      out: contiguous buffer, used if the pixels fit: new memory for each small image takes a third of the time.
    """
    if not content.endswith(JPEG_END):
        return None
    plane = None
    if out is not None and out.shape == shape and out.dtype == np.uint8:
        plane = out.reshape(shape[:2]) if shape[2] == 1 else out
    try:
        pixels = imagecodecs.jpeg8_decode(content, out=plane)
    except (imagecodecs.Jpeg8Error, ValueError):  # ValueError: another size than in the header
        return None
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    return pixels if pixels.shape == shape else None


# ---- TIFFs of any number of bands of 8 or 16 bits, by tifffile --------------------------------------------

TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
TIFF_DTYPES = ("uint8", "uint16")
TIFF_CODECS = {"none": (1,), "LZW": (5,), "deflate": (8, 32946), "packbits": (32773,), "LZMA": (34925,)}
TIFF_CODECS |= {"zstd": (50000, 34926), "JPEG": (7,), "JPEG 2000": (33003, 33004, 33005, 34712)}
REDUCED_OR_MASK = 0b101  # bits of the subfile type: an overview or a mask, which is no band
MIN_IS_WHITE, MIN_IS_BLACK, RGB = 0, 1, 2


def _read_bands(content: bytes, options: DecodeOptions) -> np.ndarray | None:
    """Decode a TIFF of one page, or of several of one band each, to [H, W, bands]; return None for Pillow's."""
    every_page = tifffile.TiffFile(io.BytesIO(content)).pages
    pages = [page for page in every_page if not page.subfiletype & REDUCED_OR_MASK]
    if not pages:
        raise ValueError("no page")
    first = pages[0]
    if len(pages) == 1 and _is_for_pillow(first):
        return None
    for page in pages:
        _check_page(page)
    kinds = [(page.imagewidth, page.imagelength, page.samplesperpixel, page.dtype) for page in pages]
    if len(pages) > 1 and (len(set(kinds)) > 1 or first.samplesperpixel > 1):
        found = ", ".join("{}x{} pixels of {} x {}".format(*kind) for kind in kinds[:3])
        raise _Refused(f"{len(pages)} pages ({found}); allowed: one, or pages of one band each and the same size")
    _check_size(first.imagelength * first.imagewidth, options)
    pixels = np.concatenate([_read_page(page) for page in pages], axis=-1)
    is_rgb = len(pages) == 1 and first.photometric == RGB
    return pixels[..., :3] if is_rgb and options.channels in (1, 3) else pixels


def _is_for_pillow(page: tifffile.TiffPage) -> bool:
    """Return True if Pillow reads a page unchanged: grey, palette or RGB of up to 8 bits, or CMYK and the like."""
    if page.bitspersample not in range(1, 9) or page.sampleformat != 1:
        return False
    samples = {MIN_IS_WHITE: 1, MIN_IS_BLACK: 1, RGB: 3}.get(page.photometric, page.samplesperpixel)
    return page.samplesperpixel == samples and page.compression in TiffImagePlugin.COMPRESSION_INFO


def _check_page(page: tifffile.TiffPage) -> None:
    """Refuse a page that is not uint8 or uint16, has colours of another kind or another codec, or lacks a strip."""
    bits = page.bitspersample
    is_whole = page.dtype is not None and bits == 8 * page.dtype.itemsize
    if not is_whole or str(page.dtype) not in TIFF_DTYPES:
        name = str(page.dtype) if is_whole else f"{bits} bits of sample format {page.sampleformat}"
        raise _Refused(f"pixels are {name}; allowed: {' and '.join(TIFF_DTYPES)}")
    if not any(page.compression in codes for codes in TIFF_CODECS.values()):
        name = getattr(page.compression, "name", f"method {page.compression}")
        raise _Refused(f"compressed by {name}; allowed: {', '.join(TIFF_CODECS)}")
    if page.photometric not in (MIN_IS_WHITE, MIN_IS_BLACK, RGB):
        name = getattr(page.photometric, "name", page.photometric)
        raise _Refused(f"{bits}-bit colours of kind {name}; allowed: grey, RGB or bands")
    if 0 in page.shaped or page.shaped[1] != 1:
        raise ValueError(f"of shape {page.shaped}")
    segments = math.prod(page.chunked)
    if len(page.dataoffsets) != segments or len(page.databytecounts) != segments or 0 in page.databytecounts:
        raise ValueError(f"not all of its {segments:,} strips or tiles are there")


def _read_page(page: tifffile.TiffPage) -> np.ndarray:
    """Decode a page to [H, W, samples]."""
    planes = page.asarray(squeeze=False, maxworkers=1)  # [planes, 1, H, W, samples of a plane]
    pixels = np.moveaxis(planes[:, 0], 0, 2).reshape(page.imagelength, page.imagewidth, page.samplesperpixel)
    return np.iinfo(pixels.dtype).max - pixels if page.photometric == MIN_IS_WHITE else pixels


# ---- channels and sizes ------------------------------------------------------------------------------


def with_channels(pixels: np.ndarray, channels: int | None) -> np.ndarray:
    """Convert pixels [H, W, C] to a number of channels; see `DecodeOptions`."""
    found = pixels.shape[-1]
    if channels is None or channels == found:
        return pixels
    if found == 1 and channels == 3:
        return np.repeat(pixels, 3, axis=-1)
    if found == 3 and channels == 1:
        # Luminance by ITU-R 601-2 in Pillow's integer weights, so that 16 bits fit into 32 as well.
        luminance = pixels.astype(np.uint32) @ np.array([19595, 38470, 7471], np.uint32)
        return ((luminance + 2**15) >> 16).astype(pixels.dtype)[..., None]
    raise _Refused(f"{found} channels; allowed: {channels}, by dataset.channels or as the images of the run")


def resized(pixels: np.ndarray, size: tuple[int, int] | None, how: str, *, nearest: bool = False) -> np.ndarray:
    """Resize pixels [H, W, C] by Pillow's bilinear filter with antialiasing, or to the nearest pixel.

    Args:
      size: (height, width); None leaves the pixels as they are.
      how: "stretch" changes the aspect ratio, "crop" takes the largest central part that has the wanted one, "pad"
        adds black bars at both sides.
    """
    if size is None or pixels.shape[:2] == size:
        return pixels
    (height, width), (new_height, new_width) = pixels.shape[:2], size
    box = 0, 0, width, height  # left, upper, right, lower
    is_narrow = width * new_height <= height * new_width  # compared with `size`
    if how == "crop":
        part_width = width if is_narrow else height * new_width / new_height
        part_height = width * new_height / new_width if is_narrow else height
        left, upper = (width - part_width) / 2, (height - part_height) / 2
        box = left, upper, left + part_width, upper + part_height
    elif how == "pad":
        inner_width = max(round(width * new_height / height), 1) if is_narrow else new_width
        inner_height = new_height if is_narrow else max(round(height * new_width / width), 1)
        left, upper = (new_width - inner_width) // 2, (new_height - inner_height) // 2
        padded = np.zeros((*size, pixels.shape[-1]), pixels.dtype)
        inner = resized(pixels, (inner_height, inner_width), "stretch", nearest=nearest)
        padded[upper : upper + inner_height, left : left + inner_width] = inner
        return padded

    def resize(plane: np.ndarray) -> np.ndarray:
        resample = Image.Resampling.NEAREST if nearest else Image.Resampling.BILINEAR
        return np.asarray(Image.fromarray(plane).resize(size[::-1], resample, box=box))

    if pixels.dtype == np.uint8 and pixels.shape[-1] == 3:
        return resize(pixels)  # equal bits in half the time
    bands = np.moveaxis(pixels, -1, 0)
    if pixels.dtype == np.uint8:
        return np.stack([resize(np.ascontiguousarray(band)) for band in bands], axis=-1)
    deep = [resize(band.astype(np.float32)) for band in bands]  # which holds 16 bits
    return np.stack([np.clip(np.rint(band), 0, 65_535) for band in deep], axis=-1).astype(pixels.dtype)
