"""The queue of a study's trials: every run once, whatever dies, and the best settings first among equals."""

import datetime
import threading
import time

import optuna
import pytest
import sqlalchemy
from made_studies import databases_in_memory, make_study, space_of
from optuna.trial import TrialState

from configs import default
from largebatch.hosts import preemption
from largebatch.runs.folder import RunFolder
from largebatch.studies import database
from largebatch.studies.database import open_storage, without_password
from largebatch.studies.queue import FIRST_VALIDATIONS, TAKEN_FOR_DEAD, Counts, Trial, TrialQueue
from largebatch.studies.space import Space
from largebatch.util import UserError

BATCH, RATE = "batch.size", "optimizer.learning_rate"
CHOICES = {BATCH: [64, 128], RATE: [0.1, 0.2, 0.3]}


@pytest.fixture
def make_queue(tmp_path):
    """A function that opens the queue of a study in this folder, as a process of its own would."""

    def make(space=None, choices=CHOICES, target=None, functions=None, **options) -> TrialQueue:
        config = default.get_config()
        config.model.dtype, config.train.target_accuracy = "float32", target
        space = space or space_of(choices, **(functions or {}))
        return TrialQueue(make_study(config, tmp_path / "study", space, **options))

    with databases_in_memory():
        yield make


def rate_of(trial: Trial) -> float:
    return trial.setting[RATE]


def run_all(queue: TrialQueue, value_of=rate_of) -> list[Trial]:
    """Claims and ends all there is."""
    ran = []
    while queue.fill().waiting:
        while trial := queue.claim():
            queue.end(trial, "done", value_of(trial), None)
            ran.append(trial)
    return ran


def numbers(trials: list[Trial]) -> list[tuple[int, int]]:
    return [(trial.index, trial.seed) for trial in trials]


# ---- every run once ---------------------------------------------------------------------------------------


def test_every_point_of_the_grid_is_run_once_and_their_number_may_change(make_queue):
    first = run_all(make_queue(trials=4, seeds=2))
    assert numbers(first) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    ran = first + run_all(make_queue(seeds=2))
    assert numbers(ran) == [(index, seed) for index in range(6) for seed in (0, 1)]
    settings = [tuple(trial.setting.values()) for trial in ran[::2]]
    assert settings == [(batch, rate) for batch in (64, 128) for rate in (0.1, 0.2, 0.3)]
    again = make_queue(seeds=2)
    assert again.fill() == Counts(0, 0, 12)
    assert again.claim() is None
    assert again._database.get_trials()[0].params == ran[0].setting  # as optuna-dashboard shows it


def test_processes_that_fill_the_queue_at_once_run_no_trial_twice(make_queue):
    one, two = make_queue(), make_queue()
    for queue in (one, two):  # as if both had looked before either wrote
        for key, trial in queue._wanted({}).items():
            queue._enqueue(key, trial)
    ran: list[Trial] = []
    threads = [threading.Thread(target=lambda queue=queue: ran.extend(run_all(queue))) for queue in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers(ran)) == [(index, 0) for index in range(6)]
    assert one.fill() == Counts(0, 0, 6)


def test_of_two_rows_of_a_run_the_one_that_ended_counts(make_queue):
    queue = make_queue(trials=1)
    ((key, trial),) = queue._wanted({}).items()
    queue._enqueue(key, trial)
    queue._enqueue(key, trial)
    first, second = queue._database.ask(), queue._database.ask()
    queue._storage.set_trial_state_values(second._trial_id, TrialState.COMPLETE, [0.5])
    assert queue.fill() == Counts(0, 0, 1)
    assert queue._rows()[key].number == second.number != first.number


