import datetime
import threading
import time

import optuna
import pytest
import sqlalchemy
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

from largebatch.hosts import preemption
from largebatch.studies import search
from largebatch.studies.database import grace_sec, open_storage, without_password
from largebatch.studies.queue import Counts, TrialQueue, TrialSpec
from largebatch.studies.search import SearchOptions
from largebatch.tasks.kinds import CLASSIFICATION
from largebatch.util import UserError

SPACE = {
    "batch.size": CategoricalDistribution([64, 128]),
    "optimizer.learning_rate": CategoricalDistribution([0.1, 0.2, 0.3]),
}


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'study.db'}"


def make_queue(
    url,
    heartbeat_sec=20,
    pruner=None,
    direction="maximize",
    space=SPACE,
    sampler="grid",
    settings=6,
    best_by=("batch.size",),
    **further,
) -> TrialQueue:
    options = SearchOptions(space, sampler, study_seed=0, settings=settings, best_by=best_by, **further)
    return TrialQueue(
        open_storage(url, heartbeat_sec),
        "study",
        options,
        direction=direction,
        pruner=pruner,
        heartbeat_sec=heartbeat_sec,
        description={"of": direction},
    )


def learning_rate(spec) -> float:
    return spec.values["optimizer.learning_rate"]


def run_all(queue, value_of=learning_rate) -> list[TrialSpec]:
    """Claims and completes all there is."""
    ran = []
    while queue.enqueue_missing().waiting:
        while claimed := queue.claim():
            queue.complete(claimed, value_of(claimed.spec))
            ran.append(claimed.spec)
    return ran


def names(specs) -> list[str]:
    return [spec.name for spec in specs]


def test_every_point_of_the_grid_is_run_once(url):
    ran = run_all(make_queue(url, seeds=2))
    assert names(ran) == [f"{setting:04d}-{seed}" for setting in range(6) for seed in (0, 1)]
    assert [spec.values for spec in ran] == [point for point in search.grid(SPACE) for _ in (0, 1)]
    assert make_queue(url, seeds=2).enqueue_missing() == Counts(0, 0, 12)
    assert not run_all(make_queue(url, seeds=2))


def test_fewer_trials_than_before_leave_the_rest_out(url):
    make_queue(url).enqueue_missing()
    fewer = make_queue(url, settings=2, best_seeds=2, best_by=())
    assert names(run_all(fewer)) == ["0000-0", "0001-0", "0001-1"]
    assert len(run_all(make_queue(url))) == 4


def test_trials_is_the_total_and_can_grow(url):
    assert len(run_all(make_queue(url, settings=2))) == 2
    assert names(run_all(make_queue(url, settings=5))) == ["0002-0", "0003-0", "0004-0"]


@pytest.mark.parametrize("repeat", range(8))
def test_processes_that_fill_the_queue_at_once_run_no_trial_twice(url, repeat):
    one, two = make_queue(url), make_queue(url)
    for queue in (one, two):  # as if both had looked before either wrote
        for setting in range(6):
            values = search.grid(SPACE)[setting]
            queue._study.enqueue_trial(values, user_attrs={"setting": setting, "seed": 0})
    ran: list[TrialSpec] = []
    threads = [threading.Thread(target=lambda queue=queue: ran.extend(run_all(queue))) for queue in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names(ran)) == [f"{setting:04d}-0" for setting in range(6)]


def test_what_two_processes_filled_twice_does_not_wait_for_ever(url):
    one, two = make_queue(url), make_queue(url)
    one.enqueue_missing()
    claimed = [one.claim() for _ in range(6)]
    one._study.enqueue_trial(claimed[0].spec.values, user_attrs={"setting": 0, "seed": 0})  # two had looked before
    assert two.enqueue_missing() == Counts(0, 6, 0)
    for trial in claimed:
        one.complete(trial, 0.5)
    states = [trial.state for trial in two._study.get_trials()]
    assert (states.count(TrialState.COMPLETE), states.count(TrialState.FAIL), len(states)) == (6, 1, 7)


def test_a_trial_of_a_dead_process_comes_again_with_its_values(url, monkeypatch):
    dead = make_queue(url, heartbeat_sec=1, sampler="tpe", settings=1)  # its heart does not beat: no `with`
    dead.enqueue_missing()
    lost = dead.claim()
    other = make_queue(url, heartbeat_sec=1, sampler="tpe", settings=1)
    assert other.enqueue_missing() == Counts(0, 1, 0)
    assert other.claim() is None
    _wait_until(lambda: other.enqueue_missing() == Counts(1, 0, 0))
    again = other.claim()
    assert again.spec == lost.spec
    assert not dead.report(lost, 0.5, 1)  # it was not dead, only slow
    dead.complete(lost, 0.5, diverged=True)
    other.complete(again, 0.7)
    assert other.enqueue_missing() == Counts(0, 0, 1)
    assert [trial.value for trial in other._study.get_trials(states=(TrialState.COMPLETE,))] == [0.7]


