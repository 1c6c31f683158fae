"""Studies over optimizers, learning rates, batch sizes and seeds.

    python sweep.py --config configs/eurosat.py --space configs/sweeps/optimizers.py --study runs/studies/NAME
    python sweep.py --study runs/studies/NAME                       goes on where it was stopped or killed
    python sweep.py ... --sampler tpe --pruner median --trials 40   searches instead of trying a grid
    python sweep.py ... --storage postgresql://HOST/DB              several machines share one study

A trial is a run of train.py in STUDY/trials/SETTING-SEED, with all that a run has; a killed one goes on from its
checkpoints. Started several times, the processes share the trials.
"""

import contextlib
import functools
import logging
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from absl import flags
from ml_collections import config_dict

import augment
import model as models
import train
from experiment import Shared, make_plan, make_schedule, optimizer_numbers, plan_length
from largebatch import cli, terminal
from largebatch.errors import BadSetting, UserError
from largebatch.hosts import collectives, preemption
from largebatch.runs import reader
from largebatch.runs.display import Reporter
from largebatch.runs.folder import InUse, RunFolder, writing
from largebatch.runs.progress import Diverged, Pruned
from largebatch.studies import analysis, packing, search
from largebatch.studies import study as study_of
from largebatch.studies.display import SweepTable
from largebatch.studies.queue import Claimed, TrialQueue, open_storage, without_password
from largebatch.studies.study import Study

log = logging.getLogger("largebatch")

# Flags that study.json keeps, so that they need not be given again.
OPTIONS = [
    "space",
    "trials",
    "seeds",
    "best_seeds",
    "sampler",
    "pruner",
    "objective",
    "study_seed",
    "storage",
    "heartbeat_sec",
]
MAX_FAILURES = 3  # in a row: then something is wrong that is not the trials'
POLL_SEC = 2.0


def read_study(config: config_dict.ConfigDict) -> tuple[Study, dict]:
    """The study that the flags ask for, and its study.json; one that is there must be the same.

    Raises:
      UserError: a flag, the space or a point of it is not allowed; or the folder holds another study.
    """
    path = Path(flags.FLAGS.study).expanduser()
    there = RunFolder(path).read("study.json") or {}
    if not there and not flags.FLAGS.space:
        raise UserError(f"--study: no study in {path}; give --space FILE to start one")
    if there and not any(arg.startswith("--config") for arg in sys.argv):
        study_of.take_over(config, there.get("config"), path)
    chosen = {name: option(name, there) for name in OPTIONS}
    shown = chosen["storage"] and without_password(chosen["storage"])
    space_given = flags.FLAGS["space"].present
    how = {"space_given": space_given, "networks": models.OPTIONS}
    found, description = study_of.read(path, config, chosen, shown, there, **how)
    if there and not flags.FLAGS["storage"].present and not study_of.is_file_in(found.storage, path):
        log.warning("uses the storage %s, which %s names", without_password(found.storage), path)
    if flags.FLAGS.pack and found.objective == "sec_to_target":
        raise UserError("--pack: its runs wait for each other; allowed with --objective sec_to_target: no --pack")
    return found, description


def option(name: str, there: dict):
    """A flag; where it is not given, what the study that is there was started with."""
    flag, kept = flags.FLAGS[name], {"space": "space_file"}.get(name, name)
    return flag.value if flag.present or kept not in there else there[kept]


def open_queue(study: Study, description: dict) -> TrialQueue:
    """The study's trials in its database; once that is there, study.json is written too."""
    if study.storage.startswith(f"sqlite:///{study.path.resolve()}"):
        with writing(study.path):
            study.path.mkdir(parents=True, exist_ok=True)
    heartbeat_sec = description["heartbeat_sec"]
    storage = open_storage(study.storage, heartbeat_sec)
    queue = TrialQueue(
        storage,
        study.path.name,
        study_of.OBJECTIVES[study.objective],
        search.PRUNERS[study.pruner](),
        study.options,
        heartbeat_sec,
        {name: value for name, value in study_of.identity(description).items() if name != "storage"},
    )
    folder = RunFolder(study.path)
    if folder.read("study.json") != description:
        folder.write_json("study.json", description)
    return queue


