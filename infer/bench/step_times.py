"""Benchmark of decoding steps by width, with memory bandwidth, matrix products and quantisation error for comparison.

The steps are the engine's programs, so they include sampling and the grammar.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from aspd_jax.errors import RequestError
from aspd_jax.language_model import LanguageModel
from aspd_jax.layout import build_layout
from aspd_jax.model.cache import Bucket
from aspd_jax.model.cpu import einsum
from aspd_jax.model.vocabulary import head_of
from aspd_jax.model.weights import input_axes
from aspd_jax.tables import markdown_table
from aspd_jax.tokens import NAMES
from infer.decode.decode_step import StopConditions, run
from infer.decode.slots import fill_for_timing
from infer.decode.state import EngineConfig
from infer.engine import NO_TOKENS
from infer.scheduling.admission import new_state
from infer.scheduling.buckets import capacity_for

COPY_BYTES = 1 << 28


@dataclass(frozen=True)
class StepTime:
    """Times of a step at one width in milliseconds.

    Attributes:
        width: tokens per step.
        median, fastest, slowest: time of a step over runs.
        products: median time of the step's matrix products alone.
        bandwidth: bytes of weights and cache that are read per second.
    """

    width: int
    median: float
    fastest: float
    slowest: float
    products: float
    bandwidth: float


def copy_bandwidth(repeats: int) -> float:
    """Return the bytes per second that an increment of a large array reads and writes."""
    repetitions = 8
    copy = jax.jit(lambda array: jax.lax.fori_loop(0, repetitions, lambda _, a: a + 1, array), donate_argnums=0)
    array = copy(jnp.zeros(COPY_BYTES // 4, jnp.int32)).block_until_ready()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        array = copy(array).block_until_ready()
        times.append(time.perf_counter() - start)
    return repetitions * 2 * COPY_BYTES / median(times)


def peak_bytes() -> float:
    """Return the peak memory in bytes: of the device if it reports it, else of this process."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return float(stats["peak_bytes_in_use"])
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


def weight_bytes(lm: LanguageModel) -> int:
    """Return the bytes of parameters that a step reads."""
    looked_up = 0 if lm.config.tied else lm.params["embedding"]["embedding"].nbytes
    return sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params)) - looked_up


class LogitError(NamedTuple):
    """Difference from exact logits: relative root mean square error, and share of positions with the same argmax."""

    relative: float
    same_likeliest: float


def logit_error(exact: LanguageModel, other: LanguageModel, tokens: int = 256) -> LogitError:
    """Compare the centred logits of a model with those of an exact one on a prompt of random tokens."""
    prompt = np.asarray([random_prompt(exact, tokens)])
    layout = build_layout(prompt, exact.special_tokens or NO_TOKENS, exact.config.positions)
    a, b = (np.asarray(lm.model.apply({"params": lm.params}, prompt, layout))[0] for lm in (exact, other))
    a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    same = float((a.argmax(axis=1) == b.argmax(axis=1)).mean())
    return LogitError(float(np.sqrt(((a - b) ** 2).mean() / (a**2).mean())), same)


