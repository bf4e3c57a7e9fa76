"""Analysis of optimised HLO, the text of a compiled program: HBM traffic, loops and collectives.

XLA's cost analysis counts a loop once, an in-place update as a copy of the whole array, and arrays in on-chip memory as
if they were in HBM; for GPUs there is none. Here an instruction reads its operands and writes its result if they are in
HBM. A slice or gather reads only the selected elements, and an in-place update writes only the new ones, also inside
fusions. Not counted: padding of layouts, repeated reads of a kernel, and the HBM traffic of a collective that runs
inside fusions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
               "collective-broadcast")  # fmt: skip
SLICES = ("slice", "dynamic-slice", "gather")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand with the new elements
# No traffic: aliases, uninitialised buffers, and ends of operations that are counted at their start.
NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "optimization-barrier", "after-all",
           "partition-id", "replica-id")  # fmt: skip
CALLS_OF_NOTHING = ("AllocateBuffer", "ConcatBitcast", "PrepareAsyncCallStart", "PrepareAsyncCallDone")

ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
NAME = re.compile(r"%([\w.\-]+)")
OPENED = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
ASSIGNED = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
STEP = re.compile(r"channel_id=(\d+),.*\bchain_id=")
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
SOURCE = re.compile(r'op_name="([^"]*)"')
BRACKETS = re.compile(r"[()\[\]{} ]")
SPACE = re.compile(r"S\(([1-9]\d*)\)")


class Array(NamedTuple):
    """Type of an array.

    Attributes:
        dtype: HLO name of the dtype.
        shape: sizes.
        space: memory space, 0: HBM.
    """

    dtype: str
    shape: tuple[int, ...]
    space: int

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or [0])[0])
        return -(-prod(self.shape) * bits // 8)

    @property
    def hbm(self) -> int:
        """Size in HBM in bytes."""
        return 0 if self.space else self.bytes

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Instruction(NamedTuple):
    """A line of a program.

    Attributes:
        name, opcode: name and operation.
        arrays: arrays of the result; several for a tuple.
        operands: names of the operands.
        called: names of called computations, without the condition of a loop.
        text: text after the opcode.
        root: whether the instruction is the result of its computation.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    text: str
    root: bool

    @property
    def bytes(self) -> int:
        """Size of the result in bytes."""
        return sum(array.bytes for array in self.arrays)

    @property
    def hbm(self) -> int:
        """Size of the result in HBM in bytes."""
        return sum(array.hbm for array in self.arrays)

    @property
    def source(self) -> str:
        """JAX's name of the operation in Python, else the name of the instruction."""
        match = SOURCE.search(self.text)
        return match[1] if match else self.name


class Collective(NamedTuple):
    """A collective operation.

    Attributes:
        kind: operation.
        array: the larger of input and output on each device.
        source: name of the operation in Python.
        channel: channel of a collective that is split into several fusions; otherwise empty.
    """

    kind: str
    array: Array
    source: str
    channel: str


@dataclass(frozen=True)
class Region:
    """Body of a loop, or the whole program.

    Attributes:
        source: name of the loop in Python.
        trips: number of iterations; None: unknown.
        bytes: HBM traffic of one iteration without inner loops.
        collectives: collectives of one iteration without inner loops.
        loops: inner loops.
    """

    source: str
    trips: int | None
    bytes: int
    collectives: tuple[Collective, ...]
    loops: tuple[Region, ...]

    @property
    def total(self) -> int:
        """HBM traffic of one iteration with inner loops, whose unknown numbers of iterations count as one."""
        return self.bytes + sum((loop.trips or 1) * loop.total for loop in self.loops)

    def everywhere(self, times: int = 1) -> Iterator[tuple[Region, int]]:
        """Yield this region and all inner loops with their numbers of executions."""
        yield self, times
        for loop in self.loops:
            yield from loop.everywhere(times * (loop.trips or 1))


Computation = dict[str, Instruction]


