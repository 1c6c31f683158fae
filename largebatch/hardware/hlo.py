"""Compiled programs, read from their text: loops, collectives, transfers, and the compiler's estimates of time.

The text is XLA's, as `jax.stages.Compiled.as_text()` returns it after optimisation. Only this is read: the
names of computations, their instructions in order, what these call, the compiler's "estimated_cycles", and from
which line of the source they come.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

COLLECTIVES = {
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
}
# Opcodes that hold a program together and compute nothing.
STRUCTURE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"}
HOST_TRANSFERS = ("infeed", "outfeed", "send", "recv")
# Custom calls by which JAX calls Python or moves arrays to the host.
HOST_CALLS = ("callback", "MoveToHost", "MoveToDevice", "annotate_device_placement")
ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation; a fusion is one instruction."""

    name: str
    opcode: str
    shape: str  # of the output, with its layout
    operands: tuple[str, ...]  # names of the instructions whose outputs it takes
    number: int | None  # number of a parameter, or value of an integer constant
    fused: str  # the computation that a fusion is made of
    cycles: int | None  # the compiler's estimate for one execution; None where it makes none
    op_name: str  # its place in the traced program, as "jit(f)/while/body/mul"
    source: str  # "model.py:57": the innermost line of this project; empty where there is none
    called: tuple[str, ...]  # computations that it runs: a loop's body and condition, the branches of a condition
    condition: str  # the computation that decides whether a loop goes on
    direction: str  # direction of a comparison: "LT"
    trip_count: int | None  # iterations of a loop, where the compiler tells them
    target: str  # target of a custom call

    @property
    def output_bytes(self) -> int:
        """Bytes of the output, without padding."""
        return sum(size for size, _ in self._arrays())

    @property
    def memory_bytes(self) -> int:
        """Bytes of the output in the device's memory, not on the chip; a copy's start lists its operands again."""
        in_memory = [0 if is_on_chip else size for size, is_on_chip in self._arrays()]
        return sum(in_memory[:1] if self.opcode.endswith("-start") else in_memory)

    def _arrays(self) -> Iterator[tuple[int, bool]]:
        """Yield the bytes of every array of the output, and whether it is in another memory than the device's."""
        for dtype, dims, layout in _ARRAY.findall(self.shape):
            size = 1
            for dim in filter(None, dims.split(",")):
                size *= int(dim)
            bits = re.search(r"\d+", dtype)
            yield size * (int(bits[0]) // 8 if bits else 1), "S(" in layout


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program, as its computations."""

    computations: dict[str, list[Instruction]]
    entry: str
    aliased_outputs: int  # outputs in the memory of donated arguments

    @functools.cached_property
    def named(self) -> dict[str, Instruction]:
        """Every instruction by its name, the insides of fusions too."""
        return {one.name: one for computation in self.computations.values() for one in computation}

    def instructions(self) -> Iterator[Instruction]:
        """Yield every instruction that may be run on its own, once; of all branches, but not inside fusions."""
        waiting, seen = [self.entry], {self.entry}
        while waiting:
            for instruction in self.computations[waiting.pop()]:
                yield instruction
                found = [name for name in instruction.called if name not in seen]
                waiting += found
                seen.update(found)

    def trip_count(self, loop: Instruction) -> int | None:
        """Return the iterations of a `while`: from the compiler, or from a condition that counts to a constant.

        JAX counts from 0, and so do the loops that XLA makes itself.
        """
        if loop.trip_count is not None:
            return loop.trip_count
        last = self.computations[loop.condition][-1]
        if last.opcode != "compare" or last.direction != "LT":
            return None
        bound = self.named[last.operands[1]]
        return bound.number if bound.opcode == "constant" else None

    def loops(self) -> list[Instruction]:
        """Return every `while` instruction."""
        return [instruction for instruction in self.instructions() if instruction.opcode == "while"]

    def executions(
        self, turns: Callable[[Instruction], float], loop: Instruction | None = None
    ) -> Iterator[tuple[Instruction, float]]:
        """Yield every instruction that is run on its own, and how often.

        Args:
          turns: iterations of a `while` instruction. Of the branches of a condition, the one that takes longest
            counts; where the compiler tells no time, the one with the most instructions.
          loop: to look at one iteration of this `while` alone, in place of the whole program.
        """
        for name in loop.called if loop else [self.entry]:
            yield from self._executions(name, 1.0, turns)

    def _executions(self, name: str, times: float, turns) -> Iterator[tuple[Instruction, float]]:
        for instruction in self.computations[name]:
            yield instruction, times
            if instruction.opcode == "while":
                for called in instruction.called:
                    yield from self._executions(called, times * turns(instruction), turns)
            elif instruction.opcode == "conditional":
                branches = [list(self._executions(called, times, turns)) for called in instruction.called]
                yield from max(branches, key=lambda branch: (_total_cycles(branch), len(branch)))
            elif instruction.opcode == "call":
                for called in instruction.called:
                    yield from self._executions(called, times, turns)


def _total_cycles(executions: list[tuple[Instruction, float]]) -> float:
    return sum(times * (instruction.cycles or 0) for instruction, times in executions)


def is_launched(instruction: Instruction) -> bool:
    """Tell whether an instruction runs anything: on a GPU a kernel, a copy or a call of a library."""
    return instruction.opcode not in STRUCTURE


def is_collective(instruction: Instruction) -> bool:
    """Tell whether devices exchange data; an asynchronous exchange counts where it starts."""
    return instruction.opcode.removesuffix("-start") in COLLECTIVES


def is_host_transfer(instruction: Instruction) -> bool:
    """Tell whether the program waits for the host, or sends it something."""
    if instruction.opcode == "custom-call":
        return any(word in instruction.target for word in HOST_CALLS)
    return instruction.opcode.removesuffix("-done") in HOST_TRANSFERS


# ---- from text ------------------------------------------------------------------------------------------


_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"(?:body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ALIAS = re.compile(r"\{[\d, ]*\}: \(\d+, \{[\d, ]*\}, (?:may|must)-alias\)")


def parse(text: str) -> Program:
    """Parse the text of a compiled program."""
    sources = _read_sources(text)
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            if header := _COMPUTATION.match(line):
                current = computations.setdefault(header["name"], [])
                entry = header["name"] if header["entry"] else entry
        elif line.startswith("}"):
            current = None
        elif found := _INSTRUCTION.match(line):
            current.append(_instruction(found, sources))
    first_line = text.partition("\n")[0]
    return Program(computations, entry, len(_ALIAS.findall(first_line)))


def _instruction(found: re.Match, sources: dict[str, str]) -> Instruction:
    rest, opcode = found["rest"], found["opcode"]
    called = _CALLED.findall(rest) if opcode in ("while", "conditional", "call") else []
    if branches := _BRANCHES.search(rest):
        called += [name.strip().removeprefix("%") for name in branches[1].split(",")]
    cycles, trips = _number(r'"estimated_cycles":"(\d+)"', rest), _number(r'known_trip_count":\{"n":"(\d+)"', rest)
    frame, file, line = (
        _text(pattern, rest)
        for pattern in (r"stack_frame_id=(\d+)", r'source_file="([^"]*)"', r"source_line=(\d+)")
    )
    arguments = rest.partition(")")[0]
    return Instruction(
        name=found["name"],
        opcode=opcode,
        shape=found["shape"],
        operands=tuple(re.findall(r"%([\w.\-]+)", arguments)),
        number=int(arguments) if re.fullmatch(r"-?\d+", arguments) else None,
        fused=_text(r"calls=%?([\w.\-]+)", rest) if opcode == "fusion" else "",
        cycles=cycles,
        op_name=_text(r'op_name="([^"]*)"', rest),
        source=sources.get(frame, "") or _own_line(file, line),
        called=tuple(called),
        condition=_text(r"condition=%?([\w.\-]+)", rest) if opcode == "while" else "",
        direction=_text(r"direction=(\w+)", rest),
        trip_count=trips,
        target=_text(r'custom_call_target="([^"]*)"', rest),
    )


def _text(pattern: str, line: str) -> str:
    found = re.search(pattern, line)
    return found[1] if found else ""


def _number(pattern: str, line: str) -> int | None:
    found = _text(pattern, line)
    return int(found) if found else None


def _read_sources(text: str) -> dict[str, str]:
    """Return the innermost line of this project for every stack frame of the text's tables, by its number."""
    files = dict(re.findall(r'^(\d+) "([^"]*/[^"]*)"$', text, re.MULTILINE))
    places = re.findall(r"^(\d+) \{file_name_id=(\d+) .*?line=(\d+)", text, re.MULTILINE)
    own = {place: _own_line(files.get(file, ""), line) for place, file, line in places}
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}", text, re.MULTILINE)
    sources: dict[str, str] = {}
    for frame, place, parent in frames:  # a parent comes before its frames
        sources[frame] = own.get(place, "") or sources.get(parent, "")
    return sources


def _own_line(file: str, line: str) -> str:
    path = Path(file)
    if not path.is_relative_to(ROOT) or "site-packages" in path.parts:
        return ""
    return f"{path.relative_to(ROOT)}:{line}"
