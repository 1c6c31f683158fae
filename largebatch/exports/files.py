"""Files of an exported network: written whole or not at all, and compared with their digests when read.

model/model.safetensors   the arrays
model/model.stablehlo     the network as a program for CPUs, NVIDIA GPUs and TPUs
model/pytorch_model.py    the network in PyTorch
model/model.json          what is known of it: classes, normalisation, config, scores
model/README.md           the model card
model/SHA256SUMS          digests of these; `sha256sum -c SHA256SUMS` checks them by hand
"""

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import safetensors.numpy

from largebatch import util
from largebatch.runs.checkpoints import LoadedCheckpoint, named_leaves
from largebatch.util import UserError

ARRAYS, PROGRAM, PYTORCH = "model.safetensors", "model.stablehlo", "pytorch_model.py"
DESCRIPTION, CARD, SUMS = "model.json", "README.md", "SHA256SUMS"
NAMES = (CARD, DESCRIPTION, ARRAYS, PROGRAM, PYTORCH)
FORMAT = 3


def is_export(folder: Path) -> bool:
    """Return True if a folder is an exported network, whole or not."""
    return (folder / DESCRIPTION).exists() or (folder / ARRAYS).exists()


def network_of(module) -> dict:
    """Return the fields of a flax module as plain JSON, for those who build the network elsewhere."""
    plain = {"class": type(module).__name__}
    for field in dataclasses.fields(module):
        if field.name not in ("parent", "name", "conv"):
            value = getattr(module, field.name)
            plain[field.name] = value.__name__ if isinstance(value, type) else value
    return plain | {"dtype": np.dtype(module.dtype).name}


def arrays_as_bytes(variables: dict) -> bytes:
    """Return model.safetensors of the variables of a network, {"params": ..., "batch_stats": ..., ...}."""
    arrays = {name: np.ascontiguousarray(leaf) for name, leaf in named_leaves(variables).items()}
    return safetensors.numpy.save(arrays, metadata={"format": "pt"})


def _sums_of(contents: dict[str, bytes]) -> list[str]:
    """Return the lines of SHA256SUMS."""
    return [f"{hashlib.sha256(contents[name]).hexdigest()}  {name}" for name in NAMES]


def check_out(out: Path) -> None:
    """Refuse a folder to write that is in use.

    Raises:
      UserError: names what is there.
    """
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        kind = "is not empty" if out.is_dir() else "is no folder"
        raise UserError(f"--out: {out} exists and {kind}; allowed: a new or an empty folder")


def write(out: Path, contents: dict[str, bytes]) -> str:
    """Write the files of NAMES and their digests as the folder `out`, which appears whole or not at all.

    Returns:
      The SHA-256 of SHA256SUMS, which stands for all of them.
    Raises:
      UserError: it cannot be written.
    """
    check_out(out)
    sums = "".join(f"{line}\n" for line in _sums_of(contents)).encode()
    temporary = util.beside(out)
    try:
        util.remove_stale(out)
        temporary.mkdir(parents=True)
        for name, content in (contents | {SUMS: sums}).items():
            util.write_through(temporary / name, content)
        temporary.rename(out)
    except OSError as error:
        raise UserError(f"--out: cannot write {out} ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            util.remove(temporary)
    return hashlib.sha256(sums).hexdigest()


def read(folder: Path) -> LoadedCheckpoint:
    """Read an exported folder as the checkpoint that it was made of.

    Raises:
      UserError: a file is missing or damaged, or of another version of this code.
    """
    contents = {}
    for name in (*NAMES, SUMS):
        try:
            contents[name] = (folder / name).read_bytes()
        except OSError as error:
            raise UserError(f"{folder / name} cannot be read ({error.strerror})") from error
    recorded = contents[SUMS].decode(errors="replace").splitlines()
    for name, line in zip(NAMES, _sums_of(contents), strict=True):
        if line not in recorded:
            raise UserError(f"{folder / name} does not match its SHA-256 in {SUMS}")
    about = json.loads(contents[DESCRIPTION])
    if about.get("format") != FORMAT:
        raise UserError(f"{folder / DESCRIPTION}: format {about.get('format')}; allowed: {FORMAT}")
    arrays = {}
    for name, array in safetensors.numpy.load(contents[ARRAYS]).items():
        arrays[f"state.{name}" if name.startswith("params.") else f"state.model_state.{name}"] = array
    return LoadedCheckpoint(arrays, about)
