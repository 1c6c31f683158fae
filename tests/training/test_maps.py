"""A run that predicts a mask and a depth: its rows, its pictures, its resume, and what others make of it."""

import base64
import csv
import functools
import io
import json
import re
import shutil
import signal

import numpy as np
import pytest
from made_studies import make_study, space_of, train_study
from PIL import Image
from report_pages import make, text_of
from test_sources import save

import augment
import evaluate
import export
import model
import train
from configs import scenes_tiny
from largebatch.data.pictures import class_colours
from largebatch.hosts import preemption
from largebatch.predictions import cases
from largebatch.predictions.tables import mean_iou
from largebatch.runs import reader
from largebatch.studies import analysis
from largebatch.tasks import planes
from largebatch.training import trainer
from largebatch.util import UserError

SMALL = "resunet_smallest"
OUTER_STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def small_network():
    """Compiled in a few seconds."""
    network = functools.partial(model.ResUNet, features=(8,), blocks=(1,))
    model.MODELS[SMALL] = model.Architecture(network, frozenset({"norm"}), of_pixels=True)
    yield
    del model.MODELS[SMALL]


def run_config(cache_dir):
    """100 scenes of 16 pixels."""
    config = scenes_tiny.get_config()
    config.augment.cache_dir = str(cache_dir)
    config.dataset.num_examples, config.dataset.image_size = 100, 16
    config.model.name, config.model.dtype = SMALL, "float32"
    config.batch.size, config.batch.ghost_size = 40, 16
    config.schedule.warmup_steps = 1
    config.train.inner_steps, config.train.outer_steps = 2, OUTER_STEPS
    config.eval.view_average, config.train.ema_decay = True, 0.5
    return config


@pytest.fixture(scope="module")
def run(tmp_path_factory, session_cache):
    """A finished run, and its rows."""
    path = tmp_path_factory.mktemp("run")
    train.train_and_evaluate(run_config(session_cache), str(path))
    return path


@pytest.fixture(autouse=True)
def home(monkeypatch, session_cache):
    """The cache of the run is the user's own."""
    monkeypatch.setattr(evaluate, "own_cache_dir", lambda overrides: str(session_cache))


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_rows_and_summary_have_the_scores_of_the_task(run):
    rows, summary = rows_of(run), json.loads((run / "summary.json").read_text())
    best = max(rows, key=lambda row: row["val_score"])
    assert len(rows) == OUTER_STEPS
    for row in rows:
        assert row["val_score"] == row["val_mean_iou"]
        of_classes = [row["val_iou_background"], row["val_iou_object"]]
        assert row["val_mean_iou"] == pytest.approx(np.mean([iou for iou in of_classes if iou is not None]))
        assert row["val_depth_rmse"] > 0
        assert 0 <= row["val_depth_near"] <= 1
        assert (row["val_accuracy"], row["train_accuracy"], row["val_examples"]) == (None, None, 10)
    assert (summary["score"], summary["best_val_accuracy"]) == ("val_mean_iou", None)
    assert (summary["best_score"], summary["best_step"]) == (best["val_score"], best["step"])
    assert reader.read(run).best_score == best["val_score"]


def test_the_cases_are_the_extremes_and_what_evaluate_predicts(run, tmp_path, capsys):
    score = evaluate.evaluate(run, out=str(tmp_path / "maps"))
    assert score == json.loads((run / "summary.json").read_text())["best_score"]
    text = capsys.readouterr().out
    assert f"mean iou {score:.4f}" in text
    assert "over 10 images" in text
    found = cases.read(run)
    assert found.columns.tolist() == ["loss", "mean_iou", "depth_rmse"]
    assert len(found.ids) == 2 * cases.CASES_PER_END
    assert (np.diff(found.scores[:, 0]) <= 0).all()
    with (tmp_path / "maps" / "scores.csv").open() as file:
        lines = {line["id"]: line for line in csv.DictReader(file)}
    assert len(lines) == 10
    for number, example_id in enumerate(found.ids):
        kinds = [f"{example_id}.{kind}.png" for kind in ("mask", "depth")]
        mask, depth = (np.asarray(Image.open(tmp_path / "maps" / kind)) for kind in kinds)
        predicted, truth = found.predicted[number], found.truth[number]
        np.testing.assert_array_equal(mask == 255, planes.classes_of(predicted) == 1)
        np.testing.assert_allclose(depth / 65_535, planes.depths_of(predicted), atol=1e-3)
        iou = mean_iou(planes.classes_of(predicted), planes.classes_of(truth), num_classes=2)
        assert iou == pytest.approx(found.scores[number, 1], abs=1e-6)
        expected = [iou, np.sqrt(np.mean((planes.depths_of(predicted) - planes.depths_of(truth)) ** 2))]
        of_file = [float(lines[example_id][name]) for name in ("mean_iou", "depth_rmse")]
        np.testing.assert_allclose(of_file, expected, atol=1e-3)


