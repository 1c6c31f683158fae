"""bench.py: contenders that take turns and are caught idle, peers that do our step, and every command, small."""

import json
import math
import time

import jax
import numpy as np
import pytest
from conftest import assert_one_line_error, make_folder, run_script
from machines import QUICKLY

import model
from benchmarks import card, inputs, ours, scaling, timing
from benchmarks import compile as starts
from benchmarks.card import Measurement
from benchmarks.peers.minimal_loop import MinimalLoop
from largebatch.training.costs import bytes_beside_images
from largebatch.util import UserError
from plan import state_shapes


@pytest.fixture
def small(monkeypatch):
    """Images of 16 x 16, few of them."""
    monkeypatch.setattr(timing, "IMAGE_SHAPE", (16, 16, 3))
    monkeypatch.setattr(timing, "NUM_IMAGES", 256)


@pytest.fixture
def one_device(monkeypatch):
    """Give children one device and a quick compiler, and turns no least time."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setenv("XLA_FLAGS", QUICKLY["XLA_FLAGS"])
    monkeypatch.setattr(timing, "MIN_TIMED_SEC", 0.0)


def fake(name, *, counts=True, value=1.0, seconds=1.0, turns=None):
    """A contender that adds `value` to a number in each step; broken, it does not move it or does not count."""
    done = {"seconds": 0.0, "steps": 0, "sums": [[0.0]]}

    def ask(run):
        (turns if turns is not None else []).append(name)
        done["steps"] += run if counts else 1
        done["sums"] = [[done["sums"][0][0] + value * run]]
        return {**done, "seconds": seconds * run}

    return timing.Contender(name, {"batch_size": 10}, ask)


# ---- the clock --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"value": 0.0}, "idle: parameters did not change"),
        ({"value": math.nan}, "idle: parameters did not change to finite numbers"),
        ({"counts": False, "seconds": 0.1}, "idle: 1 steps happened, 5 were timed"),
    ],
)
def test_work_that_did_not_happen_is_not_timed(broken, complaint):
    with pytest.raises(UserError, match=complaint):
        timing.interleave([fake("busy"), fake("idle", **broken)], turns=2)


def test_contenders_take_turns_and_ratios_pair_them():
    order = []
    a, b = fake("a", turns=order), fake("b", seconds=0.25, turns=order)
    timing.interleave([a, b], turns=3)
    assert order == ["a", "a", "b", "b"] + ["a", "b"] * 3  # a warm-up and a measure of the length each
    assert b.figures()["images_per_sec"] == {"median": 40, "min": 40, "max": 40}
    a.seconds, b.seconds = [1.0, 2.0, 4.0], [2.0, 2.0, 2.0]
    assert a.ratio(b) == {"median": 1.0, "min": 0.5, "max": 2.0}


def test_the_best_options_are_found_and_what_fails_is_told():
    class FakeChild:
        def build(self, name, options):
            if options["n"] == 3:
                raise UserError("does not work")
            contender = fake(name, seconds=1 / options["n"])
            contender.options = options | {"batch_size": 10}
            return contender

    choices = [{"n": 3}, {"n": 6}, {"n": 1}]
    best, tried = timing.try_each(FakeChild(), choices, math.inf)
    assert tried[0] == {"options": {"n": 3}, "error": "does not work"}
    assert (best.options["n"], best.name) == (6, "first")  # the slower one was built in the other place
    assert timing.try_each(FakeChild(), choices, -math.inf) == (None, tried[:1])  # no time for another


TINY = """
class build:
    def __init__(self, options):
        self.count, self.size = 0, options["batch_size"]

    def run(self, count):
        self.count += count

    def steps(self):
        return self.count

    def params(self):
        return [self.count]
"""


def test_a_child_answers_and_its_failures_are_one_line(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)
    with timing.Child("tiny", PYTHONPATH=str(tmp_path)) as child:
        contender = child.build("tiny", {"batch_size": 8})
        assert contender.run(1) > 0
        assert contender.run(3) > 0
        with pytest.raises(UserError, match="tiny: KeyError: 'batch_size'"):
            child.build("none", {})
        child._process.kill()
        with pytest.raises(UserError, match="tiny: ended with status -9"):
            contender.run(1)


# ---- contenders -------------------------------------------------------------------------------------------


def share_of_equal(one, other):
    """Return the share of equal numbers: Adam's first steps are signs, and a gradient near zero may take either."""
    equal = [np.abs(a - b) < 1e-5 for a, b in zip(one, other, strict=True)]
    return sum(e.sum() for e in equal) / sum(e.size for e in equal)


def after_a_step(ready):
    """Parameters after one step."""
    ready.run(1)
    assert ready.steps() == 1
    return ready.params()


