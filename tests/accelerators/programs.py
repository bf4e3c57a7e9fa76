"""Programs under test: four layers of a 7B or 8B model.

A TPU keeps a cache this small in a core's own memory and writes it back in every step. So where bytes of a step count,
the shape is 8B's, whose cache is a quarter of 7B's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax

from aspd.aot.abstract import abstract_model
from aspd.aot.aot_report import Compiled, Figures, compile_for, figures
from aspd.aot.decode import bucket_for, needed_bytes, needed_collective_bytes, trace_steps
from aspd.aot.hlo import Instruction
from aspd.aot.topology import Topology, open_topology
from aspd_jax.language_model import LanguageModel
from aspd_jax.model.cache import Bucket
from aspd_jax.shapes import SHAPES
from aspd_jax.sharding import make_mesh
from infer.bench.decoding import SEPARATOR
from infer.engine import Engine

LAYERS = 4


@dataclass(frozen=True)
class Case:
    """A program of decoding.

    Attributes:
        bucket: that is compiled; None: the engine's own for the width.
    """

    topology: str
    shape: str
    width: int
    slots: int = 2048
    batch: int = 1
    mesh: tuple[tuple[str, int], ...] = ()
    weights: str = "float"
    attention: str = "decode"
    bucket: Bucket | None = None

    def __str__(self) -> str:
        mesh = "-".join(f"{axis}{size}" for axis, size in self.mesh)
        parts = [
            self.topology.replace(":", "_"),
            self.shape,
            mesh,
            f"w{self.width}",
            f"c{self.slots}",
            f"b{self.batch}",
        ]
        others = self.weights.replace("float", ""), "flash" if self.attention == "flash_decode" else ""
        return "-".join(part for part in [*parts, *others] if part)


@dataclass(frozen=True)
class Decoding:
    """A case, compiled and read."""

    on: Topology
    lm: LanguageModel
    bucket: Bucket
    compiled: Compiled
    figures: Figures

    @property
    def copies(self) -> list[Instruction]:
        """Copies from HBM to HBM, wherever they are, but for those inside fusions."""
        program = self.compiled.program
        assert program is not None
        fused = {name for of in program.instructions() if of.opcode == "fusion" for name in of.called}
        found = []
        for name, computation in program.computations.items():
            for of in computation.values() if name not in fused else ():
                sources = [computation[name] for name in of.operands if name in computation]
                if of.opcode in ("copy", "copy-start") and of.arrays[0].hbm and all(one.hbm for one in sources):
                    found.append(of)
        return found


@cache
def decoding(case: Case) -> Decoding:
    """Compile and read a case."""
    on = open_topology(case.topology)
    mesh = make_mesh(dict(case.mesh), on.devices) if case.mesh else None
    config = replace(SHAPES[case.shape], dtype="bfloat16", layers=LAYERS, weights=case.weights,
                     decode_attention=case.attention)  # fmt: skip
    lm = abstract_model(config, on, mesh)
    engine = Engine(lm, max_length=case.slots, max_batch=case.batch, separator_ids=SEPARATOR)
    bucket = case.bucket or bucket_for(engine, case.width)
    compiled = compile_for(trace_steps(lm, engine, on, bucket), on, 1 if mesh is None else mesh.size)
    assert compiled.program is not None, f"{case} does not fit: {compiled.spare / 2**30:.2f} GiB"
    needed = needed_bytes(lm, engine, on), needed_collective_bytes(lm, bucket)
    return Decoding(on, lm, bucket, compiled, figures(compiled, True, *needed))


def small(topology_name: str, function: Any, *arguments: Any, **options: Any) -> Compiled:
    """A small function for the first device of a topology, or for the mesh that its arguments lie on."""
    on = open_topology(topology_name)
    return compile_for(jax.jit(function, **options).trace(*arguments), on, 1)
