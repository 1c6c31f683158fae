"""Confusions with pictures of the worst mistakes, found in the folder or zip that a run names."""

import base64
import io
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tifffile
from conftest import make_folder
from PIL import Image
from report_pages import change_config, make, text_of, write_predictions, write_run

import report
from largebatch.reports import examples
from largebatch.runs import reader


def shown(uri: str) -> np.ndarray:
    """The pixels of a picture of the page."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,")))))


def test_confusions_with_pictures_from_folder_and_zip(tmp_path):
    data = make_folder(tmp_path / "data" / "2750", {"Forest": 3, "Lake": 3, "River": 3}).parent
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for path in data.rglob("*.png"):
            archive.write(path, path.relative_to(tmp_path / "data"))
    ids = [f"{name}/{name}_{k}.png" for name in ("Forest", "Lake", "River") for k in range(3)]
    run = write_run(tmp_path / "run")
    write_predictions(run, np.arange(9) // 3, [0, 2, 2, 1, 1, 1, 0, 2, 2], ids)
    for place in (data, tmp_path / "data.zip"):
        change_config(run, "dataset", name="mine", path=str(place))
        found = examples.read_confusion(reader.read(run))
        assert found.no_pictures is None
        assert found.names == ["Forest", "Lake", "River"]
        assert found.matrix.tolist() == [[1, 0, 2], [0, 3, 0], [1, 0, 2]]
        np.testing.assert_allclose(found.recall, [1 / 3, 1, 2 / 3])
        first, _ = found.worst
        assert (first.true, first.predicted, first.count) == ("Forest", "River", 2)
        assert [example_id for example_id, *_ in first.examples] == ["Forest/Forest_2.png", "Forest/Forest_1.png"]
        with Image.open(data / "2750" / "Forest" / "Forest_2.png") as image:
            np.testing.assert_array_equal(shown(first.examples[0][2]), np.asarray(image.convert("RGB")))
    page = make(run, out=tmp_path / "page.html")
    assert page.count('src="data:image/png;base64,') == 3
    assert "Forest taken for River: 2" in text_of(page)


def read_pictures(path, *ids: str) -> tuple[dict[str, str], str | None]:
    """The pictures that a run with this dataset.path shows of these examples, and why there are none."""
    config = {"dataset": {"name": "mine", "path": path and str(path)}}
    return examples.read_pictures(reader.Run(Path("run"), config, {}, [], [], None, []), ids)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (None, "the run names no dataset.path"),
        ("nowhere.zip", "nowhere.zip does not exist here"),
        ("empty", "no example was found in"),
        ("text.zip", "does not exist here, or cannot be read"),
        ("~no.such.user/x", "does not exist here"),
        ("~/at\0all", "does not exist here"),
    ],
)
def test_why_there_are_no_pictures(tmp_path, monkeypatch, path, said):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text.zip").write_text("no zip")
    found, why = read_pictures(path, "a/a_0.png", "b/b_0.png")
    assert found == {}
    assert said in why


def test_only_images_of_a_picture_s_size_are_shown(tmp_path, monkeypatch):
    data = make_folder(tmp_path / "data", {"a": 2})
    (data / "a" / "notes.txt").write_text("secret")
    (data / "a" / "text.png").write_text("secret")
    shutil.copy(data / "a" / "a_0.png", tmp_path / "b.png")
    outside = ("../b.png", "../data/a/a_0.png", str(data / "a" / "a_0.png"))
    ids = ("a/notes.txt", "a/text.png", "a/a_0.png", "a/*.png", *outside)
    assert list(read_pictures(data, *ids)[0]) == ["a/a_0.png"]
    monkeypatch.setattr(examples, "MAX_DECODED", 16 * 16 - 1)
    assert read_pictures(data, *ids)[0] == {}


def test_pictures_of_published_splits_are_found_in_the_split_s_own_folder(tmp_path):
    """The same name in two splits is two pictures; folders may be in a folder, and "val" may be "validation"."""
    names = {"train/a/0.png": "train/a/0.png", "val/a/0.png": "Validation/a/0.png"}
    for value, name in enumerate(names.values()):
        (tmp_path / "data" / "set" / name).parent.mkdir(parents=True)
        Image.new("RGB", (8, 8), (value, 0, 0)).save(tmp_path / "data" / "set" / name)
    shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "data")
    for source in ("data", "data/set", "packed.zip"):
        found, _ = read_pictures(tmp_path / source, *names, "test/a/0.png", "set/train/a/0.png")
        assert list(found) == list(names)
        for value, example_id in enumerate(names):
            assert shown(found[example_id])[0, 0].tolist() == [value, 0, 0]


def test_pictures_of_many_bands_and_16_bits_have_colours(tmp_path):
    """Reflectances below 1,000 of 65,535: neither black nor clipped, and red where band 4 is bright."""
    (tmp_path / "a").mkdir()
    pixels = np.random.default_rng(0).normal(600, 60, (64, 64, 13)).clip(0).astype(np.uint16)
    pixels[..., 3] += 200
    tifffile.imwrite(tmp_path / "a" / "0.tif", pixels, photometric="minisblack", planarconfig="contig")
    tifffile.imwrite(tmp_path / "a" / "1.tif", pixels[..., 0])
    found, _ = read_pictures(tmp_path, "a/0.tif", "a/1.tif")
    picture, grey = (shown(found[f"a/{number}.tif"]) for number in (0, 1))
    for colours in (picture, grey):
        assert colours.shape == (64, 64, 3)
        assert 70 < colours.mean() < 185
        assert colours.std() > 40
        assert np.isin(colours, (0, 255)).mean() < 0.1
    assert picture[..., 0].mean() > picture[..., 1:].mean() + 50
    assert np.ptp(grey, axis=-1).max() == 0


def test_a_place_outside_of_the_run_is_said_and_a_name_does_not_steer_the_terminal(tmp_path, capsys, caplog):
    run = write_run(tmp_path / "run")
    write_predictions(run, [0, 1], [1, 0], ["a/a_0.png", "b/b_0.png"])
    change_config(run, "dataset", name="mine", path="/x\x1b]0;title\x07\nreport.py: all is well")
    examples.read_confusion(reader.read(run))
    line = rf"reads dataset.path /x\x1b]0;title\x07\nreport.py: all is well, which {run} names"
    assert caplog.messages == [line]
    change_config(run, "dataset", path=str(run / "data"))
    examples.read_confusion(reader.read(run))
    assert len(caplog.messages) == 1  # of what lies in the run's own folder nothing is said
    (run / "link").symlink_to(tmp_path)
    change_config(run, "dataset", path=str(run / "link"))
    examples.read_confusion(reader.read(run))
    assert len(caplog.messages) == 2
    (tmp_path / "a\x1b[2J").mkdir()
    assert report.main([str(tmp_path / "a\x1b[2J")]) == 1
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err


def test_class_names_are_told_by_ids_or_are_numbers():
    def names(labels, ids):
        return examples.class_names(np.array(labels), np.array(ids), 3)

    assert names([0, 1, 1], ["A/x.jpg", "B/y.jpg", "B/z.jpg"]) == ["A", "B", "2"]
    assert names([0, 1], ["A_1.jpg", "B_b_2.jpg"]) == ["A", "B_b", "2"]
    assert names([0, 1], ["000001", "000002"]) == ["0", "1", "2"]
    assert names([0, 0], ["A/x.jpg", "B/y.jpg"]) == ["0", "1", "2"]
    assert names([0, 1], ["A/x.jpg", "A/y.jpg"]) == ["0", "1", "2"]
