"""bench.py results: the tables of docs/results.md, measured anew.

Every job is a recipe, run with several seeds, or a study of sweep.py. Jobs run one after the other. What was killed
goes on where it stood when the command is given again; what has ended is not run again. After each job its rows are
put into docs/results.json. A table goes into the page once all of its jobs have ended; until then the older one
stays.
"""

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import knees, pages, result_tables
from benchmarks.timing import ROOT
from largebatch.runs.load import load
from largebatch.runs.reader import Run
from largebatch.studies import analysis
from largebatch.util import UserError

ROWS, PAGE = ROOT / "docs" / "results.json", ROOT / "docs" / "results.md"
EUROSAT, CIFAR10 = "EuroSAT.zip", "CIFAR-10-jpeg.zip"
SMALL = ("--config.dataset.image_size", "32")


@dataclass(frozen=True)
class Job:
    """A part of a table.

    Attributes:
      name: of its folder.
      table: of the page.
      arguments: of train.py or sweep.py, without those that say where the data and the results are.
      seeds: runs of a recipe; None for a study, whose arguments say it.
      data: file of the folder of data; None for synthetic images.
      devices: simulated ones; None for those there are.
    """

    name: str
    table: str
    arguments: tuple[str, ...]
    seeds: int | None = None
    data: str | None = EUROSAT
    devices: int | None = None

    def data_path(self, folder: Path) -> Path | None:
        """Where its data are."""
        return None if self.data is None else folder / self.data

    @property
    def command(self) -> str:
        """As a user would give it; S stands for the seed."""
        script, place = "sweep.py", f"--study runs/studies/{self.name}"
        if self.seeds is not None:
            script, place = "train.py", f"--config.seed S --workdir runs/{self.name}-S"
        data = f" --config.dataset.path {self.data}" if self.data else ""
        devices = f"XLA_FLAGS=--xla_force_host_platform_device_count={self.devices} " if self.devices else ""
        return f"{devices}python {script} {' '.join(self.arguments)}{data} {place}"


def recipe(name: str, seeds: int, data: str = EUROSAT) -> Job:
    """Runs of a config file as it is."""
    return Job(name, "recipes", ("--config", f"configs/{name}.py"), seeds, data)


def study(name: str, table: str, *arguments: str, data: str = EUROSAT, devices: int | None = None) -> Job:
    """A study of the space of this name around eurosat_muon.py."""
    files = ("--config", "configs/eurosat_muon.py", "--space", f"configs/sweeps/{name}.py")
    return Job(name, table, (*files, *arguments), data=data, devices=devices)


def of_scenes(name: str, table: str, *arguments: str, seeds: int | None = None) -> Job:
    """Runs of scenes_tiny.py, or a study of the space of this name around it."""
    space = () if seeds else ("--space", f"configs/sweeps/{name}.py")
    return Job(name, table, ("--config", "configs/scenes_tiny.py", *space, *arguments), seeds, data=None)


def jobs() -> list[Job]:
    """All jobs, in the order in which they run."""
    tune = ("--pruner", "median", "--best_seeds", "3")
    to_90, to_85, to_70 = (("--config.train.target_accuracy", accuracy) for accuracy in ("0.9", "0.85", "0.7"))
    cifar10 = ("--config.dataset.name", "cifar10", "--config.augment.views", "flip")
    fine = ("--config.train.inner_steps", "45", "--config.train.outer_steps", "15")
    three = ("--seeds", "3")
    large_batch = ("--config.batch.size", "1024", "--config.train.inner_steps", "10")
    large_batch += ("--config.train.outer_steps", "4", "--config.schedule.warmup_updates", "10")
    return [
        recipe("eurosat_fast", 3),
        recipe("eurosat_muon", 3),
        recipe("eurosat", 3),
        recipe("eurosat_full_batch", 2),
        recipe("eurosat_full_batch_soap", 2),
        recipe("cifar10_fast", 3, CIFAR10),
        recipe("eurosat_best", 2),
        study("all_optimizers", "rates", *SMALL),
        study("tuned_optimizers", "optimizers", *three, *fine),
        study("knees", "knees", *tune, *to_90, *SMALL),
        study("knees_between", "knees", *tune, *to_90, *SMALL),
        study("knees_lamb", "knees_lamb", *tune, *to_85, *SMALL),
        study("cifar10_knees", "cifar10_knees", *tune, *to_70, *cifar10, data=CIFAR10),
        study("ablation", "ablation", *three, *SMALL),
        study("adascale", "adascale", *three, *SMALL),
        study("batch_growth", "batch_growth", *three, *SMALL),
        study("batch_schedules", "batch_schedules", *three, *SMALL),
        study("local_sgd", "local_sgd", *three, *SMALL, devices=8),
        of_scenes("scenes_tiny", "maps", seeds=3),
        of_scenes("scenes_unet", "maps", "--config.model.name", "unet_tiny", seeds=3),
        of_scenes("scenes_losses", "maps_losses", *three, "--config.train.outer_steps", "3"),
        of_scenes("scenes_optimizers", "maps_optimizers", *large_batch, "--best_seeds", "3"),
    ]


