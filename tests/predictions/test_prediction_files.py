"""Predictions in one file or in parts: read back as they were written, never a mixture, damage named."""

import gc
import json
import os
import shutil

import numpy as np
import pytest

from largebatch.predictions import files as prediction_files
from largebatch.predictions.files import DamagedPredictions, Predictions
from largebatch.runs.folder import RunFolder
from largebatch.util import UserError


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Four examples of three classes to a file."""
    monkeypatch.setattr(prediction_files, "MAX_LOGITS_PER_FILE", 14)


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make(num_examples: int, seed=0) -> Predictions:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((num_examples, 3)).astype(np.float32)
    ids = np.array([f"class/{seed}-{k}.png" for k in range(num_examples)])
    return Predictions(rng.integers(0, 3, num_examples), logits, ids)


def write(folder, predictions: Predictions) -> None:
    parts = predictions.parts()
    prediction_files.write(folder, parts, prediction_files.count_parts(predictions))


def read(folder) -> Predictions:
    parts = list(prediction_files.read(folder))
    return Predictions(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("labels", "logits", "ids"))
    )


def assert_holds(folder, predictions: Predictions) -> None:
    found = read(folder)
    for name in ("labels", "logits", "ids"):
        np.testing.assert_array_equal(getattr(found, name), getattr(predictions, name))


@pytest.mark.parametrize("num_examples", [1, 4, 5, 8, 11])
def test_what_is_read_is_what_was_written(tmp_path, num_examples):
    predictions = make(num_examples)
    assert not prediction_files.exist(tmp_path)
    write(tmp_path, predictions)
    assert prediction_files.exist(tmp_path)
    assert_holds(tmp_path, predictions)
    sizes = [len(part.labels) for part in prediction_files.read(tmp_path)]
    assert sizes == [4] * (num_examples // 4) + [num_examples % 4] * (num_examples % 4 > 0)


def test_each_form_takes_the_place_of_the_other(tmp_path):
    one_file, three_parts, two_parts = ["predictions.npz"], ["predictions"], ["predictions"]
    for seed, (num_examples, names) in enumerate(
        [(4, one_file), (11, three_parts), (7, two_parts), (3, one_file), (2, one_file)]
    ):
        write(tmp_path, make(num_examples, seed))
        assert names_in(tmp_path) == names
        assert_holds(tmp_path, make(num_examples, seed))
    write(tmp_path, make(9))
    names = ["part-00000.npz", "part-00001.npz", "part-00002.npz", "parts.json"]
    assert names_in(tmp_path / "predictions") == names
    with np.load(tmp_path / "predictions" / "part-00001.npz", allow_pickle=False) as part:
        assert sorted(part) == ["ids", "labels", "logits"]


CALLS = ((prediction_files.util, "write_through"), (prediction_files.Path, "rename"))
CALLS += ((prediction_files.Path, "replace"), (prediction_files.Path, "unlink"), (shutil, "rmtree"))


@pytest.mark.parametrize("before", [3, 11])
@pytest.mark.parametrize("after", [2, 9])
def test_a_kill_anywhere_leaves_the_old_ones_or_the_new_ones(tmp_path, monkeypatch, before, after):
    """The process ends before its k-th change of the folder, for every k; the next one takes the folder up."""
    old, new = make(before, seed=1), make(after, seed=2)
    found = []
    for survived in range(100):
        folder = tmp_path / str(survived)
        folder.mkdir()
        write(folder, old)
        finished = write_until_killed(monkeypatch, folder, new, survived)
        is_new = read(folder).ids[0] == new.ids[0]
        assert_holds(folder, new if is_new else old)
        with RunFolder(folder) as run:
            run.lock()
            assert_holds(folder, new if is_new else old)
            write(folder, new)
            assert_holds(folder, new)
        names = [name for name in names_in(folder) if not name.endswith(".tmp")]
        assert names == ["predictions.npz" if after <= 4 else "predictions"]
        found.append(is_new)
        if finished:
            break
    assert found == sorted(found)  # first the old ones, then the new ones
    assert finished
    assert found[-1]
    assert not found[0]


class Killed(BaseException):
    """Stands for the end of the process: nothing is cleaned up."""


def killing(method, calls: list, survived: int):
    """`method`, which ends the process if there were `survived` calls before it."""

    def call(*arguments, **options):
        calls.append(method)
        if len(calls) > survived:
            raise Killed
        return method(*arguments, **options)

    return call


def write_until_killed(monkeypatch, folder, predictions: Predictions, survived: int) -> bool:
    """Writes, but for all changes of the folder after the first `survived`; whether that was all of it."""
    calls = []
    with monkeypatch.context() as patch:
        for owner, name in CALLS:
            patch.setattr(owner, name, killing(getattr(owner, name), calls, survived))
        try:
            write(folder, predictions)
        except Killed:
            return False
    return True


def test_a_reader_never_sees_parts_of_two_writes(tmp_path):
    write(tmp_path, make(11, seed=1))
    parts = prediction_files.read(tmp_path)
    first = next(parts)
    write(tmp_path, make(11, seed=2))
    with pytest.raises(DamagedPredictions, match=r"part-00001\.npz: missing"):
        next(parts)
    np.testing.assert_array_equal(first.ids, make(11, seed=1).ids[:4])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def other_classes(path):
    np.savez(path, labels=np.array([0]), logits=np.zeros((1, 2), np.float32), ids=np.array(["a"]))


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("part-00001.npz", flip, "predictions/part-00001.npz: damaged: "),
        ("part-00002.npz", lambda path: path.unlink(), "predictions/part-00002.npz: missing, one of 3 parts"),
        ("part-00001.npz", other_classes, "part-00001.npz: damaged: logits of 2 classes, of 3 in the parts before"),
        ("parts.json", lambda path: path.unlink(), "predictions/parts.json: missing"),
        ("parts.json", lambda path: path.write_text("{"), "predictions/parts.json: damaged: "),
        ("parts.json", lambda path: path.write_text("[2]"), "predictions/parts.json: damaged: "),
        (
            "parts.json",
            lambda path: path.write_text(json.dumps({"parts": 2, "examples": 11})),
            "parts.json: damaged: 11 examples, 8 in the parts",
        ),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, name, damage, words):
    write(tmp_path, make(11))
    damage(tmp_path / "predictions" / name)
    with pytest.raises(DamagedPredictions) as error:
        read(tmp_path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_pipe_is_not_waited_for(tmp_path):
    write(tmp_path, make(11))
    path = tmp_path / "predictions" / "part-00000.npz"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedPredictions, match=r"part-00000\.npz: damaged: no regular file"):
        read(tmp_path)


def test_a_full_disk_names_the_parts_and_leaves_the_old_ones(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    write(tmp_path, make(11, seed=1))
    written = []

    def full(path, content):
        written.append(path)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        path.write_bytes(content)

    monkeypatch.setattr(prediction_files.util, "write_through", full)
    new = make(11, seed=2)
    with pytest.raises(UserError, match=r"cannot write .*predictions \(No space left on device\)"):
        run.write_outcome(new, new.parts())
    assert_holds(tmp_path, make(11, seed=1))
    assert names_in(tmp_path) == ["predictions"]
    gc.collect()  # Python 3.13 warns of a buffer that is freed with the error while something looks into it
