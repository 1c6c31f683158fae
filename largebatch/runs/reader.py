"""Runs and studies read back from their folders, whatever state they are in.

A folder may come from someone else: what its files name outside of it is said before it is read.
A study is a folder with study.json and trials/0000, trials/0001, ..., each an ordinary run folder with a
trial.json beside. Nothing here raises for a damaged or unfinished run: it is named among `problems`.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from largebatch.errors import UserError

ENDED = ("done", "diverged", "interrupted", "failed", "pruned")
OBJECTIVES = ("best_val_accuracy", "steps_to_target", "examples_to_target", "sec_to_target")
BATCH = "batch.size"
LARGEST = 1e40  # what float32 holds and some more; beyond it a file is damaged, and squares would overflow


class Run(NamedTuple):
    """A run folder as it was found; `problems` names every file that is damaged or missing."""

    path: Path
    config: dict
    summary: dict
    rows: list[dict]
    events: list[dict]
    trial: dict | None
    problems: list[str]

    @property
    def status(self) -> str:
        """One of ENDED, "running" (or killed: its end was not recorded), or "unreadable" (damaged)."""
        found = self.summary.get("status")
        if found in ENDED:
            return found
        if self.trial_error:
            return "failed"
        damaged = any(problem.startswith("summary.json: damaged") for problem in self.problems)
        return "running" if self.config and not damaged else "unreadable"

    @property
    def trial_error(self) -> str | None:
        """Why the trial failed, in one line."""
        error = self.trial.get("error") if self.trial else None
        return " ".join(str(error).split()) if error else None

    @property
    def batch_size(self) -> int | None:
        """Examples per update over all devices, a number even where the config says "full"; None if it changes."""
        changes = [self.field("batch.trace"), self.field("batch.auto"), self.field("schedule.decay_by") == "batch"]
        if any(changes):
            return None
        rows = (row.get("global_batch_size") for row in reversed(self.rows))
        for size in (self.summary.get("global_batch_size"), *rows, self.field(BATCH)):
            if (number(size) or 0) >= 1:
                return int(size)
        return None

    @property
    def best_val_accuracy(self) -> float | None:
        """The best so far, 0..1."""
        best = number(self.summary.get("best_val_accuracy"))
        seen = [row["val_accuracy"] for row in self.rows if row.get("val_accuracy") is not None]
        return max([*seen, *([] if best is None else [best])], default=None)

    def field(self, name: str):
        """A config field by its dotted name, None where there is none."""
        value = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def value(self, objective: str) -> float | None:
        """What the run says of one of OBJECTIVES; None where a target was not reached."""
        if objective == "best_val_accuracy":
            return self.best_val_accuracy
        found = number(self.summary.get(objective))
        return found if found and found > 0 else None

    def updates_to(self, accuracy: float) -> int | None:
        """Updates after which a validation first had this accuracy, None where none had."""
        return next((row.get("step") for row in self.rows if (row.get("val_accuracy") or 0.0) >= accuracy), None)


def setting_of(run: Run, fields: Iterable[str]) -> dict:
    """What a trial set, {dotted field: scalar}; of a run without a sound trial.json, the `fields` of its config."""
    if run.trial and run.trial["setting"]:
        found = run.trial["setting"]
    else:
        found = {name: run.field(name) for name in fields} if run.config else {}
    # Settings are compared and counted: a list becomes its text.
    scalar = (str, int, float, bool, type(None))
    return {name: value if isinstance(value, scalar) else json.dumps(value) for name, value in found.items()}


class Study(NamedTuple):
    """A study folder as it was found; `description` is study.json, `runs` are in the order of their index."""

    path: Path
    description: dict
    runs: list[Run]
    problems: list[str]

    @property
    def objective(self) -> str:
        """One of OBJECTIVES."""
        found = self.description.get("objective")
        return found if found in OBJECTIVES else OBJECTIVES[0]

    @property
    def fields(self) -> list[str]:
        """Dotted names of the config fields that were searched."""
        named = dict.fromkeys(self.description.get("space") or {})
        return list(named | dict.fromkeys(name for run in self.runs for name in setting_of(run, ())))


def lies_in(path, folder) -> bool:
    """Whether a path is within a folder once links are followed; no path that cannot be followed is."""
    try:
        return Path(path).expanduser().resolve().is_relative_to(Path(folder).resolve())
    except (OSError, ValueError, RuntimeError):  # "~nobody", a NUL, links in a circle
        return False


def number(value) -> float | int | None:
    """`value` where it is a finite number that a run can have measured, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= LARGEST else None


