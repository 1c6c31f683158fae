"""What a run was made by: code, libraries, devices and data, and what of it a resumed run finds changed."""

import hashlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from largebatch.errors import UserError

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
