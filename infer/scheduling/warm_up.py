"""Warm-up: compilation before the first request.

Programs are traced one after the other and compiled side by side, without running them: later calls with equal shapes
find them compiled.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import TypeAlias

import jax
import numpy as np

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
from infer.decode.slots import KnownText, admit, append_text, copy_slots, put_bias, row_contents
from infer.decode.state import DecodeState, EngineConfig
from infer.request import Request, SamplingParams
from infer.scheduling.admission import MIN_PROMPT, admission
from infer.scheduling.buckets import PROMPT_BESIDE

log = logging.getLogger(__name__)

Program: TypeAlias = tuple[str, Callable[[], jax.stages.Lowered]]  # its name, and the function that traces it
NO_STEP = StopConditions.pack(0)


def compile_all(programs: Sequence[Program]) -> None:
    """Compile programs."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        names = {pool.submit(lower().compile): name for name, lower in programs}
        for number, compiled in enumerate(as_completed(names), 1):
            compiled.result()
            seconds = time.perf_counter() - begun
            log.info("program %d of %d: %s, %.0f s", number, len(programs), names[compiled], seconds)


def programs_of(
    lm: LanguageModel,
    config: EngineConfig,
    state: DecodeState,
    buckets: Sequence[Bucket],
    logprobs: bool,
    max_checked: int,
) -> list[Program]:
    """Return the programs of steps, and the operations on rows between steps.

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
    row, rows = np.int32(batch), np.zeros(2, np.int32)

    def step(bucket: Bucket, drafting: bool) -> jax.stages.Lowered:
        return run.lower(lm.params, state, NO_STEP, config, bucket, drafting)

    def check(bucket: Bucket) -> jax.stages.Lowered:
        return run_checks.lower(lm.params, state, check_arrays({}, batch, words, bucket.tokens), config, bucket)

    def prompt(size: int) -> jax.stages.Lowered:
        request = Request((0,) * min(size, capacity - 1), SamplingParams(), "serial", 1, 0)
        return admit.lower(state, Packed.pack(admission(lm, config, state, request, batch)), config)

    def text(size: int) -> jax.stages.Lowered:
        return append_text.lower(state, KnownText.pack(batch, (), size), config)

    def copy(size: int) -> jax.stages.Lowered:
        return copy_slots.lower(state, rows, rows, config, min(size, capacity))

    def known(bucket: Bucket) -> jax.stages.Lowered:
        return score.lower(lm.params, state, Packed.pack(score_inputs({}, batch, bucket)[0]), config, bucket)

    def likeliest(size: int) -> jax.stages.Lowered:
        return lower_likeliest(lm, config, min(size, capacity))

    def guidance(size: int) -> jax.stages.Lowered:
        return guide.lower(state, guidance_arrays({}, batch, words, config, size), config)

    wide = (bucket for bucket in buckets if max_checked and bucket.max_per_row > 1)
    checked = [bucket for bucket in wide if bucket.rows > 1 or bucket.tokens <= max_checked]
    bias = np.zeros(state.bias.shape[1], np.float32)
    prompts, segments = powers(MIN_PROMPT, capacity), (1, *powers(branches, batch * branches))
    return [
        *((f"checks, {bucket}", partial(check, bucket)) for bucket in checked),
        *(
            (f"{bucket}, drafts {drafting}", partial(step, bucket, drafting))
            for bucket in buckets
            for drafting in sorted({False, config.draft_tokens > 0})
        ),
        *((f"prompts of {size} tokens", partial(prompt, size)) for size in prompts),
        *((f"known text of {size} tokens", partial(text, size)) for size in prompts),
        *((f"copies of {size} slots", partial(copy, size)) for size in prompts),
        *(
            (f"log probabilities of {size} tokens", partial(likeliest, size))
            for size in (powers(MIN_LENGTH, max(MIN_LENGTH, capacity)) if logprobs else ())
        ),
        *(
            (f"known branches, {bucket}", partial(known, bucket))
            for bucket in (buckets if logprobs else ())
            if bucket.max_per_row >= PROMPT_BESIDE
        ),
        *((f"decisions for {size} segments", partial(guidance, size)) for size in segments),
        ("biases", lambda: put_bias.lower(state, row, bias, config)),
        ("summary", lambda: summarise.lower(state, config)),
        ("contents of a row", lambda: row_contents.lower(state, np.int32(0))),
    ]
