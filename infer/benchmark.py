"""How long a forward pass takes by width: what every speed-up of parallel decoding rests on.

The engine's own programs run on a prompt of the given length, with all branches kept open. Width 1 is a serial
step: the baseline. Weights are random, which changes no time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from infer.decoding import feed_prompts, start_state
from infer.engine import NO_TOKENS
from infer.request import Job, SamplingParams
from infer.state import PARALLEL, DecodeState, Protocol
from infer.step import run

COPY_BYTES = 1 << 28


@dataclass(frozen=True)
class PassTime:
    """Milliseconds per pass at one width: median, fastest and slowest run; and bytes read per second."""

    width: int
    median: float
    fastest: float
    slowest: float
    bandwidth: float


def copy_bandwidth(repeats: int) -> float:
    """Bytes per second that a large copy reads and writes."""
    copy = jax.jit(lambda array: array + 1)
    array = jnp.zeros(COPY_BYTES // 4, jnp.int32)
    copy(array).block_until_ready()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        copy(array).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * COPY_BYTES / median(times)


def _decoding_state(lm: LanguageModel, protocol: Protocol, context: int, width: int, tokens: int) -> DecodeState:
    """A sequence after its prompt, as if it had just forked into `width` branches (1: in a serial stretch)."""
    prompt = tuple(np.random.default_rng(0).integers(1, lm.config.vocabulary - 6, context).tolist())
    job = Job(prompt, SamplingParams(max_branch_tokens=(1 << 24) - 1), "serial", tokens, seed=0)
    state = feed_prompts(lm, protocol, start_state(lm, protocol, [job]), [prompt])
    if width == 1:
        return state
    live = jnp.arange(protocol.max_branches)[None] < width
    return state._replace(
        phase=jnp.full_like(state.phase, PARALLEL),
        block=jnp.ones_like(state.block),
        titles=jnp.full_like(state.titles, width),
        branch_live=live,
        branch_token=jnp.where(live, jnp.arange(protocol.max_branches)[None] + 1, 0),
    )


def pass_times(
    lm: LanguageModel, widths: Sequence[int], context: int, repeats: int = 7, steps: int = 16
) -> list[PassTime]:
    """Time `repeats` runs of `steps` passes at every width, batch 1.

    Raises:
        RequestError: a random branch closed itself, so that the width changed under way.
    """
    protocol = Protocol(
        model=lm.model,
        special=lm.special_tokens or NO_TOKENS,
        separator=(),
        end=(),
        forbidden=(),
        max_branches=max(2, *widths),
        max_title_tokens=1,
    )
    looked_up = 0 if lm.config.tied else lm.params["embedding"]["embedding"].nbytes
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params)) - looked_up
    results = []
    for width in widths:
        state: Any = _decoding_state(lm, protocol, context, width, 2 * (repeats + 1) * steps * width + width)
        cache = sum(layer.key.nbytes + layer.value.nbytes for layer in state.cache.layers)
        times = []
        for _ in range(repeats + 1):  # the first run compiles
            start = time.perf_counter()
            state, needed = run(lm.params, state, steps, protocol, width)
            jax.block_until_ready(needed)
            times.append((time.perf_counter() - start) / steps)
        if int(needed[0]) != width or int(state.passes[0]) != (repeats + 1) * steps:
            raise RequestError(f"a branch ended by itself at width {width}; take fewer steps")
        times = times[1:]
        results.append(
            PassTime(
                width=width,
                median=1000 * median(times),
                fastest=1000 * min(times),
                slowest=1000 * max(times),
                bandwidth=(weights + cache) / median(times),
            )
        )
    return results


def table(results: Sequence[PassTime], copied: float) -> str:
    """Markdown; every width beside width 1, and bandwidth beside the measured copy."""
    base = results[0].median
    lines = [
        "| width | ms per pass (median) | fastest - slowest | relative to width 1 | GB/s | share of copy bandwidth |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r.width} | {r.median:.2f} | {r.fastest:.2f} - {r.slowest:.2f} | {r.median / base:.2f} "
            f"| {r.bandwidth / 1e9:.1f} | {100 * r.bandwidth / copied:.0f} % |"
        )
    return "\n".join(lines)
