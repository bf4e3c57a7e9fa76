"""Warm-up: compilation before the first request.

Programs are compiled by running them without effect: with zero steps, without rows, or on a state without due tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np

from aspd_jax.language_model import LanguageModel
from aspd_jax.model.cache import Bucket
from aspd_jax.sizes import powers
from infer.answers.logprobs import CHUNK, likeliest
from infer.decode.decode_step import StopConditions, run, summarise
from infer.decode.guidance import guidance_arrays, guide
from infer.decode.slots import append_text, copy_slots, put_bias, row_contents
from infer.decode.state import DecodeState, EngineConfig
from infer.request import Request, SamplingParams
from infer.scheduling.admission import MIN_PROMPT, admit_request

log = logging.getLogger(__name__)

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
        state = append_text(state, np.int32(batch), np.zeros(size, np.int32), np.int32(0), config)
        return copy_slots(state, np.zeros(2, np.int32), nobody, config, min(size, capacity))

    def score(state: DecodeState, size: int) -> DecodeState:
        likeliest(lm, config, np.zeros(min(size, capacity), np.int32), -1)
        return state

    def guidance(state: DecodeState, size: int) -> DecodeState:
        return guide(state, guidance_arrays({}, batch, words, config, size), config)[0]

    def others(state: DecodeState) -> DecodeState:
        state = put_bias(state, np.int32(batch), np.zeros(state.bias.shape[1], np.float32), config)
        jax.block_until_ready((summarise(state, config), row_contents(state, np.int32(0))))
        return state

    drafts, sizes = sorted({False, config.draft_tokens > 0}), (1, *powers(branches, batch * branches))
    return [
        *((str(one), partial(step, bucket=one, drafting=drafting)) for one in buckets for drafting in drafts),
        *((f"prompts of {size} tokens", partial(prompt, size=size)) for size in powers(MIN_PROMPT, capacity)),
        *(
            (f"log probabilities of {size} tokens", partial(score, size=size))
            for size in (powers(CHUNK, max(CHUNK, capacity)) if logprobs else ())
        ),
        *((f"decisions for {size} segments", partial(guidance, size=size)) for size in sizes),
        ("other operations", others),
    ]
