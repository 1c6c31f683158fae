"""Predictions for people: scores by class, and a line of a CSV file, or pictures, for each image."""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich import box, table
from scipy.special import softmax

from largebatch.data.dataset import Dataset
from largebatch.predictions.files import confusions, in_parts
from largebatch.tasks import planes
from largebatch.tasks.planes import PixelTargets
from largebatch.terminal import Console, four_digits
from largebatch.util import path_within, printable, replacing, writing

COLUMNS = ("images", "recall", "precision", "most often taken for")
WHITE = 255  # of a mask of two classes, so that people see it
BYTES_PER_PART = 2**26
FEW_IMAGES = 20  # whose predictions are printed one by one
SCORES_FILE = "scores.csv"
IOU = "iou_"  # what the score of a class begins with


# ---- classes -----------------------------------------------------------------------------------------


def print_results(dataset: Dataset, predicted: np.ndarray, scores, heading: str) -> None:
    """Print accuracy and loss over the labelled images and a line for each class, or a line for each of few images.

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
        if len(predicted) <= FEW_IMAGES:
            for example_id, label in zip(dataset.ids, predicted, strict=True):
                out.print(f"{printable(example_id)}: {names[label]}", soft_wrap=True)
        out.print(f"{len(predicted):,} images without labels; predicted {listed}", soft_wrap=True)
        return
    is_labelled = dataset.labels >= 0
    counts = confusions(dataset.labels[is_labelled], predicted[is_labelled], len(names))
    out.print(class_table(names, counts))
    values = scores.values
    top5 = "" if values["accuracy_top5"] is None else f", among the first five {values['accuracy_top5']:.4f}"
    f1 = f"macro F1 {macro_f1(counts):.4f}"
    out.print(
        f"accuracy {values['accuracy']:.4f}{top5}, {f1}, loss {scores.loss:.4f} over {values['examples']:,} images"
    )
    if others := np.count_nonzero(~is_labelled):
        out.print(f"{others:,} more images lie in no folder named as a class: predicted only")


def class_table(names: list[str], counts: np.ndarray) -> table.Table:
    """Make a table of each class: images, recall, precision, and the class that it is most often taken for.

    Args:
      counts: see `confusions`.
    """
    rows = table.Table(box=box.SIMPLE)
    rows.add_column("class")
    for column in COLUMNS:
        rows.add_column(column, justify="left" if " " in column else "right")
    wrong = counts - np.diag(counts.diagonal())
    for label, name in enumerate(names):
        right, of_class, called_so = counts[label, label], counts[label].sum(), counts[:, label].sum()
        shares = [four_digits(right / whole if whole else None) for whole in (of_class, called_so)]
        taken_for = f"{names[wrong[label].argmax()]} ({wrong[label].max()})" if wrong[label].any() else ""
        rows.add_row(name, f"{of_class:,}", *shares, taken_for)
    return rows


def macro_f1(counts: np.ndarray) -> float:
    """Return the mean F1 score of the classes that have images; each counts alike, however many images it has.

    Args:
      counts: see `confusions`.
    """
    images, predictions = counts.sum(1), counts.sum(0)
    scores = 2 * counts.diagonal()[images > 0] / (images + predictions)[images > 0]
    return float(scores.mean())


def write_csv(path: str, dataset: Dataset, parts: Iterable[np.ndarray]) -> None:
    """Write a line per image: id, label (empty where unknown), prediction, and the probability of each class.

    Args:
      dataset: label -1 where it is not known.
      parts: logits of consecutive images, as `Predictions.parts` yields them.
    Raises:
      UserError: the file cannot be written.
    """
    names, examples = dataset.class_names, zip(dataset.ids, dataset.labels, strict=True)
    with writing(path, "--out"), replacing(Path(path)) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "label", "prediction", *(f"p({name})" for name in names)])
        for part in parts:
            for row, (example_id, label) in zip(softmax(part.astype(np.float64), axis=1), examples, strict=False):
                known = names[label] if label >= 0 else ""
                writer.writerow([example_id, known, names[row.argmax()], *(f"{p:.6f}" for p in row)])


# ---- maps --------------------------------------------------------------------------------------------


def map_parts(predicted: Any) -> Iterator[np.ndarray]:
    """Yield uint8 planes [n, H, W, P] of consecutive images, in parts that fit into memory. Collective."""
    return in_parts(predicted, BYTES_PER_PART)


def print_map_results(num_images: int, targets: PixelTargets, scores, heading: str) -> None:
    """Print the IoU of each class, and the other scores; `scores` is None where no image has known targets."""
    out = Console()
    out.print(printable(heading), soft_wrap=True)
    if scores is None:
        out.print(f"{num_images:,} images without {'masks' if targets.classes else 'depths'}: predicted only")
        return
    fields = {name.removeprefix("val_"): value for name, value in scores.row_fields().items()}
    of_images, of_classes = fields.pop("examples"), table.Table(box=box.SIMPLE)
    of_classes.add_column("class")
    of_classes.add_column("IoU", justify="right")
    others = []
    for name, value in fields.items():
        if name.startswith(IOU):
            of_classes.add_row(printable(name.removeprefix(IOU)), four_digits(value))
        else:
            others.append(f"{name.replace('_', ' ')} {four_digits(value)}")
    out.print(of_classes)
    out.print(f"{', '.join(others)} over {of_images:,} images", soft_wrap=True)


def write_maps(folder: str, dataset: Dataset, targets: PixelTargets, parts: Iterable[np.ndarray]) -> None:
    """Write NAME.mask.png, NAME.depth.png or both for each image, and scores.csv.

    A mask holds the number of the class, of two classes 0 and 255. A depth has 16 bits; 65,535 is the depth 1.

    Args:
      dataset: images with the true planes behind their channels; label -1 where these are not known.
      parts: see `map_parts`.
    Raises:
      UserError: a file cannot be written.
    """
    names = [name for name, has in (("mean_iou", targets.classes), ("depth_rmse", targets.has_depth)) if has]
    first = 0
    with writing(folder, "--out"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with replacing(Path(folder) / SCORES_FILE) as temporary, temporary.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", *names])
            for part in parts:
                numbers = np.arange(first, first + len(part))
                first += len(part)
                # All images of a set have dense targets, or none.
                is_known = (dataset.labels[numbers] >= 0).any()
                truths = dataset.images(numbers)[..., -targets.planes :] if is_known else [None] * len(part)
                for number, predicted, truth in zip(numbers, part, truths, strict=True):
                    name = dataset.ids[number]
                    _write_pictures(path_within(folder, name, "--out"), predicted, targets)
                    scores = [""] * len(names) if truth is None else _scores_of(predicted, truth, targets)
                    writer.writerow([name, *scores])


def _write_pictures(path: Path, predicted: np.ndarray, targets: PixelTargets) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if targets.classes:
        step = WHITE if len(targets.classes) == 2 else 1
        mask = (planes.classes_of(predicted) * step).astype(np.uint8)
        Image.fromarray(mask).save(path.with_name(f"{path.name}.mask.png"))
    if targets.has_depth:
        depth = np.rint(planes.depths_of(predicted) * planes.LARGEST_DEPTH).astype(np.uint16)
        Image.fromarray(depth).save(path.with_name(f"{path.name}.depth.png"))


def _scores_of(predicted: np.ndarray, truth: np.ndarray, targets: PixelTargets) -> list[str]:
    """Return mean IoU and depth RMSE of an image, those that the targets have."""
    scores = []
    if targets.classes:
        scores.append(mean_iou(planes.classes_of(predicted), planes.classes_of(truth), len(targets.classes)))
    if targets.has_depth:
        errors = planes.depths_of(predicted) - planes.depths_of(truth)
        scores.append(float(np.sqrt(np.mean(errors**2))))
    return [f"{score:.4f}" for score in scores]


def mean_iou(predicted: np.ndarray, truth: np.ndarray, num_classes: int) -> float:
    """Return the mean IoU of classes [H, W], of those that are there or were predicted."""
    counts = confusions(truth, predicted, num_classes)
    either = counts.sum(0) + counts.sum(1) - counts.diagonal()
    return float(np.mean(counts.diagonal()[either > 0] / either[either > 0]))
