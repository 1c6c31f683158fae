"""The split into training, validation and test examples, which every source shares."""

import numpy as np

from largebatch.data.source import Source
from largebatch.errors import UserError

SPLITS = ("train", "val", "test")


# ---- split ------------------------------------------------------------------------------------------


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
    by_id = np.argsort(np.array(example_ids))
    order = by_id[np.random.default_rng(seed).permutation(count)]
    tenth = count // 10
    train, val, test = np.split(order, [count - 2 * tenth, count - tenth])
    return {"train": train, "val": val, "test": test}


def refuse_untrained_classes(source: Source, splits: dict[str, np.ndarray]) -> None:
    """Raises UserError if a class has no training image."""
    missing = set(range(len(source.class_names))) - set(source.labels[splits["train"]].tolist())
    if missing:
        names = ", ".join(source.class_names[label] for label in sorted(missing))
        raise UserError(f"dataset: no training image is left for class {names}; add images or change split_seed")
