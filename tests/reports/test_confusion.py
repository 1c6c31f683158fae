import base64
import io
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tifffile
from conftest import make_folder
from PIL import Image
from report_pages import make, text_of, write_predictions
from test_analysis import write_run

import report
from largebatch.reports import examples
from largebatch.runs import reader


def test_confusions_with_pictures_from_folder_and_zip(tmp_path):
    data = make_folder(tmp_path / "data" / "2750", {"Forest": 3, "Lake": 3, "River": 3}).parent
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for path in data.rglob("*.png"):
            archive.write(path, path.relative_to(tmp_path / "data"))
    ids = [f"{name}/{name}_{k}.png" for name in ("Forest", "Lake", "River") for k in range(3)]
    run = write_run(tmp_path / "run")
    write_predictions(run, np.arange(9) // 3, [0, 2, 2, 1, 1, 1, 0, 2, 2], ids)
    for place in (data, tmp_path / "data.zip"):
        config = json.loads((run / "config.json").read_text())
        config["dataset"] |= {"name": "mine", "path": str(place)}
        (run / "config.json").write_text(json.dumps(config))
        shown = examples.read_confusion(reader.read(run))
        assert shown.no_pictures is None
        assert shown.names == ["Forest", "Lake", "River"]
        assert shown.matrix.tolist() == [[1, 0, 2], [0, 3, 0], [1, 0, 2]]
        np.testing.assert_allclose(shown.recall, [1 / 3, 1, 2 / 3])
        first, _ = shown.worst
        assert (first.true, first.predicted, first.count) == (0, 2, 2)
        assert [example.example_id for example in first.examples] == ["Forest/Forest_2.png", "Forest/Forest_1.png"]
        page = make(run, out=tmp_path / "page.html")
        assert page.count('src="data:image/png;base64,') == 3
        assert "Forest taken for River: 2" in text_of(page)
        with Image.open(data / "2750" / "Forest" / "Forest_2.png") as image:
            expected = np.asarray(image.convert("RGB"))
        encoded = first.examples[0].picture.removeprefix("data:image/png;base64,")
        with Image.open(io.BytesIO(base64.b64decode(encoded))) as image:
            np.testing.assert_array_equal(np.asarray(image), expected)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere.zip", "nowhere.zip does not exist here"),
        (None, "the run names no dataset.path"),
        ("empty", "no example was found in"),
        ("run/config.json", "does not exist here, or cannot be read"),
        ("~no.such.user/x", "does not exist here"),
        ("~/at\0all", "does not exist here"),
    ],
)
def test_why_there_are_no_pictures(tmp_path, path, words):
    run = write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    path = path and (path if path.startswith("~") else str(tmp_path / path))
    config = json.loads((run / "config.json").read_text())
    config["dataset"] = {"name": "mine", "path": path}
    (run / "config.json").write_text(json.dumps(config))
    write_predictions(run, [0, 1], [1, 0], ["a/a_0.png", "b/b_0.png"])
    text = text_of(make(run, out=tmp_path / "page.html"))
    assert "No example pictures: " in text
    assert words in text


def pictures_of(path, *ids: str) -> dict[str, str]:
    """The pictures that a run with this dataset.path shows of these examples."""
    run = reader.Run(Path("run"), {"dataset": {"name": "mine", "path": str(path)}}, {}, [], [], None, [])
    return examples.read_pictures(run, ids)[0]


def test_only_images_of_a_picture_s_size_are_shown(tmp_path, monkeypatch):
    data = make_folder(tmp_path / "data", {"a": 2})
    (data / "a" / "notes.txt").write_text("secret")
    (data / "a" / "text.png").write_text("secret")
    ids = ("a/notes.txt", "a/text.png", "a/a_0.png", "../data/a/a_0.png", str(data / "a" / "a_0.png"))
    assert list(pictures_of(data, *ids)) == ["a/a_0.png"]
    monkeypatch.setattr(examples, "MAX_DECODED", 16 * 16 - 1)
    assert pictures_of(data, *ids) == {}


