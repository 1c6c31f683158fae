"""Assignment of examples to splits: as published, by a file, or at random."""

import csv
import functools
import hashlib
import io
import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from posixpath import basename, dirname, splitext
from typing import NamedTuple

import numpy as np

from largebatch.data.dataset import SPLITS
from largebatch.data.sources.files import IMAGE_SUFFIXES
from largebatch.util import BadSetting, UserError, read_text

log = logging.getLogger("largebatch")

SPLIT_NAMES = {"train": "train", "val": "val", "validation": "val", "valid": "val", "dev": "val", "test": "test"}
FIELD = "dataset.split_file"
PLACEHOLDER = "{split}"  # in a path: replaced by each of SPLITS
ID_COLUMNS = ("id", "path", "filename", "image")
SPLIT_COLUMN = "split"
SHOWN_FOLDERS = 4
NO_PUBLISHED_SPLITS = (
    "dataset.splits: 'published', but this data set has no splits of its own; allowed: auto | own, or give them by "
    "dataset.split_file"
)


def split_named(name: str) -> str | None:
    """Return the one of SPLITS that a publisher means by `name`, in any case; None if it names no split."""
    return SPLIT_NAMES.get(name.lower())


def splits_of_folders(folders: set[str], where: str) -> dict[str, str]:
    """Return the split of each of the folders that hold a set; {} if there is only one, which publishes no split.

    Args:
      where: the folder or zip that holds them, with the field that names it, for messages.
    Raises:
      UserError: they do not lie side by side, or are not train with val, test or both.
    """
    if len(folders) == 1:
        return {}
    split_of = {folder: split_named(basename(folder)) for folder in sorted(folders)}
    splits = set(split_of.values())
    if None in splits or len(splits) < len(folders) or "train" not in splits or len(set(map(dirname, folders))) > 1:
        found = ", ".join(folder or "." for folder in list(split_of)[:SHOWN_FOLDERS])
        allowed = "give one of them, or let them be train and val, test or both, side by side"
        raise UserError(f"{where} has images in the folders {found}; {allowed}")
    return split_of


class Entry(NamedTuple):
    """Row of a split file: an image and its split."""

    name: str
    split: str
    place: str  # file and line, for messages


@dataclass(frozen=True)
class SplitFile:
    """Content of a split file, before it is matched with the images of a set."""

    path: str
    entries: list[Entry]
    digest: str  # SHA-256 of all text that was read

    def match(self, example_ids: list[str]) -> dict[str, list[int]]:
        """Return the examples of each split; leave out, with a warning, those that the file does not name.

        Returns:
          For each of SPLITS indices into `example_ids`, in the order of the file.
        Raises:
          BadSetting: names the file and the line; unknown ids, an id twice, or a split without images.
        """
        pairs = list(zip(self.entries, map(_finder(example_ids), self.entries), strict=True))
        if unknown := [entry for entry, row in pairs if row is None]:
            found = f"{len(unknown)}, first {', '.join(repr(entry.name) for entry in unknown[:3])}"
            allowed = f"those of the data set, as {example_ids[0]!r}"
            raise BadSetting(f"{FIELD}: {unknown[0].place}: unknown ids: {found}; allowed: {allowed}")
        splits, named = {split: [] for split in SPLITS}, {}
        for entry, row in pairs:
            before = named.setdefault(row, entry)
            if before is not entry:
                found = f"is in {entry.split}, and in {before.split} by {before.place}"
                raise BadSetting(f"{FIELD}: {entry.place}: {entry.name!r} {found}; allowed: each image once")
            splits[entry.split].append(row)
        self.sizes()
        if left_out := len(example_ids) - len(named):
            text = "%s: left out %d of %d images, which it does not name"
            log.warning(text, self.path, left_out, len(example_ids))
        return splits

    def sizes(self) -> dict[str, int]:
        """Return the number of images of each of SPLITS; raise BadSetting for a split without images."""
        listed = Counter(entry.split for entry in self.entries)
        for split in SPLITS:
            if not listed[split]:
                allowed = "some in each of train, val, test"
                raise BadSetting(f"{FIELD}: {self.path}: no {split} images; allowed: {allowed}")
        return {split: listed[split] for split in SPLITS}


