"""The programs of every config, by the compilers of devices that are not here: make test-tpu, make test-gpu.

Each is broken on purpose below, too: a test that cannot fail shows nothing.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import typed
from jax import lax
from machines import Case, all_cases, target_or_skip

import build
import examine
from build import make_step
from largebatch.hardware.chips import options_for
from largebatch.hardware.compiled import compile_and_look, parse
from largebatch.hardware.targets import find_target
from largebatch.hosts.replicas import AXIS
from largebatch.training.step import sum_over_devices
from largebatch.util import UserError
from plan import choose_plan, state_shapes

# How far temporaries may be above their estimate: a quarter, or so much of the device's memory. A v5e's at 338
# images are 118 MB above it, of 17.2 GB.
ESTIMATE_ERROR, SMALL = 1.25, 0.01
MAIN = ["eurosat_v3_32", "eurosat_muon", "cifar10_resnet8"]  # one of each family, that CI compiles for a v3-32


def marked(case: Case, target: str, kind: str):
    in_ci = case.name in MAIN and (target == "v3:4x4" or case.name == MAIN[0])
    marks = [pytest.mark.compilers] if in_ci else [getattr(pytest.mark, kind)]
    return pytest.param(case, target, marks=marks, id=f"{case.name} {target}")


CASES = [
    marked(case, target, kind)
    for target, kind in (("v3:4x4", "tpu"), ("v5e:4x8", "tpu"), ("h200", "gpu"))
    for case in all_cases(target)
]


@pytest.fixture(autouse=True)
def without_programs_of_other_tests():
    yield
    jax.clear_caches()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("case", "target_name"), CASES)
def test_a_config_compiles_and_fits(case, target_name, session_cache):
    target, config = target_or_skip(target_name), case.load()
    config.augment.cache_dir = str(session_cache)
    compiled = examine.compile_for(typed(config), target)
    step = compiled.programs["step"]
    if target.hardware.num_devices > 1:
        assert [one.opcode.removesuffix("-start") for one in step.collectives] == ["all-reduce"]
        assert step.collectives[0].times == 1
    else:
        assert not step.collectives
    # Where a batch is the whole set, or one micro-batch on a card, the number of micro-batches is known.
    micro_batches = compiled.plan.micro_batches
    is_known = micro_batches.by_slices or micro_batches.single
    unknown = ["steps"] if is_known else ["steps", "micro_batches"]
    assert [loop.partition(" ")[0] for loop in step.unknown_loops] == unknown
    assert step.aliased_outputs == len(jax.tree.leaves(state_shapes(compiled.plan)))
    for name, program in compiled.programs.items():
        assert not program.host_transfers, name
        assert not program.uses_float64, name
        assert sum(program.memory.values()) < target.chip.memory_bytes, name
    images = ("training images", "validation images", "parameters and optimizer")
    estimate = sum(size for part, size in compiled.needed.items() if part not in images)
    assert step.memory["temporaries"] < ESTIMATE_ERROR * estimate + SMALL * target.chip.memory_bytes


@pytest.fixture
def started_by_host(tmp_path):
    """(name of a target, options) -> what the host starts of a call, and of a step where it starts those."""

    def look(name, options):
        target = target_or_skip(name)
        config = Case("cifar10_resnet8", (("batch.size", 1024), ("batch.micro_batch_size", 64))).load()
        data, free = examine.dataset_info(typed(config)), target.chip.memory_bytes
        plan = choose_plan(typed(config), data, target.hardware, free_bytes=free)
        lowered = examine.lower_plan(plan, free, target.devices)["step"]
        lowered.compile(compiler_options=options | {"xla_dump_to": str(tmp_path)})
        (text,) = [path.read_text() for path in tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")]
        of_call = re.findall(r"^\d+: (k\w+)", text, re.MULTILINE)
        body = re.split(r"^\d", text.partition("\n  body:\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
        return of_call, re.findall(r"^ {4}\d+: (k\w+)", body, re.MULTILINE)

    return look


@pytest.mark.compilers
def test_a_card_starts_all_updates_of_a_call_at_once(started_by_host):
    """They are one CUDA graph. Without our options convolutions cut it, and the host turns the loops."""
    assert started_by_host("h200", options_for("gpu"))[0] == ["kCommandBuffer"]


@pytest.mark.compilers
def test_cards_have_two_graphs_in_an_update(started_by_host):
    of_update = started_by_host("h200:8", options_for("gpu"))[1]
    assert of_update[0] == of_update[-1] == "kCommandBuffer"
    assert of_update.count("kCommandBuffer") == 2
    # Between them stands the all-reduce, in one piece or begun and ended around what needs no sum.
    assert set(of_update) <= {"kCommandBuffer", "kAllReduce", "kAsyncStart", "kAsyncDone", "kCustomKernel"}


def what_it_does(lowered) -> dict:
    """Return bytes of a step, and the convolutions and activations of its micro-batches."""
    program = parse(lowered.compile(compiler_options=options_for("gpu")).as_text())
    (loop,) = [one for one in program.loops() if one.scope == "micro_batches"]
    inside = [one for one, _ in program.executions(lambda loop: 1, loop)]
    convolutions = [
        one for one in inside if one.attributes.get("custom_call_target", "").startswith("__cudnn$conv")
    ]
    images = [one for one in inside if re.search(r"\[5400,\d+,\d+,\d+\]", one.shape)]
    sizes = [re.search(r"\[5400,(\d+),(\d+),(\d+)\]", one.shape) for one in images]
    return {
        "bytes": compile_and_look(lowered, {"steps": 1, "micro_batches": 32}, "gpu").moved_bytes,
        "inputs": [program.named[one.operands[0]].shape for one in convolutions],
        "activations": {tuple(map(int, size.groups())) for size in sizes},
        "copies": [one.name for one in images if one.opcode in ("copy", "transpose", "pad")],
    }


@pytest.mark.compilers
@pytest.mark.parametrize("card", ["h100", "h200"])
def test_a_full_batch_on_a_card_moves_activations_once_and_pads_none(card):
    """A step of eurosat_v3_32 in micro-batches of 5,400."""
    target = target_or_skip(card)
    config = Case("eurosat_v3_32", (("batch.micro_batch_size", 5400),)).load()
    config, free = typed(config).replace(model={"dtype": "bfloat16"}), target.chip.memory_bytes
    plan = choose_plan(config, examine.dataset_info(config), target.hardware, free_bytes=free)
    found = what_it_does(examine.lower_plan(plan, free, target.devices)["step"])
    assert found["bytes"] <= 240e9
    assert not found["copies"]
    blocks = (33, 33, 16)  # of 2x2 pixels: what the first convolution reads
    assert found["activations"] == {blocks, (32, 32, 32), (16, 16, 64), (8, 8, 128), (4, 4, 256)}
    assert len(found["inputs"]) == 11  # forward and kernel gradients of four layers, three inputs' gradients
    assert not [shape for shape in found["inputs"] if shape.split("]")[0].endswith(",3")]


# ---- what is wrong is found -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_case():
    """(changes of the step) -> what is found of a small network's step on 8 cores."""
    target = target_or_skip("v3:2x2")
    config = Case("default", (("optimizer.name", "sgd"), ("dataset.image_size", 16))).load()
    config.dataset.name = "cifar10"  # whose size is known
    data = examine.dataset_info(typed(config))
    plan, free = choose_plan(typed(config), data, target.hardware, free_bytes=10**12), target.chip.memory_bytes

    def look(**changes):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "make_step", lambda plan: dataclasses.replace(make_step(plan), **changes))
            lowered = examine.lower_plan(plan, free, target.devices)
        return compile_and_look(lowered["step"], {"steps": 1, "micro_batches": 2}, "tpu")

    return look


