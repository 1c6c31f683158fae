"""Queue of a study's trials in a database that several processes share, which survives any of them.

A trial is one run: setting number k with seed number s. The options of a study determine its runs.
`TrialQueue` keeps one live trial of every such run in the database: waiting, running or ended. A running trial
whose process sends no heartbeats any more counts as dead, and its run is enqueued again. Its run folder holds its
checkpoints.
"""

import contextlib
import functools
import math
import threading
import time
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from largebatch.config.dicts import difference
from largebatch.studies import search
from largebatch.studies.database import DATABASE_ERRORS, grace_sec, retry_while_away
from largebatch.util import UserError

# Another process took this one for dead and ended its trial. The run is then claimed again, and found to be done.
TAKEN_FOR_DEAD = contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError)
LAST_HEARTBEAT_SEC = 5  # for a heartbeat in progress when a queue is closed; an unreachable database takes minutes


@dataclass(frozen=True)
class RunKey:
    """Key of a run in a study: the number of its setting, and of its seed."""

    setting: int
    seed: int


@dataclass(frozen=True)
class TrialSpec:
    """Run of a study, with its values: {dotted config field: value}."""

    setting: int
    seed: int
    values: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the trial's run folder."""
        return f"{self.setting:04d}-{self.seed}"


@dataclass(frozen=True)
class ClaimedTrial:
    """Trial that this process has to run, with its Optuna trial."""

    spec: TrialSpec
    optuna_trial: optuna.Trial
    is_searched: bool = True  # False for further seeds and settings around a best one, which are never pruned

    @property
    def id(self) -> int:
        """Number of the trial in the database."""
        return self.optuna_trial._trial_id


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
        return self.waiting + self.running + self.ended


def waits_for_database(method):
    """Make a method of `TrialQueue` wait until the database can be reached; see `retry_while_away`."""

    @functools.wraps(method)
    def waiting(queue, *args, **kwargs):
        call = functools.partial(method, queue, *args, **kwargs)
        return retry_while_away(call, on_return=queue.restart_grace_period)

    return waiting


