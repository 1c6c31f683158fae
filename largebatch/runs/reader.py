"""Readers of run and study folders in any state, without JAX.

A study is a folder with study.json and trials/0000, trials/0001, ..., each an ordinary run folder with a
trial.json beside. A damaged or unfinished run raises nothing: its `problems` list what is wrong with it.
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

FORMAT_VERSION = 2  # of run folders; raise it when this code cannot read what the code before wrote
ENDED = ("done", "diverged", "interrupted", "failed", "pruned")  # how a process's part of a run ends
SCORES = ("best_val_accuracy", "best_score")  # the first is the name for classification
OBJECTIVES = (*SCORES, "steps_to_target", "examples_to_target", "sec_to_target")
BATCH = "batch.size"
COUNTED_SECTIONS = ("train", "evaluation")  # sections of a run's clock that count as goodput
SCALAR = (str, int, float, bool, type(None))


# ---- runs --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Content of a run folder.

    Attributes:
      config, summary: config.json and summary.json; {} where the file is missing or damaged.
      rows, events: the whole lines of metrics.jsonl and events.jsonl.
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
        if "status" in self.summary:
            return self.summary["status"]
        if self.trial_error:
            return "failed"
        damaged = any(problem.startswith("summary.json: damaged") for problem in self.problems)
        return "running" if self.config and not damaged else "unreadable"

    @property
    def trial_error(self) -> str | None:
        """Reason why the trial failed, in one line; None if it did not."""
        error = self.trial and self.trial.get("error")
        return " ".join(error.split()) if error else None

    @property
    def batch_size(self) -> int | None:
        """Examples per step over all devices, a number even if the config says "full"; None if it changed."""
        grows_by_schedule = self.field("schedule.decay_by") in ("batch", "seesaw")
        if self.field("batch.trace") or self.field("batch.auto") or grows_by_schedule:
            return None
        sizes = {content.get("global_batch_size") for content in (self.summary, *self.rows)} - {None}
        size = sizes.pop() if sizes else self.field(BATCH)
        return size if isinstance(size, int) and not sizes else None

    @property
    def kind(self) -> TaskKind:
        """Kind of the run's task, which defines how validations are compared."""
        return kind_of(self.config)

    @property
    def best_score(self) -> float | None:
        """Best validation score so far."""
        return self.kind.best([row.get("val_score") for row in self.rows] + [self.summary.get("best_score")])

    @property
    def target(self) -> float | None:
        """Score at which the run ends; None where there is none."""
        score = self.field("train.target_score")
        return self.field("train.target_accuracy") if score is None else score

    def field(self, name: str):
        """Return a config field by its dotted name, None where there is none."""
        value = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def value(self, objective: str) -> float | None:
        """Return the run's value of one of OBJECTIVES; None where a target was not reached."""
        return self.best_score if objective in SCORES else self.summary.get(objective)

    def steps_to(self, score: float) -> int | None:
        """Return the steps after which a validation first reached a score, None where none did."""
        return next((row["step"] for row in self.rows if self.kind.reaches(row.get("val_score"), score)), None)


def refuse_other_format(about: dict | None, where: object) -> None:
    """Refuse a run folder that another version of this code wrote.

    Args:
      about: content of its run.json; None where it has none.
    Raises:
      UserError: the folder's format_version is not FORMAT_VERSION.
    """
    found = (about or {}).get("format_version", "missing")
    if found != FORMAT_VERSION:
        raise UserError(
            f"{where}/run.json: format_version {found}; allowed: {FORMAT_VERSION}, or the code that wrote this run"
        )