@pytest.mark.compilers
def test_a_sound_update(small_case):
    found = small_case()
    assert len(found.collectives) == 1
    assert (found.host_transfers, found.uses_float64) == ([], False)
    assert [loop.partition(" ")[0] for loop in found.unknown_loops] == ["steps"]
    assert found.cycles > 0
    assert found.costs[0].source.startswith("largebatch/nn/convolution.py:")


@pytest.mark.compilers
def test_a_callback_is_found(small_case):
    def printed(tree):
        jax.debug.callback(lambda loss: None, tree.loss)
        return sum_over_devices(tree)

    assert small_case(reduce=printed).host_transfers


@pytest.mark.compilers
@pytest.mark.parametrize("name", ["v5e:1x7", "v3:3x5"])
def test_a_slice_that_chips_cannot_fill_is_refused_in_a_line(name):
    target_or_skip("v3:2x2")
    with pytest.raises(UserError, match=r"its compiler says '.*not divisible.*'; allowed: TPU slices") as raised:
        find_target(name)
    assert "\n" not in str(raised.value)


@pytest.mark.compilers
@pytest.mark.parametrize(
    "name",
    ["v3:2x2", "v5e:1x1", "v6e:2x2", "v5p:2x2x1", "a100", "a100-40gb", "a6000", "h100", "h100-pcie", "h200:7"],
)
def test_every_kind_of_device_compiles(name):
    target = target_or_skip(name)
    shapes = jax.ShapeDtypeStruct((len(target.devices), 8, 8), np.float32)
    summed = jax.pmap(lambda x: lax.psum(x @ x, AXIS), AXIS, devices=target.devices)
    assert compile_and_look(summed.lower(shapes), {}, "tpu").memory["arguments"] >= 256


@pytest.mark.compilers
def test_what_the_compiler_finds_too_large_is_told_in_a_line():
    """The compiler has the last word, not the estimate."""
    target = target_or_skip("v3:2x2")

    def far_too_large(x):
        square = jnp.sin(x)[:, None] * jnp.ones((1, 40_960))
        return jnp.sort(square, axis=0).sum()

    lowered = jax.pmap(far_too_large, devices=target.devices).lower(np.zeros((8, 200_000), np.float32))
    told = r"does not fit on v3:2x2: .* exceeds available HBM .*micro_batch_size"
    with pytest.raises(UserError, match=told) as raised, examine.fits("on v3:2x2"):
        compile_and_look(lowered, {}, "tpu")
    assert "\n" not in str(raised.value)
