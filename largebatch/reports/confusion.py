"""What a run took for what: its predictions.npz as a matrix, and pictures of the worst mistakes."""

import base64
import contextlib
import io
import re
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from largebatch import untrusted
from largebatch.data import images
from largebatch.runs.reader import Run, lies_in

MAX_PIXELS = 96  # of an example, on its longer side
# What is read of a file that a run names, and decoded of it.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff")
MAX_DECODED = 1 << 24  # pixels
MAX_BYTES = images.BYTES_PER_PIXEL * MAX_DECODED  # of a file
NUMBERED = re.compile(r"(.+?)_\d+\.\w+")  # AnnualCrop_12.jpg


class Example(NamedTuple):
    """One mistake: its id, the probability of the wrong class (0..1), and the picture as a data: URI, or None."""

    example_id: str
    probability: float
    picture: str | None


class Mistake(NamedTuple):
    """Examples of class `true` that were taken for `predicted`, the surest first; `count` are all of them."""

    true: int
    predicted: int
    count: int
    examples: list[Example]


class Confusion(NamedTuple):
    """matrix int [classes, classes], rows true, columns predicted; `missing` says why there are no pictures."""

    names: list[str]
    matrix: np.ndarray
    worst: list[Mistake]
    missing: str | None

    @property
    def recall(self) -> np.ndarray:
        """Share of each class that was found, [classes], NaN for a class without examples."""
        counts = self.matrix.sum(1)
        return np.divide(self.matrix.diagonal(), counts, out=np.full(len(counts), np.nan), where=counts > 0)

    @property
    def accuracy(self) -> float:
        """Share of all examples that is right."""
        return float(self.matrix.trace() / max(self.matrix.sum(), 1))


def read_confusion(run: Run, pairs: int = 5, examples: int = 4) -> tuple[Confusion | None, str | None]:
    """The confusions of a run at its best step, and what is wrong with predictions.npz, if anything.

    Args:
      pairs: worst confusions to show.
      examples: pictures of each.
    """
    path = run.path / "predictions.npz"
    if not path.exists():
        return None, None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            labels, logits, ids = (arrays[name] for name in ("labels", "logits", "ids"))
        problem = _misfit(labels, logits, ids)
    except Exception as error:  # zipfile and NumPy raise a dozen kinds on damaged input
        problem = " ".join(str(error).split()) or type(error).__name__
    if problem:
        return None, f"predictions.npz: damaged: {problem}"
    predicted, classes = logits.argmax(1), logits.shape[1]
    matrix = np.zeros((classes, classes), np.int64)
    np.add.at(matrix, (labels, predicted), 1)
    worst: list[Mistake] = []
    with picture_reader(run) as (read, missing):
        for true, wrong in worst_pairs(matrix, pairs):
            sure = _softmax(logits)[:, wrong]
            chosen = np.flatnonzero((labels == true) & (predicted == wrong))
            chosen = chosen[np.argsort(-sure[chosen], kind="stable")][:examples]
            shown = [Example(str(ids[i]), float(sure[i]), read(str(ids[i]))) for i in chosen]
            worst.append(Mistake(true, wrong, int(matrix[true, wrong]), shown))
    if missing is None and worst and not any(example.picture for mistake in worst for example in mistake.examples):
        missing = f"no example was found in {picture_place(run).path}"
    return Confusion(class_names(labels, ids, classes), matrix, worst, missing), None


def _misfit(labels: np.ndarray, logits: np.ndarray, ids: np.ndarray) -> str | None:
    if logits.ndim != 2 or labels.shape != ids.shape or labels.shape != logits.shape[:1] or not logits.size:
        return f"labels {labels.shape}, logits {logits.shape} and ids {ids.shape} do not go together"
    if labels.dtype.kind not in "iu" or logits.dtype.kind != "f" or ids.dtype.kind != "U":
        return f"labels, logits and ids are of {labels.dtype}, {logits.dtype} and {ids.dtype}"
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        return f"labels from {labels.min()} to {labels.max()}, with {logits.shape[1]} classes"
    return None


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def worst_pairs(matrix: np.ndarray, count: int) -> list[tuple[int, int]]:
    """The `count` most frequent (true, predicted) that are wrong, most frequent first."""
    wrong = matrix - np.diag(matrix.diagonal())
    order = np.argsort(-wrong, axis=None, kind="stable")[:count]
    return [divmod(int(i), len(matrix)) for i in order if wrong.flat[i] > 0]


