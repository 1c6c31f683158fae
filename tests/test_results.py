"""The tables of docs/results.md: jobs that run, go on and are not run again; and their rows and tables."""

import json

import pytest
from conftest import ROOT
from machines import QUICKLY

from benchmarks import result_tables, results
from benchmarks.results import Job
from largebatch.util import UserError

SHORT = "--config.dataset.num_examples 100 --config.dataset.image_size 16 --config.batch.size 32"
SHORT += " --config.train.inner_steps 1 --config.train.outer_steps 2"
SPACE = """
def suggest(trial):
    trial.suggest_categorical("optimizer.name", ["sgd", "adam"])
"""


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page of some jobs, not that of the project."""
    page = tmp_path / "results.md"
    page.write_text("# Results\n\n<!-- recipes: begin -->\nold\n<!-- recipes: end -->\n\nAfter.\n")
    monkeypatch.setattr(results, "PAGE", page)
    monkeypatch.setattr(results, "ROWS", tmp_path / "results.json")
    return page


def test_every_table_has_its_place_in_the_page():
    text = results.PAGE.read_text()
    for job in results.JOBS:
        assert text.count(f"<!-- {job.table}: begin -->") == text.count(f"<!-- {job.table}: end -->") == 1
        assert all((ROOT / argument).exists() for argument in job.arguments if argument.startswith("configs/"))


def test_kept_rows_are_those_of_the_page():
    rows = results.read_rows()
    commands = {job.name: job.command for job in results.JOBS}
    assert all(row["command"] == commands[row["job"]] for row in rows)
    for name in results.whole_tables(rows):
        table = result_tables.table_of(name, [row for row in rows if row["table"] == name])
        assert table in results.PAGE.read_text()


@pytest.mark.full
def test_jobs_run_once_and_their_rows_replace_older_ones(page, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", QUICKLY["XLA_FLAGS"])
    monkeypatch.setattr(Job, "arguments", property(lambda job: [*arguments[job.name], *SHORT.split()]))
    (tmp_path / "space.py").write_text(SPACE)
    default = ["--config", "configs/default.py"]
    arguments = {"short": default, "tiny": [*default, "--space", str(tmp_path / "space.py")]}
    jobs = [Job("short", "recipes", seeds=1, data=""), Job("tiny", "optimizers", data="")]
    monkeypatch.setattr(results, "JOBS", jobs)
    with pytest.raises(UserError, match="no place for a table: <!-- optimizers: begin -->"):
        results.bench_results(str(tmp_path / "runs"), ".", None)
    (recipe, *_) = json.loads(results.ROWS.read_text())
    assert (recipe["seeds"], recipe["steps"], recipe["status"]) == (1, [2], ["done"])
    assert all(0 <= accuracy <= 1 for accuracy in recipe["test_score"])
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("# Results")
    assert text.endswith("After.\n")
    assert "`short.py`" in text
    page.write_text(text + "<!-- optimizers: begin --><!-- optimizers: end -->")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    monkeypatch.setattr(results, "score_on_test", lambda *_, **__: pytest.fail("looks at the test split again"))
    found = results.bench_results(str(tmp_path / "runs"), ".", "short,optimizers")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")} == before
    assert [row["job"] for row in found["rows"]] == ["short", "tiny", "tiny"]
    assert {row["values"]["optimizer.name"] for row in found["rows"][1:]} == {"sgd", "adam"}


def test_what_cannot_be_run_is_refused(page, tmp_path):
    with pytest.raises(UserError, match=r"--only: 'knees'; allowed: recipes, eurosat_fast, .*critical_batch"):
        results.bench_results(str(tmp_path), str(tmp_path), "knees")
    (tmp_path / "EuroSAT.zip").touch()
    with pytest.raises(UserError, match=r"--data: .*CIFAR-10-jpeg.zip is missing"):  # before any of the jobs
        results.bench_results(str(tmp_path), str(tmp_path), "recipes")
    assert not results.ROWS.exists()
