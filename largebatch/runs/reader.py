"""Readers of run and study folders in any state.

A study is a folder with study.json and trials/0000, trials/0001, ..., each an ordinary run folder with a
trial.json beside. A damaged or unfinished run raises nothing: its `problems` list what is wrong with it.
Folders may come from someone else; `lies_in` checks that a path that a folder names does not lead out of it.
"""

import contextlib
import datetime
import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from largebatch.tasks.kinds import TaskKind, kind_of
from largebatch.terminal import duration
from largebatch.util import UserError, expanded

ENDED = ("done", "diverged", "interrupted", "failed", "pruned")  # how a process's part of a run ends
SCORES = ("best_val_accuracy", "best_score")  # the first is the name for classification
OBJECTIVES = (*SCORES, "steps_to_target", "examples_to_target", "sec_to_target")
BATCH = "batch.size"
COUNTED_SECTIONS = ("train", "evaluation")  # sections of a run's clock that count as goodput
EARLIEST_YEAR, LONGEST_START_SEC = 2000, 1e6  # of an event; a file with others is damaged
LARGEST = 1e40  # above the range of float32; beyond it a file is damaged, and squares would overflow
SCALAR = (str, int, float, bool, type(None))


# ---- runs --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Content of a run folder.

    Attributes:
      config, summary: config.json and summary.json; {} where the file is missing or damaged.
      rows: the sound lines of metrics.jsonl, with only the values that are numbers or None.
      events: the sound lines of events.jsonl.
      trial: trial.json; None for a run outside of a study.
      problems: a line for each file that is damaged or missing.
    """

    path: Path
    config: dict
    summary: dict
    rows: list[dict]
    events: list[dict]
    trial: dict | None
    problems: list[str]

    @property
    def status(self) -> str:
        """Status: one of ENDED, "running" (or killed: its end was not recorded), or "unreadable" (damaged)."""
        recorded = self.summary.get("status")
        if recorded in ENDED:
            return recorded
        if self.trial_error:
            return "failed"
        damaged = any(problem.startswith("summary.json: damaged") for problem in self.problems)
        return "running" if self.config and not damaged else "unreadable"

    @property
    def trial_error(self) -> str | None:
        """Reason why the trial failed, in one line; None if it did not."""
        error = self.trial.get("error") if self.trial else None
        return _one_line(error) if error else None

    @property
    def batch_size(self) -> int | None:
        """Examples per step over all devices, a number even if the config says "full"; None if it changed."""
        grows_by_schedule = self.field("schedule.decay_by") in ("batch", "seesaw")
        if self.field("batch.trace") or self.field("batch.auto") or grows_by_schedule:
            return None
        measured = [number(content.get("global_batch_size")) for content in (self.summary, *self.rows)]
        sizes = {int(size) for size in measured if (size or 0) >= 1}
        if not sizes and (number(self.field(BATCH)) or 0) >= 1:
            sizes = {int(self.field(BATCH))}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def kind(self) -> TaskKind:
        """Kind of the run's task, which defines how validations are compared."""
        return kind_of(self.config)

    @property
    def best_score(self) -> float | None:
        """Best validation score so far."""
        scores = [score_of(row) for row in self.rows]
        return self.kind.best([*scores, *(number(self.summary.get(name)) for name in SCORES)])

    @property
    def target(self) -> float | None:
        """Score at which the run ends; None where there is none."""
        targets = [number(self.field(f"train.target_{name}")) for name in ("score", "accuracy")]
        return next((target for target in targets if target is not None), None)

    def field(self, name: str):
        """Return a config field by its dotted name, None where there is none."""
        value = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def value(self, objective: str) -> float | None:
        """Return the run's value of one of OBJECTIVES; None where a target was not reached."""
        if objective in SCORES:
            return self.best_score
        cost = number(self.summary.get(objective))
        return cost if cost and cost > 0 else None

    def updates_to(self, score: float) -> int | None:
        """Return the steps after which a validation first reached a score, None where none did."""
        return next((row.get("step") for row in self.rows if self.kind.reaches(score_of(row), score)), None)


