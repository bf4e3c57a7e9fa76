"""Passes compiled for accelerators that are not there, and the speed-up to expect of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from aspd.aot.abstract import everywhere, placed
from aspd.aot.aot_report import Figures, compile_for, figures, fit, gib, local_bytes
from aspd.aot.topology import Topology
from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from aspd_jax.model.cache import Bucket, layer_sharding
from infer.bench.decoding import SEPARATOR, SERIAL_TEXT, TITLE
from infer.decode.decode_step import Limits, run
from infer.decode.state import DecodeState
from infer.engine import Engine
from infer.scheduling.admission import new_state


@dataclass(frozen=True)
class CompiledPass:
    """A pass in which every row feeds `width` tokens, in the engine's own program for it."""

    width: int
    batch: int
    slots: int
    bucket: Bucket
    figures: Figures


@dataclass(frozen=True)
class ExpectedAnswer:
    """An answer of branches and a serial one of as much content: passes, and milliseconds by the programs' bounds."""

    branches: int
    length: int
    serial_passes: int
    adaptive_passes: int
    serial_ms: float
    adaptive_ms: float

    @property
    def speed_up(self) -> float:
        """Of adaptive mode."""
        return self.serial_ms / self.adaptive_ms


def bucket_for(engine: Engine, width: int) -> Bucket:
    """The engine's own program in which every row feeds so many tokens, and looks at all slots.

    Raises:
        RequestError: there is none so wide.
    """
    buckets = engine.buckets
    whole = [of for of in buckets.buckets if of.rows == buckets.rows and of.slots == buckets.capacity]
    able = [of for of in whole if of.per_row >= width and of.tokens >= width * of.rows]
    if not able:
        raise RequestError(f"no program of {buckets.rows} rows feeds {width} tokens of each")
    return min(able, key=lambda of: (of.most, of.tokens))


def abstract_state(lm: LanguageModel, engine: Engine, on: Topology) -> DecodeState:
    """An engine's state as shapes, with the places that it has on the mesh."""
    buckets = engine.buckets
    state: DecodeState = jax.eval_shape(lambda: new_state(lm, engine.config, buckets.rows, buckets.capacity))
    whole, mesh = everywhere(on, lm.mesh), lm.mesh
    places = jax.tree.map(lambda _: whole, state)
    if mesh is not None:
        layers = jax.tree.map(lambda leaf: layer_sharding(leaf.shape, mesh), state.cache.layers)
        places = places._replace(cache=places.cache._replace(layers=layers))
    made: DecodeState = placed(state, places)
    return made


def trace_passes(lm: LanguageModel, engine: Engine, on: Topology, bucket: Bucket) -> Any:
    """`run` in a bucket, traced."""
    number, truth = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
    limits = placed(Limits(number, number, number, truth), everywhere(on, lm.mesh))
    return run.trace(lm.params, abstract_state(lm, engine, on), limits, engine.config, bucket, False)


def needed_bytes(lm: LanguageModel, engine: Engine, on: Topology) -> int:
    """Bytes that a device reads in a pass at least: weights, but for an embedding that is looked up, and the cache."""
    read = {name: leaf for name, leaf in lm.params.items() if lm.config.tied or name != "embedding"}
    return local_bytes(read) + local_bytes(abstract_state(lm, engine, on).cache.layers)


def needed_collective_bytes(lm: LanguageModel, bucket: Bucket) -> int:
    """Bytes that a mesh with a tensor axis adds up in a pass: what each half of a layer writes."""
    if lm.mesh is None or lm.mesh.shape["tensor"] == 1:
        return 0
    c = lm.config
    return 2 * c.layers * bucket.tokens * c.hidden_size * int(jnp.dtype(c.dtype).itemsize)


def compile_pass(lm: LanguageModel, on: Topology, batch: int, width: int, slots: int) -> CompiledPass:
    """Compile and read one.

    Args:
        lm: an abstract model on the topology.
        slots: of a row, all of them in use.
    """
    engine = Engine(lm, max_length=slots, max_batch=batch, separator_ids=SEPARATOR)
    bucket = bucket_for(engine, width)
    devices = 1 if lm.mesh is None else lm.mesh.size
    compiled = compile_for(trace_passes(lm, engine, on, bucket), on, devices)
    read = figures(compiled, True, needed_bytes(lm, engine, on), needed_collective_bytes(lm, bucket))
    return CompiledPass(width, batch, bucket.slots, bucket, read)


def expected_answer(passes: Sequence[CompiledPass], branches: int, length: int) -> ExpectedAnswer | None:
    """The answer of `bench decode --answers` with so many branches of so many tokens, beside a serial one.

    Raises:
        RequestError: no width holds the branches.

    Returns:
        None where a program that it takes does not fit.
    """
    one = min(passes, key=lambda of: of.width)
    able = [of for of in passes if of.width >= branches]
    if one.width != 1 or not able:
        raise RequestError(f"{branches} branches need --widths with 1 and at least {branches}")
    ms, wide = one.figures.milliseconds, min(able, key=lambda of: of.width).figures.milliseconds
    if ms is None or wide is None:
        return None
    inside = length - 1 - TITLE - len(SEPARATOR)  # of a branch, behind its head; the last is its closing tag
    serial = SERIAL_TEXT + branches * (inside - 1)
    alone = SERIAL_TEXT + branches * (TITLE + 2)  # text and titles
    together = 1 + inside  # the fork, every token of a branch but its closing tag, and the merge
    return ExpectedAnswer(branches, length, serial, alone + together, serial * ms, alone * ms + together * wide)


def pass_table(passes: Sequence[CompiledPass]) -> str:
    """Markdown; GiB on each device."""
    lines = [
        "| slots | batch | width | fits, GiB | arguments | temporary | aliased | peak | HBM of a pass | of needed "
        "| sampled | outside | collectives, MiB | needed | TFLOP | ms at least |\n" + "|---" * 16 + "|"
    ]
    for each in passes:
        of = each.figures
        cells = [str(each.slots), str(each.batch), str(each.width), fit(of)]
        if of.memory is not None and of.bytes is not None and of.most_bytes is not None:
            cells += [gib(of.memory.arguments), gib(of.memory.temporary), gib(of.memory.aliased), gib(of.memory.peak)]
            cells += [f"{of.bytes / 2**30:.3f}", f"{of.bytes / of.needed_bytes:.3f}x"]
            cells += [f"{of.most_bytes / of.needed_bytes:.3f}x", gib(of.outside_bytes)]
            cells += [f"{(of.collective_bytes or 0) / 2**20:.2f}", f"{of.needed_collective_bytes / 2**20:.2f}"]
            cells += [f"{of.flops / 1e12:.3f}", f"{of.milliseconds:.3f}"]
        else:
            cells += [""] * 12
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def answer_table(answers: Sequence[ExpectedAnswer]) -> str:
    """Markdown; passes of both modes, and the speed-up."""
    lines = ["| answer | passes, serial | adaptive | ms, serial | adaptive | speed-up |\n" + "|---" * 6 + "|"]
    for of in answers:
        lines.append(
            f"| {of.branches} branches of {of.length} | {of.serial_passes} | {of.adaptive_passes} "
            f"| {of.serial_ms:.0f} | {of.adaptive_ms:.0f} | {of.speed_up:.2f}x |"
        )
    return "\n".join(lines)
