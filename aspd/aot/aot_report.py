"""Resources of a compiled program on a chip: memory, traffic, collectives, and a lower bound of its time."""

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
    """Bytes on each device, as reported by XLA.

    Attributes:
        arguments: arguments of the program.
        temporary: temporary arrays.
        aliased: results that share the memory of arguments.
        total: arguments, results, temporary arrays and the program itself, counting aliased memory once.
        peak: peak memory; XLA may count temporary arrays of one moment only.
    """

    arguments: int
    temporary: int
    aliased: int
    total: int
    peak: int


@dataclass(frozen=True)
class Compiled:
    """A program compiled for a chip.

    Attributes:
        chip: target.
        memory, program: memory and HLO; None if the compiler refuses the program because it does not fit.
        spare: free bytes of HBM; negative: missing bytes.
        flops: FLOPs of matrix products on each device, counting loops of unknown length once.
        seconds: compile time.
    """

    chip: Chip
    memory: Memory | None
    program: Program | None
    spare: float
    flops: float
    seconds: float


def compile_for(traced: Any, topology: Topology, devices: int) -> Compiled:
    """Compile a traced program for a topology.

    Args:
        traced: result of `jax.jit(…).trace(…)` with abstract arguments.
        topology: target devices.
        devices: number of devices that the arguments are sharded over.
    """
    chip, start = topology.chip, perf_counter()
    flops = product_flops(traced.jaxpr.jaxpr) / devices
    try:
        executable = traced.lower(lowering_platforms=(chip.platform,)).compile()
    except jax.errors.JaxRuntimeError as error:
        if (over := OVER.search(str(error))) is None:
            raise
        spare = float(over[3]) * UNITS[over[4]] - float(over[1]) * UNITS[over[2]]
        return Compiled(chip, None, None, spare, flops, perf_counter() - start)
    sizes = executable.memory_analysis()
    arguments, aliased = sizes.argument_size_in_bytes, sizes.alias_size_in_bytes
    total = arguments + sizes.output_size_in_bytes - aliased
    total += sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes
    memory = Memory(arguments, sizes.temp_size_in_bytes, aliased, total, sizes.peak_memory_in_bytes)
    program = parse(executable.as_text())
    return Compiled(chip, memory, program, chip.memory - total, flops, perf_counter() - start)


def product_flops(jaxpr: Any) -> float:
    """Return the FLOPs of all matrix products of a jaxpr on all devices; a conditional counts its largest branch."""
    total = 0.0
    for equation in jaxpr.eqns:
        params = equation.params
        if equation.primitive.name == "dot_general":
            ((contracted, _), _) = params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2.0 * prod(equation.outvars[0].aval.shape) * prod(shape[axis] for axis in contracted)
        inner = [getattr(item, "jaxpr", item) for value in params.values()
                 for item in (value if isinstance(value, tuple | list) else (value,))]  # fmt: skip
        flops = [product_flops(item) for item in inner if hasattr(item, "eqns")]
        times = 1.0
        if equation.primitive.name == "scan":
            times = params["length"]
        elif equation.primitive.name == "pallas_call":
            # A grid size that is computed at run time counts as 1.
            times = prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
        elif equation.primitive.name == "shard_map":
            times = params["mesh"].size  # this project maps over all axes
        total += times * (max(flops, default=0.0) if equation.primitive.name == "cond" else sum(flops))
    return total


class CollectiveTotal(NamedTuple):
    """Collectives of one kind and shape in one loop.

    Attributes:
        loop: source of the loop in Python; empty: outside loops.
        kind: operation.
        array: dtype and shape.
        times: number per step.
        bytes: bytes of all of them, counting the larger of input and output.
    """

    loop: str
    kind: str
    array: str
    times: int
    bytes: int


