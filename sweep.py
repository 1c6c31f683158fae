"""Studies over optimizers, learning rates, batch sizes and seeds.

    python sweep.py --config configs/eurosat.py --space configs/sweeps/optimizers.py --study runs/studies/NAME
    python sweep.py --study runs/studies/NAME                       goes on where it was stopped or killed
    python sweep.py ... --sampler tpe --pruner median --trials 40   searches instead of trying a grid
    python sweep.py --study runs/studies/branches --branch RUN      how large a batch keeps up over a run
    python sweep.py ... --storage postgresql+psycopg://HOST/DB      several machines share one study

A trial is a run of train.py in STUDY/trials/SETTING-SEED, with all that a run has; a killed one goes on from its
checkpoints. Started several times, the processes share the trials.
"""

import contextlib
import dataclasses
import logging
import re
import sys
from pathlib import Path

from absl import flags
from ml_collections import config_dict

import augment
import model as models
import train
from build import ProgramCache
from largebatch import cli, terminal
from largebatch.buckets import bucket
from largebatch.hardware.chips import AUTO
from largebatch.hosts import collectives, preemption
from largebatch.runs import reader
from largebatch.runs.folder import RunFolder, writing
from largebatch.runs.load import load
from largebatch.studies import analysis, critical_batch
from largebatch.studies.database import is_sqlite_file_in, without_password
from largebatch.studies.display import SweepTable
from largebatch.studies.queue import Counts
from largebatch.studies.search import PRUNERS, SAMPLERS
from largebatch.studies.study import (
    Study,
    StudyOptions,
    adopt_recorded_config,
    define_study,
)
from largebatch.studies.worker import Worker, open_queue
from largebatch.util import UserError, replacing

FLAGS = flags.FLAGS
log = logging.getLogger("largebatch")


# ---- the study --------------------------------------------------------------------------------------


def read_recorded(config: config_dict.ConfigDict) -> dict:
    """The folder's study.json, {} where there is none. Without a --config, `config` becomes the one that it says.

    Raises:
      UserError: there is none, and no space is given to start one; or it is damaged.
    """
    path = Path(FLAGS.study)
    recorded = RunFolder(path).read("study.json") or {}
    if not recorded and not FLAGS.space and not FLAGS.branch:
        raise UserError(f"--study: no study in {path}; give --space FILE to start one, or --branch RUN")
    if FLAGS.space and FLAGS.branch:
        raise UserError("--space and --branch: both given; allowed: one of them")
    config_given = any(argument.startswith("--config") for argument in sys.argv)
    if FLAGS.branch and config_given:
        raise UserError("--config: given; allowed with --branch, which takes the config of its run: none")
    if FLAGS.branch and not recorded:
        run = Path(FLAGS.branch)
        adopt_recorded_config(config, RunFolder(run).read_config(), run / "config.json")
    if recorded and not config_given:
        adopt_recorded_config(config, recorded.get("config"), path / "study.json")
        if recorded.get("dtype_is_auto"):  # asked again, so that a machine that would choose another says so
            config.model.dtype = AUTO
    return recorded


def read_study(config: config_dict.ConfigDict, recorded: dict, *, dtype_is_auto: bool) -> Study:
    """The study that the flags ask for; what they leave out is as the folder's study.json, `recorded`, says.

    Args:
      config: with its dtype settled.
      dtype_is_auto: whether it was asked for as "auto".
    Raises:
      UserError: a flag, the space or a point of it is not allowed; or the folder holds another study.
    """
    path = Path(FLAGS.study)
    study = define_study(
        path,
        config,
        read_options(recorded),
        recorded,
        space_given=FLAGS["space"].present,
        dtype_is_auto=dtype_is_auto,
        models=models.MODELS,
    )
    if recorded and not FLAGS["storage"].present and not is_sqlite_file_in(study.storage, path):
        log.warning("uses the storage %s, which %s names", without_password(study.storage), path)
    return study


def read_options(recorded: dict) -> StudyOptions:
    """The options by the flags; where one is not given, as the study.json `recorded` has it, if there is one."""
    options = {}
    for field in dataclasses.fields(StudyOptions):
        flag = FLAGS[field.name]
        # study.json keeps the content of the space under "space", and its file beside it.
        recorded_name = "space_file" if field.name == "space" else field.name
        use_recorded = not flag.present and recorded_name in recorded
        options[field.name] = recorded[recorded_name] if use_recorded else flag.value
    return StudyOptions(**options)


