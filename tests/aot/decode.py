"""Decoding steps compiled for a target chip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from aspd_jax.model.cache import Bucket, layer_sharding
from infer.bench.decoding import SEPARATOR
from infer.decode.decode_step import StopConditions, run
from infer.decode.state import DecodeState
from infer.engine import Engine
from infer.scheduling.admission import new_state
from tests.aot.abstract import placed, replicated
from tests.aot.report import Compiled, compile_for, gib, local_bytes
from tests.aot.topology import Topology


@dataclass(frozen=True)
class CompiledStep:
    """Program of the engine for a step in which every row feeds `width` tokens."""

    width: int
    batch: int
    slots: int
    bucket: Bucket
    program: Compiled


def bucket_for(engine: Engine, width: int) -> Bucket:
    """Return the smallest bucket of the engine in which all rows feed `width` tokens and all slots are read.

    Raises:
        RequestError: no bucket is wide enough.
    """
    buckets = engine.buckets
    whole = [bucket for bucket in buckets.buckets if bucket.rows == buckets.rows and bucket.slots == buckets.capacity]
    wide = [bucket for bucket in whole if bucket.per_row >= width and bucket.tokens >= width * bucket.rows]
    if not wide:
        raise RequestError(
            f"--widths: expected at most the tokens per row of a program of {buckets.rows} rows, got {width}"
        )
    return min(wide, key=lambda bucket: (bucket.max_per_row, bucket.tokens))


def abstract_state(lm: LanguageModel, engine: Engine, topology: Topology) -> DecodeState:
    """Return an engine's state as shapes with shardings."""
    buckets = engine.buckets
    state: DecodeState = jax.eval_shape(lambda: new_state(lm, engine.config, buckets.rows, buckets.capacity))
    whole, mesh = replicated(topology, lm.mesh), lm.mesh
    places = jax.tree.map(lambda _: whole, state)
    if mesh is not None:
        layers = jax.tree.map(lambda leaf: layer_sharding(leaf.shape, mesh), state.cache.layers)
        places = places._replace(cache=places.cache._replace(layers=layers))
    abstract: DecodeState = placed(state, places)
    return abstract


def trace_steps(lm: LanguageModel, engine: Engine, topology: Topology, bucket: Bucket) -> Any:
    """Trace `run` for a bucket."""
    conditions = placed(StopConditions.pack(1), replicated(topology, lm.mesh))
    drafting = engine.config.draft_tokens > 0
    return run.trace(lm.params, abstract_state(lm, engine, topology), conditions, engine.config, bucket, drafting)


def needed_bytes(lm: LanguageModel, engine: Engine, topology: Topology) -> int:
    """Return the bytes that a device must read per step: weights (without an untied embedding) and cache."""
    read = {name: leaf for name, leaf in lm.params.items() if lm.config.tied or name != "embedding"}
    return local_bytes(read) + local_bytes(abstract_state(lm, engine, topology).cache.layers)


def compile_decode_step(lm: LanguageModel, topology: Topology, batch: int, width: int, slots: int) -> CompiledStep:
    """Compile the program of a step and compute its figures; a model with draft heads feeds and computes draft tokens.

    Args:
        lm: abstract model on the topology.
        topology: target devices.
        batch: number of rows.
        width: tokens of each row, draft tokens included.
        slots: slots of a cache row, all in use.
    """
    heads = lm.config.draft_heads
    engine = Engine(
        lm, slots, max_batch=batch, separator_ids=SEPARATOR,
        drafts="heads" if heads else "none", draft_tokens=max(1, heads),
    )  # fmt: skip
    bucket = bucket_for(engine, width)
    devices = 1 if lm.mesh is None else lm.mesh.size
    needed = needed_bytes(lm, engine, topology)
    program = compile_for(trace_steps(lm, engine, topology, bucket), topology, devices, needed)
    return CompiledStep(width, batch, bucket.slots, bucket, program)


def step_table(steps: Sequence[CompiledStep]) -> str:
    """Return a Markdown table of steps; GiB on each device."""
    lines = [
        "| slots | batch | width | fits, GiB | arguments | temporary | aliased | peak | needed traffic | XLA's count "
        "| TFLOP | ms at least |\n" + "|---" * 12 + "|"
    ]
    for compiled in steps:
        p = compiled.program
        cells = [str(compiled.slots), str(compiled.batch), str(compiled.width), p.fit]
        if p.memory is not None:
            cells += [gib(p.memory.arguments), gib(p.memory.temporary), gib(p.memory.aliased), gib(p.memory.peak)]
            cells += [gib(p.needed), "" if p.traffic is None else gib(p.traffic)]
            cells += [f"{p.flops / 1e12:.3f}", f"{p.milliseconds:.3f}"]
        else:
            cells += [""] * 8
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
