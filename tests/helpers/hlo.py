"""Instructions of a compiled program, read from its text (optimised HLO), with the loops around them.

Memory is XLA's own analysis. Tests read here what it does not tell: copies, sorts and collectives.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
               "collective-broadcast")  # fmt: skip
OPENED = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\](\{[^}]*S\([1-9])?")
NAME = re.compile(r"%([\w.\-]+)")
CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
CONSTANT = re.compile(r" = [su]32\[\]\S* constant\((\d+)\)")
SOURCE = re.compile(r'op_name="([^"]*)"')
PART = re.compile(r"channel_id=(\d+),.*\bchain_id=")


class Array(NamedTuple):
    """Type of an array; `hbm`: it lies in HBM, not in a core's own memory."""

    dtype: str
    shape: tuple[int, ...]
    hbm: bool

    @property
    def bytes(self) -> int:
        """Return the size in bytes."""
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or [0])[0])
        return -(-prod(self.shape) * bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Instruction(NamedTuple):
    """An instruction and its place.

    Attributes:
        opcode: operation.
        arrays: arrays of the result; several for a tuple.
        operands: arrays of the operands.
        loop: JAX's name of the innermost loop; empty: outside loops.
        times: number of executions, where loops of unknown length, such as that over steps, count once.
        fused: whether it is part of a fusion.
        channel: channel of a collective that is split into several fusions; otherwise empty.
    """

    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[Array, ...]
    loop: str
    times: int
    fused: bool
    channel: str


class CollectiveTotal(NamedTuple):
    """Collectives of one kind and shape in one loop.

    Attributes:
        loop: see `Instruction`.
        kind: operation.
        array: dtype and shape.
        times: number of executions.
        bytes: bytes of all of them, counting the larger of input and output.
    """

    loop: str
    kind: str
    array: str
    times: int
    bytes: int


def instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a program, those of called computations and of all branches included."""
    computations: dict[str, list[str]] = {}
    entry, current = "", list[str]()
    for line in text.splitlines():
        if (opened := OPENED.match(line)) and not line.startswith("HloModule"):
            current = computations.setdefault(opened[2], [])
            entry = opened[2] if opened[1] else entry
        else:
            current.append(line)

    def called(line: str) -> list[str]:
        return CALLED.findall(line) + [name for names in BRANCHES.findall(line) for name in NAME.findall(names)]

    def constants(name: str) -> list[int]:
        """Return the integer constants of a computation and those that it calls."""
        lines = computations.get(name, [])
        own = [int(number) for line in lines for number in CONSTANT.findall(line)]
        return own + [number for line in lines for other in called(line) for number in constants(other)]

    def trips(line: str) -> int:
        """Return the iterations of a loop: as annotated, else the only constant of its condition, else 1."""
        known, condition = TRIPS.search(line), CONDITION.search(line)
        numbers = [int(known[1])] if known else constants(condition[1]) if condition else []
        return numbers[0] if len(numbers) == 1 else 1

    def walk(name: str, loop: str, times: int, fused: bool) -> Iterator[Instruction]:
        arrays: dict[str, tuple[Array, ...]] = {}
        for match in filter(None, map(LINE.match, computations[name])):
            own, kind, opcode, rest = match.groups()
            arrays[own] = tuple(
                Array(dtype, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size), not space)
                for dtype, sizes, space in ARRAY.findall(kind)
            )
            operands = [a for other in NAME.findall(rest.partition(")")[0]) for a in arrays.get(other, ())]
            part = PART.search(rest) if opcode in COLLECTIVES else None
            yield Instruction(opcode, arrays[own], tuple(operands), loop, times, fused, part[1] if part else "")
            inner, count = loop, times
            if opcode == "while":
                source = SOURCE.search(rest)
                inner, count = source[1] if source else own, times * trips(rest)
            for other in called(rest):
                yield from walk(other, inner, count, fused or opcode == "fusion")

    yield from walk(entry, "", 1, False)


def count_collectives(text: str) -> tuple[CollectiveTotal, ...]:
    """Return the collectives of a program by loop, kind and shape, the largest first.

    A collective that is split into several fusions counts in the outermost loop that has a part of it.
    """
    counts: Counter[tuple[str, str, str, int]] = Counter()
    seen = set[str]()
    found = [one for one in instructions(text) if one.opcode.removesuffix("-start") in COLLECTIVES]
    for one in sorted(found, key=lambda one: one.times):
        largest = max((*one.operands, *one.arrays), key=lambda array: array.bytes)
        if one.channel not in seen:
            counts[one.loop, one.opcode.removesuffix("-start"), str(largest), largest.bytes] += one.times
        seen |= {one.channel} - {""}
    totals = (CollectiveTotal(loop, kind, array, n, n * size) for (loop, kind, array, size), n in counts.items())
    return tuple(sorted(totals, key=lambda total: -total.bytes))
