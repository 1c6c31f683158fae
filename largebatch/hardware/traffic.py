"""Bytes that a compiled program moves from and to a device's memory, counted in its text.

Every instruction that is run on its own reads its operands and writes its output once. Where it only takes a slice
of an operand, or gathers from it, that part counts. What stays on the chip counts nothing. Padding by the layout is
not counted, so the true traffic may be larger.
"""

from largebatch.hardware.hlo import Instruction, Program, is_launched

TAKES_A_PART = ("dynamic-slice", "slice", "gather")
SAME_BYTES = ("bitcast", "reshape", "get-tuple-element")


def moved_bytes(program: Program, executions: list[tuple[Instruction, float]]) -> float:
    """Bytes read and written by `executions`, see `Program.executions`."""
    return sum(times * moved_by(program, instruction) for instruction, times in executions)


def moved_by(program: Program, instruction: Instruction) -> int:
    """Bytes of one execution of an instruction."""
    if not is_launched(instruction) or instruction.opcode.endswith("-done"):
        return 0
    places = range(len(instruction.operands))
    return written(program, instruction) + sum(read_from(program, instruction, place) for place in places)


def read_from(program: Program, user: Instruction, place: int) -> int:
    """Bytes that `user` reads of its operand number `place`."""
    if user.opcode == "dynamic-update-slice" and place == 0:
        return 0  # it is written in place
    operand = program.named[user.operands[place]]
    if user.opcode in TAKES_A_PART and place == 0:
        return min(operand.memory_bytes, user.memory_bytes)
    if user.opcode != "fusion":
        return operand.memory_bytes
    inside = program.computations[user.fused]
    parameter = next(one for one in inside if one.opcode == "parameter" and one.number == place)
    return min(operand.memory_bytes, _read_inside(program, inside, parameter))


def _read_inside(program: Program, inside: list[Instruction], value: Instruction) -> int:
    """Bytes of `value` that the instructions of a fusion use."""
    read = 0
    for user in inside:
        for place, name in enumerate(user.operands):
            if name == value.name and user.opcode in SAME_BYTES:
                read += _read_inside(program, inside, user)
            elif name == value.name:
                read += read_from(program, user, place)
    return read


def written(program: Program, instruction: Instruction) -> int:
    """Bytes that an instruction writes."""
    if instruction.opcode == "dynamic-update-slice":
        return program.named[instruction.operands[1]].memory_bytes
    if instruction.opcode != "fusion":
        return instruction.memory_bytes
    root = program.computations[instruction.fused][-1]
    while root.opcode in SAME_BYTES:
        root = program.named[root.operands[0]]
    in_place = root.opcode in ("dynamic-update-slice", "fusion")
    return min(instruction.memory_bytes, written(program, root)) if in_place else instruction.memory_bytes
