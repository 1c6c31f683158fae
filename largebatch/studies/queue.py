"""The trials of a study in a database that several processes may share, and which any of them may outlive.

A trial is one run: setting number k with seed number s. What is to be run follows from the study's options;
`TrialQueue` keeps every such run in the database exactly once alive: waiting, running, or ended. A running
trial whose process gives no sign any more counts as not run, and is put in the queue again; its run folder
holds its checkpoints.
"""

import contextlib
import json
import logging
import threading
import time
import warnings
from typing import Any, NamedTuple

import optuna
import sqlalchemy
import sqlalchemy.exc
from optuna.trial import FrozenTrial, TrialState

from largebatch.config import fields
from largebatch.errors import UserError
from largebatch.hosts import preemption
from largebatch.studies import search

log = logging.getLogger("largebatch")

# Optuna beats only for Study.optimize, which runs one trial at a time; here `_beat` does, for packs too.
warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed to be used with Study.optimize")
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)

# After so many a trial's process counts as dead. Optuna compares heartbeats with now() as the database has it: a
# server's clock, in one time zone. SQLite has no server, so there it is the UTC of whoever asks, and machines that
# share a file need clocks that agree to within the grace.
MISSED_HEARTBEATS = 3
TRIES_TO_OPEN = 5
MAX_WAIT_SEC = 30.0  # between two tries to reach the database
DATABASE_ERRORS = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.DBAPIError, sqlalchemy.exc.TimeoutError)
# Another process took this one for dead. Then the run comes again, and is found ended.
TAKEN_FOR_DEAD = contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError)
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


class Claimed(NamedTuple):
    """A trial that this process has to run."""

    trial: optuna.Trial
    setting: int
    seed: int
    values: dict[str, Any]

    @property
    def name(self) -> str:
        """Of its run folder."""
        return f"{self.setting:04d}-{self.seed}"


def patiently(call):
    """Makes a method wait, with messages, until the database can be reached."""

    def waiting(queue, *args, **kwargs):
        wait, since = 1.0, time.monotonic()
        while True:
            try:
                result = call(queue, *args, **kwargs)
            except DATABASE_ERRORS as error:
                reason = str(error.__cause__ or error).strip().splitlines()[0]
                log.warning("the study's database does not answer (%s); trying again in %.0f s", reason, wait)
                _sleep(wait)
                wait = min(2 * wait, MAX_WAIT_SEC)
                continue
            if wait > 1:
                log.info("the study's database answers again after %.0f s", time.monotonic() - since)
                queue.forgive()
            return result

    return waiting


def _sleep(seconds: float) -> None:
    """Sleeps; leaves at once on a signal.

    Raises:
      preemption.Stopped: there was one.
    """
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if number := preemption.first_signal():
            raise preemption.Stopped(number)
        time.sleep(min(left, 0.2))


def without_password(url: str) -> str:
    """A database URL that may be shown and kept.

    Raises:
      UserError: it is none, or its password was taken away before.
    """
    try:
        shown = sqlalchemy.engine.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError as error:
        raise UserError(
            f"--storage: {url!r}; allowed: a database URL, as sqlite:///FILE or postgresql://HOST/DB"
        ) from error
    if shown == url and ":***@" in url:
        raise UserError(f"--storage: the study is in {url}; give the URL with its password")
    return shown


def open_storage(url: str, heartbeat_sec: int) -> optuna.storages.RDBStorage:
    """Opens a database that SQLAlchemy knows, and makes its tables.

    Raises:
      UserError: it cannot be opened.
    """
    for _ in range(TRIES_TO_OPEN):
        try:
            return _open_storage(url, heartbeat_sec)
        except (*DATABASE_ERRORS, sqlalchemy.exc.ArgumentError, ImportError, RuntimeError) as raised:
            error, reason = raised, str(raised.__cause__ or raised).strip().splitlines()[0]
            if not any(words in reason for words in ("already exists", "duplicate key", "UNIQUE constraint")):
                break
        time.sleep(1)  # another process is making the tables
    raise UserError(f"--storage: {without_password(url)} cannot be opened ({reason})") from error


def _open_storage(url: str, heartbeat_sec: int) -> optuna.storages.RDBStorage:
    # Waits for other writers; looks whether a pooled connection still lives.
    waits = {"timeout": 60} if url.startswith("sqlite") else {}
    storage = optuna.storages.RDBStorage(
        url,
        engine_kwargs={"connect_args": waits, "pool_pre_ping": True},
        heartbeat_interval=heartbeat_sec,
        grace_period=MISSED_HEARTBEATS * heartbeat_sec,
    )
    if url.startswith("sqlite"):
        _lock_from_the_start(storage.engine)
    return storage


def _lock_from_the_start(engine) -> None:
    """Makes every SQLite transaction lock the database when it begins.

    SQLite has no SELECT ... FOR UPDATE, by which Optuna keeps two processes from taking the same trial.
    """

    @sqlalchemy.event.listens_for(engine, "connect")
    def leave_transactions_to_us(connection, record):
        connection.isolation_level = None

    @sqlalchemy.event.listens_for(engine, "begin")
    def begin(connection):
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()  # connections made before


