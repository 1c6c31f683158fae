"""13 bands of 16 bits, grey images and rectangles: their pixels, and a run on them."""

import base64
import io
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
from conftest import find_set
from PIL import Image
from tile_sets import write_tiles

SHAPES = {
    "bands": ((64, 64, 13), np.uint16),
    "grey": ((64, 64, 1), np.uint8),
    "rectangles": ((48, 64, 3), np.uint8),
}


@pytest.fixture(scope="module")
def sets(eurosat_zip, tmp_path_factory) -> Path:
    """A folder of each of the kinds in class folders."""
    root = tmp_path_factory.mktemp("sets")
    for kind in SHAPES:
        write_tiles(kind, root / kind, 12, ("AnnualCrop", "Residential", "SeaLake"))
    return root


def published(folder: Path, target: Path) -> Path:
    """Copy the files into a folder for each split: of each class 6, 3 and 3 images."""
    for number, file in enumerate(sorted(folder.rglob("*.*"))):
        copied = target / ("train", "val", "train", "test")[number % 4] / file.relative_to(folder)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copied)
    return target


@pytest.mark.parametrize("kind", SHAPES)
def test_pixels_are_those_of_the_files(sets, kind):
    folder = find_set(path=sets / kind)
    (first,) = folder.images(np.array([0]))
    assert (first.shape, first.dtype) == SHAPES[kind]
    file = sets / kind / folder.ids[0]
    stored = tifffile.imread(file) if kind == "bands" else np.asarray(Image.open(file))
    np.testing.assert_array_equal(first, stored.reshape(first.shape))


@pytest.mark.full
def test_a_set_of_any_pixels_is_trained_evaluated_and_reported(sets, tmp_path, monkeypatch):
    """13 bands of 16 bits, resized to rectangles."""
    import evaluate
    import report
    import train
    from configs import default

    monkeypatch.setenv("HOME", str(tmp_path))
    config = default.get_config()
    config.dataset.name, config.dataset.path = "mine", str(published(sets / "bands", tmp_path / "set"))
    config.dataset.image_size, config.augment.views = (12, 16), "flip"
    config.augment.cache_dir = str(tmp_path / "cache")
    config.batch.update({"size": 16, "micro_batch_size": 2})
    config.train.update({"inner_steps": 2, "outer_steps": 1})
    run = tmp_path / "run"
    summary = train.train_and_evaluate(config, str(run))
    assert evaluate.evaluate(run) == summary["best_val_accuracy"]
    assert evaluate.evaluate(run, images=str(sets / "bands"), out=str(tmp_path / "all.csv")) is not None
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 1 + 36
    assert report.main([str(run), "--out", str(tmp_path / "page.html")]) == 0
    encoded = re.findall(r'src="data:image/png;base64,([^"]+)"', (tmp_path / "page.html").read_text())
    pictures = [np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))) for text in encoded]
    assert pictures  # two steps leave mistakes
    for picture in pictures:
        assert picture.shape == (64, 64, 3)
        assert 10 < picture.mean() < 245  # neither black nor white: a dark sea has 40
        assert picture.std() > 40  # stretched: in 16 bits they are nearly black