@dataclass(frozen=True)
class Program:
    """Computations by name, and the name of the entry computation."""

    computations: dict[str, Computation]
    entry: str

    def instructions(self) -> Iterator[Instruction]:
        """Yield all instructions."""
        for computation in self.computations.values():
            yield from computation.values()

    def region(self, choose: Callable[[Iterable[Region]], Region]) -> Region:
        """Return the program as nested loops.

        Args:
            choose: selects the branch of a conditional that counts: `cheapest` or `dearest`.
        """
        return self._region(self.entry, "", 1, choose)

    def _region(
        self, name: str, source: str, trips: int | None, choose: Callable[[Iterable[Region]], Region]
    ) -> Region:
        traffic, collectives, loops = 0, list[Collective](), list[Region]()
        within = self.computations[name]
        for instruction in within.values():
            code = instruction.opcode
            if code == "while":
                loops.append(self._region(instruction.called[0], instruction.source, self._trips(instruction), choose))
            elif code in ("conditional", "call", "async-start"):
                part = choose(self._region(other, "", 1, choose) for other in instruction.called)
                traffic += part.bytes
                collectives += part.collectives
                loops += part.loops
            else:
                traffic += self._moved(within, instruction)
                collectives += self._collectives(within, instruction)
        return Region(source, trips, traffic, tuple(collectives), tuple(loops))

    def _trips(self, loop: Instruction) -> int | None:
        """Return the number of iterations: as annotated, else the only constant of the condition, else None."""
        known, condition = TRIPS.search(loop.text), CONDITION.search(loop.text)
        if known:
            return int(known[1])
        numbers = [int(number) for name in self._reached(condition[1] if condition else "")
                   for line in self.computations[name].values() if line.opcode == "constant"
                   for number in re.findall(r"\((\d+)\)", line.text)]  # fmt: skip
        return numbers[0] if len(numbers) == 1 else None

    def _reached(self, name: str) -> Iterator[str]:
        if name in self.computations:
            yield name
            for instruction in self.computations[name].values():
                for other in instruction.called:
                    yield from self._reached(other)

    def _collectives(self, within: Computation, instruction: Instruction) -> Iterator[Collective]:
        """Yield the collectives of an instruction or of its fusion."""
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            inputs = [a for name in instruction.operands if name in within for a in within[name].arrays]
            largest = max((*inputs, *instruction.arrays), key=lambda a: a.bytes)
            yield Collective(kind, largest, instruction.source, _channel(instruction))
        elif instruction.opcode == "fusion":
            for name in instruction.called:
                for inner in self.computations[name].values():
                    yield from self._collectives(self.computations[name], inner)

    def _moved(self, within: Computation, instruction: Instruction) -> int:
        """Return the bytes that an instruction reads from and writes to HBM."""
        code, arrays = instruction.opcode, instruction.arrays
        if (
            code in NOTHING
            or code.endswith("-done")
            or any(f'"{name}"' in instruction.text for name in CALLS_OF_NOTHING)
        ):
            return 0
        if code == "slice-start":  # result: (source), slice, context
            return (arrays[1].bytes if arrays[0].hbm else 0) + arrays[1].hbm
        if code.endswith("-start") and len(arrays) > len(instruction.operands):  # result: operands, results, context
            return instruction.hbm
        operands = [within[name] for name in instruction.operands if name in within]
        read = sum(min(x.hbm, self._read(instruction, place, x.bytes)) for place, x in enumerate(operands))
        return read + min(instruction.hbm, self._written(within, instruction))

    def _read(self, user: Instruction, place: int, whole: int) -> int:
        """Return the bytes that an instruction reads of an operand."""
        if _channel(user):
            return 0
        if user.opcode in SLICES and place == 0:
            return min(whole, user.bytes)
        if user.opcode in UPDATES and place == 0:
            return 0
        if user.opcode == "fusion":
            inside = self.computations[user.called[0]]
            return self._uses(user.called[0], parameter(inside, place), whole)
        return whole

    def _uses(self, computation: str, value: str, whole: int) -> int:
        """Return the bytes that a fusion reads of a value."""
        total = 0
        for user, place in self.users[computation].get(value, ()):
            if self._is_view(user):
                total += self._uses(computation, user.name, whole)
            elif user.opcode != "tuple":
                total += self._read(user, place, whole)
                if user.opcode in UPDATES and place == 0:
                    total += self._uses(computation, user.name, whole)
        return min(whole, total)

    def _is_view(self, user: Instruction) -> bool:
        """Return whether an instruction inside a fusion only reinterprets its operand."""
        if user.opcode != "fusion":
            return user.opcode == "bitcast"
        return all(line.opcode in ("parameter", "bitcast") for line in self.computations[user.called[0]].values())

    def _written(self, within: Computation, instruction: Instruction) -> int:
        """Return the bytes that an instruction writes."""
        code = instruction.opcode
        if _channel(instruction):
            return 0
        if code in UPDATES and len(instruction.operands) > UPDATES[code]:
            return within[instruction.operands[UPDATES[code]]].bytes
        if code in ("tuple", "bitcast"):
            return sum(self._written(within, within[name]) for name in instruction.operands)
        if code == "fusion":
            inside = self.computations[instruction.called[0]]
            return self._written(inside, next(line for line in inside.values() if line.root))
        return instruction.bytes

    @cached_property
    def users(self) -> dict[str, dict[str, list[tuple[Instruction, int]]]]:
        """Users of each value with the index of the operand, by computation and value."""
        users: dict[str, dict[str, list[tuple[Instruction, int]]]] = {}
        for name, computation in self.computations.items():
            inside = users.setdefault(name, {})
            for instruction in computation.values():
                for place, operand in enumerate(instruction.operands):
                    inside.setdefault(operand, []).append((instruction, place))
        return users


