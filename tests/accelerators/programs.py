"""Programs under test: four layers of a 7B or 8B model.

A TPU keeps a cache this small in a core's own memory and writes it back in every step. So where bytes of a step count,
the shape is 8B's, whose cache is a quarter of 7B's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax

from aspd_jax.language_model import LanguageModel
from aspd_jax.model.cache import Bucket
from aspd_jax.shapes import SHAPES
from aspd_jax.sharding import make_mesh
from infer.bench.decoding import SEPARATOR
from infer.engine import Engine
from tests.aot.abstract import abstract_model
from tests.aot.decode import bucket_for, needed_bytes, trace_steps
from tests.aot.report import Compiled, compile_for
from tests.aot.topology import open_topology
from tests.helpers.hlo import Array, instructions

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
    """A case, compiled."""

    lm: LanguageModel
    bucket: Bucket
    compiled: Compiled

    @property
    def temporary(self) -> int:
        """Bytes of temporary arrays."""
        assert self.compiled.memory is not None
        return self.compiled.memory.temporary


@cache
def decoding(case: Case) -> Decoding:
    """Compile a case."""
    on = open_topology(case.topology)
    mesh = make_mesh(dict(case.mesh), on.devices) if case.mesh else None
    config = replace(SHAPES[case.shape], dtype="bfloat16", layers=LAYERS, weights=case.weights,
                     decode_attention=case.attention)  # fmt: skip
    lm = abstract_model(config, on, mesh)
    engine = Engine(lm, max_length=case.slots, max_batch=case.batch, separator_ids=SEPARATOR)
    bucket = case.bucket or bucket_for(engine, case.width)
    needed = needed_bytes(lm, engine, on)
    compiled = compile_for(trace_steps(lm, engine, on, bucket), on, 1 if mesh is None else mesh.size, needed)
    assert compiled.fits, f"{case}: {compiled.fit}"
    return Decoding(lm, bucket, compiled)


def copies(text: str) -> list[Array]:
    """Arrays that are copied from HBM to HBM, apart from copies inside fusions."""
    return [one.arrays[0] for one in instructions(text) if one.opcode in ("copy", "copy-start") and not one.fused
            and one.arrays[0].hbm and all(operand.hbm for operand in one.operands)]  # fmt: skip


def sorts(text: str, sizes: set[int]) -> list[Array]:
    """Arrays that are sorted and have an axis of one of these sizes."""
    return [one.arrays[0] for one in instructions(text) if one.opcode == "sort" and sizes & set(one.arrays[0].shape)]


def small(topology_name: str, function: Any, *arguments: Any, **options: Any) -> Compiled:
    """A small function for the first device of a topology, or for the mesh that its arguments lie on."""
    on = open_topology(topology_name)
    return compile_for(jax.jit(function, **options).trace(*arguments), on, 1)
