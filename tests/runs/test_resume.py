"""A run that is stopped anywhere ends with the numbers of one that was not."""

import dataclasses
import json
import shutil
import signal

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import find_set, run_script

import augment
import report
import train
from build import ProgramCache
from evaluate import load_run
from largebatch.config import dicts
from largebatch.data.cache import Cache
from largebatch.data.sources.splits import split_indices
from largebatch.hosts import preemption
from largebatch.optim.schedule_text import describe_batches
from largebatch.runs import checkpoints
from largebatch.runs.checkpoints import Checkpoints
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


@pytest.fixture
def config(small_config, monkeypatch):
    """A call per update; mini-batches that cross the epoch; everything that has a state."""
    monkeypatch.setattr(trainer, "SECONDS_PER_CALL", 0.0)
    small_config.batch.size = 150
    small_config.train.inner_steps = 4
    small_config.train.outer_steps = 3
    return small_config


@pytest.fixture
def stop_at(monkeypatch):
    """stop_at(n, number): the n-th call of the inner loop from now on ends with a signal."""

    def arm(calls, number=signal.SIGTERM):
        left = [calls]

        def agree(vote=0):
            left[0] -= 1
            return (int(number) if left[0] == 0 else 0), vote

        monkeypatch.setattr(preemption, "agree", agree)

    return arm


ALL_STATE = {  # whatever has a state, and a batch that grows, so that the last outer loop is shorter
    "model.norm": "batch",
    "model.stem": "whitened",
    "optimizer.name": "soap",
    "train.ema_decay": 0.9,
    "schedule.name": "step",
    "schedule.decay_steps": (4, 8),
    "schedule.decay_factor": 0.6,
    "schedule.decay_by": "batch",
    "schedule.warmup_updates": 3,
    "eval.view_average": True,
    "augment.crop_scale": 0.5,
    "augment.shift": 2,
    "augment.brightness": 0.2,
    "augment.contrast": 0.2,
    "augment.cutout": 4,
    "eval.shift_average": 1,
}


