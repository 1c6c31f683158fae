"""A run that is stopped anywhere ends with the numbers of one that was not."""

import itertools
import json
import shutil
import signal

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import find_set, make_small_config, run_script

import augment
import train
from build import ProgramCache
from evaluate import load_run
from largebatch.config import dicts
from largebatch.data.sources.splits import split_indices
from largebatch.hosts import preemption
from largebatch.runs import checkpoints, progress
from largebatch.runs.folder import RunFolder
from largebatch.runs.lifecycle import Diverged
from largebatch.runs.load import best_checkpoint
from largebatch.runs.progress import RunProgress
from largebatch.runs.summary import code_sha256, git_commit, versions
from largebatch.training import trainer
from largebatch.training.loss import make_loss_fn
from largebatch.util import UserError

WALL_CLOCK = {"images_per_sec", "step_time_ms", "train_sec", "eval_sec", "compile_sec", "wall_sec"}
WALL_CLOCK |= {"mfu", "device_memory_peak_bytes"}
SUMMARY_WALL_CLOCK = {"images_per_sec", "images_per_sec_by_outer", "train_sec", "sec_to_target", "seconds"}


def rows_of(workdir) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in WALL_CLOCK} for row in rows]


def summary_of(workdir) -> dict:
    """summary.json without what depends on the clock."""
    summary = json.loads((workdir / "summary.json").read_text())
    return {k: v for k, v in summary.items() if k not in SUMMARY_WALL_CLOCK}


def predictions_of(workdir) -> dict:
    with np.load(workdir / "predictions.npz", allow_pickle=False) as file:
        return {name: file[name].tolist() for name in file}


def assert_same_run(one, other):
    assert rows_of(one) == rows_of(other)
    assert summary_of(one) == summary_of(other)
    assert predictions_of(one) == predictions_of(other)


def flip(path, byte: int) -> None:
    """Inverts a bit of a file."""
    content = bytearray(path.read_bytes())
    content[byte % len(content)] ^= 4
    path.write_bytes(content)