def whole_numbers(name: str, help_text: str) -> None:
    """Defines a flag whose value is a tuple of whole numbers, with commas between, or None."""

    class Parser(flags.ArgumentParser):
        def parse(self, argument):
            if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", argument):
                raise ValueError(f"{argument!r}; allowed: whole numbers with commas between")
            return [int(number) for number in argument.split(",")]

    flags.DEFINE(Parser(), name, None, help_text)


# ---- the story --------------------------------------------------------------------------------------


def main(config: config_dict.ConfigDict) -> int:
    """Runs the study; returns the exit code."""
    if not FLAGS.study:
        raise UserError("--study: missing; allowed: the study's folder, runs/studies/NAME")
    if bucket.is_url(FLAGS.study):
        raise UserError(f"--study: {FLAGS.study}; allowed: a folder of this machine, or one that several mount")
    cli.use_compilation_cache(config.augment.cache_dir)  # before a study.json may name another
    recorded = read_recorded(config)
    dtype_is_auto = config.model.dtype == AUTO
    typed, _ = cli.start(config, models.MODELS, lambda: recorded.get("config"), of="study")
    config.model.dtype = typed.model.dtype
    study = read_study(config, recorded, dtype_is_auto=dtype_is_auto)
    if not any(field.startswith("dataset.") for field in study.search.space):
        augment.prepare_cache(typed)  # bad data are found before anything is written
    preemption.answer_signals()
    preemption.training_begins()  # what a trial has done goes back to the queue, however little it is
    with open_queue(study) if collectives.is_primary() else contextlib.nullcontext() as queue:
        counts = (lambda: queue.counts) if queue else Counts
        table = SweepTable(study.path.name, study.kind, counts, enabled=collectives.is_primary())
        worker = Worker(study, queue, table, train=train.train_and_evaluate, cache=ProgramCache())
        try:
            with table, collectives.named_collective_errors():
                worker.run()
        except preemption.Stopped as stopped:
            log.info("%s; start again with --study %s to go on", stopped, study.path)
            return stopped.exit_code
    if collectives.is_primary():
        print_results(study)
    return 0


def print_results(study: Study) -> None:
    """The leaderboard, or of branches the critical batch, read back from the folder."""
    trials = load(study.path)
    for problem in trials.problems:
        log.warning("%s", problem)
    if not study.description.get("branch_points"):
        terminal.print_table(*analysis.leaderboard_rows(trials))
        return
    for run in critical_batch.left_out(trials):
        log.warning("%s: %s", run.path, critical_batch.LEFT_OUT)
    found = critical_batch.critical_batches(trials)
    if not found:
        log.warning("%s: no point whose own batch and another have ended: no critical batch", study.path)
        return
    terminal.print_table(*critical_batch.rows(found))
    trace = study.path / "batch_warmup.csv"
    lines = ["step,batchsize", *(f"{s.first_update},{s.batch_size}" for s in critical_batch.batch_warmup(found))]
    with writing(study.path), replacing(trace) as temporary:
        temporary.write_text("\n".join(lines) + "\n")
    log.info("%s: batch.trace of a run that follows it, with batch.hold_last", trace)


if __name__ == "__main__":
    cli.path_flag("study", None, "Study folder, e.g. runs/studies/NAME.")
    cli.path_flag("space", None, "Search space, e.g. configs/sweeps/optimizers.py; not needed to go on.")
    flags.DEFINE_integer("trials", None, "Searched runs of the study in total; the whole grid if left out.", 1)
    flags.DEFINE_integer("seeds", 1, "Runs of each setting, which differ by seed.", 1)
    flags.DEFINE_integer(
        "best_seeds", 0, "Then: seeds in all of the best setting of each batch.size, else optimizer.", 0
    )
    flags.DEFINE_enum("sampler", "grid", SAMPLERS, "How settings are chosen.")
    flags.DEFINE_enum("pruner", "none", sorted(PRUNERS), "Ends trials early that others leave behind.")
    flags.DEFINE_enum(
        "objective",
        None,
        sorted(reader.OBJECTIVES),
        "Default: accuracy, or steps to train.target_accuracy.",
    )
    flags.DEFINE_integer("study_seed", 0, "Of the sampler.", 0)
    flags.DEFINE_string("storage", None, "Database URL; default is SQLite in the study folder.")
    flags.DEFINE_integer("heartbeat_sec", 20, "A trial without a sign for 3 times as long is taken for dead.", 1)
    cli.path_flag("branch", None, "Run folder: find how large a batch keeps up, by branches of this run.")
    flags.DEFINE_integer("branch_images", 16_384, "That a branch trains on.", 1)
    whole_numbers("branch_sizes", "Batch sizes of branches; default: the run's own times powers of two.")
    whole_numbers("branch_steps", "Updates of the run after which branches begin; default: 6, spread evenly.")
    cli.run_script(main, models.MODELS)
