"""Assignment of examples to splits: as published, by a file, or at random."""

import csv
import hashlib
import io
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

from largebatch import untrusted
from largebatch.sources.class_folders import ALLOWED_NAMES, IMAGE_SUFFIXES, SPLITS, split_named
from largebatch.util import BadSetting, UserError

log = logging.getLogger("largebatch")

FIELD = "dataset.split_file"
PLACEHOLDER = "{split}"  # in a path: replaced by each of SPLITS
ID_COLUMNS = ("id", "path", "filename", "image")
SPLIT_COLUMN = "split"


@dataclass(frozen=True, slots=True)
class Entry:
    """Row of a split file: an image and its split."""

    name: str
    split: str
    file: str
    line: int
    may_be_header: bool  # True for the first row of a file without known column names

    @property
    def place(self) -> str:
        """File and line of the row, for messages."""
        return f"{self.file}, line {self.line}"


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
        rows = _find(self.entries, example_ids)
        unknown = [entry for entry, row in zip(self.entries, rows, strict=True) if row is None]
        unknown = [entry for entry in unknown if not _is_header(entry)]
        if unknown:
            first = ", ".join(repr(entry.name) for entry in unknown[:3])
            raise BadSetting(
                f"{FIELD}: {unknown[0].place}: unknown ids: {len(unknown)}, first {first}; allowed: those of the "
                f"data set, as {example_ids[0]!r}"
            )
        splits, named = {split: [] for split in SPLITS}, {}
        for entry, row in zip(self.entries, rows, strict=True):
            if row is None:
                continue
            if before := named.get(row):
                raise BadSetting(
                    f"{FIELD}: {entry.place}: {entry.name!r} is in {entry.split}, and in {before.split} by "
                    f"{before.place}; allowed: each image once"
                )
            named[row] = entry
            splits[entry.split].append(row)
        for split, members in splits.items():
            if not members:
                raise BadSetting(
                    f"{FIELD}: {self.path}: no {split} images; allowed: some in each of train, val, test"
                )
        if len(named) < len(example_ids):
            log.warning(
                "%s: left out %d of %d images, which it does not name",
                self.path,
                len(example_ids) - len(named),
                len(example_ids),
            )
        return splits


def read_split_file(path: str) -> SplitFile:
    """Read a split file, or three files if `path` contains "{split}".

    One file has a header with the columns `split` and one of ID_COLUMNS. Three files have the ids in a column of
    ID_COLUMNS, or in the first one. Other columns are ignored.

    Raises:
      BadSetting: names the file, the line and what is allowed.
    """
    entries, digest = [], hashlib.sha256()
    files = {path: None}
    if PLACEHOLDER in path:
        files = {path.replace(PLACEHOLDER, split): split for split in SPLITS}
    for file, split in files.items():
        text = untrusted.read_text(file, FIELD)
        digest.update(hashlib.sha256(text.encode()).digest())
        rows = _rows(text, file)
        entries += _entries_of_all(rows, file) if split is None else _entries_of_one(rows, file, split)
    return SplitFile(path, entries, digest.hexdigest())


def _rows(text: str, file: str) -> list[tuple[int, list[str]]]:
    """Return the rows that are not blank, each with the number of its line."""
    reader = csv.reader(io.StringIO(text), skipinitialspace=True, strict=True)
    try:
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise BadSetting(f"{FIELD}: {file}, line {reader.line_num}: no CSV ({error})") from error
    if not rows:
        raise BadSetting(f"{FIELD}: {file} is empty; allowed: a file that lists images")
    return rows


def _id_column(header: list[str]) -> int | None:
    names = [name.lower() for name in header]
    return next((names.index(name) for name in ID_COLUMNS if name in names), None)


