"""Run folders of an earlier version still evaluate, report and resume: their files are a format that lasts.

tests/golden holds five small runs on 200 synthetic images and 8 CPU devices, each packed into one file since a
checkpoint has a folder per array, and in rows.json the rows of two unfinished ones when nothing stops them.

    finished   batch normalisation, whitened stem, moving average of the parameters, LAMB; order version 2
    growing    SGD with momentum and AdaScale, its batch grown once; stopped at update 45, inside an outer loop
    local      SOAP by local steps with an outer momentum; stopped at update 12, between two synchronisations
    order_2,   unfinished, and of orders of examples that the code no longer has
    order_3

They train a network of 500 parameters that only this test has.
"""

import functools
import json
import tarfile
from pathlib import Path

import pytest
from conftest import ROOT
from ml_collections import config_dict

import evaluate
import export
import model
import report
import train
from configs import default
from largebatch.errors import UserError

GOLDEN = ROOT / "tests" / "golden"
RUNS = ("finished", "growing", "local", "order_2", "order_3")
# What a row says in numbers that other processors round otherwise, and by how much; the rest is exact.
ROUNDED = dict.fromkeys(("learning_rate", "train_loss", "train_accuracy", "grad_norm", "noise_scale"), 1e-3)
ROUNDED |= dict.fromkeys(("val_loss", "gain", "scale_invariant_steps"), 1e-3)
ROUNDED["replica_drift"] = 1e-2  # a gradient near 0 has any basis, and so any sign, in SOAP


@pytest.fixture(autouse=True)
def narrow_network(monkeypatch):
    """The network of the golden runs."""
    network = functools.partial(model.ConvNet, features=(4, 8), blocks=(0, 0), hidden=None)
    options = model.MODELS["convnet"].options
    monkeypatch.setitem(model.MODELS, "narrow", model.Architecture(network, options))


@pytest.fixture
def unpack(tmp_path, monkeypatch):
    """unpack(name) is a copy of a golden run; caches go to a home of their own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def unpack(name: str) -> Path:
        with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
            # As Python's documentation has it: before 3.11.4 there is no such filter.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(tmp_path)
        return tmp_path / name

    return unpack


def config_of(run: Path) -> config_dict.ConfigDict:
    """The config that a run was started with."""
    config = default.get_config()
    config.update(config_dict.ConfigDict(json.loads((run / "config.json").read_text())))
    return config


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_is_exported(name, unpack, tmp_path):
    run, model_folder = unpack(name), tmp_path / "model"
    export.export(run, model_folder)
    assert evaluate.evaluate(model_folder, "val") == evaluate.evaluate(run, "val")
    row = max(rows_of(run), key=lambda row: row["val_accuracy"])
    assert f"| validation: `val_accuracy` | {row['val_accuracy']:.6g} |" in (model_folder / "README.md").read_text()


@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_evaluates_to_the_accuracy_it_recorded(name, unpack):
    run = unpack(name)
    row = max(rows_of(run), key=lambda row: row["val_accuracy"])
    assert evaluate.evaluate(run, "val") == pytest.approx(row["val_accuracy"])
    if "val_accuracy_ema" in row:
        assert evaluate.evaluate(run, "val", ema=True) == pytest.approx(row["val_accuracy_ema"])


def test_a_report_shows_old_runs(unpack, tmp_path):
    page = tmp_path / "report.html"
    assert report.main([*(str(unpack(name)) for name in RUNS), "--out", str(page)]) == 0
    text = page.read_text()
    assert all(name in text for name in RUNS)


@pytest.mark.full
@pytest.mark.parametrize(("name", "stopped_at"), [("growing", 45), ("local", 12)])
def test_an_old_unfinished_run_resumes_and_ends_as_if_nothing_had_stopped_it(name, stopped_at, unpack, caplog):
    run = unpack(name)
    expected = json.loads((GOLDEN / "rows.json").read_text())[name]
    with caplog.at_level("INFO", "largebatch"):
        summary = train.train_and_evaluate(config_of(run), str(run))
    assert f"resuming at update {stopped_at}; the process before interrupted" in caplog.text
    assert "results will not be bitwise" not in caplog.text  # the devices are as many as there were
    rows = rows_of(run)
    assert (summary["status"], len(rows)) == ("done", len(expected))
    for row, golden in zip(rows, expected, strict=True):
        assert row.keys() >= golden.keys()
        for field, value in golden.items():
            if field in ROUNDED and value is not None:
                value = pytest.approx(value, rel=ROUNDED[field])
            assert row[field] == value, field


@pytest.mark.full
@pytest.mark.parametrize("version", [2, 3])
def test_an_unfinished_run_of_another_order_is_refused_and_stays_as_it_is(version, unpack):
    run = unpack(f"order_{version}")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=f"order version {version}, this code in version 4: the run cannot go on; "):
        train.train_and_evaluate(config_of(run), str(run))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_finished_old_run_is_known_as_finished(unpack):
    run = unpack("finished")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    summary = train.train_and_evaluate(config_of(run), str(run))
    assert summary == json.loads((run / "summary.json").read_text())
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
