"""Log probabilities of an answer's tokens, from one pass over its linearisation.

The engine's logits equal those of this pass (protocol, section 6.1), so no logits are kept while decoding. They are the
model's own logits, before grammar, temperature and other sampling parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.language_model import LanguageModel
from aspd_jax.layout import Layout, PositionScheme, build_layout
from aspd_jax.model.transformer import Transformer
from aspd_jax.model.vocabulary import head_of, lm_head
from aspd_jax.sizes import next_power
from aspd_jax.template import Template
from infer.answers.answer import Result, TokenLogprob, content_segments
from infer.answers.filled import filled_branches
from infer.decode.state import EngineConfig
from infer.request import MAX_ALTERNATIVES

CHUNK = 32  # tokens whose logits are in memory at a time
MIN_LENGTH = 128  # minimum padded length


def token_logprobs(
    lm: LanguageModel,
    config: EngineConfig,
    result: Result,
    alternatives: int,
    adapter: int = -1,
    echo: bool = False,
    template: Template | None = None,
) -> list[TokenLogprob]:
    """Return the log probabilities of the tokens of the plain text, in reading order.

    Args:
        alternatives: number of likeliest tokens, at most `MAX_ALTERNATIVES`.
        adapter: slot of the adapter that the answer was decoded with; negative: the base model.
        echo: include the tokens of the prompt and the end of text.
        template: template of the answer; its tokens are those of the branches, leads included. The first token of a
            lead follows the last token before its block.
    """
    prompt, ids = result.prompt_token_ids, result.token_ids
    whole = np.asarray([*prompt, *ids], np.int32)
    start = len(prompt)
    chosen, top, top_ids = likeliest(lm, config, whole, adapter, result.branch_sizes, 0 if echo else start)
    if template is None:
        segments = content_segments(config, ids)
    else:
        sizes = [size for block in result.branch_sizes for size in block]
        branches = filled_branches(template, result.text, ids, sizes, lm.codec.text)
        segments = [segment for branch in branches for segment in (branch.lead, branch.rest) if segment]
    segments = [range(start + s.start, start + s.stop) for s in segments]
    if echo:
        segments.insert(0, range(start))
        segments += [range(whole.size - 1, whole.size)] if ids and ids[-1] in config.end else []
    codec = None if lm.tokenizer is None else lm.codec.text
    found = []
    for segment in segments:
        own = [int(token) for token in whole[segment.start : segment.stop]]
        texts = [b""] * len(own) if codec is None else codec.token_bytes(own)
        for number, (at, token, text) in enumerate(zip(segment, own, texts, strict=True)):
            if at == 0:
                found.append(TokenLogprob(token, None, [], text))
                continue
            others = [int(other) for other in top_ids[at, :alternatives]]
            pairs = list(zip(others, map(float, top[at, :alternatives]), strict=True))
            spelled = [] if codec is None else codec.token_bytes(others, () if number else own)
            found.append(TokenLogprob(token, float(chosen[at]), pairs, text, tuple(spelled)))
    return found


def likeliest(
    lm: LanguageModel,
    config: EngineConfig,
    ids: np.ndarray,
    adapter: int,
    blocks: Sequence[Sequence[int]],
    first: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the log probability of each token, and the likeliest tokens in its place.

    Args:
        lm, config, adapter: see `token_logprobs`.
        ids: tokens.
        blocks: number of tokens of each branch of the blocks without tags that `ids` end with.
        first: index of the first token for which they are computed.

    Returns:
        Log probabilities of the tokens, float32 [S]; those of the likeliest tokens, [S, alternatives]; their ids. S is
        the number of ids, rounded up to a power of two. Those of the first token, and of tokens before `first`, are
        undefined.
    """
    found = jax.device_get(_likeliest(*_arguments(lm, config, ids, adapter, blocks, first)))
    chosen, top, top_ids = map(np.asarray, found)
    return chosen, top, top_ids


def lower_likeliest(lm: LanguageModel, config: EngineConfig, size: int) -> jax.stages.Lowered:
    """Trace the program of `likeliest` for a number of ids."""
    return _likeliest.lower(*_arguments(lm, config, np.zeros(size, np.int32), -1, (), 0))


def _arguments(
    lm: LanguageModel,
    config: EngineConfig,
    ids: np.ndarray,
    adapter: int,
    blocks: Sequence[Sequence[int]],
    first: int,
) -> tuple[Any, ...]:
    size = max(MIN_LENGTH, next_power(ids.size))
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : ids.size] = ids
    tagged = ids.size - sum(map(sum, blocks))
    real = (np.arange(size) < tagged)[None]
    layout = build_layout(tokens, config.special, lm.config.positions, padding_mask=real)
    before = np.maximum(np.arange(size, dtype=np.int32)[None] - 1, 0)
    if blocks:
        _append_blocks(layout, before[0], tagged, blocks, lm.config.positions)
    model = Transformer(replace(lm.config, attention="chunked"), mesh=lm.model.mesh)
    chunks = np.asarray([first // CHUNK, -(-ids.size // CHUNK)], np.int32)
    return model, lm.params, tokens, layout, before[0], np.int32(adapter), chunks


def _append_blocks(
    layout: Layout, before: np.ndarray, end: int, blocks: Sequence[Sequence[int]], positions: PositionScheme
) -> None:
    """Add blocks without tags to a layout [1, S] that ends in serial text (protocol, section 5, *Templates*).

    Args:
        before: place of the token before each token, [S]; of the first token of a branch, the last one before its
            block.
        end: number of tokens of the layout.
        blocks: number of tokens of each branch.
    """
    next_position, number = int(layout.position[0, end - 1]) + 1, int(layout.block.max())
    for block in blocks:
        number, last = number + 1, end - 1
        for branch, size in enumerate(block, 1):
            place = slice(end, end + size)
            layout.position[0, place] = next_position + np.arange(size)
            layout.sequence[0, place], layout.block[0, place], layout.branch[0, place] = 1, number, branch
            before[end], end = last, end + size
        next_position += max(block) if positions == "max" else sum(block)


@partial(jax.jit, static_argnames="model")
def _likeliest(
    model: Transformer,
    params: Any,
    tokens: jax.Array,
    layout: Layout,
    before: jax.Array,
    adapter: jax.Array,
    chunks: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `likeliest` on the device.

    Args:
        model, params, tokens, layout, adapter: one row of tokens, [1, S], and what decodes it.
        before: place of the token before each, int32 [S].
        chunks: first chunk, and the one behind the last, int32 [2].
    """
    of_each = jnp.full(tokens.shape, adapter) if model.config.adapters else None
    x: jax.Array = jnp.asarray(model.apply({"params": params}, tokens, layout, head=False, adapter=of_each))
    x, head = x[0, before], head_of(model.config, params, adapter)
    alternatives = min(MAX_ALTERNATIVES, model.config.vocab_size)

    def chunk(number: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = number * CHUNK
        own = jax.lax.dynamic_slice_in_dim(tokens[0], at, CHUNK)
        logits = lm_head(model.config, head, jax.lax.dynamic_slice_in_dim(x, at, CHUNK))
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logprobs, own[:, None], axis=-1)[:, 0]
        parts = (chosen, *jax.lax.top_k(logprobs, alternatives))
        return tuple(jax.lax.dynamic_update_slice_in_dim(a, b, at, 0) for a, b in zip(found, parts, strict=True))

    shape = (tokens.shape[1], alternatives)
    empty = (jnp.zeros(shape[0], jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32))
    chosen, top, ids = jax.lax.fori_loop(chunks[0], chunks[1], chunk, empty)
    return chosen, top, ids
