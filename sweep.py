"""Studies over optimizers, learning rates, batch sizes and seeds.

    python sweep.py --config configs/eurosat.py --space configs/sweeps/optimizers.py --study runs/studies/NAME
    python sweep.py --study runs/studies/NAME                       goes on where it was stopped or killed
    python sweep.py --study runs/studies/NAME --workers 4           in 4 processes, on 4 GPUs where there are 4
    python sweep.py ... --sampler tpe --pruner median --trials 40   searches instead of trying a grid
    python sweep.py --study runs/studies/branches --branch RUN      how large a batch keeps up over a run
    python sweep.py ... --storage postgresql+psycopg://HOST/DB      several machines share one study

A trial is a run of train.py in STUDY/trials/SETTING-SEED, with all that a run has; a killed one goes on from its
checkpoints. Started several times, the processes share the trials.
"""

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
from largebatch.config import rules
from largebatch.hardware.chips import AUTO
from largebatch.hosts import collectives, preemption
from largebatch.runs import reader
from largebatch.runs.folder import RunFolder
from largebatch.runs.load import load
from largebatch.studies import analysis, critical_batch
from largebatch.studies.critical_batch import Branches
from largebatch.studies.queue import PRUNERS, TrialQueue
from largebatch.studies.space import SAMPLERS, Space, read_space
from largebatch.studies.study import SPACE_FILE, Study, StudyOptions, define_study, refuse_another
from largebatch.studies.worker import Worker
from largebatch.studies.workers import run_workers
from largebatch.util import UserError, replacing, writing

FLAGS = flags.FLAGS
log = logging.getLogger("largebatch")
# Options of a study of branches: with others some branches would have no loss to compare.
BRANCH_OPTIONS = {"sampler": "grid", "pruner": "none", "best_seeds": 0, "trials": None}


# ---- the study --------------------------------------------------------------------------------------


def read_recorded(config: config_dict.ConfigDict) -> dict:
    """Return the folder's study.json, {} where there is none. Without --config, `config` becomes the one in it.

    Raises:
      UserError: there is none, and no space is given to start one.
    """
    path = Path(FLAGS.study)
    recorded = RunFolder(path).read("study.json") or {}
    if not recorded and not FLAGS.space and not FLAGS.branch:
        raise UserError(f"--study: no study in {path}; give --space FILE to start one, or --branch RUN")
    if FLAGS.space and (FLAGS.branch or recorded.get("branches")):
        raise UserError("--space: given; allowed for branches of a run: none")
    config_given = any(argument.startswith("--config") for argument in sys.argv)
    if FLAGS.branch and config_given:
        raise UserError("--config: given; allowed with --branch, which takes the config of its run: none")
    if FLAGS.branch and not recorded:
        trunk = RunFolder(FLAGS.branch).read_config()
        if trunk is None:
            raise UserError(f"--branch: {FLAGS.branch} is no run folder: it has no config.json")
        adopt(config, trunk)
    if recorded and not config_given:
        adopt(config, recorded["config"])
        if recorded.get("dtype_is_auto"):  # asked again, so that a machine that would choose another says so
            config.model.dtype = AUTO
    return recorded


def adopt(config: config_dict.ConfigDict, recorded: dict) -> None:
    """Set `config` to a recorded one, but for the coordinator and hosts, which the user names each time."""
    with config.unlocked():
        config.update(config_dict.ConfigDict(recorded | {"devices": {"platform": recorded["devices"]["platform"]}}))


def read_study(config: config_dict.ConfigDict, recorded: dict, *, dtype_is_auto: bool) -> Study:
    """Return the study that the flags ask for; what they leave out is as the folder's study.json, `recorded`, says.

    Args:
      config: with its dtype settled.
      dtype_is_auto: True if it was asked for as "auto".
    Raises:
      UserError: a flag, the space or a setting of it is not allowed; or the folder holds another study.
    """
    path = Path(FLAGS.study)
    given = {}
    for field in dataclasses.fields(StudyOptions):
        flag = FLAGS[field.name]
        given[field.name] = flag.value if flag.present else recorded.get(field.name, flag.value)
    options = StudyOptions(**given)
    description: dict = {"dtype_is_auto": dtype_is_auto}
    if FLAGS.branch or recorded.get("branches"):
        for name, allowed in BRANCH_OPTIONS.items():
            if getattr(options, name) != allowed:
                raise UserError(f"--{name}: {getattr(options, name)}; allowed with --branch: {allowed}")
        if recorded.get("branches"):  # the run may have trained further since
            branches = Branches(**recorded["branches"])
        else:
            branches = Branches.of_run(FLAGS.branch, FLAGS.branch_images, FLAGS.branch_sizes, FLAGS.branch_steps)
        description["branches"] = dataclasses.asdict(branches)
        space = Space(branches.suggest, rules.rules(models.MODELS), branches.derive)
    else:
        copy = path / SPACE_FILE
        file = Path(FLAGS.space) if FLAGS.space else copy
        if recorded and file.is_file() and copy.is_file() and file.read_bytes() != copy.read_bytes():
            raise UserError(f"--space: {file} is not {copy}, of which the study is; allowed: the same, or none")
        space = read_space(file, rules.rules(models.MODELS))
    study = define_study(path, config, options, space, models.MODELS, **description)
    if recorded:
        refuse_another(path, study.description, recorded)
    return study