def test_the_run_of_a_dead_process_comes_again_and_that_of_a_living_one_does_not(make_queue):
    space = Space(lambda trial: trial.suggest_float(RATE, 1e-4, 1, log=True), space_of({}).rules)
    options = {"space": space, "sampler": "tpe", "trials": 2, "heartbeat_sec": 1}
    dead, other = make_queue(**options), make_queue(**options)
    dead.fill()
    lost, kept = dead.claim(), other.claim()  # the heart of the first does not beat
    folder = RunFolder(other._study.folder_of(kept.setting, 0))
    with other.beating(kept):
        assert other.fill() == Counts(0, 2, 0)
        assert other.claim() is None
        deadline = time.monotonic() + 20
        while other.fill() != Counts(1, 1, 0):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        again = other.claim()
        assert (again.index, again.seed, again.setting) == (lost.index, lost.seed, lost.setting)
        folder.lock()
    for _ in range(2):  # the row has ended, and no other is made while a process trains in the folder
        assert other.fill() == Counts(1, 1, 0)
        assert other.claim() is None
    folder.close()
    assert not dead.report(lost, 0.5, 1)  # it was not dead, only slow
    dead.end(lost, "diverged", 0.5, None)
    other.end(again, "done", 0.7, None)
    assert other.fill() == Counts(1, 0, 1)
    assert other.claim().setting == kept.setting
    assert [row.value for row in other._database.get_trials(states=(TrialState.COMPLETE,))] == [0.7]


@pytest.mark.parametrize(("hours", "is_dead"), [(-1, True), (1, False)])
def test_a_process_killed_before_its_first_heartbeat(make_queue, hours, is_dead):
    """The start of a row is by the clock of its machine."""
    queue = make_queue(trials=1)
    queue.fill()
    row = queue._database.ask()
    start = datetime.datetime.now() + datetime.timedelta(hours=hours)
    with queue._storage.engine.begin() as connection:
        change = "UPDATE trials SET datetime_start = :start WHERE trial_id = :trial"
        connection.execute(sqlalchemy.text(change), {"start": str(start), "trial": row._trial_id})
    assert queue.fill() == (Counts(1, 0, 0) if is_dead else Counts(0, 1, 0))
    if is_dead:  # and it was alive: its claim finds the row ended, and the run has another one
        with TAKEN_FOR_DEAD:
            assert queue._claim(row) is None
        assert queue.claim().index == 0


def test_what_ended_is_not_run_again_however_it_ended(make_queue):
    queue = make_queue()
    queue.fill()
    ends = [("done", 0.5, None), ("diverged", 0.1, None), ("pruned", 0.2, None), ("failed", None, "disk full")]
    for status, value, error in ends:
        queue.end(queue.claim(), status, value, error)
    queue.put_back(queue.claim())
    assert queue.fill() == Counts(2, 0, 4)
    assert numbers(run_all(make_queue())) == [(5, 0), (4, 0)]


# ---- the best settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "best"),
    [
        (None, [(64, 0.3), (128, 0.3)]),
        (0.9, [(64, 0.2), (128, 0.1)]),  # the fewest steps; the very first failed
    ],
)
def test_the_best_setting_of_each_batch_size_gets_more_seeds(make_queue, target, best):
    queue = make_queue(best_seeds=3, target=target)
    queue.fill()
    queue.end(queue.claim(), "failed", None, "disk full")  # 64, 0.1
    extra = [(trial.setting[BATCH], rate_of(trial), trial.seed) for trial in run_all(queue)[5:]]
    assert extra == [(*setting, seed) for setting in best for seed in (1, 2)]


def test_tpe_gives_all_seeds_the_same_values_in_every_branch_of_a_space(make_queue):
    """What a branch suggests is not known before TPE takes it; kills change nothing."""

    def suggest(trial):
        optimizer = trial.suggest_categorical("optimizer.name", ["lamb", "sgd"])
        trial.suggest_float(RATE if optimizer == "lamb" else "optimizer.momentum", 0.1, 0.9)

    options = {"space": Space(suggest, space_of({}).rules), "sampler": "tpe", "trials": 8, "seeds": 2}
    queue, other, chosen = make_queue(**options), make_queue(**options), {}
    while queue.fill().waiting:
        trial = queue.claim()
        queue.put_back(trial)  # as after a kill
        queue.fill()
        again = other.claim()
        queue.end(again, "done", 0.5, None)
        chosen.setdefault(again.index, []).append(again.setting)
    assert queue.fill() == Counts(0, 0, 8)
    assert all(len(settings) == 2 and settings[0] == settings[1] for settings in chosen.values())
    assert len({str(settings[0]) for settings in chosen.values()}) == 4
    fields = {field for row in queue._database.get_trials() for field in row.params}
    assert fields == {"optimizer.name", RATE, "optimizer.momentum"}


