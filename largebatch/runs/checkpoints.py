"""Checkpoints, saved by Orbax in the background and verified when they are restored.

    checkpoints/00000300/arrays/               the arrays, by name
    checkpoints/00000300/description/metadata  JSON: step, config, progress, and a SHA-256 of each array

Orbax restores some flipped bits without an error, so the digests are taken from memory before arrays are written.
Arrays and digests become a checkpoint by one rename. Only host 0 writes and reads: the state is the same on every
device.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from largebatch.util import UserError

log = logging.getLogger("largebatch")

ARRAYS, DESCRIPTION = "arrays", "description/metadata"
REMOVED = "removed"  # where a checkpoint is renamed to before its files are removed, one after the other
UNFINISHED = "*.orbax-checkpoint-tmp"
REPLICAS = "replicas"  # the part of a checkpoint whose leading axes count devices


class DamagedCheckpoint(Exception):
    """Raised when a checkpoint does not hold what was saved; the message names it."""


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


# ---- writing -----------------------------------------------------------------------------------------


@functools.cache
def _orbax():
    """Import Orbax, which takes a while, and silence its threads: their errors are raised by `save` as well."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)
    unraisable = sys.unraisablehook

    def of_callback(arguments):
        if "Event loop is closed" not in str(arguments.exc_value):
            unraisable(arguments)

    sys.unraisablehook = of_callback
    return ocp


def _alone() -> dict:
    """Return the options that confine Orbax to this process, and with them its handlers of the two items."""
    ocp, process = _orbax(), jax.process_index()
    options = {
        "multiprocessing_options": ocp.options.MultiprocessingOptions(
            primary_host=process, active_processes={process}, barrier_sync_key_prefix="alone"
        )
    }
    handlers = {
        "arrays": ocp.PyTreeCheckpointHandler(**options),
        "description": ocp.JsonCheckpointHandler(**options),
    }
    return options, handlers


@dataclasses.dataclass
class _Protected:
    """Preservation policy of Orbax that keeps the steps in `steps`."""

    steps: set[int]

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Return True for each checkpoint that is kept."""
        del context
        return [checkpoint.step in self.steps for checkpoint in checkpoints]


class Checkpoints:
    """Checkpoints of one run, saved in the background; the last few and the protected ones are kept.

    Args:
      keep: number of the latest checkpoints that are kept, 2 or more: a damaged one needs the one before it.
      after_save: function that is called when a checkpoint is on disk, in the background; it may raise a UserError.
    """

    def __init__(self, folder: Path, keep: int, after_save: Callable[[], None] = lambda: None):
        self.folder, self._keep, self._after_save = folder.absolute(), keep, after_save
        self._protected = _Protected(set())
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoints")
        self._pending: concurrent.futures.Future | None = None

    @functools.cached_property
    def _manager(self):
        ocp, (options, handlers) = _orbax(), _alone()
        policies = ocp.checkpoint_managers
        kept = [policies.LatestN(self._keep), self._protected]
        self.folder.mkdir(parents=True, exist_ok=True)
        return ocp.CheckpointManager(
            self.folder,
            item_handlers=handlers,
            options=ocp.CheckpointManagerOptions(
                create=False,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=False,  # `_writer` costs a step less
                step_name_format=ocp.path.step.standard_name_format(step_format_fixed_length=8),
                preservation_policy=policies.AnyPreservationPolicy(kept),
                todelete_subdir=REMOVED,
                **options,
            ),
        )

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
        text = json.dumps({"step": step, **description}, allow_nan=False)
        self._protected.steps = set(protect)
        self._pending = self._writer.submit(self._write, step, arrays, text)

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

    def _write(self, step: int, arrays: dict[str, np.ndarray], text: str) -> None:
        try:
            ocp, manager = _orbax(), self._manager
            if step in saved_steps(self.folder):  # from before a rollback; Orbax saves no step twice
                self._delete(step)
            digests = {name: _array_digest(array) for name, array in arrays.items()}
            description = sealed({**json.loads(text), "arrays": digests})
            items = {"arrays": ocp.args.PyTreeSave(arrays), "description": ocp.args.JsonSave(description)}
            manager.save(step, args=ocp.args.Composite(**items), force=True)
            self._empty(REMOVED)
            self._after_save()
        except UserError:
            raise
        except Exception as error:  # TensorStore reports a full disk as ValueError
            self._empty(UNFINISHED)
            raise UserError(f"--workdir: cannot write {path_of(self.folder, step)} ({_reason(error)})") from error

    def _empty(self, pattern: str) -> None:
        for path in self.folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)

    def _delete(self, step: int) -> None:
        self._manager.delete(step)
        self._empty(REMOVED)

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of later steps than `step`."""
        self.wait()
        for later in saved_steps(self.folder):
            if later > step:
                self._delete(later)

    def close(self) -> None:
        """Wait for the writer and end it."""
        self._writer.shutdown()
        self._empty(UNFINISHED)  # of a save that failed, whose threads may still have written then

    # ---- restoring -----------------------------------------------------------------------------------

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
        damages: dict[Path, DamagedCheckpoint] = {}
        for step in reversed(saved_steps(self.folder)):
            path = path_of(self.folder, step)
            try:
                newest_sound = restore(path, like, check)
            except DamagedCheckpoint as damage:
                damages[path] = damage
                continue
            for damaged, damage in damages.items():
                _set_aside(damaged, damage)
            return newest_sound
        if damages:
            newest = damages[max(damages)]
            raise UserError(f"--workdir: no checkpoint is sound: {newest}; start in a new folder")
        return None


