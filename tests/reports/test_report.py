import csv
import functools
import html
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, assert_one_line_error, run_script
from PIL import Image
from test_analysis import write_run, write_study

import report
import train
from largebatch.reports import confusion, panels, sections, studies
from largebatch.runs import reader
from largebatch.studies import analysis

EVIL = '</script><img src=x onerror="document.title=1">'


def make(*paths, out: Path, more=()) -> str:
    """The page of some folders."""
    assert report.main([*map(str, paths), "--out", str(out), *map(str, more)]) == 0
    return out.read_text()


def data_of(page: str) -> list[dict]:
    """What page.js draws from."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1))


def text_of(page: str) -> str:
    """What a reader sees, without the pictures."""
    body = re.sub(r"<script.*?</script>", "", page[page.index("<body>") :], flags=re.S)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body)))


def panel_ids(page: str) -> list[str]:
    return [panel["id"] for panel in data_of(page)[0]["panels"]]


def curve(k: int, rows: int = 6) -> tuple[float, ...]:
    return tuple(round(0.3 + 0.1 * k / 8 + 0.08 * row, 4) for row in range(rows))


def small_study(path: Path) -> Path:
    """Three optimizers, four rates, two seeds; one run diverged, one goes on, one failed before it began."""
    trials = [
        {"optimizer": name, "rate": rate, "seed": seed, "accuracies": curve(k)}
        for name in ("lamb", "adam", "sgd")
        for k, rate in enumerate((0.001, 0.01, 0.1, 1.0))
        for seed in (0, 1)
    ]
    trials[7] |= {"status": "diverged", "accuracies": (0.1, 0.1)}
    trials[12] |= {"status": "running"}
    trials[20] = {"optimizer": "sgd", "rate": 0.1, "error": "no space left on device"}
    return write_study(path, trials)


@pytest.fixture
def study(tmp_path) -> Path:
    return small_study(tmp_path / "optimizers")


def write_predictions(run: Path, labels, predicted, ids, classes=3) -> None:
    logits = np.zeros((len(labels), classes), np.float32)
    logits[np.arange(len(labels)), predicted] = np.linspace(1, 3, len(labels))
    np.savez(run / "predictions.npz", labels=np.array(labels, np.int32), logits=logits, ids=np.array(ids))


# ---- the page ----------------------------------------------------------------------------------------


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
        assert f"{setting.accuracy.mean:.4f}" in row
    for words in ("1 diverged", "1 running", "1 failed", "20 of 24", "21 of 24"):
        assert (words in text) == (words != "20 of 24"), words
    ids = panel_ids(page)
    assert ids[:2] == ["learning_rate_study", "val_accuracy"]
    assert {"val_loss", "train_loss", "train_accuracy", "images_per_sec", "grad_norm", "time"} <= set(ids)
    assert not {"noise_scale", "skipped_updates", "learning_rate", "global_batch_size", "epoch", "wall_sec"} & set(
        ids
    )
    assert sorted(re.findall(r'data-panel="(\w+)"', page)) == sorted(ids)
    shown = data_of(page)[0]["runs"]
    assert shown[3]["axes"] == {
        "step": [10, 20, 30, 40, 50, 60],
        "examples_seen": [5120 * k for k in range(1, 7)],
    } | {
        "seconds": [2.0 * k for k in range(1, 7)]  # cumulated: a row holds its own outer loop's
    }
    assert len({run["colour"] for run in shown}) == 3


def test_few_settings_of_one_optimizer_have_a_colour_each(tmp_path):
    trials = [{"optimizer": "sgd", "rate": rate, "seed": seed} for rate in (0.1, 0.2) for seed in (0, 1)]
    shown = data_of(make(write_study(tmp_path / "study", trials), out=tmp_path / "page.html"))[0]
    assert shown["legend"] == {"title": "setting", "labels": ["sgd · lr 0.1", "sgd · lr 0.2"]}
    assert [run["colour"] for run in shown["runs"]] == [0, 0, 1, 1]


def test_curves_of_changing_batches_and_local_steps():
    """The batch is the mean between two rows, since it may change at any update."""
    places = [(4, 400), (8, 1600), (10, 1800)]
    fields = {"global_batch_size": 100, "noise_scale": 300.0, "gain": 2.0, "replica_drift": 0.01}
    rows = [{"step": s, "examples_seen": e, "bytes_sent": 9.0 + s} | fields for s, e in places]
    found = {panel["id"]: panel["values"] for panel in panels.curve_panels([rows])}
    assert found == {name: [[value] * 3] for name, value in fields.items()} | {
        "global_batch_size": [[100, 300, 100]],
        "bytes_sent": [[13.0, 17.0, 19.0]],
    }
    steady = [row | {"examples_seen": 100 * row["step"]} for row in rows]
    assert "global_batch_size" not in {panel["id"] for panel in panels.curve_panels([steady])}


def test_nothing_is_loaded_from_elsewhere(study, tmp_path):
    page = make(study, out=tmp_path / "page.html")
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", page)
    assert "default-src 'none'" in page
    assert '<meta http-equiv="refresh"' not in page


def test_damaged_and_unfinished_runs_are_named(study, tmp_path):
    trials = study / "trials"
    with (trials / "0001" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7')
    (trials / "0002" / "summary.json").write_text("{")
    (trials / "0003" / "config.json").unlink()
    (trials / "0004" / "predictions.npz").write_bytes(b"PK\x03\x04 no")
    shutil.rmtree(trials / "0005")
    (trials / "0005").mkdir()
    (trials / "0007" / "events.jsonl").write_text('{"event": "diverged", "reason": "loss is nan at update 20"}\n')
    page = make(study, out=tmp_path / "page.html")
    body = page[page.index("<body>") :]
    box = text_of(body[: body.index("<nav>")])
    for where, what in [
        ("0001", "metrics.jsonl: line 7 is torn"),
        ("0002", "summary.json: damaged"),
        ("0003", "config.json: missing"),
        ("0004", "predictions.npz: damaged"),
        ("0005", "config.json: missing"),
        ("0007", "diverged: loss is nan at update 20"),
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
    assert page.count("</script>") == 2
    assert EVIL in text_of(page)
    assert EVIL in json.dumps(data_of(page)).replace('\\"', '"')
    lone = make(run, study / "trials" / "0001", out=tmp_path / "runs.html", more=["--png", tmp_path / "png"])
    assert "<img src=x" not in lone


STRANGE = (
    None,
    0,
    -1,
    1e308,
    10**400,
    "x",
    EVIL,
    [],
    {},
    [1, {"a": []}],
    True,
    float("nan"),
    {"a": {"b": 1}},
    1e-320,
)


def strange(content, rng: random.Random, share: float):
    """JSON with a share of its values replaced and some keys left out."""
    if not isinstance(content, dict):
        return content
    kept = {key: value for key, value in content.items() if rng.random() > share / 3}
    return {k: rng.choice(STRANGE) if rng.random() < share else strange(v, rng, share) for k, v in kept.items()}


@pytest.mark.parametrize("seed", range(8))
def test_strange_values_still_make_a_page(study, tmp_path, seed):
    rng = random.Random(seed)
    for path in sorted(study.rglob("*.json*")):
        if rng.random() < 0.4:
            lines = path.read_text().splitlines()
            changed = [strange(json.loads(line), rng, rng.choice((0.02, 0.1, 0.3))) for line in lines]
            path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    shown = [path for path in sorted((study / "trials").iterdir()) if (path / "config.json").exists()]
    page = make(study, *shown[:3], out=tmp_path / "page.html")
    assert len(data_of(page)[0]["runs"]) == 24


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
    loss = next(panel for panel in group["panels"] if panel["id"] == "val_loss")
    np.testing.assert_allclose(loss["values"], [[row["val_loss"] for row in rows]], rtol=1e-5)
    (bar,) = next(panel for panel in group["panels"] if panel["id"] == "time")["rows"]
    assert sum(bar[2]) == pytest.approx(summary["seconds"]["total"], rel=1e-3)
    result, problem = confusion.read_confusion(reader.read(tmp_path / "real"))
    assert problem is None
    assert result.accuracy == pytest.approx(summary["best_val_accuracy"])
    assert {"val_accuracy.png", "time.png", "confusion.png"} <= {p.name for p in (tmp_path / "png").iterdir()}


def test_24_long_runs_stay_below_3_mb(tmp_path):
    trials = [{"rate": 0.001 * (k + 1), "accuracies": tuple(np.linspace(0.1, 0.9, 1000))} for k in range(24)]
    page = make(write_study(tmp_path / "study", trials), out=tmp_path / "page.html")
    assert len(page) < 3e6
    values = next(panel for panel in data_of(page)[0]["panels"] if panel["id"] == "val_accuracy")["values"]
    assert {len(run) for run in values} == {panels.MAX_POINTS}
    assert (values[0][0], values[0][-1]) == (0.1, 0.9)


def test_only_fields_that_differ_are_listed(tmp_path):
    paths = [write_run(tmp_path / f"run{k}", rate=0.01 * (k + 1)) for k in range(2)]
    page = make(*paths, out=tmp_path / "page.html")
    table = page[page.index('id="group-0-differences"') :].split("</table>")[0]
    assert re.findall(r'<th[^>]*scope="col">(.*?)</th>', table) == ["run", "optimizer.learning_rate"]


def test_columns_that_are_not_standard_are_drawn(tmp_path):
    path = write_run(tmp_path / "run", noise_scale=900.0, ema_val_accuracy=0.5, nothing=None, skipped_updates=3)
    ids = panel_ids(make(path, out=tmp_path / "page.html"))
    assert {"noise_scale", "ema_val_accuracy", "skipped_updates"} <= set(ids)
    assert "nothing" not in ids


# ---- study pictures ----------------------------------------------------------------------------------


def test_rates_picture_marks_what_diverged(study):
    found = reader.read(study)
    panel = studies.rate_panel(found, ["adam", "lamb", "sgd"])
    lines = {mark["label"]: mark for mark in panel["marks"] if mark["kind"] == "line"}
    assert [mark["colour"] for mark in lines.values()] == [0, 1, 2]
    means = {point[0]: point[1] for point in lines["adam"]["points"]}
    assert means == {rate: pytest.approx(curve(k)[-1]) for k, rate in enumerate((0.001, 0.01, 0.1, 1.0))}
    crosses = {(mark["points"][0][0], mark["colour"]) for mark in panel["marks"] if mark["kind"] == "cross"}
    assert crosses == {(1.0, 1)}  # a seed of lamb diverged; that one of sgd failed says nothing of its rate


def test_steps_picture_and_knee(tmp_path):
    trials = []
    for batch, count in ((64, 40), (256, 13), (1024, 6), (4096, 4)):
        for seed, extra in enumerate((0, 1)):
            trials.append({"batch": batch, "seed": seed, "target": 0.8})
            trials[-1]["accuracies"] = (*[0.1] * (count + extra - 1), 0.9)
            trials[-1]["noise_scale"] = 400.0 + 200 * seed
    fields = ["batch.size"]
    path = write_study(tmp_path / "study", trials, "steps_to_target", fields)
    page = make(path, out=tmp_path / "page.html", more=["--png", tmp_path / "png"])
    panel = next(panel for panel in data_of(page)[0]["panels"] if panel["id"] == "steps_to_target")
    marks = {mark["label"]: mark for mark in panel["marks"]}
    assert [point[:2] for point in marks["best-tuned setting"]["points"]] == [
        [64, 405], [256, 135], [1024, 65], [4096, 45]
    ]  # fmt: skip
    assert marks["perfect scaling"]["points"] == [[64, 405], [4096, pytest.approx(405 / 64, rel=1e-5)]]
    _, knee = studies.fit(reader.read(path))
    assert 300 < knee.critical_batch_size < 900
    assert f"knee {knee.critical_batch_size:,.0f}" in marks
    assert f"The knee is at batch {knee.critical_batch_size:,.0f} (95 % interval" in text_of(page)
    assert marks["noise scale 500"]["points"] == [[500, None]]
    assert "noise scale at the target was 500 (median of 8 runs, 400 to 600)" in text_of(page)
    assert "500 examples: median noise scale at the target" in text_of(page)
    assert (tmp_path / "png" / "steps_to_target.png").exists()


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
    assert [run.path.name for run in sections.confusion_runs(group)] == ["0005"]


# ---- command line ------------------------------------------------------------------------------------


def test_report_needs_no_jax(study, tmp_path):
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
    assert sorted(p.name for p in tmp_path.iterdir()) == ["board.csv", "optimizers", "page.html", "png"]


def test_csv_is_the_leaderboard_or_the_rows(study, tmp_path):
    make(study, out=tmp_path / "page.html", more=["--csv", tmp_path / "board.csv"])
    header, rows = analysis.leaderboard_rows(reader.read(study))
    assert list(csv.reader((tmp_path / "board.csv").read_text().splitlines())) == [header, *rows]
    run = study / "trials" / "0000"
    make(run, out=tmp_path / "page.html", more=["--csv", tmp_path / "rows.csv"])
    table = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert [float(row["val_accuracy"]) for row in table] == list(curve(0))
    make(run, study / "trials" / "0002", out=tmp_path / "page.html", more=["--csv", tmp_path / "rows.csv"])
    table = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert [row["run"] for row in table] == ["0000"] * 6 + ["0002"] * 6


def words(cell: str) -> str:
    return re.sub("<.*?>", "", cell)


def test_updates_to_accuracies_stand_in_the_leaderboard(study, tmp_path):
    more = ["--csv", tmp_path / "board.csv", "--updates_to", "0.5,0.85"]
    page = make(study, out=tmp_path / "page.html", more=more)
    header, rows = analysis.leaderboard_rows(reader.read(study), (0.5, 0.85))
    assert list(csv.reader((tmp_path / "board.csv").read_text().splitlines())) == [header, *rows]
    table = page[page.index('id="group-0-table"') :].split("</table>")[0]
    names = [words(head) for head in re.findall(r"<th.*?</th>", table)]
    assert [names.index(f"updates to {accuracy}") for accuracy in ("0.5", "0.85")] == [3, 5]
    best = re.findall(r"<td.*?</td>", re.findall(r"<tr>(.*?)</tr>", table)[1])
    updates, count = analysis.updates_to(analysis.leaderboard(reader.read(study))[0], 0.5)
    assert count == 2
    assert words(best[3]).startswith(f"{updates.mean:,.0f}")
    assert words(best[4]) == f"{updates.count} of {count}"


def test_png_of_every_panel(study, tmp_path):
    page = make(study, out=tmp_path / "page.html", more=["--png", tmp_path / "png"])
    assert {p.stem for p in (tmp_path / "png").iterdir()} == set(panel_ids(page))
    for path in (tmp_path / "png").iterdir():
        with Image.open(path) as image:
            assert image.width >= 1000
            colours = image.convert("RGB").quantize(32).getcolors()
            assert max(count for count, _ in colours) < 0.99 * image.width * image.height, f"{path.name} is blank"


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["nowhere"], ["nowhere: nothing there", "allowed: a run folder"], 1),
        (["{run}", "--out", "no/such/page.html"], ["--out: cannot write no/such/page.html"], 1),
        (["{run}", "--out", "{run}"], ["--out: cannot write"], 1),
        (["{run}", "--csv", "no/such.csv"], ["--csv: cannot write no/such.csv"], 1),
        (["{run}", "--png", "{run}/config.json"], ["--png: cannot make the folder"], 1),
        (["{run}", "{study}", "--csv", "x.csv"], ["--csv: both runs and studies"], 1),
        (["{run}", "--watch", "0"], ["--watch", "allowed: 1 to 3600"], 2),
        (["{run}", "--updates_to", "90"], ["--updates_to", "90; allowed: numbers above 0 and up to 1"], 2),
        (["{run}", "--updates_to", "x"], ["--updates_to", "x"], 2),
        (["{run}", "--colour", "red"], ["unrecognized arguments"], 2),
        ([], ["RUN_OR_STUDY"], 2),
    ],
)
def test_errors_are_one_line(study, tmp_path, arguments, words, code):
    run = study / "trials" / "0000"
    (tmp_path / "here").mkdir()
    arguments = [a.format(run=run, study=study) for a in arguments]
    result = run_script(ROOT / "report.py", *arguments, cwd=tmp_path / "here")
    assert_one_line_error(result, "report.py: error: ", *words, code=code)
    assert {p.name for p in (tmp_path / "here").iterdir()} <= {"report.html"}
    assert not [*run.glob(".*"), *run.parent.glob(".*")]


def test_watch_follows_a_study_until_it_is_stopped(tmp_path):
    study, out = write_study(tmp_path / "study", [{"status": "running"}]), tmp_path / "page.html"
    command = [sys.executable, ROOT / "report.py", study, "--out", out, "--watch", "1"]
    # A test that a shell runs in the background inherits a SIGINT that is ignored.
    answer = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, preexec_fn=answer)
    try:
        assert "1 run: 1 running" in process.stdout.readline()
        first = out.read_text()
        assert '<meta http-equiv="refresh" content="1">' in first
        shutil.rmtree(study / "trials" / "0000")
        write_run(study / "trials" / "0000")
        deadline = time.monotonic() + 20
        while "1 done" not in process.stdout.readline():
            assert time.monotonic() < deadline
        assert "Every run is whole and done." in text_of(out.read_text())
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "")
