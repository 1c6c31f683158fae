import json
import math
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT, assert_one_line_error, make_folder, run_script

import model
from benchmarks import (
    accuracy,
    ceilings,
    growth,
    inputs,
    large_set,
    loop,
    memory,
    noise,
    ours,
    plot,
    scaling,
    step,
    stream,
    timing,
)
from benchmarks.peers import serve
from benchmarks.peers.flax_loop import FlaxLoop
from benchmarks.peers.minimal_loop import MinimalLoop
from largebatch.util import UserError

OPTIONS = ours.StepOptions(batch_size=64, micro_batch_size=4, dtype="float32", conv="dot")
PEER = {"batch_size": 64, "micro_batch_size": 0, "devices": 2, "dtype": "float32"}


@pytest.fixture
def small(monkeypatch):
    """Images of 16 x 16, few of them, and no minimum time."""
    monkeypatch.setattr(serve, "IMAGE_SHAPE", (16, 16, 3))
    monkeypatch.setattr(serve, "NUM_IMAGES", 256)
    monkeypatch.setattr(timing, "MIN_TIMED_SEC", 0.0)
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", 64)
    monkeypatch.setattr(ceilings, "COPY_BYTES", 2**16)


class FakeWork:
    """Adds `value` to a number in each round; broken, it does not move it or does not count."""

    def __init__(self, *, moves=True, counts=True, value=1.0):
        self.moves, self.counts, self.value = moves, counts, value
        self.number, self.updates = 0.0, 0

    def run(self, rounds):
        self.updates += rounds if self.counts else 1
        self.number += self.value * rounds if self.moves else 0.0

    def progress(self):
        return serve.Progress(self.updates, [[self.number]])


def fake(name, images=10, **broken):
    return timing.Contender(name, FakeWork(**broken), images)


# ---- the clock --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"moves": False}, "idle: parameters did not change"),
        ({"value": math.nan}, "idle: parameters did not change to finite numbers"),
        ({"counts": False}, "idle: 2 updates happened, [0-9]+ were timed"),
    ],
)
def test_work_that_did_not_happen_is_not_timed(broken, complaint):
    with pytest.raises(UserError, match=complaint):
        timing.interleave([fake("busy"), fake("idle", **broken)], repeats=2)


def test_contenders_take_turns(monkeypatch):
    monkeypatch.setattr(timing, "MIN_TIMED_SEC", 0.0)
    turns = []

    class Noted(FakeWork):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def run(self, rounds):
            turns.append(self.name)
            super().run(rounds)

    times = timing.interleave([timing.Contender(name, Noted(name)) for name in "ab"], repeats=3)
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
    assert turns == ["a", "a", "b", "b"] + ["a", "b"] * 3  # a warm-up and a measure of the length each


def test_ratio_pairs_the_repeats():
    times = {"ours": [1.0, 2.0, 4.0], "plain": [2.0, 2.0, 2.0]}
    assert timing.ratio(fake("ours", images=20), fake("plain", images=10), times) == {
        "median": 2.0,
        "min": 1.0,
        "max": 4.0,
    }


def test_the_best_configuration_is_found_and_what_fails_is_told(monkeypatch):
    monkeypatch.setattr(timing, "MIN_TIMED_SEC", 0.0)

    def build(choice):
        if choice["n"] == 3:
            raise ValueError("does not work")
        return fake("x", images=10 ** choice["n"])

    tried = timing.try_each([{"n": 1}, {"n": 6}, {"n": 3}], build)
    assert timing.fastest(tried) == [{"n": 6}, {"n": 1}]
    rates = {one.options["n"]: one.images_per_sec for one in tried}
    assert rates[3] is None
    assert rates[6] > rates[1] > 0
    with pytest.raises(UserError, match="no configuration works: does not work"):
        timing.try_each([{"n": 3}], build)


# ---- the peers --------------------------------------------------------------------------------------------


def share_of_equal(one, other):
    """Adam's first updates are signs: a gradient near zero may take either."""
    equal = [np.abs(a - b) < 1e-5 for a, b in zip(one, other, strict=True)]
    return sum(e.sum() for e in equal) / sum(e.size for e in equal)