def read_split_file(path: str) -> SplitFile:
    """Read a split file, or three files if `path` contains "{split}".

    One file has a header with the columns `split` and one of ID_COLUMNS. Three files have the ids in a column of
    ID_COLUMNS, or in the first one. Other columns are ignored.

    Raises:
      BadSetting: names the file, the line and what is allowed.
    """
    entries, digest = [], hashlib.sha256()
    files = {path.replace(PLACEHOLDER, split): split for split in SPLITS} if PLACEHOLDER in path else {path: None}
    for file, split in files.items():
        text = read_text(file, FIELD)
        digest.update(hashlib.sha256(text.encode()).digest())
        reader = csv.reader(io.StringIO(text), skipinitialspace=True, strict=True)
        try:
            rows = [(f"{file}, line {reader.line_num}", [cell.strip() for cell in row]) for row in reader]
        except csv.Error as error:
            raise BadSetting(f"{FIELD}: {file}, line {reader.line_num}: no CSV ({error})") from error
        rows = [(place, row) for place, row in rows if any(row)]
        if not rows:
            raise BadSetting(f"{FIELD}: {file} is empty; allowed: a file that lists images")
        entries += _entries(rows, split)
    return SplitFile(path, entries, digest.hexdigest())


def _entries(rows: list[tuple[str, list[str]]], split: str | None) -> list[Entry]:
    """Return the entries of a file for one split, or for all where `split` is None; rows begin with their place.

    The first row of a file for one split is its header if it names no image, but has one of ID_COLUMNS or comes
    before a row that names an image.
    """
    first_place, first = rows[0]
    header = [name.lower() for name in first]
    id_column = next((header.index(name) for name in ID_COLUMNS if name in header), None)
    has_header = True
    if split is None and (id_column is None or SPLIT_COLUMN not in header):
        allowed = f"split, and one of {', '.join(ID_COLUMNS)}"
        raise BadSetting(f"{FIELD}: {first_place}: the columns {', '.join(first)}; allowed: {allowed}")
    if split is not None:
        has_images = [any(_without_suffix(cell) != cell for cell in row) for _, row in rows[:2]]
        has_header = not has_images[0] and (id_column is not None or has_images[-1])
    column = id_column if has_header and id_column is not None else 0
    entries = []
    for place, row in rows[has_header:]:
        if split is None and len(row) != len(header):
            raise BadSetting(f"{FIELD}: {place}: {len(row)} values; allowed: {len(header)}, as in the header")
        name = split or row[header.index(SPLIT_COLUMN)]
        if split_named(name) is None:
            raise BadSetting(f"{FIELD}: {place}: split {name!r}; allowed: {' | '.join(SPLIT_NAMES)}")
        if not row[column:] or not row[column]:
            raise BadSetting(f"{FIELD}: {place}: no id; allowed: one in every row")
        entries.append(Entry(row[column], split_named(name), place))
    return entries


def _without_suffix(name: str) -> str:
    stem, suffix = splitext(name)
    return stem if suffix.lower() in IMAGE_SUFFIXES else name


# Forms in which a name in a file is compared with an id, each tried if those before find nothing.
FORMS = (
    (str, str),
    (str, basename),
    (_without_suffix, _without_suffix),
    (_without_suffix, lambda name: _without_suffix(basename(name))),
)


def _finder(example_ids: list[str]) -> Callable[[Entry], int | None]:
    """Return the function that finds the index of the example that an entry names; None where there is none.

    It raises BadSetting for an entry that names several.
    """

    @functools.cache
    def rows_by(form_of_id: Callable[[str], str]) -> dict[str, list[int]]:
        rows = defaultdict(list)
        for row, example_id in enumerate(example_ids):
            rows[form_of_id(example_id)].append(row)
        return rows

    def find(entry: Entry) -> int | None:
        for form_of_name, form_of_id in FORMS:
            found = rows_by(form_of_id).get(form_of_name(entry.name), [])
            if len(found) > 1:
                names = f"{len(found)} images, as {example_ids[found[0]]!r} and {example_ids[found[1]]!r}"
                raise BadSetting(f"{FIELD}: {entry.place}: {entry.name!r} names {names}; allowed: whole ids")
            if found:
                return found[0]
        return None

    return find


# ---- splits of all examples --------------------------------------------------------------------------


