"""Runs on streamed images are those on resident ones, bit by bit; and which storage a run takes by itself."""

import contextlib
import json
import logging

import pytest
from conftest import ROOT, run_script, typed
from test_pod import pod_command, train_command
from test_resume import assert_same_run, flip, rows_of

import augment
import train
from build import ProgramCache
from largebatch.data import streaming
from largebatch.data.cache import Cache, images_file
from largebatch.hosts import memory, preemption
from largebatch.runs.lifecycle import Diverged
from largebatch.training import trainer
from largebatch.training.views import STORAGES
from largebatch.util import BadSetting, UserError
from plan import needed_bytes

# 681 examples, of 640 in an epoch. A buffer holds 8 of the 10 originals of a device, for one step of 64.
TRACE = (64, 40, 1, *[64] * 9)


@pytest.fixture
def config(small_config, monkeypatch):
    """Buffers as small as can be, and calls of up to four steps; batches that change and cross epochs."""
    monkeypatch.setattr(streaming, "BUFFER_BYTES", 0)
    small_config.batch.trace = TRACE
    small_config.train.inner_steps, small_config.train.outer_steps = 4, 3
    return small_config


def run(config, workdir, storage: str, **changed_fields) -> dict:
    """A run with some fields changed; returns its summary."""
    config = config.copy_and_resolve_references()
    config.augment.storage = storage
    with config.ignore_type():
        config.update_from_flattened_dict({name.replace("__", "."): v for name, v in changed_fields.items()})
    return train.train_and_evaluate(config, str(workdir))


# Synchronised at other steps than those after which a run stops.
LOCAL = {"sync__mode": "local", "sync__every": 5, "sync__optimizer_state": "keep", "augment__shift": 2}


@pytest.mark.full
@pytest.mark.parametrize("fields", [{}, LOCAL])
def test_a_streamed_run_is_the_resident_one_through_stops(config, tmp_path, monkeypatch, fields):
    """Calls are of one step, and every third ends with a signal."""
    run(config, tmp_path / "resident", "on_device", **fields)
    run(config, tmp_path / "streamed", "streamed", **fields)
    assert_same_run(tmp_path / "streamed", tmp_path / "resident")
    agree, calls = preemption.agree, []

    def agree_to_stop(vote=0):
        calls.append(1)
        return (15 if len(calls) % 3 == 0 else 0), agree(vote)[1]

    monkeypatch.setattr(trainer, "SECONDS_PER_CALL", 0.0)
    monkeypatch.setattr(preemption, "agree", agree_to_stop)
    for _ in range(20):
        with contextlib.suppress(preemption.Stopped):
            run(config, tmp_path / "cut", "streamed", **fields)
            break
    assert len(calls) == 12
    assert_same_run(tmp_path / "cut", tmp_path / "resident")


@pytest.mark.full
def test_streamed_on_two_hosts(tmp_path):
    """A chunk has two steps: buffers hold all 10 images of a device."""
    fields = {"train.inner_steps": 4, "batch.size": 40}
    for storage in ("on_device", "streamed"):
        command = train_command(tmp_path, storage, **fields | {"augment.storage": storage})
        result = run_script(*pod_command(command, 2, 4))
        assert result.returncode == 0, result.stderr
    assert_same_run(tmp_path / "streamed", tmp_path / "on_device")


# ---- damage ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_damaged_image_is_never_trained_on_and_a_restart_resumes(config, tmp_path, monkeypatch):
    """Each of 8 devices reads for every step; the first of them finds the damage when it reads for the sixth."""
    fields = {"batch__trace": None, "batch__size": 64, "train__outer_steps": 2, "augment__cache_dir": str(tmp_path)}
    fill, reads = Cache.fill, []

    def damage_and_read(cache, rows, out, num_threads=None):
        if len(rows) and rows.min() < cache.layout.counts["train"]:
            reads.append(rows)
            if len(reads) == 5 * 8 + 1:
                rows_behind = cache.layout.num_rows - 1 - int(rows.min())
                path = cache.folder / images_file(0)
                flip(path, path.stat().st_size - rows_behind * cache.layout.row_bytes - 1)
        fill(cache, rows, out, num_threads)

    with monkeypatch.context() as patch:
        patch.setattr(Cache, "fill", damage_and_read)
        with pytest.raises(UserError, match=r"its row \d+ does not match its CRC-32.*start again to build"):
            run(config, tmp_path / "cut", "streamed", **fields)
    assert [row["step"] for row in rows_of(tmp_path / "cut")] == [4]
    last_event = json.loads((tmp_path / "cut" / "events.jsonl").read_text().splitlines()[-1])
    assert (last_event["event"], last_event["step"]) == ("failed", 5)
    assert not list(tmp_path.glob("synthetic-*"))
    again = run(config, tmp_path / "cut", "streamed", **fields)
    whole = run(config, tmp_path / "whole", "streamed", **fields)
    assert again["params_sha256"] == whole["params_sha256"]
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")


