"""Summary of a run, with checks of the code and data that it was made with."""

import hashlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np

from largebatch.hosts.clock import Clock
from largebatch.tasks.kinds import TaskKind
from largebatch.util import UserError

# Suffixes of the optional scores of a row.
OTHER_SCORES = ("_views", "_ema", "_ema_views")


def empty_summary() -> dict:
    """Create the summary.json of a run before the first validation; `add_to_summary` fills it row by row."""
    return {
        "status": "failed",
        "best_score": None,
        "best_val_accuracy": None,
        "best_step": None,
        "final_score": None,
        "final_val_accuracy": None,
        "final_others": {},
        "score": None,
        "target_accuracy": None,
        "target_score": None,
        "steps_to_target": None,
        "examples_to_target": None,
        "sec_to_target": None,
        "steps": 0,
        "examples_seen": 0,
        "images_per_sec": None,
        "images_per_sec_by_outer": [],
        "train_sec": 0.0,
        "rollbacks": [],
        "params_sha256": None,
    }


def timings(clock: Clock, before: dict, steps: int, examples: int) -> dict:
    """Return the time fields of a metrics row.

    Args:
      before: clock.seconds at the begin of the outer loop.
      steps, examples: their numbers in the outer loop.
    """
    spent = {section: seconds - before.get(section, 0.0) for section, seconds in clock.seconds.items()}
    return {
        "images_per_sec": examples / spent["train"],
        "step_time_ms": 1e3 * spent["train"] / steps,
        "train_sec": spent["train"],
        "eval_sec": spent["evaluation"],
        "compile_sec": spent["compile"],
        "wall_sec": clock.total(),
    }


def add_to_summary(summary: dict, row: dict, kind: TaskKind) -> bool:
    """Update the summary with a new row; return True if its score is the best so far."""
    score, accuracy = row["val_score"], row.get("val_accuracy")
    summary["steps"], summary["examples_seen"] = row["step"], row["examples_seen"]
    summary["final_score"], summary["final_val_accuracy"] = score, accuracy
    others = [f"{kind.score_column}{ending}" for ending in OTHER_SCORES]
    summary["final_others"] = {name: row[name] for name in others if name in row}
    summary["images_per_sec_by_outer"].append(row["images_per_sec"])
    summary["images_per_sec"] = float(np.median(summary["images_per_sec_by_outer"]))
    summary["train_sec"] += row["train_sec"]

    is_best = summary["best_step"] is None or kind.is_better(score, summary["best_score"])
    if is_best:
        summary["best_score"], summary["best_val_accuracy"], summary["best_step"] = score, accuracy, row["step"]

    target = summary["target_score"]
    if target is not None and kind.reaches(score, target) and summary["steps_to_target"] is None:
        summary["steps_to_target"], summary["examples_to_target"] = row["step"], row["examples_seen"]
        summary["sec_to_target"] = summary["train_sec"]
    return is_best


LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of Python and the libraries that affect the results."""
    return {"python": sys.version.split()[0], **{name: metadata.version(name) for name in LIBRARIES}}


def code_sha256() -> str:
    """Compute the SHA-256 of the Python files of the root and of largebatch/, uncommitted changes included."""
    root, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted([*root.glob("*.py"), *root.glob("largebatch/**/*.py")]):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def git_commit() -> str | None:
    """Return the commit of the code, with "+" if files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def environment_of(summary: dict) -> dict:
    """Return what bitwise equal results need: devices, hosts and their kind; files, commit and libraries."""
    return {
        "devices": summary["devices"],
        "hosts": summary["hosts"],
        "platform": summary["device_kind"],
        "files": summary["code_sha256"][:12],
        "commit": summary["git_commit"],
        **summary["versions"],
    }


# What must not change within a run, by its name in the description of the data.
UNCHANGED = {
    "ids": "dataset: its ids",
    "labels": "dataset: its labels",
    "pixels": "dataset: its pixels",
    "trace": "batch.trace: its file",
    "virtual_shards": "batch.virtual_shards: their number",
    "order_version": "the order of examples: its version",
}


def refuse_other_data(theirs: dict, ours: dict, folder: Path) -> None:
    """Refuse to resume with other examples than those of the checkpoint.

    Args:
      theirs, ours: descriptions of the data in the checkpoint and in this process.
      folder: folder of the run.
    Raises:
      UserError: ids, labels, images, the trace or the order of examples changed.
    """
    refuse_other_network(theirs, ours["network_version"], folder)
    for name, what in UNCHANGED.items():
        if theirs.get(name) != ours.get(name):
            there, here = (str(data.get(name))[:12] for data in (theirs, ours))
            raise UserError(
                f"{what} changed since the checkpoint was saved in {folder} ({there} there, {here} here); allowed: "
                "the images, libraries that decode them and code that the run began with, or another --workdir"
            )


def refuse_other_network(theirs: dict, version: int, folder: Path) -> None:
    """Refuse parameters that were trained in another version of the networks.

    Args:
      theirs: the data that a run or an export describes.
      version: version of this code's networks.
      folder: folder of the run or export.
    Raises:
      UserError: the parameters would give other outputs here.
    """
    found = theirs.get("network_version", 1)
    if found != version:
        raise UserError(
            f"{folder}: its network is of version {found}, those of this code of version {version}, where the same "
            "parameters give other outputs; allowed: the code that trained it, or a new run"
        )