def read_run(path) -> Run:
    """Read a run folder in any state, without errors for damage."""
    path, problems = Path(path), []
    trial = _read_json(path / "trial.json", problems)
    run = Run(path, {}, {}, [], [], trial, problems)
    error = run.trial_error
    if error:
        problems.append(f"trial.json: the trial failed: {error}")
    # A failed trial may have left neither file, and its error is the reason.
    config = _read_json(path / "config.json", problems, None if error else "the run never began")
    if config:
        try:
            refuse_other_format(_read_json(path / "run.json", problems), path)
        except UserError as refusal:
            problems.append(str(refusal))
            return run
    unfinished = f"the run goes on, or was killed; {last_sign_of_life(path)}"
    summary = _read_json(path / "summary.json", problems, unfinished if config and not error else None)
    rows = read_lines(path / "metrics.jsonl", problems)
    if rows is None and summary and summary.get("steps"):
        problems.append("metrics.jsonl: missing: there are no curves")
    events = read_lines(path / "events.jsonl", problems)
    return Run(path, config or {}, summary or {}, rows or [], events or [], trial, problems)


def last_sign_of_life(path: Path) -> str:
    """Return in words how long ago a run folder was last written to, by the times of its files."""
    times = []
    for file in path.rglob("[!.]*"):
        with contextlib.suppress(OSError):  # the file was replaced meanwhile
            if file.is_file():
                times.append(file.stat().st_mtime)
    return f"last sign of life {duration(max(time.time() - max(times, default=0), 0))} ago"


def event_time(event: dict) -> datetime.datetime:
    """Return the time of a line of events.jsonl."""
    return datetime.datetime.fromisoformat(event["time"])


def process_begin(start: dict) -> datetime.datetime:
    """Return the time at which the process of a "start" line was started."""
    return event_time(start) - datetime.timedelta(seconds=start["start_sec"])


def setting_of(run: Run, fields: Iterable[str]) -> dict:
    """Return a trial's setting {dotted field: scalar}; without a trial.json, the `fields` of the config."""
    setting = run.trial["setting"] if run.trial else {name: run.field(name) for name in fields if run.config}
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
        return self.description.get("objective", OBJECTIVES[0])

    @property
    def kind(self) -> TaskKind:
        """Kind of the task of the study's runs."""
        return kind_of(self.description.get("config", {}))

    @property
    def fields(self) -> list[str]:
        """Dotted names of the config fields that were searched."""
        names = list(self.description.get("fields", []))
        for run in self.runs:
            names += setting_of(run, ())
        return list(dict.fromkeys(names))


def read_study(path) -> Study:
    """Read a study folder and all of its trials, without errors for damage."""
    path, problems = Path(path), []
    description = _read_json(path / "study.json", problems, if_missing="this is no study") or {}
    runs = [read_run(folder) for folder in (path / "trials").glob("*") if folder.is_dir()]
    runs.sort(key=lambda run: ((run.trial or {}).get("index", math.inf), run.path.name))
    return Study(path, description, runs, problems)


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
    allowed = "a run folder with config.json or a study folder with study.json"
    raise UserError(f"{path}: no run or study is there; allowed: {allowed}")


# ---- values and files --------------------------------------------------------------------------------


def lies_in(path, folder) -> bool:
    """Return True if a path is within a folder after links are followed; False if it cannot be followed."""
    try:
        return Path(expanded(path)).resolve().is_relative_to(Path(folder).resolve())
    except (OSError, ValueError, RuntimeError, UserError):  # "~nobody", a NUL, links in a circle
        return False


def number(value) -> float | int | None:
    """Return `value` if it is a finite number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def _read_json(path: Path, problems: list[str], if_missing: str | None = None) -> dict | None:
    """Read a JSON file; return None where it is damaged or missing.

    Args:
      problems: list to which a damaged file is added.
      if_missing: text that is added for a missing file; None adds nothing.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        if if_missing:
            problems.append(f"{path.name}: missing: {if_missing}")
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: damaged: cannot be read ({error})")
    return None


def read_lines(path: Path, problems: list[str]) -> list[dict] | None:
    """Read the whole lines of a .jsonl file, None if it is missing; add the others to `problems`."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    objects = []
    for count, line in enumerate(lines, 1):
        try:
            objects += [json.loads(line)] if line else []
        except ValueError as error:
            what = "torn (its end was not written)" if count == len(lines) else f"damaged ({error})"
            problems.append(f"{path.name}: line {count} is {what}; left out")
    return objects
