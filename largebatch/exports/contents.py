"""What model.safetensors and model.json hold: made of a checkpoint, and read back as one."""

import dataclasses
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from largebatch.exports import folder
from largebatch.runs.checkpoints import LoadedCheckpoint, named_leaves
from largebatch.tasks.planes import PixelTargets
from largebatch.util import UserError

FORMAT = 1
MOST_HEADER_BYTES = 2**22  # of model.safetensors; the largest of our networks has 60 KB
MOST_NAME = 200
IMAGE_DTYPES = ("uint8", "uint16")
MOST_SIDE, MOST_CHANNELS = 2**14, 2**11


# ---- written -----------------------------------------------------------------------------------------


def network_of(module) -> dict:
    """The fields of a flax module as plain JSON, for those who build the network elsewhere."""
    fields = [field.name for field in dataclasses.fields(module) if field.name not in ("parent", "name", "conv")]
    plain = {"class": type(module).__name__}
    for name in fields:
        value = getattr(module, name)
        plain[name] = value.__name__ if isinstance(value, type) else value
    return plain | {"dtype": np.dtype(module.dtype).name}


def arrays_as_bytes(variables: dict) -> bytes:
    """model.safetensors of the variables of a network: {"params": ..., "batch_stats": ..., ...}."""
    arrays = {name: np.ascontiguousarray(leaf) for name, leaf in named_leaves(variables).items()}
    return safetensors.numpy.save(arrays, metadata={"format": "pt"})


def description_as_bytes(about: dict) -> bytes:
    """model.json."""
    return (json.dumps({"format": FORMAT, **about}, indent=1, allow_nan=False) + "\n").encode()


# ---- read --------------------------------------------------------------------------------------------


def read(path: Path) -> LoadedCheckpoint:
    """An exported folder, which anybody may have made, as the checkpoint that it was made of.

    Raises:
      UserError: a file is damaged, or holds what no export does.
    """
    contents = folder.read(path)
    about = _read_description(contents[folder.DESCRIPTION], path / folder.DESCRIPTION)
    arrays = _read_arrays(contents[folder.ARRAYS], path / folder.ARRAYS)
    return LoadedCheckpoint({_name_in_checkpoint(name): array for name, array in arrays.items()}, about)


def _name_in_checkpoint(name: str) -> str:
    return f"state.{name}" if name.startswith("params.") else f"state.model_state.{name}"


def _read_arrays(content: bytes, path: Path) -> dict[str, np.ndarray]:
    """The arrays, float32 all of them."""
    header_bytes = struct.unpack("<Q", content[:8])[0] if len(content) >= 8 else 0
    if not 0 < header_bytes <= MOST_HEADER_BYTES:
        raise UserError(f"{path}: a header of {header_bytes:,} bytes; allowed: 1 to {MOST_HEADER_BYTES:,}")
    try:
        stored = safetensors.deserialize(content)
    except (safetensors.SafetensorError, ValueError, OverflowError) as error:
        raise UserError(f"{path} is no safetensors file ({' '.join(str(error).split())[:200]})") from error
    arrays = {}
    for name, found in stored:
        if len(name) > MOST_NAME:
            raise UserError(f"{path}: array {name[:20]}... has a name of {len(name):,}; allowed: up to {MOST_NAME}")
        if found["dtype"] != "F32":
            raise UserError(f"{path}: array {name} is of {found['dtype']}; allowed: F32")
        arrays[name] = np.frombuffer(found["data"], "<f4").reshape(found["shape"])
    return arrays


def _read_description(content: bytes, path: Path) -> dict:
    """model.json with what evaluation takes of it: step, config and data."""

    def no_number(text: str):
        raise ValueError(f"{text} is no number of JSON")

    try:
        about = json.loads(content, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UserError(f"{path} is no JSON ({reason})") from error
    about = about if isinstance(about, dict) else {}
    for name, (allows, allowed) in _FIELDS.items():
        value = about
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not allows(value):
            raise UserError(f"{path}: {name}: {_short(value)}; allowed: {allowed}")
    data = about["data"]
    try:
        planes = PixelTargets.recorded_in(data).planes
    except ValueError as error:
        raise UserError(f"{path}: data.{_short(error)}") from error
    if not planes and not data["class_names"]:
        raise UserError(f"{path}: data.class_names: []; allowed: one name or more")
    channels = data["image_shape"][-1]
    if channels <= planes or not len(data["mean"]) == len(data["std"]) == channels:
        found = f"{channels} channels with {len(data['mean'])} means and {len(data['std'])} deviations"
        raise UserError(f"{path}: data: {found}; allowed: as many of each, and more than the {planes} of targets")
    return about


def _short(value: object) -> str:
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_shape(value: object) -> bool:
    most = (MOST_SIDE, MOST_SIDE, MOST_CHANNELS)
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(_is_count(length) and 1 <= length <= limit for length, limit in zip(value, most, strict=True))
    )


def _are_numbers(above: float) -> Callable[[object], bool]:
    def allows(value: object) -> bool:
        return isinstance(value, list) and all(
            isinstance(number, int | float) and not isinstance(number, bool) and above < number < 1e9
            for number in value
        )

    return allows


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_TEXT = (lambda value: isinstance(value, str), "a text")
_FIELDS = {
    "format": (lambda value: _is_count(value) and value == FORMAT, str(FORMAT)),
    "step": (_is_count, "an integer >= 0"),
    "ema": (lambda value: isinstance(value, bool), "true | false"),
    "config": (lambda value: isinstance(value, dict), "the fields of a config"),
    "data": (lambda value: isinstance(value, dict), "what the network was trained on"),
    "data.class_names": (_are_names, "a list of texts"),
    "data.image_shape": (_is_shape, f"height and width up to {MOST_SIDE}, channels up to {MOST_CHANNELS}"),
    "data.image_dtype": (lambda value: value in IMAGE_DTYPES, " | ".join(IMAGE_DTYPES)),
    "data.mean": (_are_numbers(-1e9), "a list of numbers"),
    "data.std": (_are_numbers(0), "a list of numbers above 0"),
    "data.ids": _TEXT,
    "data.labels": _TEXT,
    "data.pixels": (lambda value: value is None or isinstance(value, str), "a text"),  # older code had none
}
