"""Runs on folders of masks alone and of depths alone, and a study of runs whose score should be low."""

import base64
import functools
import io
import json
import re

import numpy as np
import pytest
from made_studies import make_study, space_of, train_study
from PIL import Image
from report_pages import make, text_of

import evaluate
import model
import train
from configs import scenes_tiny
from largebatch.data.pictures import class_colours
from largebatch.predictions import cases
from largebatch.runs import reader
from largebatch.studies import analysis
from largebatch.tasks import planes

SMALL, SIZE, COUNT = "resunet_smaller", 16, 60
CLASSES = ("near", "middle", "far")


@pytest.fixture(scope="module", autouse=True)
def small_network():
    """Compiled in a few seconds."""
    network = functools.partial(model.ResUNet, features=(8,), blocks=(1,))
    model.MODELS[SMALL] = model.Architecture(network, frozenset({"norm"}), of_pixels=True)
    yield
    del model.MODELS[SMALL]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Images that grow brighter to one side, with that side's depth; and the same cut into three classes."""
    root, rng = tmp_path_factory.mktemp("sets"), np.random.default_rng(0)
    for name in ("segmentation/images", "segmentation/masks", "depth/images", "depth/depths"):
        (root / name).mkdir(parents=True)
    for number in range(COUNT):
        depth = np.clip(np.linspace(0, 1, SIZE)[None] * rng.uniform(0.5, 1.5, (SIZE, 1)), 0, 1)
        image = np.clip(255 * depth[..., None] + rng.normal(0, 20, (SIZE, SIZE, 3)), 0, 255).astype(np.uint8)
        for task in ("segmentation", "depth"):
            Image.fromarray(image).save(root / task / "images" / f"{number}.png")
        mask = np.digitize(depth, (1 / 3, 2 / 3)).astype(np.uint8)
        Image.fromarray(mask).save(root / "segmentation" / "masks" / f"{number}.png")
        Image.fromarray((65_535 * depth).astype(np.uint16)).save(root / "depth" / "depths" / f"{number}.png")
    (root / "segmentation" / "classes.txt").write_text("\n".join(CLASSES))
    return root


def config_of(task, folders, cache_dir):
    config = scenes_tiny.get_config()
    config.dataset.name, config.dataset.path, config.dataset.image_size = "mine", str(folders / task), None
    config.augment.cache_dir, config.task.name, config.task.depth_weight = str(cache_dir), task, 1.0
    config.model.name, config.model.dtype = SMALL, "float32"
    config.batch.size, config.batch.ghost_size = 16, 16
    config.schedule.warmup_updates, config.train.inner_steps, config.train.outer_steps = 1, 4, 4
    return config


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_masks_alone_and_the_images_truths_predictions_and_errors_of_its_report(
    folders, session_cache, tmp_path, monkeypatch
):
    config, run = config_of("segmentation", folders, session_cache), tmp_path / "run"
    summary, rows = train.train_and_evaluate(config, str(run)), rows_of(run)
    for row in rows:
        assert {f"val_iou_{name}" for name in CLASSES} < row.keys()
        assert "val_depth_rmse" not in row
    assert summary["score"] == "val_mean_iou"
    assert summary["best_score"] == max(row["val_mean_iou"] for row in rows)
    assert rows[-1]["train_pixel_accuracy"] > rows[0]["train_pixel_accuracy"]
    monkeypatch.setattr(evaluate, "own_cache_dir", lambda overrides: str(session_cache))
    assert evaluate.evaluate(run) == summary["best_score"]
    page, found = make(run, out=tmp_path / "page.html"), cases.read(run)
    assert found.classes.tolist() == list(CLASSES)
    section = page[page.index("Worst and best maps") :]
    assert all(name in section for name in CLASSES)
    encoded = re.findall(r'src="data:image/png;base64,([^"]*)"', section)
    drawn = [np.asarray(Image.open(io.BytesIO(base64.b64decode(content)))) for content in encoded]
    assert len(drawn) == 4 * len(found.ids)
    truth, predicted = (planes.classes_of(maps) for maps in (found.truth, found.predicted))
    for number in range(len(found.ids)):
        image, mask, guess, wrong = drawn[4 * number : 4 * number + 4]
        np.testing.assert_array_equal(image, found.images[number])
        np.testing.assert_array_equal(mask, class_colours(truth[number]))
        np.testing.assert_array_equal(guess, class_colours(predicted[number]))
        is_marked = (wrong == [230, 60, 60]).all(axis=-1)
        np.testing.assert_array_equal(is_marked, truth[number] != predicted[number])


@pytest.mark.full
def test_depths_alone_whose_best_score_is_the_lowest(folders, session_cache, tmp_path, monkeypatch):
    config = config_of("depth", folders, session_cache)
    summary = train.train_and_evaluate(config, str(tmp_path / "run"))
    scores = [row["val_score"] for row in rows_of(tmp_path / "run")]
    assert summary["score"] == "val_depth_rmse"
    assert summary["best_score"] == min(scores) < scores[0]
    assert reader.read(tmp_path / "run").best_score == min(scores)
    monkeypatch.setattr(evaluate, "own_cache_dir", lambda overrides: str(session_cache))
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
def test_a_study_of_depths_ranks_the_lowest_first(folders, session_cache, tmp_path):
    config = config_of("depth", folders, session_cache)
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
