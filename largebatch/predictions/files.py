"""Predictions of a run at its best step: predictions.npz in its folder, with labels, logits and ids.

Only NumPy is imported here: reports are made without JAX.
"""

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
    """Files that a validation leaves in the folder of its run, where it is the best so far.

    Attributes:
      name: name of the file.
    """

    name: str

    def parts(self) -> Iterator:
        """Yield what is written, piece by piece. Collective."""

    def write(self, folder: Path, parts: Iterator) -> None:
        """Replace what an earlier best has left, on the host that writes.

        Raises:
          OSError: the disk is full; what was there is still there.
        """


@dataclass(frozen=True)
class Predictions:
    """Predictions of classes for consecutive examples; an `Outcome`.

    Attributes:
      labels: int [examples].
      logits: float [examples, classes]; or what has its `shape` and gives such arrays by slices of examples.
      ids: str [examples].
    """

    labels: np.ndarray
    logits: Any
    ids: np.ndarray
    name = FILE

    def parts(self) -> Iterator["Predictions"]:
        """Yield the same for a few examples at a time. Collective."""
        examples, classes = self.logits.shape
        size = max(LOGITS_PER_PART // classes, 1)
        for first in range(0, examples, size):
            part = slice(first, min(first + size, examples))
            yield Predictions(self.labels[part], self.logits[part], self.ids[part])

    def write(self, folder: Path, parts: Iterator["Predictions"]) -> None:
        """Replace the predictions of a run folder; see `Outcome`. The CRCs of the zip guard them."""
        with util.replacing(folder / FILE) as temporary, temporary.open("wb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                labels, ids = [], []
                with archive.open("logits.npy", "w", force_zip64=True) as logits:
                    header = {"shape": tuple(self.logits.shape), "fortran_order": False, "descr": "<f4"}
                    np.lib.format.write_array_header_1_0(logits, header)
                    for part in parts:
                        logits.write(np.ascontiguousarray(part.logits, "<f4").tobytes())
                        labels.append(part.labels)
                        ids.append(part.ids)
                for name, arrays in (("labels", labels), ("ids", ids)):
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                        np.lib.format.write_array(entry, np.concatenate(arrays), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())


class DamagedPredictions(Exception):
    """Raised for predictions that cannot be read, or do not go together; the text names the file and says why."""


def exist(folder: Path) -> bool:
    """Return True if a run folder holds predictions."""
    return (folder / FILE).exists()


def read(folder: Path) -> Predictions:
    """Read the predictions of a run folder.

    Raises:
      DamagedPredictions: they cannot be used.
    """
    try:
        with (folder / FILE).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = Predictions(arrays["labels"], arrays["logits"], arrays["ids"])
    except Exception as error:  # zipfile and NumPy raise a dozen kinds on damaged input
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DamagedPredictions(f"{FILE}: damaged: {reason}") from error
    labels, logits, ids = found.labels, found.logits, found.ids
    if logits.ndim != 2 or labels.shape != ids.shape or labels.shape != logits.shape[:1] or not logits.size:
        problem = f"labels {labels.shape}, logits {logits.shape} and ids {ids.shape} do not go together"
        raise DamagedPredictions(f"{FILE}: damaged: {problem}")
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise DamagedPredictions(f"{FILE}: damaged: a label is none of the {logits.shape[1]} classes")
    return found
