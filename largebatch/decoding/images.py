"""Labelled images in memory, and their decoding."""

import contextlib
import functools
import io
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from largebatch.config.fields import DatasetConfig
from largebatch.decoding import jpeg, tiff
from largebatch.util import UserError, run_ranges

MAX_IMAGE_PIXELS = 89_478_485  # Pillow's own limit for a decompression bomb
# Bytes that a file may have for each allowed pixel, and that its decoded bands may have.
BYTES_PER_PIXEL = 4
# Pillow may take 200 bytes for one byte of a header. A byte for so many allowed pixels, or 1 MiB, is read.
PIXELS_PER_HEADER_BYTE = 32
MIN_HEADER_BYTES = 2**20

# Formats whose size Pillow knows before it decodes, and that run no other program. Web data sets hold any of them
# under the name of a JPEG.
FORMATS = ("JPEG", "PNG", "TIFF", "GIF", "BMP", "WEBP")
PNG_DEPTH = 24  # position of the number of bits per channel in a PNG
GREY_MODES = ("1", "L", "LA", "La")

PngImagePlugin.MAX_TEXT_MEMORY = 8 * PngImagePlugin.MAX_TEXT_CHUNK  # of unpacked text, which is not used
warnings.filterwarnings("ignore", module=r"PIL\.")  # our errors name bad images


@dataclass(frozen=True)
class Dataset:
    """Decoded images in memory."""

    images: np.ndarray  # uint8 or uint16 [N, H, W, C]
    labels: np.ndarray  # int32 [N]; -1 where the class is not known
    class_names: list[str]
    example_ids: list[str]  # "Class/file" where there are files


@dataclass(frozen=True)
class DecodeOptions:
    """Options for the conversion of a file's pixels.

    Attributes:
      size: (height, width) in pixels to resize to; None keeps the size.
      resize: "stretch" | "crop" | "pad": how a resized image gets the wanted aspect ratio.
      channels: None takes the file's own. 3 makes RGB of grey, 1 makes grey of RGB; any other number must be the
        file's own.
      indices: True to return the numbers in the file, as masks need: palette indices instead of colours, and values
        of fewer than 8 bits unscaled.
    """

    size: tuple[int, int] | None = None
    resize: str = "stretch"
    channels: int | None = None
    indices: bool = field(default=False, repr=False)  # not in the fingerprints of caches

    @classmethod
    def from_config(cls, fields: DatasetConfig) -> "DecodeOptions":
        """Create options from config.dataset; an `image_size` of one integer is a square."""
        size = fields.image_size
        if size is not None:
            size = (size, size) if isinstance(size, int) else tuple(size)
        return cls(size, fields.resize, fields.channels)


AS_THEY_ARE = DecodeOptions()
NO_WAIT = contextlib.nullcontext()


@dataclass(frozen=True)
class ImageFile:
    """Image that is still encoded."""

    example_id: str
    label: int
    num_bytes: int
    read: Callable[[], bytes]


