"""Compiling ahead of time, and measuring what a pass costs.

Programs are compiled by running them on nothing: no steps, or tokens that are all padding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from statistics import median

import jax
import numpy as np

from aspd_jax.language_model import LanguageModel
from aspd_jax.layout import Layout
from infer.policy import Sample
from infer.prefill import PREFILL_CHUNK, PREFILL_TOKENS, used_slots
from infer.state import DecodeState, Protocol, width_bucket
from infer.step import Extent, Limits, prefill, run

REPEATS = 5
TIMED_SIZES = (1, 4, 16)  # tokens of a sequence in the passes that are timed


def compile_all(lm: LanguageModel, protocol: Protocol, state: DecodeState, programs: Sequence[Extent]) -> DecodeState:
    """Compile programs of `run`, and prefill for as many prompts, as long chunks and as full rows as there may be."""
    nothing = Limits(np.int32(0), Extent(*[np.int32(0)] * 4), np.bool_(False))
    batch, capacity = state.cache.tokens.shape
    levels = sorted({used_slots(capacity, needed) for needed in (1, capacity // 8, capacity)})
    sizes = [1 << n for n in range(width_bucket(min(PREFILL_CHUNK, capacity)).bit_length())]
    counts = sorted({min(batch, 1 << n) for n in range(width_bucket(batch).bit_length())})
    for greedy in (True, False):
        for within in programs:
            state, _, _ = run(lm.params, state, nothing, protocol, within, greedy)
        for rows, size, used in product(counts, sizes, levels):
            if size <= used and (rows == 1 or rows * size <= PREFILL_TOKENS):
                state = _padding(lm, protocol, state, rows, size, used, greedy)
    return state


def time_passes(lm: LanguageModel, protocol: Protocol, state: DecodeState) -> tuple[DecodeState, list[Sample]]:
    """Time passes of several widths over parts of the cache."""
    batch, capacity = state.cache.tokens.shape
    samples = []
    for used in sorted({used_slots(capacity, 1), capacity}):
        for size in TIMED_SIZES:
            times = []
            for _ in range(REPEATS + 1):  # the first may compile
                before = time.perf_counter()
                state = jax.block_until_ready(_padding(lm, protocol, state, batch, size, used, True))
                times.append(1000 * (time.perf_counter() - before))
            samples.append(Sample(batch * size, batch * used, median(times[1:])))
    return state, samples


def _padding(
    lm: LanguageModel, protocol: Protocol, state: DecodeState, rows: int, size: int, used: int, greedy: bool
) -> DecodeState:
    """Feed nothing, as if it were `size` tokens to so many rows."""
    batch = state.finish.shape[0]
    rows = min(batch, width_bucket(rows))
    tokens = np.zeros((rows, size), np.int32)
    layout = Layout(tokens, tokens, tokens, tokens)
    every = None if rows == batch else np.full(rows, batch, np.int32)
    return prefill(lm.params, state, every, tokens, layout, np.full(rows, -1, np.int32), protocol, used, greedy)
