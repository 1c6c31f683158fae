"""The predictions of a run at its best step, written to its folder and read back.

    predictions.npz                labels, logits, ids
    predictions/part-00000.npz     the same of the first examples, where all logits are too many for one file
    predictions/part-00001.npz     ... of those that follow
    predictions/parts.json         how many parts and examples there are

A process may be killed while it writes, and others may read meanwhile. New parts are written under a hidden name
and become `predictions.new`, whole. From then on they are the predictions of the run: the old ones are removed, and
`predictions.new` becomes `predictions`. So what counts is the first of `predictions.new`, `predictions.npz` and
`predictions` that is there. Only NumPy is imported here: reports are made without JAX.
"""

import io
import json
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from largebatch import util

MAX_LOGITS_PER_FILE = 10_000_000
ONE_FILE, PARTS, NEW_PARTS, COUNTS = "predictions.npz", "predictions", "predictions.new", "parts.json"
MAX_COUNTS_BYTES = 1000  # of parts.json


class Outcome(Protocol):
    """What a validation leaves in the folder of its run, where it is the best so far.

    Attributes:
      name: of the file or folder.
    """

    name: str

    def parts(self) -> Iterator:
        """What is written, piece by piece; all hosts make each together."""

    def write(self, folder: Path, parts: Iterator) -> None:
        """Replaces what an earlier best has left, on the host that writes.

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

    @property
    def name(self) -> str:
        """See `Outcome`."""
        return ONE_FILE if count_parts(self) == 1 else PARTS

    def parts(self) -> Iterator["Predictions"]:
        """The same, as much at a time as goes into one file."""
        examples, classes = self.logits.shape
        size = _examples_per_part(classes)
        for first in range(0, examples, size):
            part = slice(first, min(first + size, examples))
            yield Predictions(self.labels[part], self.logits[part], self.ids[part])

    def write(self, folder: Path, parts: Iterator["Predictions"]) -> None:
        """See `Outcome`."""
        write(folder, parts, count_parts(self))


class DamagedPredictions(Exception):
    """The predictions of a run cannot be read, or do not go together; the text names the file and says why."""


# ---- writing -----------------------------------------------------------------------------------------


def count_parts(predictions: Predictions) -> int:
    """How many files the predictions take."""
    examples, classes = predictions.logits.shape
    return -(-examples // _examples_per_part(classes))


def _examples_per_part(classes: int) -> int:
    return max(MAX_LOGITS_PER_FILE // classes, 1)


def write(folder: Path, parts: Iterator[Predictions], num_parts: int) -> None:
    """Replaces the predictions of a run folder, as one file or in parts.

    Raises:
      OSError: the disk is full; the old ones are still there.
    """
    finish_writing(folder)
    if num_parts == 1:
        with util.replacing(folder / ONE_FILE) as temporary:
            _write_file(temporary, next(parts))
        _remove_folder(folder / PARTS)
        return
    temporary, examples = util.beside(folder / PARTS), 0
    try:
        temporary.mkdir()
        for number, part in enumerate(parts):
            _write_file(temporary / _part_name(number), part)
            examples += len(part.labels)
        counts = {"parts": num_parts, "examples": examples}
        util.write_through(temporary / COUNTS, json.dumps(counts).encode())
        temporary.rename(folder / NEW_PARTS)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    finish_writing(folder)


def finish_writing(folder: Path) -> None:
    """Puts new parts that are whole in the place of the old predictions, where a process did not come to it."""
    if (folder / NEW_PARTS).exists():
        (folder / ONE_FILE).unlink(missing_ok=True)
        _remove_folder(folder / PARTS)
        (folder / NEW_PARTS).rename(folder / PARTS)


def _part_name(number: int) -> str:
    return f"part-{number:05d}.npz"


def _write_file(path: Path, part: Predictions) -> None:
    """Its zip's CRCs guard the file."""
    buffer = io.BytesIO()
    np.savez(buffer, labels=part.labels, logits=part.logits, ids=part.ids)
    util.write_through(path, buffer.getvalue())


