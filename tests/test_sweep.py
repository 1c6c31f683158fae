import json
import subprocess
import sys

import jax
import optuna
import pytest
from conftest import ROOT, assert_one_line_error, on_devices, run_script
from optuna.distributions import CategoricalDistribution, FloatDistribution

import build
import model as models
import train
from build import ProgramCache
from largebatch import terminal
from largebatch.hosts import collectives, preemption
from largebatch.runs.folder import RunFolder
from largebatch.runs.progress import RunProgress
from largebatch.studies.database import open_storage
from largebatch.studies.display import SweepTable
from largebatch.studies.queue import ClaimedTrial, Counts, TrialQueue, TrialSpec
from largebatch.studies.search import PRUNERS, SearchOptions, grid
from largebatch.studies.space import as_json
from largebatch.studies.study import Study
from largebatch.studies.trial import AssignedTrial, TrialReporter
from largebatch.studies.worker import Worker
from largebatch.tasks.kinds import CLASSIFICATION
from largebatch.util import UserError

RATES = CategoricalDistribution([0.003, 0.01, 0.03])
SPACE_FILE = """
from optuna.distributions import CategoricalDistribution

def get_space():
    return {"optimizer.name": CategoricalDistribution(["lamb", "sgd"]),
            "optimizer.learning_rate": CategoricalDistribution([0.003, 0.01])}
"""


@pytest.fixture
def config(small_config):
    small_config.train.outer_steps = 2
    small_config.batch.size = 128  # 16 a device, as in other tests, which so share their programs
    return small_config


def make_study(
    config,
    path,
    space,
    derive=lambda config: None,
    pruner="none",
    sampler="grid",
    settings=None,
    seeds=1,
) -> Study:
    settings = settings or len(grid(space))
    description = {"space": as_json(space), "config": config.to_dict()}
    RunFolder(path).write_json("study.json", description)
    return Study(
        path=path,
        config=config,
        storage=f"sqlite:///{path / 'study.db'}",
        search=SearchOptions(space, sampler, study_seed=0, settings=settings, seeds=seeds),
        pruner=pruner,
        objective="best_val_accuracy",
        heartbeat_sec=20,
        derive=derive,
        models=models.MODELS,
        description=description,
    )


def queue_of(study: Study) -> TrialQueue:
    return TrialQueue(
        open_storage(study.storage, study.heartbeat_sec),
        "s",
        study.search,
        direction="maximize",
        pruner=PRUNERS[study.pruner](),
        heartbeat_sec=study.heartbeat_sec,
        description={},
    )


def run_study(study: Study, cache=None) -> dict[str, dict]:
    """Run a study in this process; return the summaries by name of trial."""
    queue = queue_of(study)
    table = SweepTable("s", CLASSIFICATION, lambda: queue.counts, enabled=True)
    with queue, table:
        make_worker(study, queue, table, cache).run()
    assert queue.enqueue_missing().left == 0
    return summaries_of(study.path)


def make_worker(study: Study, queue: TrialQueue, table: SweepTable, cache=None) -> Worker:
    return Worker(study, queue, table, train=train.train_and_evaluate, cache=cache or ProgramCache())


def summaries_of(path) -> dict[str, dict]:
    folders = sorted((path / "trials").iterdir())
    return {folder.name: json.loads((folder / "summary.json").read_text()) for folder in folders}


@pytest.mark.full
def test_a_trial_is_the_run_that_train_would_do(config, tmp_path):
    summaries = run_study(make_study(config, tmp_path, {"optimizer.learning_rate": RATES}, seeds=2))
    assert list(summaries) == ["0000-0", "0000-1", "0001-0", "0001-1", "0002-0", "0002-1"]
    config.optimizer.learning_rate, config.seed = 0.01, 1
    alone = train.train_and_evaluate(config, str(tmp_path / "alone"))
    assert summaries["0001-1"]["params_sha256"] == alone["params_sha256"]
    assert len({summary["params_sha256"] for summary in summaries.values()}) == 6


