"""Examples that a report shows: what a run took for what, with its worst mistakes, and its worst and best maps."""

import base64
import io
import logging
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np

from largebatch.data.decode import DecodeOptions, decode
from largebatch.data.pictures import class_colours, picture_of, shaded, to_rgb8
from largebatch.data.sources.files import IMAGE_SUFFIXES, open_files
from largebatch.data.sources.splits import split_named
from largebatch.predictions import cases as case_files
from largebatch.predictions import files as prediction_files
from largebatch.predictions.cases import Cases
from largebatch.reports.groups import Group, best_runs
from largebatch.runs.reader import Run, lies_in
from largebatch.tasks import planes
from largebatch.util import UserError, expanded, printable

log = logging.getLogger("largebatch")

NUMBERED = re.compile(r"(.+?)_\d+\.\w+")  # AnnualCrop_12.jpg
MAX_SIDE = 96  # pixels of the picture of a mistake, on its longer side
MAX_DECODED = 1 << 24  # pixels of an image
MAX_MAP_SIDE = 192  # pixels of a map; larger ones are thinned
WRONG = np.uint8([230, 60, 60])
PAIRS, PICTURES = 5, 4  # worst confusions, and pictures of each


# ---- confusion -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """Mistake with its id, the probability of the wrong class, and its picture as a data: URI, or None."""

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
    """Confusions of a run at its best step.

    Attributes:
      names: of the classes.
      matrix: counts, int [classes, classes], rows true, columns predicted.
      worst: the most frequent mistakes.
      no_pictures: why there are no pictures; None where there are some, or no mistakes.
    """

    label: str
    names: list[str]
    matrix: np.ndarray
    worst: list[Mistake]
    no_pictures: str | None

    @property
    def recall(self) -> list[float]:
        """Share of each class that was found, NaN for a class without examples."""
        counts = self.matrix.sum(1)
        return np.divide(
            self.matrix.diagonal(), counts, out=np.full(len(counts), np.nan), where=counts > 0
        ).tolist()

    @property
    def accuracy(self) -> float:
        """Share of all examples that is right."""
        return float(self.matrix.trace() / max(self.matrix.sum(), 1))

    def shade(self, true: int, predicted: int) -> float:
        """Return how dark a count is, 0 to 1: its share of the class; of mistakes, being few, its root."""
        share = self.matrix[true, predicted] / max(self.matrix[true].sum(), 1)
        return float(share if true == predicted else math.sqrt(share))


def read_confusions(group: Group) -> list[Confusion]:
    """Read the confusions to show; damaged predictions are added to the problems of their run."""
    confusions = []
    for run in best_runs(group, prediction_files.exist):
        try:
            confusions.append(read_confusion(run, group.labels[group.runs.index(run)]))
        except prediction_files.DamagedPredictions as damage:
            run.problems.append(str(damage))
    return confusions


def read_confusion(run: Run, label: str = "") -> Confusion:
    """Read the confusions of a run that has predictions.

    Raises:
      prediction_files.DamagedPredictions: they cannot be used.
    """
    found = prediction_files.read(run.path)
    labels, logits = found.labels, found.logits
    classes, num_classes = logits.argmax(1), logits.shape[1]
    probabilities = 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)  # of the predicted class
    matrix = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(matrix, (labels, classes), 1)
    wrong = matrix - np.diag(matrix.diagonal())
    worst = []
    for cell in np.argsort(-wrong, axis=None, kind="stable")[:PAIRS]:
        true, predicted = divmod(int(cell), num_classes)
        if wrong[true, predicted]:
            rows = np.flatnonzero((labels == true) & (classes == predicted))
            surest = rows[np.argsort(-probabilities[rows], kind="stable")[:PICTURES]]
            examples = [Example(str(found.ids[row]), float(probabilities[row])) for row in surest]
            worst.append(Mistake(true, predicted, int(wrong[true, predicted]), examples))
    pictures, missing = read_pictures(
        run, [example.example_id for mistake in worst for example in mistake.examples]
    )
    worst = [
        replace(mistake, examples=[replace(e, picture=pictures.get(e.example_id)) for e in mistake.examples])
        for mistake in worst
    ]
    return Confusion(label, class_names(labels, found.ids, num_classes), matrix, worst, missing)


def class_names(labels: np.ndarray, ids: np.ndarray, num_classes: int) -> list[str]:
    """Return names told by ids such as "River/River_7.jpg" or "River_7.jpg"; numbers where those tell not all."""
    told: dict[int, set[str | None]] = {}  # what the ids of each label tell
    for label, example_id in zip(labels.tolist(), ids.tolist(), strict=True):
        path = PurePosixPath(example_id)
        numbered = NUMBERED.fullmatch(path.name)
        told.setdefault(label, set()).add(path.parent.name or (numbered.group(1) if numbered else None))
    numbers = [str(label) for label in range(num_classes)]
    if any(len(names) > 1 or None in names for names in told.values()):
        return numbers
    names = {label: next(iter(options)) for label, options in told.items()}
    if len(set(names.values())) < len(names):
        return numbers
    return [names.get(label, number) for label, number in enumerate(numbers)]


# ---- pictures of mistakes ------------------------------------------------------------------------------------


