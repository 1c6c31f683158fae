"""The summary of a run, and which code and data it was made with."""

import hashlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np

from largebatch.hosts.clock import Clock
from largebatch.tasks.kinds import TaskKind
from largebatch.util import UserError

# What may stand behind the name of the score, in a row where a run was asked for it.
OTHER_SCORES = ("_views", "_ema", "_ema_views")


def empty_summary() -> dict:
    """summary.json before the first validation; `add_to_summary` fills it row by row."""
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


def timings(clock: Clock, before: dict, updates: int, examples: int) -> dict:
    """The time fields of a metrics row; `before` is clock.seconds as it was when the outer loop began.

    `updates` and `examples` are those of the outer loop.
    """
    train_sec = clock.seconds["train"] - before.get("train", 0.0)
    eval_sec = clock.seconds["evaluation"] - before.get("evaluation", 0.0)
    return {
        "images_per_sec": examples / train_sec,
        "step_time_ms": 1e3 * train_sec / updates,
        "train_sec": train_sec,
        "eval_sec": eval_sec,
        "compile_sec": clock.seconds["compile"] - before.get("compile", 0.0),
        "wall_sec": clock.total(),
    }


def add_to_summary(summary: dict, row: dict, kind: TaskKind) -> bool:
    """Brings the summary up to a new row; returns whether its score is the best so far."""
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


def summary_of_older_code(summary: dict) -> dict:
    """A summary that was begun where every score was an accuracy, as it would be now."""
    if "best_score" in summary:
        return summary
    return {
        **summary,
        "best_score": summary.get("best_val_accuracy"),
        "final_score": summary.get("final_val_accuracy"),
        "target_score": summary.get("target_accuracy"),
    }


LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")


def versions() -> dict[str, str]:
    """Versions of what shapes the numbers."""
    return {"python": sys.version.split()[0], **{name: metadata.version(name) for name in LIBRARIES}}


def code_sha256() -> str:
    """Of the project's Python files that train, changed and not yet committed ones too."""
    root, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted([*root.glob("*.py"), *root.glob("largebatch/**/*.py")]):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def git_commit() -> str | None:
    """Commit of the code, with "+" when files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    git = ["git", "-C", str(folder)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


def code_of(summary: dict) -> dict:
    """What a summary was written by: files, commit and libraries."""
    files = (summary.get("code_sha256") or "not recorded")[:12]
    return {"files": files, "commit": summary["git_commit"], **summary["versions"]}


def refuse_other_data(theirs: dict, ours: dict, folder: Path, trace: object) -> None:
    """Refuses to go on with other examples than those of the checkpoint.

    Args:
      theirs, ours: the data as the checkpoint and this process describe them.
      folder: of the run.
      trace: the config's batch.trace.
    Raises:
      UserError: ids, labels, images, the trace or the order of examples changed.
    """
    for name in ("ids", "labels", "pixels"):
        if theirs.get(name, ours[name]) != ours[name]:  # older code had another digest of the pixels
            decoded = ", or other libraries decode them" if name == "pixels" else ""
            raise UserError(
                f"dataset: its {name} changed since the checkpoint was saved in {folder}{decoded}; allowed: the "
                "images that the run began with, or another --workdir"
            )
    if theirs.get("trace") != ours.get("trace"):
        raise UserError(f"batch.trace: {trace} changed since the checkpoint was saved")
    refuse_other_network(theirs, ours["network_version"], folder)
    version_then, version_now = theirs.get("order_version", 1), ours["order_version"]
    if version_then != version_now:
        raise UserError(
            f"--workdir: {folder} takes its examples in order version {version_then}, this code in version "
            f"{version_now}: the run cannot go on; allowed: evaluate.py, report.py, or train.init_from in a new run"
        )
    if theirs["virtual_shards"] != ours["virtual_shards"]:
        raise UserError(
            f"batch.virtual_shards: {ours['virtual_shards']} here, {theirs['virtual_shards']} in the checkpoint of "
            f"{folder}: the run cannot go on; allowed: evaluate.py, report.py, or train.init_from in a new run"
        )


def refuse_other_network(theirs: dict, version: int, folder: Path) -> None:
    """Refuse parameters that were trained in another version of the networks.

    Args:
      theirs: the data that a run or an export describes.
      version: of this code's networks.
      folder: of the run or export.
    Raises:
      UserError: they would give other outputs here.
    """
    found = theirs.get("network_version", 1)
    if found != version:
        raise UserError(
            f"{folder}: its network is of version {found}, those of this code of version {version}, where the same "
            "parameters give other outputs; allowed: the code that trained it, or a new run"
        )


def warnings_on_resuming(description: dict, layout: dict, summary: dict) -> list[str]:
    """Why a resumed run may differ from one that was never stopped; a line each.

    Args:
      description: of the checkpoint.
      layout, summary: of this process: devices, hosts and platform; the run.
    """
    warnings = []
    if changed := _changes(description["layout"], layout):
        warnings.append(
            f"resuming with {changed}: the examples come in the same order as before, but results will not be "
            "bitwise those of an uninterrupted run"
        )
    if changed := _changes(code_of(description["summary"]), code_of(summary)):
        warnings.append(f"resuming with other code: {changed}: results may differ")
    return warnings


def _changes(then: dict, now: dict) -> str:
    """What of `now` is not as it was, in one line; empty where all is."""
    return "; ".join(f"{name} {now[name]}, was {then.get(name)}" for name in now if now[name] != then.get(name))
