"""The page of report.py, and its command: what they show of studies and runs in any state."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image
from report_pages import (
    EVIL,
    chart_ids,
    curve,
    data_of,
    make,
    small_study,
    text_of,
    write_predictions,
    write_run,
    write_study,
)

import report
import train
from largebatch.reports import examples, groups, tables
from largebatch.reports import page as report_page
from largebatch.runs import reader
from largebatch.studies import analysis


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A study that no test changes."""
    return small_study(tmp_path_factory.mktemp("studies") / "optimizers")


def words(cell: str) -> str:
    return re.sub("<.*?>", "", cell)


def table_of(page: str, name: str) -> str:
    return page[page.index(f'id="group-0-{name}"') :].split("</table>")[0]


# ---- the page --------------------------------------------------------------------------------------------


def test_page_of_a_study(study, tmp_path):
    page = make(study, out=tmp_path / "page.html")
    text = text_of(page)
    assert "data synthetic" in text
    assert text.index("Leaderboard") < text.index("Curves") < text.index("Runs", text.index("Curves"))
    rows = re.findall(r"<tr>(.*?)</tr>", table_of(page, "table"))[1:]
    settings = analysis.leaderboard(reader.read(study))
    assert len(rows) == len(settings) == 12
    for row, setting in zip(rows, settings, strict=True):
        assert f">{setting.values['optimizer.name']}<" in row
        assert f'data-v="{setting.values["optimizer.learning_rate"]}"' in row
        assert f"{setting.score.mean:.4f}" in row
    for status in ("1 diverged", "1 running", "1 failed", "21 of 24"):
        assert status in text
    ids = chart_ids(page)
    assert ids[:2] == ["learning_rate_study", "val_accuracy"]
    assert {"val_loss", "train_loss", "train_accuracy", "images_per_sec", "grad_norm", "time"} <= set(ids)
    assert not {"noise_scale", "skipped_steps", "learning_rate", "epoch", "wall_sec"} & set(ids)
    assert sorted(re.findall(r'data-chart="(?:curve-)?(\w+)"', page)) == sorted(ids)
    (shown,) = data_of(page)
    assert shown["axes"][3] == {
        "step": [10, 20, 30, 40, 50, 60],
        "examples_seen": [5120 * k for k in range(1, 7)],
        "seconds": [2.0 * k for k in range(1, 7)],  # cumulated: a row holds its own outer loop's
    }
    assert len({run["colour"] for run in shown["runs"]}) == 3
    # Nothing is loaded from elsewhere.
    body = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", body)
    assert "default-src 'none'" in page
    assert "script-src 'sha256-" in page


def test_damaged_and_unfinished_runs_are_named(tmp_path):
    study = small_study(tmp_path / "study")
    trials = study / "trials"
    with (trials / "0001" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7')
    (trials / "0002" / "summary.json").write_text("{")
    (trials / "0003" / "config.json").unlink()
    (trials / "0004" / "predictions.npz").write_bytes(b"PK\x03\x04 no")
    shutil.rmtree(trials / "0005")
    (trials / "0005").mkdir()
    (trials / "0007" / "events.jsonl").write_text('{"event": "diverged", "reason": "loss is nan at step 20"}\n')
    for file in (trials / "0012").iterdir():
        os.utime(file, (time.time() - 7200,) * 2)
    os.utime(trials / "0012" / "metrics.jsonl", (time.time() - 180,) * 2)
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
        ("0012", "summary.json: missing: the run goes on, or was killed; last sign of life 3 min ago"),
        ("0020", "trial.json: the trial failed: no space left on device"),
    ]:
        line = f"trials/{where} {what}"
        assert line in box, f"{line} not in {box}"
    assert text_of(page).count("unreadable") >= 2
    assert ">running, last sign of life 3 min ago<" in page


def test_an_empty_study_is_a_page_and_a_table_too(tmp_path):
    study = write_study(tmp_path / "new", [])
    page = make(study, out=tmp_path / "page.html", more=["--csv", tmp_path / "board.csv"])
    assert "study of 0 runs" in text_of(page)
    columns = "rank,optimizer.name,optimizer.learning_rate,best_val_accuracy,low,high,std,seeds,status"
    assert (tmp_path / "board.csv").read_text() == f"{columns}\n"


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
    lone = make(run, study / "trials" / "0001", out=tmp_path / "runs.html")
    assert "<img src=x" not in lone


def test_a_real_run(small_config, tmp_path):
    small_config.train.target_accuracy = 0.99
    summary = train.train_and_evaluate(small_config, str(tmp_path / "real"))
    page = make(tmp_path / "real", out=tmp_path / "page.html")
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
    accuracy = examples.read_confusion(reader.read(tmp_path / "real")).accuracy
    assert accuracy == pytest.approx(summary["best_val_accuracy"])


