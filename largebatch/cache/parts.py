"""Decoded blocks of rows, and the records of what images files hold."""

import dataclasses
import io

import numpy as np
from etils import epath

from largebatch import files
from largebatch.cache.plan import CachePlan, FileTask
from largebatch.errors import UserError

LINES_AT_ONCE = 256  # of which sums are taken: 256 * 255**2 < 2**24


@dataclasses.dataclass(frozen=True)
class Block:
    """Decoded rows, and what a part record says of them."""

    pixels: np.ndarray  # [rows, H, W, C]
    digests: np.ndarray  # uint8 [rows, 32]
    sums: np.ndarray  # uint64 [rows, C]: of the pixels
    square_sums: np.ndarray  # uint64 [rows, C]: of their squares


def channel_sums(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the pixels [N, H, W, C] and of their squares by image and channel, exact: uint64 [N, C] each.

    Whole lines of an image are added at once, which is quicker than channel by channel. Of uint8, so few lines at a
    time that the sums of their squares are whole numbers below 2**24, which float32 holds exactly.
    """
    num_images, height, width, channels = pixels.shape
    lines = pixels.reshape(num_images, height, width * channels)
    images_at_once = max(1, LINES_AT_ONCE // height)
    number_type = np.float32 if pixels.dtype == np.uint8 else np.uint64
    sums = np.zeros((num_images, channels), np.uint64)
    square_sums = np.zeros((num_images, channels), np.uint64)
    for first in range(0, num_images, images_at_once):
        images = slice(first, first + images_at_once)
        for begin in range(0, height, LINES_AT_ONCE):
            some = lines[images, begin : begin + LINES_AT_ONCE].astype(number_type)
            by_channel = (len(some), width, channels)
            sums[images] += some.sum(axis=1).astype(np.uint64).reshape(by_channel).sum(axis=1)
            squares = np.square(some, out=some).sum(axis=1).astype(np.uint64)
            square_sums[images] += squares.reshape(by_channel).sum(axis=1)
    return sums, square_sums


def part_record(blocks: list[Block]) -> bytes:
    """The part record of the images file that these blocks make up."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        digests=np.concatenate([block.digests for block in blocks]),
        sums=np.concatenate([block.sums for block in blocks]),
        square_sums=np.concatenate([block.square_sums for block in blocks]),
    )
    return buffer.getvalue()


def read_record(plan: CachePlan, task: FileTask, num_rows: int) -> dict[str, np.ndarray]:
    """Digests and sums of the rows of an images file.

    Raises:
      UserError: the record is damaged, or of another layout, as other code had it.
    """
    path = plan.build_folder / task.record
    content = path.read_bytes()
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            record = {name: arrays[name] for name in ("digests", "sums", "square_sums")}
        for array in record.values():
            if array.ndim != 2 or len(array) != num_rows:
                raise ValueError(f"an array of shape {array.shape}, expected {num_rows} rows")
        return record
    except Exception as error:  # zipfile and NumPy raise a dozen kinds on damaged input
        path.unlink(missing_ok=True)  # so that the next start decodes this part again
        raise UserError(f"augment.cache_dir: {path} is damaged ({error}); start again to build it anew") from error


def write_whole(path: epath.Path, content: bytes) -> None:
    """Writes a file that appears whole or not at all."""
    with files.replacing(path) as temporary:
        temporary.write_bytes(content)
