"""Warm-up: compilation before the first request.

Programs are compiled by running them without effect: with zero steps, without rows, or on a state without due tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import jax
import numpy as np

from aspd_jax.language_model import LanguageModel
from aspd_jax.model.cache import Bucket
from aspd_jax.sizes import powers
from infer.answers.answer import copy_outputs, fetch_outputs
from infer.answers.logprobs import CHUNK, likeliest
from infer.decode.decode_step import StopConditions, run, summarise
from infer.decode.guidance import guidance_arrays, guide
from infer.decode.slots import copy_slots, put_bias, stop_segments
from infer.decode.state import DecodeState, EngineConfig
from infer.request import Request, SamplingParams
from infer.scheduling.admission import MIN_PROMPT, admit_request

log = logging.getLogger(__name__)

NO_STEP = StopConditions(np.int32(0), np.int32(-1), np.int32(0), np.bool_(False))


def compile_all(lm: LanguageModel, config: EngineConfig, state: DecodeState, buckets: Sequence[Bucket]) -> DecodeState:
    """Compile the programs of steps, the operations on rows between steps, and log probabilities of answers."""
    batch, capacity = state.cache.tokens.shape
    begun, drafts = time.perf_counter(), sorted({False, config.draft_tokens > 0})
    for number, bucket in enumerate(buckets, 1):
        for drafting in drafts:
            state, _ = run(lm.params, state, NO_STEP, config, bucket, drafting)
        spent = time.perf_counter() - begun
        log.info("program %d of %d: %s, %.0f s", number, len(buckets), bucket, spent)
    for size in powers(MIN_PROMPT, capacity):
        request = Request((0,) * min(size, capacity - 1), SamplingParams(), "serial", 1, 0)
        state = admit_request(lm, config, state, request, batch)  # a row past the end changes nothing
        state = copy_slots(state, np.zeros(2, np.int32), np.full(2, batch, np.int32), config, min(size, capacity))
    for size in powers(CHUNK, max(CHUNK, capacity)):
        likeliest(lm, config, np.zeros(min(size, capacity), np.int32), -1)
    for size in (1, *powers(1 + config.max_branches, batch * state.token_mask.shape[1])):
        nothing = guidance_arrays({}, batch, state.token_mask.shape[3], config, size)
        state, _ = guide(state, nothing, config)
    state = put_bias(state, np.int32(batch), np.zeros(state.bias.shape[1], np.float32), config)
    for rows in powers(1, batch):
        count = min(rows, batch)
        fetch_outputs(copy_outputs(state, config, [0] * count), [None] * count, config)
    jax.block_until_ready(summarise(state, config))
    return stop_segments(state, np.zeros(batch, bool), np.zeros((batch, config.max_branches), bool))