# ---- trials -----------------------------------------------------------------------------------------


class Order(NamedTuple):
    """One trial to run, as every host gets it."""

    name: str
    setting: int
    seed: int
    values: dict


class TrialReporter(Reporter):
    """Tells the sweep's table and the queue how a trial goes; ends it where the pruner says so."""

    def __init__(self, study: Study, order: Order, claimed: Claimed | None, queue, table):
        self._study, self._order, self._claimed, self._queue, self._table = study, order, claimed, queue, table

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def start(self, total_updates: int, step: int, headline: str) -> None:
        """Shows the trial; tells the queue what a process before saw of it."""
        self._table.start(self._order.name, self._order.values, total_updates, step)
        log.debug("%s", headline)
        if self._study.pruner != "none":
            folder = self._study.path / "trials" / self._order.name
            self._tell(reader.read_run(folder).rows if self._claimed else [])

    def at(self, step: int, images_per_sec: float) -> None:
        """Moves the trial's bar."""
        self._table.at(self._order.name, step, images_per_sec)

    def row(self, row: dict, outer_steps: int) -> None:
        """Asks the pruner.

        Raises:
          resume.Pruned: on all hosts.
        """
        self._table.row(self._order.name, row)
        if self._study.pruner != "none" and self._tell([row]) and row["outer"] < outer_steps:
            raise Pruned(f"pruned after outer loop {row['outer']} ({self._study.pruner})")

    def results(self, summary: dict, workdir: str) -> None:
        """The table shows them."""

    def _tell(self, rows: list[dict]) -> bool:
        """Tells the queue these rows of the trial; whether the pruner would then end it. All hosts come here.

        Raises:
          preemption.Stopped: a signal came while the database was away; on all hosts.
        """
        pruned, signal = False, 0
        try:
            for row in rows if self._claimed else ():
                pruned = self._queue.report(self._claimed, row["val_accuracy"], row["outer"])
        except preemption.Stopped as stopped:
            signal = stopped.number
        pruned, signal = collectives.json_from_primary([bool(pruned), signal])
        if signal:
            raise preemption.Stopped(signal)
        return pruned


def train_trial(study: Study, order: Order, shared, reporter: TrialReporter) -> dict:
    """Trains one trial, from where it stands; returns its summary, or its `error` if its setting does not work.

    Raises:
      metrics.InUse: another process trains it.
      preemption.Stopped: a signal came.
    """
    folder = RunFolder(study.path / "trials" / order.name)
    trial = {"index": order.setting, "seed": order.seed, "setting": order.values, "error": None}
    try:
        config = collectives.agreed(lambda: study.config_of(order.values, order.seed))
        collectives.agreed(lambda: folder.write_json("trial.json", trial), collectives.is_primary())
        with contextlib.suppress(Diverged, Pruned):
            train.train_and_evaluate(config, str(folder.path), shared=shared, report=reporter)
    except (BadSetting, jax.errors.JaxRuntimeError) as error:
        return record_failure(folder, trial, error)
    return (folder.read("summary.json") if collectives.is_primary() else None) or {"status": "done"}


def record_failure(folder: RunFolder, trial: dict, error: Exception) -> dict:
    """Notes that a setting does not work; raises any error that is not the setting's own."""
    if not isinstance(error, BadSetting) and "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    text = str(error).splitlines()[0]
    collectives.agreed(lambda: folder.write_json("trial.json", trial | {"error": text}), collectives.is_primary())
    return {"status": "failed", "error": text}


# ---- the loop ---------------------------------------------------------------------------------------


