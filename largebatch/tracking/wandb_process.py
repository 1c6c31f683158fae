"""Process that copies lines to Weights & Biases: {"begin": ...}, {"row": ...} many times, {"end": summary}.

Without a key or a network the record is written to the folder wandb/ of the run; `wandb sync` sends it.
"""

import json
import signal
import sys
from collections.abc import Iterator

import wandb

INIT_SEC = 15  # to reach the server
ENDED_WELL = ("done", "pruned", "interrupted")


def main() -> None:
    """Copy lines until the run has ended, or was killed if the end is missing."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the run, which then sends its end
        signal.signal(number, signal.SIG_IGN)
    messages = map(json.loads, sys.stdin)
    try:
        record = open_record(next(messages)["begin"])
        record.finish(exit_code=write(record, messages))
    except (wandb.Error, ValueError) as error:  # ValueError: a bad WANDB_MODE or the like
        sys.exit(f"log.wandb: {_one_line(error)}")


def open_record(begin: dict):
    """Open the record of a run, new or of its earlier processes, and offline if the server fails."""
    try:
        return _init(begin, mode=None)
    except wandb.Error as error:
        hint = f"offline: wandb sync {begin['folder']}/wandb/offline-run-* sends it"
        print(f"log.wandb: {_one_line(error)}; {hint}", file=sys.stderr, flush=True)
        wandb.teardown()  # else it knows the id already, and refuses it
        return _init(begin, mode="offline")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _init(begin: dict, mode: str | None):
    settings = wandb.Settings(console="off", silent=True, save_code=False, init_timeout=INIT_SEC)
    record = wandb.init(
        id=begin["id"],
        resume="allow",
        project=begin["project"],
        group=begin["group"],
        name=begin["name"],
        config=begin["config"],
        dir=begin["folder"],
        mode=mode,
        settings=settings,
    )
    record.define_metric("*", step_metric="step")
    return record


def write(record, messages: Iterator[dict]) -> int:
    """Write rows and summary; return the exit code of the run."""
    for message in messages:
        if "end" in message:
            summary = message["end"]
            record.summary.update({name: value for name, value in summary.items() if not isinstance(value, list)})
            return 0 if summary["status"] in ENDED_WELL else 1
        record.log({name: value for name, value in message["row"].items() if value is not None})
    return 1


if __name__ == "__main__":
    main()