@pytest.mark.full
@pytest.mark.parametrize("peer", [MinimalLoop, FlaxLoop])
def test_accumulating_peers_do_the_same_update(small, monkeypatch, peer):
    # A batch is the whole set, for devices of minimal.py order their own images.
    monkeypatch.setattr(serve, "NUM_IMAGES", PEER["batch_size"])
    before = peer(PEER).params()
    after = []
    for change in ({}, {"micro_batch_size": 8}, {"devices": 1, "micro_batch_size": 16}):
        ready = peer(PEER | change)
        ready.run(1)
        assert ready.updates() == 1
        after.append(ready.params())
    whole, accumulated, on_one_device = after
    assert share_of_equal(before, whole) < 0.5  # images of 16 x 16 leave one pixel to the last layer
    assert share_of_equal(whole, accumulated) > 0.98
    assert share_of_equal(whole, on_one_device) > 0.98
    with pytest.raises(ValueError, match="64 images are not whole micro-batches of 5"):
        peer(PEER | {"micro_batch_size": 5})


def test_torch_has_the_same_network_and_accumulates(small):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: benchmarks/peers/torch_requirements.txt")
    from benchmarks.peers import torch_step

    network = model.create_model("convnet", serve.NUM_CLASSES, "float32", "lax")
    images = np.random.default_rng(0).standard_normal((4, *serve.IMAGE_SHAPE)).astype(np.float32)
    theirs = torch_step.make_network()
    arrays = [p.detach().numpy() for p in theirs.parameters()]
    params, names = {}, [f"Conv_{i}" for i in range(4)] + ["Dense_0", "head"]
    for name, weight, bias in zip(names, arrays[::2], arrays[1::2], strict=True):
        kernel = weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T
        params[name] = {"kernel": kernel, "bias": bias}
    expected = network.apply({"params": params}, images)
    found = theirs(torch.from_numpy(images.transpose(0, 3, 1, 2)))
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-5)

    options = torch_step.DEFAULTS | {"batch_size": 64, "channels_last": True}
    after = []
    for size in (0, 16):
        ready = torch_step.TorchStep(options | {"micro_batch_size": size})
        ready.run(1)
        assert ready.updates() == 1
        after.append(ready.params())
    assert share_of_equal(*after) > 0.98


def test_a_padded_stem_of_torch_is_the_same_network(small):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: benchmarks/peers/torch_requirements.txt")
    from benchmarks.peers import torch_step

    options = torch_step.DEFAULTS | {"batch_size": 64, "channels_last": True}
    plain, padded = torch_step.TorchStep(options), torch_step.TorchStep(options | {"stem_channels": 8})
    assert padded.params()[0].shape[1] == 8
    with torch.no_grad():
        of_padded = iter(padded._network.parameters())
        for number, parameter in enumerate(plain._network.parameters()):
            target = next(of_padded)
            (target if number else target[:, :3]).copy_(parameter)
    before = padded.params()[0].copy()
    for ready in (plain, padded):
        ready.run(2)
    after = padded.params()
    np.testing.assert_array_equal(after[0][:, 3:], before[:, 3:])  # they see zeros
    assert not np.array_equal(after[0][:, :3], before[:, :3])
    assert share_of_equal(plain.params(), [after[0][:, :3], *after[1:]]) > 0.98


def test_batches_of_torch_have_each_image_once_a_pass(small):
    pytest.importorskip("torch", reason="PyTorch is not installed: benchmarks/peers/torch_requirements.txt")
    from benchmarks.peers import torch_step

    for batch_size, passes in ((64, 1), (96, 3), (512, 2)):
        ready = torch_step.TorchStep(torch_step.DEFAULTS | {"batch_size": batch_size})
        count = passes * serve.NUM_IMAGES // batch_size
        drawn = np.concatenate([np.asarray(ready._next_batch()) for _ in range(count)])
        in_passes = drawn.reshape(passes, -1)
        assert np.array_equal(np.sort(in_passes, axis=1), np.tile(np.arange(serve.NUM_IMAGES), (passes, 1)))


