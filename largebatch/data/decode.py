"""Decoder from the bytes of an image file to pixels of the wanted size and channels."""

import contextlib
import io
import logging
import math
import warnings
from dataclasses import dataclass

import imagecodecs
import numpy as np
import tifffile
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from largebatch.config.fields import DatasetConfig
from largebatch.util import UserError, one_line

MAX_IMAGE_PIXELS = 89_478_485  # Pillow's own limit, which is for the whole process; ours holds for one data set
Image.MAX_IMAGE_PIXELS = None
# Formats that Pillow decodes without other programs. Web data sets hold any of them under the name of a JPEG.
FORMATS = ("JPEG", "PNG", "TIFF", "GIF", "BMP", "WEBP")
GREY_MODES = ("1", "L", "LA", "La")
PNG_DEPTH = 24  # position of the number of bits per channel in a PNG
JPEG_END = b"\xff\xd9"  # missing where a file was cut off, which imagecodecs does not tell

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


def decode(name: str, content: bytes, options: DecodeOptions) -> np.ndarray:
    """Decode an image to uint8 or uint16 [H, W, C].

    C is 1 for grey images, 3 for coloured ones (palette, CMYK and YCbCr become RGB), and for other TIFFs the number
    of their bands. Transparency is dropped, but a TIFF keeps all of its bands.

    Args:
      name: name of the image, for messages.
      content: the file.
    Raises:
      UserError: the image is damaged, too large, or not of the wanted number of channels; the message names it.
    """
    try:
        pixels = with_channels(_read_pixels(content, options), options.channels)
        return resized(pixels, options.size, options.resize)
    except _Refused as error:
        raise UserError(f"{name}: {error}") from error
    except UnidentifiedImageError as error:
        raise UserError(f"{name}: damaged image (no JPEG, PNG, TIFF, GIF, BMP or WebP)") from error
    except MemoryError as error:
        raise UserError(f"{name}: does not fit into memory") from error
    except Exception as error:  # the libraries raise a dozen kinds on damaged input
        raise UserError(f"{name}: damaged image ({one_line(error)})") from error


def _read_pixels(content: bytes, options: DecodeOptions) -> np.ndarray:
    """Decode a file to pixels [H, W, C] of its own size: 1 or 3 channels, or the bands of a TIFF."""
    if content[:4] in TIFF_SIGNATURES:
        pages = _band_pages(content)
        if pages:
            return _read_bands(pages, options)
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        _check_size(image.width * image.height, options)
        depth = content[PNG_DEPTH] if image.format == "PNG" else 8
        if depth == 16:  # Pillow would return 8 bits
            pixels = imagecodecs.png_decode(content).reshape(image.height, image.width, -1)
            return pixels[..., : 3 if pixels.shape[-1] >= 3 else 1]  # without alpha
        if image.format == "JPEG" and image.mode in ("L", "RGB") and content.endswith(JPEG_END):
            with contextlib.suppress(imagecodecs.Jpeg8Error):  # damaged: Pillow tells how
                # The same libjpeg-turbo, in half the time.
                return imagecodecs.jpeg8_decode(content).reshape(image.height, image.width, -1)
        image.load()
        mode = "L" if image.mode in GREY_MODES else "RGB"
        if options.indices and image.mode == "P":
            mode = "P"
        pixels = np.asarray(image if image.mode == mode else image.convert(mode))
        if options.indices and mode == "L" and depth < 8:
            pixels = pixels // (255 // (2**depth - 1))  # Pillow has multiplied by this
        return pixels.reshape(image.height, image.width, -1)


def _check_size(num_pixels: int, options: DecodeOptions) -> None:
    if num_pixels > options.max_pixels:
        allowed = f"up to {options.max_pixels:,}, or a larger dataset.max_image_pixels"
        raise _Refused(f"{num_pixels:,} pixels; allowed: {allowed}")


# ---- TIFFs of any number of bands of 8 or 16 bits, by tifffile --------------------------------------------

TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
TIFF_DTYPES = ("uint8", "uint16")
REDUCED_OR_MASK = 0b101  # bits of the subfile type: an overview or a mask, which is no band
MIN_IS_WHITE, MIN_IS_BLACK, RGB = 0, 1, 2


def _band_pages(content: bytes) -> list[tifffile.TiffPage]:
    """Return the pages that hold the bands of a TIFF; [] for one that Pillow reads unchanged."""
    every_page = tifffile.TiffFile(io.BytesIO(content)).pages
    pages = [page for page in every_page if not page.subfiletype & REDUCED_OR_MASK]
    if not pages:
        raise ValueError("no page")
    return [] if len(pages) == 1 and _is_for_pillow(pages[0]) else pages


def _is_for_pillow(page: tifffile.TiffPage) -> bool:
    """Return True if Pillow reads a page unchanged: grey, palette or RGB of up to 8 bits, or CMYK and the like."""
    if page.bitspersample not in range(1, 9) or page.sampleformat != 1:
        return False
    samples = {MIN_IS_WHITE: 1, MIN_IS_BLACK: 1, RGB: 3}.get(page.photometric, page.samplesperpixel)
    return page.samplesperpixel == samples and page.compression in TiffImagePlugin.COMPRESSION_INFO


def _read_bands(pages: list[tifffile.TiffPage], options: DecodeOptions) -> np.ndarray:
    """Decode one page, or several of one band each, to [H, W, bands]."""
    for page in pages:
        _check_page(page)
    first = pages[0]
    kinds = [(page.imagewidth, page.imagelength, page.samplesperpixel, page.dtype) for page in pages]
    if len(pages) > 1 and (len(set(kinds)) > 1 or first.samplesperpixel > 1):
        found = ", ".join("{}x{} pixels of {} x {}".format(*kind) for kind in kinds[:3])
        raise _Refused(f"{len(pages)} pages ({found}); allowed: one, or pages of one band each and the same size")
    _check_size(first.imagelength * first.imagewidth, options)
    pixels = np.concatenate([_read_page(page) for page in pages], axis=-1)
    is_rgb = len(pages) == 1 and first.photometric == RGB
    return pixels[..., :3] if is_rgb and options.channels in (1, 3) else pixels


def _check_page(page: tifffile.TiffPage) -> None:
    """Refuse a page that is not uint8 or uint16, has colours of another kind, or lacks a strip."""
    bits = page.bitspersample
    is_whole = page.dtype is not None and bits == 8 * page.dtype.itemsize
    if not is_whole or str(page.dtype) not in TIFF_DTYPES:
        name = str(page.dtype) if is_whole else f"{bits} bits of sample format {page.sampleformat}"
        raise _Refused(f"pixels are {name}; allowed: {' and '.join(TIFF_DTYPES)}")
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
    resample = Image.Resampling.NEAREST if nearest else Image.Resampling.BILINEAR
    resize = {"stretch": Image.Image.resize, "crop": ImageOps.fit, "pad": ImageOps.pad}[how]

    def resize_plane(plane: np.ndarray) -> np.ndarray:
        return np.asarray(resize(Image.fromarray(plane), size[::-1], resample))

    if pixels.dtype == np.uint8 and pixels.shape[-1] == 3:
        return resize_plane(pixels)  # equal bits in half the time
    bands = np.moveaxis(pixels, -1, 0)
    if pixels.dtype == np.uint8:
        return np.stack([resize_plane(np.ascontiguousarray(band)) for band in bands], axis=-1)
    deep = [resize_plane(band.astype(np.float32)) for band in bands]  # which holds 16 bits
    return np.stack([np.clip(np.rint(band), 0, 65_535) for band in deep], axis=-1).astype(pixels.dtype)
