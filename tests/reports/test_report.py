"""The page of report.py: what it shows of studies and runs."""

import json
import os
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from report_pages import EVIL, chart_ids, data_of, make, small_study, text_of, write_predictions
from test_analysis import write_run, write_study

import train
from largebatch.reports import charts, examples, groups, run_charts
from largebatch.runs import reader
from largebatch.studies import analysis


@pytest.fixture
def study(tmp_path) -> Path:
    return small_study(tmp_path / "optimizers")


def test_page_of_a_study(study, tmp_path):
    page = make(study, out=tmp_path / "page.html")
    text = text_of(page)
    assert text.index("Leaderboard") < text.index("Curves") < text.index("Runs", text.index("Curves"))
    rows = re.findall(r"<tr>(.*?)</tr>", page[page.index('id="group-0-table"') :].split("</table>")[0])[1:]
    settings = analysis.leaderboard(reader.read(study))
    assert len(rows) == len(settings) == 12
    for row, setting in zip(rows, settings, strict=True):
        assert f">{setting.values['optimizer.name']}<" in row
        assert f'data-v="{setting.values["optimizer.learning_rate"]}"' in row
        assert f"{setting.score.mean:.4f}" in row
    for words in ("1 diverged", "1 running", "1 failed", "20 of 24", "21 of 24"):
        assert (words in text) == (words != "20 of 24"), words
    ids = chart_ids(page)
    assert ids[:2] == ["learning_rate_study", "val_accuracy"]
    assert {"val_loss", "train_loss", "train_accuracy", "images_per_sec", "grad_norm", "time"} <= set(ids)
    assert not {"noise_scale", "skipped_steps", "learning_rate", "global_batch_size", "epoch", "wall_sec"} & set(
        ids
    )
    assert sorted(re.findall(r'data-chart="(?:curve-)?(\w+)"', page)) == sorted(ids)
    (shown,) = data_of(page)
    assert shown["axes"][3] == {
        "step": [10, 20, 30, 40, 50, 60],
        "examples_seen": [5120 * k for k in range(1, 7)],
        "seconds": [2.0 * k for k in range(1, 7)],  # cumulated: a row holds its own outer loop's
    }
    assert len({run["colour"] for run in shown["runs"]}) == 3


def test_few_settings_of_one_optimizer_have_a_colour_each(tmp_path):
    trials = [{"optimizer": "sgd", "rate": rate, "seed": seed} for rate in (0.1, 0.2) for seed in (0, 1)]
    shown = data_of(make(write_study(tmp_path / "study", trials), out=tmp_path / "page.html"))[0]
    assert shown["legend"] == ["sgd · lr 0.1", "sgd · lr 0.2"]
    assert [run["colour"] for run in shown["runs"]] == ["var(--c0)", "var(--c0)", "var(--c1)", "var(--c1)"]


def test_curves_of_changing_batches_and_local_steps():
    """The batch is the mean between two rows, since it may change at any step."""
    places = [(4, 400), (8, 1600), (10, 1800)]
    fields = {"global_batch_size": 100, "noise_scale": 300.0, "gain": 2.0, "replica_drift": 0.01}
    rows = [{"step": s, "examples_seen": e, "bytes_sent": 9.0 + s} | fields for s, e in places]

    def drawn(rows):
        run = reader.Run(Path("run"), {}, {}, rows, [], None, [])
        return {chart.id: chart.rows[0]["y"] for chart in run_charts.curve_charts(groups.group_runs([run]))}

    expected = {name: [value] * 3 for name, value in fields.items()}
    expected |= {"global_batch_size": [100, 300, 100], "bytes_sent": [13.0, 17.0, 19.0]}
    assert drawn(rows) == {f"curve-{name}": values for name, values in expected.items()}
    steady = [row | {"examples_seen": 100 * row["step"]} for row in rows]
    assert "curve-global_batch_size" not in drawn(steady)


def test_nothing_is_loaded_from_elsewhere(study, tmp_path):
    page = make(study, out=tmp_path / "page.html")
    body = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", body)
    assert "default-src 'none'" in page
    assert "script-src 'sha256-" in page


