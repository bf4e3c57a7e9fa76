"""From logits to tokens: greedy, temperature, top-k, top-p, min-p and repetition penalty.

B sequences, W lanes, V vocabulary, C cache slots.

Every lane draws from its own random stream, derived from (seed, block, branch, place in the stretch), so
what a lane draws depends on nothing else in the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from aspd_jax.layout import visible
from infer.state import DecodeState, Feed, Protocol


def penalise_repetition(logits: jax.Array, state: DecodeState, protocol: Protocol, feed: Feed) -> jax.Array:
    """Divide positive logits, and multiply negative ones, of tokens that the lane can see in the answer."""
    cache = state.cache
    looking = jax.tree.map(lambda field: jnp.take_along_axis(field, feed.rows, axis=1), feed.layout)
    in_answer = jnp.arange(cache.tokens.shape[1])[None] >= state.prompt_length[:, None]
    seen = visible(looking, cache.layout, protocol.model.config.siblings) & in_answer[:, None]
    batch, lanes = jnp.ogrid[: logits.shape[0], : logits.shape[1]]
    tokens = jnp.where(seen, cache.tokens[:, None], logits.shape[-1])
    present = jnp.zeros(logits.shape, bool).at[batch[..., None], lanes[..., None], tokens].set(True, mode="drop")
    penalty = state.request.repetition_penalty[:, None, None]
    return jnp.where(present, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def restrict(logits: jax.Array, state: DecodeState) -> jax.Array:
    """Drop what top-k, top-p and min-p exclude, in this order; logits are at temperature already."""
    request = state.request
    size = logits.shape[-1]
    ordered = jnp.sort(logits, axis=-1, descending=True)
    top_k = jnp.where(request.top_k > 0, jnp.minimum(request.top_k, size), size)[:, None, None]
    bound = jnp.take_along_axis(ordered, jnp.broadcast_to(top_k - 1, (*logits.shape[:2], 1)), axis=-1)
    ordered = jnp.where(ordered >= bound, ordered, -jnp.inf)
    share = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(share, axis=-1) - share
    top_p = request.top_p[:, None, None]
    kept = (before < top_p) | (top_p >= 1.0)  # rounding can bring the sum to 1 before the last token
    kept = kept.at[..., 0].set(True) & (share >= request.min_p[:, None, None] * share[..., :1]) & (ordered > -jnp.inf)
    bound = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= bound, logits, -jnp.inf)


def lane_keys(state: DecodeState, feed: Feed) -> jax.Array:
    """Typed PRNG keys [B, W]."""
    branch = jnp.maximum(feed.lane, 0)
    in_branch = branch > 0
    place = jnp.where(
        in_branch,
        jnp.take_along_axis(state.branch_sampled, jnp.maximum(branch - 1, 0), axis=1),
        state.sampled[:, None],
    )
    block = jnp.where(in_branch, state.block[:, None], 0)

    def one(key: jax.Array, block: jax.Array, branch: jax.Array, place: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, block), branch), place)

    return jax.vmap(jax.vmap(one, (None, 0, 0, 0)))(state.request.key, block, branch, place)


def sample(logits: jax.Array, state: DecodeState, protocol: Protocol, feed: Feed) -> jax.Array:
    """int32 [B, W]: one token per lane; lanes at temperature 0 take the likeliest.

    Args:
        logits: float32 [B, W, V], -inf where the grammar forbids a token.
    """
    request = state.request
    logits = jax.lax.cond(
        jnp.any(request.repetition_penalty != 1.0),
        lambda: penalise_repetition(logits, state, protocol, feed),
        lambda: logits,
    )
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        warm = logits / jnp.where(request.temperature > 0, request.temperature, 1.0)[:, None, None]
        limited = jnp.any((request.top_k > 0) | (request.top_p < 1.0) | (request.min_p > 0.0))
        warm = jax.lax.cond(limited, lambda: restrict(warm, state), lambda: warm)
        drawn = jax.vmap(jax.vmap(jax.random.categorical))(lane_keys(state, feed), warm).astype(jnp.int32)
        return jnp.where((request.temperature > 0)[:, None], drawn, greedy)

    return jax.lax.cond(jnp.any(request.temperature > 0), draw, lambda: greedy)
