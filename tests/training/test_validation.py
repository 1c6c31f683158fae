"""A run whose validation images and logits are too many: read in blocks, written in parts, the same numbers."""

import csv
import functools
import json

import numpy as np
import pytest
from conftest import make_folder
from test_resume import rows_of

import build
import evaluate
import model
import train
from largebatch.data import sharded_split
from largebatch.predictions import files as prediction_files
from largebatch.training.evaluation import SplitPredictions


@pytest.fixture
def config(small_config, tmp_path, monkeypatch):
    """42 validation images of 7 classes: at most six on each of 8 devices, in micro-batches of two."""
    folder = make_folder(tmp_path / "data", dict.fromkeys("abcdefg", 60))
    small_config.dataset.name, small_config.dataset.path = "letters", str(folder)
    # A network of few parameters compiles sooner.
    network = functools.partial(model.ConvNet, features=(4, 8), blocks=(0, 0), hidden=None)
    options = model.MODELS["convnet"].options
    monkeypatch.setitem(model.MODELS, "narrow", model.Architecture(network, options))
    small_config.model.name = "narrow"
    small_config.batch.size, small_config.batch.micro_batch_size = 16, 2
    small_config.train.inner_steps, small_config.train.outer_steps = 1, 2
    return small_config


@pytest.fixture
def runs(config, tmp_path, monkeypatch):
    """The same run as ever, and with everything too large; which logits it read, of how many blocks."""
    train.train_and_evaluate(config, str(tmp_path / "resident"))
    monkeypatch.setattr(sharded_split, "RESIDENT_SHARE", 0.0)
    monkeypatch.setattr(sharded_split, "BLOCK_BYTES", 2 * 16 * 16 * 3)
    monkeypatch.setattr(prediction_files, "LOGITS_PER_PART", 7 * 17)
    fetched, get = [], SplitPredictions.__getitem__

    def count(self, examples):
        fetched.append((len(self.blocks), examples))
        return get(self, examples)

    monkeypatch.setattr(SplitPredictions, "__getitem__", count)
    train.train_and_evaluate(config, str(tmp_path / "streamed"), shared=build.ProgramCache())
    return tmp_path / "resident", tmp_path / "streamed", fetched.copy()


def read(run) -> dict[str, np.ndarray]:
    found = prediction_files.read(run)
    return {name: getattr(found, name) for name in ("labels", "logits", "ids")}


@pytest.mark.full
def test_a_run_with_more_than_fits_is_bitwise_the_same(runs, tmp_path, capsys):
    resident, streamed, fetched = runs
    rows = rows_of(streamed)
    assert rows == rows_of(resident)
    assert all(row["val_accuracy"] <= row["val_accuracy_top5"] for row in rows)
    assert "val_accuracy_top5" not in (streamed / "summary.json").read_text()
    # Logits came to the host for each new best alone, 17 examples of 7 classes at a time.
    best = np.maximum.accumulate([0.0] + [row["val_accuracy"] for row in rows])
    parts = [(3, slice(0, 17)), (3, slice(17, 34)), (3, slice(34, 42))]
    assert fetched == parts * max(np.count_nonzero(np.diff(best)), 1)
    expected, found = read(resident), read(streamed)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
    (row,) = [
        row for row in rows if row["step"] == json.loads((streamed / "summary.json").read_text())["best_step"]
    ]
    assert np.mean(found["logits"].argmax(1) == found["labels"]) == row["val_accuracy"]

    accuracies = [evaluate.evaluate(run, out=str(tmp_path / f"{run.name}.csv")) for run in (resident, streamed)]
    assert accuracies == [row["val_accuracy"]] * 2
    assert f"among the first five {row['val_accuracy_top5']:.4f}, macro F1" in capsys.readouterr().out
    table = (tmp_path / "resident.csv").read_text()
    assert table == (tmp_path / "streamed.csv").read_text()
    assert [line["id"] for line in csv.DictReader(table.splitlines())] == expected["ids"].tolist()