@pytest.fixture
def compilations():
    """Counts the programs that are compiled, or read from the cache of compiled programs."""
    events = []

    def listen(name, *_, **__):
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax._src.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.full
def test_trials_of_one_shape_share_one_compilation(config, tmp_path, compilations):
    cache = ProgramCache()
    first = {"optimizer.learning_rate": CategoricalDistribution([0.01])}
    run_study(make_study(config, tmp_path / "first", first), cache=cache)
    assert len(compilations) > 2  # at least the inner loop, the predictions and the initial state
    compilations.clear()
    others = {
        "optimizer.learning_rate": CategoricalDistribution([0.02, 0.03]),
        "optimizer.momentum": CategoricalDistribution([0.5]),
        "optimizer.weight_decay": CategoricalDistribution([0.1]),
        "batch.size": CategoricalDistribution([200, 640]),
        "train.inner_steps": CategoricalDistribution([4]),  # 3 before; both are done by a program for 4
    }
    summaries = run_study(make_study(config, tmp_path / "others", others, seeds=2), cache=cache)
    assert len(summaries) == 8
    assert compilations == []


@pytest.mark.full
def test_programs_are_let_go_before_there_are_too_many(config, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "MAX_PROGRAMS", 1)
    space, cache = {"optimizer.name": CategoricalDistribution(["lamb", "sgd"])}, ProgramCache()
    summaries = run_study(make_study(config, tmp_path, space), cache=cache)
    assert [summary["status"] for summary in summaries.values()] == ["done"] * 2
    assert len(cache._programs) == 1  # the second's


@pytest.mark.full
def test_trials_of_other_lengths_and_batch_sizes(config, tmp_path):
    def derive(config):
        config.train.outer_steps = 1 if config.batch.size == 64 else 4

    space = {"batch.size": CategoricalDistribution([64, 100, 640])}
    summaries = run_study(make_study(config, tmp_path, space, derive))
    assert [summary["steps"] for summary in summaries.values()] == [3, 12, 12]
    assert [summary["examples_seen"] for summary in summaries.values()] == [3 * 64, 12 * 100, 12 * 640]


@pytest.mark.full
def test_a_diverged_or_failing_trial_is_listed_and_the_others_go_on(config, tmp_path, capsys):
    # 10,000 examples are more than there are; a rate of 1e38 does not stay finite.
    rates = CategoricalDistribution([0.01, 1e38])
    space = {"optimizer.learning_rate": rates, "batch.size": CategoricalDistribution([128, 10_000])}
    config.optimizer.name = "sgd"
    study = make_study(config, tmp_path, space)
    queue = queue_of(study)
    table = SweepTable("s", CLASSIFICATION, lambda: queue.counts, enabled=True)
    with queue, table:
        make_worker(study, queue, table).run()
    shown = capsys.readouterr().out
    assert "4 of 4 trials ended" in shown
    assert shown.count("  failed  ") == 2
    assert "batch.size: 10000; allowed: an integer from 1 to 640" in shown
    assert shown.count("  diverged  ") == 1
    assert queue.enqueue_missing() == Counts(0, 0, 4)
    trial = json.loads((tmp_path / "trials" / "0001-0" / "trial.json").read_text())
    assert "batch.size: 10000" in trial["error"]


def test_trials_whose_programs_do_not_fit_fail_each_by_itself(config, tmp_path, monkeypatch):
    def programs(self, plan):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(ProgramCache, "programs", programs)
    rates = CategoricalDistribution([0.01, 0.02])
    study = make_study(config, tmp_path, {"optimizer.learning_rate": rates})
    queue = queue_of(study)
    table = SweepTable("s", CLASSIFICATION, lambda: queue.counts, enabled=True)
    with queue, table:
        make_worker(study, queue, table).run()
    for name in ("0000-0", "0001-0"):
        trial = json.loads((tmp_path / "trials" / name / "trial.json").read_text())
        assert trial["error"] == "RESOURCE_EXHAUSTED: out of memory"
    assert queue.enqueue_missing() == Counts(0, 0, 2)


def test_several_failures_in_a_row_end_the_sweep(config, tmp_path):
    space = {"batch.size": CategoricalDistribution([1000, 2000, 3000, 4000])}
    with pytest.raises(UserError, match=r"3 trials in a row failed, the last one: batch\.size: 3000"):
        run_study(make_study(config, tmp_path, space))