def read_pictures(run: Run, example_ids: Iterable[str]) -> tuple[dict[str, str], str | None]:
    """Read pictures of examples from the folder or zip that a run's config names.

    Returns:
      data: URIs by id; and why there are none, if some were asked for.
    """
    example_ids = list(example_ids)
    if not example_ids:
        return {}, None
    if "synthetic" in (run.field("dataset.name"), run.field("dataset.source")):
        return {}, "synthetic images have no files"
    field, path, cache_dir = "dataset.path", run.field("dataset.path"), run.field("augment.cache_dir")
    if path is None and run.field("dataset.name") == "eurosat" and isinstance(cache_dir, str):
        field, path = "augment.cache_dir", f"{cache_dir}/EuroSAT.zip"  # where train.py keeps its download
    if not isinstance(path, str):
        return {}, "the run names no dataset.path"
    if not lies_in(path, run.path):
        log.warning("%s", printable(f"reads {field} {path}, which {run.path} names"))
    try:
        names = _image_files(Path(expanded(path)))
    except (OSError, ValueError, UserError):  # "~nobody", a NUL, a damaged zip
        names = None
    if names is None:
        return {}, f"dataset.path {path} does not exist here, or cannot be read"
    found = {name: picture for name in example_ids if (picture := _picture(name, names.get(name)))}
    return found, None if found else f"no example was found in {path}"


def _image_files(path: Path) -> dict[str, Callable[[], bytes]] | None:
    """Return functions that read the image files of a folder or zip, by example id; None where there is neither.

    An id is the last two parts of a name, or three with the folder of a split.
    """
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
        reads = {file.relative_to(path).as_posix(): file.read_bytes for file in files}
    elif path.exists():
        archive = open_files(str(path), "dataset.path", "zip")
        reads = {name: lambda name=name: archive.read(name) for name in archive.names}
    else:
        return None
    by_id = {}
    for name, read in reads.items():
        *folders, file = name.split("/")
        class_and_file = "/".join([*folders[-1:], file])
        by_id[class_and_file] = read
        if len(folders) > 1 and (split := split_named(folders[-2])):
            by_id[f"{split}/{class_and_file}"] = read
    return by_id


def _picture(name: str, read: Callable[[], bytes] | None) -> str | None:
    """Return a small PNG as a data: URI; None where there is no file, or it is no image, damaged or too large."""
    from PIL import Image

    try:
        options = DecodeOptions(max_pixels=MAX_DECODED)
        image = Image.fromarray(to_rgb8(decode(name, read(), options))) if read else None
    except (OSError, UserError):  # a page without this picture is still a page
        return None
    if image is None:
        return None
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return _uri(image)


def _uri(image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# ---- maps ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MapExamples:
    """Worst and best maps of a run: the heads of their columns, and (id, scores as text, pictures) of each."""

    label: str
    classes: list[tuple[str, str]]  # name and CSS colour
    columns: list[str]
    rows: list[tuple[str, list[str], list[str]]]


def read_maps(group: Group) -> list[MapExamples]:
    """Read the maps to show; a damaged file is added to the problems of its run."""
    found = []
    for run in best_runs(group, case_files.exist):
        try:
            found.append(_map_examples(case_files.read(run.path), group.labels[group.runs.index(run)]))
        except case_files.DamagedCases as damage:
            run.problems.append(str(damage))
    return found


def _map_examples(cases: Cases, label: str) -> MapExamples:
    rows = []
    for number, example_id in enumerate(cases.ids):
        pictures = _pictures_of(cases, number)
        names, scores = cases.columns.tolist(), cases.scores[number].tolist()
        shown = [f"{name.replace('_', ' ')} {score:.3f}" for name, score in zip(names, scores, strict=True)]
        rows.append((str(example_id), shown, [_map_uri(pixels) for _, pixels in pictures]))
    columns = [name for name, _ in _pictures_of(cases, 0)]
    colours = class_colours(np.arange(len(cases.classes))[None])[0].tolist()
    classes = [
        (str(name), "rgb({}, {}, {})".format(*rgb)) for name, rgb in zip(cases.classes, colours, strict=True)
    ]
    return MapExamples(label, classes, columns, rows)


def _pictures_of(cases: Cases, number: int) -> list[tuple[str, np.ndarray]]:
    """Return (column, uint8 [H, W, 3]) of an image, then of truth, prediction and error of its targets."""
    image, truth, predicted = cases.images[number], cases.truth[number], cases.predicted[number]
    shown = picture_of(image)
    pictures = [("image", shown)]
    if cases.targets.classes:
        mask, guess = planes.classes_of(truth), planes.classes_of(predicted)
        wrong = np.where((mask != guess)[..., None], WRONG, shown // 3).astype(np.uint8)
        pictures += [("mask", class_colours(mask)), ("predicted", class_colours(guess)), ("wrong", wrong)]
    if cases.targets.has_depth:
        depth, guess = planes.depths_of(truth), planes.depths_of(predicted)
        low, high = float(depth.min()), float(depth.max())  # all on the scale of the true depths
        span = max(high - low, 1 / planes.LARGEST_DEPTH)
        pictures += [("depth", shaded((depth - low) / span)), ("predicted", shaded((guess - low) / span))]
        pictures.append(("error", shaded(np.abs(guess - depth) / span)))
    return pictures


def _map_uri(pixels: np.ndarray) -> str:
    from PIL import Image

    step = -(-max(pixels.shape[:2]) // MAX_MAP_SIDE)
    return _uri(Image.fromarray(np.ascontiguousarray(pixels[::step, ::step])))
