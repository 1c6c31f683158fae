"""bench.py results: the tables of docs/results.md, measured anew.

Every job is a recipe, run with several seeds, or a study of sweep.py. Jobs run one after the other. What was killed
is resumed when the command is given again; what has ended is not run again. After each job its rows are put into
docs/results.json. A table goes into the page once all of its jobs have ended; until then the older one stays.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.result_tables import spread, table_of
from largebatch import util
from largebatch.cli import ROOT
from largebatch.runs.load import load
from largebatch.runs.reader import Run
from largebatch.studies import analysis
from largebatch.util import UserError

ROWS, PAGE = ROOT / "docs" / "results.json", ROOT / "docs" / "results.md"
EUROSAT, CIFAR10 = "EuroSAT.zip", "CIFAR-10-jpeg.zip"


@dataclass(frozen=True)
class Job:
    """A part of a table: a recipe, run with several seeds, or a study.

    Attributes:
      more: arguments of train.py or sweep.py, beside those that say config, space, data and results.
      seeds: runs of a recipe; None for a study, whose arguments say it.
      config: name in configs/; where it is "", the recipe's own name, or eurosat_muon for studies.
      data: file of the folder of data; "" for synthetic images.
      devices: number of simulated devices; 0 for those there are.
    """

    name: str
    table: str
    more: str = ""
    seeds: int | None = None
    config: str = ""
    data: str = EUROSAT
    devices: int = 0

    @property
    def arguments(self) -> list[str]:
        """Return the arguments without those that say where data and results are."""
        config = self.config or ("eurosat_muon" if self.seeds is None else self.name)
        space = f" --space configs/sweeps/{self.name}.py" if self.seeds is None else ""
        return f"--config configs/{config}.py{space} {self.more}".split()

    @property
    def command(self) -> str:
        """Return the command as a user would give it; S stands for the seed."""
        script, place = "sweep.py", f"--study runs/studies/{self.name}"
        if self.seeds is not None:
            script, place = "train.py", f"--config.seed S --workdir runs/{self.name}-S"
        data = f" --config.dataset.path {self.data}" if self.data else ""
        devices = f"XLA_FLAGS=--xla_force_host_platform_device_count={self.devices} " if self.devices else ""
        return f"{devices}python {script} {' '.join(self.arguments)}{data} {place}"


SMALL = "--config.dataset.image_size 32"
THREE = f"--seeds 3 {SMALL}"
TO = "--pruner median --best_seeds 3 --config.train.target_accuracy"
MIRRORED = "--config.dataset.name cifar10 --config.augment.views flip"
FINE = "--seeds 3 --config.train.inner_steps 45 --config.train.outer_steps 15"
LARGE = "--config.batch.size 1024 --config.train.inner_steps 10 --config.train.outer_steps 4"
LARGE += " --config.schedule.warmup_steps 10 --best_seeds 3"
SCENES = {"config": "scenes_tiny", "data": ""}
JOBS = [  # in the order in which they run
    Job("eurosat_fast", "recipes", seeds=3),
    Job("eurosat_muon", "recipes", seeds=3),
    Job("eurosat", "recipes", seeds=3),
    Job("eurosat_full_batch", "recipes", seeds=2),
    Job("eurosat_full_batch_soap", "recipes", seeds=2),
    Job("cifar10_fast", "recipes", seeds=3, data=CIFAR10),
    Job("eurosat_best", "recipes", seeds=2),
    Job("tuned_optimizers", "optimizers", FINE),
    Job("critical_batch", "critical_batch", f"{TO} 0.9 {SMALL}"),
    Job("critical_batch_between", "critical_batch", f"{TO} 0.9 {SMALL}"),
    Job("critical_batch_lamb", "critical_batch_lamb", f"{TO} 0.85 {SMALL}"),
    Job("cifar10_critical_batch", "cifar10_critical_batch", f"{TO} 0.7 {MIRRORED}", data=CIFAR10),
    Job("ablation", "ablation", THREE),
    Job("adascale", "adascale", THREE),
    Job("batch_growth", "batch_growth", THREE),
    Job("batch_schedules", "batch_schedules", THREE),
    Job("local_sgd", "local_sgd", THREE, devices=8),
    Job("scenes_tiny", "maps", seeds=3, **SCENES),
    Job("scenes_unet", "maps", "--config.model.name unet_tiny", seeds=3, **SCENES),
    Job("scenes_losses", "maps_losses", "--seeds 3 --config.train.outer_steps 3", **SCENES),
    Job("scenes_optimizers", "maps_optimizers", LARGE, **SCENES),
]


def bench_results(path: str, data: str, only: str | None) -> dict:
    """Run all jobs, or some.

    Args:
      path: a folder for runs and studies.
      data: the folder with EuroSAT.zip and CIFAR-10-jpeg.zip.
      only: names of tables or jobs with commas between; None for all.
    Raises:
      UserError: no such table or job; data are missing; a run failed.
    """
    known, names = dict.fromkeys(name for job in JOBS for name in (job.table, job.name)), only and only.split(",")
    for name in names or ():
        if name not in known:
            raise UserError(f"--only: {name!r}; allowed: {', '.join(known)}")
    jobs = [job for job in JOBS if not names or job.table in names or job.name in names]
    for job in jobs:
        if not (Path(data) / job.data).exists():
            raise UserError(f"--data: {Path(data) / job.data} is missing")
    for job in jobs:
        file = (Path(data) / job.data).resolve() if job.data else None
        run_job(job, Path(path).resolve() / job.name, file)
        keep(job, rows_of(job, Path(path).resolve() / job.name, file))
    return {"rows": read_rows()}


def run_job(job: Job, folder: Path, data: Path | None) -> None:
    """Run what has not ended.

    Raises:
      UserError: a run failed.
    """
    options = ["--config.dataset.path", str(data)] if data else []
    if job.seeds is None:
        _run(job, ["sweep.py", *job.arguments, *options, "--study", str(folder)])
        return
    for seed in range(job.seeds):
        summary = folder / f"seed_{seed}" / "summary.json"
        if not summary.exists() or json.loads(summary.read_text())["status"] not in ("done", "diverged"):
            place = ["--config.seed", str(seed), "--workdir", str(summary.parent)]
            _run(job, ["train.py", *job.arguments, *options, *place])


def _run(job: Job, arguments: list[str]) -> None:
    environment = dict(os.environ)
    if job.devices:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={job.devices}"
    code = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment).returncode
    if code:
        raise UserError(f"{job.name}: {arguments[0]} ended with status {code}; its messages are above")


# ---- rows -----------------------------------------------------------------------------------------------


def rows_of(job: Job, folder: Path, data: Path | None) -> list[dict]:
    """Return the rows of a job: one for a recipe, one for each setting of a study, best first."""
    if job.seeds is None:
        return [_row(job, one.runs) | {"values": one.values} for one in analysis.leaderboard(load(folder))]
    runs = [load(folder / f"seed_{seed}") for seed in range(job.seeds)]
    row = _row(job, runs)
    row["parameters"] = [run.summary.get("params_sha256") for run in runs]
    for before in read_rows():
        if before.get("parameters") == row["parameters"]:  # the test split is looked at once
            return [row | {name: before[name] for name in ("test_score", "test_score_averaged")}]
    row["test_score"] = [score_on_test(run, data, averaged=False) for run in runs]
    averages = any(row["val_score_averaged"])
    row["test_score_averaged"] = [score_on_test(run, data, averaged=True) if averages else None for run in runs]
    return [row]


def _row(job: Job, runs: list[Run]) -> dict:
    """Return the row of the seeds of one setting."""
    first, last = runs[0], [run.rows[-1] if run.rows else {} for run in runs]
    ended = datetime.fromtimestamp(max(run.path.stat().st_mtime for run in runs), UTC)
    return {
        "table": job.table,
        "job": job.name,
        "command": job.command,
        "date": ended.strftime("%Y-%m-%d"),
        "commit": first.summary.get("git_commit") or "unknown",
        "dtype": first.field("model.dtype"),
        "device": f"{first.summary.get('devices')} {first.summary.get('device_kind')}",
        "status": [run.status for run in runs],
        "seeds": len(runs),
        "planned_steps": first.field("train.inner_steps") * first.field("train.outer_steps"),
        "batch_size": first.batch_size,
        "steps": [row.get("step") for row in last],
        "images": [row.get("examples_seen") for row in last],
        "flops_per_image": first.summary.get("flops_per_image"),
        "val_score": [row.get("val_score") for row in last],
        "val_score_averaged": [row.get("val_accuracy_views") for row in last],
        "best_val_score": [run.best_score for run in runs],
        "val_depth_rmse": [row.get("val_depth_rmse") for row in last],
        "steps_to_0.9": [run.steps_to(0.9) for run in runs],
        "steps_to_target": [run.value("steps_to_target") for run in runs],
        "train_sec": [run.summary.get("train_sec") for run in runs],
    }


def score_on_test(run: Run, data: Path | None, *, averaged: bool) -> float | None:
    """Score a run that ended well on the test split, by its best checkpoint, perhaps over copies of the images."""
    if run.status != "done":
        return None
    from evaluate import evaluate  # JAX, which a table alone does not need

    copies = {"views": run.field("eval.view_average"), "shift": run.field("eval.shift_average")} if averaged else {}
    return evaluate(run.path, "test", overrides={"dataset.path": str(data)} if data else {}, **copies)


def read_rows() -> list[dict]:
    """Read the rows that are kept; none where there is no file."""
    return json.loads(ROWS.read_text()) if ROWS.exists() else []


def keep(job: Job, rows: list[dict]) -> None:
    """Put the rows of a job in the place of those it had; a table that is whole goes into the page.

    Raises:
      UserError: the page has no place for the table.
    """
    order = {known.name: place for place, known in enumerate(JOBS)}
    others = [row for row in read_rows() if row["job"] in order and row["job"] != job.name]
    kept = sorted(others + rows, key=lambda row: order[row["job"]])
    lines = ",\n".join(json.dumps(row) for row in kept)
    write(ROWS, f"[\n{lines}\n]\n")
    if job.table not in whole_tables(kept):
        return
    begin, end = f"<!-- {job.table}: begin -->", f"<!-- {job.table}: end -->"
    before, found, rest = PAGE.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise UserError(f"{PAGE}: no place for a table: {begin} and {end} are missing")
    table = table_of(job.table, [row for row in kept if row["table"] == job.table])
    write(PAGE, f"{before}{begin}\n\n{table}\n{end}{after}")


def write(path: Path, text: str) -> None:
    """Write a file, all of it or nothing."""
    with util.replacing(path) as temporary:
        temporary.write_text(text)


def whole_tables(rows: list[dict]) -> set[str]:
    """Return the names of the tables of which all jobs have rows."""
    measured = {row["job"] for row in rows}
    return {job.table for job in JOBS} - {job.table for job in JOBS if job.name not in measured}


def print_results(result: dict) -> None:
    """Print what is kept, a line for each row."""
    for row in result["rows"]:
        values = ", ".join(f"{field} {value}" for field, value in row.get("values", {}).items())
        print(f"{row['table']:12} {row['job']} {values}: {spread(row['val_score'])} at the last step")
    print(f"rows in {ROWS.name}, tables in {PAGE.name}")
