"""The critical batch size from sweeps and from branches: by hand, and from a real run through the command."""

import csv
import json
import math
import re
import shutil

import numpy as np
import pytest
from conftest import assert_one_line_error, run_script, typed
from report_pages import change_config, write_lines, write_run

import train
from configs import default
from largebatch.config.fields import BatchConfig
from largebatch.optim.traces import read_trace
from largebatch.reports.study_charts import branch_chart
from largebatch.runs import reader
from largebatch.studies import critical_batch
from largebatch.studies.critical_batch import Branches
from largebatch.util import UserError

SIZES = [128, 256, 512, 1024]


def write_branches(path, losses: dict[int, list[list[float | None]]], noise_scale=300.0):
    """Write and read a study of branches.

    Args:
      losses: their last training losses [seeds][sizes], by the step that they begin from; inf where one
        diverged, NaN where its row has none, None where it has not ended.
    """
    of_all = {"batch_size": 128, "learning_rate": 0.1, "noise_scale": noise_scale}
    points = [{"step": step, "examples_seen": step * 128, **of_all} for step in losses]
    path.mkdir()
    description = {
        "config": {},
        "fields": ["train.init_step", "batch.size"],
        "branches": {"run": "trunk", "images": 1024, "sizes": SIZES, "points": points},
    }
    (path / "study.json").write_text(json.dumps(description))
    for step, of_seeds in losses.items():
        for seed, of_sizes in enumerate(of_seeds):
            for size, loss in zip(SIZES, of_sizes, strict=True):
                status = "running" if loss is None else "diverged" if math.isinf(loss) else "done"
                last = loss if status == "done" and math.isfinite(loss) else None
                run = path / "trials" / f"{step}-{size}-{seed}"
                write_run(run, (0.9,), batch=size, seed=seed, status=status, train_loss=last)
                change_config(run, "train", init_step=step)
    return reader.read(path)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0, 0.9, 1.0, 1.3], 512 * 2**0.5),  # the limit of 1.15 is half way between the last two
        ([1.0, 1.0, 1.15, 1.15], math.inf),
        ([1.0, 1.45, 1.0, 1.0], 128 * 2 ** (0.15 / 0.45)),  # what comes after the first that is left behind is luck
        ([1.0, 1.0, math.inf, math.inf], 256),  # diverged
    ],
)
def test_the_largest_batch_that_keeps_up(losses, expected):
    assert critical_batch.largest_that_keeps_up(SIZES, np.array(losses), base=0) == pytest.approx(expected)


def test_critical_batches_over_a_run_with_intervals(tmp_path):
    early = [[1.0, 1.0, 1.0, 1.3], [1.0, 1.0, 1.6, 2.2]]
    late = [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]]
    study = write_branches(tmp_path / "s", {100: early, 200: late})
    first, second = critical_batch.critical_batches(study)
    assert (first.step, first.examples_seen, first.base, first.noise_scale) == (100, 12_800, 128, 300.0)
    assert first.size == pytest.approx(256 * 2 ** (0.15 / 0.3))  # of the means 1, 1, 1.3, 1.75
    assert first.low == pytest.approx(256 * 2 ** (0.15 / 0.6))  # of the second seed alone
    assert first.high == pytest.approx(512 * 2 ** (0.15 / 0.3))  # of the first
    assert (second.size, second.low, second.high) == (math.inf,) * 3
    stages = critical_batch.batch_warmup([first, second])
    assert stages == [(0, 128), (100, 256), (150, 1024)]
    rows = critical_batch.rows([first, second])[1]
    assert [row[3] for row in rows] == ["362", "above 1024"]


def test_sizes_are_compared_on_the_seeds_that_ended_at_all_of_them(tmp_path):
    seeds = [[1.0, 9.0, 1.0, 1.0], [1.0, None, 1.0, 1.0], [None, 9.0, 1.0, 1.0], [None, None, 1.0, None]]
    study = write_branches(tmp_path / "s", {100: seeds})
    (found,) = critical_batch.critical_batches(study)
    assert found.losses == {128: 1.0, 256: 9.0, 512: 1.0, 1024: 1.0}
    assert found.size == pytest.approx(128 * 2 ** (0.15 / 8))
    assert (found.low, found.high, found.seeds) == (None, None, 1)
    assert "on 1 seed that ended at all of them" in branch_chart(study, {}).note