@pytest.mark.full
def test_a_child_answers_and_its_failures_are_one_line():
    with timing.Child("benchmarks.peers.minimal_loop") as child:
        contender = child.contender(
            "seed", {"batch_size": 8, "micro_batch_size": 4, "devices": 1, "dtype": "float32"}
        )
        before = contender.work.progress()
        contender.work.run(3)
        timing.check_happened("seed", before, contender.work.progress(), 3)
        with pytest.raises(
            UserError, match=r"benchmarks.peers.minimal_loop: ValueError: 8 images are not whole micro-batches of 5"
        ):
            child.ask(build=PEER | {"batch_size": 8, "micro_batch_size": 5})
    with (
        timing.Child("benchmarks.peers.nobody") as child,
        pytest.raises(UserError, match=r"nobody: ended with status 1"),
    ):
        child.ask(facts=True)


@pytest.mark.full
def test_a_peer_times_itself_by_hand():
    command = [sys.executable, "-m", "benchmarks.peers.flax_loop", "--batch_size", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout.removesuffix(" images/s\n").replace(",", "")) > 0


# ---- ours and the ceilings ----------------------------------------------------------------------------------


def test_our_step_does_its_work(small):
    contender = ours.our_step("ours", OPTIONS)
    timing.interleave([contender], repeats=1)
    images = 16 * 16 * 3
    state = 3 * 4 * 422_602  # parameters and two moments
    # 256 uint8 images over 8 devices.
    assert 32 * images < contender.bytes_per_device - state < 32 * images + 200


def test_ceilings_compute_what_they_claim(small):
    product = ceilings.matmul_ceiling("float32")
    assert product.flops == 8 * 2 * 64**3
    rng = np.random.default_rng(0)
    start, factor = rng.standard_normal((8, 64, 64), np.float32), rng.standard_normal((8, 64, 64), np.float32) / 8
    product.work.run(2)
    expected = (start[0] @ factor[0] @ factor[0]).ravel()
    np.testing.assert_allclose(product.work.progress().sums[0], [expected.sum(), np.abs(expected).sum()], rtol=1e-4)
    copy = ceilings.copy_ceiling()
    copy.work.run(3)
    assert copy.bytes == 2 * 2**16
    assert copy.work.progress() == serve.Progress(3, [[3.0 * 2**16 / 4 / 8] * 2])


def test_xla_counts_no_less_than_the_products_of_the_lax_network():
    counted = ours.count_by_xla("float32", "lax", 4)
    # XLA leaves out the taps over the padding and adds elementwise work.
    assert 0.9 * 88_677_888 < counted["flops"] < 1.2 * 88_677_888
    assert counted["bytes"] > 4 * 60_000


def test_one_all_reduce_is_all_that_crosses_devices(small):
    facts = ours.OurStep(OPTIONS).facts()
    sent = scaling.traffic(facts["collectives"], facts["params"], jax.device_count())
    assert sent["collectives"] == ["all-reduce"]
    assert sent["ring_formula"] == 2 * 7 / 8 * 4 * 422_602
    assert sent["bytes_per_update"] == pytest.approx(sent["ring_formula"], rel=0.001)


def test_collectives_are_read_from_the_text():
    text = """HloModule jit_update

ENTRY %main (x: f32[10,2]) -> s32[] {
  %all-reduce.1 = f32[10,2]{1,0} all-reduce(%x), channel_id=1
  %t = (f32[3]{0}, bf16[4]{0}) all-gather-start(%y, %z), dimensions={0}
  ROOT %r = s32[] add(%all-reduce.1, %q)
}
"""
    assert ours.collectives(text) == [{"kind": "all-reduce", "bytes": 80}, {"kind": "all-gather", "bytes": 20}]


# ---- the commands -------------------------------------------------------------------------------------------