def last_sign_of_life(path: Path) -> str:
    """Return in words how long ago a run folder was last written to, by the times of its files."""
    times = []
    for file in (*path.glob("*"), *path.glob("checkpoints/*")):
        with contextlib.suppress(OSError):  # the file was replaced meanwhile
            times.append(file.stat().st_mtime)
    return f"last sign of life {duration(max(time.time() - max(times, default=0), 0))} ago"


def score_of(row: dict) -> float | None:
    """Return the score of a row of metrics.jsonl; rows of older code have only an accuracy."""
    return row.get("val_score", row.get("val_accuracy"))


def read_run(path) -> Run:
    """Read a run folder in any state, without errors for damage."""
    path, problems = Path(path), []
    trial = _read_object(path / "trial.json", problems)
    if trial is not None and not isinstance(trial.get("setting"), dict):
        problems.append("trial.json: damaged: no setting in it")
        trial["setting"] = {}
    error = trial.get("error") if trial else None
    if error:
        problems.append(f"trial.json: the trial failed: {_one_line(error)}")
    # A failed trial may have left neither file, and its error is the reason.
    config = _read_object(path / "config.json", problems, if_missing=None if error else "the run never began")
    unfinished = f"the run goes on, or was killed; {last_sign_of_life(path)}" if config and not error else None
    summary = _read_object(path / "summary.json", problems, if_missing=unfinished)
    rows = _read_lines(path / "metrics.jsonl", problems)
    if rows is None and summary and summary.get("steps"):
        problems.append("metrics.jsonl: missing: there are no curves")
    return Run(
        path=path,
        config=config or {},
        summary=summary or {},
        rows=[_numbers_only(row) for row in rows or []],
        events=_read_lines(path / "events.jsonl", problems) or [],
        trial=trial,
        problems=problems,
    )


def _numbers_only(row: dict) -> dict:
    """Return a metrics row with only its numbers and Nones, which can be drawn."""
    return {name: number(value) for name, value in row.items() if value is None or number(value) is not None}


def event_time(event: dict) -> datetime.datetime | None:
    """Return the time of a line of events.jsonl; None where it has none."""
    try:
        time = datetime.datetime.fromisoformat(str(event.get("time")))
    except ValueError:
        return None
    if time.year < EARLIEST_YEAR:
        return None
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


def process_begin(start: dict) -> datetime.datetime | None:
    """Return the time at which the process of a "start" line was started; None where the line has no time."""
    time, seconds = event_time(start), number(start.get("start_sec")) or 0.0
    return time and time - datetime.timedelta(seconds=min(max(seconds, 0.0), LONGEST_START_SEC))


def setting_of(run: Run, fields: Iterable[str]) -> dict:
    """Return a trial's setting {dotted field: scalar}; without a sound trial.json, the `fields` of the config."""
    setting = {}
    if run.trial and run.trial["setting"]:
        setting = run.trial["setting"]
    elif run.config:
        setting = {name: run.field(name) for name in fields}
    # Settings are compared and counted: a list becomes its text.
    return {name: value if isinstance(value, SCALAR) else json.dumps(value) for name, value in setting.items()}


# ---- studies -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """Content of a study folder.

    Attributes:
      description: study.json; {} where it is damaged.
      runs: runs of its trials, in the order of their index.
      problems: a line for each thing that is wrong with study.json; see `Run.problems` for the rest.
    """

    path: Path
    description: dict
    runs: list[Run]
    problems: list[str]

    @property
    def objective(self) -> str:
        """Objective of the study: one of OBJECTIVES."""
        objective = self.description.get("objective")
        return objective if objective in OBJECTIVES else OBJECTIVES[0]

    @property
    def kind(self) -> TaskKind:
        """Kind of the task of the study's runs."""
        config = self.description.get("config")
        return kind_of(config if isinstance(config, dict) else {})

    @property
    def fields(self) -> list[str]:
        """Dotted names of the config fields that were searched."""
        names = list(self.description.get("space") or {})
        for run in self.runs:
            names += setting_of(run, ())
        return list(dict.fromkeys(names))