GOOD = [1.0, 1.0, 1.0, 1.2]


@pytest.mark.parametrize(
    ("of_seeds", "compared"),
    [
        (
            [[1.0, 1.0, None, 1.3], [1.0, 1.0, None, 1.3], [None, None, 9.0, None]],
            [128, 256, 1024],
        ),  # no seed shared
        ([[1.0, 1.2, 1.2, math.nan]], [128, 256, 512]),
        ([[1.0, math.nan, math.nan, math.nan]], None),  # nothing to compare with
        ([[None, 1.0, 1.2, 1.4]], None),  # the run's own batch has not ended
        ([[math.inf, 1.0, 1.0, 1.0], GOOD], None),  # or has diverged
    ],
)
def test_only_sizes_that_can_be_compared_count(tmp_path, of_seeds, compared):
    study = write_branches(tmp_path / "s", {100: of_seeds, 200: [GOOD]})
    *first, second = critical_batch.critical_batches(study)
    assert [list(found.losses) for found in first] == ([compared] if compared else [])
    assert second.step == 200


def test_a_warm_up_takes_batches_that_lose_nothing(tmp_path):
    study = write_branches(tmp_path / "s", {100: [[1.0, 0.9, 1.04, 1.04]], 200: [[0.5, 0.4, 0.5, 0.52]]})
    found = critical_batch.critical_batches(study)
    assert [critical.size for critical in found] == [math.inf, math.inf]
    assert critical_batch.batch_warmup(found) == [(0, 128), (100, 256), (150, 512)]


def write_trunk(path, rates: dict[int, float], sizes=(128,)):
    """A run with a checkpoint at each of these steps, and the learning rate there; batch sizes take turns."""
    write_run(path)
    row = {"examples_seen": 100, "noise_scale": None}
    rows = [
        row | {"step": step, "learning_rate": rate, "global_batch_size": sizes[index % len(sizes)]}
        for index, (step, rate) in enumerate(rates.items())
    ]
    write_lines(path / "metrics.jsonl", rows)
    for step in rates:
        (path / "checkpoints" / f"{step:08d}").mkdir(parents=True)
    return path


def test_no_branch_begins_where_the_rate_is_nearly_zero(tmp_path, caplog):
    trunk = str(write_trunk(tmp_path / "trunk", {100: 0.1, 200: 0.05, 300: 1e-4, 400: 0.0}))
    assert [point["step"] for point in Branches.of_run(trunk, 16_384, None, None).points] == [100, 200]
    assert f"the learning rate of {trunk} is nearly 0 at step 300, 400" in caplog.text
    with pytest.raises(UserError, match=r"--branch_steps: 400; allowed: validations .* 100, 200"):
        Branches.of_run(trunk, 16_384, None, [100, 400])
    done = str(write_trunk(tmp_path / "done", {100: 0.0}))
    with pytest.raises(UserError, match=r"rate of .* nearly 0 at step 100.*allowed: a run at a constant rate"):
        Branches.of_run(done, 16_384, None, None)
    steady = str(write_trunk(tmp_path / "steady", {100: 0.1, 200: 0.1}))
    caplog.clear()
    assert len(Branches.of_run(steady, 16_384, None, None).points) == 2
    assert caplog.text == ""