class TrialQueue:
    """The queue of one study.

    Args:
      direction: "maximize" or "minimize" the value of a trial.
      description: what all processes of the study must agree on, as plain JSON.
    Raises:
      UserError: the database holds another study of this name.
    """

    def __init__(
        self,
        storage,
        name: str,
        direction: str,
        pruner,
        options: search.Options,
        heartbeat_sec: int,
        description: dict,
    ):
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._storage, self._options, self._heartbeat_sec = storage, options, heartbeat_sec
        self._study = optuna.create_study(
            storage=storage, study_name=name, direction=direction, pruner=pruner, load_if_exists=True
        )
        self._check(name, description)
        self._points = dict(enumerate(search.points(*options[:4], options.includes)))
        self.counts, self._forgiving_until = (0, 0, 0), 0.0
        self._beating: set[int] = set()
        self._unclaimed_since: dict[int, float] = {}  # trial -> time.monotonic() when it was first seen so
        self._lock, self._stop = threading.Lock(), threading.Event()

    def _check(self, name: str, description: dict) -> None:
        known = self._study.user_attrs.get("description")
        if known is None:
            self._study.set_user_attr("description", description)
        elif changed := fields.differences(description, known, ("here", "there")):
            raise UserError(f"--storage: the database holds another study named {name!r}: {changed}")

    # ---- what there is to do ------------------------------------------------------------------------

    def _alive(self, trials: list[FrozenTrial]) -> dict[tuple[int, int], FrozenTrial]:
        """The first trial of each (setting, seed) that is waiting, running or ended."""
        alive = {}
        for trial in trials:
            attrs = trial.user_attrs
            if "setting" in attrs and (trial.state != TrialState.FAIL or "error" in attrs):
                alive.setdefault((attrs["setting"], attrs["seed"]), trial)
        return alive

    def _wanted(self, alive: dict) -> dict[tuple[int, int], dict]:
        """Values to fix of every run that can be named by now; {} where the sampler is to choose."""
        own = self._options
        wanted = {}
        points = self._points or self._chosen()
        for setting in range(own.settings):
            values = points.get(setting, {})
            # What TPE chose is known, and shared by the other seeds, once the first was started.
            wanted |= {(setting, seed): values for seed in range(own.seeds if values else 1)}
        searched = [key for key in wanted if key[1] < own.seeds]
        all_known = own.best_seeds > own.seeds and len(searched) == own.settings * own.seeds
        if all_known and all(key in alive and self._has_ended(alive[key]) for key in searched):
            wanted |= self._best(alive, searched, wanted)
        return wanted

    def _best(self, alive: dict, searched: list, wanted: dict) -> dict:
        """Further seeds of the best settings, by the mean over the searched seeds."""
        own, groups = self._options, {}
        sign = 1 if self._study.direction == optuna.study.StudyDirection.MAXIMIZE else -1
        worst = -float("inf")
        for setting in range(own.settings):
            trials = [alive[key] for key in searched if key[0] == setting]
            ok = all(trial.state == TrialState.COMPLETE and "diverged" not in trial.user_attrs for trial in trials)
            score = sum(sign * trial.value for trial in trials) if ok else worst
            values = wanted[setting, 0]
            groups.setdefault(json.dumps(values.get(own.best_by)), []).append((score, -setting))
        best = [max(group) for group in groups.values()]
        return {
            (-negated, seed): wanted[-negated, 0]
            for score, negated in best
            if score > worst
            for seed in range(own.seeds, own.best_seeds)
        }

    @staticmethod
    def _has_ended(trial: FrozenTrial) -> bool:
        return trial.state in ENDED or trial.state == TrialState.FAIL  # alive and failed: with an error

    def _chosen(self) -> dict[int, dict]:
        """What TPE chose for each setting, in any of its trials, dead ones too."""
        trials = self._study.get_trials(deepcopy=False)
        found = [trial.user_attrs for trial in trials if "values" in trial.user_attrs]
        return {attrs["setting"]: attrs["values"] for attrs in reversed(found)}

    @patiently
    def fill(self) -> tuple[int, int, int]:
        """Puts in the queue what is missing there: at first all, later the trials of dead processes.

        Returns:
          Runs waiting, running, and ended; `counts` keeps them.
        """
        if time.monotonic() >= self._forgiving_until:
            optuna.storages.fail_stale_trials(self._study)
            self._fail_unclaimed()
        trials = self._study.get_trials(deepcopy=False)
        alive = self._alive(trials)
        self._fail_doubled(trials, alive)
        wanted = self._wanted(alive)
        for (setting, seed), values in wanted.items():
            if (setting, seed) not in alive:
                self._study.enqueue_trial(values, user_attrs={"setting": setting, "seed": seed})
        states = [alive[key].state if key in alive else TrialState.WAITING for key in wanted]
        waiting, running = states.count(TrialState.WAITING), states.count(TrialState.RUNNING)
        self.counts = waiting, running, len(states) - waiting - running
        return self.counts

    def forgive(self) -> None:
        """Gives all processes time for a heartbeat: while the database was away none could be told."""
        self._forgiving_until = time.monotonic() + MISSED_HEARTBEATS * self._heartbeat_sec
        self._unclaimed_since.clear()

    def _fail_unclaimed(self) -> None:
        """Ends trials whose process died between taking them and its first heartbeat, which Optuna overlooks.

        For how long is what this process has seen: `datetime_start` is by another machine's clock and time zone.
        """
        now, grace = time.monotonic(), MISSED_HEARTBEATS * self._heartbeat_sec
        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        unclaimed = [trial._trial_id for trial in running if "claimed" not in trial.user_attrs]
        self._unclaimed_since = {trial_id: self._unclaimed_since.get(trial_id, now) for trial_id in unclaimed}
        for trial_id, since in self._unclaimed_since.items():
            if now - since > grace:
                self._end(trial_id, TrialState.FAIL)

    def _fail_doubled(self, trials: list[FrozenTrial], alive: dict) -> None:
        """Waiting trials of runs that are there already: two processes filled the queue at once."""
        first = {trial.number for trial in alive.values()}
        for trial in trials:
            if trial.state == TrialState.WAITING and trial.number not in first:
                self._end(trial._trial_id, TrialState.FAIL)

    # ---- one trial ----------------------------------------------------------------------------------

    @patiently
    def claim(self) -> Claimed | None:
        """Takes the next waiting trial, if there is one; its heart beats from here on."""
        while True:
            trial = self._study.ask()
            if "setting" not in trial.user_attrs:  # the queue was empty: Optuna made a new one
                self._end(trial._trial_id, TrialState.FAIL)
                return None
            with TAKEN_FOR_DEAD:  # while this process claimed it: then the next one
                if claimed := self._claim(trial):
                    return claimed

    def _claim(self, trial: optuna.Trial) -> Claimed | None:
        """Claims a trial that was waiting; None if it is not to be run any more.

        Raises:
          optuna.exceptions.UpdateFinishedTrialError: another process has ended it.
        """
        key = trial.user_attrs["setting"], trial.user_attrs["seed"]
        alive = self._alive(self._study.get_trials(deepcopy=False))
        # Another process filled the queue since `fill` here, or ended this trial; or more were wanted at that time.
        if key not in alive or alive[key].number != trial.number or key not in self._wanted(alive):
            self._end(trial._trial_id, TrialState.FAIL)
            return None
        self._storage.record_heartbeat(trial._trial_id)
        if self._options.sampler == "tpe":
            self._study.sampler = search.tpe(self._options.study_seed, key[0])
            trial = optuna.Trial(self._study, trial._trial_id)
        values = search.suggest(trial, self._options.space)
        trial.set_user_attr("values", values)
        trial.set_user_attr("claimed", True)
        with self._lock:
            self._beating.add(trial._trial_id)
        self._count(waiting=-1, running=1)
        return Claimed(trial, *key, values)

    @patiently
    def report(self, claimed: Claimed, value: float, outer: int) -> bool:
        """Tells the value after an outer loop; whether the trial should be pruned."""
        with TAKEN_FOR_DEAD:
            claimed.trial.report(value, outer)
            return claimed.trial.should_prune()
        return False

    @patiently
    def end(self, claimed: Claimed, value: float | None, **attrs) -> None:
        """Ends a trial with its value; with `pruned` or an `error` among `attrs` it has none."""
        with TAKEN_FOR_DEAD:
            for name, text in attrs.items():
                claimed.trial.set_user_attr(name, text)
        if "error" in attrs:
            self._end(claimed.trial._trial_id, TrialState.FAIL)
        elif "pruned" in attrs:
            self._end(claimed.trial._trial_id, TrialState.PRUNED, value)
        else:
            self._end(claimed.trial._trial_id, TrialState.COMPLETE, value)
        self._forget(claimed)
        self._count(running=-1, ended=1)

    @patiently
    def put_back(self, claimed: Claimed) -> None:
        """Gives a trial back, unless it has ended: any process may run it later from where it stands."""
        if claimed.trial._trial_id in self._beating:
            self._end(claimed.trial._trial_id, TrialState.FAIL)
            self._forget(claimed)
            self._count(running=-1, waiting=1)

    def _count(self, waiting: int = 0, running: int = 0, ended: int = 0) -> None:
        with self._lock:
            self.counts = tuple(a + b for a, b in zip(self.counts, (waiting, running, ended), strict=True))

    def _end(self, trial_id: int, state: TrialState, value: float | None = None) -> None:
        with TAKEN_FOR_DEAD:
            self._storage.set_trial_state_values(trial_id, state, None if value is None else [value])

    def _forget(self, claimed: Claimed) -> None:
        with self._lock:
            self._beating.discard(claimed.trial._trial_id)

    # ---- heartbeats ---------------------------------------------------------------------------------

    def __enter__(self):
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._stop.set()

    def _beat(self) -> None:
        while not self._stop.wait(self._heartbeat_sec):
            with self._lock:
                beating = list(self._beating)
            for trial_id in beating:
                # Whoever next needs the database says that it is away.
                with contextlib.suppress(*DATABASE_ERRORS):
                    self._storage.record_heartbeat(trial_id)