def read_study(path) -> Study:
    """Read a study folder and all of its trials, without errors for damage."""
    path, problems = Path(path), []
    description = _read_object(path / "study.json", problems, if_missing="this is no study") or {}
    objective = description.get("objective")
    if description and objective not in OBJECTIVES:
        problems.append(f"study.json: objective is {objective!r}; taken as {OBJECTIVES[0]}")
    if not isinstance(description.get("space", {}), dict):
        problems.append("study.json: damaged: space is not a JSON object")
        description["space"] = {}
    points = description.get("branch_points") or []
    if not isinstance(points, list) or not all(map(_is_branch_point, points)):
        problems.append("study.json: damaged: branch_points")
        description["branch_points"] = []
    trials = path / "trials"
    folders = sorted(p for p in trials.iterdir() if p.is_dir()) if trials.is_dir() else []
    return Study(path, description, sorted(map(read_run, folders), key=_trial_order), problems)


def _is_branch_point(content) -> bool:
    """Return True if `content` has the numbers of a branch point that are needed."""
    names = ("step", "examples_seen", "batch_size")
    return isinstance(content, dict) and all((number(content.get(name)) or 0) >= 1 for name in names)


def _trial_order(run: Run) -> tuple:
    """Return a sort key: the index in trial.json, else the number in the folder's name; others come last."""
    index = number((run.trial or {}).get("index"))
    if index is None and run.path.name.isdigit():
        index = int(run.path.name)
    return (math.inf if index is None else index, run.path.name)


def read(path) -> Run | Study:
    """Read a run or a study, whichever the folder is.

    Raises:
      UserError: the folder is neither.
    """
    path = Path(expanded(path))
    if (path / "study.json").exists():
        return read_study(path)
    if (path / "config.json").exists() or (path / "trial.json").exists():
        return read_run(path)
    raise UserError(
        f"{path}: {_what_is_at(path)}; allowed: a run folder with config.json or a study folder with study.json"
    )


def _what_is_at(path: Path) -> str:
    if not path.is_dir():
        return "a file" if path.exists() else "nothing there"
    names = sorted(p.name for p in path.iterdir())
    if not names:
        return "an empty folder"
    listed = names if len(names) <= 4 else [*names[:4], "..."]
    return f"a folder with {', '.join(listed)}"


# ---- values and files --------------------------------------------------------------------------------


def lies_in(path, folder) -> bool:
    """Return True if a path is within a folder after links are followed; False if it cannot be followed."""
    try:
        return Path(expanded(path)).resolve().is_relative_to(Path(folder).resolve())
    except (OSError, ValueError, RuntimeError, UserError):  # "~nobody", a NUL, links in a circle
        return False


def number(value) -> float | int | None:
    """Return `value` if it is a finite number that a run can have measured, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= LARGEST else None


def _parse(text: bytes):
    """Parse JSON, with null for the NaN and Infinity that Python would read."""
    return json.loads(text, parse_constant=lambda _: None)


def _read_object(path: Path, problems: list[str], if_missing: str | None = None) -> dict | None:
    """Read a JSON object; return None where there is no sound one.

    Args:
      problems: list to which problems are added.
      if_missing: text for a missing file; None adds nothing.
    """
    try:
        content = _parse(path.read_bytes())
    except FileNotFoundError:
        if if_missing:
            problems.append(f"{path.name}: missing: {if_missing}")
        return None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name}: damaged: cannot be read ({_reason(error)})")
        return None
    if not isinstance(content, dict):
        problems.append(f"{path.name}: damaged: not a JSON object")
        return None
    return content


def _read_lines(path: Path, problems: list[str]) -> list[dict] | None:
    """Read the sound lines of a .jsonl file, None if it is missing; add the others to `problems`."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({_reason(error)})")
        return None
    objects = []
    for count, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = _parse(line)
            if not isinstance(content, dict):
                raise ValueError("not a JSON object")
            objects.append(content)
        except (ValueError, RecursionError) as error:
            last = count == len(lines)  # no newline behind it
            what = "torn (its end was not written)" if last else f"damaged ({_reason(error)})"
            problems.append(f"{path.name}: line {count} is {what}; left out")
    return objects


def _reason(error: Exception) -> str:
    return _one_line(getattr(error, "strerror", None) or error)


def _one_line(text) -> str:
    return " ".join(str(text).split())
