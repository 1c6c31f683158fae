"""Predictions of a run at its best step: predictions.npz in its folder, with labels, logits and ids.

Only NumPy is imported here: reports are made without JAX.
"""

import math
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from largebatch import util

FILE = "predictions.npz"
LOGITS_PER_PART = 10_000_000  # that hosts gather, and hold, at a time


class Outcome(Protocol):
    """File that a validation leaves in the folder of its run, where it is the best so far."""

    name: str

    def parts(self) -> Iterator[np.ndarray]:
        """Yield what is gathered from all hosts, piece by piece. Collective."""

    def write(self, folder: Path, parts: Iterator[np.ndarray]) -> None:
        """Replace the file that an earlier best has left, which stays where this raises OSError."""


def in_parts(values: Any, numbers_per_part: int) -> Iterator[np.ndarray]:
    """Yield the values of a few examples at a time. Collective.

    Args:
      values: an array [examples, ...]; or what has its `shape` and gives such arrays by slices of examples.
    """
    count, *shape = values.shape
    size = max(numbers_per_part // math.prod(shape), 1)
    for first in range(0, count, size):
        yield values[first : min(first + size, count)]


@dataclass(frozen=True)
class Predictions:
    """Predictions of classes; an `Outcome`.

    Attributes:
      labels: int [examples].
      logits: float [examples, classes]; or what has its `shape` and gives such arrays by slices of examples.
      ids: str [examples].
    """

    labels: np.ndarray
    logits: Any
    ids: np.ndarray
    name = FILE

    def parts(self) -> Iterator[np.ndarray]:
        """Yield the logits of a few examples at a time. Collective."""
        return in_parts(self.logits, LOGITS_PER_PART)

    def write(self, folder: Path, parts: Iterator[np.ndarray]) -> None:
        """Replace the predictions of a run folder; see `Outcome`. The CRCs of the zip guard them."""
        with util.replacing(folder / FILE) as temporary, temporary.open("wb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                with archive.open("logits.npy", "w", force_zip64=True) as entry:
                    header = {"shape": tuple(self.logits.shape), "fortran_order": False, "descr": "<f4"}
                    np.lib.format.write_array_header_1_0(entry, header)
                    for part in parts:
                        entry.write(np.ascontiguousarray(part, "<f4").tobytes())
                for name, array in (("labels", self.labels), ("ids", self.ids)):
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                        np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())


class DamagedPredictions(Exception):
    """Raised for predictions that cannot be read, or do not go together; the text names the file and says why."""


def read(folder: Path) -> Predictions:
    """Read the predictions of a run folder.

    Raises:
      DamagedPredictions: they cannot be used.
    """
    found = Predictions(**read_arrays(folder / FILE, ("labels", "logits", "ids")))
    labels, logits, ids = found.labels, found.logits, found.ids
    if logits.ndim != 2 or labels.shape != ids.shape or labels.shape != logits.shape[:1] or not logits.size:
        problem = f"labels {labels.shape}, logits {logits.shape} and ids {ids.shape} do not go together"
        raise DamagedPredictions(f"{FILE}: damaged: {problem}")
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise DamagedPredictions(f"{FILE}: damaged: a label is none of the {logits.shape[1]} classes")
    return found


def read_arrays(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Read arrays of a .npz file, whose CRCs tell damage.

    Raises:
      DamagedPredictions: the file cannot be read.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except Exception as error:  # zipfile and NumPy raise a dozen kinds on damaged input
        reason = util.one_line(error)
        raise DamagedPredictions(f"{path.name}: damaged: {reason}") from error


def confusions(truth: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """Count classes int [...] that were predicted: int [classes, classes], rows true, columns predicted."""
    cells = np.asarray(truth, np.int64) * num_classes + predicted
    return np.bincount(cells.ravel(), minlength=num_classes**2).reshape(num_classes, num_classes)
