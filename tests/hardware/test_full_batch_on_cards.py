"""What a step of the full batch moves on NVIDIA cards, by its text compiled without one: make test-compilers."""

import re

import jax
import pytest
from conftest import typed
from machines import Case, target_or_skip

import examine
from largebatch.hardware.chips import options_for
from largebatch.hardware.compiled import compile_and_look, parse
from plan import choose_plan

pytestmark = pytest.mark.compilers


@pytest.fixture(autouse=True)
def without_programs_of_other_tests():
    yield
    jax.clear_caches()


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
