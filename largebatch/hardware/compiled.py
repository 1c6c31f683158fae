"""Figures of compiled programs: memory, bytes, kernels, collectives, transfers and cycles by line of the source.

They are read from XLA's text after optimisation, `jax.stages.Compiled.as_text()`. XLA's `cost_analysis` counts the
body of a loop once, and is empty on GPUs.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from largebatch.hardware.chips import options_for

COLLECTIVE = re.compile("(all-(reduce|gather|to-all)|reduce-scatter|collective-(permute|broadcast))(-start)?")
# Opcodes that wait for the host, and targets by which JAX runs Python or moves arrays to the host.
TRANSFER = re.compile(r"(infeed|outfeed|send|recv)(-done)? |custom-call \S*(callback|MoveTo|device_placement)")
# Opcodes that hold a program together. All others are launched: on GPUs as kernels, copies and library calls.
STRUCTURE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call")
SLICES, SAME_BYTES = ("dynamic-slice", "slice", "gather"), ("bitcast", "reshape", "get-tuple-element")
ROOT = Path(__file__).resolve().parents[2]


class Instruction(NamedTuple):
    """Line of a computation; a fusion is one instruction."""

    name: str
    shape: str  # arrays of the output, with their layouts
    opcode: str
    output_bytes: int  # bytes of the output, without padding
    memory_bytes: int  # those of them in the device's memory, not on the chip
    operands: list[str]  # names of the instructions whose outputs it takes
    called: list[str]  # computations that it runs: a loop's condition and body, a condition's branches
    source: str  # innermost line of this project, as "model.py:57"
    attributes: dict[str, str]  # by XLA's names; "argument" of a parameter or constant is its number

    @property
    def scope(self) -> str:
        """Innermost scope around a loop: "steps" for "jit(f)/steps/while"."""
        return self.attributes.get("op_name", "").removesuffix("/while").rpartition("/")[2]

    @property
    def cycles(self) -> int:
        """Estimate of the compiler for one execution; 0 where it makes none."""
        return int(self.attributes.get("estimated_cycles", 0))


class Program(NamedTuple):
    """A compiled program, as the instructions of its computations in order."""

    computations: dict[str, list[Instruction]]
    named: dict[str, Instruction]  # all of them by name
    entry: str
    aliased_outputs: int  # outputs in the memory of donated arguments

    def instructions(self) -> list[Instruction]:
        """Return every instruction that may run on its own, once: of all branches, but not inside fusions."""
        names = [self.entry]
        for name in names:  # which grows
            called = [name for one in self.computations[name] for name in one.called]
            names += [name for name in dict.fromkeys(called) if name not in names]
        return [one for name in names for one in self.computations[name]]

    def loops(self) -> list[Instruction]:
        """Return every `while` instruction."""
        return [one for one in self.instructions() if one.opcode == "while"]

    def trip_count(self, loop: Instruction) -> int | None:
        """Return the iterations of a loop, by the compiler or by a condition that counts from 0 to a constant."""
        if "n" in loop.attributes:
            return int(loop.attributes["n"])
        last = self.computations[loop.attributes["condition"]][-1]
        if last.opcode != "compare" or last.attributes["direction"] != "LT":
            return None
        bound = self.named[last.operands[1]]
        return int(bound.attributes["argument"]) if bound.opcode == "constant" else None

    def executions(
        self, turns: Callable[[Instruction], float], caller: Instruction | None = None
    ) -> list[tuple[Instruction, float]]:
        """Return the instructions that run on their own, each with the number of times.

        Args:
          turns: function that returns the iterations of a loop.
          caller: the loop of which to return one iteration; None for the whole program. Of a condition the branch
            that takes longest is returned; without cycles, that of the most instructions.
        """
        parts = []
        for name in [self.entry] if caller is None else caller.called:
            parts.append(part := [])
            for one in self.computations[name]:
                times = turns(one) if one.opcode == "while" else 1.0
                part += [(one, 1.0), *((inner, times * count) for inner, count in self.executions(turns, one))]
        if caller is not None and caller.opcode == "conditional":
            return max(parts, key=lambda part: (sum(times * one.cycles for one, times in part), len(part)))
        return list(itertools.chain(*parts))

    def moved_by(self, one: Instruction) -> int:
        """Return the bytes that one execution of an instruction reads and writes in the device's memory."""
        if one.opcode in STRUCTURE or one.opcode.endswith("-done"):
            return 0
        return self._written(one) + sum(self._read(one, place) for place in range(len(one.operands)))

    def _written(self, one: Instruction) -> int:
        if one.opcode == "dynamic-update-slice":
            return self.named[one.operands[1]].memory_bytes
        if one.opcode != "fusion":
            return one.memory_bytes
        root = self.computations[one.attributes["calls"]][-1]
        while root.opcode in SAME_BYTES:
            root = self.named[root.operands[0]]
        return min(one.memory_bytes, self._written(root))

    def _read(self, user: Instruction, place: int) -> int:
        """Return the bytes that an instruction reads of its operand number `place`, of which slices take a part."""
        size = self.named[user.operands[place]].memory_bytes
        if user.opcode == "fusion":
            inside = self.computations[user.attributes["calls"]]
            parameters = {one.attributes["argument"]: one.name for one in inside if one.opcode == "parameter"}
            return min(size, self._read_inside(inside, parameters[str(place)]))
        if place == 0 and user.opcode == "dynamic-update-slice":
            return 0  # it is written in place
        return min(size, user.memory_bytes) if place == 0 and user.opcode in SLICES else size

    def _read_inside(self, inside: list[Instruction], name: str) -> int:
        """Return the bytes that the instructions of a fusion read of a value."""
        uses = [(user, place) for user in inside for place, operand in enumerate(user.operands) if operand == name]
        return sum(
            self._read_inside(inside, user.name) if user.opcode in SAME_BYTES else self._read(user, place)
            for user, place in uses
        )