def test_a_trial_that_another_process_trains_comes_again(config, tmp_path, monkeypatch, caplog):
    study = make_study(config, tmp_path, {"optimizer.learning_rate": CategoricalDistribution([0.01])})
    other = RunFolder(tmp_path / "trials" / "0000-0")
    other.lock()
    monkeypatch.setattr("largebatch.studies.worker.time.sleep", lambda seconds: other.close())
    with caplog.at_level("INFO", "largebatch"):
        summaries = run_study(study)
    assert "it comes again later" in caplog.text
    assert summaries["0000-0"]["status"] == "done"


@pytest.mark.full
def test_an_error_that_is_not_the_settings_own_ends_the_sweep_and_loses_nothing(config, tmp_path, monkeypatch):
    space = {"optimizer.name": CategoricalDistribution(["lamb", "sgd"])}
    study, record = make_study(config, tmp_path, space), RunProgress.record

    def find_the_disk_full(*_):
        raise UserError("disk full")

    monkeypatch.setattr(RunProgress, "record", find_the_disk_full)
    with pytest.raises(UserError, match="disk full"):
        run_study(study)
    assert queue_of(study).enqueue_missing() == Counts(2, 0, 0)
    monkeypatch.setattr(RunProgress, "record", record)
    assert [summary["status"] for summary in run_study(study).values()] == ["done", "done"]


def test_a_signal_puts_all_claimed_trials_back(config, tmp_path, monkeypatch):
    space = {"optimizer.name": CategoricalDistribution(["lamb", "adam", "sgd"])}
    study = make_study(config, tmp_path, space)
    monkeypatch.setattr(preemption, "_first_signal", 15)
    with pytest.raises(preemption.Stopped):
        run_study(study)
    assert queue_of(study).enqueue_missing() == Counts(3, 0, 0)


def test_integers_in_place_of_words(small_config, tmp_path):
    assert small_config.batch.size == "full"
    space = {
        "batch.size": CategoricalDistribution([64, "full"]),
        "batch.micro_batch_size": CategoricalDistribution([8]),
    }
    study = make_study(small_config, tmp_path, space)
    assert study.config_of({"batch.size": 64, "batch.micro_batch_size": 8}, 0).batch.size == 64
    small_config.batch.size = 64
    assert study.config_of({"batch.size": "full", "batch.micro_batch_size": 8}, 0).batch.size == "full"


def test_a_faulty_derive_is_one_line(config, tmp_path):
    def derive(config):
        config.train.inner_steps = undefined  # noqa: F821

    study = make_study(config, tmp_path, {"optimizer.learning_rate": RATES}, derive)
    with pytest.raises(UserError, match=r"--space: \{.*NameError: name 'undefined'"):
        study.config_of({"optimizer.learning_rate": 0.01}, 0)


@pytest.mark.full
def test_pruned_trials_end_early_and_are_kept(config, tmp_path, monkeypatch):
    config.train.outer_steps = 6

    class Second(optuna.pruners.BasePruner):
        """Prunes every trial but the first, at the second validation."""

        def prune(self, study, trial):
            return trial.number > 0 and trial.last_step == 2

    monkeypatch.setitem(PRUNERS, "median", Second)
    space = {"optimizer.learning_rate": CategoricalDistribution([0.01, 0.02])}
    study = make_study(config, tmp_path, space, pruner="median")
    run_study(study)
    good, bad = summaries_of(tmp_path).values()
    assert (good["status"], bad["status"]) == ("done", "pruned")
    assert (bad["steps"], good["steps"]) == (6, 18)
    states = [
        trial.state.name
        for trial in optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study.db'}").get_trials()
    ]
    assert sorted(states) == ["COMPLETE", "PRUNED"]