def _set_aside(path: Path, damage: DamagedCheckpoint) -> None:
    aside = path.with_suffix(".damaged")
    log.warning("damaged checkpoint: %s; set aside as %s", damage, aside.name)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    except OSError as error:
        raise UserError(f"--workdir: cannot write {aside} ({error.strerror})") from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    return "No space left on device" if "No space left on device" in text else text[:300]


# ---- digests and reading -----------------------------------------------------------------------------


def _array_digest(array: np.ndarray) -> list:
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return [str(array.dtype), list(array.shape), hashlib.sha256(content).hexdigest()]


def sealed(description: dict) -> dict:
    """Return a description with its own SHA-256 in it, as "sha256"."""
    rest = {name: value for name, value in description.items() if name != "sha256"}
    text = json.dumps(rest, sort_keys=True)
    return {**rest, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def read_description(path: Path) -> dict:
    """Read and verify the description of a checkpoint, without Orbax.

    Raises:
      DamagedCheckpoint: it is missing or not what was saved.
      UserError: the disk cannot be read just now.
    """
    file = path / DESCRIPTION
    try:
        description = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{file} cannot be read ({error})") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error
    if not isinstance(description, dict) or description != sealed(description):
        raise DamagedCheckpoint(f"{file} does not match its SHA-256")
    return description


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    """Read and verify the arrays of a checkpoint, by name, and its description.

    Raises:
      DamagedCheckpoint: an array or the description is not what was saved.
      UserError: the disk cannot be read just now.
    """
    description = read_description(path)
    digests, ocp, (options, handlers) = description["arrays"], _orbax(), _alone()
    restored = dict.fromkeys(digests, ocp.RestoreArgs(restore_type=np.ndarray))
    checkpointer = ocp.Checkpointer(handlers["arrays"], **options)
    try:
        arrays = checkpointer.restore(
            path.absolute() / ARRAYS,
            args=ocp.args.PyTreeRestore(item=dict.fromkeys(digests, 0), restore_args=restored),
        )
    except Exception as error:  # what Orbax and TensorStore raise where bytes are wrong or missing has no class
        raise DamagedCheckpoint(f"{path / ARRAYS} cannot be read ({_reason(error)})") from error
    for name, expected in digests.items():
        if _array_digest(arrays[name]) != expected:
            raise DamagedCheckpoint(f"{path / ARRAYS}: array {name} does not match its SHA-256")
    return arrays, description


def restore(path: Path, like, check: Callable[[dict], None] = lambda description: None) -> tuple[Any, dict]:
    """Restore a checkpoint as a pytree like `like`; return it with its description.

    Args:
      check: function of the description, called before the arrays are compared with `like`; may raise UserError.
    Raises:
      DamagedCheckpoint: as of `read_arrays`.
      UserError: the checkpoint holds other arrays than `like`.
    """
    arrays, description = read_arrays(path)
    check(description)
    return fill(like, arrays, str(path)), description


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