def test_an_export_predicts_the_same_maps(run, tmp_path):
    export.export(run, tmp_path / "model")
    scores = [evaluate.evaluate(path, out=str(tmp_path / "of" / path.name)) for path in (run, tmp_path / "model")]
    assert scores[0] == scores[1]
    for path in (tmp_path / "of" / run.name).rglob("*.*"):
        other = tmp_path / "of" / "model" / path.relative_to(tmp_path / "of" / run.name)
        assert other.read_bytes() == path.read_bytes()
    text = (tmp_path / "model" / "README.md").read_text()
    assert "It gives for each pixel, in this order: 2 logits of" in text


def test_the_average_over_views_and_the_moving_average_are_those_of_the_run(run):
    row = max(rows_of(run), key=lambda row: row["val_score"])
    assert evaluate.evaluate(run, views=True) == row["val_mean_iou_views"]
    assert evaluate.evaluate(run, ema=True) == row["val_mean_iou_ema"]
    with pytest.raises(UserError, match=r"^--shift: 1; allowed: 0 with maps$"):
        evaluate.evaluate(run, shift=1)


def test_images_of_a_folder_with_and_without_masks(run, tmp_path, capsys):
    found, folder = cases.read(run), tmp_path / "set"
    depths = np.rint(planes.depths_of(found.truth) * planes.LARGEST_DEPTH).astype(np.uint16)
    masks = planes.classes_of(found.truth).astype(np.uint8)
    for kind, pictures in {"images": found.images, "masks": masks, "depths": depths}.items():
        for number, pixels in enumerate(pictures):
            save(folder / kind / f"{number}.png", pixels)
    score = evaluate.evaluate(run, images=str(folder), out=str(tmp_path / "all"))
    assert 0 < score < 1
    written = np.asarray(Image.open(tmp_path / "all" / "0.mask.png")) == 255
    np.testing.assert_array_equal(written, planes.classes_of(found.predicted[0]) == 1)
    assert evaluate.evaluate(run, images=str(folder / "images"), out=str(tmp_path / "only")) is None
    assert "8 images without masks: predicted only" in capsys.readouterr().out
    assert (tmp_path / "only" / "0.png.mask.png").read_bytes() == (tmp_path / "all" / "0.mask.png").read_bytes()
    (folder / "classes.txt").write_text("sky\ncloud\n")
    with pytest.raises(UserError, match=r"masks of sky, cloud and depths; allowed: masks of background, object"):
        evaluate.evaluate(run, images=str(folder))