@pytest.mark.full
def test_the_loop_of_minimal_takes_adams_step(small):
    """Its first step moves each parameter by the learning rate; tests/test_minimal.py holds what gradients are."""
    ready = MinimalLoop({"batch_size": 64, "devices": 2, "micro_batch_size": 8})
    before, after = ready.params(), after_a_step(ready)
    moves = np.concatenate([np.abs(new - old).ravel() for old, new in zip(before, after, strict=True)])
    assert (moves > 0).mean() > 0.5  # images of 16 x 16 leave one pixel at the end, so some have no gradient
    assert np.median(moves[moves > 0]) == pytest.approx(timing.LEARNING_RATE, rel=0.01)
    assert moves.max() < 1.01 * timing.LEARNING_RATE


def test_torch_has_the_same_network_and_accumulates(small):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: benchmarks/peers/torch_requirements.txt")
    from benchmarks.peers import torch_step

    network = model.create_model("convnet", timing.NUM_CLASSES, "float32", "lax")
    images = np.random.default_rng(0).standard_normal((4, *timing.IMAGE_SHAPE)).astype(np.float32)
    theirs = torch_step.make_network()
    arrays = [p.detach().numpy() for p in theirs.parameters()]
    params, names = {}, [f"Conv_{i}" for i in range(4)] + ["Dense_0", "head"]
    for name, weight, bias in zip(names, arrays[::2], arrays[1::2], strict=True):
        kernel = weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T
        params[name] = {"kernel": kernel, "bias": bias}
    expected = network.apply({"params": params}, images)
    found = theirs(torch.from_numpy(images.transpose(0, 3, 1, 2)))
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-5)
    options = {"batch_size": 64, "channels_last": True}
    whole, accumulated = (torch_step.TorchStep(options | {"micro_batch_size": size}) for size in (0, 16))
    assert share_of_equal(after_a_step(whole), after_a_step(accumulated)) > 0.98


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_memory_estimate_is_near_what_the_compiler_says(dtype):
    """The estimate by which a run is refused, and what the compiled program allocates on one device."""
    ready = ours.build({"batch_size": 4096, "batch.micro_batch_size": 64, "model.dtype": dtype})
    plan = ready.plan
    beside = bytes_beside_images(plan.network, state_shapes(plan), plan.image_shape, 64, jax.default_backend())
    data = sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(ready._data.arrays))
    estimate, memory = data + sum(beside.values()), ready.compiled().memory
    assert 0.8 < estimate / (sum(memory.values()) - memory["code"]) < 1.25
    assert memory["temporaries"] > 64 * 4 * 61_440


# ---- kernels ----------------------------------------------------------------------------------------------


def event(line, name, begin, length, pid=1, **arguments):
    return {"ph": "X", "pid": pid, "tid": line, "name": name, "ts": begin, "dur": length, "args": arguments}


def test_kernels_are_those_of_the_streams_without_what_is_within_them():
    def named(kind, name, line=None, pid=1):
        return {"ph": "M", "pid": pid, "tid": line, "name": kind, "args": {"name": name}}

    events = [
        named("process_name", "/device:GPU:0"),
        named("process_name", "/host:CPU", pid=2),
        named("thread_name", "Stream #13(Compute)", 7),
        named("thread_name", "XLA Modules", 8),
        event(7, "conv", 0, 10, hlo_op="conv.1"),
        event(7, "conv", 20, 14, hlo_op="conv.1"),
        event(8, "jit_inner_loop", 0, 100),
        event(7, "launch", 0, 1000, pid=2, hlo_op="conv.1"),
    ]
    assert [one["ts"] for one in ours.kernel_events(events)] == [0, 20]
    on_cpu = [event(1, "while", 0, 100, hlo_op="while"), event(1, "dot", 10, 30, hlo_op="dot"), event(1, "x", 0, 9)]
    assert ours.kernel_events(on_cpu) == on_cpu[:2]
    assert [own for _, own in ours.own_times(on_cpu[:2])] == [70, 30]


# ---- the commands -------------------------------------------------------------------------------------------


@pytest.mark.full
def test_scaling_over_devices(monkeypatch, one_device, capsys):
    monkeypatch.setattr(scaling, "STRONG_BATCH", 32)
    monkeypatch.setattr(scaling, "WEAK_BATCH_PER_DEVICE", 16)
    result = scaling.bench_scaling(1, counts=(2,))
    (two,) = result["rows"]
    assert two["collectives"] == ["all-reduce"]
    assert two["ring_formula"] == 2 * 1 / 2 * 4 * 422_602
    assert two["bytes_per_step"] == pytest.approx(two["ring_formula"], rel=0.001)
    assert (two["strong"]["batch_size"], two["weak"]["batch_size"]) == (32, 32)
    scaling.print_scaling(result)
    assert "all-reduce, 1.69" in capsys.readouterr().out