class Sweep:
    """Runs trials until none is left. Host 0 has the queue, the others do as it says."""

    def __init__(self, study: Study, shared: Shared, queue: TrialQueue | None, table):
        self._study, self._shared, self._queue, self._table = study, shared, queue, table
        self._failures, self._signal = 0, 0

    def run(self) -> None:
        """All trials that this process gets.

        Raises:
          UserError: several trials in a row failed.
          preemption.Stopped: a signal came; the running trials are saved and put back.
        """
        most = len(self._shared.local_devices) if self._shared.packed else 1
        while orders := self._next_orders(most):
            run = self._run_packed if self._shared.packed else self._run_in_turn
            try:
                run(orders)
            except InUse as busy:
                log.info("%s; it comes again later", busy)
                time.sleep(POLL_SEC)
            except preemption.Stopped as stopped:
                self._signal = stopped.number  # all hosts leave together, at the next orders
            finally:
                for _, claimed in orders:
                    if claimed:
                        with contextlib.suppress(preemption.Stopped):  # the database is away: it is missed later
                            self._queue.put_back(claimed)  # no harm to those that have ended

    def _next_orders(self, most: int) -> list[tuple[Order, Claimed | None]]:
        """Host 0's next trials, up to `most`, on every host; waits for other processes' ones, which may come back.

        Raises:
          preemption.Stopped: on all hosts, if any of them got a signal.
        """
        told = False
        while True:
            claimed, wait = self._claim(most) if self._queue else ([], False)
            mine = [(one.name, one.setting, one.seed, one.values) for one in claimed]
            orders, wait, signal = collectives.json_from_primary([mine, wait, self._signal])
            signal = signal or preemption.agree()[0]
            if signal:
                for one in claimed:
                    self._queue.put_back(one)
                raise preemption.Stopped(signal)
            if orders or not wait:
                return list(zip([Order(*one) for one in orders], claimed or [None] * len(orders), strict=True))
            if not told:
                log.info("waiting for trials of other processes, or of a killed one")
                told = True
            time.sleep(POLL_SEC)

    def _claim(self, most: int) -> tuple[list[Claimed], bool]:
        """Trials to run, and if there is none whether there may yet be."""
        claimed = []
        try:
            waiting, running, _ = self._queue.fill()
            while waiting and len(claimed) < most and (one := self._queue.claim()):
                claimed.append(one)
            return claimed, bool(waiting or running)
        except preemption.Stopped as stopped:  # while the database was away
            self._signal = stopped.number
            return claimed, True

    def _run_in_turn(self, orders: list) -> None:
        for order, claimed in orders:
            self._run_one(order, claimed, self._shared)

    def _run_packed(self, orders: list) -> None:
        """Trials of one compiled program at once, group by group."""
        groups: dict = {}
        for order, claimed in orders:
            try:
                key = self._shared.key(self._study.config_of(order.values, order.seed))
            except BadSetting:
                self._run_one(order, claimed, self._shared)  # alone it says why it fails
            else:
                groups.setdefault(key, []).append((order, claimed))
        for group in groups.values():
            for error in self._run_group(group):
                if error:
                    raise error

    def _run_group(self, group: list) -> list:
        config = self._study.config_of(group[0][0].values, group[0][0].seed)
        try:
            (cache, placed), programs = self._shared.data(config), self._shared.programs(config)
        except jax.errors.JaxRuntimeError:
            return [self._run_one(order, claimed, self._shared) for order, claimed in group]  # says why it fails
        schedule, kernel = make_schedule(config, cache.count("train")), self._shared.whitening_kernel(config)
        idle = (
            programs.init(np.uint32(0), optimizer_numbers(config), kernel),
            make_plan(placed.deal, schedule, plan_length(config), first_update=0),
        )
        predictions = {name: getattr(programs, name) for name in packing.PREDICTIONS}
        packed = packing.Pack(programs.inner_loop, predictions, placed.train, placed.val_images, *idle, len(group))
        trainings = [
            functools.partial(self._run_one, order, claimed, packing.Slot(self._shared, packed, number))
            for number, (order, claimed) in enumerate(group)
        ]
        return packed.run(trainings)

    def _run_one(self, order: Order, claimed: Claimed | None, shared) -> None:
        """Trains a trial and ends it in the queue."""
        reporter = TrialReporter(self._study, order, claimed, self._queue, self._table)
        summary = train_trial(self._study, order, shared, reporter)
        if claimed:
            self._tell(claimed, summary)
        self._table.end(order.name, summary)
        self._failures = self._failures + 1 if "error" in summary else 0
        if self._failures >= MAX_FAILURES:
            raise UserError(f"{self._failures} trials in a row failed, the last one: {summary['error']}")

    def _tell(self, claimed: Claimed, summary: dict) -> None:
        """Ends a trial in the database by its summary."""
        if "error" in summary:
            self._queue.end(claimed, None, error=summary["error"])
            return
        objective = self._study.objective
        value, accuracy = summary[objective], summary["best_val_accuracy"]
        if value is None:  # nothing was reached
            value = 0.0 if study_of.OBJECTIVES[objective] == "maximize" else float("inf")
        if summary["status"] == "pruned":
            self._queue.end(claimed, accuracy, pruned=True)
        elif summary["status"] == "diverged":
            self._queue.end(claimed, value, diverged=True)
        else:
            self._queue.end(claimed, value)


