"""The charts of runs and studies: curves, devices over time, rates, and steps to a target."""

import dataclasses
import datetime
from pathlib import Path

import pytest
from report_pages import curve, data_of, make, small_study, text_of, write_predictions, write_study

from largebatch.predictions.files import FILE
from largebatch.reports import charts, run_charts, study_charts
from largebatch.reports.examples import best_runs
from largebatch.reports.groups import group_runs, group_study
from largebatch.runs import reader
from largebatch.runs.reader import Run


def rows_of(chart: dict, **fields) -> list[dict]:
    return [row for row in chart["rows"] if all(row.get(name) == value for name, value in fields.items())]


def make_run(rows=(), events=(), **summary) -> Run:
    return Run(Path("run"), {}, summary, list(rows), list(events), None, [])


# ---- curves ----------------------------------------------------------------------------------------------


def curves_of(rows: list[dict]) -> dict[str, list]:
    """The values of each curve of a run with these rows."""
    return {chart.id: chart.rows[0]["y"] for chart in run_charts.curve_charts(group_runs([make_run(rows)]))}


def test_curves_of_changing_batches_and_local_steps_and_of_unknown_columns():
    """The batch is the mean between two rows, since it may change at any step."""
    places = [(4, 400), (8, 1600), (10, 1800)]
    fields = {"global_batch_size": 100, "noise_scale": 300.0, "gain": 2.0, "replica_drift": 0.01, "my_own": 1.0}
    rows = [{"step": s, "examples_seen": e, "bytes_sent": 9.0 + s, "none": None} | fields for s, e in places]
    expected = {name: [value] * 3 for name, value in fields.items()}
    expected |= {"global_batch_size": [100, 300, 100], "bytes_sent": [13.0, 17.0, 19.0]}
    assert curves_of(rows) == {f"curve-{name}": values for name, values in expected.items()}
    steady = [row | {"examples_seen": 100 * row["step"]} for row in rows]
    assert "curve-global_batch_size" not in curves_of(steady)


