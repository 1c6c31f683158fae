"""The parts that every data set has here, and what publishers call them."""

SPLITS = ("train", "val", "test")

_NAMES = {"train": "train", "val": "val", "validation": "val", "valid": "val", "dev": "val", "test": "test"}
ALLOWED_NAMES = " | ".join(_NAMES)


def split_named(name: str) -> str | None:
    """Which of SPLITS a publisher means by `name`, in any case; None if it is no name of a split."""
    return _NAMES.get(name.lower())