# ---- from text ------------------------------------------------------------------------------------------

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(([^)]*)(.*)$")
_ARRAY = re.compile(r"\b[a-z]+(\d*)\[([\d,]*)\](\{[^}]*\})?")
_ATTRIBUTE = re.compile(r'(\w+)"?[=:](?:"([^"]*)"|%?([\w.\-]+))')
_CALLED = re.compile(r"(?:body|condition|to_apply|_computations?)=(\{[^}]*\}|\S+)")
_ALIAS = re.compile(r"\{[\d, ]*\}: \(\d+, \{[\d, ]*\}, (?:may|must)-alias\)")


def parse(text: str) -> Program:
    """Parse the text of a compiled program."""
    computations, entry, sources = {}, "", _read_sources(text)
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif found := _INSTRUCTION.match(line):
            current.append(_instruction(*found.groups(), sources))
    named = {one.name: one for computation in computations.values() for one in computation}
    return Program(computations, named, entry, len(_ALIAS.findall(text.partition("\n")[0])))


def _instruction(name, shape, opcode, arguments, rest, sources: dict[str, str]) -> Instruction:
    pairs = reversed(_ATTRIBUTE.findall(rest))  # the first of a name counts
    attributes = {"argument": arguments} | {key: quoted or bare for key, quoted, bare in pairs}
    sizes, in_memory = [], []
    for bits, dims, layout in _ARRAY.findall(shape):
        sizes.append(math.prod(map(int, filter(None, dims.split(",")))) * (int(bits or 8) // 8))
        in_memory.append(0 if "S(" in layout else sizes[-1])
    if opcode.endswith("-start"):
        del in_memory[1:]  # operands that are listed again
    operands = re.findall(r"%([\w.\-]+)", arguments)
    runs_others = opcode in ("while", "conditional", "call")
    called = re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(rest))) if runs_others else []
    source = sources.get(attributes.get("stack_frame_id"), "")
    return Instruction(name, shape, opcode, sum(sizes), sum(in_memory), operands, called, source, attributes)


