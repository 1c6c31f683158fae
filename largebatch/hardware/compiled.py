"""A compiled program: memory, collectives, cycles, and the bytes that it moves."""

import dataclasses
import re
from collections.abc import Callable

import jax

from largebatch.hardware import hlo
from largebatch.hardware.chips import compile_with, options_for
from largebatch.hardware.hlo import Instruction, Program, is_launched

TAKES_A_PART = ("dynamic-slice", "slice", "gather")
SAME_BYTES = ("bitcast", "reshape", "get-tuple-element")


def moved_bytes(program: Program, executions: list[tuple[Instruction, float]]) -> float:
    """Return the bytes read and written by `executions`; see `Program.executions`."""
    return sum(times * moved_by(program, instruction) for instruction, times in executions)


def moved_by(program: Program, instruction: Instruction) -> int:
    """Return the bytes that one execution of an instruction reads and writes."""
    if not is_launched(instruction) or instruction.opcode.endswith("-done"):
        return 0
    places = range(len(instruction.operands))
    return written(program, instruction) + sum(read_from(program, instruction, place) for place in places)


def read_from(program: Program, user: Instruction, place: int) -> int:
    """Return the bytes that `user` reads of its operand number `place`."""
    if user.opcode == "dynamic-update-slice" and place == 0:
        return 0  # the operand is written in place
    operand = program.named[user.operands[place]]
    if user.opcode in TAKES_A_PART and place == 0:
        return min(operand.memory_bytes, user.memory_bytes)
    if user.opcode != "fusion":
        return operand.memory_bytes
    inside = program.computations[user.fused]
    parameter = next(one for one in inside if one.opcode == "parameter" and one.number == place)
    return min(operand.memory_bytes, _read_inside(program, inside, parameter))


def _read_inside(program: Program, inside: list[Instruction], value: Instruction) -> int:
    """Return the bytes of `value` that the instructions of a fusion use."""
    read = 0
    for user in inside:
        for place, name in enumerate(user.operands):
            if name == value.name and user.opcode in SAME_BYTES:
                read += _read_inside(program, inside, user)
            elif name == value.name:
                read += read_from(program, user, place)
    return read


def written(program: Program, instruction: Instruction) -> int:
    """Return the bytes that an instruction writes."""
    if instruction.opcode == "dynamic-update-slice":
        return program.named[instruction.operands[1]].memory_bytes
    if instruction.opcode != "fusion":
        return instruction.memory_bytes
    root = program.computations[instruction.fused][-1]
    while root.opcode in SAME_BYTES:
        root = program.named[root.operands[0]]
    in_place = root.opcode in ("dynamic-update-slice", "fusion")
    return min(instruction.memory_bytes, written(program, root)) if in_place else instruction.memory_bytes


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on a device while a program runs."""

    arguments: int
    temporaries: int
    outputs: int  # outputs outside of the memory of donated arguments
    code: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.arguments + self.temporaries + self.outputs + self.code


@dataclasses.dataclass(frozen=True)
class Cost:
    """The compiler's cycles for one place in the source."""

    cycles: float
    share: float  # of all cycles
    source: str  # "model.py:57"
    operation: str  # "Conv_1/conv_general_dilated, backward"


@dataclasses.dataclass(frozen=True)
class Collective:
    """An operation by which devices exchange data."""

    opcode: str
    bytes: int  # bytes that a device puts in, without padding
    times: float  # executions per step


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """Figures of a compiled program for one step, or for one run where it has no steps."""

    memory: Memory
    aliased_outputs: int
    collectives: tuple[Collective, ...]
    host_transfers: tuple[str, ...]  # opcodes, targets and places in the source
    uses_float64: bool
    cycles: float | None  # by the compiler's estimate; None where it makes none
    costs: tuple[Cost, ...]  # by place in the source, the largest first
    unknown_loops: tuple[str, ...]  # scopes and sources of loops whose length is known only when they run
    moved_bytes: float  # bytes from and to the device's memory; see `moved_bytes`
    num_operations: float  # operations that are run on their own: on a GPU, kernels and library calls


def compile_and_look(lowered: jax.stages.Lowered, lengths: dict[str, float], platform: str) -> CompiledProgram:
    """Compile a program and read its figures.

    Args:
      lengths: iterations of the loops whose length is known only when they run, by the name of their scope. A
        scope "updates" makes a step the unit: instructions outside of it are left out.
      platform: platform whose options of the compiler are taken.
    """
    compiled = compile_with(lowered, options_for(platform))
    program = hlo.parse(compiled.as_text())
    updates = [loop for loop in program.loops() if _scope_of(loop) == "updates"]
    of_update = list(program.executions(_turns(program, lengths), updates[0] if updates else None))
    costs = _costs(of_update)
    stats = compiled.memory_analysis()
    return CompiledProgram(
        memory=Memory(
            arguments=stats.argument_size_in_bytes,
            temporaries=stats.temp_size_in_bytes,
            outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
            code=stats.generated_code_size_in_bytes,
        ),
        aliased_outputs=program.aliased_outputs,
        collectives=tuple(
            Collective(instruction.opcode, instruction.output_bytes, times)
            for instruction, times in of_update
            if hlo.is_collective(instruction)
        ),
        host_transfers=tuple(
            f"{instruction.opcode} {instruction.target} {instruction.source}"
            for instruction in program.instructions()
            if hlo.is_host_transfer(instruction)
        ),
        uses_float64="f64" in lowered.as_text(),  # a TPU's compiler makes pairs of float32
        cycles=sum(cost.cycles for cost in costs) or None,
        costs=costs,
        unknown_loops=_unknown_loops(program),
        moved_bytes=moved_bytes(program, of_update),
        num_operations=sum(times for instruction, times in of_update if hlo.is_launched(instruction)),
    )


def _turns(program: Program, lengths: dict[str, float]) -> Callable[[Instruction], float]:
    def turns(loop: Instruction) -> float:
        return lengths.get(_scope_of(loop), program.trip_count(loop) or 1)

    return turns


def _scope_of(loop: Instruction) -> str:
    """Return the innermost scope around a loop: "updates" for "jit(f)/updates/while"."""
    return loop.op_name.removesuffix("/while").rpartition("/")[2]


def _unknown_loops(program: Program) -> tuple[str, ...]:
    return tuple(
        f"{_scope_of(loop)} ({loop.source})" for loop in program.loops() if program.trip_count(loop) is None
    )


def _costs(executions: list[tuple[Instruction, float]]) -> tuple[Cost, ...]:
    cycles: dict[tuple[str, str], float] = {}
    for instruction, times in executions:
        if instruction.cycles:
            place = instruction.source, operation_of(instruction.op_name)
            cycles[place] = cycles.get(place, 0) + times * instruction.cycles
    total = sum(cycles.values())
    ordered = sorted(cycles.items(), key=lambda item: -item[1])
    return tuple(Cost(count, count / total, *place) for place, count in ordered)


def operation_of(op_name: str) -> str:
    """Return the layer and operation that a traced name tells, and whether it is the backward pass."""
    inner = re.split(r"/(?:body|cond|branch_\d_fun)/", op_name)[-1]
    is_backward = "transpose(" in inner
    layers = [part for part in inner.split("/") if part and "(" not in part]
    return "/".join(layers) + (", backward" if is_backward else "")
