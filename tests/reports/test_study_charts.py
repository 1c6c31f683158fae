"""The charts of a study: rates and steps to a target; and whose confusions are shown."""

import dataclasses
import json
from pathlib import Path

import pytest
from report_pages import curve, data_of, make, small_study, text_of, write_predictions
from test_analysis import write_run, write_study

import report
from largebatch.predictions import files as prediction_files
from largebatch.reports import groups, study_charts
from largebatch.reports.groups import best_runs
from largebatch.runs import reader


@pytest.fixture
def study(tmp_path) -> Path:
    return small_study(tmp_path / "optimizers")


def rows_of(chart: dict, **fields) -> list[dict]:
    return [row for row in chart["rows"] if all(row.get(name) == value for name, value in fields.items())]


def test_rates_picture_marks_what_diverged(study):
    chart = dataclasses.asdict(study_charts.rate_chart(groups.group_study(reader.read(study))))
    assert [entry["label"] for entry in chart["legend"]] == ["adam", "lamb", "sgd"]
    means = {row["x"]: row["y"] for row in rows_of(chart, label="adam", mark="line")}
    assert means == {rate: pytest.approx(curve(k)[-1]) for k, rate in enumerate((0.001, 0.01, 0.1, 1.0))}
    crosses = {(row["x"], row["colour"]) for row in rows_of(chart, mark="cross")}
    assert crosses == {
        (1.0, "var(--c1)")
    }  # a seed of lamb diverged; that one of sgd failed says nothing of its rate


def test_steps_picture_and_critical_batch_size(tmp_path):
    trials = []
    for batch, count in ((64, 40), (256, 13), (1024, 6), (4096, 4)):
        for seed, extra in enumerate((0, 1)):
            trials.append({"batch": batch, "seed": seed, "target": 0.8})
            trials[-1]["accuracies"] = (*[0.1] * (count + extra - 1), 0.9)
            trials[-1]["noise_scale"] = 400.0 + 200 * seed
    fields = ["batch.size"]
    path = write_study(tmp_path / "study", trials, "steps_to_target", fields)
    page = make(path, out=tmp_path / "page.html", more=["--png", tmp_path / "png"])
    chart = data_of(page)[0]["charts"]["steps_to_target"]
    tuned = rows_of(chart, label="best-tuned setting", mark="points")
    assert [(row["x"], row["y"]) for row in tuned] == [(64, 405), (256, 135), (1024, 65), (4096, 45)]
    perfect = [(row["x"], row["y"]) for row in rows_of(chart, label="perfect scaling")]
    assert perfect == [(64, 405), (4096, pytest.approx(405 / 64, rel=1e-5))]
    (fit,) = study_charts.fits(reader.read(path))
    critical = fit.curve.critical_batch_size
    assert 300 < critical < 900
    assert rows_of(chart, label=f"critical batch {critical:,.0f}", mark="rule")
    assert f"The critical batch size is {critical:,.0f} (95 % interval" in text_of(page)
    (scale,) = rows_of(chart, label="noise scale 500", mark="rule")
    assert scale["x"] == 500
    assert "noise scale at the target was 500 (median of 8 runs, 400 to 600)" in text_of(page)
    assert "Larger batches may pay far beyond it" in text_of(page)
    assert "500 examples: median noise scale at the target" in text_of(page)
    assert (tmp_path / "png" / "steps_to_target.png").exists()


def test_optimizers_that_were_tuned_apart_have_a_curve_each(tmp_path):
    trials = []
    for optimizer, critical in (("lamb", 400), ("sgd", 100)):
        for batch in (64, 256, 1024):
            steps = round(1000 * (1 + critical / batch) / 10)
            accuracies = (*[0.1] * (steps - 1), 0.9)
            trials.append({"optimizer": optimizer, "batch": batch, "target": 0.8, "accuracies": accuracies})
    trials.append({"optimizer": "sgd", "batch": 4096, "target": 0.8, "accuracies": (0.1, 0.2)})
    fields = ["optimizer.name", "batch.size"]
    path = write_study(tmp_path / "study", trials, "steps_to_target", fields, groups=fields)
    page = make(path, out=tmp_path / "page.html")
    chart = data_of(page)[0]["charts"]["steps_to_target"]
    (lamb, sgd), sizes = study_charts.fits(reader.read(path)), []
    assert (lamb.optimizer, sgd.optimizer) == ("lamb", "sgd")
    assert lamb.curve.critical_batch_size == pytest.approx(400, rel=0.05)
    assert sgd.curve.critical_batch_size == pytest.approx(100, rel=0.05)
    for fit in (lamb, sgd):
        sizes.append(f"{fit.curve.critical_batch_size:,.0f}")
    assert [entry["label"] for entry in chart["legend"]] == [
        "perfect scaling",
        f"lamb, critical batch {sizes[0]}",
        f"sgd, critical batch {sizes[1]}",
    ]
    text = text_of(page)
    assert f"sgd: the critical batch size is {sizes[1]}: there a run needs" in text
    assert "No setting of sgd took all of its seeds to the target at batch 4,096." in text
    assert f"{sizes[0]} examples: critical batch size of lamb" in text


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (
            (4, 4, 4),
            "larger batches save no steps. The fewest images that were seen, 2,560, are those of the smallest",
        ),
        ((16, 4, 1), "twice the batch still halves the steps, and no smaller batch saves images"),
    ],
)
def test_curves_without_a_critical_batch_size_are_told_in_words(tmp_path, counts, words):
    trials = [
        {"batch": batch, "target": 0.8, "accuracies": (*[0.1] * (count - 1), 0.9)}
        for batch, count in zip((64, 256, 1024), counts, strict=True)
    ]
    path = write_study(tmp_path / "study", trials, "steps_to_target", ["batch.size"])
    assert words in text_of(make(path, out=tmp_path / "page.html", more=["--png", tmp_path / "png"]))


@pytest.mark.parametrize("changing", [{"trace": "t.csv"}, {"auto": True}])
def test_a_batch_that_changes_is_no_point_of_the_curve(tmp_path, changing):
    path = write_run(tmp_path / "run")
    config = json.loads((path / "config.json").read_text())
    assert reader.read(path).batch_size is not None
    (path / "config.json").write_text(json.dumps(config | {"batch": config["batch"] | changing}))
    assert reader.read(path).batch_size is None


def test_edges_and_batch_sizes_that_missed_the_target_are_said(tmp_path):
    trials = [
        {"batch": 64, "rate": 0.01, "accuracies": (0.9,)},
        {"batch": 64, "rate": 0.02, "accuracies": (0.1, 0.9)},
        {"batch": 128, "rate": 0.02, "accuracies": (0.1, 0.2)},
    ]
    trials = [trial | {"target": 0.8} for trial in trials]
    path = write_study(tmp_path / "study", trials, "steps_to_target", ["optimizer.learning_rate", "batch.size"])
    text = text_of(make(path, out=tmp_path / "page.html"))
    assert "optimizer.learning_rate 0.01 is the lowest of 2 tried" in text
    assert "No setting took all of its seeds to the target at batch 128." in text


def test_a_study_shows_the_best_run(study):
    for name in ("0000", "0005"):
        write_predictions(study / "trials" / name, [0, 1], [1, 0], ["a", "b"])
    (group,) = report.read_groups([str(study)])
    assert [run.path.name for run in best_runs(group, prediction_files.exist)] == ["0005"]
