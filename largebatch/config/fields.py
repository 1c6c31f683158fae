"""A config as plain nested dicts: its fields by name, what identifies a run, and how two differ."""

# Fields that may name a file or folder to be read.
PATHS = ("dataset.path", "dataset.split_file", "augment.cache_dir", "batch.trace", "train.init_from")
DATA_PATHS = ("path", "split_file")  # of `dataset`

# Fields that a config stored by an earlier version lacks, each with the value that means what that version did. A
# new field needs a line here, or runs and studies from before it are those of another config.
MISSING_FIELDS: dict[str, object] = {
    "batch.ghost_size": None,
    "batch.virtual_shards": None,
    "dataset.channels": None,
    "dataset.resize": "stretch",
    "dataset.splits": "auto",
    "dataset.split_file": None,
    "augment.views": "all",
    "augment.crop_scale": 1.0,
    "augment.brightness": 0.0,
    "augment.contrast": 0.0,
    "augment.cutout": 0,
    "devices.join_sec": 300.0,
    "eval.shift_average": 0,
    "log.noise_every": 1,
    "log.wandb": False,
    "log.wandb_project": "largebatch",
    "model.side_heads": False,
    "optimizer.soap_every": 10,
    "schedule.b2_scaling": "none",
    "schedule.decay_over": "updates",
    "task.name": "classification",
    "task.mask_loss": "cross_entropy",
    "task.depth_loss": "l1",
    "task.depth_weight": 1.0,
    "train.init_step": None,
    "train.target_score": None,
}


def flatten(config: dict, prefix: str = "") -> dict[str, object]:
    """Nested groups -> {"group.field": value}."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def target_of(train) -> float | None:
    """The score at which a run ends: train.target_score, or what it is called with classification; None: never."""
    return train.target_accuracy if train.target_score is None else train.target_score


def identity(config: dict) -> dict:
    """The fields that shape a run's numbers.

    Not where its hosts meet, what it keeps, where its caches and images are or which images are too large for them.
    """
    kept = {name: value for name, value in config.items() if name not in ("devices", "log", "checkpoint")}
    without = {"augment": ("cache_dir", "storage"), "dataset": ("max_image_pixels",)}
    for group, fields in without.items():
        kept[group] = {name: value for name, value in config.get(group, {}).items() if name not in fields}
    if _has_idle_tfds_split(kept["dataset"]):
        kept["dataset"]["tfds_split"] = None
    return kept


def identity_of_run(config: dict) -> dict:
    """Return the identity of a run: without the places of its data, whose digests are in every checkpoint."""
    kept = identity(config)
    kept["dataset"] = {name: value for name, value in kept["dataset"].items() if name not in DATA_PATHS}
    return kept


def _has_idle_tfds_split(dataset: dict) -> bool:
    """Whether dataset.tfds_split is "train", as it once was by default, where that means the same as None."""
    if dataset.get("tfds_split") != "train":
        return False
    source = dataset.get("source")
    if source in ("zip", "folder", "synthetic") or dataset.get("name") in ("eurosat", "synthetic"):
        return True
    # Before there was dataset.splits. Should the path be that of a TFDS set, the digest of the examples tells.
    return source == "auto" and dataset.get("path") is not None and "splits" not in dataset


def differences(one: dict, other: dict, names: tuple[str, str]) -> str:
    """Fields in which two nested configs differ, in one line; empty where they agree.

    A field that one of them lacks has its value of MISSING_FIELDS there, if it has one.

    Args:
      one, other: configs, or what holds a config as "config".
      names: what to call the two: ("here", "there").
    """
    one, other = flatten(one), flatten(other)
    changes = []
    for field in sorted(one.keys() | other.keys()):
        if_missing = MISSING_FIELDS.get(field.removeprefix("config."), "missing")
        first, second = one.get(field, if_missing), other.get(field, if_missing)
        if first != second:
            changes.append(f"{field}: {first!r} {names[0]}, {second!r} {names[1]}")
    return "; ".join(changes)
