"""Checkpoints: arrays written by Orbax in the background, every byte under a SHA-256.

    checkpoints/00000300/arrays/          Orbax: one folder per array, named as the array
    checkpoints/00000300/checkpoint.json  step, config, progress, a SHA-256 per array taken from memory
    checkpoints/00000300/SHA256SUMS       of every file above; `sha256sum -c SHA256SUMS` checks it by hand

Orbax restores flipped bits without an error, hence the digests. A folder is written under a temporary name and
renamed, so under its own name it is whole. Only one host writes and reads; the state is the same on every
device.
"""

import concurrent.futures
import functools
import hashlib
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from largebatch.util import UserError

log = logging.getLogger("largebatch")

SUMS, DESCRIPTION, ARRAYS = "SHA256SUMS", "checkpoint.json", "arrays"
REPLICAS = "replicas"  # the part of a checkpoint whose leading axes count devices

# Arrays, or names with all arrays below them, that were renamed since an earlier version of this file format:
# {"state.old": "state.new", "replicas.old": "replicas.new"}.
RENAMED = {
    "state.averaged": "state.num_averaged",
    "replicas.averaged": "replicas.num_averaged",
    "state.progress": "state.scale_invariant_steps",
    "replicas.progress": "replicas.scale_invariant_steps",
}

# Errors that mean damage; any other OSError is of a failing disk or network, and the file may well be sound.
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class DamagedCheckpoint(Exception):
    """Raised when a checkpoint does not hold what was saved; the message names file and array."""


def named_leaves(tree) -> dict[str, Any]:
    """Return {"params.Dense_0.bias": leaf, ...} for every leaf of a pytree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def current_name(stored: str) -> str:
    """Return the name in this version of an array that is stored under the name `stored`; see RENAMED."""
    for old, new in RENAMED.items():
        if stored == old or stored.startswith(f"{old}."):
            return new + stored.removeprefix(old)
    return stored


def _sha256(content) -> str:
    return hashlib.sha256(content).hexdigest()


def _array_digest(array: np.ndarray) -> dict:
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "sha256": _sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)),
    }


@functools.cache
def _hush_orbax() -> None:
    """Silence Orbax's threads, which print errors (on a full disk, each of them) that `save` raises as well."""
    for name in ("absl", "asyncio", "concurrent.futures"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    in_thread, unraisable = threading.excepthook, sys.unraisablehook

    def of_thread(arguments):
        if not type(arguments.thread).__module__.startswith("orbax"):
            in_thread(arguments)

    def of_callback(arguments):
        if "Event loop is closed" not in str(arguments.exc_value):
            unraisable(arguments)

    threading.excepthook, sys.unraisablehook = of_thread, of_callback


def _orbax():
    """Return Orbax and a checkpointer confined to this process; imported late since it takes a while."""
    import orbax.checkpoint as ocp

    _hush_orbax()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}, barrier_sync_key_prefix="alone"
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone)  # a folder per array
    return ocp, ocp.Checkpointer(handler, multiprocessing_options=alone)


