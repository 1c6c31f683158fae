"""Compiled programs read from their text: a made-up one, whose figures are added up by hand, and real ones."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT

from largebatch.hardware.compiled import COLLECTIVE, compile_and_look, operation_of, parse
from largebatch.hosts import replicas

PROGRAM = Path(__file__).with_name("program.hlo.txt").read_text().replace("ROOT_FOLDER", str(ROOT))


@pytest.fixture(scope="module")
def program():
    return parse(PROGRAM)


def test_loops_are_counted_by_their_turns(program):
    def turns(loop):
        return 5 if loop.scope == "micro_batches" else program.trip_count(loop) or 1

    def cycles(executions):
        return sum(times * instruction.cycles for instruction, times in executions)

    assert cycles(program.executions(turns)) == 1000 + 5 * 100 + 3 * 7 + 7
    update = next(loop for loop in program.loops() if loop.scope == "updates")
    assert cycles(program.executions(turns, update)) == 5 * 100 + 3 * 7 + 7


def test_instructions_of_all_branches_are_seen_once(program):
    opcodes = [one.opcode for one in program.instructions()]
    assert opcodes.count("add") == 1
    assert opcodes.count("while") == 3


def test_lines_of_the_project_are_found_behind_those_of_libraries(program):
    sources = {one.attributes.get("op_name", "").rpartition("/")[2]: one.source for one in program.instructions()}
    assert sources["conv"] == "model.py:57"


def test_collectives_and_donations_are_counted(program):
    collectives = [one for one in program.instructions() if COLLECTIVE.fullmatch(one.opcode)]
    assert [one.output_bytes for one in collectives] == [8 * 4 + 6 * 2]
    assert program.aliased_outputs == 2


@pytest.mark.parametrize(
    ("op_name", "operation"),
    [
        ("jit(f)/updates/while/body/micro_batches/while/body/jvp(Net)/Conv_1/conv", "Conv_1/conv"),
        ("jit(f)/while/body/transpose(jvp(Net))/Conv_1/conv", "Conv_1/conv, backward"),
        ("", ""),
    ],
)
def test_operations_are_named_by_layer(op_name, operation):
    assert operation_of(op_name) == operation


# ---- real programs, of this machine's compiler --------------------------------------------------------


def look(function, lengths=None):
    states = jax.ShapeDtypeStruct((jax.device_count(), 64, 64), np.float32)
    return compile_and_look(replicas.pmap(function, donate_argnums=(0,)).lower(states), lengths or {}, "cpu")


def test_a_program_with_nothing_wrong():
    found = look(lambda x: x + jax.lax.psum(x, replicas.AXIS))
    assert len(found.collectives) == 1
    assert found.collectives[0].bytes == 64 * 64 * 4
    assert (found.host_transfers, found.uses_float64, found.aliased_outputs) == ([], False, 1)
    assert found.memory["arguments"] == 64 * 64 * 4
    assert found.cycles is None


def test_a_call_of_python_is_a_host_transfer():
    def prints(x):
        jax.debug.callback(lambda value: None, x.sum())
        return x

    assert look(prints).host_transfers


def test_float64_is_found():
    with jax.enable_x64(True):
        assert look(lambda x: (x.astype(jnp.float64) * 3.3).astype(jnp.float32)).uses_float64


def test_loops_of_unknown_length_are_told_by_scope():
    def loop(x):
        with jax.named_scope("updates"):
            return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ x, x)

    assert [name.partition(" ")[0] for name in look(loop).unknown_loops] == ["updates"]


COUNTED = """HloModule jit_f

%goes_on (p.0: (s32[], f32[])) -> pred[] {
  %bound = s32[]{:T(256)} constant(6)
  %p.0 = (s32[], f32[]) parameter(0)
  %index = s32[] get-tuple-element(%p.0), index=0
  ROOT %lt = pred[] compare(%index, %bound), direction=LT
}

%to_a_limit (p.1: (s32[], f32[])) -> pred[] {
  %p.1 = (s32[], f32[]) parameter(0)
  %index.1 = s32[] get-tuple-element(%p.1), index=0
  %limit = s32[] get-tuple-element(%p.1), index=1
  ROOT %lt.1 = pred[] compare(%index.1, %limit), direction=LT
}

%body (p.2: (s32[], f32[])) -> (s32[], f32[]) {
  %p.2 = (s32[], f32[]) parameter(0)
  ROOT %made = (s32[], f32[]) fusion(%p.2), kind=kLoop, calls=%goes_on, backend_config={"estimated_cycles":"5"}
}

ENTRY %main (p.3: (s32[], f32[])) -> (s32[], f32[]) {
  %p.3 = (s32[], f32[]) parameter(0)
  %counts = (s32[], f32[]) while(%p.3), condition=%goes_on, body=%body
  ROOT %open = (s32[], f32[]) while(%counts), condition=%to_a_limit, body=%body
}
"""


def test_a_loop_to_a_constant_has_so_many_turns():
    """A TPU's compiler tells the number of turns of no loop."""
    program = parse(COUNTED)
    assert [program.trip_count(loop) for loop in program.loops()] == [6, None]
