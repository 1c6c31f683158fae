"""Predicted maps for people: scores of each class, and pictures with a line of scores for each image."""

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich import box, table

from largebatch.data.dataset import Dataset
from largebatch.tasks import planes
from largebatch.tasks.planes import PixelTargets
from largebatch.terminal import Console
from largebatch.util import UserError, path_within, printable, replacing

WHITE = 255  # of a mask of two classes, so that people see it
BYTES_PER_PART = 2**26
SCORES_FILE = "scores.csv"
IOU = "iou_"  # what the score of a class begins with


@dataclass(frozen=True)
class MapPart:
    """Consecutive images: their numbers, and the planes that were predicted, [n, H, W, P]; see `tasks.planes`."""

    numbers: range
    predicted: np.ndarray


@dataclass(frozen=True)
class MapPredictions:
    """The maps that were predicted for a data set.

    Attributes:
      dataset: whose images have the true planes behind their channels; label -1 where these are not known.
      predicted: uint8 planes [N, H, W, P]; or what has its `shape` and gives such arrays by slices of examples.
      targets: what was predicted.
    """

    dataset: Dataset
    predicted: Any
    targets: PixelTargets

    def parts(self) -> Iterator[MapPart]:
        """Yield what `write` takes. Collective."""
        count, *shape = self.predicted.shape
        at_once = max(BYTES_PER_PART // math.prod(shape), 1)
        for first in range(0, count, at_once):
            numbers = range(first, min(first + at_once, count))
            yield MapPart(numbers, self.predicted[first : numbers.stop])

    def print_results(self, scores, heading: str) -> None:
        """The IoU of each class, and the other scores; None where nothing is known of any image."""
        out = Console()
        out.print(printable(heading), soft_wrap=True)
        if scores is None:
            missing = "masks" if self.targets.classes else "depths"
            out.print(f"{self.predicted.shape[0]:,} images without {missing}: predicted only")
            return
        fields = {name.removeprefix("val_"): value for name, value in scores.row_fields().items()}
        of_images, of_classes = fields.pop("examples"), table.Table(box=box.SIMPLE)
        of_classes.add_column("class")
        of_classes.add_column("IoU", justify="right")
        others = []
        for name, value in fields.items():
            shown = "none" if value is None else f"{value:.4f}"
            if name.startswith(IOU):
                of_classes.add_row(printable(name.removeprefix(IOU)), shown)
            else:
                others.append(f"{name.replace('_', ' ')} {shown}")
        out.print(of_classes)
        out.print(f"{', '.join(others)} over {of_images:,} images", soft_wrap=True)

    def write(self, folder: str, parts: Iterable[MapPart]) -> None:
        """NAME.mask.png, NAME.depth.png or both for each image, and scores.csv.

        A mask holds the number of the class, of two classes 0 and 255. A depth has 16 bits; 65,535 is the depth 1.

        Raises:
          UserError: a file cannot be written.
        """
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with replacing(Path(folder) / SCORES_FILE) as temporary, temporary.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["id", *self._score_names()])
                for part in parts:
                    truths = self._truths(np.array(part.numbers))
                    for number, predicted, truth in zip(part.numbers, part.predicted, truths, strict=True):
                        name = self.dataset.ids[number]
                        self._write_pictures(path_within(folder, name, "--out"), predicted)
                        writer.writerow([name, *self._scores(predicted, truth)])
        except OSError as error:
            raise UserError(f"--out: cannot write {folder} ({error.strerror or error})") from error

    def _write_pictures(self, path: Path, predicted: np.ndarray) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.targets.classes:
            step = WHITE if len(self.targets.classes) == 2 else 1
            mask = (planes.classes_of(predicted) * step).astype(np.uint8)
            Image.fromarray(mask).save(path.with_name(f"{path.name}.mask.png"))
        if self.targets.has_depth:
            depth = np.rint(planes.depths_of(predicted) * planes.LARGEST_DEPTH).astype(np.uint16)
            Image.fromarray(depth).save(path.with_name(f"{path.name}.depth.png"))

    def _score_names(self) -> list[str]:
        names = {"mean_iou": self.targets.classes, "depth_rmse": self.targets.has_depth}
        return [name for name, is_there in names.items() if is_there]

    def _truths(self, numbers: np.ndarray) -> Iterable[np.ndarray | None]:
        """Return the true planes of images; None where they are not known."""
        if (self.dataset.labels[numbers] < 0).all():  # all images of a set have dense targets, or none
            return [None] * len(numbers)
        return self.dataset.images(numbers)[..., -self.targets.planes :]

    def _scores(self, predicted: np.ndarray, truth: np.ndarray | None) -> list[str]:
        """Return mean IoU and depth RMSE of an image, empty where they are not known."""
        if truth is None:
            return ["" for _ in self._score_names()]
        scores = []
        if self.targets.classes:
            classes = len(self.targets.classes)
            scores.append(mean_iou(planes.classes_of(predicted), planes.classes_of(truth), classes))
        if self.targets.has_depth:
            errors = planes.depths_of(predicted) - planes.depths_of(truth)
            scores.append(float(np.sqrt(np.mean(errors**2))))
        return [f"{score:.4f}" for score in scores]


def mean_iou(predicted: np.ndarray, truth: np.ndarray, num_classes: int) -> float:
    """Mean IoU of classes [H, W], of those that are there or were predicted."""
    found = np.bincount((truth * num_classes + predicted).ravel(), minlength=num_classes**2)
    counts = found.reshape(num_classes, num_classes)
    either = counts.sum(0) + counts.sum(1) - counts.diagonal()
    return float(np.mean(counts.diagonal()[either > 0] / either[either > 0]))
