"""A run on rectangles of 13 bands of 16 bits."""

import base64
import io
import re

import numpy as np
import pytest
import tifffile
from PIL import Image


@pytest.mark.full
def test_a_set_of_any_pixels_is_trained_evaluated_and_reported(tmp_path, monkeypatch):
    import evaluate
    import report
    import train
    from configs import default

    rng = np.random.default_rng(0)
    for number in range(36):
        path = (
            tmp_path / "set" / ("train", "val", "train", "test")[number % 4] / "abc"[number % 3] / f"{number}.tif"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.kron(rng.integers(200, 3000, (8, 8, 13), np.uint16), np.ones((8, 8, 1), np.uint16))
        tifffile.imwrite(path, pixels, photometric="minisblack", planarconfig="contig")
    monkeypatch.setenv("HOME", str(tmp_path))
    config = default.get_config()
    config.dataset.name, config.dataset.path = "mine", str(tmp_path / "set")
    config.dataset.image_size, config.augment.views = (12, 16), "flip"
    config.augment.cache_dir = str(tmp_path / "cache")
    config.batch.update({"size": 16, "micro_batch_size": 2})
    config.train.update({"inner_steps": 2, "outer_steps": 1})
    run = tmp_path / "run"
    summary = train.train_and_evaluate(config, str(run))
    assert evaluate.evaluate(run) == summary["best_val_accuracy"]
    assert evaluate.evaluate(run, images=str(tmp_path / "set"), out=str(tmp_path / "all.csv")) is not None
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 1 + 36
    assert report.main([str(run), "--out", str(tmp_path / "page.html")]) == 0
    encoded = re.findall(r'src="data:image/png;base64,([^"]+)"', (tmp_path / "page.html").read_text())
    pictures = [np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))) for text in encoded]
    assert pictures  # two steps leave mistakes
    for picture in pictures:
        assert picture.shape == (64, 64, 3)
        assert 10 < picture.mean() < 245  # neither black nor white
        assert picture.std() > 40  # stretched: in 16 bits they are nearly black