def files_of(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def events_of(workdir) -> list[dict]:
    return [json.loads(line) for line in (workdir / "events.jsonl").read_text().splitlines()]


def make_config(cache_dir):
    """Mini-batches that cross the epoch."""
    config = make_small_config(cache_dir)
    config.batch.size = 150
    config.train.inner_steps = 4
    config.train.outer_steps = 3
    return config


@pytest.fixture
def config(session_cache, monkeypatch):
    """The same, with a call per step."""
    monkeypatch.setattr(trainer, "SECONDS_PER_CALL", 0.0)
    return make_config(session_cache)


def arm(monkeypatch, calls: int, number=signal.SIGTERM) -> None:
    """Let the `calls`-th call of the inner loop from now on end with a signal; 0: none does."""
    left = [calls]

    def agree(vote=0):
        left[0] -= 1
        return (int(number) if left[0] == 0 else 0), vote

    monkeypatch.setattr(preemption, "agree", agree)


@pytest.fixture
def train_until(monkeypatch):
    """train_until(config, workdir, calls): train, stopped by a signal after so many calls, if there are so many."""

    def train_until(config, workdir, calls):
        arm(monkeypatch, calls)
        try:
            return train.train_and_evaluate(config, str(workdir))
        except preemption.Stopped:
            return None
        finally:
            arm(monkeypatch, 0)

    return train_until


@pytest.fixture(scope="module")
def runs_of_module(session_cache, tmp_path_factory):
    """Runs of `config`: "whole", and "cut" after step 6."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "SECONDS_PER_CALL", 0.0)
        shared = ProgramCache()
        train.train_and_evaluate(make_config(session_cache), str(folder / "whole"), shared=shared)
        arm(patch, 6)
        with pytest.raises(preemption.Stopped):
            train.train_and_evaluate(make_config(session_cache), str(folder / "cut"), shared=shared)
    return folder


@pytest.fixture
def whole(runs_of_module):
    """The folder of a run of `config` that nobody stopped."""
    return runs_of_module / "whole"


@pytest.fixture
def cut(runs_of_module, tmp_path):
    """The folder of a run of `config` that was stopped after step 6."""
    return shutil.copytree(runs_of_module / "cut", tmp_path / "cut")


ALL_STATE = {  # whatever has a state, and a batch that grows, so that the last outer loop is shorter
    "model.norm": "batch",
    "model.stem": "whitened",
    "optimizer.name": "soap",
    "train.ema_decay": 0.9,
    "schedule.name": "step",
    "schedule.decay_steps": (4, 8),
    "schedule.decay_factor": 0.6,
    "schedule.decay_by": "batch",
    "schedule.warmup_steps": 3,
    "augment.crop_scale": 0.5,
    "augment.cutout": 4,
}
ADASCALE = {  # on a trace, so that gains differ; ends when its scale-invariant steps are done
    "optimizer.name": "sgd",
    "schedule.scaling": "adascale",
    "schedule.reference_batch_size": 80,
    "schedule.name": "linear",
    "batch.trace": (60, 200, 7, 90, 150),
    "batch.hold_last": True,
}
LOCAL_STEPS = {  # from step 3 on, averages after steps 7 and 11
    "sync.mode": "post_local",
    "sync.every": 4,
    "sync.start_step": 3,
    "sync.outer_learning_rate": 0.7,
    "sync.outer_momentum": 0.9,
    "sync.optimizer_state": "keep",
    "model.norm": "batch",
    "train.ema_decay": 0.9,
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        pytest.param(ALL_STATE, [4, 8, 9], id="all state"),
        pytest.param(ADASCALE, None, id="AdaScale on a trace"),  # its gains say when it ends
        pytest.param(LOCAL_STEPS, [4, 8, 12], id="local steps"),
    ],
)
def test_a_run_stopped_again_and_again_is_bitwise_the_same(config, tmp_path, train_until, fields, steps):
    config.update_from_flattened_dict(fields)
    whole = train.train_and_evaluate(config, str(tmp_path / "whole"))
    stops, calls = 0, itertools.cycle((4, 2))  # right after a validation, and within an outer loop
    while not (summary := train_until(config, tmp_path / "cut", next(calls))):
        assert summary_of(tmp_path / "cut")["status"] == "interrupted"
        stops += 1
    assert stops >= 2
    assert steps is None or [row["step"] for row in rows_of(tmp_path / "cut")] == steps
    assert summary["params_sha256"] == whole["params_sha256"]
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_kill_between_row_and_checkpoint_doubles_nothing(config, tmp_path, monkeypatch, whole, caplog):
    record = RunProgress.record

    def record_and_die(self, row, predictions):
        improved = record(self, row, predictions)
        if row["step"] == 8:
            raise KeyboardInterrupt
        return improved

    with monkeypatch.context() as patch:
        patch.setattr(RunProgress, "record", record_and_die)
        # A killed process writes no end; its files are closed.
        patch.setattr(RunProgress, "write_end", lambda self, reason: self._trackers.finish({"status": "failed"}))
        with pytest.raises(KeyboardInterrupt):
            train.train_and_evaluate(config, str(tmp_path))
    assert [row["step"] for row in rows_of(tmp_path)] == [4, 8]
    assert checkpoints.saved_steps(tmp_path / "checkpoints")[-1] < 8
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "torn')
    with caplog.at_level("INFO", "largebatch"):
        train.train_and_evaluate(config, str(tmp_path))
    assert ") was killed, or a host died" in caplog.text
    assert_same_run(tmp_path, whole)


@pytest.mark.full
def test_the_last_and_the_best_are_kept(config, tmp_path, monkeypatch):
    scores, add = iter([0.1, 0.9, 0.3, 0.4, 0.5, 0.6]), progress.add_to_summary

    def add_made_up(summary, row, kind):
        return add(summary, row | dict.fromkeys(("val_score", "val_accuracy"), next(scores)), kind)

    monkeypatch.setattr(progress, "add_to_summary", add_made_up)
    config.train.outer_steps, config.checkpoint.keep = 6, 2
    train.train_and_evaluate(config, str(tmp_path))
    assert checkpoints.saved_steps(tmp_path / "checkpoints") == [8, 20, 24]
    assert best_checkpoint(tmp_path).description["step"] == 8


def rewrite_descriptions(run, change) -> None:
    """Applies `change` to what every checkpoint of a run says of itself, digests included."""
    for path in sorted((run / "checkpoints").glob(f"*/{checkpoints.DESCRIPTION}")):
        description = json.loads(path.read_bytes())
        change(description)
        path.write_text(json.dumps(checkpoints.sealed(description)))


def test_a_damaged_checkpoint_and_other_code_are_named_and_the_one_before_is_used(config, cut, whole, caplog):
    def change(description):
        description["summary"]["versions"]["optax"] = "0.0.1"
        description["summary"]["git_commit"] = "0123abc"
        description["summary"]["code_sha256"] = "f" * 64

    rewrite_descriptions(cut, change)
    newest = cut / "checkpoints" / "00000006"
    chunk = max((newest / "arrays").glob("d/*"), key=lambda path: path.stat().st_size)
    flip(chunk, chunk.stat().st_size // 2)
    with caplog.at_level("INFO", "largebatch"):
        train.train_and_evaluate(config, str(cut))
    assert f"damaged checkpoint: {newest}/arrays" in caplog.text
    assert "resuming at step 4; the process before ended as interrupted" in caplog.text
    commit, optax, files = git_commit(), versions()["optax"], code_sha256()[:12]
    changes = f"files {files}, was {'f' * 12}; commit {commit}, was 0123abc; optax {optax}, was 0.0.1"
    assert f"resuming with {changes}: " in caplog.text
    assert (newest.parent / "00000006.damaged").is_dir()
    assert_same_run(cut, whole)
    starts = [event for event in events_of(cut) if event["event"] == "start"]
    code = {"files": files, "commit": commit, **versions()}
    assert [event.items() >= code.items() for event in starts] == [True, True]


def damage_all(run) -> None:
    for path in run.glob(f"checkpoints/*/{checkpoints.DESCRIPTION}"):
        flip(path, 0)


def lose_rows(run) -> None:
    (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes()[:100])


def of_other(**changed):
    """A function that changes what all checkpoints of a run say of its data."""
    return lambda run: rewrite_descriptions(run, lambda description: description["data"].update(changed))


OTHER_NETWORK = "its network is of version 1, those of this code of version 2, "


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage_all, "no checkpoint is sound: .*00000006.* start in a new folder"),
        (lose_rows, r"metrics.jsonl has 100 bytes, where the checkpoint's rows have \d+; put"),
        (of_other(ids="0" * 64), "dataset: its ids changed since the checkpoint was saved"),
        (of_other(order_version=1), r"order of examples: its version changed .* \(1 there, 4 here\)"),
        (of_other(network_version=1), OTHER_NETWORK),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_touched(config, cut, change, message):
    change(cut)
    before = files_of(cut)
    with pytest.raises(UserError, match=message):
        train.train_and_evaluate(config, str(cut))
    assert files_of(cut) == before


def test_another_version_of_the_network_is_refused_wherever_its_parameters_are_read(config, cut, tmp_path):
    assert load_run(cut).config.batch.size == 150
    of_other(network_version=1)(cut)
    with pytest.raises(UserError, match=OTHER_NETWORK):
        load_run(cut)
    config.train.init_from = str(cut)
    with pytest.raises(UserError, match=f"train.init_from: {cut}: {OTHER_NETWORK}"):
        train.train_and_evaluate(config, str(tmp_path / "new"))


def test_a_finished_run_at_a_constant_rate_can_be_made_longer(config, tmp_path, whole):
    config.train.outer_steps = 1
    train.train_and_evaluate(config, str(tmp_path))
    config.train.outer_steps = 3
    train.train_and_evaluate(config, str(tmp_path))
    assert_same_run(tmp_path, whole)


def test_a_run_whose_rate_falls_to_its_end_says_how_to_train_on(config, tmp_path):
    config.schedule.name = "cosine"
    RunFolder(tmp_path).begin(config.to_dict())
    before = files_of(tmp_path)
    config.train.outer_steps += 1
    hint = r"^[^\n]*train\.outer_steps: 4[^\n]*schedule\.name[^\n]*train\.init_from[^\n]*$"
    with pytest.raises(UserError, match=hint):
        train.train_and_evaluate(config, str(tmp_path))
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("metrics.jsonl", "holds metrics.jsonl but no config.json; give a new folder"),
        ("config.json", r"config.json cannot be read \(Expecting property name"),
    ],
)
def test_what_is_no_run_to_resume_is_refused(config, tmp_path, name, message):
    (tmp_path / name).write_text("{\n")
    with pytest.raises(UserError, match=message):
        train.train_and_evaluate(config, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name]


# ---- on other machines ---------------------------------------------------------------------------


@pytest.mark.full
def test_a_run_on_other_devices_ends_as_one_that_stayed_but_for_rounding(config, cut, whole):
    flat = dicts.flatten(config.to_dict()).items()
    flags = [f"--config.{name}={value}" for name, value in flat if value is not None]
    result = run_script("train.py", *flags, f"--workdir={cut}")  # on 2 devices from step 6 on
    assert result.returncode == 0, result.stderr
    assert "devices 2, was 8" in result.stderr
    for moved, stayed in zip(rows_of(cut), rows_of(whole), strict=True):
        for name in ("train_loss", "grad_norm", "val_loss"):
            assert moved[name] == pytest.approx(stayed[name], rel=1e-3), name


@pytest.mark.full
def test_a_batch_that_follows_the_devices_and_its_rate(config, tmp_path, train_until):
    config.update_from_flattened_dict(
        {  # 20 images for each of 8 devices, so a batch of 160 in place of 80
            "batch.per_device_batch_size": 20,
            "schedule.scaling": "linear",
            "schedule.reference_batch_size": 80,
            "schedule.warmup_steps": 8,
        }
    )
    train_until(config, tmp_path / "moved", 6)
    flat = dicts.flatten(config.to_dict()).items()  # from step 6 on two devices, with a batch of 40
    arguments = [f"--config.{name}={value}" for name, value in flat if value is not None]
    result = run_script("train.py", *arguments, f"--workdir={tmp_path / 'moved'}")
    assert result.returncode == 0, result.stderr
    assert "following the devices" in result.stdout
    assert "devices 2, was 8: the examples come in the same order as before, but" in result.stderr
    assert "files" not in result.stderr
    rate = config.optimizer.learning_rate
    rows = rows_of(tmp_path / "moved")
    assert [row["examples_seen"] for row in rows] == [640, 1040, 1200]
    assert [row["learning_rate"] for row in rows] == pytest.approx([1.5 * rate, rate / 2, rate / 2])


# ---- from another run ----------------------------------------------------------------------------


@pytest.mark.full
def test_a_run_starts_from_the_best_parameters_or_all_that_another_had_learned(config, tmp_path):
    config.optimizer.name, config.train.inner_steps, config.train.outer_steps = "adam", 2, 3
    config.train.ema_decay, config.model.norm = 0.9, "batch"
    trunk = tmp_path / "trunk"
    train.train_and_evaluate(config, str(trunk))
    best = best_checkpoint(trunk).arrays
    config.train.init_from, config.optimizer.learning_rate, config.train.outer_steps = str(trunk), 1e-30, 1
    train.train_and_evaluate(config, str(tmp_path / "second"))
    after = best_checkpoint(tmp_path / "second").arrays
    np.testing.assert_array_equal(after["state.params.Conv_0.kernel"], best["state.params.Conv_0.kernel"])
    # Two steps change little of the averages that came along.
    name = "state.ema.model_state.batch_stats.BatchNorm_0.variance"
    assert np.abs(after[name] - best[name]).max() < 0.3 * np.abs(best[name]).max()

    before, _ = checkpoints.read_arrays(trunk / "checkpoints" / "00000004")
    config.train.init_step, config.optimizer.b2, config.seed = 4, 0.5, config.seed + 1
    train.train_and_evaluate(config, str(tmp_path / "branch"))
    after, _ = checkpoints.read_arrays(tmp_path / "branch" / "checkpoints" / "00000000")
    changed = {
        name for name in before if name.startswith("state.") and not np.array_equal(before[name], after[name])
    }
    of_the_branch = {"state.step", "state.seed", "state.opt_state.hyperparams.b2"}
    assert of_the_branch <= changed
    others = ("state.opt_state.hyperparams.learning_rate", "state.noise.", "state.scale_invariant_steps")
    assert all(name.startswith(others) for name in changed - of_the_branch)
    assert (after["state.step"], after["state.seed"]) == (0, config.seed)
    moments = ("inner_state.1.1.0.value.", "inner_state.1.1.1.value.", "weight_of_start")
    for part in ("params.", "ema.", "model_state.", *moments):
        assert any(part in name for name in before), part

    other_network = {"model.norm": "none", "train.ema_decay": None, "train.init_step": None}
    lost = r"BatchNorm_0.mean is float32\[32\] there, missing here"
    for fields, message in (
        ({"train.init_step": 5}, "trunk has no checkpoint of step 5; allowed as train.init_step: 2, 4, 6"),
        ({"train.init_step": 4, "optimizer.name": "sgd"}, "opt_state.* there, missing here"),
        (other_network, f"trunk: of another network, .*: model_state.batch_stats.{lost}"),
        ({"train.init_from": str(tmp_path / "nowhere")}, "nowhere is no run folder"),
    ):
        config.update_from_flattened_dict(fields)
        with pytest.raises(UserError, match=f"train.init_from: .*{message}"):
            train.train_and_evaluate(config, str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


# ---- numerical trouble ---------------------------------------------------------------------------


@pytest.fixture
def poisoned(config, monkeypatch):
    """One of the 640 views gives a loss that is no number: the step it falls in, once per epoch of 4."""
    config.batch.size = 160
    make = make_loss_fn
    weights = np.arange(16 * 16 * 3).reshape(16, 16, 3) % 251  # tells views of an image apart

    def make_poisoned(*arguments):
        loss_fn = make(*arguments)

        def poisoned_loss(params, model_state, batch):
            loss, averages = loss_fn(params, model_state, batch)
            sums = jnp.sum(batch.images.astype(jnp.int32) * weights, axis=(1, 2, 3)) * (batch.weights > 0)
            return loss * jnp.where(jnp.any(sums == poison), jnp.nan, 1), averages

        return poisoned_loss

    dataset = find_set("synthetic", num_examples=100, image_size=16)
    views = augment.expand(dataset.images(split_indices(dataset.ids, 0)["train"]), 8)
    sums = (views.astype(int) * weights).sum(axis=(2, 3, 4)).ravel()
    poison = sums[5]
    assert np.count_nonzero(sums == poison) == 1
    monkeypatch.setattr("build.make_loss_fn", make_poisoned)
    program_cache = ProgramCache()  # not for other tests
    monkeypatch.setattr(train, "ProgramCache", lambda: program_cache)
    return config


TOGETHER_AND_LOCAL = pytest.mark.parametrize(
    "sync",
    [
        pytest.param({}, id="together"),
        pytest.param({"sync.mode": "local", "sync.every": 3}, id="local steps"),
    ],
)


@pytest.mark.full
def test_stop_names_step_layer_and_rate(poisoned, tmp_path):
    message = r"loss of step \d is nan \(learning rate 0.01\); first in the gradient of head\.(bias|kernel)$"
    with pytest.raises(Diverged, match=message):
        train.train_and_evaluate(poisoned, str(tmp_path))
    assert summary_of(tmp_path)["status"] == "diverged"


@pytest.mark.full
@TOGETHER_AND_LOCAL
def test_skip_passes_over_bad_steps_and_resumes_bitwise(poisoned, tmp_path, train_until, sync):
    poisoned.update_from_flattened_dict(sync)
    poisoned.train.on_nonfinite = "skip"
    train.train_and_evaluate(poisoned, str(tmp_path / "whole"))
    rows = rows_of(tmp_path / "whole")
    assert [row["skipped_steps"] for row in rows] == [1, 1, 1]
    assert np.isfinite([row["train_loss"] for row in rows]).all()
    train_until(poisoned, tmp_path / "cut", 5)  # between two averages of local steps
    train.train_and_evaluate(poisoned, str(tmp_path / "cut"))
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.full
def test_skip_gives_up_after_so_many_in_a_row(poisoned, tmp_path):
    poisoned.train.on_nonfinite, poisoned.train.max_nonfinite, poisoned.batch.size = "skip", 2, "full"
    with pytest.raises(Diverged, match="loss of step 3 is nan"):
        train.train_and_evaluate(poisoned, str(tmp_path / "few"))
    poisoned.train.max_nonfinite, poisoned.train.outer_steps = 5, 1
    train.train_and_evaluate(poisoned, str(tmp_path / "many"))
    (row,) = rows_of(tmp_path / "many")
    assert (row["skipped_steps"], row["train_loss"]) == (4, None)


@pytest.fixture
def explosive(config):
    """Plain SGD at a rate that overflows at once, and no longer after two cuts."""
    config.optimizer.name, config.optimizer.learning_rate = "sgd", 1e5
    config.train.on_nonfinite, config.train.rollback_factor = "rollback", 1e-3
    return config


@pytest.mark.full
@TOGETHER_AND_LOCAL
def test_rollback_cuts_the_rate_and_resumes_bitwise(explosive, tmp_path, train_until, sync):
    explosive.update_from_flattened_dict(sync)
    rollbacks = train.train_and_evaluate(explosive, str(tmp_path / "whole"))["rollbacks"]
    assert 1 <= len(rollbacks) <= 3
    assert [entry["to_step"] for entry in rollbacks] == [0] * len(rollbacks)
    rows = rows_of(tmp_path / "whole")
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e5 * 1e-3 ** len(rollbacks)] * 3)
    assert np.isfinite([row["train_loss"] for row in rows]).all()
    events = events_of(tmp_path / "whole")
    assert [event["event"] for event in events] == ["start", *["rollback"] * len(rollbacks), "done"]
    assert "first in the " in events[1]["reason"]
    stops = 0
    while not train_until(explosive, tmp_path / "cut", 2):
        stops += 1
        assert stops < 19
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.full
def test_rollback_gives_up_after_so_many(explosive, tmp_path):
    explosive.train.rollback_factor, explosive.train.max_nonfinite = 0.9, 2
    with pytest.raises(Diverged, match=r"rolled back 2 times before \(train.max_nonfinite\)"):
        train.train_and_evaluate(explosive, str(tmp_path))
    assert len(summary_of(tmp_path)["rollbacks"]) == 2