def print_leaderboard(study: Study) -> None:
    """The leaderboard, read back from the folder."""
    found = reader.read(study.path)
    for problem in found.problems:
        log.warning("%s", problem)
    terminal.print_table(*analysis.leaderboard_rows(found))


def main(config: config_dict.ConfigDict) -> int:
    """Runs the study; returns the exit code."""
    if not flags.FLAGS.study:
        raise UserError("--study: missing; allowed: the study's folder, runs/studies/NAME")
    cli.use_compilation_cache(config.augment.cache_dir)  # before a study.json may name another
    study, description = read_study(config)
    cli.start(study.config, models.OPTIONS)
    if flags.FLAGS.pack and jax.process_count() > 1:
        raise UserError(
            f"--pack: {jax.process_count()} hosts; allowed: one, for each trial of a pack is one device's"
        )
    if not any(field.startswith("dataset.") for field in study.options.space):
        augment.prepare_cache(study.config)  # bad data are found before anything is written
    preemption.answer_signals()
    shared = Shared(packed=flags.FLAGS.pack)
    with contextlib.ExitStack() as stack:
        queue = stack.enter_context(open_queue(study, description)) if collectives.is_primary() else None
        counts = (lambda: queue.counts) if queue else (lambda: (0, 0, 0))
        table = SweepTable(study.path.name, counts, enabled=collectives.is_primary())
        try:
            with table, collectives.named_collective_errors():
                Sweep(study, shared, queue, table).run()
        except preemption.Stopped as stopped:
            log.info("%s; start again with --study %s to go on", stopped, study.path)
            return stopped.exit_code
    if collectives.is_primary():
        print_leaderboard(study)
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("study", None, "Study folder, e.g. runs/studies/NAME.")
    flags.DEFINE_string("space", None, "Search space, e.g. configs/sweeps/optimizers.py; not needed to go on.")
    flags.DEFINE_integer("trials", None, "Searched runs of the study in total; the whole grid if left out.", 1)
    flags.DEFINE_integer("seeds", 1, "Runs of each setting, which differ by seed.", 1)
    flags.DEFINE_integer(
        "best_seeds", 0, "Then: seeds in all of the best setting of each batch.size, else optimizer.", 0
    )
    flags.DEFINE_enum("sampler", "grid", search.SAMPLERS, "How settings are chosen.")
    flags.DEFINE_enum("pruner", "none", sorted(search.PRUNERS), "Ends trials early that others leave behind.")
    flags.DEFINE_enum(
        "objective", None, sorted(study_of.OBJECTIVES), "Default: accuracy, or steps to train.target_accuracy."
    )
    flags.DEFINE_integer("study_seed", 0, "Of the sampler.", 0)
    flags.DEFINE_string("storage", None, "Database URL; default is SQLite in the study folder.")
    flags.DEFINE_integer("heartbeat_sec", 20, "A trial without a sign for 3 times as long is taken for dead.", 1)
    flags.DEFINE_bool("pack", False, "As many trials at once as devices, each on one device.")
    cli.run_script(main, models.OPTIONS)
