"""Decoded blocks of rows, and the records of what images files hold."""

import dataclasses
import io

import numpy as np
from etils import epath

from largebatch import files
from largebatch.cache.plan import CachePlan, FileTask
from largebatch.errors import UserError

MOST_LINES = (2**32 - 1) // 255**2  # whose sum of squares of uint8 fits into uint32


@dataclasses.dataclass(frozen=True)
class Block:
    """Decoded rows, and what a part record says of them."""

    pixels: np.ndarray  # [rows, H, W, C]
    digests: np.ndarray  # uint8 [rows, 32]
    sums: np.ndarray  # uint64 [rows, C]: of the pixels
    square_sums: np.ndarray  # uint64 [rows, C]: of their squares


def channel_sums(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the pixels [N, H, W, C] and of their squares by image and channel, exact: uint64 [N, C] each.

    Lines are added first, all channels at once, which is much quicker than channel by channel.
    """
    num_images, height, width, channels = pixels.shape
    lines = pixels.reshape(num_images, height, width * channels)
    fits = pixels.dtype == np.uint8 and height <= MOST_LINES
    number_type = np.uint32 if fits else np.uint64
    line_sums = np.add.reduce(lines, axis=1, dtype=number_type)
    line_square_sums = np.einsum("nlx,nlx->nx", lines, lines, dtype=number_type)
    by_channel = (num_images, width, channels)
    sums = line_sums.reshape(by_channel).sum(axis=1, dtype=np.uint64)
    square_sums = line_square_sums.reshape(by_channel).sum(axis=1, dtype=np.uint64)
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