@dataclass(frozen=True)
class Figures:
    """Resources of a step on each device; fields are None if the program does not fit and was not compiled.

    Attributes:
        fits: whether the program fits into HBM.
        spare: free bytes of HBM; negative: missing bytes.
        memory: see `Memory`.
        bytes: HBM traffic of a step with the cheapest branch of each conditional (greedy decoding).
        most_bytes: HBM traffic with the most expensive branches (sampling).
        needed_bytes: lower bound of the traffic.
        outside_bytes: HBM traffic of a call outside its loop over steps.
        collectives, collective_bytes: collectives of a step.
        needed_collective_bytes: lower bound of `collective_bytes`.
        flops: FLOPs of matrix products.
        milliseconds: lower bound of the time, by the chip's bandwidth and FLOP rate.
        compile_seconds: compile time on this machine.
    """

    fits: bool
    spare: float
    memory: Memory | None
    bytes: int | None
    most_bytes: int | None
    needed_bytes: int
    outside_bytes: int | None
    collectives: tuple[CollectiveTotal, ...]
    collective_bytes: int | None
    needed_collective_bytes: int
    flops: float
    milliseconds: float | None
    compile_seconds: float


def figures(compiled: Compiled, looped: bool, needed_bytes: int, needed_collective_bytes: int) -> Figures:
    """Compute the figures of a program.

    Args:
        compiled: compiled program.
        looped: whether the program is a loop over steps; the figures are then those of one step.
        needed_bytes: lower bound of the HBM traffic.
        needed_collective_bytes: lower bound of the bytes of collectives.
    """
    flops, seconds, chip = compiled.flops, compiled.seconds, compiled.chip
    if compiled.program is None:
        unknown = (None, None, needed_bytes, None, (), None, needed_collective_bytes, flops, None, seconds)
        return Figures(False, compiled.spare, None, *unknown)
    least, most = compiled.program.region(cheapest), compiled.program.region(dearest)
    step = step_loop(least) if looped else least
    collectives = count_collectives(step)
    return Figures(
        fits=compiled.spare >= 0,
        spare=compiled.spare,
        memory=compiled.memory,
        bytes=step.total,
        most_bytes=step_loop(most).total if looped else most.total,
        needed_bytes=needed_bytes,
        outside_bytes=least.total - step.total if looped else 0,
        collectives=collectives,
        collective_bytes=sum(total.bytes for total in collectives),
        needed_collective_bytes=needed_collective_bytes,
        flops=flops,
        milliseconds=1000 * max(step.total / chip.bandwidth, flops / chip.flops),
        compile_seconds=seconds,
    )


def step_loop(program: Region) -> Region:
    """Return the loop over steps: the one with the most traffic."""
    return max(program.loops, key=lambda loop: loop.total)


def count_collectives(region: Region) -> tuple[CollectiveTotal, ...]:
    """Return the collectives of a region and its inner loops by loop, kind and shape, the largest first.

    A collective that is split into several fusions counts in the outermost loop that has a part of it.
    """
    counts: Counter[tuple[str, str, str, int]] = Counter()
    seen = set[str]()
    for inner, times in sorted(region.everywhere(), key=lambda item: item[1]):
        for collective in inner.collectives:
            if collective.channel not in seen:
                counts[inner.source, collective.kind, str(collective.array), collective.array.bytes] += times
            seen |= {collective.channel} - {""}
    totals = (CollectiveTotal(loop, kind, array, n, n * size) for (loop, kind, array, size), n in counts.items())
    return tuple(sorted(totals, key=lambda total: -total.bytes))


def local_bytes(tree: Any) -> int:
    """Return the bytes on one device of a tree of shapes with shardings."""
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def gib(size: float | None) -> str:
    """Format bytes in GiB, small sizes with more decimal places."""
    if size is None:
        return ""
    value = size / GIB
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.4f}"


def fit(figures: Figures) -> str:
    """Return whether a program fits, with the free or missing GiB."""
    return f"yes, {gib(figures.spare)} left" if figures.fits else f"no, {gib(-figures.spare)} missing"


def collective_table(figures: Figures, limit: int = 12) -> str:
    """Return a Markdown table of the largest collectives by loop."""
    lines = ["| loop | collective | array | count | MiB |", "|---|---|---|---|---|"]
    for c in figures.collectives[:limit]:
        lines.append(f"| {c.loop or 'none'} | {c.kind} | {c.array} | {c.times} | {c.bytes / 2**20:.2f} |")
    return "\n".join(lines)
