"""Log probabilities of an answer's tokens, from one pass over its linearisation.

The engine's logits equal those of this pass (protocol, section 6.1), so no logits are kept while decoding. They are the
model's own logits, before grammar, temperature and other sampling parameters.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aspd_jax.language_model import LanguageModel
from aspd_jax.layout import Layout, build_layout
from aspd_jax.model.transformer import Transformer
from aspd_jax.model.vocabulary import head_of, lm_head
from aspd_jax.sizes import next_power
from infer.answers.answer import Result, TokenLogprob, content_segments
from infer.decode.state import EngineConfig
from infer.request import MAX_ALTERNATIVES

CHUNK = 128  # tokens per chunk of logits, and minimum padded length


def token_logprobs(
    lm: LanguageModel, config: EngineConfig, result: Result, alternatives: int, adapter: int = -1, echo: bool = False
) -> list[TokenLogprob]:
    """Return the log probabilities of the tokens of the plain text, in reading order.

    Args:
        alternatives: number of likeliest tokens, at most `MAX_ALTERNATIVES`.
        adapter: slot of the adapter that the answer was decoded with; negative: the base model.
        echo: include the tokens of the prompt and the end of text.
    """
    prompt, ids = result.prompt_token_ids, result.token_ids
    whole = np.asarray([*prompt, *ids], np.int32)
    chosen, top, top_ids = likeliest(lm, config, whole, adapter)
    start = len(prompt)
    segments = [range(start + s.start, start + s.stop) for s in content_segments(config, ids)]
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
            others = [int(other) for other in top_ids[at - 1, :alternatives]]
            pairs = list(zip(others, map(float, top[at - 1, :alternatives]), strict=True))
            spelled = [] if codec is None else codec.token_bytes(others, () if number else own)
            found.append(TokenLogprob(token, float(chosen[at - 1]), pairs, text, tuple(spelled)))
    return found


def likeliest(
    lm: LanguageModel, config: EngineConfig, ids: np.ndarray, adapter: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the log probability of each next token, and the likeliest next tokens.

    Returns:
        Log probabilities of the next tokens, float32 [S]; those of the likeliest tokens, [S, alternatives]; their ids.
        S is the number of ids, rounded up to a power of two.
    """
    found = jax.device_get(_likeliest(*_arguments(lm, config, ids, adapter)))
    chosen, top, top_ids = (np.asarray(field)[0] for field in found)
    return chosen, top, top_ids


def lower_likeliest(lm: LanguageModel, config: EngineConfig, size: int) -> jax.stages.Lowered:
    """Trace the program of `likeliest` for a number of ids."""
    return _likeliest.lower(*_arguments(lm, config, np.zeros(size, np.int32), -1))


def _arguments(lm: LanguageModel, config: EngineConfig, ids: np.ndarray, adapter: int) -> tuple[Any, ...]:
    size = max(CHUNK, next_power(ids.size))
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : ids.size] = ids
    real = (np.arange(size) < ids.size)[None]
    layout = build_layout(tokens, config.special, lm.config.positions, padding_mask=real)
    model = Transformer(replace(lm.config, attention="chunked"), mesh=lm.model.mesh)
    return model, lm.params, tokens, layout, np.int32(adapter)


@partial(jax.jit, static_argnames="model")
def _likeliest(
    model: Transformer, params: Any, tokens: jax.Array, layout: Layout, adapter: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `likeliest` on the device, for B rows."""
    of_each = jnp.full(tokens.shape, adapter) if model.config.adapters else None
    x: jax.Array = jnp.asarray(model.apply({"params": params}, tokens, layout, head=False, adapter=of_each))
    B, S = tokens.shape
    after = jnp.roll(tokens, -1, axis=1)

    def chunk(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        hidden, following = part
        logits = lm_head(model.config, head_of(model.config, params, adapter), hidden)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logprobs, following[..., None], axis=-1)[..., 0]
        return (chosen, *jax.lax.top_k(logprobs, min(MAX_ALTERNATIVES, logprobs.shape[-1])))

    parts = (x.reshape(B, S // CHUNK, CHUNK, -1), after.reshape(B, S // CHUNK, CHUNK))
    found = jax.lax.map(chunk, jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), parts))
    chosen, top, ids = (jnp.moveaxis(field, 0, 1).reshape(B, S, *field.shape[3:]) for field in found)
    return chosen, top, ids