def _sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Checkpoints:
    """Checkpoints of one run, saved in the background; the last few and the protected ones are kept.

    Args:
      after_save: function that is called when a checkpoint is on disk, in the background; it may raise a UserError.
    """

    def __init__(self, folder: Path, keep: int, after_save: Callable[[], None] = lambda: None):
        self.folder, self._keep, self._after_save = folder.absolute(), keep, after_save
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoints")
        self._pending: concurrent.futures.Future | None = None

    def steps(self) -> list[int]:
        """Return the steps with a whole checkpoint, oldest first."""
        return sorted(int(path.name) for path in self.folder.glob("[0-9]*") if path.name.isdigit())

    def path(self, step: int) -> Path:
        """Return the folder of one checkpoint."""
        return self.folder / f"{step:08d}"

    def save(self, step: int, tree, description: dict, protect: Iterable[int] = ()) -> None:
        """Save a pytree of this host's arrays (copied before this returns) under `step`, in the background.

        Args:
          description: plain JSON that is kept beside the arrays.
          protect: steps that are kept whatever their age.
        Raises:
          UserError: the save before this one failed.
        """
        self.wait()
        arrays = {name: np.array(leaf) for name, leaf in named_leaves(tree).items()}
        text = json.dumps(description, allow_nan=False)
        self._pending = self._writer.submit(self._write, step, arrays, text, {step, *protect})

    def poll(self) -> None:
        """Raise the error of a finished save, without waiting for a running one."""
        if self._pending and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint is on disk.

        Raises:
          UserError: the checkpoint could not be written; older ones are untouched.
        """
        if self._pending:
            pending, self._pending = self._pending, None
            pending.result()

    def _write(self, step: int, arrays: dict[str, np.ndarray], text: str, protect: set[int]) -> None:
        target, temporary = self.path(step), self.folder / f".{step:08d}.tmp"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            ocp, checkpointer = _orbax()
            checkpointer.save(temporary / ARRAYS, args=ocp.args.PyTreeSave(arrays))
            digests = {name: _array_digest(array) for name, array in arrays.items()}
            whole_description = {"step": step, "arrays": digests, **json.loads(text)}
            (temporary / DESCRIPTION).write_text(json.dumps(whole_description, indent=1))
            (temporary / SUMS).write_text(_sums_of(temporary))
            for path in (temporary / DESCRIPTION, temporary / SUMS, temporary):
                _sync(path)
            old = self.folder / f".{step:08d}.old.tmp"
            if target.exists():  # a checkpoint of the same step, from before a rollback
                target.rename(old)
            temporary.rename(target)
            shutil.rmtree(old, ignore_errors=True)
            _sync(self.folder)
            self._prune(protect)
            self._after_save()
        except UserError:
            raise
        except Exception as error:  # TensorStore reports a full disk as ValueError
            shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(f"--workdir: cannot write {target} ({_reason(error)})") from error

    def _prune(self, protect: set[int]) -> None:
        steps = self.steps()
        for step in set(steps[: -self._keep]) - protect:
            self._remove(step)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint, renamed first, since a folder under its own name is whole."""
        trash = self.folder / f".{step:08d}.gone.tmp"
        shutil.rmtree(trash, ignore_errors=True)
        self.path(step).rename(trash)
        shutil.rmtree(trash)

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of later steps than `step`."""
        self.wait()
        for later in self.steps():
            if later > step:
                self._remove(later)

    def restore_newest(
        self, like, check: Callable[[dict], None] = lambda description: None
    ) -> tuple[Any, dict] | None:
        """Restore the newest sound checkpoint; log damaged ones and set them aside as NAME.damaged.

        Args:
          like: pytree of the expected structure, shapes and dtypes.
          check: as of `restore`.
        Returns:
          Tree of NumPy arrays and description, or None where there is no checkpoint yet.
        Raises:
          UserError: all are damaged (then nothing is set aside), one cannot be read, or it holds other arrays than
            `like`.
        """
        for old in self.folder.glob(".*.old.tmp"):  # left by a process killed while it replaced one
            if not (target := self.path(int(old.name[1:9]))).exists():
                old.rename(target)
        for temporary in self.folder.glob(".*.tmp"):
            shutil.rmtree(temporary, ignore_errors=True)
        damages: dict[int, DamagedCheckpoint] = {}
        for step in reversed(self.steps()):
            try:
                newest_sound = restore(self.path(step), like, check)
            except DamagedCheckpoint as damage:
                damages[step] = damage
                continue
            for damaged, damage in damages.items():
                self._set_aside(damaged, damage)
            return newest_sound
        if damages:
            newest = damages[max(damages)]
            raise UserError(f"--workdir: no checkpoint is sound: {newest}; start in a new folder")
        return None

    def _set_aside(self, step: int, damage: DamagedCheckpoint) -> None:
        aside = self.path(step).with_suffix(".damaged")
        log.warning("damaged checkpoint: %s; set aside as %s", damage, aside.name)
        try:
            shutil.rmtree(aside, ignore_errors=True)
            self.path(step).rename(aside)
        except OSError as error:
            raise UserError(f"--workdir: cannot write {aside} ({error.strerror})") from error

    def close(self) -> None:
        """Wait for the writer and end it."""
        self._writer.shutdown()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    return "No space left on device" if "No space left on device" in text else text[:300]


def _sums_of(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return "".join(f"{_sha256(path.read_bytes())}  {path.relative_to(folder).as_posix()}\n" for path in files)


def check(folder: Path) -> dict:
    """Verify every file of a checkpoint; return its description.

    Raises:
      DamagedCheckpoint: a file is damaged; the message names it, and the array that it belongs to.
      UserError: a file cannot be read just now.
    """
    try:
        lines = (folder / SUMS).read_bytes().decode().splitlines(keepends=True)
        expected = {line[66:-1]: line[:64] for line in lines}
        present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {SUMS}
    except (*MISSING, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(f"{folder / SUMS} cannot be read ({error})") from error
    except OSError as error:
        raise UserError(f"{folder / SUMS} cannot be read ({error.strerror})") from error
    if "".join(f"{digest}  {name}\n" for name, digest in expected.items()) != "".join(lines):
        raise DamagedCheckpoint(f"{folder / SUMS} is not a list of digests")
    if DESCRIPTION not in expected:
        raise DamagedCheckpoint(f"{folder / SUMS} does not list {DESCRIPTION}")
    for name in sorted(expected.keys() | present):
        if name not in expected:
            raise DamagedCheckpoint(f"{folder / SUMS} does not list {name}")
        of_array = f" (array {name.split('/')[1]})" if name.count("/") > 1 else ""
        if name not in present:  # or no file of this folder, as "../../dev/zero"
            raise DamagedCheckpoint(f"{folder / name} cannot be read (no such file){of_array}")
        try:
            digest = _sha256((folder / name).read_bytes())
        except MISSING as error:
            raise DamagedCheckpoint(f"{folder / name} cannot be read ({error.strerror}){of_array}") from error
        except OSError as error:
            raise UserError(f"{folder / name} cannot be read ({error.strerror})") from error
        if digest != expected[name]:
            raise DamagedCheckpoint(f"{folder / name} does not match its SHA-256{of_array}")
    return json.loads((folder / DESCRIPTION).read_text())


def read_arrays(folder: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Read and verify the arrays, by their current names, and the description.

    Raises:
      DamagedCheckpoint: a file, or an array as Orbax restores it, differs from what was saved.
    """
    description = check(folder)
    ocp, checkpointer = _orbax()
    names = description["arrays"]
    how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    arrays = checkpointer.restore(
        folder.absolute() / ARRAYS, args=ocp.args.PyTreeRestore(item=dict.fromkeys(names, 0), restore_args=how)
    )
    for name, expected in names.items():
        if _array_digest(arrays[name]) != expected:
            raise DamagedCheckpoint(f"{folder / ARRAYS / name}: array {name} does not match its SHA-256")
    return {current_name(name): array for name, array in arrays.items()}, description


