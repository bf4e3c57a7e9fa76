"""Resources of a compiled program on a chip: memory, and a lower bound of its time."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

import jax

from tests.aot.topology import GIB, Chip, Topology

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
    """A program compiled for a chip; all figures are of one device and one step.

    Attributes:
        chip: target.
        needed: lower bound of the bytes of HBM that a step moves; 0: unknown.
        flops: FLOPs of matrix products, counting loops of unknown length once.
        spare: free bytes of HBM; negative: missing bytes.
        seconds: compile time on this machine.
        memory: memory; None: the compiler refuses the program because it does not fit.
        text: optimised HLO.
        traffic: XLA's count of bytes that are read and written, an upper bound; None: XLA has none (GPUs). It counts
            the dearest branch of a conditional, an in-place update as a copy of the array, and a loop once.
    """

    chip: Chip
    needed: int
    flops: float
    spare: float
    seconds: float
    memory: Memory | None = None
    text: str = field(default="", repr=False)
    traffic: float | None = None

    @property
    def fits(self) -> bool:
        """Return whether the program fits into HBM."""
        return self.memory is not None and self.spare >= 0

    @property
    def fit(self) -> str:
        """Return whether the program fits, with the free or missing GiB."""
        return f"yes, {gib(self.spare)} left" if self.fits else f"no, {gib(-self.spare)} missing"

    @property
    def milliseconds(self) -> float:
        """Return a lower bound of the time: needed bytes by bandwidth, or products by FLOP rate."""
        return 1000 * max(self.needed / self.chip.bandwidth, self.flops / self.chip.flops)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "fits": self.fits,
            "spare": self.spare,
            "memory": None if self.memory is None else self.memory._asdict(),
            "needed": self.needed,
            "traffic": self.traffic,
            "flops": self.flops,
            "milliseconds": self.milliseconds,
            "compile_seconds": self.seconds,
        }


def compile_for(traced: Any, topology: Topology, devices: int, needed: int = 0) -> Compiled:
    """Compile a traced program for a topology.

    Args:
        traced: result of `jax.jit(…).trace(…)` with abstract arguments.
        topology: target devices.
        devices: number of devices that the arguments are sharded over.
        needed: lower bound of the bytes of HBM that a step moves.
    """
    chip, start = topology.chip, perf_counter()
    flops = product_flops(traced.jaxpr.jaxpr) / devices
    try:
        executable = traced.lower(lowering_platforms=(chip.platform,)).compile()
    except jax.errors.JaxRuntimeError as error:
        if (over := OVER.search(str(error))) is None:
            raise
        spare = float(over[3]) * UNITS[over[4]] - float(over[1]) * UNITS[over[2]]
        return Compiled(chip, needed, flops, spare, perf_counter() - start)
    sizes, costs = executable.memory_analysis(), executable.cost_analysis() or {}
    arguments, aliased = sizes.argument_size_in_bytes, sizes.alias_size_in_bytes
    total = arguments + sizes.output_size_in_bytes - aliased
    total += sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes
    memory = Memory(arguments, sizes.temp_size_in_bytes, aliased, total, sizes.peak_memory_in_bytes)
    text, seconds = executable.as_text(), perf_counter() - start
    return Compiled(chip, needed, flops, chip.memory - total, seconds, memory, text, costs.get("bytes accessed"))


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


def local_bytes(tree: Any) -> int:
    """Return the bytes on one device of a tree of shapes with shardings."""
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def gib(size: float) -> str:
    """Format bytes in GiB, small sizes with more decimal places."""
    value = size / GIB
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.4f}"