def test_step_reports_every_contender(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ours, "our_step", lambda name, options: fake(name, images=options.batch_size))
    monkeypatch.setattr(step, "in_process", lambda name, _, options: fake(name, images=options["batch_size"]))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = step.bench_step(512, 2)
    names = [row["name"] for row in result["rows"]]
    assert "ours, float32, micro-batch 16 (auto)" in names
    assert "ours, bfloat16, micro-batch 16 (auto)" in names
    assert "ours, float32, lax convolution, batch 64" in names
    assert [name.split(",")[0] for name in names[-6:-3]].count("flax-style loop") >= 1
    assert names[-3:] == ["matrix product, float32", "matrix product, bfloat16", "memory copy"]
    assert result["notes"] == ["PyTorch is not installed: pip install -r benchmarks/peers/torch_requirements.txt"]
    assert all(ratios["bfloat16"]["median"] > 0 for ratios in result["ratios"].values())
    assert {name.split(",")[0] for name in result["ratios"]} == {"minimal.py", "flax-style loop"}
    assert next(row for row in result["rows"] if row["name"].startswith("matrix"))["share_of_ceiling"] == 1.0
    result = json.loads(json.dumps(result))
    step.print_step(result)
    assert "ours / minimal.py" in capsys.readouterr().out
    plot.plot_step(result, str(tmp_path / "step.png"))
    assert (tmp_path / "step.png").stat().st_size > 10_000


