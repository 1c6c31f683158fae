"""A run on rectangles of 13 bands of 16 bits."""

import base64
import io
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tile_sets import write_tiles


def published(folder: Path, target: Path) -> Path:
    """Copy the files into a folder for each split: of each class 6, 3 and 3 images."""
    for number, file in enumerate(sorted(folder.rglob("*.*"))):
        copied = target / ("train", "val", "train", "test")[number % 4] / file.relative_to(folder)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copied)
    return target


@pytest.mark.full
@pytest.mark.usefixtures("eurosat_zip")
def test_a_set_of_any_pixels_is_trained_evaluated_and_reported(tmp_path, monkeypatch):
    """13 bands of 16 bits, resized to rectangles."""
    import evaluate
    import report
    import train
    from configs import default

    monkeypatch.setenv("HOME", str(tmp_path))
    tiles = tmp_path / "tiles"
    write_tiles("bands", tiles, 12, ("AnnualCrop", "Residential", "SeaLake"))
    config = default.get_config()
    config.dataset.name, config.dataset.path = "mine", str(published(tiles, tmp_path / "set"))
    config.dataset.image_size, config.augment.views = (12, 16), "flip"
    config.augment.cache_dir = str(tmp_path / "cache")
    config.batch.update({"size": 16, "micro_batch_size": 2})
    config.train.update({"inner_steps": 2, "outer_steps": 1})
    run = tmp_path / "run"
    summary = train.train_and_evaluate(config, str(run))
    assert evaluate.evaluate(run) == summary["best_val_accuracy"]
    assert evaluate.evaluate(run, images=str(tiles), out=str(tmp_path / "all.csv")) is not None
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 1 + 36
    assert report.main([str(run), "--out", str(tmp_path / "page.html")]) == 0
    encoded = re.findall(r'src="data:image/png;base64,([^"]+)"', (tmp_path / "page.html").read_text())
    pictures = [np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))) for text in encoded]
    assert pictures  # two steps leave mistakes
    for picture in pictures:
        assert picture.shape == (64, 64, 3)
        assert 10 < picture.mean() < 245  # neither black nor white: a dark sea has 40
        assert picture.std() > 40  # stretched: in 16 bits they are nearly black
