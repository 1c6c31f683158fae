"""Reading runs and studies in any state; ranks, estimates over seeds, steps to a target and the fitted curve."""

import math

import numpy as np
import pytest
from report_pages import change_config, write_lines, write_run, write_study
from scipy import stats

from largebatch.reports.study_charts import fits
from largebatch.runs import reader
from largebatch.studies import analysis
from largebatch.studies.critical_batch import fit_steps
from largebatch.util import UserError

# ---- reading -----------------------------------------------------------------------------------------


def test_a_whole_run_is_read_without_problems(tmp_path):
    run = reader.read(write_run(tmp_path / "run"))
    assert run.problems == []
    assert (run.status, run.batch_size, run.best_score) == ("done", 512, 0.9)
    assert (run.field("optimizer.name"), run.field("optimizer.name.more")) == ("lamb", None)
    assert [row["step"] for row in run.rows] == [10, 20, 30]


@pytest.mark.parametrize(
    ("name", "damage", "status", "said"),
    [
        ("metrics.jsonl", lambda text: text.replace('{"step": 20', '"step": 20'), "done", "line 2 is damaged"),
        ("events.jsonl", lambda text: text + "{", "done", "line 2 is torn"),
        ("config.json", lambda text: "\ufffe{", "done", "config.json: damaged"),
        ("run.json", lambda text: '{"format_version": 0}', "unreadable", "format_version 0; allowed: 2"),
        ("run.json", lambda text: "{}", "unreadable", "format_version missing; allowed: 2"),
    ],
)
def test_damage_is_named_and_the_rest_is_read(tmp_path, name, damage, status, said):
    path = write_run(tmp_path / "run") / name
    path.write_text(damage(path.read_text()))
    run = reader.read_run(tmp_path / "run")
    assert run.status == status
    (problem,) = run.problems
    assert said in problem
    if said == "line 2 is damaged":
        assert [row["step"] for row in run.rows] == [10, 30]


def test_a_failed_trial_and_what_is_no_run(tmp_path):
    (run,) = reader.read(write_study(tmp_path / "study", [{"error": "no space\nleft"}])).runs
    assert (run.status, run.problems) == ("failed", ["trial.json: the trial failed: no space left"])
    (tmp_path / "empty").mkdir()
    assert reader.read_run(tmp_path / "empty").status == "unreadable"
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(
            UserError, match=rf"{path}: .*allowed: a run folder with config\.json or a study folder"
        ):
            reader.read(path)


def test_a_run_whose_batch_changed_has_no_batch_size(tmp_path):
    def batch_size(name, sizes=(64, 64), **batch):
        run = write_run(tmp_path / name, batch=sizes[-1])
        write_lines(run / "metrics.jsonl", [{"global_batch_size": size} for size in sizes])
        change_config(run, "batch", **batch)
        return reader.read(run).batch_size

    assert batch_size("constant") == 64
    assert batch_size("smaller", (64, 32, 32)) is None
    assert batch_size("larger", (32, 64, 64)) is None
    assert batch_size("trace", trace="t.csv") is None
    assert batch_size("noise", auto=True) is None


def test_trials_come_by_index_and_a_damaged_description_is_named(tmp_path):
    study = write_study(tmp_path / "study", [{"rate": 0.1 * k} for k in range(1, 12)])
    (study / "trials" / "0003").rename(study / "trials" / "moved")
    (study / "trials" / "half").mkdir()
    trials = reader.read(study)
    assert [run.path.name for run in trials.runs][3:] == ["moved", *[f"{k:04d}" for k in range(4, 11)], "half"]
    assert trials.problems == []
    (study / "study.json").write_text('{"fields": ')
    trials = reader.read(study)
    assert [problem.partition(": cannot")[0] for problem in trials.problems] == ["study.json: damaged"]
    assert trials.objective == "best_val_accuracy"
    assert len(analysis.leaderboard(trials)) == 12  # each trial.json still tells its setting


# ---- statistics --------------------------------------------------------------------------------------


def test_interval_is_students_t():
    values = [0.91, 0.93, 0.905, 0.94]
    estimate = analysis.estimate([*values, None])
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    expected = (np.mean(values), np.std(values, ddof=1), low, high)
    np.testing.assert_allclose((estimate.mean, estimate.std, estimate.low, estimate.high), expected, rtol=1e-12)
    assert estimate.count == 4
    assert analysis.estimate([0.5]) == analysis.Estimate(0.5, None, None, None, 1)
    assert analysis.estimate([None]) == analysis.Estimate(None, None, None, None, 0)


