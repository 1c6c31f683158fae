"""The queue of a study's trials: every run once, whatever dies, and the best settings first among equals."""

import datetime
import threading

import optuna
import pytest
import sqlalchemy
from made_studies import make_study, space_of
from optuna.trial import TrialState

from configs import default
from largebatch.hosts import preemption
from largebatch.runs.folder import RunFolder
from largebatch.studies import queue as queues
from largebatch.studies.database import open_storage, without_password
from largebatch.studies.queue import FIRST_VALIDATIONS, Counts, Trial, TrialQueue
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

    return make


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


def states_of(queue: TrialQueue) -> list[str]:
    return sorted(row.state.name for row in queue._database.get_trials())


# ---- every run once ---------------------------------------------------------------------------------------


def test_every_point_of_the_grid_is_run_once(make_queue):
    ran = run_all(make_queue(seeds=2))
    assert numbers(ran) == [(index, seed) for index in range(6) for seed in (0, 1)]
    assert [tuple(trial.setting.values()) for trial in ran[::2]] == [
        (b, r) for b in (64, 128) for r in (0.1, 0.2, 0.3)
    ]
    assert make_queue(seeds=2).fill() == Counts(0, 0, 12)
    assert not run_all(make_queue(seeds=2))
    (row, *_) = make_queue(seeds=2)._database.get_trials()
    assert row.params == ran[0].setting  # as optuna-dashboard shows it


def test_trials_is_the_total_and_may_change(make_queue):
    make_queue().fill()
    fewer = make_queue(trials=2, best_seeds=2)
    assert numbers(run_all(fewer)) == [(0, 0), (1, 0), (1, 1)]
    assert len(run_all(make_queue())) == 4


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


def test_a_run_of_a_dead_process_comes_again_with_its_setting(make_queue):
    space = Space(lambda trial: trial.suggest_float(RATE, 1e-4, 1, log=True), space_of({}).rules)
    options = {"space": space, "sampler": "tpe", "trials": 1, "heartbeat_sec": 1}
    dead = make_queue(**options)
    dead.fill()
    lost = dead.claim()  # its heart does not beat
    other = make_queue(**options)
    assert other.fill() == Counts(0, 1, 0)
    assert other.claim() is None
    wait_until(lambda: other.fill() == Counts(1, 0, 0))
    again = other.claim()
    assert (again.index, again.seed, again.setting) == (lost.index, lost.seed, lost.setting)
    assert not dead.report(lost, 0.5, 1)  # it was not dead, only slow
    dead.end(lost, "diverged", 0.5, None)
    other.end(again, "done", 0.7, None)
    assert other.fill() == Counts(0, 0, 1)
    assert [row.value for row in other._database.get_trials(states=(TrialState.COMPLETE,))] == [0.7]


def test_a_run_whose_heartbeats_were_missed_is_left_to_its_process(make_queue, tmp_path):
    queue = make_queue(trials=1, heartbeat_sec=1)
    queue.fill()
    trial = queue.claim()
    (study,) = tmp_path.iterdir()
    folder = RunFolder(queue._study.folder_of(trial.setting, 0))
    assert folder.path.parent == study / "trials"
    folder.lock()
    wait_until(lambda: "FAIL" in states_of(queue) or queue.fill() is None)
    for _ in range(3):
        assert queue.fill() == Counts(1, 0, 0)  # to be run by somebody
    assert states_of(queue) == ["FAIL"]
    folder.close()
    queue.fill()
    assert states_of(queue) == ["FAIL", "WAITING"]


def test_a_beating_heart_keeps_a_trial_and_one_that_did_not_end_is_put_back(make_queue):
    alive = make_queue(trials=1, heartbeat_sec=1)
    alive.fill()
    trial = alive.claim()
    with alive.beating(trial):
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=5)
        while datetime.datetime.now() < deadline:
            assert alive.fill() == Counts(0, 1, 0)
    assert alive.fill() == Counts(1, 0, 0)


@pytest.mark.parametrize(("hours", "is_dead"), [(-1, True), (0, False), (1, False)])
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
        with queues.TAKEN_FOR_DEAD:
            assert queue._claim(row) is None
        assert queue.claim().index == 0


def wait_until(condition, seconds=20):
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
    while not condition():
        assert datetime.datetime.now() < deadline
        threading.Event().wait(0.2)


def test_what_ended_is_not_run_again_however_it_ended(make_queue):
    queue = make_queue()
    queue.fill()
    for status, value, error in (
        ("done", 0.5, None),
        ("diverged", 0.1, None),
        ("pruned", 0.2, None),
        ("failed", None, "disk full"),
    ):
        queue.end(queue.claim(), status, value, error)
    queue.put_back(queue.claim())
    assert queue.fill() == Counts(2, 0, 4)
    assert numbers(run_all(make_queue())) == [(5, 0), (4, 0)]


# ---- the best settings --------------------------------------------------------------------------------------


