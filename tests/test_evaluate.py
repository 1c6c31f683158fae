import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_one_line_error, make_folder, run_script

import evaluate
import train
from largebatch import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three classes of pictures with unequal counts."""
    return make_folder(tmp_path_factory.mktemp("data") / "images", {"oak": 40, "ash": 50, "elm": 43})


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A finished run on them."""
    from configs import default

    config = default.get_config()
    config.dataset.name, config.dataset.path = "trees", str(folder)
    config.augment.cache_dir = str(tmp_path_factory.mktemp("cache"))
    config.batch.micro_batch_size = 16
    config.train.inner_steps = config.train.outer_steps = 3
    path = tmp_path_factory.mktemp("run")
    train.train_and_evaluate(config, str(path))
    return path


def test_validation_gives_the_accuracy_and_logits_of_the_run(run, tmp_path, capsys):
    accuracy = evaluate.evaluate(run, "val", None, str(tmp_path / "val.csv"))
    summary = json.loads((run / "summary.json").read_text())
    assert accuracy == summary["best_val_accuracy"]
    text = capsys.readouterr().out
    assert f"accuracy {accuracy:.4f}" in text
    assert "over 13 images" in text
    with (tmp_path / "val.csv").open() as file:
        rows = list(csv.DictReader(file))
    with np.load(run / "predictions.npz", allow_pickle=False) as stored:
        assert [row["id"] for row in rows] == stored["ids"].tolist()
        logits, names = stored["logits"].astype(float), ["ash", "elm", "oak"]
        expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        found = [[float(row[f"p({name})"]) for name in names] for row in rows]
        np.testing.assert_allclose(found, expected, atol=2e-5)
        assert [row["prediction"] for row in rows] == [names[i] for i in logits.argmax(axis=1)]
        assert [row["label"] for row in rows] == [names[i] for i in stored["labels"]]


def test_views_and_moving_average_give_the_accuracies_of_the_run(folder, tmp_path, capsys):
    from configs import default

    config = default.get_config()
    config.dataset.name, config.dataset.path, config.augment.cache_dir = (
        "trees",
        str(folder),
        str(tmp_path / "cache"),
    )
    config.batch.micro_batch_size, config.batch.size, config.optimizer.name = 16, 128, "adam"
    config.model.norm, config.model.stem, config.train.ema_decay = "batch", "whitened", 0.5
    config.eval.view_average, config.train.inner_steps, config.train.outer_steps = True, 3, 1
    train.train_and_evaluate(config, str(tmp_path / "run"))
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    for views, ema, name in ((0, 0, ""), (1, 0, "_views"), (0, 1, "_ema"), (1, 1, "_ema_views")):
        found = evaluate.evaluate(tmp_path / "run", "val", None, None, views=bool(views), ema=bool(ema))
        assert found == row[f"val_accuracy{name}"]
    assert "mean over 8 views, moving average of the parameters" in capsys.readouterr().out


def test_a_run_without_moving_average_says_so(run):
    with pytest.raises(UserError, match=r"--ema: .* keeps no moving average; train with --config.train.ema_decay"):
        evaluate.evaluate(run, "val", None, None, ema=True)


def test_a_damaged_cache_is_built_again(run, caplog):
    config = json.loads((run / "config.json").read_text())
    (path,) = Path(config["augment"]["cache_dir"]).glob("trees-*/test_images.npy")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    accuracy = evaluate.evaluate(run, "test", None, None)
    assert 0 <= accuracy <= 1
    assert "damaged cache" in caplog.text


def test_images_of_a_folder_and_a_zip(run, folder, tmp_path, capsys):
    loose = tmp_path / "photos"
    shutil.copytree(folder, loose / "deep")
    (loose / "somewhere").mkdir()
    (loose / "deep" / "oak" / "oak_1.png").rename(loose / "somewhere" / "stray.png")
    (loose / "notes.txt").write_text("no image")
    archive = shutil.make_archive(str(tmp_path / "photos"), "zip", loose)
    accuracies = [evaluate.evaluate(run, "val", str(path), str(tmp_path / "out.csv")) for path in (loose, archive)]
    assert accuracies[0] == accuracies[1]
    text = capsys.readouterr().out
    assert "over 132 images" in text
    assert "1 more images lie in no folder named as a class" in text
    with (tmp_path / "out.csv").open() as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    assert rows["somewhere/stray.png"]["label"] == ""
    right = sum(row["label"] == row["prediction"] for row in rows.values() if row["label"])
    assert right / 132 == accuracies[0]


def test_images_without_labels(run, tmp_path, capsys):
    make_folder(tmp_path / "flat", {"birch": 4}, size=(20, 24))  # of another size: resized as in training
    assert evaluate.evaluate(run, "val", str(tmp_path / "flat"), None) is None
    assert "4 images without labels; predicted" in capsys.readouterr().out


def test_bad_input_is_one_line(run, tmp_path):
    (tmp_path / "empty").mkdir()
    cases = {
        (tmp_path / "nowhere",): ("nowhere is no run folder",),
        (run, "--images", tmp_path / "empty"): ("--images:", "holds no .jpg"),
        (run, "--out", "/nowhere/x.csv"): ("--out: cannot write /nowhere/x.csv",),
    }
    for arguments, words in cases.items():
        assert_one_line_error(run_script("evaluate.py", *arguments), *words)
    for arguments, words in {(): ("give one run folder",), (run, "--split=tset"): ("--split",)}.items():
        assert_one_line_error(run_script("evaluate.py", *arguments), *words, code=2)
    cut = tmp_path / "cut"
    shutil.copytree(run, cut)
    for path in cut.glob("checkpoints/*/SHA256SUMS"):
        path.write_bytes(path.read_bytes()[:50])
    result = run_script("evaluate.py", cut)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith("has no sound checkpoint of a validated step")
    assert "SHA256SUMS is not a list of digests" in result.stderr
    assert "Traceback" not in result.stderr