def table_of(study, accuracies=()) -> dict[str, dict[str, str]]:
    """The leaderboard's rows by learning rate, best first."""
    header, rows = analysis.leaderboard_rows(study, accuracies)
    named = [dict(zip(header, row, strict=True)) for row in rows]
    return {row["optimizer.learning_rate"]: row for row in named}


def test_leaderboard_by_accuracy(tmp_path):
    trials = [
        {"rate": 0.01, "accuracies": (0.5, 0.8), "seed": 0},
        {"rate": 0.02, "accuracies": (0.5, 0.9), "seed": 0},
        {"rate": 0.01, "accuracies": (0.5, 0.7), "seed": 1},
        {"rate": 0.03, "accuracies": (0.99,), "status": "diverged"},
        {"rate": 0.04, "accuracies": (0.95,), "status": "done"},
        {"rate": 0.04, "accuracies": (0.2,), "status": "diverged", "seed": 1},
        {"rate": 0.05, "accuracies": (0.97,), "status": "pruned"},
        {"rate": 0.06, "error": "no memory"},
        {"rate": None, "accuracies": (0.6,)},
    ]
    study = reader.read(write_study(tmp_path / "study", trials))
    # Whole settings first, then those of which a seed diverged, then what was pruned, then what never ended well.
    rows = table_of(study)
    assert list(rows) == ["0.02", "0.01", "None", "0.04", "0.05", "0.03", "0.06"]
    first = rows["0.02"]
    assert (first["rank"], first["best_val_accuracy"], first["status"]) == ("1", "0.9000", "1 done")
    assert rows["0.06"]["status"] == "1 failed"
    leaderboard = analysis.leaderboard(study)
    assert leaderboard[1].objective.mean == pytest.approx(0.75)
    assert leaderboard[1].objective.std == pytest.approx(np.std([0.8, 0.7], ddof=1))
    assert leaderboard[3].statuses == {"done": 1, "diverged": 1}
    assert leaderboard[3].score == analysis.Estimate(0.95, None, None, None, 1)


def test_leaderboard_by_steps_to_target(tmp_path):
    trials = [
        {"rate": 0.01, "accuracies": (0.2, 0.2, 0.9)},
        {"rate": 0.02, "accuracies": (0.2, 0.9)},
        {"rate": 0.03, "accuracies": (0.2, 0.5)},
        {"rate": 0.04, "accuracies": (0.2, 0.6)},
        {"rate": 0.05, "accuracies": (0.95,)},
        {"rate": 0.05, "accuracies": (0.1,), "seed": 1},
        {"rate": 0.06, "accuracies": (0.95,), "status": "diverged"},
    ]
    trials = [trial | {"target": 0.8} for trial in trials]
    rows = table_of(reader.read(write_study(tmp_path / "study", trials, "steps_to_target")))
    assert list(rows) == ["0.02", "0.01", "0.04", "0.05", "0.03", "0.06"]
    assert rows["0.02"]["steps_to_target"] == "20.0"
    assert [row["reached"] for row in rows.values()][:4] == ["1/1", "1/1", "0/1", "1/2"]


def test_steps_to_any_accuracy(tmp_path):
    trials = [
        {"rate": 0.01, "accuracies": (0.5, 0.8, 0.7, 0.9)},
        {"rate": 0.01, "accuracies": (0.8, 0.7), "seed": 1},
        {"rate": 0.01, "accuracies": (0.9,), "seed": 2, "status": "diverged"},  # counts for nothing
        {"rate": 0.02, "accuracies": (0.1, 0.2)},
    ]
    study = reader.read(write_study(tmp_path / "study", trials))
    _, best = analysis.leaderboard(study)  # a diverged seed ranks behind
    steps, seeds = analysis.steps_to(best, 0.8)
    assert (steps.mean, steps.count, seeds) == (15.0, 2, 2)
    assert steps.std == pytest.approx(np.std([20, 10], ddof=1))
    rows = table_of(study, (0.8, 0.9))
    names = ("steps_to_0.8", "reached_0.8", "steps_to_0.9", "reached_0.9")
    assert [rows["0.01"][name] for name in names] == ["15.0", "2/2", "40.0", "1/2"]
    assert [rows["0.02"][name] for name in names] == ["", "0/1", "", "0/1"]


# ---- steps to target, critical batch size ------------------------------------------------------------


