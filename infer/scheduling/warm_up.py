"""Warm-up: compilation before the first request, and measurement of the cost of a step.

Programs are compiled by running them without effect: with zero steps, without rows, or on a state without due tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import jax
import numpy as np

from aspd_jax.language_model import LanguageModel
from aspd_jax.model.cache import Bucket
from aspd_jax.processes import agreed
from aspd_jax.sizes import powers
from infer.answers.answer import copy_outputs, fetch_outputs
from infer.answers.logprobs import CHUNK, likeliest
from infer.decode.decode_step import StopConditions, run, summarise
from infer.decode.guidance import guidance_arrays, guide
from infer.decode.slots import (
    NO_CAP,
    copy_slots,
    fill_for_timing,
    put_bias,
    set_branch_cap,
    stop_segments,
)
from infer.decode.state import DecodeState, EngineConfig
from infer.request import Request, SamplingParams
from infer.scheduling.admission import MIN_PROMPT, admit_request
from infer.scheduling.buckets import Buckets
from infer.scheduling.policy import Sample, StepCost, fit

log = logging.getLogger(__name__)

REPEATS = 5
TIMED_TOKENS = (1, 4, 16)  # tokens per row of the timed steps
NO_STEP = StopConditions(np.int32(0), np.int32(-1), np.int32(0), np.bool_(False))


def compile_all(
    lm: LanguageModel, config: EngineConfig, state: DecodeState, buckets: Sequence[Bucket], logprobs: bool
) -> DecodeState:
    """Compile the programs of steps, and the operations on rows between steps.

    Args:
        logprobs: compile the programs of log probabilities, too.
    """
    programs, begun = _programs(lm, config, state, buckets, logprobs), time.perf_counter()
    for number, (name, compiled) in enumerate(programs, 1):
        state = jax.block_until_ready(compiled(state))
        log.info("program %d of %d: %s, %.0f s", number, len(programs), name, time.perf_counter() - begun)
    return state


def _programs(
    lm: LanguageModel, config: EngineConfig, state: DecodeState, buckets: Sequence[Bucket], logprobs: bool
) -> list[tuple[str, Callable[[DecodeState], DecodeState]]]:
    """Return the name of each program, and a function that compiles it and returns an equal state."""
    batch, capacity = state.cache.tokens.shape
    words, branches = state.token_mask.shape[3], state.token_mask.shape[1]
    nobody = np.full(2, batch, np.int32)  # rows past the end, of which nothing changes

    def step(state: DecodeState, bucket: Bucket, drafting: bool) -> DecodeState:
        return run(lm.params, state, NO_STEP, config, bucket, drafting)[0]

    def prompt(state: DecodeState, size: int) -> DecodeState:
        request = Request((0,) * min(size, capacity - 1), SamplingParams(), "serial", 1, 0)
        state = admit_request(lm, config, state, request, batch)
        return copy_slots(state, np.zeros(2, np.int32), nobody, config, min(size, capacity))

    def score(state: DecodeState, size: int) -> DecodeState:
        likeliest(lm, config, np.zeros(min(size, capacity), np.int32), -1)
        return state

    def guidance(state: DecodeState, size: int) -> DecodeState:
        return guide(state, guidance_arrays({}, batch, words, config, size), config)[0]

    def output(state: DecodeState, rows: int) -> DecodeState:
        count = min(rows, batch)
        fetch_outputs(copy_outputs(state, config, [0] * count), [None] * count, config)
        return state

    def others(state: DecodeState) -> DecodeState:
        state = put_bias(state, np.int32(batch), np.zeros(state.bias.shape[1], np.float32), config)
        jax.block_until_ready(summarise(state, config))
        state = stop_segments(state, np.zeros(batch, bool), np.zeros((batch, config.max_branches), bool))
        return set_branch_cap(state, np.full(batch, NO_CAP, np.int32))

    drafts = sorted({False, config.draft_tokens > 0})
    return [
        *((str(one), partial(step, bucket=one, drafting=drafting)) for one in buckets for drafting in drafts),
        *((f"prompts of {size} tokens", partial(prompt, size=size)) for size in powers(MIN_PROMPT, capacity)),
        *(
            (f"log probabilities of {size} tokens", partial(score, size=size))
            for size in (powers(CHUNK, max(CHUNK, capacity)) if logprobs else ())
        ),
        *((f"grammars of {size} segments", partial(guidance, size=size)) for size in powers(1, batch * branches)),
        *((f"outputs of {rows} rows", partial(output, rows=rows)) for rows in powers(1, batch)),
        ("other operations", others),
    ]


def measure_cost(
    lm: LanguageModel, config: EngineConfig, state: DecodeState, buckets: Buckets
) -> tuple[DecodeState, StepCost]:
    """Time steps of several widths over parts of the cache, and fit the cost of a step."""
    samples = []
    buckets_of_all = [bucket for bucket in buckets.buckets if bucket.rows == buckets.rows]
    counts = [bucket.slots for bucket in buckets_of_all]
    for slots in sorted({min(counts), max(counts)}):
        equal = [bucket for bucket in buckets_of_all if bucket.slots == slots]
        largest = max(bucket.tokens for bucket in equal)
        targets = [min(tokens * buckets.rows, largest) for tokens in TIMED_TOKENS]
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
    """Return the milliseconds of a step in which every row feeds as many tokens as fit; all rows must be idle."""
    width = max(1, min(config.max_branches, bucket.tokens // bucket.rows, bucket.per_row))
    one = StopConditions(np.int32(1), np.int32(-1), np.int32(bucket.tokens), np.bool_(False))
    times = []
    for _ in range(REPEATS + 1):  # the first may compile
        state = jax.block_until_ready(fill_for_timing(state, config, width, bucket.slots - width))
        before = time.perf_counter()
        state, summary = run(lm.params, state, one, config, bucket, drafting)
        summary.read()
        times.append(1000 * (time.perf_counter() - before))
    return fill_for_timing(state, config, 0, 0), median(times[1:])
