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

CHUNK = 128  # tokens per chunk of logits, and minimum padded length


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
    chosen, top, top_ids = likeliest(lm, config, whole, adapter, result.branch_sizes)
    start = len(prompt)
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
    lm: LanguageModel, config: EngineConfig, ids: np.ndarray, adapter: int, blocks: Sequence[Sequence[int]] = ()
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the log probability of each token, and the likeliest tokens in its place.

    Args:
        lm, config, adapter: see `token_logprobs`.
        ids: tokens.
        blocks: number of tokens of each branch of the blocks without tags that `ids` end with.

    Returns:
        Log probabilities of the tokens, float32 [S]; those of the likeliest tokens, [S, alternatives]; their ids. S is
        the number of ids, rounded up to a power of two. Those of the first token are undefined.
    """
    found = jax.device_get(_likeliest(*_arguments(lm, config, ids, adapter, blocks)))
    chosen, top, top_ids = (np.asarray(field)[0] for field in found)
    return chosen, top, top_ids


def lower_likeliest(lm: LanguageModel, config: EngineConfig, size: int) -> jax.stages.Lowered:
    """Trace the program of `likeliest` for a number of ids."""
    return _likeliest.lower(*_arguments(lm, config, np.zeros(size, np.int32), -1, ()))


def _arguments(
    lm: LanguageModel, config: EngineConfig, ids: np.ndarray, adapter: int, blocks: Sequence[Sequence[int]]
) -> tuple[Any, ...]:
    size = max(CHUNK, next_power(ids.size))
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : ids.size] = ids
    tagged = ids.size - sum(map(sum, blocks))
    real = (np.arange(size) < tagged)[None]
    layout = build_layout(tokens, config.special, lm.config.positions, padding_mask=real)
    before = np.maximum(np.arange(size, dtype=np.int32)[None] - 1, 0)
    if blocks:
        _append_blocks(layout, before[0], tagged, blocks, lm.config.positions)
    model = Transformer(replace(lm.config, attention="chunked"), mesh=lm.model.mesh)
    return model, lm.params, tokens, layout, before, np.int32(adapter)


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
    model: Transformer, params: Any, tokens: jax.Array, layout: Layout, before: jax.Array, adapter: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `likeliest` on the device, for B rows; `before`: place of the token before each, int32 [B, S]."""
    of_each = jnp.full(tokens.shape, adapter) if model.config.adapters else None
    x: jax.Array = jnp.asarray(model.apply({"params": params}, tokens, layout, head=False, adapter=of_each))
    B, S = tokens.shape
    x = jnp.take_along_axis(x, before[..., None], axis=1)

    def chunk(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        hidden, own = part
        logits = lm_head(model.config, head_of(model.config, params, adapter), hidden)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logprobs, own[..., None], axis=-1)[..., 0]
        return (chosen, *jax.lax.top_k(logprobs, min(MAX_ALTERNATIVES, logprobs.shape[-1])))

    parts = (x.reshape(B, S // CHUNK, CHUNK, -1), tokens.reshape(B, S // CHUNK, CHUNK))
    found = jax.lax.map(chunk, jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), parts))
    chosen, top, ids = (jnp.moveaxis(field, 0, 1).reshape(B, S, *field.shape[3:]) for field in found)
    return chosen, top, ids
