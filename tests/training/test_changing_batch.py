"""Runs of train.py whose batch changes, and whose devices take local steps."""

import json

import jax
import numpy as np
import pytest
from conftest import assert_one_line_error, facts_of, run_script, typed
from test_resume import rows_of, summary_of

import evaluate
import train
from benchmarks.ours import collectives
from largebatch.config.dicts import flatten
from largebatch.config.fields import OptimizerConfig
from largebatch.hardware.chips import Hardware
from largebatch.hosts import preemption, replicas
from largebatch.optim import noise_scale
from largebatch.optim.optimizers import Hyperparams, create_optimizer
from largebatch.runs.progress import replicas_from_mean
from largebatch.training.local_sgd import Sync
from largebatch.training.state import create_train_state
from largebatch.util import BadSetting, UserError
from plan import plan_run


def run(config, workdir, **fields):
    """A run with some fields changed: its rows, and its summary."""
    config = config.copy_and_resolve_references()
    with config.ignore_type():
        config.update_from_flattened_dict({name.replace("__", "."): value for name, value in fields.items()})
    summary = train.train_and_evaluate(config, str(workdir))
    return rows_of(workdir), summary


# ---- traces -----------------------------------------------------------------------------------------------


def test_a_trace_file_drives_a_run(small_config, tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text("step,batchsize\n0,64\n1,96\n3,7\n5,640\n")
    fields = {"schedule__scaling": "linear", "schedule__reference_batch_size": 64}
    rows, _ = run(small_config, tmp_path / "run", batch__trace=str(path), **fields)
    assert [row["global_batch_size"] for row in rows] == [96, 640]
    assert [row["examples_seen"] for row in rows] == [64 + 2 * 96, 64 + 2 * 96 + 2 * 7 + 640]
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.015, 0.1])
    told = capsys.readouterr().out
    assert f"batch 7 to 640 = 1 to 80 a device in micro-batches of up to 16, from {path}, 4 rows" in told
    assert "learning rate 0.00109375 to 0.1 = 0.01 x 0.1094 to 10 (linear: batch 7 to 640 / reference 64)" in told


@pytest.mark.full
def test_a_list_is_the_same_run_as_its_file(small_config, tmp_path):
    (tmp_path / "trace.csv").write_text("index,GPUs\n0,8\n1,8\n2,12\n3,1\n4,80\n5,80\n")
    by_file, _ = run(
        small_config, tmp_path / "file", batch__trace=str(tmp_path / "trace.csv"),
        batch__per_device_batch_size=8,
    )  # fmt: skip
    by_list, _ = run(small_config, tmp_path / "list", batch__trace=(64, 64, 96, 8, 640, 640))
    assert by_file == by_list