def test_pruned_runs_are_counted_and_no_problem(tmp_path):
    trials = [{"rate": 0.01, "accuracies": (0.5, 0.9)}, {"rate": 0.1, "status": "pruned", "accuracies": (0.1,)}]
    text = text_of(make(write_study(tmp_path / "study", trials), out=tmp_path / "page.html"))
    assert "Every run is whole, and done or pruned." in text
    assert "1 of 2 runs done, 1 pruned" in text


def test_only_fields_that_differ_are_listed(tmp_path):
    runs = [reader.read(write_run(tmp_path / f"run{k}", rate=0.01 * (k + 1))) for k in range(2)]
    listed = tables.differences(tables.origins(groups.group_runs(runs)))
    assert listed.columns == ["run", "optimizer.learning_rate"]


# ---- the command -----------------------------------------------------------------------------------------


def test_the_command_needs_no_jax_and_draws_every_panel(tmp_path):
    # With a column of one's own that is called as another chart is.
    columns = dict.fromkeys(("val_loss", "train_loss", "train_accuracy", "images_per_sec", "grad_norm")) | {
        "time": 1.0
    }
    trials = [{"rate": rate, "accuracies": curve(k)} | columns for k, rate in enumerate((0.01, 0.1))]
    study = write_study(tmp_path / "study", trials)
    code = (
        "import sys, report\n"
        f"code = report.main([{str(study)!r}, '--out', 'page.html', '--csv', 'board.csv', '--png', 'png'])\n"
        "print(code, sorted({'jax', 'flax', 'optax', 'tensorflow', 'ml_collections'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.stdout.splitlines()[-1] == "0 []", result.stdout + result.stderr
    assert result.stderr == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["board.csv", "page.html", "png", "study"]
    header, rows = analysis.leaderboard_rows(reader.read(study))
    assert list(csv.reader((tmp_path / "board.csv").read_text().splitlines())) == [header, *rows]
    pictures = {path.stem: path for path in (tmp_path / "png").iterdir()}
    (group,) = data_of((tmp_path / "page.html").read_text())
    assert len(group["charts"]) == 4
    assert pictures.keys() == {"learning_rate_study", "val_accuracy", "time", "curve-time"}
    for path in pictures.values():
        with Image.open(path) as image:
            assert image.width >= 1000
            colours = image.convert("RGB").quantize(32).getcolors()
            assert max(count for count, _ in colours) < 0.99 * image.width * image.height, f"{path.name} is blank"


def test_csv_of_runs_is_their_rows(study, tmp_path):
    runs = [study / "trials" / name for name in ("0000", "0002")]
    make(*runs, out=tmp_path / "page.html", more=["--csv", tmp_path / "rows.csv"])
    table = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert [float(row["val_accuracy"]) for row in table] == [*curve(0), *curve(1)]
    assert [row["run"] for row in table] == ["0000"] * 6 + ["0002"] * 6


def test_steps_to_accuracies_stand_in_the_leaderboard(study, tmp_path):
    more = ["--csv", tmp_path / "board.csv", "--updates_to", "0.5,0.85"]
    table = table_of(make(study, out=tmp_path / "page.html", more=more), "table")
    header, rows = analysis.leaderboard_rows(reader.read(study), (0.5, 0.85))
    assert list(csv.reader((tmp_path / "board.csv").read_text().splitlines())) == [header, *rows]
    heads, best = re.findall(r"<th.*?</th>", table), re.findall(r"<td.*?</td>", table)
    place = [words(head) for head in heads].index("steps to 0.5")
    steps, count = analysis.steps_to(analysis.leaderboard(reader.read(study))[0], 0.5)
    assert words(best[place]).startswith(f"{steps.mean:,.0f}")
    assert words(best[place + 1]) == f"{steps.count} of {count}"


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["nowhere"], "nowhere: no run or study is there; allowed: a run folder", 1),
        (["{run}", "--out", "no/such/page.html"], "--out: cannot write no/such/page.html", 1),
        (["{run}", "--csv", "no/such.csv"], "--csv: cannot write no/such.csv", 1),
        (["{run}", "--png", "{run}/config.json"], "--png: cannot write", 1),
        (["{run}", "{study}", "--csv", "x.csv"], "--csv: both runs and studies", 1),
        (["{run}", "--updates_to", "90"], "--updates_to: 90; allowed: numbers above 0 and up to 1", 2),
        (["{run}", "--updates_to", "x"], "--updates_to: invalid", 2),
        ([], "RUN_OR_STUDY", 2),
    ],
)
def test_errors_are_one_line(study, tmp_path, monkeypatch, capsys, arguments, said, code):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(report_page, "vega_bundle", str)
    run = write_run(tmp_path / "run", ())
    try:
        found = report.main([argument.format(run=run, study=study) for argument in arguments])
    except SystemExit as end:
        found = end.code
    (line,) = capsys.readouterr().err.splitlines()
    assert (found, line.startswith("report.py: error: ")) == (code, True)
    assert said in line
    assert {p.name for p in (tmp_path / "here").iterdir()} <= {"report.html"}
    assert not [*run.glob(".*"), *run.parent.glob(".*")]