def assign_splits(
    example_ids: list[str],
    labels: np.ndarray,
    class_names: list[str],
    *,
    published: list[str] | None = None,
    choice: str = "auto",
    seed: int = 0,
    split_file: SplitFile | None = None,
) -> dict[str, np.ndarray]:
    """Assign examples to training, validation and test.

    Published splits, and those of a file, are sorted by id. Splits that a published set lacks are cut from its
    training examples, a tenth of them for each. Our own split is that of `split_indices`.

    Args:
      example_ids, labels: ids and labels of all examples of a data set; labels int [N].
      published: the split of each example as its set has it, each of SPLITS; None where it has none.
      choice: "auto" takes `split_file`, else `published`, else our own split; "published" takes no split of ours;
        "own" takes only that.
      seed: seed of our own split and of splits that are cut.
    Returns:
      For each of SPLITS the indices into `example_ids`, int64. Only a split file leaves examples out.
    Raises:
      UserError: an id twice; a class or the set has too few training examples; there is no published split, or the
        file does not fit the ids.
    """
    repeated, count = Counter(example_ids).most_common(1)[0] if example_ids else ("", 0)
    if count > 1:
        raise UserError(f"dataset: two images have the id {repeated!r}; allowed: each id once")
    if split_file is not None:
        splits = {split: _sorted_by_id(example_ids, rows) for split, rows in split_file.match(example_ids).items()}
    elif published is not None and choice != "own":
        splits = _complete(example_ids, published, seed)
    elif choice == "published":
        raise BadSetting(NO_PUBLISHED_SPLITS)
    else:
        splits = split_indices(example_ids, seed)
    _check_classes(splits, np.asarray(labels), class_names)
    return splits


def split_indices(example_ids: list[str], seed: int) -> dict[str, np.ndarray]:
    """Split 80/10/10 by a seeded permutation of the examples sorted by id, the same for every source.

    Returns:
      For each of SPLITS the indices into `example_ids`.
    Raises:
      UserError: see `complete_sizes`.
    """
    sizes = complete_sizes({"train": len(example_ids)})
    order = _shuffled(example_ids, np.arange(len(example_ids)), seed)
    train, val, test = np.split(order, np.cumsum([sizes["train"], sizes["val"]]))
    return {"train": train, "val": val, "test": test}


def _complete(example_ids: list[str], published: list[str], seed: int) -> dict[str, np.ndarray]:
    """Return the published splits, with missing ones cut from the training examples; see `complete_sizes`."""
    splits = {split: np.flatnonzero(np.array(published) == split) for split in SPLITS}
    sizes = complete_sizes({split: len(rows) for split, rows in splits.items() if len(rows)})
    missing = [split for split in SPLITS if len(splits[split]) == 0]
    order = _shuffled(example_ids, splits["train"], seed)
    for split in reversed(missing):  # if both are missing, cut as by `split_indices`
        order, splits[split] = np.split(order, [-sizes[split]])
        log.info("%s: %d of the published training images", split, sizes[split])
    splits["train"] = order
    return {split: _sorted_by_id(example_ids, rows) for split, rows in splits.items()}


def complete_sizes(published: dict[str, int]) -> dict[str, int]:
    """Return the number of examples of each of SPLITS, where missing ones are cut from the training examples.

    A missing split gets a tenth of them, but no more than the other published split has: of ImageNet's 1,281,167
    training images not 128,116 are taken, but 50,000, the size of its validation split.

    Args:
      published: number of examples of each published split.
    Raises:
      UserError: there are no training examples, or too few to cut from.
    """
    if "train" not in published:
        raise UserError("dataset: the published splits have no training images; allowed: dataset.splits 'own'")
    missing, train = [split for split in SPLITS if split not in published], published["train"]
    if missing and train < 10:
        raise UserError(
            f"dataset: {train} training images; allowed: at least 10, to cut {' and '.join(missing)} from"
        )
    size = min([train // 10, *(published[split] for split in published if split != "train")])
    return {"train": train - size * len(missing)} | {split: published.get(split, size) for split in SPLITS[1:]}


def _shuffled(example_ids: list[str], rows: np.ndarray, seed: int) -> np.ndarray:
    """Return a seeded permutation of `rows` that does not depend on their order."""
    return _sorted_by_id(example_ids, rows)[np.random.default_rng(seed).permutation(len(rows))]


def _sorted_by_id(example_ids: list[str], rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows, np.int64)
    return rows[np.argsort(np.array([example_ids[row] for row in rows]))]


def _check_classes(splits: dict[str, np.ndarray], labels: np.ndarray, class_names: list[str]) -> None:
    """Refuse a class without training images, and warn of one without validation or test images."""
    lacking = {}
    for split, rows in splits.items():
        found = np.bincount(labels[rows], minlength=len(class_names)) > 0
        lacking[split] = ", ".join(np.array(class_names)[~found])
    if lacking["train"]:
        found = f"no training image is left for class {lacking['train']}"
        raise UserError(f"dataset: {found}; add images or change the split")
    words = {"val": "validation", "test": "test"}
    notes = [f"no {word} image of class {lacking[split]}" for split, word in words.items() if lacking[split]]
    if notes:
        log.warning("dataset: %s", "; ".join(notes))
