"""Examples that a report shows: what a run took for what, with its worst mistakes, and its worst and best maps."""

import base64
import io
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from largebatch.data.decode import DecodeOptions, decode
from largebatch.data.pictures import class_colours, picture_of, shaded, to_rgb8
from largebatch.data.sources.files import IMAGE_SUFFIXES, open_files
from largebatch.data.sources.splits import split_named
from largebatch.predictions import cases as case_files
from largebatch.predictions import files as prediction_files
from largebatch.predictions.cases import Cases
from largebatch.reports.groups import Group
from largebatch.runs.reader import Run, lies_in
from largebatch.studies import analysis
from largebatch.tasks import planes
from largebatch.util import UserError, expanded, printable

log = logging.getLogger("largebatch")

NUMBERED = re.compile(r"(.+?)_\d+\.\w+")  # AnnualCrop_12.jpg
MAX_WITH_EXAMPLES = 4  # runs outside a study; their pictures are the largest part of a page
MAX_SIDE = 96  # pixels of the picture of a mistake, on its longer side
MAX_DECODED = 1 << 24  # pixels of an image
MAX_MAP_SIDE = 192  # pixels of a map; larger ones are thinned
WRONG = np.uint8([230, 60, 60])
PAIRS, PICTURES = 5, 4  # worst confusions, and pictures of each


def best_runs(group: Group, file: str) -> list[Run]:
    """Return the best run of a study, or the best few of single runs, of those that have a file of examples."""

    def rank(run: Run) -> float:
        return run.kind.rank(run.best_score)

    runs = [run for run in group.runs if (run.path / file).exists()]
    if group.study:
        for setting in analysis.leaderboard(group.study):
            of_setting = [run for run in setting.runs if run in runs]
            if of_setting:
                return [min(of_setting, key=rank)]
    return sorted(runs, key=rank)[:MAX_WITH_EXAMPLES]


def read_examples(group: Group, file: str, read: Callable) -> list:
    """Return what `read` finds in the best runs that have a file; damage is added to the problems of its run."""
    found = []
    for run in best_runs(group, file):
        try:
            found.append(read(run, group.labels[group.runs.index(run)]))
        except prediction_files.DamagedPredictions as damage:
            run.problems.append(str(damage))
    return found


