"""The split into training, validation and test examples, which is the same from every source."""

import logging

import numpy as np

from largebatch.errors import BadSetting, UserError
from largebatch.sources.split_file import SplitFile
from largebatch.sources.split_names import SPLITS

log = logging.getLogger("largebatch")


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
    """Which examples are for training, validation and test.

    Published splits, and those of a file, are sorted by id. What a published set lacks is cut from its training
    examples, a tenth of them for each part. `split_indices` is the split of ours.

    Args:
      example_ids, labels: of all examples of a source; labels int [N].
      published: the split of each example as its source has it, each of SPLITS; None where it has none.
      choice: "auto" takes `split_file`, else `published`, else our own split; "published" takes no split of ours;
        "own" takes only that.
      seed: of our own split and of what is cut.
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
    """80/10/10 split: a seeded permutation of the examples sorted by id, so every source gives the same.

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
    """The published splits, and what is missing cut from the training examples.

    That is a tenth of them, but no more than the other part that is published: of ImageNet's 1,281,167, not 128,116
    are taken from training but as many as its 50,000 for validation.
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
        for split in reversed(missing):  # both missing: as `split_indices` cuts them
            order, splits[split] = order[:-size], order[-size:]
            log.info("%s: %d of the published training images", split, size)
        splits["train"] = order
    return {split: _sorted_by_id(example_ids, rows) for split, rows in splits.items()}


def _shuffled(example_ids: list[str], rows: np.ndarray, seed: int) -> np.ndarray:
    """A seeded permutation of `rows` that does not depend on their order."""
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
    """Refuses a class that cannot be learned, and warns of one that is not measured."""
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