@pytest.mark.full
def test_a_run_is_evaluated_without_its_trace(small_config, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("step,batchsize\n0,64\n5,128\n")
    rows, _ = run(small_config, tmp_path / "run", batch__trace=str(path), **LOCAL | {"train__inner_steps": 3})
    path.unlink()
    assert evaluate.load_run(tmp_path / "run").config.batch.trace is None
    result = run_script("evaluate.py", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert f"{max(row['val_accuracy'] for row in rows):.4f}" in result.stdout


def test_a_trace_that_changed_is_refused(small_config, tmp_path, monkeypatch):
    path = tmp_path / "trace.csv"
    path.write_text("step,batchsize\n0,64\n5,128\n")
    monkeypatch.setattr(preemption, "agree", lambda vote=0: (15, vote))
    with pytest.raises(preemption.Stopped):
        run(small_config, tmp_path / "run", batch__trace=str(path))
    path.write_text("step,batchsize\n0,64\n5,129\n")
    with pytest.raises(UserError, match=r"batch.trace: its file changed since the checkpoint was saved"):
        run(small_config, tmp_path / "run", batch__trace=str(path))


def test_a_batch_larger_than_the_set_is_one_line(tmp_path, session_cache):
    path = tmp_path / "trace.csv"
    path.write_text("step,batchsize\n0,64\n49,3841\n")
    arguments = [f"--config.batch.trace={path}", f"--config.augment.cache_dir={session_cache}"]
    result = run_script("train.py", *arguments, "--workdir", tmp_path / "run")
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert f"batch.trace: {path}, line 3: batchsize '3841'; allowed: an integer from 1 to 3072" in last
    assert not (tmp_path / "run" / "config.json").exists()
    path.write_text("step,batchsize\n0,many\n")
    result = run_script("train.py", *arguments, "--workdir", tmp_path / "run")
    assert_one_line_error(result, f"batch.trace: {path}, line 2: batchsize 'many'")


# ---- AdaScale and batches that follow the noise -------------------------------------------------------------


@pytest.mark.full
def test_adascale_ends_with_its_scale_invariant_steps(small_config, tmp_path):
    fields = {"schedule__scaling": "adascale", "schedule__reference_batch_size": 80, "optimizer__name": "sgd"}
    # As long as test_resume's run, with which it shares its program.
    rows, summary = run(
        small_config, tmp_path, batch__size=320, optimizer__learning_rate=0.01, train__outer_steps=4, **fields
    )
    assert 3 <= summary["steps"] < 12
    assert all(1 <= row["gain"] <= 4 for row in rows)
    assert rows[-1]["scale_invariant_steps"] >= 12
    total = sum(row["gain"] * (row["step"] - before) for row, before in zip(rows, [0, 3, 6, 9], strict=False))
    assert rows[-1]["scale_invariant_steps"] == pytest.approx(total, rel=1e-5)
    assert rows[-1]["learning_rate"] == pytest.approx(0.01 * rows[-1]["gain"], rel=0.2)  # the last, and a mean
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "done"


@pytest.fixture
def noise_of(monkeypatch):
    """noise_of(f): the noise scale that runs measure is f(updates measured)."""

    def arm(function):
        monkeypatch.setattr(noise_scale, "noise_scale", lambda noise: function(int(noise.count)))

    return arm


def test_a_batch_grows_with_the_noise_scale_within_its_limits(small_config, tmp_path, noise_of):
    noise_of(lambda count: {3: None, 6: 500, 9: 150, 12: 1e9, 15: 1e9, 18: 1e9}.get(count))
    fields = {"batch__auto": True, "batch__size": 80, "batch__max_size": 500, "train__outer_steps": 7}
    rows, _ = run(small_config, tmp_path, **fields)
    assert [row["global_batch_size"] for row in rows] == [80, 80, 160, 160, 320, 500, 500]
    assert rows[-1]["examples_seen"] == 3 * (80 + 80 + 160 + 160 + 320 + 500 + 500)
    assert [row["noise_scale"] for row in rows][1:4] == [500, 150, 1e9]


@pytest.mark.full
def test_a_batch_that_grew_is_resumed_bitwise(small_config, tmp_path, monkeypatch, noise_of):
    noise_of(lambda count: 300 if count else None)
    fields = {"batch__auto": True, "batch__size": 40, "train__outer_steps": 4}
    whole, summary = run(small_config, tmp_path / "whole", **fields)
    assert [row["global_batch_size"] for row in whole] == [40, 80, 160, 160]
    monkeypatch.setattr("largebatch.training.trainer.SECONDS_PER_CALL", 0.0)
    agree, calls = preemption.agree, []

    def stop_every_second_call(vote=0):
        calls.append(1)
        return (15 if len(calls) % 2 == 0 else 0), agree(vote)[1]

    monkeypatch.setattr(preemption, "agree", stop_every_second_call)
    for _ in range(12):
        try:
            rows, again = run(small_config, tmp_path / "cut", **fields)
            break
        except preemption.Stopped:
            continue
    assert len(calls) > 4
    assert rows == whole
    assert again["params_sha256"] == summary["params_sha256"]


def micro_batch_size(config, num_devices: int) -> int:
    """Of a run of `config` on 80 training images."""
    data = facts_of(80, (16, 16, 3), num_classes=10)
    return plan_run(typed(config), data, Hardware.here(num_devices)).micro_batch_size


def test_noise_needs_two_groups(small_config):
    small_config.batch.auto, small_config.batch.size = True, 16
    for num_devices in (1, 2):
        assert micro_batch_size(small_config, num_devices) == 16  # measured between smaller ones
    small_config.batch.size = 8
    assert micro_batch_size(small_config, num_devices=8) == 16  # one each are groups enough
    small_config.batch.size = 1
    with pytest.raises(BadSetting, match="at least 2 images"):
        micro_batch_size(small_config, num_devices=8)
    small_config.batch.size = 16
    small_config.batch.max_size = 8
    with pytest.raises(BadSetting, match=r"batch\.max_size: 8; allowed: at least batch\.size, 16"):
        micro_batch_size(small_config, num_devices=8)


# ---- local steps --------------------------------------------------------------------------------------------

# What they have in common is one program to compile.
LOCAL = {"sync__mode": "local", "sync__every": 3, "sync__optimizer_state": "keep", "train__inner_steps": 4}


@pytest.mark.full
def test_post_local_is_bitwise_synchronous_until_it_starts(small_config, tmp_path):
    small_config.batch.size = 128
    together, _ = run(small_config, tmp_path / "together")
    fields = {"sync__mode": "post_local", "sync__start_step": 3, "sync__every": 2, "train__inner_steps": 3}
    local, summary = run(small_config, tmp_path / "local", **LOCAL | fields)
    assert [local[0][name] for name in together[0]] == list(together[0].values())
    assert local[1]["val_loss"] != together[1]["val_loss"]
    assert [row["noise_scale"] is None for row in local] == [together[0]["noise_scale"] is None, True]
    assert local[0].get("replica_drift") is None
    assert local[1]["replica_drift"] > 0
    assert summary["steps"] == 6


@pytest.mark.full
def test_bytes_sent_fall_by_the_interval(small_config, tmp_path):
    together, _ = run(small_config, tmp_path / "together", train__inner_steps=4)
    local, _ = run(small_config, tmp_path / "local", **LOCAL | {"sync__every": 4})
    for one, other in zip(together, local, strict=True):
        assert one["bytes_sent"] / other["bytes_sent"] == pytest.approx(4, rel=1e-4)
    params = summary_of(tmp_path / "together")["params"]
    assert together[0]["bytes_sent"] == pytest.approx(2 * 7 / 8 * 4 * params, rel=1e-4)  # a ring of 8 devices


@pytest.mark.full
@pytest.mark.parametrize("mode", ["every_step", "local"])
def test_bytes_are_those_of_the_compiled_all_reduce(small_config, mode):
    small_config.model.norm, small_config.sync.mode = "batch", mode
    small_config.train.ema_decay, small_config.train.inner_steps = 0.5, 1  # a program that other tests compile
    program_cache = train.ProgramCache()
    placed = program_cache.load(typed(small_config))
    plan, programs = placed.plan, program_cache.programs(placed.plan)
    state = replicas.replicate(programs.init(np.uint32(0), Hyperparams(), None))
    arguments = [state, placed.data.train.arrays, plan.schedule.inputs(0, length=1), np.int32(1)]
    if mode == "every_step":
        loop, expected_bytes = programs.inner_loop, programs.allreduce_bytes
    else:
        loop, expected_bytes = programs.local_loop, programs.sync_bytes
        arguments.append(Sync.from_config(plan.config.sync))
    text = loop.lower(*arguments).compile().as_text()
    assert expected_bytes in [collective["bytes"] for collective in collectives(text)]


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (None, ""),
        (101.2, "  noise scale 101"),
        (2050.0, "  noise scale 2,050"),
        (float("inf"), "  noise scale inf"),
    ],
)
def test_the_terminal_gives_the_noise_scale_and_no_critical_batch(
    small_config, tmp_path, noise_of, capsys, scale, told
):
    noise_of(lambda count: scale)
    run(small_config, tmp_path, train__outer_steps=1)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("outer")]
    assert "critical" not in line
    assert line.endswith(told or "ms/update")