def test_the_best_setting_of_each_group_is_refined_and_then_gets_more_seeds(make_queue):
    """First two rates for each batch size, then half of the best one; the better of the two gets seeds."""

    def refine(best):
        return [{**best, RATE: 0.05}, best]  # the best one has been tried, and is not again

    def value_of(trial):
        return {0.05: 0.8, 0.1: 0.7, 0.2: 0.9 if trial.setting[BATCH] == 128 else 0.5}[rate_of(trial)]

    options = {"choices": {BATCH: [64, 128], RATE: [0.1, 0.2]}, "functions": {"refine": refine}, "best_seeds": 2}
    ran = run_all(make_queue(**options), value_of)
    assert numbers(ran) == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (4, 1), (3, 1)]
    found = [(trial.setting[BATCH], rate_of(trial)) for trial in ran[4:]]
    assert found == [(64, 0.05), (128, 0.05), (64, 0.05), (128, 0.2)]
    assert not run_all(make_queue(**options))


def test_the_median_of_a_group_ends_its_searched_trials_whatever_the_objective(make_queue):
    queue = make_queue(functions={"groups": (BATCH,)}, pruner="median", target=0.9, best_seeds=2)
    queue.fill()
    claimed = [queue.claim() for _ in range(6)]
    small, large = claimed[:3], claimed[3:]
    for trial, accuracy in zip(small[:2], (0.8, 0.9), strict=True):
        assert not queue.report(trial, accuracy, FIRST_VALIDATIONS - 1)
        assert not queue.report(trial, accuracy, FIRST_VALIDATIONS)
        queue.end(trial, "done", 100.0, None)  # steps, of which fewer are better
    assert not queue.report(small[2], 0.1, FIRST_VALIDATIONS - 1)  # too early
    assert queue.report(small[2], 0.84, FIRST_VALIDATIONS)
    assert not queue.report(large[0], 0.1, FIRST_VALIDATIONS)  # nothing of its group has ended
    assert not queue.report(small[2], 0.86, FIRST_VALIDATIONS + 1)  # no other came so far
    for trial in claimed[2:]:
        queue.end(trial, "done", 200.0, None)
    queue.fill()
    second_seed = queue.claim()
    assert (second_seed.index, second_seed.seed) == (0, 1)
    assert not queue.report(second_seed, 0.0, FIRST_VALIDATIONS)


# ---- the database ---------------------------------------------------------------------------------------------


def test_a_database_that_is_away_is_waited_for_until_a_signal_comes(make_queue, monkeypatch, caplog):
    queue, fail = make_queue(), [optuna.exceptions.StorageInternalError("connection refused")] * 2
    get_trials = queue._database.get_trials

    def flaky(*args, **kwargs):
        if fail:
            raise fail.pop()
        return get_trials(*args, **kwargs)

    monkeypatch.setattr(queue._database, "get_trials", flaky)
    monkeypatch.setattr(database.time, "sleep", lambda seconds: None)
    with caplog.at_level("INFO", "largebatch"):
        assert queue.fill() == Counts(6, 0, 0)
    assert "does not answer (connection refused); trying again in 1 s" in caplog.text
    assert "answers again after" in caplog.text
    fail.append(optuna.exceptions.StorageInternalError("connection refused"))
    monkeypatch.setattr(preemption, "_first_signal", 15)
    with pytest.raises(preemption.Stopped):
        queue.fill()


@pytest.mark.parametrize("bad", ["nonsense", "nodb://host/x", "sqlite:////no/such/folder/x.db"])
def test_a_database_that_cannot_be_opened(bad):
    with pytest.raises(UserError, match=r"--storage: .*(cannot be opened|allowed: a database URL)"):
        open_storage(bad, 20)


def test_a_password_is_neither_kept_nor_forgotten():
    kept = without_password("postgresql://me:secret@host/db")
    assert "secret" not in kept
    with pytest.raises(UserError, match="with its password"):
        without_password(kept)


def test_another_study_of_the_same_name(make_queue):
    make_queue(study_seed=1)
    with pytest.raises(UserError, match=r"holds another study named 'study': study_seed: 0 here, 1 there"):
        make_queue()
