"""Batch sizes from files and lists, and the command that checks them."""

import numpy as np
import pytest
from conftest import assert_one_line_error, on_devices, run_script

from largebatch.config.fields import BatchConfig
from largebatch.optim.batch_schedule import BatchSchedule
from largebatch.optim.traces import LARGEST, read_trace
from largebatch.util import BadSetting

SEED_TRACE = "step,batchsize\n0, 1024\n1, 1024\n2, 2048\n"  # as in the README of the system that had it first


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "trace.csv"
        path.write_text(text)
        return str(path)

    return write


def read(path, per_device_batch_size=None, time_per_step=1.0, largest=LARGEST):
    """The trace in a file."""
    batch = BatchConfig(trace=path, per_device_batch_size=per_device_batch_size, time_per_step=float(time_per_step))
    return read_trace(batch, largest)


def sizes_of(trace) -> list[int]:
    """The batch size of every step."""
    return BatchSchedule(trace.starts, trace.sizes).at(np.arange(trace.length)).tolist()


# ---- files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (SEED_TRACE, [1024, 1024, 2048]),
        ("step,batchsize\n0,32\n5,64\n9,8\n\n", [32] * 5 + [64] * 4 + [8]),  # steps left out keep the last value
        ("\ufeffBatch_Size, note, Step\n16, a, 0\n+32, b, 2\n", [16, 16, 32]),
        # A step that begins again at 0 goes on, as in the trace system's own example: it counts those of an epoch.
        ("step,batchsize\n0,8\n5,9\n0,10\n2,11\n", [8] * 5 + [9, 10, 10, 11]),
        ("step,batchsize\n" + "".join(f"{i},{n}\n" for n in (32, 64) for i in range(9)), [32] * 9 + [64] * 9),
    ],
)
def test_batch_traces(write, text, sizes):
    assert sizes_of(read(write(text))) == sizes


def test_a_trace_says_where_its_steps_begin_again(write):
    path = write("step,batchsize\n0,8\n5,9\n0,10\n2,11\n")
    assert read(path).text == f"{path}, 4 rows, steps begin again at 0 in line 4: they are counted on"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows; allowed: a line of column names, and rows"),
        ("step,size\n0,1\n", "has the columns step, size; allowed: step and batchsize, or a time"),
        ("batchsize\n4\n", "has the columns batchsize; allowed: step and batchsize"),
        ("step,batchsize\n0,32\n1,many\n", "line 3: batchsize 'many'; allowed: an integer from 1 to 100"),
        ("step,batchsize\n0,\n", "line 2: batchsize ''"),
        ("step,batchsize\n0,101\n", "line 2: batchsize '101'; allowed: an integer from 1 to 100"),
        ("step,batchsize\n0,4\n5,5\n\n3,4\n", "line 5: step 3 after 5; allowed: ascending rows"),
        ("step,batchsize\n0,4\n7,4\n0,5\n0,5\n", "line 5: step 0 after 0; allowed: ascending rows"),
        ("step,batchsize\n1,4\n", "line 2: the first step is 1; allowed: 0"),
        ("step,batchsize\n0,4,7\n", "line 2: 3 values; allowed: 2"),
        ("step,batchsize\n0,4\n4294967296,5\n", "line 3: step '4294967296'; allowed: an integer from 0 to 2147"),
        ("step,batchsize\n0,4\n2147483647,5\n0,6\n", "line 4: begins with step 2147483648; allowed: up to 2147"),
        ('step,batchsize\n0,"4\n', "is no CSV file"),
        ("time,GPUs\n0,4\n", "counts GPUs; allowed: with batch.per_device_batch_size"),
    ],
)
def test_bad_traces_are_refused_by_line(write, text, message):
    with pytest.raises(BadSetting, match=r"^batch\.trace: ") as error:
        read(write(text), largest=100)
    assert message in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(BadSetting, match="cannot be read"):
        read(str(tmp_path / "none.csv"))


# ---- availability ---------------------------------------------------------------------------------------

STAMPS = "timestamp,available GPUs\n2021-05-01 00:00:00,1\n2021-05-01 00:02:00,3\n2021-05-01 00:03:00,2\n"


@pytest.mark.parametrize(
    ("text", "per_device", "time_per_step", "sizes"),
    [
        ("index,GPUs\n0,4\n1,4\n2,8\n", 32, 1, [128, 128, 256]),
        # A step belongs to the latest row at its start; rows shorter than a step leave no trace. Steps
        # start at 100, 110, 120, 130, 140, 150.
        ("time,TPU_cores\n100.0,8\n130.5,16\n131,32\n150,8\n", 2, 10, [16, 16, 16, 16, 64, 16]),
        # Times count where there is an index, too.
        (",Time,TPU_cores\n0,1651064158,88\n1,1651064188,88\n2,1651064218,112\n", 1, 15, [88] * 4 + [112]),
        # Time without devices is left out; a trace that ends without devices lasts until then.
        ("time,GPUs\n0,0\n10,2\n30,0\n90,4\n100,1\n", 1, 10, [2, 2, 4, 1]),
        ("time,GPUs\n0,4\n50,0\n60,4\n100,0\n", 1, 10, [4] * 9),
        (STAMPS, 8, 60, [8, 8, 24, 16]),
        ("datetime,node_id,TPU_cores\n0,7,3\n", 2, 1, [6]),
        ("Time (s),available_workers\n0,3\n", 2, 1, [6]),
    ],
)
def test_availability_traces(write, text, per_device, time_per_step, sizes):
    assert sizes_of(read(write(text), per_device, time_per_step)) == sizes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,GPUs\n0,0\n", "has no row with any GPUs"),
        ("time,GPUs,TPUs\n0,1,1\n", "has the columns time, GPUs, TPUs"),
        ("time,GPUs\nnoon,1\n", "line 2: time 'noon'; allowed: a finite number or a timestamp"),
        ("time,GPUs\n0,1\nnan,1\n", "line 3: time 'nan'; allowed: a finite number"),
        ("time,GPUs\n5,1\n4,1\n", "line 3: time 4 after 5; allowed: ascending rows"),
        ("time,GPUs\n0,1\n1,26\n", "line 3: GPUs 26 x 4 is a batch of 104; allowed: up to 100"),
        ("time,GPUs\n0,4\n1e10,8\n", "line 3: begins with step 10000000000; allowed: up to 2147483647"),
        ("time,GPUs\n-1e308,0\n1e308,4\n1.1e308,4\n", "line 3: begins with step nan; allowed: up to 2147483647"),
        (SEED_TRACE, "per_device_batch_size: 4; allowed: None with"),  # it has no devices
    ],
)
def test_bad_availability_traces(write, text, message):
    with pytest.raises(BadSetting) as error:
        read(write(text), per_device_batch_size=4, largest=100)
    assert message in str(error.value)


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
    assert_one_line_error(refused, "ends with step 5; allowed: up to the run's last, 29, or batch.hold_last")
    result = run_script("train.py", *flags, "--config.batch.hold_last", env=on_devices(8))
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert "30 steps, batch 7 to 1,024, 2,473 examples, 1.93 epochs on 8 devices" in result.stdout
    assert ["2", "96", "1", "0.15", "96", f"{96 / 1280:.2f}"] in rows
    assert ["3", "7", "0", "or", "1", "0.01094", "192", "0.15"] in rows
    assert ["4", "1024", "8", "1.6", "199", "0.16"] in rows
    assert not (tmp_path / "run").exists()
