"""By which code and libraries a run was made."""

import hashlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path


def versions() -> dict[str, str]:
    """Versions of what shapes the numbers."""
    names = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {"python": sys.version.split()[0]} | {name: metadata.version(name) for name in names}


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