@pytest.mark.full
def test_how_often_one_evaluates_changes_nothing(small_config, tmp_path):
    """Twelve updates with a synchronisation after every fourth: validated after every third or every fourth."""
    fields = LOCAL | {"sync__every": 4, "batch__size": 128}
    shas = set()
    for inner, outer in ((3, 4), (4, 3)):
        times = {"train__inner_steps": inner, "train__outer_steps": outer}
        rows, summary = run(small_config, tmp_path / str(inner), **fields | times)
        shas.add((summary["params_sha256"], rows[-1]["val_loss"]))
    assert len(shas) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "post_local"}, "sync.start_step: 0; allowed: 1 to 5 with 'post_local'"),
        ({"mode": "post_local", "start_step": 6}, "sync.start_step: 6; allowed: 1 to 5"),
        ({"mode": "local", "start_step": 2}, "sync.start_step: 2; allowed: 0 with sync.mode 'local'"),
        ({"mode": "locla"}, "sync.mode: 'locla'; allowed: every_step | local | post_local (did you mean 'local'?)"),
        ({"every": 0}, "sync.every: 0; allowed: an integer >= 1"),
        ({"every": 4}, "sync.every: 4; allowed: 1 with sync.mode 'every_step'"),
        ({"outer_momentum": 0.9}, "sync.outer_momentum: 0.9; allowed: 0.0 with sync.mode 'every_step'"),
    ],
)
def test_contradictory_settings_of_devices_apart(small_config, fields, message):
    small_config.sync.update(fields)
    with pytest.raises(UserError) as error:
        typed(small_config)
    assert message in str(error.value)


