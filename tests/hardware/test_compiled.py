"""Compiled programs read from their text: made-up ones, whose figures are added up by hand, and real ones."""

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
    step = next(loop for loop in program.loops() if loop.scope == "steps")
    assert cycles(program.executions(turns, step)) == 5 * 100 + 3 * 7 + 7


def test_instructions_sources_collectives_and_donations_are_found(program):
    """Instructions of all branches count once; a source is a line of the project, also behind a library's."""
    opcodes = [one.opcode for one in program.instructions()]
    assert opcodes.count("add") == 1
    assert opcodes.count("while") == 3
    sources = {one.attributes.get("op_name", "").rpartition("/")[2]: one.source for one in program.instructions()}
    assert sources["conv"] == "model.py:57"
    collectives = [one for one in program.instructions() if COLLECTIVE.fullmatch(one.opcode)]
    assert [one.output_bytes for one in collectives] == [8 * 4 + 6 * 2]
    assert program.aliased_outputs == 2


@pytest.mark.parametrize(
    ("op_name", "operation"),
    [
        ("jit(f)/steps/while/body/micro_batches/while/body/jvp(Net)/Conv_1/conv", "Conv_1/conv"),
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


def test_what_is_wrong_is_found():
    def prints(x):
        jax.debug.callback(lambda value: None, x.sum())
        return x

    def loops(x):
        with jax.named_scope("steps"):
            return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ x, x)

    def reduces_twice(x):
        return jax.lax.psum(jnp.sin(jax.lax.psum(x, replicas.AXIS)), replicas.AXIS)

    assert look(prints).host_transfers
    assert len(look(reduces_twice).collectives) == 2
    assert [name.partition(" ")[0] for name in look(loops).unknown_loops] == ["steps"]
    with jax.enable_x64(True):
        assert look(lambda x: (x.astype(jnp.float64) * 3.3).astype(jnp.float32)).uses_float64


@pytest.mark.parametrize(
    "function",
    [
        lambda x, kernel: jnp.tanh(x @ kernel) + 1,
        lambda x, kernel: jax.grad(lambda kernel: jnp.sum(jnp.tanh(x @ kernel)))(kernel),
        lambda x, kernel: jnp.sum(x[64:] * 2, axis=0) @ kernel,
        lambda x, kernel: jax.lax.dynamic_slice_in_dim(x, x[0, 0].astype(int), 8) * 2,
        lambda x, kernel: jax.lax.dynamic_update_slice_in_dim(x, x[:1] * 2, x[0, 0].astype(int), 0),
    ],
    ids=["forward", "gradient", "slice", "dynamic slice", "dynamic update"],
)
def test_bytes_are_those_of_xla(function):
    x, kernel = np.ones((128, 96), np.float32), np.ones((96, 80), np.float32)
    compiled = jax.jit(function).lower(x, kernel).compile()
    program = parse(compiled.as_text())
    ours = sum(times * program.moved_by(one) for one, times in program.executions(lambda loop: 1))
    assert ours == pytest.approx(compiled.cost_analysis()["bytes accessed"], rel=0.02)