@pytest.mark.full
def test_a_resumed_run_has_the_same_bits(run, tmp_path, session_cache, monkeypatch):
    calls = iter([0, 0, int(signal.SIGTERM)])
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "SECONDS_PER_CALL", 0.0)
        patched.setattr(preemption, "agree", lambda vote=0: (next(calls), vote))
        with pytest.raises(preemption.Stopped):
            train.train_and_evaluate(run_config(session_cache), str(tmp_path / "run"))
    summary = train.train_and_evaluate(run_config(session_cache), str(tmp_path / "run"))
    assert summary["params_sha256"] == json.loads((run / "summary.json").read_text())["params_sha256"]
    for one, other in zip(rows_of(run), rows_of(tmp_path / "run"), strict=True):
        scores = {name: value for name, value in one.items() if name.startswith(("val_", "train_l"))}
        assert scores == {name: other[name] for name in scores}
    for one, other in zip(*(vars(cases.read(path)).values() for path in (run, tmp_path / "run")), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
def test_local_steps_on_a_trace_from_a_stream(tmp_path, session_cache):
    config = run_config(session_cache)
    config.augment.storage, config.augment.crop_scale, config.augment.shift = "streamed", 0.5, 2
    config.batch.trace, config.batch.hold_last = (40, 16, 24), True
    config.sync.mode, config.sync.every, config.sync.optimizer_state = "local", 2, "keep"
    config.eval.view_average, config.train.ema_decay = False, None
    summary = train.train_and_evaluate(config, str(tmp_path / "run"))
    rows = rows_of(tmp_path / "run")
    assert [row["global_batch_size"] for row in rows] == [16, 24, 24]
    assert all(row["replica_drift"] > 0 for row in rows)
    assert summary["best_score"] == max(row["val_mean_iou"] for row in rows)


def test_the_report_shows_the_cases_and_names_damaged_ones(run, tmp_path):
    """Of each the image, mask, predicted mask and its errors, and three pictures of the depth."""
    page, found = make(run, out=tmp_path / "page.html"), cases.read(run)
    section = page[page.index("Worst and best maps") :]
    assert all(name in section for name in found.classes)
    encoded = re.findall(r'src="data:image/png;base64,([^"]*)"', section)
    drawn = [np.asarray(Image.open(io.BytesIO(base64.b64decode(content)))) for content in encoded]
    assert len(drawn) == 7 * len(found.ids)
    truth, predicted = (planes.classes_of(maps) for maps in (found.truth, found.predicted))
    for number in range(len(found.ids)):
        image, mask, guess, wrong, *_ = drawn[7 * number :]
        np.testing.assert_array_equal(image, found.images[number])
        np.testing.assert_array_equal(mask, class_colours(truth[number]))
        np.testing.assert_array_equal(guess, class_colours(predicted[number]))
        is_marked = (wrong == [230, 60, 60]).all(axis=-1)
        np.testing.assert_array_equal(is_marked, truth[number] != predicted[number])
    shutil.copytree(run, tmp_path / "damaged")
    (tmp_path / "damaged" / cases.FILE).write_bytes((run / cases.FILE).read_bytes()[:-2000])
    damaged = text_of(make(tmp_path / "damaged", out=tmp_path / "page.html"))
    assert "Worst and best maps" not in damaged
    assert "cases.npz: damaged" in damaged


def test_a_turned_image_is_predicted_as_the_turned_prediction():
    """Averages over views turn maps back, so a network that copies its input gives the image."""
    images = np.random.default_rng(0).random((2, 6, 6, 3)).astype(np.float32)
    average = augment.average_over_copies(lambda _, copies: copies, num_views=8, gives_maps=True)
    np.testing.assert_allclose(average(None, images), images, rtol=1e-6)
    for view in range(8):
        turned = augment.apply_view(augment.apply_view(images, view), augment.inverse_view(view))
        np.testing.assert_array_equal(turned, images)


# ---- depths alone --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def depths_config(tmp_path_factory, session_cache):
    """Images that grow brighter to one side, with that side's depth."""
    root, rng = tmp_path_factory.mktemp("depths"), np.random.default_rng(0)
    for number in range(60):
        depth = np.clip(np.linspace(0, 1, 16)[None] * rng.uniform(0.5, 1.5, (16, 1)), 0, 1)
        image = np.clip(255 * depth[..., None] + rng.normal(0, 20, (16, 16, 3)), 0, 255).astype(np.uint8)
        save(root / "images" / f"{number}.png", image)
        save(root / "depths" / f"{number}.png", (65_535 * depth).astype(np.uint16))
    config = run_config(session_cache)
    config.dataset.name, config.dataset.path, config.dataset.image_size = "mine", str(root), None
    config.task.name, config.task.depth_weight = "depth", 1.0
    config.batch.size, config.train.inner_steps, config.train.outer_steps = 16, 4, 4
    config.eval.view_average, config.train.ema_decay = False, None
    return config


@pytest.mark.full
def test_depths_alone_whose_best_score_is_the_lowest(depths_config, tmp_path):
    config = depths_config.copy_and_resolve_references()
    summary = train.train_and_evaluate(config, str(tmp_path / "run"))
    scores = [row["val_score"] for row in rows_of(tmp_path / "run")]
    assert summary["score"] == "val_depth_rmse"
    assert summary["best_score"] == min(scores) < scores[0]
    assert reader.read(tmp_path / "run").best_score == min(scores)
    assert evaluate.evaluate(tmp_path / "run", out=str(tmp_path / "out")) == summary["best_score"]
    assert (tmp_path / "out" / "scores.csv").read_text().splitlines()[0] == "id,depth_rmse"
    assert not list((tmp_path / "out").glob("*.mask.png"))
    assert len(list((tmp_path / "out").glob("*.depth.png"))) == 6

    config.train.target_score = target = (scores[0] + min(scores)) / 2
    stopped = train.train_and_evaluate(config, str(tmp_path / "stopped"))
    (*above, last) = [row["val_score"] for row in rows_of(tmp_path / "stopped")]
    assert last <= target < min(above)
    assert stopped["steps_to_target"] == stopped["steps"]


@pytest.mark.full
def test_a_study_of_depths_ranks_the_lowest_first(depths_config, tmp_path):
    config = depths_config.copy_and_resolve_references()
    config.train.outer_steps = 1
    space = space_of({"optimizer.learning_rate": [1e-6, 0.05]})
    study = make_study(config, tmp_path / "study", space, best_seeds=2)
    train_study(study)
    best, worst = analysis.leaderboard(reader.read(study.path))
    assert best.values == {"optimizer.learning_rate": 0.05}
    assert best.score.mean < worst.score.mean
    assert (len(best.runs), len(worst.runs)) == (2, 1)  # the second seed went to the better one
    text = text_of(make(study.path, out=tmp_path / "page.html"))
    assert "best validation depth RMSE" in text
    assert f"{min(run.best_score for run in best.runs):.4f}" in text
