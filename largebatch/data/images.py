"""Labelled images in memory, and how they are decoded."""

import contextlib
import io
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from largebatch.data.threads import run_ranges
from largebatch.errors import UserError

MAX_IMAGE_PIXELS = 89_478_485  # Pillow's own limit for a decompression bomb
BYTES_PER_PIXEL = 4  # a file may have so many for each pixel that is allowed; one that is not compressed has 3 or 4
# For one byte of a header Pillow may take 200 of memory. One for so many of the pixels allowed, or 1 MiB, is read.
PIXELS_PER_HEADER_BYTE = 32
MIN_HEADER_BYTES = 2**20

# The kinds whose size Pillow knows before it decodes, and that run no other program. Web data sets hold any of
# them under the name of a JPEG.
FORMATS = ("JPEG", "PNG", "TIFF", "GIF", "BMP", "WEBP")

PngImagePlugin.MAX_TEXT_MEMORY = 8 * PngImagePlugin.MAX_TEXT_CHUNK  # unpacked text, of which none is used
warnings.filterwarnings("ignore", module=r"PIL\.")  # what is wrong with a picture is said in a line of ours


@dataclass(frozen=True)
class Dataset:
    """Decoded images in memory."""

    images: np.ndarray  # uint8 [N, H, W, 3]
    labels: np.ndarray  # int32 [N]; -1 where the class is not known
    class_names: list[str]
    example_ids: list[str]  # "Class/file" where there are files


@dataclass(frozen=True)
class Source:
    """A data set that can be loaded."""

    description: str
    fingerprint: str  # changes when what `load` returns would
    load: Callable[[], Dataset]


@dataclass(frozen=True)
class ImageFile:
    """One image that is still encoded."""

    example_id: str
    label: int
    num_bytes: int
    read: Callable[[], bytes]


class Room:
    """An amount that threads share: together they never take more, however many they are."""

    def __init__(self, amount: int):
        self._left = amount
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, amount: int) -> Iterator[None]:
        """Waits until `amount`, which is at most the whole, is left; gives it back at the end."""
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
    """What one image may take, and the room that all images that are decoded at once share."""

    def __init__(self, max_pixels: int):
        self.max_pixels, self.max_bytes = max_pixels, BYTES_PER_PIXEL * max_pixels
        self.header_bytes = max(MIN_HEADER_BYTES, max_pixels // PIXELS_PER_HEADER_BYTE)
        self.pixels, self.bytes = Room(self.max_pixels), Room(self.max_bytes)

    def error(self, file: ImageFile, what: str, allowed: int) -> UserError:
        """`file` has too much of something."""
        text = f"{file.example_id}: {what}; allowed: up to {allowed:,}, or a larger dataset.max_image_pixels"
        if allowed != self.max_pixels:
            text += f" than {self.max_pixels:,}"
        return UserError(text)


class _OverRead(Exception):
    """Pillow wants more of a file than its pixels explain."""


class _Encoded(io.BytesIO):
    """A file in memory of which only `left` bytes are given out: headers take far more memory than their bytes."""

    left = 0

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        self.left -= len(content)
        if self.left < 0:
            raise _OverRead
        return content


def decode_dataset(
    files: list[ImageFile], class_names: list[str], image_size: int | None, max_pixels: int
) -> Dataset:
    """Decodes all files on all cores, into one array.

    Args:
      image_size: side in pixels to resize to; None keeps the size, which then is the same for all.
      max_pixels: of one image, and of all that are decoded at once.
    Raises:
      UserError: an image is damaged, too large, not 8 bits deep, or of another size than the first; it is named.
    """
    limits = Limits(max_pixels)
    with pillow_limited_to(max_pixels):
        first = decode(files[0], image_size, limits)
        try:
            images = np.empty((len(files), *first.shape), np.uint8)
        except MemoryError as error:
            size = f"{first.shape[1]}x{first.shape[0]} pixels, as {files[0].example_id},"
            raise UserError(
                f"dataset.image_size: {len(files)} images of {size} do not fit into memory; set a smaller size"
            ) from error

        def decode_range(begin: int, end: int) -> None:
            for i in range(begin, end):
                image = decode(files[i], image_size, limits)
                if image.shape != first.shape:
                    raise UserError(
                        f"dataset.image_size: {files[i].example_id} is {image.shape[1]}x{image.shape[0]} pixels, "
                        f"{files[0].example_id} is {first.shape[1]}x{first.shape[0]}; set a size to resize to"
                    )
                images[i] = image

        run_ranges(decode_range, len(files))
    labels = np.array([file.label for file in files], np.int32)
    return Dataset(images, labels, class_names, [file.example_id for file in files])


@contextlib.contextmanager
def pillow_limited_to(max_pixels: int) -> Iterator[None]:
    """Sets Pillow's own limit, which is of the whole process.

    Ours is checked before an image is decoded. Behind it stands Pillow's, at twice as much, for what a GIF takes
    while it is opened.
    """
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def decode(file: ImageFile, image_size: int | None, limits: Limits) -> np.ndarray:
    """One image as uint8 [H, W, 3]; grey and palette images become RGB."""
    if file.num_bytes > limits.max_bytes:
        raise limits.error(file, f"{file.num_bytes:,} bytes", limits.max_bytes)
    with limits.bytes.taken(file.num_bytes):
        try:
            return _decode_bytes(file, image_size, limits)
        except UserError:
            raise
        except Image.DecompressionBombError as error:
            raise limits.error(file, f"over {2 * limits.max_pixels:,} pixels", limits.max_pixels) from error
        except _OverRead as error:
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


def _decode_bytes(file: ImageFile, image_size: int | None, limits: Limits) -> np.ndarray:
    content = file.read()
    encoded = _Encoded(content)
    encoded.left = limits.header_bytes
    if content[8:12] == b"WEBP":  # whose header is read in C, with all that follows
        encoded.left += len(content)
    with Image.open(encoded, formats=FORMATS) as image:
        pixels = image.width * image.height
        if pixels > limits.max_pixels:
            raise limits.error(file, f"{pixels:,} pixels", limits.max_pixels)
        if image.mode.startswith(("I", "F")):
            raise UserError(f"{file.example_id}: pixels are of mode {image.mode}; allowed: 8 bits a channel")
        encoded.left += 2 * BYTES_PER_PIXEL * pixels  # 16 bits a channel, as a PNG may have
        with limits.pixels.taken(pixels):
            image.load()
            converted = image if image.mode == "RGB" else image.convert("RGB")
            if image_size and converted.size != (image_size, image_size):
                size = (image_size, image_size)
                converted = converted.resize(size, Image.Resampling.BILINEAR, reducing_gap=None)
            return np.asarray(converted)
