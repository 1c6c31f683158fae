import json
import math
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT, assert_one_line_error, make_folder, run_script

import model
from benchmarks import ceilings, inputs, ours, scaling, step, stream, timing
from benchmarks.peers import serve
from benchmarks.peers.flax_loop import FlaxLoop
from benchmarks.peers.minimal_loop import MinimalLoop
from largebatch.training.costs import bytes_beside_images
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


def test_step_reports_every_contender(small, monkeypatch, capsys):
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


@pytest.mark.full
def test_scaling_over_batches_and_devices(small, monkeypatch, capsys):
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


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_memory_estimate_is_near_what_the_compiler_says(dtype):
    """The estimate by which a run is refused, and what the compiled program allocates on one device."""
    compiled_step = ours.OurStep(ours.StepOptions(4096, 64, dtype, ours.auto_conv()))
    state = compiled_step.state_shapes()
    beside = bytes_beside_images(compiled_step.network, state, serve.IMAGE_SHAPE, 64, jax.default_backend())
    estimate = compiled_step.data_bytes() + sum(beside.values())
    analysis = compiled_step.compiled().memory_analysis()
    allocated = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    allocated += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    assert 0.8 < estimate / allocated < 1.25
    assert analysis.temp_size_in_bytes > 64 * 4 * 61_440


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
def test_streamed_images_take_turns_with_resident_ones(tmp_path, capsys):
    folder = make_folder(tmp_path / "images", {str(label): 10 for label in range(10)})
    result = stream.bench_stream(str(folder), str(tmp_path / "cache"), batch_size=64, repeats=1)
    assert list(result["images_per_sec"]) == ["streamed", "on_device"]
    stream.print_stream(result)
    assert f"{result['ratio']['median']:.3f}x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["nothing"], ["give one command: step | input", "found nothing"], 2),
        (["input"], ["--path: not given"], 2),
        (["scaling", "--plot", "x.png"], ["plot"], 2),
        (["input", "--path", "nowhere.zip"], ["nowhere.zip"], 1),
        (["compile", "--json", "no/where.json"], ["no/where.json"], 1),
    ],
)
def test_bad_input_is_one_line(arguments, words, code):
    assert_one_line_error(run_script("bench.py", *arguments), *words, code=code)
