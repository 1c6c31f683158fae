import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from largebatch.runs import checkpoints
from largebatch.util import UserError


@pytest.fixture
def tree():
    """Every type a state may hold, with values that are easily lost."""
    return {
        "params": {
            "kernel": np.float32([[1, -0.0], [np.nan, np.inf]]),
            "bias": np.asarray(jnp.bfloat16([1.5, -3])),
        },
        "step": np.int32(7),
        "seed": np.uint32(2**32 - 1),
        "moments": [np.arange(6, dtype=np.float32).reshape(1, 2, 3), (np.float64(0.1),)],
    }


def save(saver: checkpoints.Checkpoints, step: int, tree, protect=()) -> None:
    saver.save(step, tree, {"note": "é"}, protect)
    saver.wait()


@pytest.fixture
def saved(tmp_path, tree):
    """A folder with a checkpoint of step 5."""
    saver = checkpoints.Checkpoints(tmp_path / "checkpoints", keep=2)
    save(saver, 5, tree)
    return saver


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_comes_back_bit_by_bit(saved, tree):
    arrays, description = checkpoints.read_arrays(checkpoints.path_of(saved.folder, 5))
    ours = checkpoints.named_leaves(tree)
    theirs = checkpoints.named_leaves(checkpoints.fill(tree, arrays, "here"))
    assert list(ours) == list(theirs)
    for name in ours:
        assert (theirs[name].dtype, theirs[name].shape) == (ours[name].dtype, ours[name].shape)
        assert np.asarray(theirs[name]).tobytes() == np.asarray(ours[name]).tobytes(), name
    assert (description["step"], description["note"]) == (5, "é")


def test_a_value_that_orbax_stored_wrong_is_found_by_the_digest_from_memory(tmp_path, tree, monkeypatch):
    arguments = checkpoints._orbax().args
    make = arguments.PyTreeSave
    monkeypatch.setattr(arguments, "PyTreeSave", lambda arrays: make(arrays | {"step": np.int32(8)}))
    save(checkpoints.Checkpoints(tmp_path, keep=2), 5, tree)
    with pytest.raises(checkpoints.DamagedCheckpoint, match="array step does not match its SHA-256"):
        checkpoints.read_arrays(checkpoints.path_of(tmp_path, 5))


def test_a_changed_or_missing_description_is_damage(saved):
    path = checkpoints.path_of(saved.folder, 5)
    description = path / checkpoints.DESCRIPTION
    text = description.read_text()
    for changed in (text.replace("step", "stop", 1), text[:-9], None):
        description.write_text(changed) if changed else description.unlink()
        with pytest.raises(checkpoints.DamagedCheckpoint, match=str(description)):
            checkpoints.read_arrays(path)


def test_other_arrays_are_refused(saved, tree):
    tree["new"] = np.zeros(3, np.float32)
    tree["step"] = np.int64(7)
    del tree["seed"]
    arrays, _ = checkpoints.read_arrays(checkpoints.path_of(saved.folder, 5))
    expected = r"new is missing there, float32\[3\] here; seed is uint32.*; step is int32\[\] there, int64"
    with pytest.raises(UserError, match=expected):
        checkpoints.fill(tree, arrays, "here")


def test_a_save_does_not_see_later_changes(tmp_path):
    saver = checkpoints.Checkpoints(tmp_path, keep=3)
    array = np.zeros(1_000_000, np.float32)
    saver.save(1, {"a": array}, {})
    array[:] = 1
    saver.wait()
    arrays, _ = checkpoints.read_arrays(checkpoints.path_of(tmp_path, 1))
    assert arrays["a"].sum() == 0


def test_the_last_and_the_protected_are_kept_and_a_step_is_saved_again(saved, tree):
    for step in (6, 7, 8):
        save(saved, step, tree, protect={5})
    assert checkpoints.saved_steps(saved.folder) == [5, 7, 8]
    saved.discard_after(7)
    save(saved, 7, tree | {"step": np.int32(9)})  # after a rollback
    assert checkpoints.saved_steps(saved.folder) == [5, 7]
    assert checkpoints.read_arrays(checkpoints.path_of(saved.folder, 7)).arrays["step"] == 9


def test_what_a_killed_process_left_is_no_checkpoint_and_goes(saved, tree):
    path = checkpoints.path_of(saved.folder, 5)
    half = path.with_name("00000007.orbax-checkpoint-tmp")
    assert half.match(checkpoints.UNFINISHED)
    shutil.copytree(path, half)
    shutil.copytree(path, saved.folder / f"00000003{checkpoints.REMOVED}")
    assert checkpoints.saved_steps(saved.folder) == [5]
    save(checkpoints.Checkpoints(saved.folder, keep=2), 6, tree)
    assert names_in(saved.folder) == ["00000005", "00000006"]


def test_a_save_that_fails_is_said_once_and_spares_the_others(saved, tree, capfd):
    saved.save(6, {"bad": np.zeros((0, 3))}, {})  # which Orbax refuses, once it has begun
    with pytest.raises(UserError, match=r"--workdir: cannot write .*00000006 \(Cannot save"):
        saved.wait()
    checkpoints.read_arrays(checkpoints.path_of(saved.folder, 5))
    save(saved, 7, tree)
    assert names_in(saved.folder) == ["00000005", "00000007"]
    assert capfd.readouterr().err == ""
