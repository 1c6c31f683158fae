"""Own images, as their owner sees them: what a start says of them, and which run it goes on with."""

import contextlib
import json
import shutil

import numpy as np
import pytest
from conftest import assert_one_line_error, make_folder, make_small_config, run_script, typed
from test_changed_files import Maps, OwnImages
from test_sources import save, zip_of

import augment
import evaluate
import train
from largebatch.data.cache import describe_targets
from largebatch.util import UserError


def configure(config, path, cache_dir):
    """Sets a config of own images; a run of it takes seconds."""
    config.dataset.name, config.dataset.path = "mine", str(path)
    config.augment.cache_dir, config.augment.views = str(cache_dir), "flip"
    config.train.outer_steps = 1
    return config


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A folder with images, a finished run on them, and what it printed."""
    root = tmp_path_factory.mktemp("first")
    config = configure(make_small_config(root), OwnImages(root).path, root / "caches")
    with (root / "printed").open("w") as file, contextlib.redirect_stdout(file):
        train.train_and_evaluate(config, str(root / "run"))
    return root


@pytest.fixture
def own(small_config, first, tmp_path):
    """The config of a copy of these images, with a copy of the run and caches of its own."""
    for name in ("images", "run"):
        shutil.copytree(first / name, tmp_path / name)
    return configure(small_config, tmp_path / "images", tmp_path / "caches")


def train_again(config, workdir):
    """Goes on with a run that was killed after its last checkpoint."""
    (workdir / "summary.json").unlink(missing_ok=True)
    return train.train_and_evaluate(config, str(workdir))


def test_a_run_names_its_classes_with_their_images(first):
    assert "training images of 2 classes: a 10, b 10" in (first / "printed").read_text().splitlines()


def test_of_many_classes_the_first_ten_are_named_in_one_line(small_config, tmp_path):
    names = ["[red]", "a\u202eb", *(f"class {letter}" for letter in "abcdefghij")]
    counts = {name: 10 if name == "[red]" else 5 for name in names}
    make_folder(tmp_path / "images", counts)
    rows = ["id,split"]
    for name, count in counts.items():
        splits = ["val", "test", *["train"] * (count - 2)]
        rows += [f"{name}/{name}_{number}.png,{split}" for number, split in enumerate(splits)]
    (tmp_path / "split.csv").write_text("\n".join(rows))
    configure(small_config, tmp_path / "images", tmp_path / "caches")
    small_config.dataset.split_file = str(tmp_path / "split.csv")
    shown = ", ".join(f"class {letter} 3" for letter in "abcdefgh")
    line = describe_targets(augment.prepare_cache(typed(small_config)).split("train"))
    assert line == f"training images of 12 classes: [red] 8, a\\u202eb 3, {shown} and 2 more"


def test_a_run_names_the_classes_of_its_masks(small_config, tmp_path):
    maps = Maps(tmp_path)
    maps.names()
    small_config.task.name, small_config.dataset.name = "segmentation", "mine"
    small_config.model.name = "unet_tiny"
    small_config.dataset.path, small_config.augment.cache_dir = str(maps.path), str(tmp_path / "caches")
    assert (
        describe_targets(augment.prepare_cache(typed(small_config)).split("train"))
        == "masks of 2 classes: ground, tree"
    )


def elsewhere(place, folder, tmp_path):
    """The path of the same images by another name."""
    if place == "spelling":
        return folder.parent / "run" / ".." / folder.name
    other = tmp_path / "other"
    if place == "link":
        other.symlink_to(folder)
        return other
    return shutil.copytree(folder, other) if place == "copy" else zip_of(folder, tmp_path / "other.zip")


@pytest.mark.parametrize("place", ["spelling", "link", "copy", "zip"])
def test_the_same_images_at_another_place_are_the_same_run(place, own, first, tmp_path, caplog):
    workdir, before = first / "run", first / "images"
    own.dataset.path = str(elsewhere(place, before, tmp_path))
    summary = json.loads((workdir / "summary.json").read_text())
    caplog.set_level("INFO", "largebatch")
    assert train.train_and_evaluate(own, str(workdir)) == summary
    assert "is a finished run of this config; nothing to do" in caplog.text
    not_looked_at = f"{workdir} has ended, with dataset.path {before}; {own.dataset.path} was not looked at"
    assert not_looked_at in caplog.text
    workdir = tmp_path / "run"
    assert train_again(own, workdir)["params_sha256"] == summary["params_sha256"]
    assert "resuming at update 3; " in caplog.text
    assert json.loads((workdir / "config.json").read_text())["dataset"]["path"] == own.dataset.path


def test_an_ended_run_may_be_named_with_a_home_that_is_not_here(own, first, caplog):
    workdir, before = first / "run", first / "images"
    own.dataset.path = "~nosuch/images"
    summary = json.loads((workdir / "summary.json").read_text())
    assert train.train_and_evaluate(own, str(workdir)) == summary
    assert f"{workdir} has ended, with dataset.path {before}; ~nosuch/images was not looked at" in caplog.text


def add_class(images: OwnImages) -> None:
    for number in range(12):
        save(images.path / "c" / f"{number}.png", np.full((16, 16, 3), number, np.uint8))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        pytest.param(OwnImages.move, "ids", marks=pytest.mark.full),
        (OwnImages.replace, "pixels"),
        pytest.param(add_class, "ids", marks=pytest.mark.full),
    ],
)
def test_a_run_does_not_go_on_with_other_images(change, what, own, tmp_path):
    """The run stays as it is."""
    workdir = tmp_path / "run"
    (workdir / "summary.json").unlink()
    change(OwnImages.at(own.dataset.path))
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    with pytest.raises(
        UserError, match=rf"^dataset: its {what} changed since the checkpoint was saved in {workdir}"
    ):
        train.train_and_evaluate(own, str(workdir))
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before


def test_a_run_is_evaluated_on_the_images_that_it_had(own, first, tmp_path, caplog):
    """Where its cache is gone, other images are refused, or named if they have the same names."""
    images = OwnImages.at(own.dataset.path)
    score = json.loads((first / "run" / "summary.json").read_text())["best_score"]
    overrides = {"augment.cache_dir": str(first / "caches"), "dataset.path": own.dataset.path}
    for path in images.path.rglob("*.png"):
        save(path, np.zeros((16, 16, 3), np.uint8))
    assert evaluate.evaluate(first / "run", overrides=overrides) == pytest.approx(score)
    assert "other pixels" not in caplog.text
    overrides["augment.cache_dir"] = own.augment.cache_dir
    run = tmp_path / "run"  # which names no cache but this one
    config = json.loads((run / "config.json").read_text())
    config["augment"]["cache_dir"] = own.augment.cache_dir
    (run / "config.json").write_text(json.dumps(config))
    evaluate.evaluate(run, overrides=overrides)
    assert f"the examples of {images.path} have other pixels than those of the run had" in caplog.text
    images.add()
    shutil.rmtree(own.augment.cache_dir)
    with pytest.raises(UserError, match="are not those of the run"):
        evaluate.evaluate(run, overrides=overrides)


# ---- by the command -----------------------------------------------------------------------------------


def flags_of(config, **changed) -> list[str]:
    values = {
        "dataset.name": "mine",
        "dataset.path": config.dataset.path,
        "augment.cache_dir": config.augment.cache_dir,
        "train.inner_steps": 1,
        "train.outer_steps": 1,
        "batch.micro_batch_size": 16,
        **changed,
    }
    return [f"--config.{name}={value}" for name, value in values.items()]


def test_a_set_without_classes_is_refused_and_nothing_is_written(own, tmp_path):
    for name, other in (("a", "train"), ("b", "test_1")):
        (tmp_path / "images" / name).rename(tmp_path / "images" / other)
    result = run_script("train.py", "--workdir", tmp_path / "new", *flags_of(own))
    words = (
        "dataset.path: ",
        "has its images in 'test_1', 'train', which name splits",
        "allowed: CLASS/image.jpg",
    )
    assert_one_line_error(result, *words)
    assert not (tmp_path / "new").exists()


def test_masks_with_unlabelled_pixels_are_refused_and_leave_no_cache(own, tmp_path):
    maps = Maps(tmp_path)
    mask = np.eye(16, dtype=np.uint8)
    mask[0] = 255
    for number in range(12):
        save(maps.path / "masks" / f"{number}.png", mask)
    fields = {"dataset.path": maps.path, "task.name": "segmentation", "model.name": "unet_tiny"}
    result = run_script("train.py", "--workdir", tmp_path / "new", *flags_of(own, **fields))
    assert_one_line_error(result, ".png has the values 0, 1 and 255; allowed: 0 and 1, or 0 and 255, ")
    assert not (tmp_path / "new").exists()
    assert not list((tmp_path / "caches").glob("*"))


@pytest.mark.full
def test_train_takes_what_is_there_and_says_so(own, tmp_path):
    """Images are moved between classes after a run, and then all are removed."""
    images = OwnImages.at(own.dataset.path)

    def trained(workdir, path=images.path):
        result = run_script("train.py", "--workdir", tmp_path / workdir, *flags_of(own, **{"dataset.path": path}))
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    assert "changed since" not in trained("first")
    assert "resuming" not in trained("second")
    images.move()
    again = trained("third")
    assert f"dataset: {images.path} changed since {tmp_path / 'caches'}" in again
    (tmp_path / "third" / "summary.json").unlink()
    assert "resuming at update 1; " in trained("third", tmp_path / "first" / ".." / images.path.name)
    (tmp_path / "first" / "summary.json").unlink()
    result = run_script("train.py", "--workdir", tmp_path / "first", *flags_of(own))
    assert result.returncode == 1
    assert "error: dataset: its ids changed since the checkpoint was saved" in result.stderr.splitlines()[-1]
    shutil.rmtree(images.path)
    assert f"dataset: {images.path} cannot be read; takes the cache {tmp_path / 'caches'}" in trained("fourth")
