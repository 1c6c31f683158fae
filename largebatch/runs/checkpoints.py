"""Checkpoints, saved by Orbax in the background and verified when they are restored.

    checkpoints/00000300/arrays/               the arrays, by name
    checkpoints/00000300/description/metadata  JSON: step, config, progress, and a SHA-256 of each array

Orbax restores some flipped bits without an error, so the digests are taken from memory before arrays are written.
Arrays and digests become a checkpoint by one rename. Only host 0 writes and reads: the state is the same on every
device.
"""

import concurrent.futures
import functools
import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from largebatch import util
from largebatch.util import UserError

log = logging.getLogger("largebatch")

ARRAYS, DESCRIPTION = "arrays", "description/metadata"
UNFINISHED = "*.orbax-checkpoint-tmp"
REMOVED = ".removed"  # suffix of a checkpoint while its files are removed, one after the other
REPLICAS = "replicas"  # the part of a checkpoint whose leading axes count devices


class DamagedCheckpoint(UserError):
    """Raised when a checkpoint does not hold what was saved; the message names it."""


class LoadedCheckpoint(NamedTuple):
    """Arrays of a checkpoint by name, and its description (step, config, description of the data, ...)."""

    arrays: dict[str, np.ndarray]
    description: dict


def named_leaves(tree) -> dict[str, Any]:
    """Return {"params.Dense_0.bias": leaf, ...} for every leaf of a pytree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def path_of(folder: Path, step: int) -> Path:
    """Return the path of one checkpoint of a folder."""
    return folder / f"{step:08d}"


def saved_steps(folder: Path) -> list[int]:
    """Return the steps with a whole checkpoint, oldest first."""
    return sorted(int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit())


@functools.cache
def _orbax():
    """Import Orbax, which takes a while, and silence its threads: their errors are raised by `save` as well."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)
    unraisable = sys.unraisablehook

    def of_callback(arguments):
        if "Event loop is closed" not in str(arguments.exc_value):  # where a disk is full
            unraisable(arguments)

    sys.unraisablehook = of_callback
    return ocp