def test_what_does_not_go_with_devices_apart(small_config):
    small_config.sync.mode, small_config.optimizer.name = "local", "soap"
    small_config.batch.auto, small_config.schedule.scaling = True, "adascale"
    with pytest.raises(UserError) as error:
        typed(small_config)
    for words in (
        "keep | reset with soap",
        "'adascale'; allowed: none | linear | sqrt with soap, for its gain is that of sgd",
        "'adascale'; allowed: none | linear | sqrt with sync.mode 'local'",
        "batch.auto: True; allowed",
    ):
        assert words in str(error.value)


@pytest.mark.full
def test_another_number_of_replicas_starts_from_their_mean(small_config, tmp_path, monkeypatch):
    monkeypatch.setattr("largebatch.training.trainer.SECONDS_PER_CALL", 0.0)
    agreed = iter([0, 15])
    monkeypatch.setattr(preemption, "agree", lambda vote=0: (next(agreed), vote))
    with pytest.raises(preemption.Stopped):
        run(small_config, tmp_path, **LOCAL)
    config = small_config.copy_and_resolve_references()
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in LOCAL.items()})
    given = [f"--config.{name}={value}" for name, value in flatten(config.to_dict()).items() if value is not None]
    result = run_script("train.py", *given, f"--workdir={tmp_path}")  # on two devices
    assert result.returncode == 0, result.stderr
    assert "resuming at update 2" in result.stderr
    assert "devices 2, was 8: the examples come in the same order" in result.stderr
    assert [row["step"] for row in rows_of(tmp_path)] == [4, 8]


def test_other_replicas_take_the_mean_of_all_that_has_one():
    def replicas_on(num_devices):
        state = create_train_state(
            {"w": np.zeros(3)}, create_optimizer(OptimizerConfig(name="adam")), 0, local=True
        )
        return jax.tree.map(lambda leaf: np.stack([leaf] * num_devices), state)

    mean = jax.tree.map(lambda leaf: np.full(leaf.shape[1:], 7, leaf.dtype), replicas_on(1))
    state = replicas_from_mean(mean, replicas_on(5))
    for name in ("params", "opt_state", "num_averaged"):
        for leaf in jax.tree.leaves(getattr(state, name)):
            assert len(leaf) == 5
            np.testing.assert_array_equal(leaf, 7)
    np.testing.assert_array_equal(state.local.anchor["w"], np.full((5, 3), 7))
    np.testing.assert_array_equal(state.local.examples, np.zeros(5))


def test_local_steps_after_the_last_update_are_refused(small_config):
    """Six updates become four when the batch grows."""
    small_config.schedule.update({"name": "step", "decay_steps": (2,), "decay_by": "batch", "decay_factor": 0.5})
    small_config.sync.update({"mode": "post_local", "start_step": 4, "every": 2})
    small_config.batch.size = 64
    with pytest.raises(BadSetting, match=r"sync\.start_step: 4; allowed: up to 3"):
        plan_run(typed(small_config), facts_of(480, (16, 16, 3), num_classes=10), Hardware.here(1))


@pytest.mark.full
def test_init_from_reaches_every_device_apart(small_config, tmp_path):
    first, _ = run(small_config, tmp_path / "first")
    best = max(first, key=lambda row: row["val_accuracy"])
    fields = {"train__init_from": str(tmp_path / "first"), "optimizer__learning_rate": 1e-30}
    rows, _ = run(small_config, tmp_path / "second", **LOCAL | fields, sync__outer_momentum=0.5)
    assert rows[-1]["val_loss"] == pytest.approx(best["val_loss"], rel=1e-6)