def _read_sources(text: str) -> dict[str, str]:
    """Return the innermost line of this project for every stack frame of the text's tables, by its number."""
    files = dict(re.findall(r'^(\d+) "([^"]*/[^"]*)"$', text, re.MULTILINE))
    places = re.findall(r"^(\d+) \{file_name_id=(\d+) .*?line=(\d+)", text, re.MULTILINE)
    own: dict[str, str] = {}
    for place, file, line in places:
        path = Path(files.get(file, ""))
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            own[place] = f"{path.relative_to(ROOT)}:{line}"
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}", text, re.MULTILINE)
    sources: dict[str, str] = {}
    for frame, place, parent in frames:  # a parent comes before its frames
        sources[frame] = own.get(place, "") or sources.get(parent, "")
    return sources


# ---- figures --------------------------------------------------------------------------------------------


class Collective(NamedTuple):
    """An operation by which devices exchange data."""

    opcode: str
    bytes: int  # bytes that a device puts in, without padding
    times: float  # executions per step


class Cost(NamedTuple):
    """The compiler's cycles for one place in the source."""

    cycles: float
    share: float  # of all cycles
    source: str  # "model.py:57"
    operation: str  # "Conv_1/conv_general_dilated, backward"


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """Figures of a compiled program for one step, or for one run where it has no steps."""

    memory: dict[str, int]  # bytes on a device: arguments, temporaries, outputs that are not donated, code
    aliased_outputs: int
    collectives: list[Collective]
    host_transfers: list[str]  # opcodes, targets and places in the source
    uses_float64: bool
    cycles: float | None  # by the compiler's estimate; None where it makes none
    costs: list[Cost]  # by place in the source, the largest first
    unknown_loops: list[str]  # scopes and sources of loops whose length is known only when they run
    moved_bytes: float  # bytes read and written in the device's memory
    num_operations: float  # operations that run on their own: on a GPU, kernels and library calls


def compile_and_look(lowered: jax.stages.Lowered, lengths: dict[str, float], platform: str) -> CompiledProgram:
    """Compile a program and read its figures.

    Args:
      lengths: iterations of the loops whose length is known only when they run, by the name of their scope. A
        scope "steps" makes a step the unit: instructions outside of it are left out.
      platform: platform whose options of the compiler are taken.
    """
    compiled = lowered.compile(compiler_options=options_for(platform))
    stats, program = compiled.memory_analysis(), parse(compiled.as_text())
    every, loops = program.instructions(), program.loops()
    step = program.executions(
        lambda loop: lengths.get(loop.scope, program.trip_count(loop) or 1),
        next((loop for loop in loops if loop.scope == "steps"), None),
    )
    texts = [f"{one.opcode} {one.attributes.get('custom_call_target', '')} {one.source}" for one in every]
    cycles = sum(times * one.cycles for one, times in step)
    return CompiledProgram(
        memory={
            "arguments": stats.argument_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
            "outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
            "code": stats.generated_code_size_in_bytes,
        },
        aliased_outputs=program.aliased_outputs,
        collectives=[
            Collective(one.opcode, one.output_bytes, times)
            for one, times in step
            if COLLECTIVE.fullmatch(one.opcode)
        ],
        host_transfers=[text for text in texts if TRANSFER.match(text)],
        uses_float64="f64" in lowered.as_text(),  # a TPU's compiler makes pairs of float32
        cycles=cycles or None,
        costs=_costs(step, cycles),
        unknown_loops=[f"{loop.scope} ({loop.source})" for loop in loops if program.trip_count(loop) is None],
        moved_bytes=sum(times * program.moved_by(one) for one, times in step),
        num_operations=sum(times for one, times in step if one.opcode not in STRUCTURE),
    )


def _costs(step: list[tuple[Instruction, float]], total: float) -> list[Cost]:
    cycles = collections.Counter()
    for one, times in step:
        cycles[one.source, operation_of(one.attributes.get("op_name", ""))] += times * one.cycles
    return [Cost(count, count / total, *place) for place, count in cycles.most_common() if count]


def operation_of(op_name: str) -> str:
    """Return the layer and operation that a traced name tells, and whether it is the backward pass."""
    inner = re.split(r"/(?:body|cond|branch_\d_fun)/", op_name)[-1]
    layers = [part for part in inner.split("/") if part and "(" not in part]
    return "/".join(layers) + (", backward" if "transpose(" in inner else "")