def target_study(tmp_path, more=()):
    """At batch 256 rate 0.02 is best, between two others; at 1024 the highest tried."""
    slow, fast = (0.1, 0.2, 0.9), (0.1, 0.9)
    trials = [
        {"batch": 256, "rate": 0.01, "accuracies": slow},
        {"batch": 256, "rate": 0.02, "accuracies": fast},
        {"batch": 256, "rate": 0.04, "accuracies": slow},
        {"batch": 256, "rate": 0.04, "accuracies": (0.9,), "optimizer": "sgd"},
        {"batch": 256, "rate": 0.04, "accuracies": (0.1,), "optimizer": "sgd", "seed": 1},
        {"batch": 1024, "rate": 0.01, "accuracies": slow},
        {"batch": 1024, "rate": 0.02, "accuracies": fast},
        {"batch": 1024, "rate": 0.02, "accuracies": slow, "seed": 1},
        {"batch": 1024, "rate": 0.02, "accuracies": (0.1,), "status": "running", "seed": 2},  # counts for nothing
        {"batch": 4096, "rate": 0.02, "accuracies": (0.1, 0.2)},
        *more,
    ]
    fields = ["optimizer.name", "optimizer.learning_rate", "batch.size"]
    path = write_study(tmp_path / "study", [t | {"target": 0.8} for t in trials], "steps_to_target", fields)
    return reader.read(path)


def test_steps_to_target_takes_the_best_setting_whose_seeds_all_reached_it(tmp_path):
    study = target_study(tmp_path)
    small, large = analysis.steps_to_target(study)
    assert (small.batch_size, small.steps) == (256, [20])
    assert small.values["optimizer.name"] == "lamb"  # sgd was faster once, but missed it with the other seed
    assert small.edges == []
    assert (large.batch_size, large.steps) == (1024, [20, 30])
    means = [large.estimate(f"{name}_to_target").mean for name in ("steps", "examples", "sec")]
    assert means == [25, 25 * 1024, 5.0]
    assert large.edges == ["optimizer.learning_rate 0.02 is the highest of 2 tried"]
    (fit,) = fits(study)
    assert fit.unreached == [4096]
    other = {"optimizer.learning_rate": 0.02, "optimizer.name": "adam"}
    assert analysis.edge_flags(study, other, 256) == ["optimizer.learning_rate 0.02 is the only value tried"]


def test_settings_with_more_seeds_go_before_a_lucky_one_and_a_diverged_rate_is_beyond_the_edge(tmp_path):
    more = [
        {"batch": 256, "rate": 0.01, "accuracies": (0.1, 0.2, 0.9), "seed": 1},
        {"batch": 1024, "rate": 0.04, "accuracies": (0.1,), "status": "diverged"},
    ]
    small, large = analysis.steps_to_target(target_study(tmp_path, more))
    assert (small.values["optimizer.learning_rate"], small.steps) == (0.01, [30, 30])
    assert small.edges == ["optimizer.learning_rate 0.01 is the lowest of 3 tried"]
    assert large.edges == []


SIZES = np.repeat([64, 256, 1024, 4096, 16384], 5)


def test_fit_of_exact_points():
    curve = fit_steps(SIZES, 200 * (1 + 1500 / SIZES))
    assert curve.critical_batch_size == pytest.approx(1500, rel=1e-4)
    assert curve.min_steps == pytest.approx(200, rel=1e-4)
    assert curve.min_examples == pytest.approx(200 * 1500, rel=1e-4)
    np.testing.assert_allclose(curve.steps_at(SIZES), 200 * (1 + 1500 / SIZES), rtol=1e-4)


def test_fit_interval_holds_the_truth_about_as_often_as_it_says():
    """Bootstrap intervals from 5 seeds are a little narrow: 0.8 to 1 of them hold what was put in."""
    rng, held = np.random.default_rng(0), []
    for _ in range(30):
        steps = 200 * (1 + 1500 / SIZES) * np.exp(rng.normal(0, 0.1, len(SIZES)))
        curve = fit_steps(SIZES, steps, resamples=200)
        assert 1000 < curve.critical_batch_size < 2250
        held.append(curve.low <= 1500 <= curve.high)
    assert 0.8 <= np.mean(held) <= 1
    assert curve == fit_steps(SIZES, steps, resamples=200)


def test_fit_beyond_what_was_measured_and_of_too_little():
    straight, flat = fit_steps(SIZES, 1e6 / SIZES), fit_steps(SIZES, np.full(len(SIZES), 100.0))
    assert (straight.critical_batch_size, straight.min_examples) == (math.inf, pytest.approx(1e6))
    np.testing.assert_allclose(straight.steps_at(SIZES), 1e6 / SIZES)
    assert (flat.critical_batch_size, flat.min_steps) == (0, pytest.approx(100))
    assert (straight.min_steps, flat.min_examples) == (None, None)  # beyond what was measured as well
    assert fit_steps([64, 64, 256], [100, 110, 60]) is None  # two batch sizes
    one_seed = fit_steps([64, 256, 1024], [100, 40, 25])
    assert (one_seed.low, one_seed.high) == (None, None)
