"""The files of an exported network, written whole and read only if every byte is as its digest says.

model/model.safetensors  the arrays of the network, by flat names
model/model.stablehlo    the network as a program for CPUs, NVIDIA GPUs and TPUs
model/model.json         what is known of both: classes, normalisation, config, scores
model/README.md          the model card
model/SHA256SUMS         of these four; `sha256sum -c SHA256SUMS` checks it by hand
"""

import contextlib
import hashlib
import os
from pathlib import Path

from largebatch import util
from largebatch.util import UserError

ARRAYS, PROGRAM, DESCRIPTION, CARD, SUMS = (
    "model.safetensors",
    "model.stablehlo",
    "model.json",
    "README.md",
    "SHA256SUMS",
)
# Nothing larger is read, so that no file of someone else's takes all memory; a network of ours has up to 120 MB.
MOST_BYTES = {ARRAYS: 2**32, PROGRAM: 2**26, DESCRIPTION: 2**24, CARD: 2**24, SUMS: 2**12}
NAMES = tuple(sorted(MOST_BYTES.keys() - {SUMS}))


def is_export(folder: Path) -> bool:
    """Whether a folder is an exported network, be it whole or not."""
    return any((folder / name).exists() for name in (DESCRIPTION, ARRAYS))


def sums_of(contents: dict[str, bytes]) -> bytes:
    """The content of SHA256SUMS."""
    return "".join(f"{hashlib.sha256(contents[name]).hexdigest()}  {name}\n" for name in NAMES).encode()


def check_out(out: Path) -> None:
    """Raises UserError where a folder cannot be written to `out`, for what is there already."""
    try:
        if out.resolve() == Path.cwd():
            raise UserError(f"--out: {out}; allowed: a new or an empty folder, not the current one")
        if out.is_dir() and not any(out.iterdir()):
            return
        if os.path.lexists(out):
            kind = "is not empty" if out.is_dir() else "is no folder"
            raise UserError(f"--out: {out} exists and {kind}; allowed: a new or an empty folder")
    except OSError as error:
        raise UserError(f"--out: cannot write {out} ({error.strerror})") from error


def write(out: Path, contents: dict[str, bytes]) -> str:
    """Writes the files of NAMES and their digests as the folder `out`, which appears whole or not at all.

    Returns:
      The SHA-256 of SHA256SUMS, which stands for all of them.
    Raises:
      UserError: it cannot be written, or one of them is larger than `read` takes.
    """
    check_out(out)
    contents = contents | {SUMS: sums_of(contents)}
    for name, content in contents.items():
        if len(content) > MOST_BYTES[name]:
            raise UserError(f"--out: {name} has {len(content):,} bytes; allowed: up to {MOST_BYTES[name]:,}")
    temporary = util.beside(out)
    try:
        util.remove_stale(out)
        temporary.mkdir(parents=True)
        for name, content in contents.items():
            util.write_through(temporary / name, content)
        temporary.rename(out)
    except OSError as error:
        raise UserError(f"--out: cannot write {out} ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            util.remove(temporary)
    return hashlib.sha256(contents[SUMS]).hexdigest()


def read(folder: Path) -> dict[str, bytes]:
    """The files of NAMES, each as its digest says, and no others in the folder.

    Raises:
      UserError: names the file.
    """
    try:
        present = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror})") from error
    expected = [*NAMES, SUMS]
    for name in expected:
        if name not in present:
            raise UserError(f"{folder / name} is missing; allowed: {', '.join(expected)}")
    for name in present:
        if name not in expected:
            raise UserError(f"{folder / name} is under no digest; allowed: {', '.join(expected)}")
    contents = {name: _read_file(folder / name) for name in expected}
    sums = contents.pop(SUMS)
    for name, line in zip(NAMES, sums_of(contents).splitlines(), strict=True):
        if line not in sums.splitlines():
            raise UserError(f"{folder / name} does not match its SHA-256 in {SUMS}")
    if sums != sums_of(contents):
        raise UserError(f"{folder / SUMS} is not the list of the digests of {', '.join(NAMES)}")
    return contents


def _read_file(path: Path) -> bytes:
    """Read a whole file; raise UserError if it cannot be read or has more than MOST_BYTES."""
    most = MOST_BYTES[path.name]
    try:
        size = path.stat().st_size
        if size > most:
            raise UserError(f"{path} cannot be read ({size:,} bytes; allowed: up to {most:,})")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