def test_damaged_and_unfinished_runs_are_named(study, tmp_path):
    trials = study / "trials"
    with (trials / "0001" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7')
    (trials / "0002" / "summary.json").write_text("{")
    (trials / "0003" / "config.json").unlink()
    (trials / "0004" / "predictions.npz").write_bytes(b"PK\x03\x04 no")
    shutil.rmtree(trials / "0005")
    (trials / "0005").mkdir()
    (trials / "0007" / "events.jsonl").write_text('{"event": "diverged", "reason": "loss is nan at step 20"}\n')
    page = make(study, out=tmp_path / "page.html")
    body = page[page.index("<body>") :]
    box = text_of(body[: body.index("<nav>")])
    for where, what in [
        ("0001", "metrics.jsonl: line 7 is torn"),
        ("0002", "summary.json: damaged"),
        ("0003", "config.json: missing"),
        ("0004", "predictions.npz: damaged"),
        ("0005", "config.json: missing"),
        ("0007", "diverged: loss is nan at step 20"),
        ("0012", "summary.json: missing: the run goes on, or was killed"),
        ("0020", "trial.json: the trial failed: no space left on device"),
    ]:
        line = f"trials/{where} {what}"
        assert line in box, f"{line} not in {box}"
    assert text_of(page).count("unreadable") >= 2


def test_an_empty_study_is_a_page_too(tmp_path):
    page = make(write_study(tmp_path / "new", []), out=tmp_path / "page.html")
    assert "study of 0 runs" in text_of(page)


def test_what_comes_from_files_never_becomes_a_tag(tmp_path):
    study = write_study(
        tmp_path / "<script>alert(1)", [{"optimizer": EVIL, "rate": 0.1}, {"rate": 0.2}, {"error": EVIL}]
    )
    run = study / "trials" / "0000"
    write_predictions(run, [0, 1, 2, 0], [0, 1, 2, 1], [f"{EVIL}/a_{k}.png" for k in range(4)])
    (run / "summary.json").write_text(json.dumps({"status": EVIL, "platform": EVIL, "versions": {EVIL: EVIL}}))
    rows = (run / "metrics.jsonl").read_text().replace('"grad_norm"', json.dumps(EVIL))
    (run / "metrics.jsonl").write_text(rows)
    page = make(study, out=tmp_path / "page.html")
    assert "<img src=x" not in page
    assert "<script>alert" not in page
    assert page.count("</script>") == 3
    assert EVIL in text_of(page)
    assert EVIL in json.dumps(data_of(page)).replace('\\"', '"')
    lone = make(run, study / "trials" / "0001", out=tmp_path / "runs.html", more=["--png", tmp_path / "png"])
    assert "<img src=x" not in lone


def test_a_real_run(small_config, tmp_path):
    small_config.train.target_accuracy = 0.99
    summary = train.train_and_evaluate(small_config, str(tmp_path / "real"))
    page = make(tmp_path / "real", out=tmp_path / "page.html", more=["--png", tmp_path / "png"])
    text = text_of(page)
    assert "Every run is whole and done." in text
    assert f"{summary['best_val_accuracy']:.4f}" in text
    assert "No example pictures: synthetic images have no files." in text
    assert "optimizer.learning_rate 0.01" in text
    assert f"git_commit {summary['git_commit'][:12]}" in text
    (group,) = data_of(page)
    rows = [json.loads(line) for line in (tmp_path / "real" / "metrics.jsonl").read_text().splitlines()]
    (loss,) = group["charts"]["curve-val_loss"]["rows"]
    np.testing.assert_allclose(loss["y"], [row["val_loss"] for row in rows], rtol=1e-5)
    seconds = sum(piece["x"] for piece in group["charts"]["time"]["rows"])
    assert seconds == pytest.approx(summary["seconds"]["total"], rel=1e-3)
    assert examples.read_confusion(reader.read(tmp_path / "real")).accuracy == pytest.approx(
        summary["best_val_accuracy"]
    )
    assert {"val_accuracy.png", "time.png"} <= {p.name for p in (tmp_path / "png").iterdir()}


def test_pruned_runs_are_counted_and_no_problem(tmp_path):
    trials = [{"rate": 0.01, "accuracies": (0.5, 0.9)}, {"rate": 0.1, "status": "pruned", "accuracies": (0.1,)}]
    page = make(write_study(tmp_path / "study", trials), out=tmp_path / "page.html")
    text = text_of(page)
    assert "Every run is whole, and done or pruned." in text
    assert "1 of 2 runs done, 1 pruned" in text


def test_a_run_that_was_killed_tells_its_last_sign_of_life(tmp_path):
    path = write_run(tmp_path / "killed", status="running")
    for file in path.iterdir():
        os.utime(file, (time.time() - 7200,) * 2)
    os.utime(path / "metrics.jsonl", (time.time() - 180,) * 2)
    page = make(path, out=tmp_path / "page.html")
    assert "summary.json: missing: the run goes on, or was killed; last sign of life 3 min ago" in text_of(page)
    assert ">running, last sign of life 3 min ago<" in page
    done = write_run(tmp_path / "done")
    assert "sign of life" not in make(done, out=tmp_path / "page.html")


def test_24_long_runs_stay_below_3_mb(tmp_path):
    trials = [{"rate": 0.001 * (k + 1), "accuracies": tuple(np.linspace(0.1, 0.9, 1000))} for k in range(24)]
    page = make(write_study(tmp_path / "study", trials), out=tmp_path / "page.html")
    assert len(page) < 3e6
    values = [row["y"] for row in data_of(page)[0]["charts"]["curve-val_accuracy"]["rows"]]
    assert {len(run) for run in values} == {charts.MAX_POINTS}
    assert (values[0][0], values[0][-1]) == (0.1, 0.9)


def test_only_fields_that_differ_are_listed(tmp_path):
    paths = [write_run(tmp_path / f"run{k}", rate=0.01 * (k + 1)) for k in range(2)]
    page = make(*paths, out=tmp_path / "page.html")
    table = page[page.index('id="group-0-differences"') :].split("</table>")[0]
    assert re.findall(r"<th [^>]*>(.*?)</th>", table) == ["run", "optimizer.learning_rate"]


def test_columns_that_are_not_standard_are_drawn(tmp_path):
    path = write_run(tmp_path / "run", noise_scale=900.0, ema_val_accuracy=0.5, nothing=None, skipped_steps=3)
    ids = chart_ids(make(path, out=tmp_path / "page.html"))
    assert {"noise_scale", "ema_val_accuracy", "skipped_steps"} <= set(ids)
    assert "nothing" not in ids