def _parse(text: bytes):
    """JSON, with null for the NaN and Infinity that Python would read."""
    return json.loads(text, parse_constant=lambda _: None)


def _read_object(path: Path, problems: list[str], missing: str | None = None) -> dict | None:
    """A JSON object, or None and a line in `problems`; `missing` is the line for a file that is not there."""
    try:
        content = _parse(path.read_bytes())
        if isinstance(content, dict):
            return content
        problems.append(f"{path.name}: damaged: not a JSON object")
    except FileNotFoundError:
        if missing:
            problems.append(f"{path.name}: missing: {missing}")
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name}: damaged: cannot be read ({_one_line(error)})")
    return None


def _one_line(error: Exception) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error).split())


def _read_lines(path: Path, problems: list[str]) -> list[dict] | None:
    """The sound lines of a .jsonl file; the others are named."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({_one_line(error)})")
        return None
    found = []
    for count, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = _parse(line)
            if not isinstance(content, dict):
                raise ValueError("not a JSON object")
            found.append(content)
        except (ValueError, RecursionError) as error:
            torn = count == len(lines)
            what = "torn (its end was not written)" if torn else f"damaged ({_one_line(error)})"
            problems.append(f"{path.name}: line {count} is {what}; left out")
    return found


def read_run(path) -> Run:
    """Reads a run folder, whatever state it is in; never raises for damage."""
    path, problems = Path(path), []
    trial = _read_object(path / "trial.json", problems)
    if trial is not None and not isinstance(trial.get("setting"), dict):
        problems.append("trial.json: damaged: no setting in it")
        trial["setting"] = {}
    error = trial.get("error") if trial else None
    if error:
        problems.append(f"trial.json: the trial failed: {' '.join(str(error).split())}")
    config = _read_object(path / "config.json", problems, None if error else "the run never began")
    unfinished = "the run goes on, or was killed" if config and not error else None
    summary = _read_object(path / "summary.json", problems, unfinished)
    rows = _read_lines(path / "metrics.jsonl", problems)
    if rows is None and (summary or {}).get("steps"):
        problems.append("metrics.jsonl: missing: there are no curves")
    rows = [_numbers(row) for row in rows or []]
    events = _read_lines(path / "events.jsonl", problems) or []
    return Run(path, config or {}, summary or {}, rows, events, trial, problems)


def _numbers(row: dict) -> dict:
    """A metrics row with only what can be drawn: numbers and None."""
    return {name: number(value) for name, value in row.items() if value is None or number(value) is not None}


def read_study(path) -> Study:
    """Reads a study folder and all of its trials; never raises for damage."""
    path, problems = Path(path), []
    description = _read_object(path / "study.json", problems, "this is no study") or {}
    objective = description.get("objective")
    if description and objective not in OBJECTIVES:
        problems.append(f"study.json: objective is {objective!r}; taken as {OBJECTIVES[0]}")
    if not isinstance(description.get("space", {}), dict):
        problems.append("study.json: damaged: space is not a JSON object")
        description["space"] = {}
    trials = path / "trials"
    folders = sorted(p for p in trials.iterdir() if p.is_dir()) if trials.is_dir() else []
    runs = sorted(map(read_run, folders), key=_index)
    return Study(path, description, runs, problems)


def _index(run: Run) -> tuple:
    index = number((run.trial or {}).get("index"))
    if index is None and run.path.name.isdigit():
        index = int(run.path.name)
    return (math.inf if index is None else index, run.path.name)


def read(path) -> Run | Study:
    """Reads a run or a study, whichever the folder is.

    Raises:
      UserError: it is neither.
    """
    path = Path(path).expanduser()
    if (path / "study.json").exists():
        return read_study(path)
    if (path / "config.json").exists() or (path / "trial.json").exists():
        return read_run(path)
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir())
        found = f"a folder with {', '.join(names[:4])}{', ...' * (len(names) > 4)}" if names else "an empty folder"
    else:
        found = "a file" if path.exists() else "nothing there"
    raise UserError(f"{path}: {found}; allowed: a run folder with config.json or a study folder with study.json")