class TrialQueue:
    """Queue of one study; as a context manager it sends heartbeats for the trials that this process runs.

    Args:
      storage: the database, of `open_storage`.
      name: name of the study in the database.
      options: search options, which determine the runs of the study.
      direction: "maximize" or "minimize" the value of a trial.
      description: plain JSON that must be equal in all processes of the study.
    Raises:
      UserError: the database holds another study of this name.
    """

    def __init__(
        self,
        storage: optuna.storages.RDBStorage,
        name: str,
        options: search.SearchOptions,
        *,
        direction: str,
        pruner: optuna.pruners.BasePruner,
        heartbeat_sec: int,
        description: dict,
    ):
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._storage, self._options, self._heartbeat_sec = storage, options, heartbeat_sec
        self._study = optuna.create_study(
            storage=storage, study_name=name, direction=direction, pruner=pruner, load_if_exists=True
        )
        self._refuse_another(name, description)
        self._fixed_settings = dict(enumerate(search.fixed_settings(options)))  # empty with TPE
        self.counts = Counts()
        self._grace_until = 0.0  # time.monotonic() before which no trial is taken for dead
        self._first_seen_unclaimed: dict[int, float] = {}  # id of a trial -> time.monotonic()
        self._beating: set[int] = set()  # ids of the trials that this process runs
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._heart = threading.Thread(target=self._send_heartbeats, daemon=True)

    def _refuse_another(self, name: str, description: dict) -> None:
        recorded = self._study.user_attrs.get("description")
        if recorded is None:
            self._study.set_user_attr("description", description)
            return
        changed = difference(description, recorded, ("here", "there"))
        if changed:
            raise UserError(f"--storage: the database holds another study named {name!r}: {changed}")

    # ---- runs of the study --------------------------------------------------------------------------

    def _live_trials(self, trials: list[FrozenTrial]) -> dict[RunKey, FrozenTrial]:
        """Return the first trial of each run that is waiting, running or ended; not those of dead processes."""
        live: dict[RunKey, FrozenTrial] = {}
        for trial in trials:
            attrs = trial.user_attrs
            if "setting" not in attrs:  # not enqueued by a sweep
                continue
            is_dead = trial.state == TrialState.FAIL and "error" not in attrs
            if not is_dead:
                live.setdefault(RunKey(attrs["setting"], attrs["seed"]), trial)
        return live

    def _wanted_runs(self, live: dict[RunKey, FrozenTrial]) -> dict[RunKey, dict]:
        """Return every run that is known by now, with its values: {} where TPE is to choose them.

        Runs that depend on the best settings are known once all runs before them have ended.
        """
        options = self._options
        known = self._fixed_settings or self._values_chosen_by_tpe()
        settings = {setting: known.get(setting) for setting in range(options.settings)}
        wanted = self._runs_of(settings, range(options.seeds))
        if None in settings.values() or not _have_ended(wanted, live):
            return wanted
        for setting in self._best_settings(live, settings):
            for values in search.refined(options, settings[setting]):
                if values not in settings.values():
                    settings[len(settings)] = values
        wanted = self._runs_of(settings, range(options.seeds))
        if _have_ended(wanted, live):
            best = {setting: settings[setting] for setting in self._best_settings(live, settings)}
            wanted |= self._runs_of(best, range(options.seeds, options.best_seeds))
        return wanted

    def _runs_of(self, settings: dict[int, dict | None], seeds: range) -> dict[RunKey, dict]:
        """Return the runs of these settings; TPE chooses missing values when the first seed starts."""
        runs: dict[RunKey, dict] = {}
        for setting, values in settings.items():
            for seed in seeds if values is not None else range(1):
                runs[RunKey(setting, seed)] = values or {}
        return runs

    def _best_settings(self, live: dict[RunKey, FrozenTrial], settings: dict[int, dict]) -> list[int]:
        """Return the best setting of each group; none for a group whose settings all diverged or failed.

        Of several equally good ones it is the first.
        """
        groups: dict[str, list[int]] = {}
        for setting, values in settings.items():
            groups.setdefault(self._options.group_of(values), []).append(setting)
        scores = {setting: self._score(setting, live) for setting in settings}
        best = [max(of_group, key=scores.__getitem__) for of_group in groups.values()]
        return [setting for setting in best if scores[setting] > -math.inf]

    def _score(self, setting: int, live: dict[RunKey, FrozenTrial]) -> float:
        """Score a setting by its searched seeds, larger is better; -inf if one diverged, failed or was pruned."""
        total = 0.0
        for seed in range(self._options.seeds):
            trial = live[RunKey(setting, seed)]
            if trial.state != TrialState.COMPLETE or "diverged" in trial.user_attrs:
                return -math.inf
            total += trial.value
        maximize = self._study.direction == optuna.study.StudyDirection.MAXIMIZE
        return total if maximize else -total

    def _values_chosen_by_tpe(self) -> dict[int, dict]:
        """Return the values that TPE chose for each setting in its first trial, even if that is dead."""
        chosen: dict[int, dict] = {}
        for trial in self._study.get_trials(deepcopy=False):
            if "values" in trial.user_attrs:
                chosen.setdefault(trial.user_attrs["setting"], trial.user_attrs["values"])
        return chosen

    # ---- keeping the queue full ---------------------------------------------------------------------

    @waits_for_database
    def enqueue_missing(self) -> Counts:
        """Enqueue every run that has no live trial: at first all runs, later those of dead processes.

        Returns:
          The new value of `counts`.
        """
        if time.monotonic() >= self._grace_until:
            optuna.storages.fail_stale_trials(self._study)
            self._end_unclaimed()
        trials = self._study.get_trials(deepcopy=False)
        live = self._live_trials(trials)
        self._end_duplicates(trials, live)
        wanted = self._wanted_runs(live)
        for key, values in wanted.items():
            if key not in live:
                self._study.enqueue_trial(values, user_attrs={"setting": key.setting, "seed": key.seed})
        states = [live[key].state if key in live else TrialState.WAITING for key in wanted]
        waiting, running = states.count(TrialState.WAITING), states.count(TrialState.RUNNING)
        self.counts = Counts(waiting, running, ended=len(states) - waiting - running)
        return self.counts

    def restart_grace_period(self) -> None:
        """Give all processes time for a heartbeat, since they could send none while the database was away."""
        self._grace_until = time.monotonic() + grace_sec(self._heartbeat_sec)
        self._first_seen_unclaimed.clear()

    def _end_unclaimed(self) -> None:
        """End trials whose process died between claiming them and its first heartbeat, which Optuna overlooks.

        Time counts from the moment when this process first saw them. Their `datetime_start` is by the clock and
        time zone of another machine.
        """
        now = time.monotonic()
        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        unclaimed = [trial._trial_id for trial in running if "claimed" not in trial.user_attrs]
        self._first_seen_unclaimed = {
            trial_id: self._first_seen_unclaimed.get(trial_id, now) for trial_id in unclaimed
        }
        for trial_id, first_seen in self._first_seen_unclaimed.items():
            if now - first_seen > grace_sec(self._heartbeat_sec):
                self._end(trial_id, TrialState.FAIL)

    def _end_duplicates(self, trials: list[FrozenTrial], live: dict[RunKey, FrozenTrial]) -> None:
        """End waiting trials of runs that have an earlier one, since two processes filled the queue at once."""
        live_numbers = {trial.number for trial in live.values()}
        for trial in trials:
            if trial.state == TrialState.WAITING and trial.number not in live_numbers:
                self._end(trial._trial_id, TrialState.FAIL)

    # ---- one trial ----------------------------------------------------------------------------------

    @waits_for_database
    def claim(self) -> ClaimedTrial | None:
        """Claim the next waiting trial, if there is one, and send heartbeats for it from now on."""
        while True:
            trial = self._study.ask()
            if "setting" not in trial.user_attrs:  # the queue was empty: Optuna made a new trial
                self._end(trial._trial_id, TrialState.FAIL)
                return None
            with TAKEN_FOR_DEAD:  # during the claim; then the next one is tried
                if claimed := self._claim(trial):
                    return claimed

    def _claim(self, trial: optuna.Trial) -> ClaimedTrial | None:
        """Claim a trial that was waiting; end it and return None if its run is not wanted any more.

        Raises:
          optuna.exceptions.UpdateFinishedTrialError: another process has ended it.
        """
        key = RunKey(trial.user_attrs["setting"], trial.user_attrs["seed"])
        live = self._live_trials(self._study.get_trials(deepcopy=False))
        # Another process may have enqueued this run before, or ended this trial; or --trials was larger then.
        is_live = key in live and live[key].number == trial.number
        if not is_live or key not in self._wanted_runs(live):
            self._end(trial._trial_id, TrialState.FAIL)
            return None
        self._storage.record_heartbeat(trial._trial_id)
        if self._options.sampler == "tpe":
            self._study.sampler = search.tpe_sampler(self._options.study_seed, key.setting)
            trial = optuna.Trial(self._study, trial._trial_id)
        values = search.suggest_values(trial, self._options.space)
        trial.set_user_attr("values", values)
        trial.set_user_attr("claimed", True)
        with self._lock:
            self._beating.add(trial._trial_id)
        self._change_counts(waiting=-1, running=+1)
        is_searched = key.setting < self._options.settings and key.seed < self._options.seeds
        return ClaimedTrial(TrialSpec(key.setting, key.seed, values), trial, is_searched)

    @waits_for_database
    def report(self, claimed: ClaimedTrial, value: float, outer: int) -> bool:
        """Report a trial's value after an outer loop to the pruner; return True if the trial should be pruned."""
        with TAKEN_FOR_DEAD:
            claimed.optuna_trial.report(value, outer)
            return claimed.is_searched and claimed.optuna_trial.should_prune()
        return False

    @waits_for_database
    def complete(self, claimed: ClaimedTrial, value: float, *, diverged: bool = False) -> None:
        """End a trial that ran to its end, or until it diverged."""
        if diverged:
            self._set_attr(claimed, "diverged", True)
        self._end_claimed(claimed, TrialState.COMPLETE, value)

    @waits_for_database
    def prune(self, claimed: ClaimedTrial, value: float) -> None:
        """End a trial that was pruned."""
        self._set_attr(claimed, "pruned", True)
        self._end_claimed(claimed, TrialState.PRUNED, value)

    @waits_for_database
    def fail(self, claimed: ClaimedTrial, error: str) -> None:
        """End a trial whose setting does not work; it is not run again."""
        self._set_attr(claimed, "error", error)
        self._end_claimed(claimed, TrialState.FAIL, None)

    @waits_for_database
    def put_back(self, claimed: ClaimedTrial) -> None:
        """Give a trial back, unless it has ended, so that any process may resume its run."""
        if claimed.id in self._beating:
            self._end(claimed.id, TrialState.FAIL)
            self._stop_beating(claimed)
            self._change_counts(running=-1, waiting=+1)

    def _set_attr(self, claimed: ClaimedTrial, name: str, value: str | bool) -> None:
        with TAKEN_FOR_DEAD:
            claimed.optuna_trial.set_user_attr(name, value)

    def _end_claimed(self, claimed: ClaimedTrial, state: TrialState, value: float | None) -> None:
        self._end(claimed.id, state, value)
        self._stop_beating(claimed)
        self._change_counts(running=-1, ended=+1)

    def _end(self, trial_id: int, state: TrialState, value: float | None = None) -> None:
        with TAKEN_FOR_DEAD:
            self._storage.set_trial_state_values(trial_id, state, None if value is None else [value])

    def _change_counts(self, waiting: int = 0, running: int = 0, ended: int = 0) -> None:
        with self._lock:
            before = self.counts
            self.counts = Counts(before.waiting + waiting, before.running + running, before.ended + ended)

    # ---- heartbeats ---------------------------------------------------------------------------------

    def __enter__(self):
        self._heart.start()
        return self

    def __exit__(self, *_):
        self._closed.set()
        self._heart.join(LAST_HEARTBEAT_SEC)

    def _stop_beating(self, claimed: ClaimedTrial) -> None:
        with self._lock:
            self._beating.discard(claimed.id)

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(self._heartbeat_sec):
            with self._lock:
                beating = list(self._beating)
            for trial_id in beating:
                # The next call that needs the database reports that it is away.
                with contextlib.suppress(*DATABASE_ERRORS):
                    self._storage.record_heartbeat(trial_id)


def _have_ended(runs: dict[RunKey, dict], live: dict[RunKey, FrozenTrial]) -> bool:
    return all(key in live and _has_ended(live[key]) for key in runs)


def _has_ended(trial: FrozenTrial) -> bool:
    """Return True if a live trial has ended; a failed one is live if its setting does not work."""
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
