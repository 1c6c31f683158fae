import hashlib
import shutil
import subprocess

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
    restored, description = checkpoints.restore(saved.path(5), tree)
    ours, theirs = checkpoints.named_leaves(tree), checkpoints.named_leaves(restored)
    assert list(ours) == list(theirs)
    for name in ours:
        assert (theirs[name].dtype, theirs[name].shape) == (ours[name].dtype, ours[name].shape)
        assert bits(theirs[name]) == bits(ours[name]), name
    assert (description["step"], description["note"]) == (5, "é")


def test_the_sums_are_those_of_sha256sum(saved):
    if shutil.which("sha256sum") is None:
        pytest.skip("sha256sum is not installed")
    result = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=saved.path(5), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert "arrays/params.kernel/0.0: OK" in result.stdout


def test_the_array_digest_is_of_what_was_in_memory(saved):
    """A chunk that was wrong already when its file was summed up."""
    chunk = saved.path(5) / "arrays" / "moments.0" / "0.0.0"
    sums = saved.path(5) / "SHA256SUMS"
    before = hashlib.sha256(chunk.read_bytes()).hexdigest()
    other = saved.path(5) / "arrays" / "step" / "0"
    scalar = hashlib.sha256(other.read_bytes()).hexdigest()
    shutil.copy(saved.path(5) / "arrays" / "seed" / "0", other)  # as valid as the right one
    sums.write_text(sums.read_text().replace(scalar, hashlib.sha256(other.read_bytes()).hexdigest()))
    assert before in sums.read_text()
    with pytest.raises(checkpoints.DamagedCheckpoint, match="array step does not match its SHA-256"):
        checkpoints.read_arrays(saved.path(5))


def test_a_file_too_many_or_too_few_is_damage(saved):
    (saved.path(5) / "arrays" / "step" / "1").write_text("x")
    with pytest.raises(checkpoints.DamagedCheckpoint, match=r"SHA256SUMS does not list arrays/step/1"):
        checkpoints.check(saved.path(5))
    (saved.path(5) / "arrays" / "step" / "1").unlink()
    (saved.path(5) / "arrays" / "step" / "0").unlink()
    with pytest.raises(checkpoints.DamagedCheckpoint, match=r"step/0 cannot be read .* \(array step\)"):
        checkpoints.check(saved.path(5))


def test_a_list_of_nothing_is_damage(tmp_path):
    (tmp_path / "SHA256SUMS").write_bytes(b"")
    with pytest.raises(checkpoints.DamagedCheckpoint, match=r"SHA256SUMS does not list checkpoint.json"):
        checkpoints.check(tmp_path)


def test_other_arrays_are_refused(saved, tree):
    tree["new"] = np.zeros(3, np.float32)
    tree["step"] = np.int64(7)
    del tree["seed"]
    with pytest.raises(UserError) as error:
        checkpoints.restore(saved.path(5), tree)
    for words in (
        "new is missing there, float32[3] here",
        "step is int32[] there, int64[] here",
        "seed is uint32[] there",
    ):
        assert words in str(error.value)


def test_arrays_of_earlier_names_come_back_under_those_of_today(saved, tree, monkeypatch):
    monkeypatch.setitem(checkpoints.RENAMED, "seed", "order_seed")
    monkeypatch.setitem(checkpoints.RENAMED, "params", "weights")  # with all that is below it
    monkeypatch.setitem(checkpoints.RENAMED, "step.count", "steps")  # which is none of these
    monkeypatch.setitem(checkpoints.RENAMED, "moment", "average")
    like = {"weights": tree["params"], "step": tree["step"], "order_seed": tree["seed"], "moments": tree["moments"]}
    restored, _ = checkpoints.restore(saved.path(5), like)
    assert restored["order_seed"] == tree["seed"]
    assert bits(restored["weights"]["kernel"]) == bits(tree["params"]["kernel"])
    with pytest.raises(UserError, match=r"order_seed is uint32\[\] there, missing here"):
        checkpoints.restore(saved.path(5), tree)


def test_a_save_does_not_see_later_changes(tmp_path):
    checkpoints_of_run = checkpoints.Checkpoints(tmp_path, keep=3)
    array = np.zeros(1_000_000, np.float32)
    checkpoints_of_run.save(1, {"a": array}, {})
    array[:] = 1
    checkpoints_of_run.wait()
    arrays, _ = checkpoints.read_arrays(checkpoints_of_run.path(1))
    assert arrays["a"].sum() == 0


def test_the_last_and_the_protected_are_kept(saved, tree):
    for step in (6, 7, 8):
        saved.save(step, tree, {}, protect={5})
    saved.wait()
    assert saved.steps() == [5, 7, 8]
    saved.discard_after(5)
    assert saved.steps() == [5]


def test_a_save_that_fails_is_said_once_and_spares_the_others(saved, tree):
    saved.path(6).parent.joinpath(".00000006.tmp").write_text("in the way")
    saved.folder.chmod(0o755)
    saved.save(6, {"bad": np.array([object()])}, {})
    with pytest.raises(UserError, match=r"--workdir: cannot write .*00000006"):
        saved.wait()
    saved.poll()
    assert saved.steps() == [5]
    checkpoints.check(saved.path(5))