class Room:
    """Budget that threads share: together they never take more, however many they are.

    Less than a thousandth of it is not counted: counting takes a tenth of the time of a small image.
    """

    def __init__(self, amount: int):
        self._left = amount
        self._uncounted = amount // 1000
        self._changed = threading.Condition()

    def taken(self, amount: int) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that waits until `amount`, at most the whole, is free, and holds it."""
        return NO_WAIT if amount < self._uncounted else self._counted(amount)

    @contextlib.contextmanager
    def _counted(self, amount: int) -> Iterator[None]:
        with self._changed:
            while self._left < amount:
                self._changed.wait()
            self._left -= amount
        try:
            yield
        finally:
            with self._changed:
                self._left += amount
                self._changed.notify_all()


class Limits:
    """Limits of one image, and the budget that all images that are decoded at once share."""

    def __init__(self, max_pixels: int):
        self.max_pixels, self.max_bytes = max_pixels, BYTES_PER_PIXEL * max_pixels
        self.header_bytes = max(MIN_HEADER_BYTES, max_pixels // PIXELS_PER_HEADER_BYTE)
        self.pixels, self.bytes = Room(self.max_pixels), Room(self.max_bytes)

    def error(self, file: ImageFile, what: str, allowed: int) -> UserError:
        """Return the error for a file that exceeds a limit."""
        text = f"{file.example_id}: {what}; allowed: up to {allowed:,}, or a larger dataset.max_image_pixels"
        if allowed != self.max_pixels:
            text += f" than {self.max_pixels:,}"
        return UserError(text)


class _Encoded(io.BytesIO):
    """File in memory of which only `left` bytes can be read: headers take far more memory than their bytes."""

    left = 0

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        self.left -= len(content)
        if self.left < 0:
            raise tiff.OverRead
        return content


def decode_dataset(
    files: list[ImageFile], class_names: list[str], options: DecodeOptions, max_pixels: int
) -> Dataset:
    """Decode all files on all cores, into one array.

    Args:
      options: without a size, all files must have the same.
      max_pixels: limit of one image, and of all images that are decoded at once.
    Raises:
      UserError: an image is damaged, too large, or of another size, depth or number of channels than the first; the
        message names it.
    """
    ids, labels = [file.example_id for file in files], np.array([file.label for file in files], np.int32)
    images = decode_each(ids, lambda index, limits: decode(files[index], options, limits), max_pixels)
    return Dataset(images, labels, class_names, ids)


def decode_each(ids: list[str], decode_one: Callable[[int, "Limits"], np.ndarray], max_pixels: int) -> np.ndarray:
    """Decode examples on all cores, into one array [N, H, W, C].

    Args:
      decode_one: function that decodes the example of an index, within limits that all share.
      max_pixels: as of `decode_dataset`, whose errors are raised here, too.
    """
    limits = Limits(max_pixels)
    with pillow_limited_to(max_pixels):
        first = decode_one(0, limits)
        try:
            images = np.empty((len(ids), *first.shape), first.dtype)
        except MemoryError as error:
            size = f"{first.shape[1]}x{first.shape[0]} pixels, as {ids[0]},"
            raise UserError(
                f"dataset.image_size: {len(ids)} images of {size} do not fit into memory; set a smaller size"
            ) from error

        def decode_range(begin: int, end: int) -> None:
            for i in range(begin, end):
                image = decode_one(i, limits)
                if image.shape[2] != first.shape[2] or image.dtype != first.dtype:
                    raise UserError(
                        f"dataset.channels: {ids[i]} has {image.shape[2]} of {image.dtype}, "
                        f"{ids[0]} has {first.shape[2]} of {first.dtype}; allowed: the same in all"
                    )
                if image.shape != first.shape:
                    raise UserError(
                        f"dataset.image_size: {ids[i]} is {image.shape[1]}x{image.shape[0]} pixels, "
                        f"{ids[0]} is {first.shape[1]}x{first.shape[0]}; set a size to resize to"
                    )
                images[i] = image

        run_ranges(decode_range, len(ids))
    return images


@contextlib.contextmanager
def pillow_limited_to(max_pixels: int) -> Iterator[None]:
    """Set Pillow's own limit, which is of the whole process.

    Our limit is checked before an image is decoded. Pillow's, which is twice as high, is for GIFs: they take memory
    while they are opened.
    """
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def decode(file: ImageFile, options: DecodeOptions, limits: Limits, out: np.ndarray | None = None) -> np.ndarray:
    """Decode one image to uint8 or uint16 [H, W, C].

    C is 1 for grey images, 3 for coloured ones (palette, CMYK and YCbCr become RGB), and for other TIFFs the number
    of their bands. Transparency is dropped, but a TIFF keeps all of its bands.

    Args:
      out: [H, W, C], a buffer for the pixels if they fit; a view of it is returned then.
    Raises:
      UserError: the image is damaged, too large, or not of the wanted number of channels; the message names it.
    """
    if file.num_bytes > limits.max_bytes:
        raise limits.error(file, f"{file.num_bytes:,} bytes", limits.max_bytes)
    with limits.bytes.taken(file.num_bytes):
        try:
            return _decode_bytes(file.read(), file, options, limits, out)
        except UserError:
            raise
        except tiff.Refused as error:
            raise UserError(f"{file.example_id}: {error}") from error
        except Image.DecompressionBombError as error:
            raise limits.error(file, f"over {2 * limits.max_pixels:,} pixels", limits.max_pixels) from error
        except tiff.OverRead as error:
            what = f"over {limits.header_bytes:,} bytes of header and metadata"
            raise limits.error(file, what, limits.header_bytes) from error
        except UnidentifiedImageError as error:
            kinds = "no JPEG, PNG, TIFF, GIF, BMP or WebP"
            raise UserError(f"{file.example_id}: damaged image ({kinds})") from error
        except MemoryError as error:
            raise UserError(f"{file.example_id}: does not fit into memory; {file.num_bytes:,} bytes") from error
        except Exception as error:  # Pillow and zipfile raise a dozen kinds on damaged input
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{file.example_id}: damaged image ({reason})") from error


def _decode_bytes(
    content: bytes, file: ImageFile, options: DecodeOptions, limits: Limits, out: np.ndarray | None
) -> np.ndarray:
    """Decode a file to pixels [H, W, C] as of `options`, after a check of the memory that they will take."""
    header = jpeg.read_header(content) if len(content) <= limits.header_bytes else None
    if header is not None and header.height * header.width <= limits.max_pixels:
        with limits.pixels.taken(header.height * header.width):
            decoded = jpeg.decode(content, header, out)
            if decoded is not None:
                return _fitted(decoded, options)
    if content[:4] in tiff.SIGNATURES:
        bands = tiff.open_bands(content, limits.header_bytes)
        if bands is not None:
            return _decode_bands(bands, file, options, limits)
    encoded = _Encoded(content)
    encoded.left = limits.header_bytes
    if content[8:12] == b"WEBP":  # the header is read in C, together with the rest of the file
        encoded.left += len(content)
    with Image.open(encoded, formats=FORMATS) as image:
        pixels = image.width * image.height
        is_deep = image.format == "PNG" and content[PNG_DEPTH] == 16  # Pillow would return 8
        taken = 2 * pixels if is_deep else pixels
        if taken > limits.max_pixels:
            what = f"{pixels:,} pixels" + (", of 8 bytes" if is_deep else "")
            raise limits.error(file, what, limits.max_pixels)
        encoded.left += 2 * BYTES_PER_PIXEL * pixels
        with limits.pixels.taken(taken):
            if is_deep:
                return _fitted(tiff.read_deep_png(content), options)
            image.load()
            mode = "L" if image.mode in GREY_MODES else "RGB"
            if options.indices and image.mode == "P":
                mode = "P"
            decoded = np.asarray(image if image.mode == mode else image.convert(mode))
            if options.indices and image.format == "PNG" and mode == "L" and content[PNG_DEPTH] < 8:
                decoded = decoded // (255 // (2 ** content[PNG_DEPTH] - 1))  # Pillow has multiplied by this
            return _fitted(decoded.reshape(image.height, image.width, -1), options)


def _decode_bands(bands: tiff.Bands, file: ImageFile, options: DecodeOptions, limits: Limits) -> np.ndarray:
    pixels = bands.height * bands.width
    taken = max(pixels, -(-bands.num_bytes // BYTES_PER_PIXEL))
    if taken > limits.max_pixels:
        what = f"{pixels:,} pixels, which take as much as {taken:,} of {BYTES_PER_PIXEL} bytes"
        raise limits.error(file, what, limits.max_pixels)
    with limits.pixels.taken(taken):
        decoded = bands.read()
        if bands.is_rgb and options.channels in (1, 3):
            decoded = decoded[..., :3]
        return _fitted(decoded, options)


# ---- channels and sizes ------------------------------------------------------------------------------


def _fitted(pixels: np.ndarray, options: DecodeOptions) -> np.ndarray:
    return resized(with_channels(pixels, options.channels), options.size, options.resize)


def with_channels(pixels: np.ndarray, channels: int | None) -> np.ndarray:
    """Convert pixels [H, W, C] to a number of channels; see `DecodeOptions`.

    Raises:
      tiff.Refused: there is no such conversion.
    """
    found = pixels.shape[-1]
    if channels is None or channels == found:
        return pixels
    if found == 1 and channels == 3:
        return np.repeat(pixels, 3, axis=-1)
    if found == 3 and channels == 1:
        # Luminance by ITU-R 601-2 in Pillow's integer weights, so that 16 bits fit into 32 as well.
        luminance = pixels.astype(np.uint32) @ np.array([19595, 38470, 7471], np.uint32)
        return ((luminance + 2**15) >> 16).astype(pixels.dtype)[..., None]
    raise tiff.Refused(f"{found} channels; allowed: {channels}, by dataset.channels or as the images of the run")


def resized(pixels: np.ndarray, size: tuple[int, int] | None, how: str, *, nearest: bool = False) -> np.ndarray:
    """Resize pixels [H, W, C] by Pillow's bilinear filter with antialiasing, or to the nearest pixel.

    Args:
      size: (height, width); None leaves the pixels as they are.
      how: "stretch" changes the aspect ratio, "crop" takes the largest central part that has the wanted one, "pad"
        adds black bars at both sides.
    """
    if size is None or pixels.shape[:2] == size:
        return pixels
    resize = functools.partial(_resized_box, nearest=nearest)
    (height, width), (new_height, new_width) = pixels.shape[:2], size
    is_narrow = width * new_height <= height * new_width  # compared with `size`
    if how == "crop":
        part_width = width if is_narrow else height * new_width / new_height
        part_height = width * new_height / new_width if is_narrow else height
        left, upper = (width - part_width) / 2, (height - part_height) / 2
        return resize(pixels, size, (left, upper, left + part_width, upper + part_height))
    if how == "pad":
        inner_width = max(round(width * new_height / height), 1) if is_narrow else new_width
        inner_height = new_height if is_narrow else max(round(height * new_width / width), 1)
        inner = resize(pixels, (inner_height, inner_width), (0, 0, width, height))
        left, upper = (new_width - inner_width) // 2, (new_height - inner_height) // 2
        padded = np.zeros((*size, pixels.shape[-1]), pixels.dtype)
        padded[upper : upper + inner_height, left : left + inner_width] = inner
        return padded
    return resize(pixels, size, (0, 0, width, height))


def _resized_box(pixels: np.ndarray, size: tuple[int, int], box: tuple[float, ...], *, nearest: bool) -> np.ndarray:
    """Resize the part `box` (left, upper, right, lower) of the pixels, by band; 16 bits fit into float32."""

    resample = Image.Resampling.NEAREST if nearest else Image.Resampling.BILINEAR

    def resize(plane: np.ndarray) -> np.ndarray:
        return np.asarray(Image.fromarray(plane).resize(size[::-1], resample, box=box))

    if pixels.dtype == np.uint8 and pixels.shape[-1] == 3:
        return resize(pixels)  # equal bits in half the time
    out = np.empty((*size, pixels.shape[-1]), pixels.dtype)
    for band in range(pixels.shape[-1]):
        if pixels.dtype == np.uint8:
            out[..., band] = resize(np.ascontiguousarray(pixels[..., band]))
        else:
            out[..., band] = np.clip(np.rint(resize(pixels[..., band].astype(np.float32))), 0, 65_535)
    return out
