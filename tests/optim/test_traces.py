"""Batch sizes from files and lists, and the command that checks them."""

import random

import numpy as np
import pytest
from conftest import assert_one_line_error, on_devices, run_script, typed

from configs import default
from largebatch.optim import traces
from largebatch.optim.traces import PiecewiseConstant
from largebatch.util import BadSetting, UserError

SEED_TRACE = "step,batchsize\n0, 1024\n1, 1024\n2, 2048\n"  # as in the README of the system that had it first


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "trace.csv"
        path.write_text(text)
        return str(path)

    return write


# ---- stages -------------------------------------------------------------------------------------------


def test_stages_against_plain_sums():
    rng = random.Random(0)
    sizes = np.array([rng.choice((1, 7, 7, 64, 1024)) for _ in range(200)])
    stages = traces.from_list(sizes.tolist()).batch_sizes
    assert len(stages.starts) < 200
    before = np.concatenate([[0], np.cumsum(sizes)])
    np.testing.assert_array_equal(stages.at(np.arange(200)), sizes)
    np.testing.assert_array_equal(stages.total_before(np.arange(201)), before)
    totals = np.arange(1, before[-1] + 1, 13)
    np.testing.assert_array_equal(stages.steps_to(totals), np.searchsorted(before, totals))
    np.testing.assert_array_equal(stages.first(50).at(np.arange(50)), sizes[:50])
    assert stages.first(50).starts[-1] < 50


def test_the_last_value_of_stages_holds():
    stages = PiecewiseConstant(np.array([0, 3]), np.array([10, 20]))
    assert stages.at(np.int64(1000)) == 20
    assert stages.steps_to(30 + 20 * 7 - 5) == 3 + 7


# ---- files --------------------------------------------------------------------------------------------


def test_the_seed_s_own_format(write):
    trace = traces.read(write(SEED_TRACE))
    assert trace.length == 3
    assert trace.batch_sizes.at(np.arange(3)).tolist() == [1024, 1024, 2048]


def test_steps_that_a_trace_leaves_out_keep_the_last_value(write):
    trace = traces.read(write("step,batchsize\n0,32\n5,64\n9,8\n\n"))
    assert trace.length == 10
    assert trace.batch_sizes.at(np.arange(10)).tolist() == [32] * 5 + [64] * 4 + [8]


def test_columns_may_be_called_and_placed_otherwise(write):
    trace = traces.read(write("\ufeffBatch_Size, note, Step\n16, a, 0\n+32, b, 2\n"))
    assert trace.batch_sizes.at(np.arange(3)).tolist() == [16, 16, 32]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("step,batchsize\n", "has no rows"),
        ("step,size\n0,1\n", "has the columns step, size; allowed: step and batchsize, or a time"),
        ("batchsize\n4\n", "has the columns batchsize; allowed: step and batchsize"),
        ("step,batchsize\n0,32\n1,many\n", "line 3: batchsize 'many'; allowed: an integer from 1 to 100"),
        ("step,batchsize\n0,32\n1,1.5\n", "line 3: batchsize '1.5'"),
        ("step,batchsize\n0,0\n", "line 2: batchsize '0'"),
        ("step,batchsize\n0,-4\n", "line 2: batchsize '-4'"),
        ("step,batchsize\n0,\n", "line 2: batchsize ''"),
        ("step,batchsize\n0,101\n", "line 2: batchsize '101'; allowed: an integer from 1 to 100"),
        ("step,batchsize\n0,4\n0,5\n", "line 3: step 0 again; allowed: ascending rows"),
        ("step,batchsize\n0,4\n5,5\n\n3,4\n", "line 5: step 3 after 5; allowed: ascending rows"),
        ("step,batchsize\n1,4\n", "line 2: the first step is 1; allowed: 0"),
        ("step,batchsize\n0,4,7\n", "line 2: 3 values; allowed: 2"),
        ("step,batchsize\n-1,4\n", "line 2: step '-1'"),
        ('step,batchsize\n0,"4\n', "is no CSV file"),
        ("step,batchsize\n0,4\n0,5\n1,6\n", "line 3: step 0 again; allowed: ascending rows"),
        ("step,batchsize\n0,4\n7,4\n0,5\n0,5\n", "line 5: step 0 again; allowed: ascending rows"),
        (
            "step,batchsize\n0,4\n100000000000000,5\n",
            "line 3: step '100000000000000'; allowed: an integer from 0 to",
        ),
        (
            "step,batchsize\n0,4\n2147483647,5\n0,6\n",
            "line 4: begins with update 2147483648; allowed: up to 2147483647",
        ),
        ("time,GPUs\n0,4\n", "counts GPUs; allowed: with batch.per_device_batch_size"),
    ],
)
def test_bad_traces_are_refused_by_line(write, text, message):
    with pytest.raises(BadSetting, match=r"^batch\.trace: ") as error:
        traces.read(write(text), largest=100)
    assert message in str(error.value)