def _entries_of_all(rows: list[tuple[int, list[str]]], file: str) -> list[Entry]:
    line, header = rows[0]
    names = [name.lower() for name in header]
    id_column = _id_column(header)
    if id_column is None or SPLIT_COLUMN not in names:
        raise BadSetting(
            f"{FIELD}: {file}, line {line}: the columns {', '.join(header)}; allowed: split, and one of "
            f"{', '.join(ID_COLUMNS)}"
        )
    split_column = names.index(SPLIT_COLUMN)
    entries = []
    for line, row in rows[1:]:
        place = f"{FIELD}: {file}, line {line}"
        if len(row) != len(header):
            raise BadSetting(f"{place}: {len(row)} values; allowed: {len(header)}, as in the header")
        split = split_named(row[split_column])
        if split is None:
            raise BadSetting(f"{place}: split {row[split_column]!r}; allowed: {ALLOWED_NAMES}")
        entries.append(_entry(row, id_column, split, file, line))
    return entries


def _entries_of_one(rows: list[tuple[int, list[str]]], file: str, split: str) -> list[Entry]:
    first_line, first = rows[0]
    names_an_image = any(_without_suffix(cell) != cell for cell in first)
    id_column = None if names_an_image else _id_column(first)
    if id_column is not None:
        return [_entry(row, id_column, split, file, line) for line, row in rows[1:]]
    return [_entry(row, 0, split, file, line, may_be_header=line == first_line) for line, row in rows]


def _entry(row: list[str], column: int, split: str, file: str, line: int, *, may_be_header: bool = False) -> Entry:
    if len(row) <= column or not row[column]:
        raise BadSetting(f"{FIELD}: {file}, line {line}: no id; allowed: one in every row")
    return Entry(row[column], split, file, line, may_be_header)


def _is_header(entry: Entry) -> bool:
    """Return True if an entry that names no image is a line of column names, and not an image elsewhere."""
    return entry.may_be_header and _without_suffix(entry.name) == entry.name


def _find(entries: list[Entry], example_ids: list[str]) -> list[int | None]:
    """Return the index of the example that each entry names; None where there is none.

    Raises:
      BadSetting: an entry names several.
    """
    rows: list[int | None] = [None] * len(entries)
    left = range(len(entries))
    for form_of_name, form_of_id in FORMS:
        table, repeated = {}, set()
        if not left:
            break
        for row, example_id in enumerate(example_ids):
            key = form_of_id(example_id)
            if key in table:
                repeated.add(key)
            table[key] = row
        for number in left:
            key = form_of_name(entries[number].name)
            if key in repeated:
                raise _ambiguous(entries[number], [name for name in example_ids if form_of_id(name) == key])
            rows[number] = table.get(key)
        left = [number for number in left if rows[number] is None]
    return rows


def _ambiguous(entry: Entry, found: list[str]) -> BadSetting:
    return BadSetting(
        f"{FIELD}: {entry.place}: {entry.name!r} names {len(found)} images, as {found[0]!r} and {found[1]!r}; "
        "allowed: whole ids"
    )


def _whole(name: str) -> str:
    return name


def _file_name(name: str) -> str:
    return name.rpartition("/")[2]


def _without_suffix(name: str) -> str:
    suffix = PurePosixPath(name).suffix
    return name.removesuffix(suffix) if suffix.lower() in IMAGE_SUFFIXES else name


def _file_name_without_suffix(name: str) -> str:
    return _without_suffix(_file_name(name))