def test_pictures_of_published_splits_are_found_in_the_split_s_own_folder(tmp_path):
    """The same name in two splits is two pictures; folders may be in a folder, and "val" may be "validation"."""
    names = {"train/a/0.png": "train/a/0.png", "val/a/0.png": "Validation/a/0.png"}
    for value, name in enumerate(names.values()):
        (tmp_path / "data" / "set" / name).parent.mkdir(parents=True)
        Image.new("RGB", (8, 8), (value, 0, 0)).save(tmp_path / "data" / "set" / name)
    shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "data")
    for source in ("data", "data/set", "packed.zip"):
        found = pictures_of(tmp_path / source, *names, "test/a/0.png", "set/train/a/0.png")
        assert list(found) == list(names)
        for value, example_id in enumerate(names):
            assert shown(found[example_id])[0, 0].tolist() == [value, 0, 0]


def shown(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def test_pictures_of_many_bands_and_16_bits_have_colours(tmp_path):
    """Reflectances below 1,000 of 65,535: neither black nor clipped, and red where band 4 is bright."""
    (tmp_path / "a").mkdir()
    pixels = np.random.default_rng(0).normal(600, 60, (64, 64, 13)).clip(0).astype(np.uint16)
    pixels[..., 3] += 200
    tifffile.imwrite(tmp_path / "a" / "0.tif", pixels, photometric="minisblack", planarconfig="contig")
    tifffile.imwrite(tmp_path / "a" / "1.tif", pixels[..., 0])
    found = pictures_of(tmp_path, "a/0.tif", "a/1.tif")
    picture, grey = (shown(found[f"a/{number}.tif"]) for number in (0, 1))
    for colours in (picture, grey):
        assert colours.shape == (64, 64, 3)
        assert 70 < colours.mean() < 185
        assert colours.std() > 40
        assert np.isin(colours, (0, 255)).mean() < 0.1
    assert picture[..., 0].mean() > picture[..., 1:].mean() + 50
    assert np.ptp(grey, axis=-1).max() == 0


def run_with_mistakes(folder, path: str):
    """A run whose predictions are wrong, with this dataset.path in its config."""
    run = write_run(folder)
    config = json.loads((run / "config.json").read_text())
    config["dataset"] = {"name": "mine", "path": path}
    (run / "config.json").write_text(json.dumps(config))
    write_predictions(run, [0, 1], [1, 0], ["a/a_0.png", "b/b_0.png"])
    return run


def test_a_place_outside_of_the_run_is_said_and_a_name_does_not_steer_the_terminal(tmp_path, capsys, caplog):
    run = run_with_mistakes(tmp_path / "run", path="/x\x1b]0;title\x07\nreport.py: all is well")
    make(run, out=tmp_path / "page.html")
    line = rf"reads dataset.path /x\x1b]0;title\x07\nreport.py: all is well, which {run} names"
    assert caplog.messages == [line]
    make(run_with_mistakes(tmp_path / "inside", path=str(tmp_path / "inside" / "data")), out=tmp_path / "page.html")
    assert len(caplog.messages) == 1  # of what lies in the run's own folder nothing is said
    (tmp_path / "neither").mkdir()
    (tmp_path / "neither" / "a\x1b[2J").touch()
    assert report.main([str(tmp_path / "neither")]) == 1
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err


def test_class_names_are_told_by_ids_or_are_numbers():
    def names(labels, ids):
        return examples.class_names(np.array(labels), np.array(ids), 3)

    assert names([0, 1, 1], ["A/x.jpg", "B/y.jpg", "B/z.jpg"]) == ["A", "B", "2"]
    assert names([0, 1], ["A_1.jpg", "B_b_2.jpg"]) == ["A", "B_b", "2"]
    assert names([0, 1], ["000001", "000002"]) == ["0", "1", "2"]
    assert names([0, 0], ["A/x.jpg", "B/y.jpg"]) == ["0", "1", "2"]
    assert names([0, 1], ["A/x.jpg", "A/y.jpg"]) == ["0", "1", "2"]


@pytest.mark.parametrize(
    "arrays",
    [
        {"labels": np.array([0, 3]), "logits": np.zeros((2, 3), np.float32), "ids": np.array(["a", "b"])},
        {"labels": np.array([0]), "logits": np.zeros((2, 3), np.float32), "ids": np.array(["a", "b"])},
        {"labels": np.array([0, 1]), "logits": np.zeros((2, 3), np.float32)},
        {"labels": np.array([0, {}]), "logits": np.zeros((2, 3), np.float32), "ids": np.array(["a", "b"])},
    ],
)
def test_damaged_predictions_are_named(tmp_path, arrays):
    run = write_run(tmp_path / "run")
    np.savez(run / "predictions.npz", **arrays)
    assert "predictions.npz: damaged" in text_of(make(run, out=tmp_path / "page.html"))