def test_updates_beyond_32_bits_are_refused_by_line(write):
    """1e14 updates of 100,000 examples are 1e19, which 64 bits do not count."""
    with pytest.raises(BadSetting, match=r"line 3: begins with update 100000000000000; allowed: up to 2147483647"):
        traces.read(write("time,GPUs\n0,4\n1e10,8\n"), 1, time_per_update=1e-4)
    with pytest.raises(BadSetting, match="line 3: begins with update inf"):
        traces.read(write("time,GPUs\n0,4\n1e10,8\n"), 1, time_per_update=1e-307)
    with pytest.raises(BadSetting, match="line 3: GPUs 8 x 1000000000000000000 is a batch of 8000000000000000000"):
        traces.read(write("time,GPUs\n0,0\n1,8\n"), 10**18)
    with pytest.raises(BadSetting, match="line 3: begins with update nan; allowed"):
        traces.read(write("time,GPUs\n-1e308,0\n1e308,4\n1.1e308,4\n"), 1)
    with pytest.raises(
        BadSetting, match="batchsize '900000000000000000'; allowed: an integer from 1 to 2147483647"
    ):
        traces.read(write("step,batchsize\n0,900000000000000000\n"), largest=10**18)
    longest = traces.read(write(f"step,batchsize\n0,{2**31 - 1}\n{2**31 - 1},1\n"))
    assert int(longest.batch_sizes.total_before(np.int64(2**31))) == (2**31 - 1) ** 2 + 1


def test_a_step_that_begins_again_at_0_goes_on(write):
    """As the trace system's own example file does: its step counts the updates of an epoch."""
    rows = "".join(f"{step},{size}\n" for size in (32, 64, 96) for step in range(10))
    path = write("step,batchsize\n" + rows)
    trace = traces.read(path)
    assert trace.length == 30
    assert trace.batch_sizes.at(np.arange(30)).tolist() == [32] * 10 + [64] * 10 + [96] * 10
    assert trace.text == f"{path}, 30 rows, steps begin again at 0 2 times, first in line 12: updates go on"
    sparse = traces.read(write("step,batchsize\n0,8\n5,9\n0,10\n2,11\n"))
    assert sparse.length == 9
    assert sparse.batch_sizes.at(np.arange(9)).tolist() == [8] * 5 + [9, 10, 10, 11]


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(BadSetting, match="cannot be read"):
        traces.read(str(tmp_path / "none.csv"))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadSetting, match="it is no text"):
        traces.read(str(tmp_path / "bytes.csv"))


def test_a_long_trace(write):
    rng = random.Random(0)
    sizes = [rng.randint(1, 4096) for _ in range(100_000)]
    path = write("step,batchsize\n" + "".join(f"{step},{size}\n" for step, size in enumerate(sizes)))
    trace = traces.read(path)
    assert trace.length == 100_000
    assert int(trace.batch_sizes.total_before(np.int64(100_000))) == sum(sizes)


# ---- availability ---------------------------------------------------------------------------------------


def test_devices_over_an_index(write):
    trace = traces.read(write("index,GPUs\n0,4\n1,4\n2,8\n"), per_device_batch_size=32)
    assert trace.batch_sizes.at(np.arange(3)).tolist() == [128, 128, 256]