ADASCALE = {  # on a trace, so that gains differ; ends when its scale-invariant steps are done
    "optimizer.name": "sgd",
    "schedule.scaling": "adascale",
    "schedule.reference_batch_size": 80,
    "schedule.name": "linear",
    "batch.trace": (60, 200, 7, 90, 150),
    "batch.hold_last": True,
}
LOCAL_STEPS = {  # from update 3 on, averages after updates 6, 9 and 12
    "sync.mode": "post_local",
    "sync.every": 3,
    "sync.start_step": 3,
    "sync.outer_learning_rate": 0.7,
    "sync.outer_momentum": 0.9,
    "sync.optimizer_state": "keep",
}
LOCAL_STEPS_AND_AVERAGES = {**LOCAL_STEPS, "model.norm": "batch", "train.ema_decay": 0.9}


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        pytest.param({}, [4, 8, 12], id="mini-batch", marks=pytest.mark.full),
        pytest.param({"batch.size": "full"}, [4, 8, 12], id="full batch", marks=pytest.mark.full),
        pytest.param(ALL_STATE, [4, 8, 9], id="all state", marks=pytest.mark.full),
        # Its gains say when it ends.
        pytest.param(ADASCALE, None, id="AdaScale on a trace", marks=pytest.mark.full),
        pytest.param(LOCAL_STEPS, [4, 8, 12], id="local steps", marks=pytest.mark.full),
        pytest.param(LOCAL_STEPS_AND_AVERAGES, [4, 8, 12], id="local steps with averages", marks=pytest.mark.full),
    ],
)
def test_a_run_stopped_after_every_call_is_bitwise_the_same(config, tmp_path, stop_at, fields, steps):
    config.update_from_flattened_dict(fields)
    whole = train.train_and_evaluate(config, str(tmp_path / "whole"))
    stops = 0
    while True:
        stop_at(2)
        try:
            summary = train.train_and_evaluate(config, str(tmp_path / "cut"))
            break
        except preemption.Stopped:
            assert json.loads((tmp_path / "cut" / "summary.json").read_text())["status"] == "interrupted"
            stops += 1
    assert stops >= 3
    assert steps is None or [row["step"] for row in rows_of(tmp_path / "cut")] == steps
    assert summary["params_sha256"] == whole["params_sha256"]
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.full
def test_a_kill_between_row_and_checkpoint_doubles_nothing(config, tmp_path, monkeypatch):
    whole = train.train_and_evaluate(config, str(tmp_path / "whole"))
    record = RunProgress.record

    def record_and_die(self, row, predictions):
        improved = record(self, row, predictions)
        if row["step"] == 8:
            raise KeyboardInterrupt
        return improved

    monkeypatch.setattr(RunProgress, "record", record_and_die)
    # A killed process writes no end; its files are closed.
    monkeypatch.setattr(RunProgress, "write_end", lambda self, reason: self._trackers.finish({"status": "failed"}))
    with pytest.raises(KeyboardInterrupt):
        train.train_and_evaluate(config, str(tmp_path / "cut"))
    assert [row["step"] for row in rows_of(tmp_path / "cut")] == [4, 8]
    assert not (tmp_path / "cut" / "checkpoints" / "00000008").exists()
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "torn')
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "SECONDS_PER_CALL", 0.0)
    assert train.train_and_evaluate(config, str(tmp_path / "cut"))["params_sha256"] == whole["params_sha256"]
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.full
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(config, tmp_path, stop_at, caplog):
    whole = train.train_and_evaluate(config, str(tmp_path / "whole"))
    stop_at(11)
    with pytest.raises(preemption.Stopped):
        train.train_and_evaluate(config, str(tmp_path / "cut"))
    newest = tmp_path / "cut" / "checkpoints" / "00000011"
    chunk = max((newest / "arrays").glob("d/*"), key=lambda path: path.stat().st_size)
    flip(chunk, chunk.stat().st_size // 2)
    stop_at(0)
    with caplog.at_level("INFO", "largebatch"):
        summary = train.train_and_evaluate(config, str(tmp_path / "cut"))
    assert f"damaged checkpoint: {newest}/arrays" in caplog.text
    assert "resuming at update 8; the process before interrupted" in caplog.text
    assert (newest.parent / "00000011.damaged").is_dir()
    assert summary["params_sha256"] == whole["params_sha256"]
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_damage_to_all_checkpoints_is_refused_and_nothing_is_touched(config, tmp_path, stop_at):
    stop_at(6)
    with pytest.raises(preemption.Stopped):
        train.train_and_evaluate(config, str(tmp_path))
    for path in (tmp_path / "checkpoints").glob(f"*/{checkpoints.DESCRIPTION}"):
        flip(path, 0)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"no checkpoint is sound: .*00000006.* start in a new folder"):
        train.train_and_evaluate(config, str(tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.full
def test_a_checkpoint_half_written_by_a_killed_process_is_no_checkpoint(config, tmp_path, stop_at):
    whole = train.train_and_evaluate(config, str(tmp_path / "whole"))
    stop_at(6)
    with pytest.raises(preemption.Stopped):
        train.train_and_evaluate(config, str(tmp_path / "cut"))
    folder = tmp_path / "cut" / "checkpoints"
    (folder / "00000006").rename(folder / "00000006.orbax-checkpoint-tmp")
    stop_at(0)
    assert train.train_and_evaluate(config, str(tmp_path / "cut"))["params_sha256"] == whole["params_sha256"]
    assert sorted(path.name for path in folder.iterdir()) == ["00000004", "00000008", "00000012"]


def test_other_examples_are_refused(config, tmp_path, stop_at, monkeypatch):
    stop_at(6)
    with pytest.raises(preemption.Stopped):
        train.train_and_evaluate(config, str(tmp_path))
    identity = Cache.identity
    monkeypatch.setattr(Cache, "identity", lambda self: identity(self) | {"ids": "0" * 64})
    with pytest.raises(UserError, match="dataset: its ids changed since the checkpoint was saved"):
        train.train_and_evaluate(config, str(tmp_path))


def test_rows_that_were_lost_are_refused(config, tmp_path, stop_at):
    stop_at(6)
    with pytest.raises(preemption.Stopped):
        train.train_and_evaluate(config, str(tmp_path))
    before = (tmp_path / "metrics.jsonl").read_bytes()[:100]
    (tmp_path / "metrics.jsonl").write_bytes(before)
    with pytest.raises(
        UserError, match=r"metrics.jsonl has 100 bytes, where the checkpoint's rows have \d+; put them back"
    ):
        train.train_and_evaluate(config, str(tmp_path))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_another_process_in_the_folder_is_refused(config, tmp_path):
    run = RunFolder(tmp_path)
    run.lock()
    with pytest.raises(UserError, match="another process is training in"):
        train.train_and_evaluate(config, str(tmp_path))
    run.close()


def test_rows_without_a_config_are_no_run_to_go_on(config, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"holds metrics.jsonl but no config.json; give a new folder"):
        train.train_and_evaluate(config, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_save_in_the_background_that_failed_ends_the_run_at_the_next_save(config, tmp_path, monkeypatch):
    def fail(self, *arguments):
        raise UserError("--workdir: cannot write checkpoints (no space)")

    monkeypatch.setattr(Checkpoints, "_write", fail)
    with pytest.raises(UserError, match="no space"):
        train.train_and_evaluate(config, str(tmp_path))
    assert summary_of(tmp_path)["status"] == "failed"


@pytest.mark.full
def test_the_last_and_the_best_are_kept(config, tmp_path, monkeypatch):
    accuracies = iter([0.1, 0.9, 0.3, 0.4, 0.5, 0.6])
    validate = train.validate

    def pretend(*arguments):
        validation = validate(*arguments)
        scores = validation.scores
        scores = dataclasses.replace(scores, values=scores.values | {"accuracy": next(accuracies)})
        predictions = dataclasses.replace(validation.predictions, scores=scores)
        return dataclasses.replace(validation, predictions=predictions)

    monkeypatch.setattr(train, "validate", pretend)
    config.train.outer_steps, config.checkpoint.keep = 6, 2
    train.train_and_evaluate(config, str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "00000008",
        "00000020",
        "00000024",
    ]
    best = best_checkpoint(tmp_path)
    assert (best.description["step"], int(best.arrays["state.step"])) == (8, 8)


@pytest.mark.full
def test_another_number_of_devices_resumes_and_says_what_differs(config, tmp_path, stop_at):
    stop_at(6)
    with pytest.raises(preemption.Stopped):
        train.train_and_evaluate(config, str(tmp_path))
    result = go_on_with_two_devices(config, tmp_path)
    assert "devices 2, was 8: the examples come in the same order as before, but" in result.stderr
    assert "files" not in result.stderr
    assert summary_of(tmp_path)["status"] == "done"
    assert [row["step"] for row in rows_of(tmp_path)] == [4, 8, 12]
    losses = [row["train_loss"] for row in rows_of(tmp_path)]
    assert losses[2] < losses[0]


def go_on_with_two_devices(config, workdir):
    """What train.py says, which this test suite gives two devices."""
    flat = dicts.flatten(config.to_dict()).items()
    arguments = [f"--config.{name}={value}" for name, value in flat if value is not None]
    result = run_script("train.py", *arguments, f"--workdir={workdir}")
    assert result.returncode == 0, result.stderr
    return result


FOLLOWING = {  # 20 images for each of 8 devices, so a batch of 160 in place of 80
    "batch.per_device_batch_size": 20,
    "schedule.scaling": "linear",
    "schedule.reference_batch_size": 80,
    "schedule.warmup_updates": 8,
}


@pytest.mark.full
def test_a_batch_that_follows_the_devices_and_its_rate(config, tmp_path, stop_at):
    config.update_from_flattened_dict(FOLLOWING)
    whole = train.train_and_evaluate(config, str(tmp_path / "whole"))
    assert "following the devices" in describe_batches(config.batch, config.sync)
    rate = config.optimizer.learning_rate
    rates = [row["learning_rate"] for row in rows_of(tmp_path / "whole")]
    assert rates == pytest.approx([1.5 * rate, 2 * rate, 2 * rate])  # from the unscaled rate to twice

    stop_at(6)
    with pytest.raises(preemption.Stopped):
        train.train_and_evaluate(config, str(tmp_path / "moved"))
    shutil.copytree(tmp_path / "moved", tmp_path / "stayed")
    stop_at(-1)
    assert train.train_and_evaluate(config, str(tmp_path / "stayed"))["params_sha256"] == whole["params_sha256"]
    assert_same_run(tmp_path / "whole", tmp_path / "stayed")

    go_on_with_two_devices(config, tmp_path / "moved")  # from update 6 on, with a batch of 40
    rows = rows_of(tmp_path / "moved")
    assert [row["examples_seen"] for row in rows] == [640, 1040, 1200]
    assert [row["learning_rate"] for row in rows] == pytest.approx([1.5 * rate, rate / 2, rate / 2])


def rewrite_descriptions(run, change) -> None:
    """Applies `change` to what every checkpoint of a run says of itself, digests included."""
    for path in sorted((run / "checkpoints").glob(f"*/{checkpoints.DESCRIPTION}")):
        description = json.loads(path.read_bytes())
        change(description)
        path.write_text(json.dumps(checkpoints.sealed(description)))


def files_of(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.full
def test_a_run_of_another_order_of_examples_is_evaluated_and_not_resumed(config, tmp_path, stop_at):
    stop_at(6)
    with pytest.raises(preemption.Stopped):
        train.train_and_evaluate(config, str(tmp_path))
    rewrite_descriptions(tmp_path, lambda description: description["data"].update(order_version=1))
    before = files_of(tmp_path)
    with pytest.raises(UserError, match=r"order of examples: its version changed .* \(1 there, 4 here\)"):
        train.train_and_evaluate(config, str(tmp_path))
    assert files_of(tmp_path) == before
    result = run_script("evaluate.py", tmp_path, f"--config.augment.cache_dir={config.augment.cache_dir}")
    assert result.returncode == 0, result.stderr
    assert f"accuracy {rows_of(tmp_path)[0]['val_accuracy']:.4f}" in result.stdout
    result = run_script("report.py", tmp_path, "--out", tmp_path / "report.html")
    assert result.returncode == 0, result.stderr
    assert "1 interrupted" in result.stdout


@pytest.mark.full
def test_parameters_of_another_version_of_the_networks_are_refused_everywhere(config, tmp_path, stop_at):
    """The same parameters would give other outputs, and nobody would notice."""
    stop_at(6)
    run, page = tmp_path / "run", tmp_path / "report.html"
    with pytest.raises(preemption.Stopped):
        train.train_and_evaluate(config, str(run))
    rewrite_descriptions(run, lambda description: description["data"].update(network_version=1))
    before, message = files_of(run), f"{run}: its network is of version 1, those of this code of version 2, "
    with pytest.raises(UserError, match=message):
        train.train_and_evaluate(config, str(run))
    with pytest.raises(UserError, match=message):
        load_run(run)
    config.train.init_from = str(run)
    for step in (None, 4):
        config.train.init_step = step
        with pytest.raises(UserError, match=f"train.init_from: {message}"):
            train.train_and_evaluate(config, str(tmp_path / f"new_{step}"))
    assert files_of(run) == before
    assert report.main([str(run), "--out", str(page)]) == 0


def test_other_code_and_libraries_are_named_when_a_run_goes_on(config, tmp_path, stop_at, caplog):
    stop_at(6)
    with pytest.raises(preemption.Stopped):
        train.train_and_evaluate(config, str(tmp_path))

    def change(description):
        description["summary"]["versions"]["optax"] = "0.0.1"
        description["summary"]["git_commit"] = "0123abc"
        description["summary"]["code_sha256"] = "f" * 64

    rewrite_descriptions(tmp_path, change)
    train.train_and_evaluate(config, str(tmp_path))
    commit, optax, files = git_commit(), versions()["optax"], code_sha256()[:12]
    changes = f"files {files}, was {'f' * 12}; commit {commit}, was 0123abc; optax {optax}, was 0.0.1"
    assert f"resuming with {changes}: " in caplog.text
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    code = {"files": files, "commit": commit, **versions()}
    assert [event["event"] for event in events if event.items() >= code.items()] == ["start", "start"]


@pytest.mark.full
def test_init_from_starts_with_the_best_parameters(config, tmp_path):
    config.model.norm, config.train.ema_decay = "batch", 0.5
    config.train.inner_steps = 1
    first = train.train_and_evaluate(config, str(tmp_path / "first"))
    before = best_checkpoint(tmp_path / "first").arrays
    config.train.init_from, config.optimizer.learning_rate = str(tmp_path / "first"), 1e-30
    config.train.outer_steps = 1
    second = train.train_and_evaluate(config, str(tmp_path / "second"))
    after = best_checkpoint(tmp_path / "second").arrays
    np.testing.assert_array_equal(after["state.params.Conv_0.kernel"], before["state.params.Conv_0.kernel"])
    # Of the averages that came along one update changes little.
    name = "state.ema.model_state.batch_stats.BatchNorm_0.variance"
    assert np.abs(after[name] - before[name]).max() < 0.2 * np.abs(before[name]).max()
    assert second["best_val_accuracy"] == first["best_val_accuracy"]
    config.model.norm, config.train.ema_decay, config.train.inner_steps = "none", None, 4
    missing = r"model_state.batch_stats.BatchNorm_0.mean is float32\[32\] there, missing here"
    cause = "of another network, optimizer or version of the code"
    with pytest.raises(UserError, match=f"train.init_from: .*first: {cause}: {missing}"):
        train.train_and_evaluate(config, str(tmp_path / "third"))
    config.train.init_from = str(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"train.init_from: .*nowhere is no run folder"):
        train.train_and_evaluate(config, str(tmp_path / "third"))
    assert not (tmp_path / "third").exists()


@pytest.mark.full
def test_a_branch_starts_with_all_that_its_run_had_learned(config, tmp_path):
    config.optimizer.name, config.train.inner_steps, config.train.outer_steps = "adam", 2, 3
    config.train.ema_decay, config.model.norm = 0.9, "batch"
    train.train_and_evaluate(config, str(tmp_path / "trunk"))
    before, _ = checkpoints.read_arrays(tmp_path / "trunk" / "checkpoints" / "00000004")
    config.train.init_from, config.train.init_step = str(tmp_path / "trunk"), 4
    config.optimizer.b2, config.seed = 0.5, config.seed + 1
    config.train.inner_steps = config.train.outer_steps = 1
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
    config.train.init_step = 5
    missing = "trunk has no checkpoint of update 5; allowed as train.init_step: 2, 4, 6"
    with pytest.raises(UserError, match=f"train.init_from: .*{missing}"):
        train.train_and_evaluate(config, str(tmp_path / "other"))
    config.train.init_step, config.optimizer.name = 4, "sgd"
    with pytest.raises(UserError, match=r"train.init_from: .*opt_state.* there, missing here"):
        train.train_and_evaluate(config, str(tmp_path / "other"))
    config.train.init_from = None
    with pytest.raises(UserError, match=r"train.init_step: 4; allowed: with train.init_from"):
        train.train_and_evaluate(config, str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


# ---- numerical trouble ---------------------------------------------------------------------------


@pytest.fixture
def poisoned(config, monkeypatch):
    """One of the 640 views gives a loss that is no number: the update it falls in, once per epoch of 4."""
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


TOGETHER, LOCAL = {}, {"sync.mode": "local", "sync.every": 3}
BOTH = pytest.mark.parametrize(
    "sync",
    [pytest.param(TOGETHER, id="together"), pytest.param(LOCAL, id="local steps", marks=pytest.mark.full)],
)


# The latter has layers within layers.
@pytest.mark.full
@pytest.mark.parametrize("norm", ["none", "group"])
def test_stop_names_update_layer_and_rate(poisoned, tmp_path, norm):
    poisoned.model.norm = norm
    message = r"loss of update \d is nan \(learning rate 0.01\); first in the gradient of head\.(bias|kernel)$"
    with pytest.raises(Diverged, match=message):
        train.train_and_evaluate(poisoned, str(tmp_path))
    assert summary_of(tmp_path)["status"] == "diverged"


@pytest.mark.full
@BOTH
def test_skip_passes_over_bad_updates_and_resumes_bitwise(poisoned, tmp_path, stop_at, sync):
    poisoned.update_from_flattened_dict(sync)
    poisoned.train.on_nonfinite = "skip"
    whole = train.train_and_evaluate(poisoned, str(tmp_path / "whole"))
    skipped = [row["skipped_updates"] for row in rows_of(tmp_path / "whole")]
    assert skipped == [1, 1, 1]
    assert np.isfinite([row["train_loss"] for row in rows_of(tmp_path / "whole")]).all()
    stop_at(6)
    with pytest.raises(preemption.Stopped):
        train.train_and_evaluate(poisoned, str(tmp_path / "cut"))
    stop_at(0)
    assert train.train_and_evaluate(poisoned, str(tmp_path / "cut"))["params_sha256"] == whole["params_sha256"]
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.full
def test_skip_gives_up_after_so_many_in_a_row(poisoned, tmp_path):
    poisoned.train.on_nonfinite, poisoned.train.max_nonfinite, poisoned.batch.size = "skip", 2, "full"
    with pytest.raises(Diverged, match="loss of update 3 is nan"):
        train.train_and_evaluate(poisoned, str(tmp_path / "few"))
    poisoned.train.max_nonfinite, poisoned.train.outer_steps = 5, 1
    train.train_and_evaluate(poisoned, str(tmp_path / "many"))
    (row,) = rows_of(tmp_path / "many")
    assert (row["skipped_updates"], row["train_loss"]) == (4, None)


@pytest.fixture
def explosive(config):
    """Plain SGD at a rate that overflows at once, and no longer after two cuts."""
    config.optimizer.name, config.optimizer.learning_rate = "sgd", 1e5
    config.train.on_nonfinite, config.train.rollback_factor = "rollback", 1e-3
    return config


@pytest.mark.full
@BOTH
def test_rollback_cuts_the_rate_and_resumes_bitwise(explosive, tmp_path, stop_at, sync):
    explosive.update_from_flattened_dict(sync)
    whole = train.train_and_evaluate(explosive, str(tmp_path / "whole"))
    rollbacks = whole["rollbacks"]
    assert 1 <= len(rollbacks) <= 3
    assert [entry["to_step"] for entry in rollbacks] == [0] * len(rollbacks)
    rates = [row["learning_rate"] for row in rows_of(tmp_path / "whole")]
    assert rates == pytest.approx([1e5 * 1e-3 ** len(rollbacks)] * 3)
    assert np.isfinite([row["train_loss"] for row in rows_of(tmp_path / "whole")]).all()
    events = [json.loads(line) for line in (tmp_path / "whole" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", *["rollback"] * len(rollbacks), "done"]
    assert "first in the " in events[1]["reason"]
    for stops in range(1, 20):
        stop_at(2)
        try:
            train.train_and_evaluate(explosive, str(tmp_path / "cut"))
            break
        except preemption.Stopped:
            assert stops < 19
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.full
def test_rollback_gives_up_after_so_many(explosive, tmp_path):
    explosive.train.rollback_factor, explosive.train.max_nonfinite = 0.9, 2
    with pytest.raises(Diverged, match=r"rolled back 2 times before \(train.max_nonfinite\)"):
        train.train_and_evaluate(explosive, str(tmp_path))
    assert len(summary_of(tmp_path)["rollbacks"]) == 2