def test_branch_sizes(tmp_path):
    def sizes(images, given=None, own=(128,)):
        trunk = tmp_path / f"trunk{own}"
        if not trunk.exists():
            write_trunk(trunk, {100: 0.1, 200: 0.1}, own)
        return Branches.of_run(str(trunk), images, given, None).sizes

    assert sizes(16_384) == [128, 256, 512, 1024, 2048, 4096]
    assert sizes(4 * 192 * 128, own=(128, 192)) == [128, 192, 256, 512, 1024, 2048, 4096, 8192]
    for options, message in (
        ({"images": 400}, "--branch_images: 400; allowed: multiples of 4 steps of 128"),
        ({"images": 16_384, "given": [128, 96]}, "--branch_sizes: 96; allowed: divisors of 4096, a part of"),
        ({"images": 16_384, "given": [256]}, "--branch_sizes: [256]; allowed: with the run's own, 128"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            sizes(**options)


def test_a_branch_of_a_run_on_a_trace_or_with_local_steps_is_allowed():
    config = default.get_config()
    config.batch.trace, config.batch.hold_last, config.batch.size = (64, 128), True, 256
    config.sync.update({"mode": "post_local", "start_step": 150, "every": 4, "outer_momentum": 0.5})
    config.train.init_from, config.train.init_step = "run", 100
    point = {"step": 100, "examples_seen": 12_800, "batch_size": 128, "learning_rate": 0.1, "noise_scale": None}
    config.schedule.name, config.schedule.decay_over = "linear", "images"
    Branches("run", 16_384, [128, 256], [point]).derive(config)
    typed(config)
    assert (config.sync.mode, config.train.inner_steps) == ("every_step", 16)


def test_the_chart_has_branches_noise_scale_and_what_sweeps_found(tmp_path):
    losses = [[1.0, 1.0, 1.0, 1.6]] * 2
    study = write_branches(tmp_path / "s", {100: losses, 200: [[1.0] * 4] * 2})
    chart = branch_chart(study, {"swept": 400.0})
    rows = {mark: [row for row in chart.rows if row["mark"] == mark] for mark in ("line", "hollow", "dashed")}
    assert (rows["line"][0]["x"], rows["line"][0]["y"]) == (12_800, pytest.approx(512 * 2**0.25, rel=1e-3))
    assert [(row["x"], row["y"]) for row in rows["hollow"]] == [(25_600, 1024)]
    assert [row["y"] for row in chart.rows if row["label"] == "noise scale of the gradient"] == [300, 300]
    assert [(row["label"], row["x"], row["y"]) for row in rows["dashed"]] == [
        ("critical batch of swept", 12_800, 400),
        ("critical batch of swept", 25_600, 400),
    ]


@pytest.mark.full
def test_branches_of_a_real_run_give_a_trace(small_config, tmp_path):
    config = small_config
    config.batch.size, config.checkpoint.keep, config.optimizer.name = 32, 10, "adam"
    config.schedule.b2_scaling, config.schedule.reference_batch_size, config.optimizer.b2 = "half_life", 64, 0.98
    trunk = tmp_path / "trunk"
    train.train_and_evaluate(config, str(trunk))  # 2 validations of 3 steps
    study = tmp_path / "study"
    command = ["sweep.py", "--branch", trunk, "--study", study, "--branch_images", 256]
    message = "sweep.py: error: --pruner: median; allowed with --branch: none"
    assert_one_line_error(run_script(*command, "--pruner", "median"), message)
    assert not study.exists()
    done = run_script(*command)
    assert done.returncode == 0, done.stderr
    (study / "batch_warmup.csv").unlink()
    shutil.rmtree(trunk)  # the study says from where it branched
    done = run_script("sweep.py", "--study", study)  # nothing is left but to tell the result
    assert done.returncode == 0, done.stderr
    assert "critical_batch" in done.stdout
    read = reader.read(study)
    assert len(read.runs) == 2 * 2  # points, sizes
    for run in read.runs:
        ratio = run.batch_size / 32
        assert run.summary["examples_seen"] == 256
        assert run.field("optimizer.b2") == pytest.approx(0.98**0.5)
        assert run.rows[-1]["learning_rate"] == pytest.approx(0.01 * ratio**0.5)
    trace = read_trace(BatchConfig(trace=str(study / "batch_warmup.csv")), 1000)
    assert trace.sizes[0] == 32
    with (study / "batch_warmup.csv").open() as file:
        assert next(csv.reader(file)) == ["step", "batchsize"]