@pytest.mark.full
def test_damage_on_one_host_stops_both_in_one_line(small_config, tmp_path):
    """Each host has a data cache of its own; host 1 finds the damage, host 0 would be in a collective by then."""
    hosts = [tmp_path / "0", tmp_path / "1"]
    for host in hosts:
        small_config.augment.cache_dir = str(host / "cache")
        augment.with_cache(typed(small_config), lambda cache: None)
    (images,) = hosts[1].glob(f"cache/*/{images_file(0)}")
    flip(images, images.stat().st_size - 1 - 20 * 16 * 16 * 3)
    fields = {"augment.cache_dir": "cache", "augment.storage": "streamed", "train.outer_steps": 2}
    command = " ".join(train_command(tmp_path, "run", **fields))
    both = f"cd {tmp_path}/$LARGEBATCH_HOST_INDEX && {command} >out 2>err"
    result = run_script(*pod_command(["sh", "-c", both], 2, 2), env={"PYTHONPATH": str(ROOT)})
    told = [(host / "err").read_text() for host in hosts]
    assert result.returncode == 1, told
    assert all("its row 79 does not match its CRC-32; no step was made with it" in text for text in told), told
    assert "Traceback" not in "".join(told)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert [len(list(host.glob("cache/synthetic-*"))) for host in hosts] == [1, 0]


# ---- which storage -----------------------------------------------------------------------------------------


def needs(config, storage: str) -> int:
    """Bytes on a device."""
    config = config.copy_and_resolve_references()
    config.augment.storage = storage
    placed = ProgramCache().load(typed(config))
    return sum(needed_bytes(placed.plan).values())


def test_auto_takes_what_fits_and_says_so(config, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "largebatch")
    config.batch.trace, config.batch.size = None, 8  # a buffer of one original
    sizes = {storage: needs(config, storage) for storage in STORAGES}
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    chosen = {None: "expanded"} | {size: storage for storage, size in sizes.items()}
    for free, storage in chosen.items():
        monkeypatch.setattr(memory, "available_bytes", lambda free=free: free)
        caplog.clear()
        plan = ProgramCache().load(typed(config)).plan
        assert plan.storage == storage
        assert (
            f"augment.storage: auto takes {storage}: expanded needs {sizes['expanded'] / 1e6:,.1f} MB"
            in caplog.text
        )
        told = "does not tell how much is free" if free is None else f"{free / 1e6:,.1f} MB are free"
        assert told in caplog.text
    monkeypatch.setattr(memory, "available_bytes", lambda: min(sizes.values()) - 1)
    with pytest.raises(BadSetting, match=r"in two buffers .* a smaller batch\.size, or more devices"):
        ProgramCache().load(typed(config))


def test_a_stream_is_placed_again_for_batches_that_it_is_too_small_for(config):
    config.batch.trace, config.augment.storage, config.batch.size = None, "streamed", 8
    programs = ProgramCache()
    small = programs.load(typed(config))
    config.seed = 1
    assert programs.load(typed(config)).data is small.data
    config.batch.size = 80
    large = programs.load(typed(config))
    assert large.data is not small.data
    assert large.plan.buffer_rows == 10 > small.plan.buffer_rows


@pytest.mark.full
def test_where_a_streamed_step_is_not_finite(config, tmp_path):
    told = []
    for storage in ("on_device", "streamed"):
        with pytest.raises(Diverged) as error:
            run(config, tmp_path / storage, storage, optimizer__learning_rate=1e30)
        told.append(str(error.value))
    assert told[0] == told[1]
    assert "first in" in told[0]
