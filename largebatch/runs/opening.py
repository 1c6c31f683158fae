"""How a run folder is opened: a new one, one that goes on, or one whose run has ended."""

import logging
from pathlib import Path

from largebatch.config import fields
from largebatch.errors import UserError
from largebatch.hosts import collectives
from largebatch.paths import expanded
from largebatch.runs.folder import RunFolder
from largebatch.tracking.trackers import check_installed

log = logging.getLogger("largebatch")


def open_run(config: dict, workdir: str) -> tuple[RunFolder, dict | None]:
    """The run folder, locked; or with its summary where it holds an ended run. The same answer on every host.

    Args:
      config: as plain JSON.
    Raises:
      UserError: the folder cannot be written, is in use, or holds a run of another config; or a tracker that the
        config asks for is not installed.
    """
    run = RunFolder(workdir)
    summary = collectives.agreed(lambda: _ended_or_locked(run, config), collectives.is_primary())
    return run, collectives.json_from_primary(summary)


def _ended_or_locked(run: RunFolder, config: dict) -> dict | None:
    check_installed(config["log"])
    is_begun, summary = _holds_this_run(run, config), run.read("summary.json")
    if is_begun and summary and summary.get("status") in ("done", "diverged", "pruned"):
        _name_other_places(run, config)
        return summary
    run.lock()
    try:
        # Again: what this machine has of a run in a bucket may not have been copied there yet.
        if not _holds_this_run(run, config) and run.holds("metrics.jsonl"):
            raise UserError(f"--workdir: {run.address} holds metrics.jsonl but no config.json; give a new folder")
    except UserError:
        run.close()
        raise
    return None


def _holds_this_run(run: RunFolder, config: dict) -> bool:
    """Return whether a run of this config is in the folder; one of another config is refused.

    Where the data are does not matter: checkpoints have their digests.
    """
    stored = run.read("config.json")
    if stored is None:
        return False
    changed = fields.differences(fields.identity_of_run(config), fields.identity_of_run(stored), ("here", "there"))
    if changed:
        raise UserError(f"--workdir: {run.address} holds a run of another config: {changed}")
    return True


def _name_other_places(run: RunFolder, config: dict) -> None:
    """Warn where an ended run had its data from elsewhere: nobody has looked at what lies in these places now."""
    there = run.read("config.json")["dataset"]
    for name in fields.DATA_PATHS:
        if _place(there.get(name)) != _place(here := config["dataset"][name]):
            log.warning(
                "%s has ended, with dataset.%s %s; %s was not looked at", run.address, name, there.get(name), here
            )


def _place(path: str | None) -> str | None:
    if path is None or "://" in path:
        return path
    try:
        return str(Path(expanded(path)).resolve())
    except UserError:  # ~USER of another machine
        return path
