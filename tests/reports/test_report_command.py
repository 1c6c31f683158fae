"""The command line of report.py: files it writes, and errors."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, assert_one_line_error, run_script
from PIL import Image
from report_pages import chart_ids, curve, make, small_study

from largebatch.runs import reader
from largebatch.studies import analysis


@pytest.fixture
def study(tmp_path) -> Path:
    return small_study(tmp_path / "optimizers")


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
    assert [names.index(f"steps to {accuracy}") for accuracy in ("0.5", "0.85")] == [3, 5]
    best = re.findall(r"<td.*?</td>", re.findall(r"<tr>(.*?)</tr>", table)[1])
    steps, count = analysis.steps_to(analysis.leaderboard(reader.read(study))[0], 0.5)
    assert count == 2
    assert words(best[3]).startswith(f"{steps.mean:,.0f}")
    assert words(best[4]) == f"{steps.count} of {count}"


def test_png_of_every_panel(study, tmp_path):
    page = make(study, out=tmp_path / "page.html", more=["--png", tmp_path / "png"])
    assert {p.stem for p in (tmp_path / "png").iterdir()} == set(chart_ids(page))
    for path in (tmp_path / "png").iterdir():
        with Image.open(path) as image:
            assert image.width >= 1000
            colours = image.convert("RGB").quantize(32).getcolors()
            assert max(count for count, _ in colours) < 0.99 * image.width * image.height, f"{path.name} is blank"


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["nowhere"], ["nowhere: no run or study is there", "allowed: a run folder"], 1),
        (["{run}", "--out", "no/such/page.html"], ["--out: cannot write no/such/page.html"], 1),
        (["{run}", "--out", "{run}"], ["--out: cannot write"], 1),
        (["{run}", "--csv", "no/such.csv"], ["--csv: cannot write no/such.csv"], 1),
        (["{run}", "--png", "{run}/config.json"], ["--png: cannot write"], 1),
        (["{run}", "{study}", "--csv", "x.csv"], ["--csv: both runs and studies"], 1),
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
