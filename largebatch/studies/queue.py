"""Queue of a study's trials in a database that several processes share, which survives any of them.

A trial is one run: setting number `index` with seed number `seed`. The definition of a study says which runs it
has. The queue keeps a live row of each in the database: waiting, running or ended. A row whose process sends no
heartbeats any more counts as dead, and its run is enqueued again; the run goes on in its folder, which is named by
its setting and locked while a process trains. So a second row of a run does no harm: it finds the run in use, or
done.
"""

import contextlib
import datetime
import math
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from largebatch.config.dicts import difference
from largebatch.hosts import preemption
from largebatch.runs.folder import RunFolder
from largebatch.studies.database import DATABASE_ERRORS, MISSED_HEARTBEATS, open_storage, waits_for_database
from largebatch.studies.space import Setting, recorded, suggest, tpe_sampler
from largebatch.studies.study import Study, identity
from largebatch.util import UserError

# Another process took this one for dead and ended its row. The run is then claimed again, and found to be done.
TAKEN_FOR_DEAD = contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError)
LAST_HEARTBEAT_SEC = 5  # limit of a heartbeat in progress at the end; an unreachable database takes minutes
FIRST_OF_GROUP = 2  # trials that a group ends before its median ends others
FIRST_VALIDATIONS = 10  # validations that do not prune: in warm-up the lowest rate leads

PRUNERS = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    "successive-halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
}


@dataclass(frozen=True)
class Trial:
    """Run of a study.

    Attributes:
      index: number of its setting, in the order in which settings became known.
      setting: {dotted config field: value}; None where TPE is to choose it.
      row: the database's trial on host 0; None on the other hosts.
    """

    index: int
    seed: int
    setting: Setting | None
    row: optuna.Trial | None = None


@dataclass(frozen=True)
class Counts:
    """Numbers of waiting, running and ended runs of a study, over all processes."""

    waiting: int = 0
    running: int = 0
    ended: int = 0

    @property
    def left(self) -> int:
        """Number of runs that have not ended."""
        return self.waiting + self.running

    @property
    def total(self) -> int:
        """Number of runs that are known by now."""
        return self.left + self.ended


