"""Benchmark of the training step: ASPD's mask against plain causal attention on the same model and batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.layout import Layout, Siblings
from aspd_jax.model.attention import FULL_PASS_BACK_ENDS, View, Window, attend, by_chunks
from aspd_jax.shapes import benchmark_model
from aspd_jax.sharding import make_mesh
from aspd_jax.tokens import SpecialTokens
from train.batches import Batch, make_batch
from train.config import DataSection, ModelSection, TrainConfig
from train.metrics import model_flops, peak_flops
from train.setup import set_up
from train.step import train_step


@dataclass(frozen=True)
class StepTime:
    """Milliseconds per step (median, fastest, slowest), tokens per second, and FLOP utilisation (None: unknown)."""

    attention: str
    median: float
    fastest: float
    slowest: float
    tokens_per_second: float
    utilisation: float | None


def causal(
    query: jax.Array, key: jax.Array, value: jax.Array, view: View, siblings: Siblings, window: Window
) -> jax.Array:
    """Compute chunked causal attention without sequences, blocks and branches: the baseline."""
    slots = jnp.broadcast_to(jnp.arange(query.shape[1]), query.shape[:2])
    plain = Layout(slots, slots, slots, slots)

    def attend_chunk(query: jax.Array, key: jax.Array, value: jax.Array, view: View) -> jax.Array:
        return attend(query, key, value, view.key.position[:, None] <= view.query.position[:, :, None])

    return by_chunks(attend_chunk, query, key, value, View(plain, plain))


def branched_batch(special: SpecialTokens, vocabulary: int, rows: int, length: int) -> Batch:
    """Make rows of random tokens, each with a block of four branches of a tenth of the row."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, vocabulary - 6, (rows, length))
    start = length // 4
    heads = [special.title_start, 1, special.title_end] * 4 + [special.parallel_start]
    tokens[:, start : start + len(heads)] = heads
    at = start + len(heads)
    for _ in range(4):
        tokens[:, at] = special.branch_start
        at += length // 10
        tokens[:, at] = special.branch_end
        at += 1
    tokens[:, at] = special.parallel_end
    tokens = tokens.astype(np.int32)
    ones = np.ones_like(tokens)
    return make_batch(tokens, ones, ones, np.zeros(tokens.shape, bool), special, "sequential")


def step_times(shape: str, dtype: str, rows: int, length: int, repeats: int) -> list[StepTime]:
    """Time steps with each kind of attention alternately, so that other load on the machine affects all."""
    config = TrainConfig(
        model=ModelSection(titles="names", scan=True, remat=True),
        data=DataSection(rows=rows, length=length, short_steps=0),
        steps=100,
    )
    mesh = make_mesh({})
    running: dict[str, Any] = {}
    batch = flops = None
    FULL_PASS_BACK_ENDS["causal"] = causal
    for name in ("chunked", "causal"):
        lm = benchmark_model(shape, dtype)
        assert lm.special_tokens is not None
        setup = set_up(config, lm, mesh, config.steps)
        flops = model_flops(lm.config, setup.state.params, length)
        batch = setup.place(branched_batch(lm.special_tokens, lm.config.vocab_size, rows, length))
        model = setup.model.clone(config=replace(setup.model.config, attention=name))
        step = partial(train_step(model, setup.optimiser), frozen=setup.frozen, batch=batch)
        state, _ = step(setup.state)
        running[name] = (step, jax.block_until_ready(state))
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(repeats):
        for name, (step, state) in running.items():
            start = time.perf_counter()
            state, _ = jax.block_until_ready(step(state))
            times[name].append(1000 * (time.perf_counter() - start))
            running[name] = (step, state)
    peak = peak_flops()
    results = []
    for name, each in times.items():
        speed = rows * length / median(each) * 1000
        used = None if peak is None or flops is None else speed * flops / peak
        results.append(StepTime(name, median(each), min(each), max(each), speed, used))
    return results


def table(results: Sequence[StepTime]) -> str:
    """Return a Markdown table with ratios to the causal baseline."""
    base = next(result.median for result in results if result.attention == "causal")
    lines = [
        "| attention | ms per step | fastest | slowest | ratio | tokens/s | FLOP utilisation |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        used = "unknown peak" if r.utilisation is None else f"{100 * r.utilisation:.1f} %"
        lines.append(
            f"| {r.attention} | {r.median:.1f} | {r.fastest:.1f} | {r.slowest:.1f} | {r.median / base:.2f} "
            f"| {r.tokens_per_second:.0f} | {used} |"
        )
    return "\n".join(lines)
