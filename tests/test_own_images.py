"""Own images, as their owner sees them: what a start says of them, and which run it resumes."""

import contextlib
import json
import shutil

import numpy as np
import pytest
from conftest import make_small_config
from test_changed_files import make_images
from test_sources import png, save, zip_of

import evaluate
import train
from largebatch.data.cache import describe_targets
from largebatch.data.dataset import dataset_of_arrays
from largebatch.tasks.planes import PixelTargets
from largebatch.util import UserError


def configure(config, path, cache_dir):
    """Return a config of own images; a run of it takes seconds."""
    config.dataset.name, config.dataset.path = "mine", str(path)
    config.augment.cache_dir, config.augment.views = str(cache_dir), "flip"
    config.train.outer_steps = 1
    return config


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A folder with images, a finished run on them, and what it printed."""
    root = tmp_path_factory.mktemp("first")
    config = configure(make_small_config(root), make_images(root), root / "caches")
    with (root / "printed").open("w") as file, contextlib.redirect_stdout(file):
        train.train_and_evaluate(config, str(root / "run"))
    return root


@pytest.fixture
def own(small_config, first, tmp_path):
    """The config of a copy of these images, with a copy of the run and caches of its own."""
    for name in ("images", "run"):
        shutil.copytree(first / name, tmp_path / name)
    return configure(small_config, tmp_path / "images", tmp_path / "caches")


def test_a_run_names_its_classes_with_their_images(first):
    assert "training images of 2 classes: a 10, b 10" in (first / "printed").read_text().splitlines()
    names = ["[red]", "a\u202eb", *(f"class {letter}" for letter in "abcdefghij")]
    dataset = dataset_of_arrays(np.zeros((14, 2, 2, 3)), np.array([0, 0, *range(12)]), names, ["x"] * 14)
    shown = ", ".join(f"class {letter} 1" for letter in "abcdefgh")
    assert describe_targets(dataset) == f"training images of 12 classes: [red] 3, a\\u202eb 1, {shown} and 2 more"
    for targets, line in (
        (PixelTargets(("ground", "tree")), "masks of 2 classes: ground, tree"),
        (PixelTargets((), has_depth=True), "depths"),
    ):
        object.__setattr__(dataset, "targets", targets)
        assert describe_targets(dataset) == line


def test_the_same_images_at_another_place_are_the_same_run(own, first, tmp_path, caplog):
    workdir, before = first / "run", first / "images"
    own.dataset.path = str(zip_of(before, tmp_path / "other.zip"))
    summary = json.loads((workdir / "summary.json").read_text())
    caplog.set_level("INFO", "largebatch")
    assert train.train_and_evaluate(own, str(workdir)) == summary
    assert "is a finished run of this config; nothing to do" in caplog.text
    not_looked_at = f"{workdir} has ended, with dataset.path {before}; {own.dataset.path} was not looked at"
    assert not_looked_at in caplog.text
    workdir = tmp_path / "run"
    (workdir / "summary.json").unlink()  # as if it was killed after its last checkpoint
    assert train.train_and_evaluate(own, str(workdir))["params_sha256"] == summary["params_sha256"]
    assert "resuming at step 3; " in caplog.text
    assert json.loads((workdir / "config.json").read_text())["dataset"]["path"] == own.dataset.path


def test_a_run_does_not_resume_with_other_images(own, first, tmp_path):
    """The run stays as it is."""
    workdir, (ids,) = tmp_path / "run", (first / "caches").glob("*/ids.npy")
    (workdir / "summary.json").unlink()
    test_image = np.load(ids)[-1]  # training images would change the program, which takes time to compile
    (tmp_path / "images" / test_image).write_bytes(png((16, 16), seed=99))
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    with pytest.raises(
        UserError, match=rf"^dataset: its pixels changed since the checkpoint was saved in {workdir}"
    ):
        train.train_and_evaluate(own, str(workdir))
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before


def test_a_run_is_evaluated_on_the_images_that_it_had(own, first, tmp_path, caplog):
    """Other images are refused if its cache is gone, or named if they have the same names."""
    images, run = tmp_path / "images", tmp_path / "run"
    score = json.loads((first / "run" / "summary.json").read_text())["best_score"]
    overrides = {"augment.cache_dir": str(first / "caches"), "dataset.path": own.dataset.path}
    for path in images.rglob("*.png"):
        save(path, np.zeros((16, 16, 3), np.uint8))
    assert evaluate.evaluate(first / "run", overrides=overrides) == pytest.approx(score)
    assert "other pixels" not in caplog.text
    overrides["augment.cache_dir"] = own.augment.cache_dir
    config = json.loads((run / "config.json").read_text())  # which names no cache but this one
    config["augment"]["cache_dir"] = own.augment.cache_dir
    (run / "config.json").write_text(json.dumps(config))
    evaluate.evaluate(run, overrides=overrides)
    assert f"the examples of {images} have other pixels than those of the run had" in caplog.text
    save(images / "a" / "new.png", np.zeros((16, 16, 3), np.uint8))
    shutil.rmtree(own.augment.cache_dir)
    with pytest.raises(UserError, match="are not those of the run"):
        evaluate.evaluate(run, overrides=overrides)