def test_a_long_curve_is_thinned_between_its_ends():
    values = curves_of([{"val_accuracy": k / 1000} for k in range(1001)])["curve-val_accuracy"]
    assert (len(values), values[0], values[-1]) == (charts.MAX_POINTS, 0, 1)
    of_200_runs = charts.thinned(1001, 200)
    assert (len(of_200_runs), of_200_runs[0], of_200_runs[-1]) == (charts.MAX_ROWS // 200, 0, 1000)


def test_few_settings_of_one_optimizer_have_a_colour_each(tmp_path):
    trials = [{"optimizer": "sgd", "rate": rate, "seed": seed} for rate in (0.1, 0.2) for seed in (0, 1)]
    group = group_study(reader.read(write_study(tmp_path / "study", trials)))
    assert (group.legend, group.colours) == (["sgd · lr 0.1", "sgd · lr 0.2"], [0, 0, 1, 1])


# ---- devices over time -----------------------------------------------------------------------------------

BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def at(second: float, event: str, **fields) -> dict:
    return {"time": (BEGIN + datetime.timedelta(seconds=second)).isoformat(), "event": event, **fields}


# Killed on 8 devices at some time before 100, asked to stop on 4 at 180, done on 2 at 300.
EVENTS = [
    at(10, "start", devices=8, start_sec=10, counted_sec=0),
    at(110, "start", devices=4, start_sec=10, counted_sec=60),
    at(180, "interrupted"),
    at(210, "start", devices=2, start_sec=5, counted_sec=110),
    at(300, "done"),
]


def test_devices_over_time_and_the_share_of_time_that_counted():
    run = make_run(events=EVENTS, seconds={"train": 150.0, "evaluation": 30.0, "compile": 40.0})
    chart = run_charts.devices_chart(group_runs([run]))
    assert "run: 3 starts, 60.0% of 300 s brought the run on (goodput)." in chart.note
    ends = [(0, 0), (0, 8), (100, 8), (100, 0), (100, 0), (100, 4), (180, 4), (180, 0)]
    ends += [(205, 0), (205, 2), (300, 2), (300, 0)]
    assert [(row["x"], row["y"]) for row in chart.rows] == ends
    killed = run_charts.devices_chart(group_runs([make_run(events=EVENTS[:-1])]))
    assert f"{110 / 205:.1%} of 205 s" in killed.note  # what counted is known up to its last start
    for events in (EVENTS[:1], []):
        assert run_charts.devices_chart(group_runs([make_run(events=events)])) is None


# ---- studies ---------------------------------------------------------------------------------------------


def test_rates_picture_marks_what_diverged_and_the_best_run_shows_its_examples(tmp_path):
    path = small_study(tmp_path / "study")
    group = group_study(reader.read(path))
    chart = dataclasses.asdict(study_charts.rate_chart(group))
    assert [entry["label"] for entry in chart["legend"]] == ["adam", "lamb", "sgd"]
    means = {row["x"]: row["y"] for row in rows_of(chart, label="adam", mark="line")}
    assert means == {rate: pytest.approx(curve(k)[-1]) for k, rate in enumerate((0.001, 0.01, 0.1, 1.0))}
    crosses = {(row["x"], row["colour"]) for row in rows_of(chart, mark="cross")}
    # A seed of lamb diverged; that one of sgd failed says nothing of its rate.
    assert crosses == {(1.0, "var(--c1)")}
    for name in ("0000", "0005"):
        write_predictions(path / "trials" / name, [0, 1], [1, 0], ["a", "b"])
    assert [run.path.name for run in best_runs(group, FILE)] == ["0005"]


def test_steps_picture_and_critical_batch_size(tmp_path):
    trials = []
    for batch, count in ((64, 40), (256, 13), (1024, 6), (4096, 4)):
        for seed, extra in enumerate((0, 1)):
            trials.append({"batch": batch, "seed": seed, "target": 0.8})
            trials[-1]["accuracies"] = (*[0.1] * (count + extra - 1), 0.9)
            trials[-1]["noise_scale"] = 400.0 + 200 * seed
    path = write_study(tmp_path / "study", trials, "steps_to_target", ["batch.size"])
    page = make(path, out=tmp_path / "page.html")
    chart = data_of(page)[0]["charts"]["steps_to_target"]
    tuned = rows_of(chart, label="best-tuned setting", mark="points")
    assert [(row["x"], row["y"]) for row in tuned] == [(64, 405), (256, 135), (1024, 65), (4096, 45)]
    perfect = [(row["x"], row["y"]) for row in rows_of(chart, label="perfect scaling")]
    assert perfect == [(64, 405), (4096, pytest.approx(405 / 64, rel=1e-5))]
    (fit,) = study_charts.fits(reader.read(path))
    critical = fit.curve.critical_batch_size
    assert 300 < critical < 900
    assert rows_of(chart, label=f"critical batch {critical:,.0f}", mark="rule")
    (scale,) = rows_of(chart, label="noise scale 500", mark="rule")
    assert scale["x"] == 500
    text = text_of(page)
    assert f"The critical batch size is {critical:,.0f} (95 % interval" in text
    assert "noise scale at the target was 500 (median of 8 runs, 400 to 600)" in text
    assert "500 examples: median noise scale at the target" in text


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
    found = {fit.optimizer: fit.curve.critical_batch_size for fit in study_charts.fits(reader.read(path))}
    assert found == {"lamb": pytest.approx(400, rel=0.05), "sgd": pytest.approx(100, rel=0.05)}
    sizes = {name: f"{size:,.0f}" for name, size in found.items()}
    labels = [f"{name}, critical batch {size}" for name, size in sizes.items()]
    legend = data_of(page)[0]["charts"]["steps_to_target"]["legend"]
    assert [entry["label"] for entry in legend] == ["perfect scaling", *labels]
    text = text_of(page)
    assert f"sgd: the critical batch size is {sizes['sgd']}: there a run needs" in text
    assert "No setting of sgd took all of its seeds to the target at batch 4,096." in text
    assert f"{sizes['lamb']} examples: critical batch size of lamb" in text


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((4, 4, 4), "save no steps. The fewest images that were seen, 2,560, are those of the smallest"),
        ((16, 4, 1), "twice the batch still halves the steps, and no smaller batch saves images"),
        ((4, None, None), "needs at least 3 batch sizes that reached the target"),
    ],
)
def test_curves_without_a_critical_batch_size_are_told_in_words(tmp_path, counts, said):
    trials = [
        {"batch": batch, "target": 0.8, "accuracies": (*[0.1] * (count - 1), 0.9) if count else (0.1,)}
        for batch, count in zip((64, 256, 1024), counts, strict=True)
    ]
    path = write_study(tmp_path / "study", trials, "steps_to_target", ["batch.size"])
    (fit,) = study_charts.fits(reader.read(path))
    assert said in study_charts.fit_note(fit)
