"""What a run took for what: its predictions.npz as a matrix, and the worst mistakes."""

import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

import numpy as np

from largebatch.reports.example_pictures import read_pictures
from largebatch.runs.reader import Run

NUMBERED = re.compile(r"(.+?)_\d+\.\w+")  # AnnualCrop_12.jpg


class DamagedPredictions(Exception):
    """A predictions.npz cannot be read, or its arrays do not go together; the text says why."""


@dataclass(frozen=True)
class Predictions:
    """labels int [N], logits float [N, classes], example ids str [N]."""

    labels: np.ndarray
    logits: np.ndarray
    ids: np.ndarray

    @property
    def classes(self) -> np.ndarray:
        """The predicted class of each example, int [N]."""
        return self.logits.argmax(1)

    @property
    def probabilities(self) -> np.ndarray:
        """Softmax of the logits, [N, classes]."""
        powers = np.exp(self.logits - self.logits.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)


@dataclass(frozen=True)
class Example:
    """One mistake: its id, the probability of the wrong class (0..1), and the picture as a data: URI, or None."""

    example_id: str
    probability: float
    picture: str | None = None


@dataclass(frozen=True)
class Mistake:
    """Examples of class `true` that were taken for `predicted`, the surest first; `count` are all of them."""

    true: int
    predicted: int
    count: int
    examples: list[Example]


@dataclass(frozen=True)
class Confusion:
    """The confusions of a run at its best step.

    Attributes:
      names: of the classes.
      matrix: counts, int [classes, classes], rows true, columns predicted.
      worst: the most frequent mistakes.
      no_pictures: why there are no pictures; None where there are some, or no mistakes.
    """

    names: list[str]
    matrix: np.ndarray
    worst: list[Mistake]
    no_pictures: str | None

    @property
    def recall(self) -> np.ndarray:
        """Share of each class that was found, [classes], NaN for a class without examples."""
        counts = self.matrix.sum(1)
        return np.divide(self.matrix.diagonal(), counts, out=np.full(len(counts), np.nan), where=counts > 0)

    @property
    def accuracy(self) -> float:
        """Share of all examples that is right."""
        return float(self.matrix.trace() / max(self.matrix.sum(), 1))


def read_confusion(run: Run, pairs: int = 5, examples: int = 4) -> Confusion:
    """The confusions of a run that has a predictions.npz.

    Args:
      pairs: worst confusions to show.
      examples: pictures of each.
    Raises:
      DamagedPredictions: the file cannot be used.
    """
    predictions = read_predictions(run)
    labels, num_classes = predictions.labels, predictions.logits.shape[1]
    matrix = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(matrix, (labels, predictions.classes), 1)
    worst = []
    for true, wrong in worst_pairs(matrix, pairs):
        surest = surest_examples(predictions, true, wrong, examples)
        worst.append(Mistake(true, wrong, int(matrix[true, wrong]), surest))
    pictures = read_pictures(run, [example.example_id for mistake in worst for example in mistake.examples])
    worst = [with_pictures(mistake, pictures.by_id) for mistake in worst]
    return Confusion(class_names(labels, predictions.ids, num_classes), matrix, worst, pictures.missing)


def surest_examples(predictions: Predictions, true: int, wrong: int, count: int) -> list[Example]:
    """The `count` examples of class `true` that were taken for class `wrong` with the highest probability."""
    rows = np.flatnonzero((predictions.labels == true) & (predictions.classes == wrong))
    probabilities = predictions.probabilities[rows, wrong]
    order = np.argsort(-probabilities, kind="stable")[:count]
    return [Example(str(predictions.ids[rows[k]]), float(probabilities[k])) for k in order]


def with_pictures(mistake: Mistake, pictures: dict[str, str]) -> Mistake:
    """A mistake whose examples have their pictures, as far as there are any."""
    examples = [replace(example, picture=pictures.get(example.example_id)) for example in mistake.examples]
    return replace(mistake, examples=examples)


def read_predictions(run: Run) -> Predictions:
    """The predictions of a run at its best step, checked.

    Raises:
      DamagedPredictions: the file cannot be used.
    """
    try:
        with (run.path / "predictions.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            predictions = Predictions(arrays["labels"], arrays["logits"], arrays["ids"])
        problem = _misfit(predictions)
    except Exception as error:  # zipfile and NumPy raise a dozen kinds on damaged input
        raise DamagedPredictions(" ".join(str(error).split()) or type(error).__name__) from error
    if problem:
        raise DamagedPredictions(problem)
    return predictions


def _misfit(predictions: Predictions) -> str | None:
    labels, logits, ids = predictions.labels, predictions.logits, predictions.ids
    if logits.ndim != 2 or labels.shape != ids.shape or labels.shape != logits.shape[:1] or not logits.size:
        return f"labels {labels.shape}, logits {logits.shape} and ids {ids.shape} do not go together"
    if labels.dtype.kind not in "iu" or logits.dtype.kind != "f" or ids.dtype.kind != "U":
        return f"labels, logits and ids are of {labels.dtype}, {logits.dtype} and {ids.dtype}"
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        return f"labels from {labels.min()} to {labels.max()}, with {logits.shape[1]} classes"
    return None


def worst_pairs(matrix: np.ndarray, count: int) -> list[tuple[int, int]]:
    """The `count` most frequent (true, predicted) that are wrong, most frequent first."""
    wrong = matrix - np.diag(matrix.diagonal())
    order = np.argsort(-wrong, axis=None, kind="stable")[:count]
    return [divmod(int(cell), len(matrix)) for cell in order if wrong.flat[cell] > 0]


def class_names(labels: np.ndarray, ids: np.ndarray, num_classes: int) -> list[str]:
    """Names told by ids such as "River/River_7.jpg" or "River_7.jpg"; numbers where those do not tell all."""
    told: dict[int, set[str | None]] = {}  # what the ids of each label tell
    for label, example_id in zip(labels.tolist(), ids.tolist(), strict=True):
        told.setdefault(label, set()).add(_class_of_id(example_id))
    numbers = [str(label) for label in range(num_classes)]
    names = {}
    for label, options in told.items():
        if len(options) > 1 or None in options:
            return numbers
        (names[label],) = options
    if len(set(names.values())) < len(names):
        return numbers
    return [names.get(label, number) for label, number in enumerate(numbers)]


def _class_of_id(example_id: str) -> str | None:
    path = PurePosixPath(example_id)
    if path.parent.name:
        return path.parent.name
    numbered = NUMBERED.fullmatch(path.name)
    return numbered.group(1) if numbered else None