@pytest.mark.parametrize("primary", [True, False])
@pytest.mark.parametrize("told", ["what was before", "a new row"])
def test_a_signal_while_the_database_is_away_ends_the_trial_on_every_host(
    config, tmp_path, monkeypatch, primary, told
):
    """Host 0 alone waits for the database, and the others for what it says."""
    study = make_study(config, tmp_path, {"optimizer.learning_rate": RATES}, pruner="median")
    row = {"val_score": 0.5, "outer": 1}
    spec = TrialSpec(setting=0, seed=0, values={})
    folder = RunFolder(study.folder_of(spec))
    folder.begin(config.to_dict())
    folder.append_row(row)
    signal_of_host_0 = 15

    class Away:
        def report(self, *_):
            raise preemption.Stopped(signal_of_host_0)

    if not primary:
        monkeypatch.setattr(
            collectives, "json_from_primary", lambda mine: {"should_prune": False, "signal": signal_of_host_0}
        )
        monkeypatch.setattr(collectives, "from_primary", lambda mine: pytest.fail("in a collective"))
    table = SweepTable("s", CLASSIFICATION, Counts, enabled=False)
    if primary:
        trial, queue = AssignedTrial(spec, ClaimedTrial(spec, optuna_trial=None)), Away()
    else:
        trial, queue = AssignedTrial(spec, claimed=None), None
    reporter = TrialReporter(study, trial, queue, table)
    table.start(spec.name, {}, 2, 0)
    tell = {"what was before": lambda: reporter.start(2, 1, ""), "a new row": lambda: reporter.row(row, 2)}[told]
    with pytest.raises(preemption.Stopped):
        tell()


@pytest.mark.full
def test_tpe_searches_and_all_its_trials_are_kept(config, tmp_path):
    space = {"optimizer.learning_rate": FloatDistribution(1e-4, 0.1, log=True)}
    summaries = run_study(make_study(config, tmp_path, space, sampler="tpe", settings=3))
    assert list(summaries) == ["0000-0", "0001-0", "0002-0"]
    trials = [json.loads((tmp_path / "trials" / name / "trial.json").read_text()) for name in summaries]
    settings = [trial["setting"] for trial in trials]
    assert len({setting["optimizer.learning_rate"] for setting in settings}) == 3


def test_a_leaderboard_of_others_does_not_steer_the_terminal(capsys):
    terminal.print_table(["[/name]", "value"], [["\x1b[2J", "[/x]"]])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    for text in ("[/name]", r"\x1b[2J", "[/x]"):
        assert text in shown


# ---- the command ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command(tmp_path_factory, session_cache):
    """A function that runs sweep.py on a small study."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "space.py").write_text(SPACE_FILE)
    small = {"dataset.num_examples": 100, "dataset.image_size": 16, "train.inner_steps": 3, "train.outer_steps": 2}
    given = [f"--config.{name}={value}" for name, value in small.items()]
    given += [f"--config.augment.cache_dir={session_cache}"]

    def run(*arguments, study="study", space="space.py", config=given, env=None):
        space = [f"--space={folder / space}"] if space else []
        options = [f"--study={folder / study}", *space, *config, *arguments]
        return run_script(ROOT / "sweep.py", *options, env=env, cwd=folder)

    run.folder = folder
    run.config = given
    return run


@pytest.mark.full
def test_the_command_its_leaderboard_and_going_on(command, session_cache):
    result = command("--trials=2")
    assert result.returncode == 0, result.stderr
    assert "2 of 2 trials ended" in result.stdout
    assert "best_val_accuracy" in result.stdout
    assert "warning" not in result.stderr.lower()
    more = command("--trials=3", space=None, config=[])
    assert more.returncode == 0, more.stderr
    assert more.stdout.count("started at update 0") == 1
    named = [line for line in more.stderr.splitlines() if "which" in line]
    assert named == [
        f"uses augment.cache_dir {session_cache}, which {command.folder / 'study'} names",
        f"runs the space file {command.folder / 'space.py'}, which {command.folder / 'study'} names",
    ]
    described = json.loads((command.folder / "study" / "study.json").read_text())
    assert described["config"]["dataset"]["num_examples"] == 100
    assert described["trials"] == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"space": None, "study": "none"}, ["--study: no study in", "give --space"]),
        ({"space": "none.py", "study": "x"}, ["--space:", "none.py is not a file"]),
        (("--trials=9", {"study": "x"}), ["--trials: 9; allowed: up to 4"]),
        (("--trials=3", "--seeds=2", {"study": "x"}), ["--trials: 3; allowed: a multiple of --seeds, 2"]),
        (("--sampler=random", {"study": "x"}), ["--trials: missing"]),
        (("--objective=steps_to_target", {"study": "x"}), ["needs train.target_accuracy"]),
        (("--best_seeds=1", {"study": "x"}), ["--best_seeds: 1; allowed: more than --seeds, 1"]),
        (("--config.dataset.name=mine", "--config.dataset.path=/no", {"study": "x"}), ["dataset.path: /no"]),
        (("--storage=nonsense", {"study": "x"}), ["--storage: 'nonsense'; allowed: a database URL"]),
        (
            ("--storage=sqlite:////no/such.db", {"study": "y"}),
            ["--storage: sqlite:////no/such.db cannot be opened"],
        ),
    ],
)
def test_bad_input_is_one_line(command, arguments, words):
    arguments = arguments if isinstance(arguments, tuple) else (arguments,)
    options = [one for one in arguments if isinstance(one, str)]
    (changed,) = [one for one in arguments if isinstance(one, dict)]
    result = command(*options, **changed)
    assert_one_line_error(result, *words)
    assert not {"x", "y", "none"} & {path.name for path in command.folder.iterdir()}


TUPLES_FILE = """
from optuna.distributions import CategoricalDistribution

