"""A config as plain nested dicts: its fields by name, what identifies a run, and how two differ."""

# Fields that may name a file or folder to be read.
PATHS = ("dataset.path", "augment.cache_dir", "batch.trace", "train.init_from")


def flatten(config: dict, prefix: str = "") -> dict[str, object]:
    """Nested groups -> {"group.field": value}."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def identity(config: dict) -> dict:
    """The fields that shape a run's numbers.

    Not where its hosts meet, what it keeps, where its caches are or which images are too large for them.
    """
    kept = {name: value for name, value in config.items() if name not in ("devices", "log", "checkpoint")}
    for group, field in (("augment", "cache_dir"), ("dataset", "max_image_pixels")):
        kept[group] = {name: value for name, value in config.get(group, {}).items() if name != field}
    return kept


def differences(one: dict, other: dict, names: tuple[str, str]) -> str:
    """Fields in which two nested configs differ, in one line; empty where they agree.

    Args:
      names: what to call the two: ("here", "there").
    """
    one, other = flatten(one), flatten(other)
    missing = "missing"
    return "; ".join(
        f"{field}: {one.get(field, missing)!r} {names[0]}, {other.get(field, missing)!r} {names[1]}"
        for field in sorted(one.keys() | other.keys())
        if one.get(field, missing) != other.get(field, missing)
    )
