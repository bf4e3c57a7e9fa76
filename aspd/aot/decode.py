"""Decoding steps compiled for a target chip, and the expected speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from aspd.aot.abstract import placed, replicated
from aspd.aot.aot_report import Figures, compile_for, figures, fit, gib, local_bytes
from aspd.aot.topology import Topology
from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from aspd_jax.model.cache import Bucket, layer_sharding
from infer.bench.decoding import SEPARATOR, SERIAL_TEXT, TITLE
from infer.decode.decode_step import StopConditions, run
from infer.decode.state import DecodeState
from infer.engine import Engine
from infer.scheduling.admission import new_state


@dataclass(frozen=True)
class CompiledStep:
    """Program of the engine for a step in which every row feeds `width` tokens."""

    width: int
    batch: int
    slots: int
    bucket: Bucket
    figures: Figures


@dataclass(frozen=True)
class ExpectedAnswer:
    """Steps, and lower bounds of milliseconds, of an answer with a block and of a serial one with the same content."""

    branches: int
    length: int
    serial_steps: int
    adaptive_steps: int
    serial_ms: float
    adaptive_ms: float

    @property
    def speed_up(self) -> float:
        """Speed-up of adaptive mode."""
        return self.serial_ms / self.adaptive_ms


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
    number, truth = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
    conditions = placed(StopConditions(number, number, number, truth), replicated(topology, lm.mesh))
    drafting = engine.config.draft_tokens > 0
    return run.trace(lm.params, abstract_state(lm, engine, topology), conditions, engine.config, bucket, drafting)


def needed_bytes(lm: LanguageModel, engine: Engine, topology: Topology) -> int:
    """Return the bytes that a device must read per step: weights (without an untied embedding) and cache."""
    read = {name: leaf for name, leaf in lm.params.items() if lm.config.tied or name != "embedding"}
    return local_bytes(read) + local_bytes(abstract_state(lm, engine, topology).cache.layers)


def needed_collective_bytes(lm: LanguageModel, bucket: Bucket) -> int:
    """Return the bytes that a tensor axis must reduce per step: the output of each half of a layer."""
    if lm.mesh is None or lm.mesh.shape["tensor"] == 1:
        return 0
    c = lm.config
    return 2 * c.layers * bucket.tokens * c.hidden_size * int(jnp.dtype(c.dtype).itemsize)


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
    compiled = compile_for(trace_steps(lm, engine, topology, bucket), topology, devices)
    result = figures(compiled, True, needed_bytes(lm, engine, topology), needed_collective_bytes(lm, bucket))
    return CompiledStep(width, batch, bucket.slots, bucket, result)


def expected_answer(steps: Sequence[CompiledStep], branches: int, length: int) -> ExpectedAnswer | None:
    """Estimate the answer of `aspd bench decode --answers` and a serial answer with the same content.

    Args:
        steps: compiled steps of one batch and number of slots.
        branches: number of branches.
        length: tokens of a branch, with head and closing tag.

    Returns:
        Estimate; None if a program does not fit into memory.

    Raises:
        RequestError: there is no width of 1, or none of at least `branches`.
    """
    narrow = min(steps, key=lambda compiled: compiled.width)
    wide = [compiled for compiled in steps if compiled.width >= branches]
    if narrow.width != 1 or not wide:
        raise RequestError(f"--widths: expected 1 and a width of at least {branches} for {branches} branches")
    narrow_ms = narrow.figures.milliseconds
    wide_ms = min(wide, key=lambda compiled: compiled.width).figures.milliseconds
    if narrow_ms is None or wide_ms is None:
        return None
    inside = length - 1 - TITLE - len(SEPARATOR)  # tokens of a branch after its head, the last is its closing tag
    serial = SERIAL_TEXT + branches * (inside - 1)
    alone = SERIAL_TEXT + branches * (TITLE + 2)  # text and titles
    together = 1 + inside  # the fork, all tokens of a branch but its closing tag, and the merge
    adaptive_ms = alone * narrow_ms + together * wide_ms
    return ExpectedAnswer(branches, length, serial, alone + together, serial * narrow_ms, adaptive_ms)


def step_table(steps: Sequence[CompiledStep]) -> str:
    """Return a Markdown table of steps; GiB on each device."""
    lines = [
        "| slots | batch | width | fits, GiB | arguments | temporary | aliased | peak | HBM per step | by needed "
        "| sampled | outside | collectives, MiB | needed | TFLOP | ms at least |\n" + "|---" * 16 + "|"
    ]
    for compiled in steps:
        f = compiled.figures
        cells = [str(compiled.slots), str(compiled.batch), str(compiled.width), fit(f)]
        if f.memory is not None and f.bytes is not None and f.most_bytes is not None:
            cells += [gib(f.memory.arguments), gib(f.memory.temporary), gib(f.memory.aliased), gib(f.memory.peak)]
            cells += [f"{f.bytes / 2**30:.3f}", f"{f.bytes / f.needed_bytes:.3f}x"]
            cells += [f"{f.most_bytes / f.needed_bytes:.3f}x", gib(f.outside_bytes)]
            cells += [f"{(f.collective_bytes or 0) / 2**20:.2f}", f"{f.needed_collective_bytes / 2**20:.2f}"]
            cells += [f"{f.flops / 1e12:.3f}", f"{f.milliseconds:.3f}"]
        else:
            cells += [""] * 12
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def answer_table(answers: Sequence[ExpectedAnswer]) -> str:
    """Return a Markdown table of the steps and times of both modes, with the speed-up."""
    lines = ["| answer | steps, serial | adaptive | ms, serial | adaptive | speed-up |\n" + "|---" * 6 + "|"]
    for answer in answers:
        lines.append(
            f"| {answer.branches} branches of {answer.length} | {answer.serial_steps} | {answer.adaptive_steps} "
            f"| {answer.serial_ms:.0f} | {answer.adaptive_ms:.0f} | {answer.speed_up:.2f}x |"
        )
    return "\n".join(lines)
