"""What a compiled program takes of a chip: memory, traffic, collectives, and the least time it can need."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

import jax

from aspd.aot.hlo import Program, Region, cheapest, dearest, parse
from aspd.aot.topology import GIB, Chip, Topology

NOT_MEASURED = "computed from the compiled program, not measured"
OVER = re.compile(r"Used ([\d.]+)([MG]) of ([\d.]+)([MG]) hbm")
UNITS = {"M": 2.0**20, "G": GIB}


class Memory(NamedTuple):
    """Bytes on each device, as XLA says them.

    Attributes:
        arguments: what the program is given.
        temporary: what it needs beside arguments and results.
        aliased: results that lie where arguments lay.
        total: of all, aliased ones once, the program itself included.
        peak: at the worst moment; XLA may count the temporary memory of one moment only.
    """

    arguments: int
    temporary: int
    aliased: int
    total: int
    peak: int


@dataclass(frozen=True)
class Compiled:
    """A program for a chip.

    Attributes:
        memory, program: None where it does not fit, and the compiler refuses it.
        spare: bytes of HBM that it leaves free; negative: that are missing.
        flops: of its products on each device, every loop of unknown length once.
        seconds: of compiling.
    """

    chip: Chip
    memory: Memory | None
    program: Program | None
    spare: float
    flops: float
    seconds: float


def compile_for(traced: Any, on: Topology, devices: int) -> Compiled:
    """Compile what `jax.jit(…).trace(…)` gives for abstract arguments that lie on so many devices of a topology."""
    chip, begun = on.chip, perf_counter()
    flops = product_flops(traced.jaxpr.jaxpr) / devices
    try:
        executable = traced.lower(lowering_platforms=(chip.platform,)).compile()
    except jax.errors.JaxRuntimeError as error:
        if (over := OVER.search(str(error))) is None:
            raise
        spare = float(over[3]) * UNITS[over[4]] - float(over[1]) * UNITS[over[2]]
        return Compiled(chip, None, None, spare, flops, perf_counter() - begun)
    of = executable.memory_analysis()
    total = of.argument_size_in_bytes + of.output_size_in_bytes - of.alias_size_in_bytes
    total += of.temp_size_in_bytes + of.generated_code_size_in_bytes
    memory = Memory(
        of.argument_size_in_bytes, of.temp_size_in_bytes, of.alias_size_in_bytes, total, of.peak_memory_in_bytes
    )
    program = parse(executable.as_text())
    return Compiled(chip, memory, program, chip.memory - total, flops, perf_counter() - begun)


def product_flops(jaxpr: Any) -> float:
    """FLOPs of all matrix products of a jaxpr, on all devices together; of a conditional, those of one branch."""
    total = 0.0
    for equation in jaxpr.eqns:
        params = equation.params
        if equation.primitive.name == "dot_general":
            ((contracted, _), _) = params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2.0 * prod(equation.outvars[0].aval.shape) * prod(shape[axis] for axis in contracted)
        inner = [getattr(one, "jaxpr", one) for value in params.values()
                 for one in (value if isinstance(value, tuple | list) else (value,))]  # fmt: skip
        found = [product_flops(one) for one in inner if hasattr(one, "eqns")]
        times = 1.0
        if equation.primitive.name == "scan":
            times = params["length"]
        elif equation.primitive.name == "pallas_call":
            # A size that the program itself finds out counts as 1.
            times = prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
        elif equation.primitive.name == "shard_map":
            times = params["mesh"].size  # ours are over all axes
        total += times * (max(found, default=0.0) if equation.primitive.name == "cond" else sum(found))
    return total


class Said(NamedTuple):
    """Collectives of one kind and shape in one loop.

    Attributes:
        loop: where it stands in Python; empty: in none.
        times: in a pass or step.
        bytes: of all of them: the larger of what goes in and what comes out.
    """

    loop: str
    kind: str
    array: str
    times: int
    bytes: int


@dataclass(frozen=True)
class Figures:
    """What a pass or a step takes of each device; None where the program does not fit, and there is nothing to read.

    Attributes:
        fits: whether HBM holds it.
        spare: bytes that are left of it; negative: missing.
        memory: see `Memory`.
        bytes: that a pass or step moves through HBM, with the cheapest branch of every conditional: greedy.
        most_bytes: with the dearest ones: sampled.
        needed_bytes: that it cannot do without.
        outside_bytes: that a call moves before and after its passes.
        collectives, collective_bytes: what devices say to each other.
        needed_collective_bytes: what the mesh cannot do without.
        flops: of products.
        milliseconds: at least: at the chip's bandwidth or FLOP rate, whichever takes longer.
        compile_seconds: of this machine.
    """

    fits: bool
    spare: float
    memory: Memory | None
    bytes: int | None
    most_bytes: int | None
    needed_bytes: int
    outside_bytes: int | None
    collectives: tuple[Said, ...]
    collective_bytes: int | None
    needed_collective_bytes: int
    flops: float
    milliseconds: float | None
    compile_seconds: float


def figures(of: Compiled, looped: bool, needed_bytes: int, needed_collective_bytes: int) -> Figures:
    """Read a program.

    Args:
        looped: it is a loop over passes; a pass counts, and what is outside the loop apart.
    """
    if of.program is None:
        nothing = (None, None, needed_bytes, None, (), None, needed_collective_bytes, of.flops, None, of.seconds)
        return Figures(False, of.spare, None, *nothing)
    least, most = of.program.region(cheapest), of.program.region(dearest)
    one = pass_of(least) if looped else least
    said = collectives_of(one)
    return Figures(
        fits=of.spare >= 0,
        spare=of.spare,
        memory=of.memory,
        bytes=one.total,
        most_bytes=pass_of(most).total if looped else most.total,
        needed_bytes=needed_bytes,
        outside_bytes=least.total - one.total if looped else 0,
        collectives=said,
        collective_bytes=sum(each.bytes for each in said),
        needed_collective_bytes=needed_collective_bytes,
        flops=of.flops,
        milliseconds=1000 * max(one.total / of.chip.bandwidth, of.flops / of.chip.flops),
        compile_seconds=of.seconds,
    )


def pass_of(program: Region) -> Region:
    """The loop over passes: the one that moves most."""
    return max(program.loops, key=lambda loop: loop.total)


def collectives_of(region: Region) -> tuple[Said, ...]:
    """All collectives of a region and of the loops inside, by loop, kind and shape; the largest first.

    One that goes on in steps counts where it begins: in the outermost loop that has a step of it.
    """
    counted: Counter[tuple[str, str, str, int]] = Counter()
    begun = set[str]()
    for inner, times in sorted(region.everywhere(), key=lambda of: of[1]):
        for one in inner.collectives:
            if one.channel not in begun:
                counted[inner.source, one.kind, str(one.array), one.array.bytes] += times
            begun |= {one.channel} - {""}
    said = (Said(loop, kind, array, count, count * size) for (loop, kind, array, size), count in counted.items())
    return tuple(sorted(said, key=lambda one: -one.bytes))


def local_bytes(tree: Any) -> int:
    """Bytes of a tree of shapes with shardings that one device holds."""
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def gib(size: float | None) -> str:
    """Bytes in GiB, with more places where there are few."""
    if size is None:
        return ""
    value = size / GIB
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.4f}"


def fit(of: Figures) -> str:
    """Whether a program fits, and by how much."""
    return f"yes, {gib(of.spare)} left" if of.fits else f"no, {gib(-of.spare)} missing"


def collective_table(of: Figures, most: int = 12) -> str:
    """Markdown; the largest collectives by loop."""
    lines = ["| loop | collective | of each | count | MiB |", "|---|---|---|---|---|"]
    for one in of.collectives[:most]:
        lines.append(f"| {one.loop or 'none'} | {one.kind} | {one.array} | {one.times} | {one.bytes / 2**20:.2f} |")
    return "\n".join(lines)