def restore(folder: Path, like, check: Callable[[dict], None] = lambda description: None) -> tuple[Any, dict]:
    """Restore a checkpoint as a pytree like `like`; return it with its description.

    Args:
      check: function of the description, called before the arrays are compared with `like`; may raise UserError.
    Raises:
      DamagedCheckpoint: as of `read_arrays`.
      UserError: the checkpoint holds other arrays than `like`.
    """
    arrays, description = read_arrays(folder)
    check(description)
    return fill(like, arrays, str(folder)), description


def fill(like, arrays: dict[str, np.ndarray], where: str):
    """Return a pytree like `like` with `arrays` as leaves; those of REPLICAS may have another number of devices.

    Raises:
      UserError: names, shapes or dtypes differ; all are listed.
    """

    def kind(name, leaf):
        shape = list(leaf.shape[1:] if name.startswith(f"{REPLICAS}.") else leaf.shape)
        return f"{leaf.dtype}{shape}"

    expected = {name: kind(name, leaf) for name, leaf in named_leaves(like).items()}
    stored = {name: kind(name, leaf) for name, leaf in arrays.items()}
    wrong = [
        f"{name} is {stored.get(name, 'missing')} there, {expected.get(name, 'missing')} here"
        for name in sorted(expected.keys() | stored.keys())
        if expected.get(name) != stored.get(name)
    ]
    if wrong:
        more = " ..." if len(wrong) > 4 else ""
        cause = "of another network, optimizer or version of the code"
        raise UserError(f"{where}: {cause}: {'; '.join(wrong[:4])}{more}")
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in expected])