def bench_results(path: str, data: str, only: str | None) -> dict:
    """Runs all jobs, or some.

    Args:
      path: a folder for runs and studies.
      data: the folder with EuroSAT.zip and CIFAR-10-jpeg.zip.
      only: names of tables or jobs with commas between; None for all.
    Raises:
      UserError: no such table or job; data are missing; a run failed, with its message.
    """
    asked = jobs_named(only.split(",")) if only else jobs()
    places = {job.name: job.data_path(Path(data).resolve()) for job in asked}
    for place in places.values():
        if place and not place.exists():
            raise UserError(f"--data: {place} is missing")
    for job in asked:
        run_job(job, Path(path).resolve(), places[job.name])
        keep(job, rows_of(job, Path(path).resolve(), places[job.name]))
    return {"rows": pages.read_rows(ROWS)}


def jobs_named(names: list[str]) -> list[Job]:
    """The jobs of these names, and those of the tables of these names.

    Raises:
      UserError: there is no such table or job.
    """
    known = list(dict.fromkeys(name for job in jobs() for name in (job.table, job.name)))
    for name in names:
        if name not in known:
            raise UserError(f"--only: {name!r}; allowed: {', '.join(known)}")
    return [job for job in jobs() if job.table in names or job.name in names]


# ---- running ------------------------------------------------------------------------------------------


def run_job(job: Job, path: Path, data: Path | None) -> None:
    """Runs what has not ended.

    Raises:
      UserError: a run failed; its message.
    """
    options = ["--config.dataset.path", str(data)] if data else []
    if job.seeds is None:
        _run(job, ["sweep.py", *job.arguments, *options, "--study", str(path / job.name)])
        return
    for seed in range(job.seeds):
        folder = run_folder(job, seed, path)
        if not _has_ended(folder):
            options_of_seed = ["--config.seed", str(seed), "--workdir", str(folder)]
            _run(job, ["train.py", *job.arguments, *options, *options_of_seed])


def run_folder(job: Job, seed: int, path: Path) -> Path:
    """Of a recipe's run."""
    return path / job.name / f"seed_{seed}"


def _has_ended(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] in ("done", "diverged")


def _run(job: Job, arguments: list[str]) -> None:
    environment = dict(os.environ)
    if job.devices:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={job.devices}"
    command, last = [sys.executable, *arguments], f"{arguments[0]} ended without a word"
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as child:
        try:
            for line in child.stderr:
                sys.stderr.write(line)
                last = line.strip() or last
        except BaseException:  # this process is told to end
            child.terminate()
            raise
    if child.returncode:
        raise UserError(f"{job.name}: {last}")


# ---- rows -----------------------------------------------------------------------------------------------


