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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from largebatch import util
from largebatch.predictions.files import DamagedPredictions, read_arrays
from largebatch.tasks import planes
from largebatch.tasks.planes import PixelTargets

FILE = "cases.npz"
CASES_PER_END = 4  # of the worst, and of the best
LOSS = 0  # the column by which they are ranked


@dataclasses.dataclass(frozen=True)
class Cases:
    """Content of cases.npz."""

    ids: np.ndarray
    scores: np.ndarray
    columns: np.ndarray
    classes: np.ndarray
    images: np.ndarray
    truth: np.ndarray
    predicted: np.ndarray

    @property
    def targets(self) -> PixelTargets:
        """Targets that were to be predicted."""
        classes = tuple(map(str, self.classes))
        return PixelTargets(classes, has_depth=self.truth.shape[-1] >= planes.DEPTH_PLANES)


@dataclasses.dataclass(frozen=True)
class CasesToWrite:
    """Predictions of a run with dense targets; see `predictions.files.Outcome`.

    Attributes:
      scores: float32 [examples, columns]; or what has its `shape` and gives such arrays by slices of examples.
      show: makes the cases of examples with these numbers, given their scores; called where they are written.
    """

    scores: Any
    show: Callable[[np.ndarray, np.ndarray], Cases]
    name = FILE

    def parts(self) -> Iterator[np.ndarray]:
        """Yield the scores of all examples. Collective."""
        yield self.scores[: self.scores.shape[0]]

    def write(self, folder: Path, parts: Iterator[np.ndarray]) -> None:
        """Replace the cases of a run folder; the CRCs of the zip guard them."""
        (scores,) = parts
        order = np.argsort(-scores[:, LOSS], kind="stable")  # the highest loss first
        if len(order) > 2 * CASES_PER_END:
            order = np.r_[order[:CASES_PER_END], order[-CASES_PER_END:]]
        buffer = io.BytesIO()
        np.savez(buffer, **dataclasses.asdict(self.show(order, scores[order])))
        with util.replacing(folder / FILE) as temporary:
            util.write_through(temporary, buffer.getvalue())


def read(folder: Path) -> Cases:
    """Read the cases of a run folder.

    Raises:
      DamagedPredictions: the file cannot be used.
    """
    cases = Cases(**read_arrays(folder / FILE, tuple(field.name for field in dataclasses.fields(Cases))))
    shapes = {array.shape[:1] for array in (cases.scores, cases.images, cases.truth, cases.predicted)}
    if shapes != {cases.ids.shape} or not cases.targets.planes:
        raise DamagedPredictions(f"{FILE}: damaged: its arrays do not go together")
    return cases
