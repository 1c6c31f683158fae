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


def rows_of_batches(optimizer: str, size: int, rate: float, steps: list[int | None]) -> dict:
    values = {"optimizer.name": optimizer, "batch.size": size, "optimizer.learning_rate": rate}
    row = {"values": values, "planned_steps": 1000, "steps_to_target": steps}
    return row | {"best_val_score": [0.8 - rate]}


def test_the_table_of_steps_has_the_best_setting_of_each_batch_size():
    rows = [  # by their means, as a leaderboard has them
        rows_of_batches("muon", 128, 0.2, [105]),
        rows_of_batches("muon", 128, 0.1, [100, 110, 120]),
        rows_of_batches("sgd", 128, 0.2, [150, None]),
        rows_of_batches("sgd", 128, 0.4, [200, 210]),
        rows_of_batches("sgd", 8192, 0.4, [None]),
        rows_of_batches("sgd", 8192, 0.2, [None]),
    ]
    table = result_tables.steps_tables(rows)
    assert table.splitlines()[2:5] == [
        "| muon | 128 | 0.1 | 128,000 | 110 ± 10 (3 of 3) | 14,080 |",
        "| sgd | 128 | 0.4 | 128,000 | 205 ± 7 (2 of 2) | 26,240 |",
        "| sgd | 8,192 | 0.2 | 8,192,000 | not reached |  |",
    ]
    assert "| sgd | fewer than 3 batch sizes reached the target |" in table


def test_critical_batch_sizes_are_fitted_to_all_seeds_of_the_best_settings():
    def last_row(steps_by_size: dict[int, list[int | None]]) -> str:
        rows = [rows_of_batches("muon", size, 0.1, steps) for size, steps in steps_by_size.items()]
        return result_tables.steps_tables(rows).splitlines()[-1]

    means = {size: 100 * (1 + 1000 / size) for size in (128, 512, 2048, 8192)}
    steps = {size: [round(mean * factor) for factor in (0.98, 1, 1.02)] for size, mean in means.items()}
    name, critical, interval, *_ = last_row({**steps, 21_600: [None]}).strip("| ").split(" | ")
    assert name == "muon"
    low, high = (float(end.replace(",", "")) for end in interval.split(" to "))
    assert low < 1000 < high
    assert float(critical.replace(",", "")) == pytest.approx(1000, rel=0.03)
    flat, straight = (
        {size: [count(size)] for size in (64, 256, 1024)} for count in (lambda _: 8, lambda b: 8192 // b)
    )
    assert last_row(flat) == "| muon | 0 |  | 8 | smaller batches still save images |"
    assert last_row(straight) == "| muon | inf |  | larger batches still save steps | 8,192 |"
