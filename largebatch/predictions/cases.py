"""The worst and the best predictions of maps, written to a run's folder at its best step: cases.npz.

    ids                 str [cases], the highest loss first
    scores              float32 [cases, columns], what `columns` says
    columns, classes    str: names; no classes where there is no mask
    images              [cases, H, W, C]
    truth, predicted    planes [cases, H, W, P]; see `tasks.planes`

Only NumPy is imported here: reports are made without JAX.
"""

import dataclasses
import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from largebatch import util
from largebatch.tasks import planes
from largebatch.tasks.planes import PixelTargets

FILE = "cases.npz"
CASES_PER_END = 4  # of the worst, and of the best
MAX_BYTES = 1 << 28  # of all arrays that are read
LOSS = 0  # the column by which they are ranked


@dataclasses.dataclass(frozen=True)
class Cases:
    """What cases.npz holds."""

    ids: np.ndarray
    scores: np.ndarray
    columns: np.ndarray
    classes: np.ndarray
    images: np.ndarray
    truth: np.ndarray
    predicted: np.ndarray

    @property
    def targets(self) -> PixelTargets:
        """What was to be predicted."""
        classes = tuple(map(str, self.classes))
        return PixelTargets(classes, has_depth=self.truth.shape[-1] >= planes.DEPTH_PLANES)


class DamagedCases(Exception):
    """The cases of a run cannot be read, or do not go together; the text says why."""


def extremes(losses: np.ndarray) -> np.ndarray:
    """Which examples are shown: those with the highest losses, then those with the lowest; the highest first."""
    order = np.argsort(-losses, kind="stable")
    return order if len(order) <= 2 * CASES_PER_END else np.r_[order[:CASES_PER_END], order[-CASES_PER_END:]]


@dataclasses.dataclass(frozen=True)
class CasesToWrite:
    """The predictions of a run whose task is of pixels; see `predictions.files.Outcome`.

    Attributes:
      scores: float32 [examples, columns]; or what has its `shape` and gives such arrays by slices of examples.
      show: makes the cases of examples with these numbers, given their scores; called where they are written.
    """

    scores: object
    show: Callable[[np.ndarray, np.ndarray], Cases]
    name = FILE

    def parts(self) -> Iterator[np.ndarray]:
        """The scores of all examples."""
        yield self.scores[: self.scores.shape[0]]

    def write(self, folder: Path, parts: Iterator[np.ndarray]) -> None:
        """Replaces the cases of a run folder."""
        scores = next(parts)
        chosen = extremes(scores[:, LOSS])
        write(folder, self.show(chosen, scores[chosen]))


def write(folder: Path, cases: Cases) -> None:
    """Replaces the file; its zip's CRCs guard it."""
    buffer = io.BytesIO()
    np.savez(buffer, **dataclasses.asdict(cases))
    with util.replacing(folder / FILE) as temporary:
        util.write_through(temporary, buffer.getvalue())


def exist(folder: Path) -> bool:
    """Whether a run folder holds cases."""
    return (folder / FILE).exists()


def read(folder: Path) -> Cases:
    """The cases of a run folder, checked.

    Raises:
      DamagedCases: the file cannot be used.
    """
    try:
        with (folder / FILE).open("rb") as file, zipfile.ZipFile(file) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
            if size > MAX_BYTES:
                raise ValueError(f"{size:,} bytes; allowed: up to {MAX_BYTES:,}")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                cases = Cases(**{field.name: arrays[field.name] for field in dataclasses.fields(Cases)})
        problem = _misfit(cases)
    except Exception as error:  # zipfile and NumPy raise a dozen kinds on damaged input
        raise DamagedCases(f"{FILE}: damaged: {' '.join(str(error).split()) or type(error).__name__}") from error
    if problem:
        raise DamagedCases(f"{FILE}: damaged: {problem}")
    return cases


def _misfit(cases: Cases) -> str | None:
    texts, maps = (cases.ids, cases.columns, cases.classes), (cases.images, cases.truth, cases.predicted)
    if any(text.ndim != 1 or text.dtype.kind != "U" for text in texts) or len(cases.classes) == 1:
        return "ids, columns and classes are no lists of texts"
    if cases.scores.shape != (len(cases.ids), len(cases.columns)) or cases.scores.dtype.kind != "f":
        return f"scores {cases.scores.shape} do not go with {len(cases.ids)} ids"
    if any(of_cases.ndim != 4 or of_cases.dtype not in (np.uint8, np.uint16) for of_cases in maps):
        return "images, truth and predicted are no integer maps"
    if any(of_cases.shape[:3] != (len(cases.ids), *cases.images.shape[1:3]) for of_cases in maps):
        return "images, truth and predicted are not of one size"
    num_planes = cases.targets.planes
    if not cases.images.size or not num_planes:
        return "nothing in it"
    if cases.truth.shape[-1] != num_planes or cases.predicted.shape[-1] != num_planes:
        return f"truth and predicted have other planes than {num_planes}"
    return None