def _checkpointer():
    """Return an Orbax checkpointer of arrays and description that is confined to this process."""
    ocp, process = _orbax(), jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix="alone"
    )
    handler = ocp.CompositeCheckpointHandler(
        # The composite too: by default it waits for all hosts, in a collective of its own.
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
        arrays=ocp.PyTreeCheckpointHandler(multiprocessing_options=alone),
        description=ocp.JsonCheckpointHandler(multiprocessing_options=alone),
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


# ---- writing -----------------------------------------------------------------------------------------


class Checkpoints:
    """Checkpoints of one run, saved in the background; the last few and the protected ones are kept.

    Args:
      keep: number of the latest checkpoints that are kept, 2 or more: a damaged one needs the one before it.
      after_save: function that is called when a checkpoint is on disk, in the background; it may raise a UserError.
    """

    def __init__(self, folder: Path, keep: int, after_save: Callable[[], None] = lambda: None):
        self.folder, self._keep, self._after_save = folder.absolute(), keep, after_save
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoints")
        self._pending: concurrent.futures.Future | None = None

    def save(self, step: int, tree, description: dict, protect: Iterable[int] = ()) -> None:
        """Save a pytree of this host's arrays (copied before this returns) under `step`, in the background.

        Args:
          description: plain JSON that is kept beside the arrays, and not changed any more.
          protect: steps that are kept whatever their age.
        Raises:
          UserError: the save before this one failed.
        """
        self.wait()
        arrays = {name: np.array(leaf) for name, leaf in named_leaves(tree).items()}
        self._pending = self._writer.submit(self._write, step, arrays, description, set(protect))

    def wait(self) -> None:
        """Wait until the checkpoint is on disk.

        Raises:
          UserError: the checkpoint could not be written; older ones are untouched.
        """
        if self._pending:
            pending, self._pending = self._pending, None
            pending.result()

    def _write(self, step: int, arrays: dict[str, np.ndarray], description: dict, protect: set[int]) -> None:
        path = path_of(self.folder, step)
        try:
            save = _orbax().args
            self._remove_leftovers()
            if path.exists():  # from before a rollback
                self._remove(step)
            digests = {name: _array_digest(array) for name, array in arrays.items()}
            about = save.JsonSave(sealed({"step": step, **description, "arrays": digests}))
            items = save.Composite(arrays=save.PyTreeSave(arrays), description=about)
            _checkpointer().save(path, args=items)
            for old in saved_steps(self.folder)[: -self._keep]:
                if old not in protect:
                    self._remove(old)
        except Exception as error:  # TensorStore reports a full disk as ValueError
            raise UserError(f"--workdir: cannot write {path} ({_reason(error)})") from error
        self._after_save()

    def _remove(self, step: int) -> None:
        path = path_of(self.folder, step)
        util.remove(path.rename(path.with_suffix(REMOVED)))

    def _remove_leftovers(self) -> None:
        for path in (*self.folder.glob(UNFINISHED), *self.folder.glob(f"*{REMOVED}")):
            shutil.rmtree(path, ignore_errors=True)

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of later steps than `step`."""
        self.wait()
        for later in saved_steps(self.folder):
            if later > step:
                self._remove(later)

    def close(self) -> None:
        """Wait for the writer and end it."""
        self._writer.shutdown()
        self._remove_leftovers()  # of a save that failed, whose threads may still have written then


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = util.one_line(error)
    return "No space left on device" if "No space left on device" in text else text[:300]


def _array_digest(array: np.ndarray) -> list:
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return [str(array.dtype), list(array.shape), hashlib.sha256(content).hexdigest()]


def sealed(description: dict) -> dict:
    """Return a description with its own SHA-256 in it, as "sha256"."""
    rest = {name: value for name, value in description.items() if name != "sha256"}
    text = json.dumps(rest, sort_keys=True)
    return {**rest, "sha256": hashlib.sha256(text.encode()).hexdigest()}


# ---- reading -----------------------------------------------------------------------------------------


def read_newest(folder: Path) -> LoadedCheckpoint | None:
    """Read the newest sound checkpoint; log damaged ones and set them aside as NAME.damaged.

    Returns:
      The checkpoint, or None where there is none yet.
    Raises:
      UserError: all are damaged; then nothing is set aside.
    """
    damages: dict[Path, DamagedCheckpoint] = {}
    for step in reversed(saved_steps(folder)):
        path = path_of(folder, step)
        try:
            newest_sound = read_arrays(path)
        except DamagedCheckpoint as damage:
            damages[path] = damage
            continue
        for damaged, damage in damages.items():
            aside = damaged.with_suffix(".damaged")
            log.warning("%s; set aside as %s", damage, aside.name)
            with util.writing(aside):
                util.remove(aside)
                damaged.rename(aside)
        return newest_sound
    if damages:
        raise UserError(f"--workdir: no checkpoint is sound: {damages[max(damages)]}; start in a new folder")
    return None


def read_description(path: Path) -> dict:
    """Read and verify the description of a checkpoint, without Orbax.

    Raises:
      DamagedCheckpoint: it is missing or not what was saved.
    """
    file = path / DESCRIPTION
    try:
        description = json.loads(file.read_bytes())
        if description != sealed(description):
            raise ValueError("it does not match its SHA-256")
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"damaged checkpoint: {file} cannot be read ({error})") from error
    return description


def read_arrays(path: Path) -> LoadedCheckpoint:
    """Read and verify the arrays of a checkpoint and its description.

    Raises:
      DamagedCheckpoint: an array or the description is not what was saved.
    """
    ocp, description = _orbax(), read_description(path)
    digests = description["arrays"]
    restored = dict.fromkeys(digests, ocp.RestoreArgs(restore_type=np.ndarray))
    arrays_only = ocp.args.PyTreeRestore(item=dict.fromkeys(digests, 0), restore_args=restored)
    damaged = f"damaged checkpoint: {path / ARRAYS}"
    try:
        arrays = _checkpointer().restore(path.absolute(), args=ocp.args.Composite(arrays=arrays_only))["arrays"]
    except Exception as error:  # what Orbax and TensorStore raise where bytes are wrong or missing has no class
        raise DamagedCheckpoint(f"{damaged} cannot be read ({_reason(error)})") from error
    for name, expected in digests.items():
        if _array_digest(arrays[name]) != expected:
            raise DamagedCheckpoint(f"{damaged}: array {name} does not match its SHA-256")
    return LoadedCheckpoint(arrays, description)


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