def get_space():
    return {"schedule.decay_steps": CategoricalDistribution([(1,), (1, 2)]),
            "optimizer.clip_norm": CategoricalDistribution([None, 1.0])}
"""


@pytest.mark.full
def test_tuples_and_none_in_a_space_are_trained_and_shown(command):
    (command.folder / "tuples.py").write_text(TUPLES_FILE)
    step = ["--config.schedule.name=step", "--config.schedule.decay_steps=(1,)", "--config.train.outer_steps=1"]
    given = {"study": "tuples", "config": [*command.config, *step]}
    first = command("--trials=1", space="tuples.py", **given)
    assert first.returncode == 0, first.stderr
    result = command("--trials=3", space="tuples.py", **given)  # goes on from what the database gives back
    assert result.returncode == 0, result.stderr
    assert "Warning" not in first.stderr + result.stderr
    table = [line.split() for line in result.stdout.splitlines() if line.endswith("1 done  ")]
    assert sorted(row[1:-4] for row in table) == [["[1,", "2]", "None"], ["[1]", "1"], ["[1]", "None"]]
    for name, steps in {"0000-0": [1], "0002-0": [1, 2]}.items():
        config = json.loads((command.folder / "tuples" / "trials" / name / "config.json").read_text())
        assert config["schedule"]["decay_steps"] == steps
    again = command(space=None, study="tuples", config=[])
    assert again.returncode == 0, again.stderr
    assert "3 of" not in again.stdout  # nothing is left but to tell the result
    assert again.stdout == result.stdout[-len(again.stdout) :]


@pytest.mark.full
def test_another_study_in_the_folder_is_refused(command):
    (command.folder / "other.py").write_text(SPACE_FILE.replace("0.01", "0.02"))
    folder = command.folder / "kept"
    folder.mkdir()
    assert command("--trials=1", study="kept").returncode == 0
    before = (folder / "study.json").read_bytes()
    assert_one_line_error(
        command("--trials=1", study="kept", space="other.py"), "holds another study", "choices", "0.02"
    )
    assert_one_line_error(
        command("--trials=1", "--config.optimizer.momentum=0.5", study="kept"),
        "another study",
        "momentum: 0.5 here",
    )
    assert (folder / "study.json").read_bytes() == before


@pytest.mark.full
def test_two_processes_share_a_study(command):
    arguments = [f"--study={command.folder / 'both'}", f"--space={command.folder / 'space.py'}", *command.config]
    start = [sys.executable, "sweep.py", *arguments]
    both = [
        subprocess.Popen(
            start, cwd=ROOT, env=on_devices(1), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    shown = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], shown
    assert sum(out.count("  done  ") for out, _ in shown) == 4, shown
    assert all("rank" in out for out, _ in shown)


@pytest.mark.full
def test_every_host_of_a_pod_joins_the_same_trial(command):
    result = run_script(
        *("-m", "largebatch.pod", "--hosts", "2", "--devices", "2", "--", sys.executable, "sweep.py", "--trials=2"),
        *(f"--study={command.folder / 'pod'}", f"--space={command.folder / 'space.py'}", *command.config),
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert "2 of 2 trials ended" in result.stdout
    summaries = summaries_of(command.folder / "pod").values()
    assert [(summary["hosts"], summary["devices"], summary["status"]) for summary in summaries] == [
        (2, 4, "done"),
        (2, 4, "done"),
    ]