@pytest.mark.full
def test_input_and_stream_take_images_to_the_devices(tmp_path, one_device, capsys):
    folder = str(make_folder(tmp_path / "images", {"a": 50, "b": 50}))
    result = inputs.bench_input(folder)
    assert result["images"] == 100
    assert result["bytes_on_devices"] >= result["expected_bytes"] == 640 * 768
    assert min(result["seconds"]["cold"].values()) > 0
    inputs.print_input(result)
    assert "images, " in capsys.readouterr().out
    result = inputs.bench_stream(folder, str(tmp_path / "cache"), batch_size=64, repeats=1)
    assert list(result["images_per_sec"]) == ["streamed", "on_device"]
    inputs.print_stream(result)
    assert f"{result['ratio']['median']:.3f}x" in capsys.readouterr().out


def rows_of(path) -> list[dict]:
    """Return the rows that are written so far."""
    return json.loads(path.read_text())["rows"]


def test_each_row_is_written_before_the_next_and_failures_are_rows(tmp_path, monkeypatch, capsys):
    path = tmp_path / "card.json"

    def measurements(size):
        yield Measurement("no data", ("train.py",), 1, 9, data=card.EUROSAT)
        (row,) = rows_of(path)
        assert (row["status"], row["reason"]) == ("skipped", "--data: no EuroSAT.zip there")
        yield Measurement("no time", ("scaling",), 200, 300)
        assert rows_of(path)[-1]["reason"].startswith("needs 200 s, ")
        yield Measurement("fails", ("nothing",), 1, 60)
        assert rows_of(path)[-1]["error"].startswith("bench.py: give one command")
        yield Measurement("is killed", ("scaling",), 1, 0.2)

    monkeypatch.setattr(card, "measurements", measurements)
    started = time.monotonic()
    result = card.bench_card(2, "tiny", str(path), str(tmp_path))
    assert time.monotonic() - started < 60
    assert rows_of(path) == result["rows"]
    assert result["rows"][-1]["error"] == "killed after 0 s"
    card.print_card(result)
    assert capsys.readouterr().out.endswith("0 measured, 2 skipped, 2 failed\n")


def test_the_command_names_all_that_it_has_no_time_for(tmp_path):
    path = tmp_path / "card.json"
    done = run_script("bench.py", "card", "--minutes=0", f"--json={path}", f"--data={tmp_path}")
    assert done.returncode == 0, done.stderr
    names = [row["name"] for row in rows_of(path)]
    assert names[0] == "step at 172800"
    assert len(set(names)) == len(names)
    assert {row["status"] for row in rows_of(path)} == {"skipped"}


@pytest.mark.full
def test_figures_are_those_of_the_measured_processes(tmp_path, one_device, capsys):
    make_folder(tmp_path / card.EUROSAT, {str(label): 60 for label in range(3)})
    chosen = ("kernels at 16", "eurosat_fast seed 0")
    found = {one.name: one for one in card.measurements("tiny")}
    rows = [card.measure(found[name], 600, tmp_path / name, tmp_path) | {"name": name} for name in chosen]
    assert not [row["error"] for row in rows if row["status"] == "failed"]
    kernels, recipe = rows
    assert 0 < sum(one["ms"] for one in kernels["kernels"]) <= 1.001 * kernels["ms_per_step"]
    assert recipe["summary"] == json.loads((tmp_path / chosen[-1] / "summary.json").read_text())
    assert recipe["took_sec"] > recipe["summary"]["train_sec"] > 0
    assert "144 training images" in recipe["printed"]
    card.print_card({"rows": rows})
    assert "2 measured, 0 skipped, 0 failed" in capsys.readouterr().out


@pytest.mark.full
def test_a_start_with_filled_caches_compiles_less(one_device, monkeypatch, capsys):
    small = [option.replace("=1000", "=100").replace("=64", "=16") for option in starts.IMAGES]
    monkeypatch.setattr(starts, "IMAGES", small)
    result = starts.bench_compile("default")
    cold, warm = result["starts"]
    assert 0 < warm["compile"] < cold["compile"] < cold["to_first_step"] < cold["to_exit"]
    starts.print_compile(result)
    assert "default, warm caches: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["nothing"], ["give one command: step | card", "found nothing"], 2),
        (["input"], ["--path: not given"], 2),
        (["compile", "--json", "no/where.json"], ["no/where.json"], 1),
    ],
)
def test_bad_input_is_one_line(arguments, words, code):
    assert_one_line_error(run_script("bench.py", *arguments), *words, code=code)
