"""evaluate.py: the scores and logits of a run on its splits and on any images, by views, shifts and averages."""

import csv
import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
from conftest import assert_one_line_error, decode_all, make_folder, run_script, typed
from PIL import Image

import evaluate
import train
from configs import default
from largebatch.predictions.tables import confusions, macro_f1
from largebatch.runs import checkpoints
from largebatch.runs.load import best_checkpoint
from largebatch.util import UserError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """A home of its own, and in it the user's own cache."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three classes of pictures with unequal counts."""
    return make_folder(tmp_path_factory.mktemp("data") / "images", {"oak": 40, "ash": 50, "elm": 43})


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A finished run on them."""
    config = default.get_config()
    config.dataset.name, config.dataset.path = "trees", str(folder)
    config.augment.cache_dir = str(tmp_path_factory.mktemp("cache"))
    config.batch.micro_batch_size = 16
    config.train.inner_steps = config.train.outer_steps = 3
    path = tmp_path_factory.mktemp("run")
    train.train_and_evaluate(config, str(path))
    return path


def test_validation_gives_the_accuracy_and_logits_of_the_run(run, tmp_path, capsys):
    accuracy = evaluate.evaluate(run, "val", out=str(tmp_path / "val.csv"))
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
        probabilities = [[float(row[f"p({name})"]) for name in names] for row in rows]
        np.testing.assert_allclose(probabilities, expected, atol=2e-5)
        assert [row["prediction"] for row in rows] == [names[i] for i in logits.argmax(axis=1)]
        assert [row["label"] for row in rows] == [names[i] for i in stored["labels"]]


@pytest.mark.full
def test_views_shifts_and_moving_average_give_the_accuracies_of_the_run(small_config, tmp_path, capsys):
    """Images are changed at random in training alone."""
    fields = {"model.norm": "batch", "model.stem": "whitened", "train.ema_decay": 0.5, "augment.crop_scale": 0.5}
    small_config.update_from_flattened_dict(fields)
    small_config.eval.view_average, small_config.eval.shift_average = True, 2
    small_config.train.inner_steps = 1
    train.train_and_evaluate(small_config, str(tmp_path / "run"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    row = max(rows, key=lambda row: row["val_accuracy"])  # of several the first, as the best checkpoint
    logits = {}
    for ema, views in itertools.product((False, True), (False, True)):
        name = ("_ema" if ema else "") + ("_views" if views else "")
        out = tmp_path / f"{name}.csv"
        options = {"views": views, "shift": 2 if views else 0, "ema": ema}
        assert evaluate.evaluate(tmp_path / "run", out=str(out), **options) == row[f"val_accuracy{name}"]
        logits[name] = np.loadtxt(out, str, delimiter=",")[1:, -5:].astype(float)
    heading = "mean over 8 views, mean over shifts of 2 px, moving average of the parameters"
    assert heading in capsys.readouterr().out
    for one, other in itertools.combinations(logits.values(), 2):  # accuracies of so few images may be equal
        assert np.abs(one - other).max() > 1e-4


def test_an_average_that_there_is_not_is_refused(run, monkeypatch):
    with pytest.raises(UserError, match=r"^--shift: 16; allowed: below 16, the size of an image$"):
        evaluate.evaluate(run, shift=16)
    with pytest.raises(UserError, match=r"--ema: .* keeps no moving average; train with --config.train.ema_decay"):
        evaluate.evaluate(run, ema=True)
    loaded = evaluate.load_run(run)
    one_view = dataclasses.replace(loaded, config=loaded.config.replace(augment={"views": "none"}))
    monkeypatch.setattr(evaluate, "load_run", lambda *_: one_view)
    with pytest.raises(UserError, match=r"^--views: .* has augment\.views 'none'; allowed: with more"):
        evaluate.evaluate(run, views=True)


def cache_of(run) -> Path:
    return Path(json.loads((run / "config.json").read_text())["augment"]["cache_dir"])


def damage(path: Path) -> bytes:
    """Flips a bit of a file; returns what it holds then."""
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    return bytes(content)


def test_a_damaged_cache_of_the_run_is_left_as_it_is_and_one_of_the_users_built_again(
    run, folder, tmp_path, home, caplog
):
    theirs = tmp_path / "theirs"
    shutil.copytree(cache_of(run), theirs)
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    accuracy = evaluate.evaluate(copy, "test")
    for cache_dir in (cache_of(run), theirs):
        (path,) = cache_dir.glob("trees-*/images-00000.raw")
        whole, damaged = path.read_bytes(), damage(path)
        caplog.clear()
        overrides = {} if cache_dir != theirs else {"augment.cache_dir": str(theirs)}
        assert evaluate.evaluate(copy, "test", overrides=overrides) == accuracy
        assert f"damaged cache: {path}" in caplog.text
        assert f"reads dataset.path {folder}, which {copy} names" in caplog.messages
        assert path.read_bytes() == (whole if cache_dir == theirs else damaged)
        path.write_bytes(whole)
    assert len(list(home.glob(".cache/largebatch/trees-*"))) == 1


def test_what_is_read_elsewhere_is_named_and_programs_are_the_users_own(run, home):
    limit = ("--config.dataset.max_image_pixels", 10**6)
    result = run_script("evaluate.py", run, *limit, env={"JAX_COMPILATION_CACHE_DIR": ""})
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == [f"reads augment.cache_dir {cache_of(run)}, which {run} names"]
    assert any((home / ".cache" / "largebatch" / "xla").iterdir())
    assert not (cache_of(run) / "xla").exists()


def test_what_the_command_line_gives_takes_the_place_of_what_the_run_names(run, folder, tmp_path, home, caplog):
    moved, mine = shutil.copytree(folder, tmp_path / "moved"), tmp_path / "mine"
    overrides = {"augment.cache_dir": str(mine), "dataset.path": str(moved)}
    accuracy = evaluate.evaluate(run, overrides=overrides)
    assert len(list(mine.glob("trees-*/manifest.json"))) == 1
    shutil.rmtree(moved)
    again = {"augment.cache_dir": str(mine)}  # which holds all there is to read
    assert evaluate.evaluate(run, overrides=again) == accuracy
    assert caplog.text == ""
    assert not home.exists()
    with pytest.raises(UserError, match=f"dataset.path: {moved} does not exist"):
        evaluate.evaluate(run, overrides=overrides | {"augment.cache_dir": str(tmp_path / "empty")})


def test_every_class_that_has_images_counts_alike_in_macro_f1():
    counts = confusions(np.array([0, 0, 0, 0, 1, 1, 3]), np.array([0, 0, 0, 1, 1, 2, 3]), 4)
    # Of class 0 precision 1 and recall 3/4, of class 1 both 1/2, of class 3 both 1; class 2 has no image.
    assert macro_f1(counts) == pytest.approx((6 / 7 + 1 / 2 + 1) / 3)


def test_images_of_a_folder_and_a_zip(run, folder, tmp_path, capsys):
    loose = tmp_path / "photos"
    shutil.copytree(folder, loose / "deep")
    (loose / "somewhere").mkdir()
    (loose / "deep" / "oak" / "oak_1.png").rename(loose / "somewhere" / "stray.png")
    (loose / "notes.txt").write_text("no image")
    archive = shutil.make_archive(str(tmp_path / "photos"), "zip", loose)
    out = str(tmp_path / "out.csv")
    accuracy = evaluate.evaluate(run, images=str(loose), out=out)
    assert evaluate.evaluate(run, images=archive, out=out) == accuracy
    text = capsys.readouterr().out
    assert "over 132 images" in text
    assert "1 more images lie in no folder named as a class" in text
    with (tmp_path / "out.csv").open() as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    assert rows["somewhere/stray.png"]["label"] == ""
    right = sum(row["label"] == row["prediction"] for row in rows.values() if row["label"])
    assert right / 132 == accuracy
    make_folder(tmp_path / "flat", {"birch": 4}, size=(20, 24))  # of another size: resized as in training
    assert evaluate.evaluate(run, images=str(tmp_path / "flat")) is None
    assert "4 images without labels; predicted" in capsys.readouterr().out
    alone = next((tmp_path / "flat" / "birch").iterdir())
    assert evaluate.evaluate(run, images=str(alone)) is None
    assert re.search(rf"^{alone.name}: \w+$", capsys.readouterr().out, re.MULTILINE)


def test_the_limit_of_pixels_is_the_users_own(run, monkeypatch):
    """A run may come from someone else, and bring a limit that lets gigabytes through."""

    def foreign(path):
        best = best_checkpoint(path)
        best.description["config"]["dataset"]["max_image_pixels"] = 10**12
        return best

    monkeypatch.setattr(evaluate, "best_checkpoint", foreign)
    config = evaluate.load_run(run).config
    assert config.dataset.max_image_pixels == default.get_config().dataset.max_image_pixels
    config = evaluate.load_run(run, {"dataset.max_image_pixels": 7}).config
    assert config.dataset.max_image_pixels == 7


@pytest.mark.full
def test_bad_input_is_one_line(run, tmp_path):
    photos = make_folder(tmp_path / "photos", {"oak": 3})
    (photos / "oak" / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").touch()
    cut = Path(shutil.copytree(run, tmp_path / "cut"))
    for path in cut.glob(f"checkpoints/*/{checkpoints.DESCRIPTION}"):
        path.write_bytes(path.read_bytes()[:50])
    for arguments, message in {
        (run, photos): r"oak/cut\.png: damaged image",
        (run, tmp_path / "empty"): r"--images: .*holds no \.jpg",
        (tmp_path / "nowhere", None): "nowhere is no run folder",
        (cut, None): "has no sound checkpoint of a validated step$",
    }.items():
        with pytest.raises(UserError, match=message):
            evaluate.evaluate(arguments[0], images=arguments[1] and str(arguments[1]))
    with pytest.raises(UserError, match=r"^--out: cannot write .*/taken/x\.csv \(Not a directory\)$"):
        evaluate.evaluate(run, out=str(tmp_path / "taken" / "x.csv"))
    usage = run_script("evaluate.py", run, "--split=tset")
    assert_one_line_error(usage, "--split", code=2)


def run_on_images(path: Path, image_shape: tuple, dtype: str, resize: str = "stretch") -> evaluate.TrainedRun:
    """What `shard_images` needs of a run."""
    config = typed(default.get_config()).replace(dataset={"resize": resize})
    data = {"class_names": ["ash", "elm"], "image_shape": list(image_shape), "image_dtype": dtype}
    return evaluate.TrainedRun(path / "run", config, data, 1, {})


@pytest.mark.parametrize("resize", ["stretch", "crop", "pad"])
def test_images_get_the_size_channels_and_resize_mode_of_the_run(tmp_path, resize):
    folder = make_folder(tmp_path / "images", {"elm": 1})
    with Image.open(folder / "elm" / "elm_0.png") as opened:
        picture = opened.copy()
    picture.convert("L").save(folder / "grey.png")
    dataset = evaluate.shard_images(str(folder), run_on_images(tmp_path, (12, 20, 3), "uint8", resize)).dataset
    assert dataset.image_shape == (12, 20, 3)
    by_id = dict(zip(dataset.ids, decode_all(dataset), strict=True))
    if resize == "stretch":
        expected = np.asarray(picture.resize((20, 12), Image.Resampling.BILINEAR))
        np.testing.assert_array_equal(by_id["elm/elm_0.png"], expected)
    bars = by_id["elm/elm_0.png"][:, [0, 1, 2, 3, 16, 17, 18, 19]]  # of a square, 12 pixels are in the middle
    assert bars.any() == (resize != "pad")
    assert np.ptp(by_id["grey.png"], axis=-1).max() == 0
    grey = evaluate.shard_images(str(folder), run_on_images(tmp_path, (12, 20, 1), "uint8")).dataset
    assert decode_all(grey).shape == (2, 12, 20, 1)


def test_images_of_another_depth_or_number_of_bands_than_the_run_s_are_named(tmp_path):
    deep = tmp_path / "deep"
    deep.mkdir()
    tifffile.imwrite(
        deep / "0.tif", np.zeros((8, 8, 13), np.uint16), photometric="minisblack", planarconfig="contig"
    )
    found = evaluate.shard_images(str(deep), run_on_images(tmp_path, (8, 8, 13), "uint16")).dataset
    assert decode_all(found).dtype == np.uint16
    with pytest.raises(UserError, match=r"--images: 0.tif is of uint16; allowed: uint8, as the images of .*run"):
        evaluate.shard_images(str(deep), run_on_images(tmp_path, (8, 8, 13), "uint8"))
    with pytest.raises(UserError, match=r"0.tif: 13 channels; allowed: 3"):
        evaluate.shard_images(str(deep), run_on_images(tmp_path, (8, 8, 3), "uint16"))
    shallow = make_folder(tmp_path / "images", {"elm": 1})
    with pytest.raises(UserError, match=r"--images: elm/elm_0.png is of uint8; allowed: uint16, as the images of"):
        evaluate.shard_images(str(shallow), run_on_images(tmp_path, (8, 8, 3), "uint16"))