def _channel(instruction: Instruction) -> str:
    """Return the channel of the collective that this instruction is a part of; empty: none."""
    match = STEP.search(instruction.text) if instruction.opcode in COLLECTIVES else None
    return match[1] if match else ""


def cheapest(branches: Iterable[Region]) -> Region:
    """Return the branch with the least traffic."""
    return min(branches, key=lambda branch: branch.total)


def dearest(branches: Iterable[Region]) -> Region:
    """Return the branch with the most traffic."""
    return max(branches, key=lambda branch: branch.total)


def parameter(computation: Computation, place: int) -> str:
    """Return the name of a parameter of a computation."""
    lines = (line for line in computation.values() if line.opcode == "parameter")
    return next(line.name for line in lines if line.text.startswith(f"({place})"))


def parse(text: str) -> Program:
    """Parse the text of a program."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            if (opened := OPENED.match(line)) and not line.startswith("HloModule"):
                current = computations.setdefault(opened[2], {})
                entry = opened[2] if opened[1] else entry
        elif line.startswith("}"):
            current = None
        elif assigned := ASSIGNED.match(line):
            current[assigned[2]] = _instruction(assigned[2], assigned[3], bool(assigned[1]))
    return Program(computations, entry)


def _instruction(name: str, text: str, root: bool) -> Instruction:
    kind = text[: _end(text, " ")]
    opcode, _, rest = text[len(kind) + 1 :].partition("(")
    arrays = tuple(
        Array(dtype, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size), _space(layout))
        for dtype, sizes, layout in ARRAY.findall(kind)
    )
    operands = tuple(NAME.findall(rest[: _end(rest, ")")]))
    called = CALLED.findall(rest) + [name for names in BRANCHES.findall(rest) for name in NAME.findall(names)]
    return Instruction(name, opcode, arrays, operands, tuple(called), f"({rest}", root)


def _space(layout: str) -> int:
    match = SPACE.search(layout)
    return int(match[1]) if match else 0


def _end(text: str, stop: str) -> int:
    """Return the index of a character outside all brackets, or the length of the text."""
    depth = 0
    for match in BRACKETS.finditer(text):
        if depth == 0 and match[0] == stop:
            return match.start()
        depth += (match[0] in "([{") - (match[0] in ")]}")
    return len(text)