def test_devices_over_time(write):
    """An update belongs to the latest row at its start; rows shorter than an update leave no trace."""
    text = "time,TPU_cores\n100.0,8\n130.5,16\n131,32\n150,8\n"
    trace = traces.read(write(text), per_device_batch_size=2, time_per_update=10)
    # Updates start at 100, 110, 120, 130, 140, 150.
    assert trace.batch_sizes.at(np.arange(6)).tolist() == [16, 16, 16, 16, 64, 16]
    assert trace.length == 6


def test_a_batch_trace_has_no_devices(write):
    with pytest.raises(
        BadSetting, match=r"per_device_batch_size: 4; allowed: None with .*trace\.csv, which has batch"
    ):
        traces.read(write(SEED_TRACE), per_device_batch_size=4)


def test_times_count_where_there_is_an_index_too(write):
    text = ",Time,TPU_cores\n0,1651064158,88\n1,1651064188,88\n2,1651064218,112\n"
    trace = traces.read(write(text), per_device_batch_size=1, time_per_update=15)
    assert trace.batch_sizes.at(np.arange(5)).tolist() == [88, 88, 88, 88, 112]


def test_time_without_devices_is_left_out(write):
    trace = traces.read(write("time,GPUs\n0,0\n10,2\n30,0\n90,4\n100,1\n"), 1, time_per_update=10)
    assert trace.batch_sizes.at(np.arange(4)).tolist() == [2, 2, 4, 1]


def test_a_trace_that_ends_without_devices_lasts_until_then(write):
    assert traces.read(write("time,GPUs\n0,4\n100,0\n"), 1, time_per_update=10).length == 10
    assert traces.read(write("time,GPUs\n0,4\n50,0\n60,4\n100,0\n"), 1, time_per_update=10).length == 9


def test_usual_column_names(write):
    for header in ("Unnamed: 0,num_gpus", "datetime,node_id,TPU_cores", "Time (s),available_workers"):
        columns = header.count(",") + 1
        row = ["0", *["7"] * (columns - 2), "3"]
        assert traces.read(write(f"{header}\n{','.join(row)}\n"), 2).batch_sizes.at(np.int64(0)) == 6


def test_a_single_device_can_take_more_than_the_set(write):
    with pytest.raises(BadSetting, match="GPUs 1 x 512 is a batch of 512; allowed: up to 400"):
        traces.read(write("time,GPUs\n0,1\n"), per_device_batch_size=512, largest=400)


def test_timestamps(write):
    text = "timestamp,available GPUs\n2021-05-01 00:00:00,1\n2021-05-01 00:02:00,3\n2021-05-01 00:03:00,2\n"
    trace = traces.read(write(text), per_device_batch_size=8, time_per_update=60)
    assert trace.batch_sizes.at(np.arange(4)).tolist() == [8, 8, 24, 16]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,GPUs\n0,0\n", "has no row with any GPUs"),
        ("time,GPUs,TPUs\n0,1,1\n", "has the columns time, GPUs, TPUs"),
        ("time,GPUs\nnoon,1\n", "line 2: time 'noon'; allowed: a number or a timestamp"),
        ("time,GPUs\n0,1\nnan,1\n", "line 3: time 'nan'; allowed: a finite number"),
        ("time,GPUs\n5,1\n4,1\n", "line 3: time 4 after 5; allowed: ascending rows"),
        ("time,GPUs\n0,1\n1,26\n", "line 3: GPUs 26 x 4 is a batch of 104; allowed: up to 100"),
    ],
)
def test_bad_availability_traces(write, text, message):
    with pytest.raises(BadSetting) as error:
        traces.read(write(text), per_device_batch_size=4, largest=100)
    assert message in str(error.value)