# Forms in which a name in a file is compared with an id, each tried if those before find nothing.
FORMS: tuple[tuple[Callable[[str], str], Callable[[str], str]], ...] = (
    (_whole, _whole),
    (_whole, _file_name),
    (_without_suffix, _without_suffix),
    (_without_suffix, _file_name_without_suffix),
)


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
      example_ids, labels: ids and labels of all examples of a source; labels int [N].
      published: the split of each example as its source has it, each of SPLITS; None where it has none.
      choice: "auto" takes `split_file`, else `published`, else our own split; "published" takes no split of ours;
        "own" takes only that.
      seed: seed of our own split and of splits that are cut.
    Returns:
      For each of SPLITS the indices into `example_ids`, int64. Only a split file leaves examples out.
    Raises:
      UserError: an id twice; a class or the set has too few training examples; there is no published split, or the
        file does not fit the ids.
    """
    _refuse_repeated_ids(example_ids, published)
    if split_file is not None:
        splits = {split: _sorted_by_id(example_ids, rows) for split, rows in split_file.match(example_ids).items()}
    elif published is not None and choice != "own":
        splits = _complete(example_ids, published, seed)
    elif choice == "published":
        raise BadSetting(
            "dataset.splits: 'published', but this data set has no splits of its own; allowed: auto | own, or give "
            "them by dataset.split_file"
        )
    else:
        splits = split_indices(example_ids, seed)
    _check_classes(splits, np.asarray(labels), class_names)
    return splits


def split_indices(example_ids: list[str], seed: int) -> dict[str, np.ndarray]:
    """Split 80/10/10 by a seeded permutation of the examples sorted by id, the same for every source.

    Returns:
      For each of SPLITS the indices into `example_ids`.
    Raises:
      UserError: fewer than 10 examples, which would leave a part empty.
    """
    count = len(example_ids)
    if count < 10:
        raise UserError(f"dataset: {count} images; allowed: at least 10, for an 80/10/10 split")
    order = _shuffled(example_ids, np.arange(count), seed)
    tenth = count // 10
    train, val, test = np.split(order, [count - 2 * tenth, count - tenth])
    return {"train": train, "val": val, "test": test}


def _complete(example_ids: list[str], published: list[str], seed: int) -> dict[str, np.ndarray]:
    """Return the published splits, with missing ones cut from the training examples.

    A missing split gets a tenth of them, but no more than the other published split has: of ImageNet's 1,281,167
    training images not 128,116 are taken, but 50,000, the size of its validation split.
    """
    names = np.array(published)
    splits = {split: np.flatnonzero(names == split) for split in SPLITS}
    missing = [split for split in SPLITS if len(splits[split]) == 0]
    if "train" in missing:
        raise UserError("dataset: the published splits have no training images; allowed: dataset.splits 'own'")
    if missing:
        order = _shuffled(example_ids, splits["train"], seed)
        tenth = len(order) // 10
        if tenth == 0:
            raise UserError(
                f"dataset: {len(order)} training images; allowed: at least 10, to cut {' and '.join(missing)} from"
            )
        held_out = max(len(splits["val"]), len(splits["test"]))
        size = min(tenth, held_out) if held_out else tenth
        for split in reversed(missing):  # if both are missing, cut as by `split_indices`
            order, splits[split] = order[:-size], order[-size:]
            log.info("%s: %d of the published training images", split, size)
        splits["train"] = order
    return {split: _sorted_by_id(example_ids, rows) for split, rows in splits.items()}


def _shuffled(example_ids: list[str], rows: np.ndarray, seed: int) -> np.ndarray:
    """Return a seeded permutation of `rows` that does not depend on their order."""
    return _sorted_by_id(example_ids, rows)[np.random.default_rng(seed).permutation(len(rows))]


def _sorted_by_id(example_ids: list[str], rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows, np.int64)
    return rows[np.argsort(np.array([example_ids[row] for row in rows]))]


def _refuse_repeated_ids(example_ids: list[str], published: list[str] | None) -> None:
    if len(set(example_ids)) == len(example_ids):
        return
    first = {}
    for row, example_id in enumerate(example_ids):
        if example_id in first:
            places = "" if published is None else f", in {published[first[example_id]]} and in {published[row]}"
            raise UserError(f"dataset: two images have the id {example_id!r}{places}; allowed: each id once")
        first[example_id] = row


def _check_classes(splits: dict[str, np.ndarray], labels: np.ndarray, class_names: list[str]) -> None:
    """Refuse a class without training images, and warn of one without validation or test images."""
    lacking = {}
    for split, rows in splits.items():
        found = np.bincount(labels[rows], minlength=len(class_names)) > 0
        lacking[split] = ", ".join(np.array(class_names)[~found])
    if lacking["train"]:
        raise UserError(
            f"dataset: no training image is left for class {lacking['train']}; add images or change the split"
        )
    words = {"val": "validation", "test": "test"}
    notes = [f"no {word} image of class {lacking[split]}" for split, word in words.items() if lacking[split]]
    if notes:
        log.warning("dataset: %s", "; ".join(notes))