def _remove_folder(path: Path) -> None:
    if path.exists():
        hidden = util.beside(path)
        path.rename(hidden)  # at once, so that nobody finds half of it
        shutil.rmtree(hidden)


# ---- reading -----------------------------------------------------------------------------------------


def exist(folder: Path) -> bool:
    """Whether a run folder holds predictions, of either form."""
    return any((folder / name).exists() for name in (NEW_PARTS, ONE_FILE, PARTS))


def read(folder: Path) -> Iterator[Predictions]:
    """The predictions of a run folder, of either form, checked; one file's at a time.

    All parts are of one write: should another take their place meanwhile, those that are not read yet are missing.

    Raises:
      DamagedPredictions: a file cannot be used, is missing, or does not go with the others.
    """
    for name in (NEW_PARTS, ONE_FILE, PARTS):
        # Kept open, a folder stays the same one when another takes its name.
        try:
            opened = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DamagedPredictions(f"{name}: damaged: {error.strerror}") from error
        try:
            if stat.S_ISDIR(os.fstat(opened).st_mode):
                yield from _read_parts(opened, name)
            else:
                yield _read_file(name, os.dup(opened))
        finally:
            os.close(opened)
        return
    raise DamagedPredictions(f"{ONE_FILE}: missing")


def _read_parts(folder: int, folder_name: str) -> Iterator[Predictions]:
    """The parts in a folder that is open."""
    counts_name, counts = f"{folder_name}/{COUNTS}", {}
    try:
        with _open_in(folder, COUNTS) as file:
            counts = json.loads(file.read(MAX_COUNTS_BYTES))
        num_parts, expected = int(counts["parts"]), int(counts["examples"])
    except FileNotFoundError as error:
        raise DamagedPredictions(f"{counts_name}: missing") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise DamagedPredictions(f"{counts_name}: damaged: {_one_line(error)}") from error
    examples, classes = 0, None
    for number in range(num_parts):
        name = f"{folder_name}/{_part_name(number)}"
        try:
            descriptor = os.open(_part_name(number), os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder)
        except FileNotFoundError as error:
            raise DamagedPredictions(f"{name}: missing, one of {num_parts} parts") from error
        except OSError as error:
            raise DamagedPredictions(f"{name}: damaged: {error.strerror}") from error
        part = _read_file(name, descriptor)
        classes = classes or part.logits.shape[1]
        if part.logits.shape[1] != classes:
            text = f"logits of {part.logits.shape[1]} classes, of {classes} in the parts before"
            raise DamagedPredictions(f"{name}: damaged: {text}")
        examples += len(part.labels)
        yield part
    if examples != expected or not examples:
        raise DamagedPredictions(f"{counts_name}: damaged: {expected} examples, {examples} in the parts")


def _open_in(folder: int, name: str) -> BinaryIO:
    return os.fdopen(os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=folder), "rb")


def _read_file(name: str, descriptor: int) -> Predictions:
    """One file, checked; closes the descriptor."""
    try:
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("no regular file")
            with np.load(file, allow_pickle=False) as arrays:
                part = Predictions(arrays["labels"], arrays["logits"], arrays["ids"])
        problem = _misfit(part)
    except Exception as error:  # zipfile and NumPy raise a dozen kinds on damaged input
        raise DamagedPredictions(f"{name}: damaged: {_one_line(error)}") from error
    if problem:
        raise DamagedPredictions(f"{name}: damaged: {problem}")
    return part


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _misfit(part: Predictions) -> str | None:
    labels, logits, ids = part.labels, part.logits, part.ids
    if logits.ndim != 2 or labels.shape != ids.shape or labels.shape != logits.shape[:1] or not logits.size:
        return f"labels {labels.shape}, logits {logits.shape} and ids {ids.shape} do not go together"
    if labels.dtype.kind not in "iu" or logits.dtype.kind != "f" or ids.dtype.kind != "U":
        return f"labels, logits and ids are of {labels.dtype}, {logits.dtype} and {ids.dtype}"
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        return f"labels from {labels.min()} to {labels.max()}, with {logits.shape[1]} classes"
    return None