def rows_of(job: Job, path: Path, data: Path | None) -> list[dict]:
    """What the runs of a job gave."""
    if job.seeds is None:
        found = load(path / job.name)
        settings = analysis.leaderboard(found)
        return [_row(job, setting.runs) | {"values": setting.values} for setting in settings]
    runs = [load(run_folder(job, seed, path)) for seed in range(job.seeds)]
    row = _row(job, runs)
    row["parameters"] = [run.summary.get("params_sha256") for run in runs]
    for before in pages.read_rows(ROWS):
        if before.get("parameters") == row["parameters"]:  # the test split is looked at once
            kept = {name: before[name] for name in ("test_score", "test_score_averaged")}
            return [row | kept]
    test = functools.partial(accuracy_on_test, data=data)
    row["test_score"] = [test(run) for run in runs]
    has_copies = any(row["val_score_averaged"])
    row["test_score_averaged"] = [test(run, averaged=True) if has_copies else None for run in runs]
    return [row]


def _row(job: Job, runs: list[Run]) -> dict:
    """What stands in docs/results.json of the seeds of one setting."""
    ended = max(run.path.stat().st_mtime for run in runs)
    last = [run.rows[-1] if run.rows else {} for run in runs]
    return {
        "table": job.table,
        "job": job.name,
        "command": job.command,
        "date": datetime.fromtimestamp(ended, UTC).strftime("%Y-%m-%d"),
        "commit": runs[0].summary.get("git_commit") or "unknown",
        "dtype": runs[0].field("model.dtype"),
        "device": f"{runs[0].summary.get('devices')} {runs[0].summary.get('device_kind')}",
        "status": [run.status for run in runs],
        "seeds": len(runs),
        "planned_updates": runs[0].field("train.inner_steps") * runs[0].field("train.outer_steps"),
        "batch_size": runs[0].batch_size,
        "updates": [row.get("step") for row in last],
        "images": [row.get("examples_seen") for row in last],
        "flops_per_image": runs[0].summary.get("flops_per_image"),
        "val_score": [row["val_score"] for row in last],
        "val_score_averaged": [row.get("val_accuracy_views") for row in last],
        "best_val_score": [run.best_score for run in runs],
        "val_depth_rmse": [row.get("val_depth_rmse") for row in last],
        "updates_to_0.9": [run.updates_to(0.9) for run in runs],
        "updates_to_target": [run.value("steps_to_target") for run in runs],
        "train_sec": [run.summary.get("train_sec") for run in runs],
    }


def accuracy_on_test(run: Run, data: Path | None, *, averaged: bool = False) -> float | None:
    """Of a run that ended well, from its best checkpoint; averaged over the copies that its validation takes."""
    if run.status != "done":
        return None
    from evaluate import evaluate  # JAX, which a table alone does not need

    copies = {}
    if averaged:
        copies = {"views": run.field("eval.view_average"), "shift": run.field("eval.shift_average")}
    overrides = {"dataset.path": str(data)} if data else {}
    return evaluate(run.path, "test", overrides=overrides, **copies)


def keep(job: Job, rows: list[dict]) -> None:
    """Puts the rows of a job in the place of those it had. A table that is whole goes into the page."""
    order = {known.name: place for place, known in enumerate(jobs())}
    others = [row for row in pages.read_rows(ROWS) if row["job"] in order and row["job"] != job.name]
    kept = sorted(others + rows, key=lambda row: order[row["job"]])
    pages.write_rows(ROWS, kept)
    if job.table in whole_tables(kept):
        of_table = [row for row in kept if row["table"] == job.table]
        pages.write_part(PAGE, job.table, result_tables.table_of(job.table, of_table))
        if job.table == "knees":
            knees.plot_knees(knees.tuned_of(of_table), PAGE.with_name("knees.png"))


def whole_tables(rows: list[dict]) -> set[str]:
    """The tables of which all jobs have rows."""
    measured = {row["job"] for row in rows}
    unfinished = {job.table for job in jobs() if job.name not in measured}
    return {job.table for job in jobs()} - unfinished


def print_results(result: dict) -> None:
    """Prints what is kept, a line for each row."""
    for row in result["rows"]:
        values = ", ".join(f"{field} {value}" for field, value in row.get("values", {}).items())
        accuracy = result_tables.spread(row["val_score"])
        print(f"{row['table']:12} {row['job']} {values}: {accuracy} at the last update")
    print(f"rows in {ROWS.relative_to(ROOT)}, tables in {PAGE.relative_to(ROOT)}")
