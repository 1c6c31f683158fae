"""bench.py card: our step without a config, rows in their time, PyTorch at its best, and the whole command."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, assert_one_line_error, make_folder, on_devices, run_script, typed

import build
from benchmarks import card, card_recipes, card_steps, ours, timing
from benchmarks.card_sizes import SIZES
from benchmarks.card_workers import OURS, Workers
from benchmarks.peers import serve
from configs import default
from largebatch.data.cache import DatasetInfo, RowLayout
from largebatch.hardware.chips import Hardware
from largebatch.util import UserError
from plan import plan_run, possible_storages

# What a machine that is lent with JAX on it may lack.
MISSING = (
    *("ml_collections", "optuna", "sqlalchemy", "alembic", "tensorflow_datasets", "array_record"),
    *("orbax", "safetensors", "tifffile", "imagecodecs", "PIL", "tensorboardX", "matplotlib", "torch"),
)
BLOCK = f"""
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {MISSING!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")

sys.meta_path.insert(0, Refuse())
"""
CARDS = {
    "two cores": Hardware("cpu", "cpu", 2),
    "an H200": Hardware("gpu", "NVIDIA H200", 1),
    "a v3-32": Hardware("tpu", "TPU v3", 32),
}


@pytest.fixture
def without_packages(tmp_path) -> dict[str, str]:
    """An environment in which no process can import what is MISSING."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BLOCK)
    return on_devices(1) | {"PYTHONPATH": str(tmp_path / "site")}


def numbers_in(value):
    """All numbers in plain JSON."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for one in value for number in numbers_in(one)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


# ---- our step without a config ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", CARDS)
@pytest.mark.parametrize("batch_size", [64, 512, 21_600, 172_800])
def test_auto_is_what_a_config_makes_of_it(where, batch_size):
    hardware, config = CARDS[where], default.get_config()
    config.batch.size = "full" if batch_size == 172_800 else batch_size
    config.model.name, config.model.dtype = "convnet", "bfloat16"
    layout = RowLayout.of({"train": 21_600, "val": 0, "test": 0}, serve.IMAGE_SHAPE, np.dtype(np.uint8))
    data = DatasetInfo(layout, serve.NUM_CLASSES, mean=(serve.MEAN,) * 3, std=(serve.STD,) * 3)
    expected = plan_run(typed(config), data, hardware)
    every = expected.micro_batches.noise.every if expected.micro_batches.noise else 0
    options = ours.StepOptions(batch_size, "auto", "bfloat16", "auto", "auto", num_images=172_800)
    found = ours.resolve(options, hardware)
    assert (found.micro_batch_size, found.noise_every) == (expected.grouping.micro_batch_size, every)
    assert found.conv == expected.network.conv
    assert found.storage == possible_storages(typed(config))[0]


def test_the_step_is_that_of_a_config():
    config = default.get_config()
    config.optimizer.name, config.model.name, config.batch.size = "adam", "convnet", 64
    layout = RowLayout.of({"train": 512, "val": 0, "test": 0}, serve.IMAGE_SHAPE, np.dtype(np.uint8))
    data = DatasetInfo(layout, serve.NUM_CLASSES, mean=(serve.MEAN,) * 3, std=(serve.STD,) * 3)
    hardware = Hardware.here()
    expected = build.make_step(plan_run(typed(config), data, hardware))
    step = ours.OurStep(ours.StepOptions(64, "auto", "float32", "auto"))._make_step()
    others = [
        field.name for field in dataclasses.fields(step) if field.name not in ("loss_fn", "optimizer", "reader")
    ]
    assert {name: getattr(step, name) for name in others} == {name: getattr(expected, name) for name in others}
    for name in ("sharding", "grouping", "single"):
        assert getattr(step.reader, name) == getattr(expected.reader, name), name


# ---- rows in their time -----------------------------------------------------------------------------------


def make_card(tmp_path, seconds: float) -> card.Card:
    return card.Card({"devices": 1, "device_kind": "x"}, time.monotonic() + seconds, tmp_path / "card.json")


def written(tmp_path) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads((tmp_path / "card.json").read_text())["rows"]}


def test_a_row_that_fails_has_its_error_and_the_next_one_goes_on(tmp_path, capsys):
    def fail(deadline):
        raise UserError("out of memory:\n  tried 9 GB" + "!" * 999)

    def measure(deadline):
        assert written(tmp_path)["bad"]["status"] == "failed"  # it is on disk already
        return {"ms_per_update": 1.0}

    rows = [card.Row("ceilings", "bad", fail), card.Row("ceilings", "good", measure)]
    card.measure_all(make_card(tmp_path, 60), rows)
    found = written(tmp_path)
    assert found["bad"]["error"].startswith("out of memory: tried 9 GB!")
    assert "\n" not in found["bad"]["error"]
    assert len(found["bad"]["error"]) == card.MAX_ERROR
    assert numbers_in(found["bad"]) == [found["bad"]["took_sec"]]
    assert found["good"] == {**found["good"], "status": "measured", "ms_per_update": 1.0}
    assert "ceilings  bad" in capsys.readouterr().out


def test_a_row_without_time_waits_and_is_then_skipped_with_the_reason(tmp_path):
    deadlines, begin = {}, time.monotonic()

    def measure(name):
        def note(deadline):
            deadlines[name] = deadline - begin
            return {}

        return note

    rows = [
        card.Row("ceilings", "long", measure("long"), least_sec=50),  # more than a tenth of 100 s
        card.Row("step", "half", measure("half"), least_sec=5),
        card.Row("profile", "never", measure("never"), least_sec=200),
        card.Row("recipes", "no data", skip="--path is not given"),
    ]
    card.measure_all(make_card(tmp_path, 100), rows)
    found = written(tmp_path)
    assert list(found) == ["long", "half", "no data", "never"]  # by section
    assert {name: row["status"] for name, row in found.items()} == {
        "long": "measured",  # at the end, when everything else had its turn
        "half": "measured",
        "no data": "skipped",
        "never": "skipped",
    }
    assert list(deadlines) == ["half", "long"]
    assert deadlines == {"half": pytest.approx(20, abs=1), "long": pytest.approx(50, abs=1)}
    assert found["no data"]["reason"] == "--path is not given"
    assert found["never"]["reason"].startswith("needs about 200 s, ")


def test_a_process_that_does_not_answer_is_killed_and_started_anew():
    with Workers() as workers:
        child = workers.child(OURS, time.monotonic() + 0.1)
        with pytest.raises(UserError, match="card_child: did not answer in the time that was left"):
            child.ask(facts=True)
        assert not child.is_running
        other = workers.child(OURS, time.monotonic() + 60)
        assert other is not child
        with pytest.raises(UserError, match="KeyError: 'nothing'"):
            other.ask(build={"kind": "nothing"})


@pytest.mark.parametrize("batch_size", [172_800, 512])
def test_variants_are_all_that_a_card_can_do_but_what_was_chosen(batch_size):
    machine = {"platform": "gpu", "device_kind": "NVIDIA H200", "devices": 1}
    bench = card_steps.Bench(None, SIZES["card"], "gpu", "bfloat16")
    chosen = card_steps.chosen(bench, batch_size, machine)
    assert chosen["storage"] == "expanded"
    found = card_steps.variants_at(batch_size, SIZES["card"], "gpu", chosen)
    names = [name for name, _, _ in found]
    assert "storage expanded" not in names
    assert "storage on_device" in names
    assert "storage streamed" not in names
    assert "convolution dot" not in names
    assert {f"convolution {name}" for name in card_steps.CONVS} - set(names) == {
        "convolution dot",
        f"convolution {chosen['conv']}",
    }
    assert ("micro-batch 2,700" in names) == (batch_size == 172_800)
    assert f"micro-batch {chosen['micro_batch_size']:,}" not in names
    assert ("--xla_gpu_enable_command_buffer=+WHILE", {}, "--xla_gpu_enable_command_buffer=+WHILE") in found


# ---- PyTorch ----------------------------------------------------------------------------------------------


class FakeTorch:
    """A process that builds what it is told; a padded stem is fastest, and one micro-batch does not fit."""

    is_running = True

    def __init__(self, device, compiles):
        self.device, self.compiles = device, compiles

    def contender(self, name, options):
        if options["compile"] and not self.compiles:
            raise UserError("torch_step: no compiler")
        if options["micro_batch_size"] == 43_200:
            raise UserError("torch_step: OutOfMemoryError")
        work = FakeWork(self.device, 1.0 - 0.1 * (options.get("stem_channels") == 8) - 0.2 * options["compile"])
        return timing.Contender(name, work, options["batch_size"])


class FakeWork:
    def __init__(self, device, seconds):
        self.device, self.seconds = device, seconds

    def run(self, updates):
        """Takes no time."""

    def facts(self):
        return {"device": self.device}


@pytest.fixture
def fake_torch(monkeypatch):
    """A bench of a card whose PyTorch is fake, and whose clock asks it."""

    def make(device="cuda", *, compiles=True):
        class FakeWorkers:
            def child(self, module, deadline):
                return FakeTorch(device, compiles)

        monkeypatch.setattr(card_steps.Bench, "time", lambda self, *all_: {c.name: [c.work.seconds] for c in all_})
        return card_steps.Bench(FakeWorkers(), SIZES["card"], "gpu", "bfloat16")

    return make


def test_pytorch_gets_the_same_padded_stem_and_its_best_is_found(fake_torch):
    tried = []
    best = card_steps.best_torch(fake_torch(), 172_800, time.monotonic() + 60, tried)
    assert json.loads(best.name)["stem_channels"] == 8
    assert [one["options"]["micro_batch_size"] for one in tried if "error" in one] == [43_200]
    assert [one["options"]["stem_channels"] for one in tried[-2:]] == [4, 8]
    assert all(one["options"]["channels_last"] and one["options"]["autocast"] for one in tried)
    small = card_steps.torch_choices(fake_torch(), 512)
    assert [one["mode"] for one in small] == ["reduce-overhead", ""]


def test_pytorch_without_a_compiler_runs_without(fake_torch):
    tried = []
    best = card_steps.best_torch(fake_torch(compiles=False), 172_800, time.monotonic() + 60, tried)
    assert not json.loads(best.name)["compile"]
    assert [one["options"]["compile"] for one in tried] == [True, True, True, False, False, False]
    tiny = dataclasses.replace(fake_torch(compiles=False), size=SIZES["tiny"])
    too_large = dataclasses.replace(tiny.size, torch_micro_batch_sizes={64: (43_200,)})
    with pytest.raises(UserError, match=r"PyTorch: nothing works: torch_step: OutOfMemoryError"):
        card_steps.best_torch(dataclasses.replace(tiny, size=too_large), 64, time.monotonic() + 60, [])


def test_pytorch_without_the_card_is_no_peer(fake_torch):
    with pytest.raises(UserError, match="PyTorch finds no card where JAX finds one"):
        card_steps.best_torch(fake_torch("cpu"), 172_800, time.monotonic() + 60, [])


def test_pytorch_keeps_what_it_was_tried_with_when_its_time_is_over():
    slow, fast = ({"ms": {"median": ms}, "images_per_sec": 1e3 / ms} for ms in (4.0, 2.0))
    tried = [slow, {"error": "out of memory"}, fast]
    found = card_steps.best_tried({"images_per_sec": 250.0}, tried)
    assert found == {"pytorch": fast | {"tried": tried}, "ratio": {"median": 0.5}}
    assert card_steps.best_tried({"images_per_sec": 250.0}, tried[1:2]) == {"pytorch": None}


# ---- the whole command ------------------------------------------------------------------------------------


def test_the_rows_of_the_step_import_nothing_that_may_be_missing(without_packages):
    modules = "benchmarks.card, benchmarks.card_child, bench"
    done = run_script("-c", f"import {modules}; import augment", env=without_packages)
    assert done.returncode == 1
    assert (
        done.stderr.strip().splitlines()[-1] == "ModuleNotFoundError: No module named 'ml_collections'"
    )  # of augment
    done = run_script("-c", f"import {modules}", env=without_packages)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_a_machine_with_jax_alone_is_measured(without_packages, tmp_path):
    data = make_folder(tmp_path / "images", {"a": 30, "b": 30})
    arguments = ["--size", "tiny", "--minutes", "10", "--json", tmp_path / "card.json", "--path", data]
    done = run_script("bench.py", "card", *arguments, env=without_packages, timeout=600)
    assert done.returncode == 0, done.stderr
    result, rows = json.loads((tmp_path / "card.json").read_text()), written(tmp_path)
    assert (result["platform"], result["devices"]) == ("cpu", 1)
    failed = {name: row["error"] for name, row in rows.items() if row["status"] == "failed"}
    assert not failed
    by_section = {section: [row for row in rows.values() if row["section"] == section] for section in card.SHARES}
    for section in ("ceilings", "step", "variants", "start", "profile"):
        assert by_section[section], section
        for row in by_section[section]:
            assert row["status"] == "measured", row
            figures = [numbers_in(row.get(name, {})) for name in ("ms", "rate", "ours", "auto", "ratio", "range")]
            assert all(math.isfinite(number) and number > 0 for numbers in figures for number in numbers), row
    assert rows["memory copy"]["unit"] == "GB/s"
    step = rows["step at 64"]
    assert step["ours"]["images_per_sec"] == pytest.approx(64e3 / step["ours"]["ms"]["median"])
    assert step["ours"]["options"]["micro_batch_size"] == 16
    assert (step["pytorch"], step["note"]) == (None, card_steps.NO_TORCH)
    assert rows["micro-batch 8 at 64"]["ours"]["options"]["micro_batch_size"] == 8
    flags = rows["--xla_cpu_multi_thread_eigen=false at 64"]["ours"]["options"]["xla_flags"]
    assert flags == "--xla_cpu_multi_thread_eigen=false"
    start = rows["start at 64"]
    assert min(start["cold_sec"], start["warm_sec"]) > 0
    after_cold, after_warm = start["cached_programs"]
    assert after_cold == after_warm > 0  # what it did not find it would have added
    profile = rows["kernels at 64"]
    assert profile["ms_per_update"] == pytest.approx(sum(one["ms"] for one in profile["kernels"]))
    assert rows["eurosat_fast seed 0"]["reason"].startswith("train.py needs ml_collections, PIL, tifffile, orbax")
    assert rows["cifar10_speedrun seed 0"]["reason"] == "--cifar10 is not given"


@pytest.mark.full
def test_a_recipe_is_trained_and_its_figures_are_those_of_the_run(tmp_path):
    data = make_folder(tmp_path / "images", {str(label): 60 for label in range(3)})
    row = card_recipes.train(SIZES["tiny"], "eurosat_muon", 1, str(data), str(tmp_path), time.monotonic() + 300)
    summary = json.loads((tmp_path / "eurosat_muon_1" / "summary.json").read_text())
    assert (row["updates"], row["images"], row["batch_size"]) == (2, 32, 16)
    assert row["final_score"] == summary["final_score"]
    assert row["total_sec"] > row["train_sec"] > 0
    assert row["images_per_sec"] == pytest.approx(32 / summary["train_sec"])
    with pytest.raises(UserError, match="did not end in the time that was left"):
        card_recipes.train(SIZES["tiny"], "eurosat_muon", 2, str(data), str(tmp_path), time.monotonic())
    with pytest.raises(UserError, match=r"error: .*nowhere"):
        card_recipes.train(SIZES["tiny"], "eurosat_muon", 3, "nowhere", str(tmp_path), time.monotonic() + 300)


@pytest.mark.full
def test_what_was_measured_survives_a_kill(tmp_path):
    path = tmp_path / "card.json"
    command = [sys.executable, "bench.py", "card", "--size", "tiny", "--json", str(path)]
    process = subprocess.Popen(command, cwd=ROOT, env=on_devices(1), stdout=subprocess.DEVNULL)
    try:
        while len(json.loads(path.read_text())["rows"] if path.exists() else []) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    rows = list(written(tmp_path).values())
    assert [row["status"] for row in rows[:2]] == ["measured", "measured"]
    assert len(rows) < 8
    deadline = time.monotonic() + 60
    while any(parent_gone(path) for path in Path("/proc").glob("[0-9]*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(parent_gone(path) for path in Path("/proc").glob("[0-9]*"))


def parent_gone(process: Path) -> bool:
    """Whether this is a process of a card that has lost its parent."""
    try:
        is_child = OURS.encode() in (process / "cmdline").read_bytes()
        return (
            is_child and process.stat().st_uid == os.getuid() and "\nPPid:\t1\n" in (process / "status").read_text()
        )
    except OSError:
        return False


def test_bad_input_is_one_line(tmp_path):
    assert_one_line_error(run_script("bench.py", "card", "--json", "no/where.json"), "no/", code=1)
    assert_one_line_error(run_script("bench.py", "card", "--size", "large"), "size", code=2)
    (tmp_path / "other.json").write_text('{"command": "step"}')
    done = run_script("bench.py", "measured", "--path", tmp_path / "other.json")
    assert_one_line_error(done, "allowed: a file that bench.py card --json wrote", code=1)