# ---- in a config ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"trace": (4, 0, 4)}, "batch.trace: 0 at place 1; allowed: an integer from 1 to 2147483647"),
        ({"trace": ()}, "batch.trace: (); allowed: at least one batch size"),
        ({"trace": (4, 4)}, "batch.trace: 2 given, ends with update 1; allowed: up to the run's last, 49, or"),
        ({"trace": (4,), "auto": True, "hold_last": True}, "batch.trace and batch.auto: both given"),
        ({"trace": "nowhere.csv"}, "batch.trace: nowhere.csv cannot be read"),
        ({"auto": True, "per_device_batch_size": 4}, "per_device_batch_size: 4; allowed: None with batch.auto"),
        ({"trace": (4, 4), "per_device_batch_size": 4}, "per_device_batch_size: 4; allowed: None with a list"),
        ({"hold_last": True}, "batch.hold_last: True; allowed: with batch.trace"),
        ({"max_size": 64}, "batch.max_size: 64; allowed: with batch.auto"),
        ({"trace": 4}, "batch.trace: 4; allowed: a tuple of integers >= 1, the path of a CSV file, or None"),
    ],
)
def test_contradictory_batch_sizes_are_refused_before_the_start(batch, message):
    config = default.get_config()
    with config.ignore_type():
        config.batch.update(batch)
    with pytest.raises(UserError) as error:
        typed(config)
    assert message in str(error.value)


def test_growth_in_place_of_decay_does_not_go_with_a_trace():
    config = default.get_config()
    config.batch.trace, config.batch.hold_last = (4,), True
    config.schedule.update({"name": "step", "decay_steps": (5,), "decay_by": "batch"})
    with pytest.raises(UserError, match=r"decay_by: 'batch'; allowed: 'rate' with batch\.trace"):
        typed(config)


def test_a_decay_over_images_needs_batch_sizes_that_are_known():
    config = default.get_config()
    config.batch.auto, config.schedule.name, config.schedule.decay_over = True, "linear", "images"
    with pytest.raises(UserError, match=r"decay_over: 'images'; allowed: 'updates' where training finds"):
        typed(config)


# ---- the command ----------------------------------------------------------------------------------------


def test_a_run_shows_its_batches(write, session_cache, tmp_path):
    path = write("step,batchsize\n0,32\n1,64\n2,96\n3,7\n4,1024\n5,50\n")
    flags = [
        "--show_batches", f"--workdir={tmp_path / 'run'}", "--config.dataset.num_examples=200",
        "--config.dataset.image_size=8", f"--config.augment.cache_dir={session_cache}",
        f"--config.batch.trace={path}",
        "--config.batch.micro_batch_size=16", "--config.schedule.scaling=linear",
        "--config.schedule.reference_batch_size=64", "--config.optimizer.learning_rate=0.1",
        "--config.train.inner_steps=30", "--config.train.outer_steps=1",
    ]  # fmt: skip
    refused = run_script("train.py", *flags, env=on_devices(8))
    assert_one_line_error(refused, "ends with update 5; allowed: up to the run's last, 29, or batch.hold_last")
    refused = run_script(
        "train.py", *flags, "--config.batch.hold_last", "--config.dataset.num_examples=100", env=on_devices(8)
    )
    assert "line 6: batchsize '1024'; allowed: an integer from 1 to 640" in refused.stderr
    result = run_script("train.py", *flags, "--config.batch.hold_last", env=on_devices(8))
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert "30 steps, batch 7 to 1,024, 2,473 examples, 1.93 epochs on 8 devices" in result.stdout
    assert ["2", "96", "1", "0.15", "96", f"{96 / 1280:.2f}"] in rows
    assert ["3", "7", "0", "or", "1", "0.01094", "192", "0.15"] in rows
    assert ["4", "1024", "8", "1.6", "199", "0.16"] in rows
    assert not (tmp_path / "run").exists()


def test_a_file_is_parsed_again_when_it_changes(write):
    path = write(SEED_TRACE)
    assert traces.read_once(path) is traces.read_once(path)
    write(SEED_TRACE + "3,5\n")
    assert traces.read_once(path).length == 4


def test_adascale_needs_a_trace_that_holds():
    config = default.get_config()
    config.batch.trace, config.schedule.scaling, config.optimizer.name = (4,) * 50, "adascale", "sgd"
    with pytest.raises(UserError, match=r"batch\.hold_last: False; allowed: True with AdaScale"):
        typed(config)
    config.batch.hold_last = True
    typed(config)