def open_queue(study: Study) -> TrialQueue:
    """Open the study's trials in its database; then write study.json and the copy of the space file.

    Raises:
      UserError: the database cannot be opened, or holds another study of this name.
    """
    if not study.options.storage:
        with writing(study.path):
            study.path.mkdir(parents=True, exist_ok=True)
    queue = TrialQueue(study)
    folder = RunFolder(study.path)
    if FLAGS.space:
        content = Path(FLAGS.space).read_bytes()
        with writing(study.path):
            study.path.mkdir(parents=True, exist_ok=True)
            with replacing(study.path / SPACE_FILE) as temporary:
                temporary.write_bytes(content)
    if folder.read("study.json") != study.description:
        folder.write_json("study.json", study.description)
    return queue


# ---- the way of a study -----------------------------------------------------------------------------


def main(config: config_dict.ConfigDict) -> int:
    """Run the study; return the exit code."""
    if not FLAGS.study:
        raise UserError("--study: missing; allowed: the study's folder, runs/studies/NAME")
    if bucket.is_url(FLAGS.study):
        raise UserError(f"--study: {FLAGS.study}; allowed: a folder of this machine, or one that several mount")
    recorded = read_recorded(config)
    if FLAGS.workers > 1:
        if config.devices.num_hosts not in (None, 1):
            raise UserError(f"--workers: {FLAGS.workers}; allowed on several hosts, which share each trial: 1")
        code = run_workers(FLAGS.workers, Path(FLAGS.study))
        if code == 0:
            print_results(Path(FLAGS.study))
        return code
    dtype_is_auto = config.model.dtype == AUTO
    typed, _ = cli.start(config, models.MODELS, lambda: recorded.get("config"), of="study")
    config.model.dtype = typed.model.dtype
    study = read_study(config, recorded, dtype_is_auto=dtype_is_auto)
    if not any(field.startswith("dataset.") for field in study.distributions):
        augment.prepare_cache(typed)  # bad data are found before anything is written
    preemption.answer_signals()
    preemption.training_begins()  # what a trial has done goes back to the queue, however little it is
    queue = open_queue(study) if collectives.is_primary() else None
    try:
        with collectives.named_collective_errors():
            Worker(study, queue, train=train.train_and_evaluate, cache=ProgramCache()).run()
    except preemption.Stopped as stopped:
        log.info("%s; start again with --study %s to go on", stopped, study.path)
        return stopped.exit_code
    if collectives.is_primary() and FLAGS.worker is None:
        print_results(study.path)
    return 0


def print_results(path: Path) -> None:
    """Print the leaderboard, or of branches the critical batch, read back from the folder."""
    study = load(path)
    for problem in study.problems:
        log.warning("%s", problem)
    if not study.description.get("branches"):
        terminal.print_table(*analysis.leaderboard_rows(study))
        return
    found = critical_batch.critical_batches(study)
    if not found:
        log.warning("%s: no point whose own batch and another have ended: no critical batch", path)
        return
    terminal.print_table(*critical_batch.rows(found))
    trace = path / "batch_warmup.csv"
    lines = ["step,batchsize", *(f"{step},{size}" for step, size in critical_batch.batch_warmup(found))]
    with writing(path), replacing(trace) as temporary:
        temporary.write_text("\n".join(lines) + "\n")
    log.info("%s: batch.trace of a run that follows it, with batch.hold_last", trace)


def whole_numbers(name: str, help_text: str) -> None:
    """Define a flag whose value is a tuple of whole numbers, with commas between, or None."""

    class Parser(flags.ArgumentParser):
        def parse(self, argument):
            if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", argument):
                raise ValueError(f"{argument!r}; allowed: whole numbers with commas between")
            return [int(number) for number in argument.split(",")]

    flags.DEFINE(Parser(), name, None, help_text)


if __name__ == "__main__":
    cli.path_flag("study", None, "Study folder, e.g. runs/studies/NAME.")
    cli.path_flag("space", None, "Search space, e.g. configs/sweeps/optimizers.py; not needed to go on.")
    flags.DEFINE_integer("workers", 1, "Processes on this machine, which share its GPUs or TPU chips.", 1)
    flags.DEFINE_integer("worker", None, "Set by --workers: number of this process among them.", 0)
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
    flags.DEFINE_integer("study_seed", 0, "Seed of the sampler.", 0)
    flags.DEFINE_string("storage", None, "Database URL; default is SQLite in the study folder.")
    flags.DEFINE_integer("heartbeat_sec", 20, "A trial without a sign for 3 times as long is taken for dead.", 1)
    cli.path_flag("branch", None, "Run folder: find how large a batch keeps up, by branches of this run.")
    flags.DEFINE_integer("branch_images", 16_384, "Images that a branch trains on.", 1)
    whole_numbers("branch_sizes", "Batch sizes of branches; default: the run's own times powers of two.")
    whole_numbers("branch_steps", "Steps of the run after which branches begin; default: 6, spread evenly.")
    cli.run_script(main, models.MODELS)
