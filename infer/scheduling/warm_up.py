"""Warm-up: compilation before the first request.

Programs are traced one after the other and compiled side by side, without running them: later calls with equal shapes
find them compiled.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np
from jax.stages import Lowered

from aspd_jax.language_model import LanguageModel
from aspd_jax.model.cache import Bucket
from aspd_jax.sizes import powers
from infer.answers.logprobs import MIN_LENGTH, lower_likeliest
from infer.control.scoring import score_inputs
from infer.decode.checking import check_arrays, run_checks
from infer.decode.decode_step import StopConditions, run, summarise
from infer.decode.guidance import guidance_arrays, guide
from infer.decode.packed import Packed
from infer.decode.scoring import score
from infer.decode.slots import KnownText, admit, append_text, copy_slots, row_contents
from infer.decode.state import DecodeState, EngineConfig
from infer.request import Request, SamplingParams
from infer.scheduling.admission import MIN_PROMPT, admission
from infer.scheduling.buckets import PROMPT_BESIDE

log = logging.getLogger(__name__)

NO_STEP = StopConditions.pack(0)


def compile_all(programs: Iterable[tuple[str, Lowered]]) -> None:
    """Compile traced programs, each with its name."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        names = {pool.submit(lowered.compile): name for name, lowered in programs}
        for number, compiled in enumerate(as_completed(names), 1):
            compiled.result()
            seconds = time.perf_counter() - begun
            log.info("program %d of %d: %s, %.0f s", number, len(names), names[compiled], seconds)


def programs_of(
    lm: LanguageModel,
    config: EngineConfig,
    state: DecodeState,
    buckets: Sequence[Bucket],
    logprobs: bool,
    max_checked: int,
) -> Iterator[tuple[str, Lowered]]:
    """Trace the programs of steps, and the operations on rows between steps; yield the name and trace of each.

    Args:
        lm: the model.
        config: configuration of the engine.
        state: the state, which is not changed.
        buckets: sizes of the steps.
        logprobs: with the programs of log probabilities and known branches.
        max_checked: maximum tokens of a check of one row; 0: without the programs of checks.
    """
    batch, capacity = state.cache.tokens.shape
    words, branches = state.token_mask.shape[3], state.token_mask.shape[1]
    for bucket in buckets:
        if max_checked and bucket.max_per_row > 1 and (bucket.rows > 1 or bucket.tokens <= max_checked):
            checks = check_arrays({}, batch, words, bucket.tokens)
            yield f"checks, {bucket}", run_checks.lower(lm.params, state, checks, config, bucket)
        for drafting in sorted({False, config.draft_tokens > 0}):
            lowered = run.lower(lm.params, state, NO_STEP, config, bucket, drafting)
            yield f"{bucket}, drafts {drafting}", lowered
        if logprobs and bucket.max_per_row >= PROMPT_BESIDE:
            inputs, _ = score_inputs({}, batch, bucket)
            yield f"known branches, {bucket}", score.lower(lm.params, state, Packed.pack(inputs), config, bucket)
    row = np.int32(0)
    for size in powers(MIN_PROMPT, capacity):
        request = Request((0,) * min(size, capacity - 1), SamplingParams(), "serial", 1, 0)
        new = admission(lm, config, state, request, batch)
        yield f"prompts of {size} tokens", admit.lower(state, new, config)
        yield f"known text of {size} tokens", append_text.lower(state, KnownText.pack(batch, (), size), config)
        yield f"copies of {size} slots", copy_slots.lower(state, row, row, config, min(size, capacity))
    for size in powers(MIN_LENGTH, max(MIN_LENGTH, capacity)) if logprobs else ():
        yield f"log probabilities of {size} tokens", lower_likeliest(lm, config, min(size, capacity))
    for size in (1, *powers(branches, batch * branches)):
        decisions = guidance_arrays({}, batch, words, config, size)
        yield f"decisions for {size} segments", guide.lower(state, decisions, config)
    yield "summary", summarise.lower(state, config)
    yield "contents of a row", row_contents.lower(state, row)
