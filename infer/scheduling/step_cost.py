"""Cost of a step, measured, which decides whether draft tokens and drafts of exact fields pay."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from aspd_jax.language_model import LanguageModel
from aspd_jax.model.cache import Bucket
from aspd_jax.processes import agreed
from infer.decode.decode_step import StopConditions, run
from infer.decode.slots import fill_for_timing
from infer.decode.state import DecodeState, EngineConfig
from infer.scheduling.buckets import PROMPT_BESIDE, Buckets

# Sampled tokens of a JSON value, steps of a block of them, and passes that check a draft (docs/when_it_pays.md).
VALUE_TOKENS, BLOCK_STEPS, CHECKS = 5, 12, 2
REPEATS = 5
TIMED_TOKENS = (1, 4, 16)  # tokens per row of the timed steps, beside steps of `PROMPT_BESIDE` tokens in all


class Sample(NamedTuple):
    """One timed step: tokens fed, cache slots read over all sequences, and milliseconds."""

    tokens: int
    context: int
    milliseconds: float


@dataclass(frozen=True)
class StepCost:
    """Cost of a step in milliseconds: `base + per_token * tokens + per_slot * context`.

    A step with draft tokens also costs `per_drafting_row` per row: for the look-up, and for logits and sampling.
    """

    base: float
    per_token: float
    per_slot: float
    per_drafting_row: float = 0.0

    def milliseconds(self, tokens: int, context: int) -> float:
        """Return the milliseconds of a step that feeds `tokens` and reads `context` slots."""
        return self.base + self.per_token * tokens + self.per_slot * context


def fit(samples: Sequence[Sample]) -> StepCost:
    """Fit the cost by relative least squares; no part of it is negative."""
    rows = np.asarray([[1.0, s.tokens, s.context] for s in samples])
    times = np.asarray([s.milliseconds for s in samples])
    chosen = [0, 1, 2]
    while True:
        values = np.zeros(3)
        values[chosen] = np.linalg.lstsq(rows[:, chosen] / times[:, None], np.ones(len(times)), rcond=None)[0]
        if (values >= 0).all() or len(chosen) == 1:
            return StepCost(*(float(value) for value in np.maximum(values, 0)))
        chosen.remove(int(np.argmin(values)))


def draft_pays(cost: StepCost, blocks: Sequence[int], buckets: Buckets, context: int) -> bool:
    """Return whether decoding fields in parallel and checking them costs less than decoding them serially.

    Args:
        cost: cost of a step.
        blocks: number of fields of each block.
        buckets: programs, which feed at least as many tokens as there are fields.
        context: slots that a step reads.
    """

    def milliseconds(width: int) -> float:
        return cost.milliseconds(buckets.padded(width), context)

    serial = VALUE_TOKENS * sum(blocks) * milliseconds(1)
    return BLOCK_STEPS * sum(map(milliseconds, blocks)) + CHECKS * milliseconds(PROMPT_BESIDE) < serial


def measure_cost(
    lm: LanguageModel, config: EngineConfig, state: DecodeState, buckets: Sequence[Bucket]
) -> tuple[DecodeState, StepCost]:
    """Time steps of several widths over parts of the cache, and fit the cost of a step.

    Args:
        lm, config: the model and the configuration of the engine.
        state: state in which no request runs.
        buckets: programs, of which those for most rows are timed.
    """
    samples, rows = [], max(bucket.rows for bucket in buckets)
    buckets_of_all = [bucket for bucket in buckets if bucket.rows == rows]
    counts = [bucket.slots for bucket in buckets_of_all]
    for slots in sorted({min(counts), max(counts)}):
        equal = [bucket for bucket in buckets_of_all if bucket.slots == slots]
        largest = max(bucket.tokens for bucket in equal)
        targets = [PROMPT_BESIDE, *(min(tokens * rows, largest) for tokens in TIMED_TOKENS)]
        sizes = {min(bucket.tokens for bucket in equal if bucket.tokens >= tokens) for tokens in targets}
        for tokens in sorted(sizes):
            bucket = min((bucket for bucket in equal if bucket.tokens == tokens), key=lambda bucket: bucket.max_per_row)
            state, milliseconds = _time(lm, config, state, bucket)
            samples.append(Sample(tokens, bucket.rows * slots, milliseconds))
    more = 0.0
    if config.draft_tokens:  # compare with the widest step, which was timed last
        state, drafting = _time(lm, config, state, bucket, drafting=True)
        more = max(0.0, drafting - milliseconds) / bucket.rows
    # Timings differ per process; all use those of process 0, so that they schedule identically.
    times = agreed(np.asarray([*(sample.milliseconds for sample in samples), more], np.float32))
    cost = fit([sample._replace(milliseconds=float(ms)) for sample, ms in zip(samples, times[:-1], strict=True)])
    return state, replace(cost, per_drafting_row=float(times[-1]))


def _time(
    lm: LanguageModel, config: EngineConfig, state: DecodeState, bucket: Bucket, drafting: bool = False
) -> tuple[DecodeState, float]:
    """Return the milliseconds of a step in which every row feeds as many tokens as fit; all rows must be idle.

    It is the fastest of several runs: other jobs of the machine only make a step longer.
    """
    width = max(1, min(config.max_branches, bucket.tokens // bucket.rows, bucket.per_row))
    one = StopConditions.pack(1, larger=bucket.tokens)
    times = []
    for _ in range(REPEATS + 1):  # the first may compile
        state = jax.block_until_ready(fill_for_timing(state, config, width, bucket.slots - width))
        before = time.perf_counter()
        state, summary = run(lm.params, state, one, config, bucket, drafting)
        summary.read()
        times.append(1000 * (time.perf_counter() - before))
    return fill_for_timing(state, config, 0, 0), min(times[1:])