def test_the_best_setting_of_each_batch_size_gets_more_seeds(make_queue):
    best = {64: 0.2, 128: 0.3}
    ran = run_all(make_queue(best_seeds=3), lambda trial: float(rate_of(trial) == best[trial.setting[BATCH]]))
    extra = [(trial.setting[BATCH], rate_of(trial), trial.seed) for trial in ran[6:]]
    assert sorted(extra) == [(64, 0.2, 1), (64, 0.2, 2), (128, 0.3, 1), (128, 0.3, 2)]


def test_the_best_is_the_least_where_the_value_is_to_be_small_and_never_one_that_failed(make_queue):
    queue = make_queue(best_seeds=2, target=0.9)
    queue.fill()
    queue.end(queue.claim(), "failed", None, "disk full")  # 64, 0.1
    ran = run_all(queue)
    assert [(trial.setting[BATCH], rate_of(trial)) for trial in ran[5:]] == [(64, 0.2), (128, 0.1)]


@pytest.mark.parametrize("target", [None, 0.9])
def test_the_best_of_equally_good_settings_is_the_first(make_queue, target):
    ran = run_all(make_queue(best_seeds=2, target=target), lambda trial: 0.5)
    assert numbers(ran[6:]) == [(0, 1), (3, 1)]


def test_tpe_gives_all_seeds_of_a_setting_the_same_values(make_queue):
    space = Space(lambda trial: trial.suggest_float(RATE, 1e-4, 1, log=True), space_of({}).rules)
    chosen = {}
    for trial in run_all(make_queue(space=space, sampler="tpe", trials=8, seeds=2)):
        chosen.setdefault(trial.index, []).append(rate_of(trial))
    assert all(len(values) == 2 and len(set(values)) == 1 for values in chosen.values())
    assert len({values[0] for values in chosen.values()}) == 4


def test_tpe_takes_up_settings_of_every_branch_of_a_space(make_queue):
    """What a branch suggests is not known before TPE takes it."""

    def suggest(trial):
        optimizer = trial.suggest_categorical("optimizer.name", ["lamb", "sgd", "adam", "muon"])
        trial.suggest_float({"lamb": RATE, "sgd": "optimizer.momentum"}.get(optimizer, "optimizer.b2"), 0.1, 0.9)

    options = {"space": Space(suggest, space_of({}).rules), "sampler": "tpe", "trials": 16, "seeds": 2}
    queue = make_queue(**options)
    while queue.fill().waiting:
        trial = queue.claim()
        queue.put_back(trial)  # as after a kill
        queue.fill()
        again = make_queue(**options).claim()
        queue.end(again, "done", 0.5, None)
    assert queue.fill() == Counts(0, 0, 16)
    fields = {field for row in queue._database.get_trials() for field in row.params}
    assert fields == {"optimizer.name", RATE, "optimizer.momentum", "optimizer.b2"}


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


def test_groups_are_combinations_of_fields(make_queue):
    assert len(run_all(make_queue(functions={"groups": (BATCH, RATE)}, best_seeds=2))) == 6 * 2


# ---- pruners --------------------------------------------------------------------------------------------------


def test_the_median_of_a_group_ends_its_trials_whatever_the_objective(make_queue):
    queue = make_queue(functions={"groups": (BATCH,)}, pruner="median", target=0.9)
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


def test_further_seeds_are_never_pruned(make_queue):
    queue = make_queue(functions={"groups": (BATCH,)}, pruner="median", best_seeds=2)
    queue.fill()
    while trial := queue.claim():
        queue.report(trial, rate_of(trial), FIRST_VALIDATIONS)
        queue.end(trial, "done", rate_of(trial), None)
    queue.fill()
    second_seed = queue.claim()
    assert second_seed.seed == 1
    assert not queue.report(second_seed, 0.0, FIRST_VALIDATIONS)
    assert second_seed.row.should_prune()  # as it would be, were it one of the searched


# ---- the database ---------------------------------------------------------------------------------------------


def test_a_database_that_is_away_is_waited_for(make_queue, monkeypatch, caplog):
    queue, fail = make_queue(), [optuna.exceptions.StorageInternalError("connection refused")] * 2
    get_trials = queue._database.get_trials

    def flaky(*args, **kwargs):
        if fail:
            raise fail.pop()
        return get_trials(*args, **kwargs)

    monkeypatch.setattr(queue._database, "get_trials", flaky)
    with caplog.at_level("INFO", "largebatch"):
        assert queue.fill() == Counts(6, 0, 0)
    assert "does not answer (connection refused); trying again in 1 s" in caplog.text
    assert "answers again after" in caplog.text


def test_a_signal_ends_the_waiting(make_queue, monkeypatch):
    queue = make_queue()

    def gone(*args, **kwargs):
        raise optuna.exceptions.StorageInternalError("connection refused")

    monkeypatch.setattr(queue._database, "get_trials", gone)
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