def random_prompt(lm: LanguageModel, tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Return random token ids that are neither tags nor end tokens."""
    special = lm.special_tokens or NO_TOKENS
    plain = np.setdiff1d(np.arange(lm.config.vocab_size), [*special.ids, *lm.end_ids])
    return tuple(np.random.default_rng(seed).choice(plain, tokens).tolist())


def measure_steps(
    lm: LanguageModel, widths: Sequence[int], context: int, repeats: int = 7, steps: int = 16
) -> list[StepTime]:
    """Time `repeats` runs of `steps` steps for every width at batch size 1, alternating widths.

    Args:
        lm: model.
        widths: tokens per step; empty: nothing is timed.
        context: tokens in the cache.
        repeats: timed runs.
        steps: steps per run.

    Raises:
        RequestError: a random branch ended by itself, so that the width changed during a run.
    """
    limit = max(2, *widths) if widths else 2
    special = lm.special_tokens or NO_TOKENS
    config = EngineConfig(
        model=lm.model, special=special, form=NAMES, end=(), forbidden=(), max_branches=limit, max_title_tokens=1,
        mesh=lm.mesh,
    )  # fmt: skip
    capacity = capacity_for(context + (steps + 1) * limit)
    limits = StopConditions.pack(steps, larger=limit)
    state = new_state(lm, config, 1, capacity)
    times: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(repeats + 1):  # the first runs compile
        for width in widths:
            state = jax.block_until_ready(fill_for_timing(state, config, width, context))
            start = time.perf_counter()
            state, summary = run(lm.params, state, limits, config, Bucket(1, width, width, capacity), False)
            after = summary.read()
            times[width].append((time.perf_counter() - start) / steps)
            if after.tokens.max() != width or after.steps_left:
                raise RequestError(
                    f"steps: expected random branches to go on, got one that ended at width {width}. Use fewer."
                )
    read = weight_bytes(lm) + sum(layer.key.nbytes + layer.value.nbytes for layer in state.cache.layers)
    return [
        StepTime(
            width=width,
            median=1000 * median(runs[1:]),
            fastest=1000 * min(runs[1:]),
            slowest=1000 * max(runs[1:]),
            products=product_time(lm, width, repeats, steps),
            bandwidth=read / median(runs[1:]),
        )
        for width, runs in times.items()
    ]


def product_time(lm: LanguageModel, width: int, repeats: int, steps: int = 16) -> float:
    """Return the median milliseconds of a step's matrix products alone: every kernel times `width` rows."""
    kernels = {path: leaf for path, leaf in flatten_dict(lm.params).items() if path[-1] == "kernel"}
    kernels["head", "kernel"] = head_of(lm.config, lm.params).kernel

    def multiply(total: jax.Array, path: tuple[str, ...], kernel: jax.Array) -> jax.Array:
        inputs = input_axes(path)
        sizes = (kernel.shape[axis] for axis in inputs)
        # Every product depends on the previous one, so that they run one after the other.
        rows = jnp.broadcast_to(total, (1, width, *sizes)).astype(lm.config.dtype)
        axes = "abcd"[: kernel.ndim]
        summed = "".join(axes[axis] for axis in inputs)
        equation = f"...{summed},{axes}->...{''.join(axis for axis in axes if axis not in summed)}"
        y = einsum(equation, rows, kernel.astype(lm.config.dtype))
        return total + 1e-9 * y.reshape(-1)[0].astype(jnp.float32)

    @jax.jit
    def run(kernels: Any) -> jax.Array:
        def once(_: jax.Array, total: jax.Array) -> jax.Array:
            return reduce(lambda total, item: multiply(total, *item), kernels.items(), total)

        return jax.lax.fori_loop(0, steps, once, jnp.float32(1.0))

    times = []
    for _ in range(repeats + 1):  # the first run compiles
        start = time.perf_counter()
        run(kernels).block_until_ready()
        times.append((time.perf_counter() - start) / steps)
    return 1000 * median(times[1:])


def step_table(results: Sequence[StepTime], copied: float) -> str:
    """Return a Markdown table of times relative to width 1.

    Args:
        results: times by width.
        copied: copy bandwidth in bytes per second.
    """
    rows = [
        {
            "width": r.width,
            "ms per step (median)": f"{r.median:.2f}",
            "fastest - slowest": f"{r.fastest:.2f} - {r.slowest:.2f}",
            "relative to width 1": f"{r.median / results[0].median:.2f}",
            "its products alone, ms": f"{r.products:.2f}",
            "step by products": f"{r.median / r.products:.2f}",
            "GB/s": f"{r.bandwidth / 1e9:.1f}",
            "share of copy bandwidth": f"{100 * r.bandwidth / copied:.0f} %",
        }
        for r in results
    ]
    return markdown_table(rows)