class TrialQueue:
    """Queue of one study, on host 0.

    Attributes:
      counts: counts at the last `fill`.
    Raises:
      UserError: the database cannot be opened, or holds another study of this name.
    """

    def __init__(self, study: Study):
        self._study, self._heartbeat_sec = study, study.options.heartbeat_sec
        self._storage = open_storage(study.storage, self._heartbeat_sec)
        self._database = optuna.create_study(
            storage=self._storage,
            study_name=study.path.name,
            direction="maximize" if study.maximizes else "minimize",
            pruner=PRUNERS[study.options.pruner](),
            load_if_exists=True,
        )
        self.counts = Counts()
        self._distributions = dict(study.distributions)  # by field; of TPE's rows, those of further branches too
        description = identity(study.description)
        del description["storage"]  # another machine may reach the same database by another URL
        there = self._database.user_attrs.get("description")
        if there is None:
            self._database.set_user_attr("description", description)
        elif changed := difference(description, there, ("here", "there")):
            raise UserError(f"--storage: the database holds another study named {study.path.name!r}: {changed}")

    # ---- runs of the study --------------------------------------------------------------------------

    def _key(self, index: int, seed: int, setting: Setting | None) -> str:
        """Return what identifies a run in the database: the name of its folder, or with TPE its numbers."""
        if self._study.options.sampler == "tpe":
            return f"tpe-{index}-{seed}"
        return self._study.folder_of(setting, seed).name

    def _rows(self) -> dict[str, FrozenTrial]:
        """Return a live row of each run that has one, by key: the first that ended, or else the first."""
        rows: dict[str, FrozenTrial] = {}
        for row in self._database.get_trials(deepcopy=False):
            key = row.user_attrs.get("key")
            is_dead = row.state == TrialState.FAIL and "error" not in row.user_attrs
            if key is None or is_dead:
                continue
            if key not in rows or (row.state.is_finished() and not rows[key].state.is_finished()):
                rows[key] = row
        return rows

    def _wanted(self, rows: dict[str, FrozenTrial]) -> dict[str, Trial]:
        """Return every run that is known by now, by key.

        Runs that depend on the best settings are known once all runs before them have ended.
        """
        study, options = self._study, self._study.options
        settings: list[Setting | None] = list(study.settings) or self._chosen_by_tpe()
        wanted = self._runs_of(enumerate(settings), range(options.seeds))
        if None in settings or not _have_ended(wanted, rows):
            return wanted
        for index in self._best_of_groups(settings, rows):
            settings += [refined for refined in study.space.refined(settings[index]) if refined not in settings]
        wanted = self._runs_of(enumerate(settings), range(options.seeds))
        if _have_ended(wanted, rows):
            best = [(index, settings[index]) for index in self._best_of_groups(settings, rows)]
            wanted |= self._runs_of(best, range(options.seeds, options.best_seeds))
        return wanted

    def _runs_of(self, settings: Iterable[tuple[int, Setting | None]], seeds: range) -> dict[str, Trial]:
        """Return the runs of numbered settings; of one that TPE has not chosen, the first seed alone."""
        runs = {}
        for index, setting in settings:
            for seed in seeds if setting is not None else range(1):
                runs[self._key(index, seed, setting)] = Trial(index, seed, setting)
        return runs

    def _chosen_by_tpe(self) -> list[Setting | None]:
        """Return the settings that TPE chose in a row, even if that is dead; None where it has not yet."""
        chosen: dict[int, Setting] = {}
        for row in self._database.get_trials(deepcopy=False):
            if "setting" in row.user_attrs:
                chosen.setdefault(row.user_attrs["index"], row.user_attrs["setting"])
                self._distributions |= row.distributions
        return [chosen.get(index) for index in range(self._study.num_searched)]

    def _best_of_groups(self, settings: list[Setting], rows: dict[str, FrozenTrial]) -> list[int]:
        """Return the best setting of each group, the first of equally good ones; none if all its runs failed."""
        groups: dict[str, list[int]] = {}
        for index, setting in enumerate(settings):
            groups.setdefault(self._study.group_of(setting), []).append(index)
        scores = [self._score(index, setting, rows) for index, setting in enumerate(settings)]
        best = [max(group, key=scores.__getitem__) for group in groups.values()]
        return [index for index in best if scores[index] > -math.inf]

    def _score(self, index: int, setting: Setting, rows: dict[str, FrozenTrial]) -> float:
        """Score a setting by its searched seeds, larger is better; -inf if one diverged, failed or was pruned."""
        total = 0.0
        for seed in range(self._study.options.seeds):
            row = rows.get(self._key(index, seed, setting))
            if row is None or row.state != TrialState.COMPLETE or "diverged" in row.user_attrs:
                return -math.inf
            total += row.value
        return total if self._study.maximizes else -total

    # ---- keeping the queue full ---------------------------------------------------------------------

    @waits_for_database
    def fill(self) -> Counts:
        """Enqueue every run that has no live row: at first all runs, later those of dead processes."""
        optuna.storages.fail_stale_trials(self._database)
        self._end_unclaimed()
        rows = self._rows()
        wanted = self._wanted(rows)
        for key, trial in wanted.items():
            # While the database was away, the heartbeats of a run that is trained may have been missed.
            folder = trial.setting and RunFolder(self._study.folder_of(trial.setting, trial.seed))
            if key not in rows and not (folder and folder.is_in_use()):
                self._enqueue(key, trial)
        states = [rows[key].state if key in rows else TrialState.WAITING for key in wanted]
        waiting, running = states.count(TrialState.WAITING), states.count(TrialState.RUNNING)
        self.counts = Counts(waiting, running, ended=len(states) - waiting - running)
        return self.counts

    def _enqueue(self, key: str, trial: Trial) -> None:
        attrs = {"key": key, "index": trial.index, "seed": trial.seed}
        if trial.setting is not None:
            attrs["setting"] = trial.setting
        params = {field: recorded(value) for field, value in (trial.setting or {}).items()}
        distributions = {field: self._distributions[field] for field in params}
        self._database.add_trial(
            create_trial(state=TrialState.WAITING, params=params, distributions=distributions, user_attrs=attrs)
        )

    def _end_unclaimed(self) -> None:
        """End rows whose process died between taking them and its first heartbeat, which Optuna overlooks.

        Their start is by the clock of another machine. One that is ended too early costs no more than a new row.
        """
        latest = datetime.datetime.now() - datetime.timedelta(seconds=MISSED_HEARTBEATS * self._heartbeat_sec)
        for row in self._database.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if "process" not in row.user_attrs and row.datetime_start < latest:
                self._end(row._trial_id, TrialState.FAIL)

    # ---- one trial ----------------------------------------------------------------------------------

    @waits_for_database
    def claim(self) -> Trial | None:
        """Claim a waiting run, if there is one; its heartbeats are the caller's, by `beating`."""
        while True:
            row = self._database.ask()
            if "key" not in row.user_attrs:  # the queue was empty: Optuna made a new row
                self._end(row._trial_id, TrialState.FAIL)
                return None
            with TAKEN_FOR_DEAD:
                if trial := self._claim(row):
                    return trial

    def _claim(self, row: optuna.Trial) -> Trial | None:
        """Claim a row; end it and return None if its run has another one, or is not wanted any more."""
        self._storage.record_heartbeat(row._trial_id)
        row.set_user_attr("process", f"{os.uname().nodename}:{os.getpid()}")
        attrs, rows = row.user_attrs, self._rows()
        key, index, seed = attrs["key"], attrs["index"], attrs["seed"]
        if key not in rows or rows[key].number != row.number or key not in self._wanted(rows):
            self._end(row._trial_id, TrialState.FAIL)
            return None
        setting = attrs.get("setting")
        if setting is None:
            self._database.sampler = tpe_sampler(self._study.options.study_seed, index)
            row = optuna.Trial(self._database, row._trial_id)
            setting = suggest(self._study.space, row)
            row.set_user_attr("setting", setting)
        return Trial(index, seed, setting, row)

    @contextlib.contextmanager
    def beating(self, trial: Trial) -> Iterator[None]:
        """Send heartbeats for a claimed trial, and put it back if it has not ended within the block."""
        ended = threading.Event()

        def beat():
            while not ended.wait(self._heartbeat_sec):
                with contextlib.suppress(*DATABASE_ERRORS):  # the next call that needs the database says so
                    self._storage.record_heartbeat(trial.row._trial_id)

        heart = threading.Thread(target=beat, daemon=True)
        heart.start()
        try:
            yield
        finally:
            ended.set()
            heart.join(LAST_HEARTBEAT_SEC)
            with contextlib.suppress(preemption.Stopped):  # while the database is away; hosts stop together
                self.put_back(trial)

    @waits_for_database
    def put_back(self, trial: Trial) -> None:
        """Give a trial back, unless it has ended, so that any process may resume its run."""
        self._end(trial.row._trial_id, TrialState.FAIL)  # has no effect on a row that has ended

    @waits_for_database
    def report(self, trial: Trial, score: float, outer: int) -> bool:
        """Report a trial's score after an outer loop to the pruner; return True if the trial should be pruned.

        Further seeds and settings around a best one are never pruned.
        """
        study = self._study
        with TAKEN_FOR_DEAD:
            trial.row.report(score, outer)
            if trial.index >= study.num_searched or trial.seed >= study.options.seeds:
                return False
            if study.space.groups and study.options.pruner == "median":
                return self._is_worse_than_its_group(trial)
            return trial.row.should_prune()
        return False

    def _is_worse_than_its_group(self, trial: Trial) -> bool:
        """Return True if a trial's best score is worse than its group's median at its last validation.

        The median is over the ended trials. Optuna's pruner takes that of all trials, of every group.
        """
        group = self._study.group_of(trial.setting)
        ended = [
            row.intermediate_values
            for row in self._database.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            if self._study.group_of(row.user_attrs["setting"]) == group
        ]
        own = self._storage.get_trial(trial.row._trial_id).intermediate_values
        last = max(own)
        others = [scores[last] for scores in ended if last in scores]
        if last < FIRST_VALIDATIONS or len(ended) < FIRST_OF_GROUP or not others:
            return False
        sign = 1 if self._study.kind.higher_is_better else -1
        return max(sign * score for score in own.values()) < sign * np.median(others)

    @waits_for_database
    def end(self, trial: Trial, status: str, value: float | None, error: str | None) -> None:
        """End a trial; it is not run again.

        Args:
          status: "done", "pruned", "diverged" or "failed".
          value: what the study ranks it by; None if it failed.
          error: why it failed.
        """
        states = {"pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        with TAKEN_FOR_DEAD:
            if status == "diverged":
                trial.row.set_user_attr("diverged", True)
            if error:
                trial.row.set_user_attr("error", error)
        self._end(trial.row._trial_id, states.get(status, TrialState.COMPLETE), value)

    def _end(self, row_id: int, state: TrialState, value: float | None = None) -> None:
        with TAKEN_FOR_DEAD:
            self._storage.set_trial_state_values(row_id, state, None if value is None else [value])


def _have_ended(runs: dict[str, Trial], rows: dict[str, FrozenTrial]) -> bool:
    return all(key in rows and rows[key].state.is_finished() for key in runs)
