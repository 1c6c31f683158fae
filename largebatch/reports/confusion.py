"""What a run took for what: its predictions as a matrix, and the worst mistakes."""

import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

import numpy as np

from largebatch.predictions import files as prediction_files
from largebatch.reports.example_pictures import read_pictures
from largebatch.runs.reader import Run

NUMBERED = re.compile(r"(.+?)_\d+\.\w+")  # AnnualCrop_12.jpg


@dataclass(frozen=True)
class Outcomes:
    """What was predicted for each example of a run; the logits, which may be many, are not kept.

    Attributes:
      labels, classes: true and predicted class, int [N].
      probabilities: of the predicted class, [N].
      ids: str [N].
      num_classes: that could be predicted.
    """

    labels: np.ndarray
    classes: np.ndarray
    probabilities: np.ndarray
    ids: np.ndarray
    num_classes: int


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
    """The confusions of a run that has predictions.

    Args:
      pairs: worst confusions to show.
      examples: pictures of each.
    Raises:
      prediction_files.DamagedPredictions: they cannot be used.
    """
    outcomes = read_outcomes(run)
    labels, num_classes = outcomes.labels, outcomes.num_classes
    matrix = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(matrix, (labels, outcomes.classes), 1)
    worst = []
    for true, wrong in worst_pairs(matrix, pairs):
        surest = surest_examples(outcomes, true, wrong, examples)
        worst.append(Mistake(true, wrong, int(matrix[true, wrong]), surest))
    pictures = read_pictures(run, [example.example_id for mistake in worst for example in mistake.examples])
    worst = [with_pictures(mistake, pictures.by_id) for mistake in worst]
    return Confusion(class_names(labels, outcomes.ids, num_classes), matrix, worst, pictures.missing)


def surest_examples(outcomes: Outcomes, true: int, wrong: int, count: int) -> list[Example]:
    """The `count` examples of class `true` that were taken for class `wrong` with the highest probability."""
    rows = np.flatnonzero((outcomes.labels == true) & (outcomes.classes == wrong))
    probabilities = outcomes.probabilities[rows]
    order = np.argsort(-probabilities, kind="stable")[:count]
    return [Example(str(outcomes.ids[rows[k]]), float(probabilities[k])) for k in order]


def with_pictures(mistake: Mistake, pictures: dict[str, str]) -> Mistake:
    """A mistake whose examples have their pictures, as far as there are any."""
    examples = [replace(example, picture=pictures.get(example.example_id)) for example in mistake.examples]
    return replace(mistake, examples=examples)


def read_outcomes(run: Run) -> Outcomes:
    """Return what a run predicted at its best step.

    Raises:
      prediction_files.DamagedPredictions: the predictions cannot be used.
    """
    found = prediction_files.read(run.path)
    # The largest logit's share of the softmax.
    probabilities = 1 / np.exp(found.logits - found.logits.max(1, keepdims=True)).sum(1)
    return Outcomes(found.labels, found.logits.argmax(1), probabilities, found.ids, found.logits.shape[1])


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