def test_no_heartbeat_is_under_way_once_a_queue_is_closed(url, monkeypatch):
    begun, ended = threading.Event(), threading.Event()

    def slowly(trial_id):
        begun.set()
        threading.Event().wait(0.3)
        ended.set()

    with make_queue(url, heartbeat_sec=1, settings=1) as queue:
        queue.enqueue_missing()
        queue.claim()
        monkeypatch.setattr(queue._storage, "record_heartbeat", slowly)
        assert begun.wait(20)
    assert ended.is_set()


def test_a_beating_heart_keeps_a_trial(url):
    with make_queue(url, heartbeat_sec=1, settings=1) as alive:
        alive.enqueue_missing()
        alive.claim()
        other = make_queue(url, heartbeat_sec=1, settings=1)
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=5)
        while datetime.datetime.now() < deadline:
            assert other.enqueue_missing() == Counts(0, 1, 0)


def test_a_process_killed_before_its_first_heartbeat(url):
    dead = make_queue(url, heartbeat_sec=1, settings=1)
    dead.enqueue_missing()
    dead._study.ask()
    _wait_until(lambda: dead.enqueue_missing() == Counts(1, 0, 0))


class Clock:
    """This process's clocks as the queue sees them, which stand still until they are moved."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("largebatch.studies.queue.time", clock)
    return clock


def take_on_a_machine_whose_clock_is_off(queue, hours: int) -> optuna.Trial:
    """Takes a trial without claiming it; its start is as a machine writes it whose local time is `hours` ahead."""
    trial = queue._study.ask()
    start = datetime.datetime.now() + datetime.timedelta(hours=hours)
    with queue._storage.engine.begin() as connection:
        change = "UPDATE trials SET datetime_start = :start WHERE trial_id = :trial"
        connection.execute(sqlalchemy.text(change), {"start": str(start), "trial": trial._trial_id})
    return trial


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_a_trial_without_heartbeat_is_given_its_time_whatever_another_machines_clock_says(url, clock, hours):
    there, here = make_queue(url, settings=1), make_queue(url, settings=1)
    there.enqueue_missing()
    take_on_a_machine_whose_clock_is_off(there, hours)
    grace = grace_sec(20)
    assert here.enqueue_missing() == Counts(0, 1, 0)
    clock.now += grace - 1
    assert here.enqueue_missing() == Counts(0, 1, 0)
    here.restart_grace_period()  # the database was away
    clock.now += grace + 1
    assert here.enqueue_missing() == Counts(0, 1, 0)
    clock.now += grace - 1
    assert here.enqueue_missing() == Counts(0, 1, 0)
    clock.now += 2
    assert here.enqueue_missing() == Counts(1, 0, 0)


def test_a_claimed_trial_is_not_one_without_heartbeat(url, clock):
    there, here = make_queue(url, settings=1), make_queue(url, settings=1)
    there.enqueue_missing()
    trial = take_on_a_machine_whose_clock_is_off(there, hours=-1)
    assert here.enqueue_missing() == Counts(0, 1, 0)
    there._claim(trial)
    clock.now += 1000
    assert here.enqueue_missing() == Counts(0, 1, 0)


@pytest.mark.parametrize("moment", ["get_trials", "record_heartbeat", "suggest_values", "set_user_attr"])
def test_a_trial_ended_by_another_process_while_it_is_claimed_is_left_for_the_next(url, monkeypatch, moment):
    here, other = make_queue(url, settings=2), make_queue(url, settings=2)
    here.enqueue_missing()
    owners = {"get_trials": here._study, "record_heartbeat": here._storage, "suggest_values": search}
    owner = owners.get(moment, optuna.Trial)
    act, ended = getattr(owner, moment), []

    def end_first(*args, **kwargs):
        if not ended:
            (running,) = other._study.get_trials(states=(TrialState.RUNNING,))
            ended.append(running.user_attrs["setting"])
            other._storage.set_trial_state_values(running._trial_id, TrialState.FAIL)
        return act(*args, **kwargs)

    monkeypatch.setattr(owner, moment, end_first)
    assert here.claim().spec.name == "0001-0"
    assert ended == [0]
    assert other.enqueue_missing() == Counts(1, 1, 0)  # the first comes again
    assert here.claim().spec.name == "0000-0"


def _wait_until(condition, seconds=20):
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
    while not condition():
        assert datetime.datetime.now() < deadline
        threading.Event().wait(0.2)


def test_what_ended_is_not_run_again_however_it_ended(url):
    queue = make_queue(url)
    queue.enqueue_missing()
    queue.complete(queue.claim(), 0.5)
    queue.complete(queue.claim(), 0.1, diverged=True)
    queue.prune(queue.claim(), 0.2)
    queue.fail(queue.claim(), "disk full")
    queue.put_back(queue.claim())
    assert queue.enqueue_missing() == Counts(2, 0, 4)
    assert names(run_all(make_queue(url))) == ["0005-0", "0004-0"]


def test_the_best_setting_of_each_batch_size_gets_more_seeds(url):
    queue = make_queue(url, best_seeds=3)
    best = {64: 0.2, 128: 0.3}

    def value_of(spec):
        return 1.0 if learning_rate(spec) == best[spec.values["batch.size"]] else 0.5

    ran = run_all(queue, value_of)
    extra = [(spec.values["batch.size"], learning_rate(spec), spec.seed) for spec in ran[6:]]
    assert sorted(extra) == [(64, 0.2, 1), (64, 0.2, 2), (128, 0.3, 1), (128, 0.3, 2)]


def test_the_best_is_the_least_where_the_value_is_to_be_small_and_never_one_that_failed(url):
    queue = make_queue(url, best_seeds=2, direction="minimize")
    queue.enqueue_missing()
    queue.fail(queue.claim(), "disk full")  # 64, 0.1
    ran = run_all(queue)
    assert [(spec.values["batch.size"], learning_rate(spec)) for spec in ran[5:]] == [(64, 0.2), (128, 0.1)]


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_the_best_of_equally_good_settings_is_the_first(url, direction):
    ran = run_all(make_queue(url, best_seeds=2, direction=direction), lambda spec: 0.5)
    assert names(ran[6:]) == ["0000-1", "0003-1"]


def test_tpe_gives_all_seeds_of_a_setting_the_same_values(url):
    space = {"optimizer.learning_rate": FloatDistribution(1e-4, 1, log=True)}
    ran = run_all(make_queue(url, space=space, sampler="tpe", settings=4, seeds=2))
    chosen = {}
    for spec in ran:
        chosen.setdefault(spec.setting, []).append(learning_rate(spec))
    assert all(len(values) == 2 and len(set(values)) == 1 for values in chosen.values())
    assert len({values[0] for values in chosen.values()}) == 4


def test_the_best_setting_of_each_group_is_refined_and_then_gets_more_seeds(url):
    """First three rates for each batch size, then half of the best one; the better of the two gets seeds."""

    def refine(best):
        return [{**best, "optimizer.learning_rate": 0.05}, best]  # the best one has been tried, and is not again

    def includes(values):
        return values["optimizer.learning_rate"] > 0.05

    def value_of(spec):
        return {0.05: 0.8, 0.1: 0.7, 0.2: 0.9 if spec.values["batch.size"] == 128 else 0.5}[learning_rate(spec)]

    space = {
        "batch.size": CategoricalDistribution([64, 128]),
        "optimizer.learning_rate": CategoricalDistribution([0.05, 0.1, 0.2]),
    }
    options = {"space": space, "settings": 4, "includes": includes, "refine": refine, "best_seeds": 2}
    queue = make_queue(url, **options)
    ran = run_all(queue, value_of)
    assert names(ran) == ["0000-0", "0001-0", "0002-0", "0003-0", "0004-0", "0005-0", "0004-1", "0003-1"]
    assert [(spec.values["batch.size"], learning_rate(spec)) for spec in ran[4:]] == [
        (64, 0.05),
        (128, 0.05),
        (64, 0.05),
        (128, 0.2),
    ]
    assert not run_all(make_queue(url, **options))


def test_groups_are_combinations_of_fields(url):
    queue = make_queue(url, best_by=("batch.size", "optimizer.learning_rate"), best_seeds=2)
    assert len(run_all(queue)) == 6 * 2


def test_the_median_of_a_group_ends_its_trials_whatever_the_objective(url):
    pruner = search.create_pruner("median", ("batch.size",), CLASSIFICATION)
    queue = make_queue(url, pruner=pruner, direction="minimize")
    queue.enqueue_missing()
    claimed = [queue.claim() for _ in range(6)]
    small, large = claimed[:3], claimed[3:]
    late = search.FIRST_VALIDATIONS
    for trial, accuracy in zip(small[:2], (0.8, 0.9), strict=True):
        assert not queue.report(trial, accuracy, late - 1)
        assert not queue.report(trial, accuracy, late)
        queue.complete(trial, 100.0)  # updates, of which fewer are better
    assert not queue.report(small[2], 0.1, late - 1)  # too early
    assert queue.report(small[2], 0.84, late)
    assert not queue.report(large[0], 0.1, late)  # nothing of its group has ended
    assert not queue.report(small[2], 0.86, late + 1)  # no other came so far


def test_further_seeds_are_never_pruned(url):
    pruner = search.create_pruner("median", ("batch.size",), CLASSIFICATION)
    queue = make_queue(url, pruner=pruner, best_seeds=2)
    late = search.FIRST_VALIDATIONS
    queue.enqueue_missing()
    while claimed := queue.claim():
        queue.report(claimed, learning_rate(claimed.spec), late)
        queue.complete(claimed, learning_rate(claimed.spec))
    queue.enqueue_missing()
    second_seed = queue.claim()
    assert second_seed.spec.seed == 1
    assert not queue.report(second_seed, 0.0, late)
    assert second_seed.optuna_trial.should_prune()  # as it would be, were it one of the searched


def test_pruner_sees_what_is_reported(url):
    queue = make_queue(url, pruner=optuna.pruners.MedianPruner(n_startup_trials=1), settings=2)
    queue.enqueue_missing()
    good, bad = queue.claim(), queue.claim()
    assert not queue.report(good, 0.9, 1)
    queue.complete(good, 0.9)
    assert queue.report(bad, 0.1, 1)


def test_a_database_that_is_away_is_waited_for(url, monkeypatch, caplog):
    queue, fail = make_queue(url), [optuna.exceptions.StorageInternalError("connection refused")] * 2
    get_trials = queue._study.get_trials

    def flaky(*args, **kwargs):
        if fail:
            raise fail.pop()
        return get_trials(*args, **kwargs)

    monkeypatch.setattr(queue._study, "get_trials", flaky)
    with caplog.at_level("INFO", "largebatch"):
        assert queue.enqueue_missing() == Counts(6, 0, 0)
    assert "does not answer (connection refused); trying again in 1 s" in caplog.text
    assert "answers again after" in caplog.text


@pytest.mark.full
def test_after_the_database_was_away_all_may_send_a_heartbeat_first(url):
    alive = make_queue(url, heartbeat_sec=1, settings=1)
    alive.enqueue_missing()
    alive.claim()
    time.sleep(4)  # as long without a heartbeat as if it were dead
    other = make_queue(url, heartbeat_sec=1, settings=1)
    other.restart_grace_period()
    assert other.enqueue_missing() == Counts(0, 1, 0)
    _wait_until(lambda: other.enqueue_missing() == Counts(1, 0, 0))


def test_counts_follow_what_happens(url):
    queue = make_queue(url)
    queue.enqueue_missing()
    one, two = queue.claim(), queue.claim()
    assert queue.counts == Counts(4, 2, 0)
    queue.complete(one, 0.5)
    queue.put_back(one)  # has ended
    queue.put_back(two)
    assert queue.counts == queue.enqueue_missing() == Counts(5, 0, 1)


def test_a_signal_ends_the_waiting(url, monkeypatch):
    queue = make_queue(url)

    def gone(*args, **kwargs):
        raise optuna.exceptions.StorageInternalError("connection refused")

    monkeypatch.setattr(queue._study, "get_trials", gone)
    monkeypatch.setattr(preemption, "_first_signal", 15)
    with pytest.raises(preemption.Stopped):
        queue.enqueue_missing()


@pytest.mark.parametrize("bad", ["nonsense", "nodb://host/x", "sqlite:////no/such/folder/x.db"])
def test_a_database_that_cannot_be_opened(bad):
    with pytest.raises(UserError, match=r"--storage: .*(cannot be opened|allowed: a database URL)"):
        open_storage(bad, 20)


def test_a_password_is_neither_kept_nor_forgotten():
    kept = without_password("postgresql://me:secret@host/db")
    assert "secret" not in kept
    with pytest.raises(UserError, match="with its password"):
        without_password(kept)


def test_another_study_of_the_same_name(url):
    make_queue(url, direction="minimize")
    with pytest.raises(
        UserError, match=r"holds another study named 'study': of: 'maximize' here, 'minimize' there"
    ):
        make_queue(url, direction="maximize")