@pytest.mark.full
def test_scaling_over_batches_and_devices(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(scaling, "STRONG_BATCH", 32)
    monkeypatch.setattr(scaling, "WEAK_BATCH_PER_DEVICE", 16)
    result = scaling.bench_scaling(1, batch_sizes=(16,), device_counts=(2,), pods=((1, 2),))
    assert [row["batch_size"] for row in result["batch_sizes"]] == [16]
    (two,) = result["devices"]
    assert two["collectives"] == ["all-reduce"]
    assert two["bytes_per_update"] == pytest.approx(4 * 422_602, rel=0.05)
    assert two["weak_batch"] == 32
    assert result["hosts"][0]["images_per_sec"] > 0
    scaling.print_scaling(result)
    assert "1 hosts x 2 devices" in capsys.readouterr().out
    plot.plot_scaling(result, str(tmp_path / "scaling.png"))
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


@pytest.mark.full
def test_the_memory_estimate_is_near_what_the_compiler_says(capsys):
    result = memory.bench_memory([64])
    for row in result["rows"]:
        assert 0.8 < row["estimate"] / row["compiled"] < 1.25, row
        assert row["compiled"] > row["work_space"] > 64 * 4 * 61_440
    memory.print_memory(result)
    assert capsys.readouterr().out.count("estimated") == 2


@pytest.mark.full
def test_noise_is_measured_or_not(small, capsys):
    result = noise.bench_noise(64, 1)
    assert [row["dtype"] for row in result["rows"]] == ["float32", "bfloat16"]
    assert result["micro_batch_size"] == 8
    noise.print_noise(result)
    assert "8 devices, batch 64" in capsys.readouterr().out


def test_growth_is_near_the_one_pod_that_was_measured():
    # The seed system: 100 updates of all images in 1.5 s on a v3-32.
    assert growth.step_time(32)["total"] == pytest.approx(0.015, rel=0.15)
    parts = growth.step_time(64)
    assert parts["flops"] == pytest.approx(2700 * 88_677_888 / 61.5e12)
    # 1,690,408 bytes twice over four links of 82 GB/s, but for one chip's part; 2 x (sqrt(32) - 1) hops each way.
    assert parts["all_reduce"] == pytest.approx(2 * 31 / 32 * 1_690_408 / 328e9 + 4 * (math.sqrt(32) - 1) * 1e-6)
    rows = growth.bench_growth()["rows"]
    efficiency = [row["efficiency"] for row in rows]
    assert 0.99 < efficiency[0] < 1.0
    assert efficiency == sorted(efficiency, reverse=True)
    for limit in growth.bench_growth()["limits"]:
        assert growth.efficiency(limit["devices"], limit["batch_size"]) >= 0.5


@pytest.mark.full
def test_accuracy_trains_each_seed_once(tmp_path, session_cache):
    arguments = [f"--config.augment.cache_dir={session_cache}", "--config.dataset.num_examples=100"]
    arguments += ["--config.dataset.image_size=16", "--config.train.inner_steps=15", "--config.train.outer_steps=1"]
    # Every score reaches 0: ten images are too few to know what 15 updates learn on each machine.
    result = accuracy.bench_accuracy(arguments, 2, 0.0, str(tmp_path / "runs"))
    assert result["reached"] == 2
    assert result["to_target"]["steps_to_target"] == [15, 15]
    assert result["to_target"]["examples_to_target"] == [15 * 640] * 2
    stamp = (tmp_path / "runs" / "seed_0" / "summary.json").stat().st_mtime_ns
    assert accuracy.bench_accuracy(arguments, 2, 0.0, str(tmp_path / "runs")) == result
    assert (tmp_path / "runs" / "seed_0" / "summary.json").stat().st_mtime_ns == stamp
    accuracy.print_accuracy(result)
    with pytest.raises(UserError, match=r"seed 0: .*batch\.size"):
        accuracy.bench_accuracy([*arguments, "--config.batch.size=0"], 1, 0.01, str(tmp_path / "other"))


@pytest.mark.full
def test_input_measures_every_part(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inputs, "PLACINGS", 1)
    folder = make_folder(tmp_path / "images", {"a": 50, "b": 50})
    result = inputs.bench_input(str(folder))
    assert result["images"] == 100
    assert result["training_image_bytes_on_devices"] >= result["expected_training_image_bytes"] == 640 * 768
    assert result["start"]["warm"]["to_exit"] > result["start"]["warm"]["to_first_update"] > 0
    assert min(result["seconds"].values()) > 0
    inputs.print_input(result)
    assert "to first update, warm" in capsys.readouterr().out


@pytest.mark.full
def test_a_build_is_estimated_and_timed_beside_plain_decoding(tmp_path, capsys):
    result = large_set.bench_build(200, str(tmp_path), repeats=1)
    assert result["decoded_bytes"] == 200 * 96 * 96 * 3
    assert len(result["plain_images_per_sec"]) == 2
    assert min(result["ratio"], result["estimated_build_seconds"], result["peak_anonymous_bytes"]) > 0
    assert not list(tmp_path.iterdir())
    large_set.print_build(result)
    assert "the doctor said" in capsys.readouterr().out


@pytest.mark.full
def test_streamed_images_take_turns_with_resident_ones(tmp_path, capsys):
    folder = make_folder(tmp_path / "images", {str(label): 10 for label in range(10)})
    result = stream.bench_stream(str(folder), str(tmp_path / "cache"), batch_size=64, repeats=1)
    assert list(result["images_per_sec"]) == ["streamed", "on_device"]
    stream.print_stream(result)
    assert f"{result['ratio']['median']:.3f}x" in capsys.readouterr().out


def test_loop_reads_the_overhead_off_a_run(tmp_path):
    rows = [(10.0, 8.0, 1.0), (20.0, 9.0, 0.9), (40.0, 15.0, 1.0)]
    lines = [{"wall_sec": w, "train_sec": t, "eval_sec": e, "images_per_sec": 100 * w} for w, t, e in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = loop.bench_loop(str(tmp_path))
    assert result["overhead_median"] == pytest.approx((0.01 + 0.2) / 2)
    assert result["overhead_max"] == pytest.approx(0.2)
    assert result["evaluation_share"] == pytest.approx(1.9 / 30)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[0]))
    with pytest.raises(UserError, match="has 1 outer loops; at least 2"):
        loop.bench_loop(str(tmp_path))
    with pytest.raises(UserError, match=r"holds no readable metrics.jsonl"):
        loop.bench_loop(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["nothing"], ["give one command: step | input", "found nothing"], 2),
        (["input"], ["--path: not given"], 2),
        (["memory", "--", "--x"], ["only accuracy takes the arguments of train.py"], 2),
        (["growth", "--plot", "x.png"], ["--plot: growth draws nothing"], 2),
        (["loop", "--path", "nowhere"], ["nowhere holds no readable metrics.jsonl"], 1),
        (["growth", "--json", "no/where.json"], ["no/where.json"], 1),
    ],
)
def test_bad_input_is_one_line(arguments, words, code):
    assert_one_line_error(run_script("bench.py", *arguments), *words, code=code)


def test_growth_is_written_as_json(tmp_path):
    done = run_script("bench.py", "growth", "--json", tmp_path / "growth.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "growth.json").read_text()) == json.loads(json.dumps(growth.bench_growth()))
    assert done.stdout.count("\n") == 2 + len(growth.DEVICE_COUNTS) + 3 + len(growth.BATCH_SIZES)
