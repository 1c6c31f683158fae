"""predictions.npz: read back as it was written, the old one where a process is killed, damage named."""

import gc

import numpy as np
import pytest

from largebatch.predictions import files as prediction_files
from largebatch.predictions.files import FILE, DamagedPredictions, Predictions
from largebatch.runs.folder import RunFolder
from largebatch.util import UserError


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Four examples of three classes to a part."""
    monkeypatch.setattr(prediction_files, "LOGITS_PER_PART", 14)


def make(num_examples: int, seed=0) -> Predictions:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((num_examples, 3)).astype(np.float32)
    ids = np.array([f"class/{seed}-{k}.png" for k in range(num_examples)])
    return Predictions(rng.integers(0, 3, num_examples), logits, ids)


def write(folder, predictions: Predictions) -> None:
    predictions.write(folder, predictions.parts())


def assert_holds(folder, predictions: Predictions) -> None:
    found = prediction_files.read(folder)
    for name in ("labels", "logits", "ids"):
        np.testing.assert_array_equal(getattr(found, name), getattr(predictions, name))
    assert found.logits.dtype == np.float32
    assert [path.name for path in folder.iterdir()] == [FILE]


@pytest.mark.parametrize("num_examples", [1, 4, 5, 11])
def test_what_is_read_is_what_was_written(tmp_path, num_examples):
    predictions = make(num_examples)
    sizes = [len(part) for part in predictions.parts()]
    assert sizes == [4] * (num_examples // 4) + [num_examples % 4] * (num_examples % 4 > 0)
    write(tmp_path, make(7, seed=1))
    write(tmp_path, predictions)
    assert_holds(tmp_path, predictions)


class Killed(BaseException):
    """Stands for the end of the process: nothing is cleaned up."""


@pytest.mark.parametrize("call", ["numpy.lib.format.write_array", "os.fsync", "os.replace"])
def test_a_kill_or_a_full_disk_leaves_the_old_ones(tmp_path, monkeypatch, call):
    old, new = make(11, seed=1), make(9, seed=2)
    write(tmp_path, old)

    def stop(error):
        def act(*_, **__):
            raise error

        return act

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", lambda *_, **__: None)
        patch.setattr(call, stop(Killed()))
        with pytest.raises(Killed):
            write(tmp_path, new)
    with RunFolder(tmp_path) as run:
        run.lock()
    assert_holds(tmp_path, old)  # what the killed one left is gone
    monkeypatch.setattr("os.fsync", stop(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=rf"cannot write .*{FILE} \(No space left on device\)"):
        RunFolder(tmp_path).write_outcome(new, new.parts())
    assert_holds(tmp_path, old)
    gc.collect()  # Python 3.13 warns of a buffer that is freed with the error while something looks into it


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def write_arrays(**arrays):
    sound = {"labels": np.array([0]), "logits": np.zeros((1, 2), np.float32), "ids": np.array(["a"])}
    return lambda path: np.savez(path, **(sound | arrays))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "damaged: "),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged: "),
        (lambda path: path.unlink(), "No such file"),
        (write_arrays(ids=np.array(["a", "b"])), "labels (1,), logits (1, 2) and ids (2,) do not go together"),
        (write_arrays(labels=np.array([2])), "a label is none of the 2 classes"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, damage, words):
    write(tmp_path, make(11))
    damage(tmp_path / FILE)
    with pytest.raises(DamagedPredictions) as error:
        prediction_files.read(tmp_path)
    assert str(error.value).startswith(f"{FILE}: damaged: ")
    assert words in str(error.value)
    assert "\n" not in str(error.value)
