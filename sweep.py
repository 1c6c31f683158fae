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
import json
import logging
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from ml_collections import config_dict

import train
from largebatch import (
    UserError,
    analysis,
    devices,
    display,
    fields,
    metrics,
    pack,
    preemption,
    resume,
    runs,
    search,
    studies,
)
from largebatch import config as configs

log = logging.getLogger("largebatch")

OBJECTIVES = {
    "best_val_accuracy": "maximize",
    "steps_to_target": "minimize",
    "examples_to_target": "minimize",
    "sec_to_target": "minimize",
}
OPTIONS = ("space", "trials", "seeds", "best_seeds", "sampler", "pruner", "objective", "study_seed", "storage")
BEST_BY = ("batch.size", "optimizer.name")  # --best_seeds: the best of each value of the first that is searched
MAX_FAILURES = 3  # in a row: then something is wrong that is not the trials'
POLL_SEC = 2.0


class Study(NamedTuple):
    """What the study folder's study.json says, and the space file's `derive`."""

    path: Path
    config: config_dict.ConfigDict
    storage: str
    options: studies.Options
    pruner: str
    objective: str
    derive: Any

    def config_of(self, values: dict, seed: int) -> config_dict.ConfigDict:
        """The config of one run.

        Raises:
          UserError: it is not allowed.
        """
        config = self.config.copy_and_resolve_references()
        try:
            for field, value in values.items():
                group, _, name = field.rpartition(".")
                (config[group] if group else config)[name] = value
            config.seed = self.config.seed + seed
            self.derive(config)
            configs.validate(config)
        except (UserError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise UserError(f"--space: {values}: {' '.join(str(error).split())}") from error
        return config


# ---- start ------------------------------------------------------------------------------------------


def read_study(config: config_dict.ConfigDict) -> tuple[Study, dict]:
    """The study that the flags ask for, and its study.json; one that is there must be the same.

    Raises:
      UserError: a flag, the space or a point of it is not allowed; or the folder holds another study.
    """
    path = Path(flags.FLAGS.study).expanduser()
    folder = metrics.RunFolder(path)
    there = folder.read("study.json") or {}
    if not there and not flags.FLAGS.space:
        raise UserError(f"--study: no study in {path}; give --space FILE to start one")
    if there and not any(arg.startswith("--config") for arg in sys.argv):
        with config.unlocked():
            config.update(config_dict.ConfigDict(there["config"]))
    chosen = {name: option(name, there) for name in OPTIONS}
    chosen["objective"] = chosen["objective"] or (
        "steps_to_target" if config.train.target_accuracy else "best_val_accuracy"
    )
    space, derive = search.read_space(Path(chosen["space"]), configs.RULES, configs.nearest_field)
    settings = number_of_settings(space, chosen, config)
    searched = studies.Options(
        space,
        chosen["sampler"],
        chosen["study_seed"],
        settings,
        chosen["seeds"],
        chosen["best_seeds"],
        next((field for field in BEST_BY if field in space), None),
    )
    storage = chosen["storage"] or f"sqlite:///{(path / 'study.db').resolve()}"
    study = Study(path, config, storage, searched, chosen["pruner"], chosen["objective"], derive)
    if chosen["sampler"] != "tpe":
        for setting in range(settings):
            study.config_of(search.point(space, chosen["sampler"], chosen["study_seed"], setting), 0)
    description = chosen | {
        "space": search.as_json(space),
        "space_file": chosen["space"],
        "storage": chosen["storage"] and studies.without_password(chosen["storage"]),
        "config": config.to_dict(),
    }
    description = json.loads(json.dumps(description))
    refuse_another(path, description, there)
    return study, description


def option(name: str, there: dict):
    """A flag; where it is not given, what the study that is there was started with."""
    flag, kept = flags.FLAGS[name], {"space": "space_file"}.get(name, name)
    return flag.value if flag.present or kept not in there else there[kept]


def number_of_settings(space: search.Space, chosen: dict, config) -> int:
    """How many settings --trials runs are.

    Raises:
      UserError: options that do not go together.
    """
    trials, seeds, sampler, objective = (chosen[name] for name in ("trials", "seeds", "sampler", "objective"))
    most = len(search.grid(space)) if sampler == "grid" else None
    if trials is None and most is None:
        raise UserError(f"--trials: missing; allowed without it: --sampler grid, not {sampler}")
    settings, rest = divmod(most * seeds if trials is None else trials, seeds)
    if rest:
        raise UserError(f"--trials: {trials}; allowed: a multiple of --seeds, {seeds}")
    if most and settings > most:
        raise UserError(f"--trials: {trials}; allowed: up to {most * seeds}, the grid x --seeds")
    if objective != "best_val_accuracy":
        if not config.train.target_accuracy:
            raise UserError(f"--objective: {objective} needs train.target_accuracy, which is None")
        if chosen["pruner"] != "none":
            raise UserError(f"--pruner: {chosen['pruner']}; allowed with --objective {objective}: none")
    return settings


def refuse_another(path: Path, description: dict, there: dict) -> None:
    """A study folder holds one study; only how many trials and seeds there are may change.

    Raises:
      UserError: space, sampler, objective, pruner or config differ from those of the study that is there.
    """
    may_change = ("trials", "seeds", "best_seeds", "space_file")
    ours, theirs = ({k: v for k, v in d.items() if k not in may_change} for d in (description, there))
    if not there:
        return
    ours["config"], theirs["config"] = fields.identity(ours["config"]), fields.identity(theirs["config"])
    if changed := fields.differences(ours, theirs, ("here", "there")):
        raise UserError(f"--study: {path} holds another study: {changed}")


def open_queue(study: Study, description: dict) -> studies.StudyQueue:
    """The study's trials in its database; once that is there, study.json is written too."""
    if study.storage.startswith(f"sqlite:///{study.path.resolve()}"):
        with metrics.writing(study.path):
            study.path.mkdir(parents=True, exist_ok=True)
    storage = studies.open_storage(study.storage, flags.FLAGS.heartbeat_sec)
    queue = studies.StudyQueue(
        storage,
        study.path.name,
        OBJECTIVES[study.objective],
        search.PRUNERS[study.pruner](),
        study.options,
        flags.FLAGS.heartbeat_sec,
    )
    metrics.RunFolder(study.path).write_json("study.json", description)
    return queue


# ---- trials -----------------------------------------------------------------------------------------


class Order(NamedTuple):
    """One trial to run, as every host gets it."""

    name: str
    setting: int
    seed: int
    values: dict


class TrialReporter(display.Reporter):
    """Tells the sweep's table and the queue how a trial goes; ends it where the pruner says so."""

    def __init__(self, study: Study, order: Order, claimed: studies.Claimed | None, queue, table):
        self._study, self._order, self._claimed, self._queue, self._table = study, order, claimed, queue, table

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def start(self, total_updates: int, step: int, headline: str) -> None:
        """Shows the trial; tells the queue what a process before saw of it."""
        self._table.start(self._order.name, self._order.values, total_updates, step)
        log.debug("%s", headline)
        if self._tells():
            so_far = runs.read_run(self._study.path / "trials" / self._order.name)
            for row in so_far.rows:
                self._queue.report(self._claimed, row["val_accuracy"], row["outer"])

    def at(self, step: int, images_per_sec: float) -> None:
        """Moves the trial's bar."""
        self._table.at(self._order.name, step, images_per_sec)

    def row(self, row: dict, outer_steps: int) -> None:
        """Asks the pruner.

        Raises:
          resume.Pruned: on all hosts.
        """
        self._table.row(self._order.name, row)
        pruned = self._tells() and self._queue.report(self._claimed, row["val_accuracy"], row["outer"])
        if self._study.pruner != "none" and devices.from_primary(np.int32(pruned)) and row["outer"] < outer_steps:
            raise resume.Pruned(f"pruned after outer loop {row['outer']} ({self._study.pruner})")

    def results(self, summary: dict, workdir: str) -> None:
        """The table shows them."""

    def _tells(self) -> bool:
        return self._claimed is not None and self._study.pruner != "none"


def read_outcome(study: Study, order: Order) -> dict:
    """The summary of a trial that has ended, as far as host 0 needs it."""
    folder = metrics.RunFolder(study.path / "trials" / order.name)
    return (folder.read("summary.json") if devices.is_primary() else None) or {"status": "done"}


def train_trial(study: Study, order: Order, shared, reporter: TrialReporter) -> dict:
    """Trains one trial, from where it stands; returns its summary, or its status and `error` if it failed.

    Raises:
      metrics.InUse: another process trains it.
      preemption.Stopped: a signal came.
    """
    folder = metrics.RunFolder(study.path / "trials" / order.name)
    trial = {"index": order.setting, "seed": order.seed, "setting": order.values, "error": None}
    try:
        config = study.config_of(order.values, order.seed)
        if devices.is_primary():
            folder.write_json("trial.json", trial)
        with contextlib.suppress(resume.Diverged, resume.Pruned):
            train.train_and_evaluate(config, str(folder.path), shared=shared, report=reporter)
        return read_outcome(study, order)
    except metrics.InUse:
        raise
    except (UserError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, UserError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        text = str(error).splitlines()[0]
        if devices.is_primary():
            folder.write_json("trial.json", trial | {"error": text})
        return {"status": "failed", "error": text}


# ---- the loop ---------------------------------------------------------------------------------------


class Sweep:
    """Runs trials until none is left. Host 0 has the queue, the others do as it says."""

    def __init__(self, study: Study, shared: train.Shared, queue: studies.StudyQueue | None, table):
        self._study, self._shared, self._queue, self._table = study, shared, queue, table
        self._failures = 0

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
                errors = run(orders)
            except Exception:
                for _, claimed in orders:
                    if claimed:
                        self._queue.put_back(claimed)  # no harm to those that have ended
                raise
            for error in errors:
                if isinstance(error, metrics.InUse):
                    log.info("%s; it comes again later", error)
                    studies.sleep(flags.FLAGS.heartbeat_sec)
                elif error:
                    raise error

    def _next_orders(self, most: int) -> list[tuple[Order, studies.Claimed | None]]:
        """Host 0's next trials, up to `most`, on every host."""
        claimed = self._claim(most) if self._queue else []
        mine = [(one.name, one.setting, one.seed, one.values) for one in claimed]
        orders = [Order(*one) for one in json.loads(devices.gather_text(json.dumps(mine))[0])]
        return list(zip(orders, claimed or [None] * len(orders), strict=True))

    def _claim(self, most: int) -> list[studies.Claimed]:
        """Waits for the trials of other processes too, which may yet come back."""
        told = False
        while True:
            waiting, running, _ = self._queue.fill()
            claimed = []
            while waiting and len(claimed) < most and (one := self._queue.claim()):
                claimed.append(one)
            if claimed or not (waiting or running):
                return claimed
            if not told:
                log.info("waiting for %d trials of other processes, or of a killed one", running)
                told = True
            studies.sleep(POLL_SEC)

    def _run_in_turn(self, orders: list) -> list:
        return [self._run_one(order, claimed, self._shared) for order, claimed in orders]

    def _run_packed(self, orders: list) -> list:
        """Trials of one compiled program at once, group by group."""
        groups, errors = {}, []
        for order, claimed in orders:
            try:
                key = self._shared.key(self._study.config_of(order.values, order.seed))
            except UserError:
                errors.append(self._run_one(order, claimed, self._shared))  # alone it says why it fails
            else:
                groups.setdefault(key, []).append((order, claimed))
        return errors + [error for group in groups.values() for error in self._run_group(group)]

    def _run_group(self, group: list) -> list:
        config = self._study.config_of(group[0][0].values, group[0][0].seed)
        placed, programs = self._shared.data(config)[1], self._shared.programs(config)
        idle = programs.init(np.uint32(0), 0.0, 0.0), train.make_plan(placed.deal, config, 1, first_step=0)
        packed = pack.Pack(
            programs.inner_loop, programs.predict, placed.train, placed.val_images, *idle, len(group)
        )
        trainings = [
            functools.partial(self._run_one, order, claimed, pack.Slot(self._shared, packed, number))
            for number, (order, claimed) in enumerate(group)
        ]
        return packed.run(trainings)

    def _run_one(self, order: Order, claimed: studies.Claimed | None, shared) -> Exception | None:
        """Trains a trial and ends it in the queue, or puts it back and returns why."""
        reporter = TrialReporter(self._study, order, claimed, self._queue, self._table)
        try:
            summary = train_trial(self._study, order, shared, reporter)
        except Exception as error:  # whatever it is, the trial is not lost; `run` raises it
            if claimed:
                self._queue.put_back(claimed)
            return error
        if claimed:
            self._tell(claimed, summary)
        self._table.end(order.name, summary)
        self._failures = self._failures + 1 if "error" in summary else 0
        if self._failures < MAX_FAILURES:
            return None
        return UserError(f"{self._failures} trials in a row failed, the last one: {summary['error']}")

    def _tell(self, claimed: studies.Claimed, summary: dict) -> None:
        """Ends a trial in the database by its summary."""
        if "error" in summary:
            self._queue.end(claimed, None, error=summary["error"])
            return
        objective = self._study.objective
        value, accuracy = summary[objective], summary["best_val_accuracy"]
        if value is None:  # nothing was reached
            value = 0.0 if OBJECTIVES[objective] == "maximize" else float("inf")
        if summary["status"] == "pruned":
            self._queue.end(claimed, accuracy, pruned=True)
        elif summary["status"] == "diverged":
            self._queue.end(claimed, value, diverged=True)
        else:
            self._queue.end(claimed, value)


def print_leaderboard(study: Study) -> None:
    """The leaderboard, read back from the folder."""
    found = runs.read(study.path)
    for problem in found.problems:
        log.warning("%s", problem)
    display.print_table(*analysis.leaderboard_rows(found))


def main(config: config_dict.ConfigDict) -> int:
    """Runs the study; returns the exit code."""
    if not flags.FLAGS.study:
        raise UserError("--study: missing; allowed: the study's folder, runs/studies/NAME")
    study, description = read_study(config)
    configs.start(study.config)
    if flags.FLAGS.pack and jax.process_count() > 1:
        raise UserError(
            f"--pack: {jax.process_count()} hosts; allowed: one, for each trial of a pack is one device's"
        )
    preemption.answer_signals()
    shared = train.Shared(packed=flags.FLAGS.pack)
    with contextlib.ExitStack() as stack:
        queue = stack.enter_context(open_queue(study, description)) if devices.is_primary() else None
        counts = (lambda: queue.counts) if queue else (lambda: (0, 0, 0))
        table = display.SweepTable(study.path.name, counts, enabled=devices.is_primary())
        try:
            with table, devices.named_collective_errors():
                Sweep(study, shared, queue, table).run()
        except preemption.Stopped as stopped:
            log.info("%s; start again with --study %s to go on", stopped, study.path)
            return stopped.exit_code
    if devices.is_primary():
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
        "objective", None, sorted(OBJECTIVES), "Default: accuracy, or steps to train.target_accuracy."
    )
    flags.DEFINE_integer("study_seed", 0, "Of the sampler.", 0)
    flags.DEFINE_string("storage", None, "Database URL; default is SQLite in the study folder.")
    flags.DEFINE_integer("heartbeat_sec", 20, "A trial without a sign for 3 times as long is taken for dead.", 1)
    flags.DEFINE_bool("pack", False, "As many trials at once as devices, each on one device.")
    configs.run_script(main)
