"""Predictions for people: scores and a table by class, and a CSV file with a line per image."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box, table

from largebatch.data.dataset import Dataset
from largebatch.predictions.files import Predictions
from largebatch.terminal import Console
from largebatch.util import UserError, printable, replacing

COLUMNS = ("images", "recall", "precision", "most often taken for")


@dataclass(frozen=True)
class ClassPredictions:
    """The classes that were predicted for a data set.

    Attributes:
      dataset: label -1 where it is not known.
      predictions: of its images.
      classes: int [N], the predicted ones.
    """

    dataset: Dataset
    predictions: Predictions
    classes: np.ndarray

    @classmethod
    def of(cls, dataset: Dataset, logits) -> "ClassPredictions":
        """Every host calls it.

        Args:
          logits: see `Predictions`.
        """
        predictions = Predictions(dataset.labels, logits, np.array(dataset.ids))
        classes = np.concatenate([part.logits.argmax(axis=1) for part in predictions.parts()])
        return cls(dataset, predictions, classes)

    def parts(self) -> Iterator[Predictions]:
        """Yield what `write` takes. Collective."""
        return self.predictions.parts()

    def print_results(self, scores, heading: str) -> None:
        """Scores, and a line for each class; see the function of this name."""
        print_results(self.dataset, self.classes, scores, heading)

    def write(self, path: str, parts: Iterable[Predictions]) -> None:
        """A line for each image; see `write_csv`."""
        write_csv(path, self.dataset.class_names, parts)


def print_results(dataset: Dataset, predicted: np.ndarray, scores, heading: str) -> None:
    """Accuracy and loss over the labelled images, and a line per class.

    Args:
      dataset: label -1 where it is not known.
      predicted: int [N], the class of every image.
      scores: `tasks.scores.Scores` of the labelled images; None where there are none.
    """
    out = Console()
    out.print(printable(heading), soft_wrap=True)
    names = [printable(name) for name in dataset.class_names]
    if scores is None:
        counts = np.bincount(predicted, minlength=len(names))
        listed = ", ".join(f"{count} {name}" for name, count in zip(names, counts, strict=True) if count)
        out.print(f"{len(predicted):,} images without labels; predicted {listed}", soft_wrap=True)
        return
    labelled = dataset.labels >= 0
    labels, found = dataset.labels[labelled], predicted[labelled]
    out.print(class_table(names, labels, found))
    values = scores.values
    top5 = "" if values["accuracy_top5"] is None else f", among the first five {values['accuracy_top5']:.4f}"
    f1 = f"macro F1 {macro_f1(labels, found):.4f}"
    out.print(
        f"accuracy {values['accuracy']:.4f}{top5}, {f1}, loss {scores.loss:.4f} over {values['examples']:,} images"
    )
    if not labelled.all():
        others = np.count_nonzero(~labelled)
        out.print(f"{others:,} more images lie in no folder named as a class: predicted only")


def class_table(names: list[str], labels: np.ndarray, predicted: np.ndarray) -> table.Table:
    """A line per class: how many images, recall, precision, and the class that it is most often taken for."""
    rows = table.Table(box=box.SIMPLE)
    rows.add_column("class")
    for column in COLUMNS:
        rows.add_column(column, justify="left" if " " in column else "right")
    for label, name in enumerate(names):
        of_class, called_so = labels == label, predicted == label
        right = np.count_nonzero(of_class & called_so)
        wrong = np.bincount(predicted[of_class & ~called_so], minlength=len(names))
        taken_for = f"{names[wrong.argmax()]} ({wrong.max()})" if wrong.any() else ""
        rows.add_row(
            name,
            f"{of_class.sum():,}",
            _share(right, np.count_nonzero(of_class)),
            _share(right, np.count_nonzero(called_so)),
            taken_for,
        )
    return rows


def macro_f1(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Return the mean F1 score of the classes that have images; each counts alike, however many images it has.

    Args:
      labels, predicted: int [N], the class of every image.
    """
    scores = []
    for label in np.unique(labels):
        of_class, called_so = labels == label, predicted == label
        scores.append(2 * np.sum(of_class & called_so) / (of_class.sum() + called_so.sum()))
    return float(np.mean(scores))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.4f}" if whole else "none"


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities of the classes of one image, [classes]."""
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def write_csv(path: str, class_names: list[str], parts: Iterable[Predictions]) -> None:
    """Write a line per image: id, label (empty where unknown), prediction, and the probability of each class.

    Args:
      parts: see `Predictions.parts`; label -1 where it is not known.
    Raises:
      UserError: the file cannot be written.
    """
    try:
        with replacing(Path(path)) as temporary, temporary.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "label", "prediction", *(f"p({name})" for name in class_names)])
            for part in parts:
                for example_id, label, logits in zip(part.ids, part.labels, part.logits, strict=True):
                    known = class_names[label] if label >= 0 else ""
                    row = softmax(logits.astype(np.float64))
                    writer.writerow([example_id, known, class_names[row.argmax()], *(f"{p:.6f}" for p in row)])
    except OSError as error:
        raise UserError(f"--out: cannot write {path} ({error.strerror or error})") from error
