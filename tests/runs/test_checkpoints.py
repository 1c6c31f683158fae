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


@pytest.fixture
def saved(tmp_path, tree):
    checkpoints_of_run = checkpoints.Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints_of_run.save(5, tree, {"note": "é"})
    checkpoints_of_run.wait()
    return checkpoints_of_run


def bits(array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def test_what_is_saved_comes_back_bit_by_bit(saved, tree):
    arrays, description = checkpoints.read_arrays(checkpoints.path_of(saved.folder, 5))
    restored = checkpoints.fill(tree, arrays, "here")
    ours, theirs = checkpoints.named_leaves(tree), checkpoints.named_leaves(restored)
    assert list(ours) == list(theirs)
    for name in ours:
        assert (theirs[name].dtype, theirs[name].shape) == (ours[name].dtype, ours[name].shape)
        assert bits(theirs[name]) == bits(ours[name]), name
    assert (description["step"], description["note"]) == (5, "é")


def test_a_value_that_orbax_stored_wrong_is_found_by_the_digest_from_memory(tmp_path, tree, monkeypatch):
    save = checkpoints._orbax().args.PyTreeSave
    monkeypatch.setattr(
        checkpoints._orbax().args, "PyTreeSave", lambda arrays: save(arrays | {"step": np.int32(8)})
    )
    wrong = checkpoints.Checkpoints(tmp_path, keep=2)
    wrong.save(5, tree, {})
    wrong.wait()
    with pytest.raises(checkpoints.DamagedCheckpoint, match="array step does not match its SHA-256"):
        checkpoints.read_arrays(checkpoints.path_of(tmp_path, 5))


def test_a_changed_or_missing_description_is_damage(saved):
    path = checkpoints.path_of(saved.folder, 5)
    description = path / checkpoints.DESCRIPTION
    text = description.read_text()
    for changed in (text.replace("step", "stop", 1), text[:-9], "[]"):
        description.write_text(changed)
        with pytest.raises(checkpoints.DamagedCheckpoint, match=str(description)):
            checkpoints.read_arrays(path)
    description.unlink()
    with pytest.raises(checkpoints.DamagedCheckpoint, match=str(description)):
        checkpoints.read_arrays(path)


def test_other_arrays_are_refused(saved, tree):
    tree["new"] = np.zeros(3, np.float32)
    tree["step"] = np.int64(7)
    del tree["seed"]
    arrays, _ = checkpoints.read_arrays(checkpoints.path_of(saved.folder, 5))
    with pytest.raises(UserError) as error:
        checkpoints.fill(tree, arrays, "here")
    for words in (
        "new is missing there, float32[3] here",
        "step is int32[] there, int64[] here",
        "seed is uint32[] there",
    ):
        assert words in str(error.value)


def test_a_save_does_not_see_later_changes(tmp_path):
    checkpoints_of_run = checkpoints.Checkpoints(tmp_path, keep=3)
    array = np.zeros(1_000_000, np.float32)
    checkpoints_of_run.save(1, {"a": array}, {})
    array[:] = 1
    checkpoints_of_run.wait()
    arrays, _ = checkpoints.read_arrays(checkpoints.path_of(tmp_path, 1))
    assert arrays["a"].sum() == 0


def test_the_last_and_the_protected_are_kept(saved, tree):
    for step in (6, 7, 8):
        saved.save(step, tree, {}, protect={5})
    saved.wait()
    assert checkpoints.saved_steps(saved.folder) == [5, 7, 8]
    saved.discard_after(5)
    assert checkpoints.saved_steps(saved.folder) == [5]


def test_a_step_saved_again_after_a_rollback_replaces_the_old_one(saved, tree):
    saved.save(6, tree, {})
    saved.save(5, tree | {"step": np.int32(8)}, {"note": "again"})
    saved.wait()
    arrays, description = checkpoints.read_arrays(checkpoints.path_of(saved.folder, 5))
    restored = checkpoints.fill(tree, arrays, "here")
    assert (restored["step"], description["note"]) == (8, "again")


def test_what_a_killed_process_left_is_no_checkpoint_and_goes(saved, tree):
    path = checkpoints.path_of(saved.folder, 5)
    half = path.with_name("00000007.orbax-checkpoint-tmp")
    assert half.match(checkpoints.UNFINISHED)
    shutil.copytree(path, half)
    shutil.copytree(path, saved.folder / f"00000003{checkpoints.REMOVED}")
    assert checkpoints.saved_steps(saved.folder) == [5]
    again = checkpoints.Checkpoints(saved.folder, keep=2)
    again.save(6, tree, {})
    again.wait()
    assert sorted(path.name for path in saved.folder.iterdir()) == ["00000005", "00000006"]


def test_a_save_that_fails_is_said_once_and_spares_the_others(saved, tree, capfd):
    saved.save(6, {"bad": np.zeros((0, 3))}, {})  # which Orbax refuses, once it has begun
    with pytest.raises(UserError, match=r"--workdir: cannot write .*00000006 \(Cannot save"):
        saved.wait()
    assert checkpoints.saved_steps(saved.folder) == [5]
    checkpoints.read_arrays(checkpoints.path_of(saved.folder, 5))
    saved.save(7, tree, {})
    saved.wait()
    assert sorted(path.name for path in saved.folder.iterdir()) == ["00000005", "00000007"]
    assert capfd.readouterr().err == ""