# ---- confusion -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """Examples of class `true` that were taken for `predicted`.

    Attributes:
      count: number of all of them.
      examples: the surest, each with its id, the probability of the wrong class, and its picture as a data: URI, or
        None.
    """

    true: str
    predicted: str
    count: int
    examples: list[tuple[str, float, str | None]]


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
        return np.where(counts, self.matrix.diagonal() / np.maximum(counts, 1), np.nan).tolist()

    @property
    def accuracy(self) -> float:
        """Share of all examples that is right."""
        return float(self.matrix.trace() / max(self.matrix.sum(), 1))

    def shade(self, true: int, predicted: int) -> float:
        """Return how dark a count is, 0 to 1: its share of the class; of mistakes, being few, its root."""
        share = self.matrix[true, predicted] / max(self.matrix[true].sum(), 1)
        return float(share if true == predicted else math.sqrt(share))


def read_confusion(run: Run, label: str = "") -> Confusion:
    """Read the confusions of a run that has predictions.

    Raises:
      prediction_files.DamagedPredictions: they cannot be used.
    """
    found = prediction_files.read(run.path)
    labels, logits = found.labels, found.logits
    classes, num_classes = logits.argmax(1), logits.shape[1]
    probabilities = 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)  # of the predicted class
    matrix = prediction_files.confusions(labels, classes, num_classes)
    wrong = matrix - np.diag(matrix.diagonal())
    rows_of: dict[tuple[int, int], list[int]] = {}  # the surest examples of the worst confusions
    for cell in np.argsort(-wrong, axis=None, kind="stable")[:PAIRS]:
        true, predicted = divmod(int(cell), num_classes)
        if wrong[true, predicted]:
            rows = np.flatnonzero((labels == true) & (classes == predicted))
            rows_of[true, predicted] = rows[np.argsort(-probabilities[rows], kind="stable")[:PICTURES]].tolist()
    pictures, missing = read_pictures(run, [str(found.ids[row]) for rows in rows_of.values() for row in rows])
    names, worst = class_names(labels, found.ids, num_classes), []
    for (true, predicted), rows in rows_of.items():
        shown = [(str(found.ids[row]), float(probabilities[row]), pictures.get(found.ids[row])) for row in rows]
        worst.append(Mistake(names[true], names[predicted], int(wrong[true, predicted]), shown))
    return Confusion(label, names, matrix, worst, missing)


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
        readers = _readers(Path(expanded(path)), example_ids)
        found = {name: picture for name, read in readers if (picture := _picture(name, read))}
    except (OSError, ValueError, UserError):  # "~nobody", a NUL, a damaged zip, or nothing at all
        return {}, f"dataset.path {path} does not exist here, or cannot be read"
    return found, None if found else f"no example was found in {path}"


def _readers(path: Path, example_ids: Iterable[str]) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield the ids of examples that lie in a folder or zip, each with a function that reads its file.

    An id is CLASS/FILE or SPLIT/CLASS/FILE. The set may lie in a folder of the folder or zip.
    """
    if path.is_dir():
        for example_id in example_ids:
            if file := _file_of(path, example_id):
                yield example_id, file.read_bytes
        return
    archive = open_files(str(path), "dataset.path", "zip")
    by_id = {}
    for name in archive.names:
        *folders, file = name.split("/")
        class_and_file = "/".join([*folders[-1:], file])
        by_id[class_and_file] = name
        if len(folders) > 1 and (split := split_named(folders[-2])):
            by_id[f"{split}/{class_and_file}"] = name
    for example_id in example_ids:
        if example_id in by_id:
            yield example_id, lambda name=by_id[example_id]: archive.read(name)


def _file_of(root: Path, example_id: str) -> Path | None:
    """Return the file of an example. Only folders above those of classes are listed, since a set may be large."""
    path = PurePosixPath(example_id)
    split, inner = ("", path) if len(path.parts) < 3 else (path.parts[0], path.relative_to(path.parts[0]))
    if path.is_absolute() or ".." in path.parts or path.suffix.lower() not in IMAGE_SUFFIXES:
        return None
    for around in (root, *(child for child in root.iterdir() if child.is_dir())):
        folders = [around]
        if split:
            folders = [child for child in around.iterdir() if split_named(child.name) == split]
        for folder in folders:
            if (folder / inner).is_file():
                return folder / inner
    return None


def _picture(name: str, read: Callable[[], bytes]) -> str | None:
    """Return a small PNG as a data: URI; None where the file is no image, damaged or too large."""
    try:
        image = Image.fromarray(to_rgb8(decode(name, read(), DecodeOptions(max_pixels=MAX_DECODED))))
    except (OSError, UserError):  # a page without this picture is still a page
        return None
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return _uri(image)


def _uri(image: Image.Image) -> str:
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


def read_maps(run: Run, label: str) -> MapExamples:
    """Read the maps to show of a run that has some.

    Raises:
      prediction_files.DamagedPredictions: they cannot be used.
    """
    cases = case_files.read(run.path)
    rows = []
    for number, example_id in enumerate(cases.ids):
        names, scores = cases.columns.tolist(), cases.scores[number].tolist()
        shown = [f"{name.replace('_', ' ')} {score:.3f}" for name, score in zip(names, scores, strict=True)]
        rows.append((str(example_id), shown, [_map_uri(pixels) for _, pixels in _pictures_of(cases, number)]))
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
    step = -(-max(pixels.shape[:2]) // MAX_MAP_SIDE)
    return _uri(Image.fromarray(np.ascontiguousarray(pixels[::step, ::step])))
