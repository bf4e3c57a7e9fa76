"""A reader of optimised HLO, the text of a compiled program: what it moves through HBM, its loops, its collectives.

XLA's own cost analysis counts a loop once, an update in place as a pass over the whole array, and what lies in a core's
own memory as if it were in HBM; for GPUs there is none. Here an instruction reads its operands and writes its result,
as far as they lie in HBM; but of a slice or a gather it reads only what is taken, of an update in place it writes only
what is new, and a fusion is seen through for both. Padding of layouts is not counted, nor what a kernel reads twice,
nor the HBM of a collective that goes on inside fusions while these compute.
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
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # and which operand is the new part
# Nothing moves: names for what is there, room without contents, or the end of what was counted when it began.
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
    """An array as a program holds it; `space`: the memory it lies in, 0: HBM."""

    dtype: str
    shape: tuple[int, ...]
    space: int

    @property
    def bytes(self) -> int:
        """Its size."""
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or [0])[0])
        return -(-prod(self.shape) * bits // 8)

    @property
    def hbm(self) -> int:
        """Its size in HBM."""
        return 0 if self.space else self.bytes

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Instruction(NamedTuple):
    """A line of a program.

    Attributes:
        name, opcode: as they are written.
        arrays: its result; of a tuple, all of them.
        operands: names.
        called: computations, but for the condition of a loop.
        text: all that is written behind the opcode.
        root: whether it is the result of its computation.
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
        """Of its result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def hbm(self) -> int:
        """Of its result, in HBM."""
        return sum(array.hbm for array in self.arrays)

    @property
    def source(self) -> str:
        """What it was in Python, as JAX names it."""
        found = SOURCE.search(self.text)
        return found[1] if found else self.name


class Collective(NamedTuple):
    """What devices say to each other: the larger of what goes in and what comes out, on each of them.

    Attributes:
        channel: of a collective that goes on inside several fusions, a step in each; otherwise empty.
    """

    kind: str
    array: Array
    source: str
    channel: str


@dataclass(frozen=True)
class Region:
    """What runs every time round a loop, or once: the whole program.

    Attributes:
        source: where the loop stands.
        trips: how often it goes round; None: nobody knows.
        bytes: that go through HBM each time, loops inside left out.
        collectives: each time, loops inside left out.
        loops: inside.
    """

    source: str
    trips: int | None
    bytes: int
    collectives: tuple[Collective, ...]
    loops: tuple[Region, ...]

    @property
    def total(self) -> int:
        """Bytes each time, loops inside included; of these, unknown numbers of rounds count as one."""
        return self.bytes + sum((loop.trips or 1) * loop.total for loop in self.loops)

    def everywhere(self, times: int = 1) -> Iterator[tuple[Region, int]]:
        """It and all loops inside, each with how often it runs."""
        yield self, times
        for loop in self.loops:
            yield from loop.everywhere(times * (loop.trips or 1))


Computation = dict[str, Instruction]


@dataclass(frozen=True)
class Program:
    """Computations by name, and which one is the program."""

    computations: dict[str, Computation]
    entry: str

    def instructions(self) -> Iterator[Instruction]:
        """All of them."""
        for computation in self.computations.values():
            yield from computation.values()

    def region(self, choose: Callable[[Iterable[Region]], Region]) -> Region:
        """The program by loops; of a conditional counts the branch that is chosen: `cheapest` or `dearest`."""
        return self._region(self.entry, "", 1, choose)

    def _region(
        self, name: str, source: str, trips: int | None, choose: Callable[[Iterable[Region]], Region]
    ) -> Region:
        own, collectives, loops = 0, list[Collective](), list[Region]()
        within = self.computations[name]
        for instruction in within.values():
            code = instruction.opcode
            if code == "while":
                loops.append(self._region(instruction.called[0], instruction.source, self._trips(instruction), choose))
            elif code in ("conditional", "call", "async-start"):
                part = choose(self._region(other, "", 1, choose) for other in instruction.called)
                own += part.bytes
                collectives += part.collectives
                loops += part.loops
            else:
                own += self._moved(within, instruction)
                collectives += self._collectives(within, instruction)
        return Region(source, trips, own, tuple(collectives), tuple(loops))

    def _trips(self, loop: Instruction) -> int | None:
        """Where nothing else tells, a condition that compares with one number has that many rounds."""
        known, condition = TRIPS.search(loop.text), CONDITION.search(loop.text)
        if known:
            return int(known[1])
        numbers = [int(number) for name in self._reached(condition[1] if condition else "")
                   for of in self.computations[name].values() if of.opcode == "constant"
                   for number in re.findall(r"\((\d+)\)", of.text)]  # fmt: skip
        return numbers[0] if len(numbers) == 1 else None

    def _reached(self, name: str) -> Iterator[str]:
        if name in self.computations:
            yield name
            for instruction in self.computations[name].values():
                for other in instruction.called:
                    yield from self._reached(other)

    def _collectives(self, within: Computation, instruction: Instruction) -> Iterator[Collective]:
        """Its own, or those of a fusion."""
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            said = [a for name in instruction.operands if name in within for a in within[name].arrays]
            largest = max((*said, *instruction.arrays), key=lambda a: a.bytes)
            yield Collective(kind, largest, instruction.source, _channel(instruction))
        elif instruction.opcode == "fusion":
            for name in instruction.called:
                for inner in self.computations[name].values():
                    yield from self._collectives(self.computations[name], inner)

    def _moved(self, within: Computation, instruction: Instruction) -> int:
        """Bytes that an instruction reads from HBM and writes there."""
        code, arrays = instruction.opcode, instruction.arrays
        if (
            code in NOTHING
            or code.endswith("-done")
            or any(f'"{name}"' in instruction.text for name in CALLS_OF_NOTHING)
        ):
            return 0
        if code == "slice-start":  # (what is sliced), the slice, a number
            return (arrays[1].bytes if arrays[0].hbm else 0) + arrays[1].hbm
        if code.endswith("-start") and len(arrays) > len(instruction.operands):  # operands, results, a number
            return instruction.hbm
        operands = [within[name] for name in instruction.operands if name in within]
        read = sum(min(of.hbm, self._read(instruction, place, of.bytes)) for place, of in enumerate(operands))
        return read + min(instruction.hbm, self._written(within, instruction))

    def _read(self, user: Instruction, place: int, whole: int) -> int:
        """Bytes that an instruction reads of an operand."""
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
        """Bytes that are read of a value inside a fusion."""
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
        """Whether an instruction inside a fusion only looks at its operand in another form."""
        if user.opcode != "fusion":
            return user.opcode == "bitcast"
        return all(of.opcode in ("parameter", "bitcast") for of in self.computations[user.called[0]].values())

    def _written(self, within: Computation, instruction: Instruction) -> int:
        """Bytes that an instruction writes."""
        code = instruction.opcode
        if _channel(instruction):
            return 0
        if code in UPDATES and len(instruction.operands) > UPDATES[code]:
            return within[instruction.operands[UPDATES[code]]].bytes
        if code in ("tuple", "bitcast"):
            return sum(self._written(within, within[name]) for name in instruction.operands)
        if code == "fusion":
            inside = self.computations[instruction.called[0]]
            return self._written(inside, next(of for of in inside.values() if of.root))
        return instruction.bytes

    @cached_property
    def users(self) -> dict[str, dict[str, list[tuple[Instruction, int]]]]:
        """By computation and value: what uses it, as which operand."""
        found: dict[str, dict[str, list[tuple[Instruction, int]]]] = {}
        for name, computation in self.computations.items():
            of = found.setdefault(name, {})
            for instruction in computation.values():
                for place, operand in enumerate(instruction.operands):
                    of.setdefault(operand, []).append((instruction, place))
        return found


def _channel(instruction: Instruction) -> str:
    """The channel of a collective of which this is one step, inside a fusion."""
    found = STEP.search(instruction.text) if instruction.opcode in COLLECTIVES else None
    return found[1] if found else ""


def cheapest(branches: Iterable[Region]) -> Region:
    """The one that moves least."""
    return min(branches, key=lambda of: of.total)


def dearest(branches: Iterable[Region]) -> Region:
    """The one that moves most."""
    return max(branches, key=lambda of: of.total)


def parameter(computation: Computation, place: int) -> str:
    """The name of a parameter."""
    return next(of.name for of in computation.values() if of.opcode == "parameter" and of.text.startswith(f"({place})"))


def parse(text: str) -> Program:
    """Read a program."""
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
    called = CALLED.findall(rest) + [one for found in BRANCHES.findall(rest) for one in NAME.findall(found)]
    return Instruction(name, opcode, arrays, operands, tuple(called), f"({rest}", root)


def _space(layout: str) -> int:
    found = SPACE.search(layout)
    return int(found[1]) if found else 0


def _end(text: str, stop: str) -> int:
    """Where a character stands outside all brackets; else the length."""
    depth = 0
    for found in BRACKETS.finditer(text):
        if depth == 0 and found[0] == stop:
            return found.start()
        depth += (found[0] in "([{") - (found[0] in ")]}")
    return len(text)