def class_names(labels: np.ndarray, ids: np.ndarray, classes: int) -> list[str]:
    """Names told by ids such as "River/River_7.jpg" or "River_7.jpg"; numbers where those do not tell all."""
    found: dict[int, set] = {}
    for label, example_id in zip(labels.tolist(), ids.tolist(), strict=True):
        path = PurePosixPath(example_id)
        numbered = NUMBERED.fullmatch(path.name)
        name = path.parent.name or (numbered.group(1) if numbered else None)
        found.setdefault(label, set()).add(name)
    names = {label: next(iter(options)) for label, options in found.items() if len(options) == 1}
    if len(names) < len(found) or None in names.values() or len(set(names.values())) < len(names):
        return [str(label) for label in range(classes)]
    return [names.get(label, str(label)) for label in range(classes)]


# ---- pictures ----------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a run's config says that its images are: a field of it, and the folder or zip that it means."""

    field: str
    path: str


def picture_place(run: Run) -> Place | None:
    """Where example pictures are read from, if the run names a place."""
    path, cache = run.field("dataset.path"), run.field("augment.cache_dir")
    if "synthetic" in (run.field("dataset.name"), run.field("dataset.source")):
        return None
    if isinstance(path, str):
        return Place("dataset.path", path)
    if path is None and run.field("dataset.name") == "eurosat" and isinstance(cache, str):
        return Place("augment.cache_dir", f"{cache}/EuroSAT.zip")  # where train.py keeps its download
    return None


@contextlib.contextmanager
def picture_reader(run: Run) -> Iterator[tuple[Callable[[str], str | None], str | None]]:
    """Yields (what gives the data: URI of an example id, or None; why no picture can be had, or None).

    A run may come from someone else. Only images are read, for ids that its predictions name, and nothing outside
    the place of `picture_place`.
    """
    none = lambda example_id: None  # noqa: E731
    place = picture_place(run)
    if place is None:
        synthetic = "synthetic" in (run.field("dataset.name"), run.field("dataset.source"))
        yield none, "synthetic images have no files" if synthetic else "the run names no dataset.path"
        return
    try:
        path = Path(place.path).expanduser()
        kind = path.stat().st_mode
    except (OSError, ValueError, RuntimeError):  # "~nobody", a NUL
        yield none, f"{place.field} {place.path} does not exist here"
        return
    if stat.S_ISDIR(kind):
        yield lambda example_id: _picture(lambda: _find(path, example_id)), None
        return
    try:
        if not stat.S_ISREG(kind):
            raise OSError("no regular file")
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        yield none, f"{place.field} {path} is not a readable zip file ({error})"
        return
    with archive:
        # By the last two parts, Class/file: folders around them are not in an id.
        entries = {"/".join(entry.filename.split("/")[-2:]): entry for entry in archive.infolist()}
        yield lambda example_id: _picture(lambda: _unpack(archive, entries[example_id])), None


def _unpack(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    untrusted.check_entry(entry, "dataset.path")
    _check_size(entry.file_size)
    return untrusted.read_entry(archive, entry)


def _find(root: Path, example_id: str) -> bytes:
    """The file of an id Class/file, which leads nowhere else, not by a link either."""
    name = PurePosixPath(example_id)
    if name.is_absolute() or len(name.parts) != 2 or ".." in name.parts:
        raise FileNotFoundError(example_id)
    if name.suffix.lower() not in IMAGE_SUFFIXES:
        raise FileNotFoundError(example_id)
    for folder in (root, *sorted(p for p in root.iterdir() if p.is_dir())):
        path = folder / name
        if path.is_file() and lies_in(path, root):
            _check_size(path.stat().st_size)
            return path.read_bytes()
    raise FileNotFoundError(example_id)


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise ValueError(f"{size} bytes; allowed for a picture: {MAX_BYTES}")


def _picture(read: Callable[[], bytes]) -> str | None:
    """A small PNG as a data: URI, or None where the file is not there, no image, damaged or too large."""
    from PIL import Image

    try:
        content = read()
        with images.pillow_limited_to(MAX_DECODED):
            file = images.ImageFile("", 0, len(content), lambda: content)
            image = Image.fromarray(images.decode(file, None, images.Limits(MAX_DECODED)))
        image.thumbnail((MAX_PIXELS, MAX_PIXELS))
        buffer = io.BytesIO()
        image.save(buffer, "PNG", optimize=True)
    except Exception:  # Pillow and zipfile raise a dozen kinds; a page without this picture is still a page
        return None
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
