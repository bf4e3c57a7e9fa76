"""Titles: their comparison, the ends of lists, the budget of a block, and the heads that the engine feeds.

B sequences, N maximum branches, M = N + 1 segments, E maximum title tokens, Q maximum pending tokens of a segment.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool

from infer.decode.derived import Derived
from infer.decode.state import TITLE, Budget, DecodeState, EngineConfig, Segments, Titles
from infer.decode.tag_automaton import NO_NUMBER, SLASH


def _names(state: DecodeState) -> tuple[jax.Array, jax.Array]:
    """Return titles without leading markers: tokens int32 [B, N, E], -1 behind them, and lengths [B, N].

    A title that consists of markers keeps them.
    """
    titles = state.sequence.titles
    place = jnp.arange(titles.tokens.shape[2])
    inside = place < titles.length[..., None]
    markers = jnp.sum(jnp.cumprod(inside & state.automaton.marker[titles.tokens], axis=2), axis=2)
    skipped = jnp.where(markers < titles.length, markers, 0)
    at = jnp.minimum(place + skipped[..., None], place.size - 1)
    length = titles.length - skipped
    return jnp.where(place < length[..., None], jnp.take_along_axis(titles.tokens, at, axis=2), -1), length


def repeats_title(state: DecodeState) -> Bool[Array, " B"]:
    """Return whether the title under way equals an earlier one of its block, leading markers aside."""
    count = state.sequence.titles.complete
    names, length = _names(state)
    number = jnp.arange(length.shape[1])[None]
    current = jnp.sum(jnp.where((number == count[:, None])[..., None], names, 0), axis=1, keepdims=True)
    return jnp.any(jnp.all(names == current, axis=2) & (number < count[:, None]), axis=1)


def completes_plan(state: DecodeState) -> Bool[Array, " B"]:
    """Return whether the last complete title says that it is the last, as `5/5 Rest` does (`pipeline.titles`)."""
    titles = state.sequence.titles
    last = (jnp.arange(titles.length.shape[1])[None] == titles.complete[:, None] - 1).astype(jnp.int32)
    tokens = jnp.sum(titles.tokens * last[..., None], axis=1)
    length = jnp.sum(titles.length * last, axis=1)
    place = jnp.arange(tokens.shape[1])[None]
    number = jnp.where(place < length[:, None], state.automaton.number[tokens], NO_NUMBER)
    size = jnp.sum(jnp.cumprod(number >= 0, axis=1), axis=1)  # tokens before the slash, if that is what follows

    def at(index: jax.Array) -> jax.Array:
        value = jnp.take_along_axis(number, jnp.minimum(index, number.shape[1] - 1), axis=1)
        return jnp.where(index < number.shape[1], value, NO_NUMBER)

    slash, behind = at(size[:, None]) == SLASH, at(place + size[:, None] + 1)
    alike = jnp.all((behind == number) | (place >= size[:, None]), axis=1)
    ends = at(2 * size[:, None] + 1) < 0  # 1/1 is not the beginning of 1/10
    return (size > 0) & slash[:, 0] & alike & ends[:, 0]


def barred_token(state: DecodeState) -> jax.Array:
    """Return the token that would make a block's second title repeat the first, int32 [B]; -1: none.

    A block needs two titles, so the second cannot be discarded as later ones are. Leading markers are ignored.
    """
    titles = state.sequence.titles
    names, lengths = _names(state)
    first, size = names[:, 0], lengths[:, 0]
    tokens, length = titles.tokens[:, 1], titles.length[:, 1]
    place = jnp.arange(tokens.shape[1])
    marked = state.automaton.marker[tokens] & (place < length[:, None])
    markers = jnp.sum(jnp.cumprod(marked, axis=1), axis=1)
    # The next token may be the first one after the markers. A first title that consists of markers is compared with
    # them.
    skipped = jnp.where(state.automaton.marker[jnp.maximum(first[:, 0], 0)], 0, markers)
    at = jnp.minimum(place + skipped[:, None], place.size - 1)
    alike = (jnp.take_along_axis(tokens, at, axis=1) == first) | (place >= (length - skipped)[:, None])
    completes = (length - skipped == size - 1) & jnp.all(alike, axis=1)
    last = jnp.take_along_axis(first, jnp.maximum(size - 1, 0)[:, None], axis=1)[:, 0]
    return jnp.where((state.sequence.cursor.phase == TITLE) & (titles.complete == 1) & completes, last, -1)


def fed_cost(titles: jax.Array, title_tokens: jax.Array, config: EngineConfig) -> jax.Array:
    """Return the tokens that the engine feeds for a block by itself: all heads and `<|/para|>`."""
    tags = config.tags
    return titles * (len(tags.branch_start) + len(config.separator)) + title_tokens + len(tags.parallel_end)


def _close_cost(titles: jax.Array, title_tokens: jax.Array, config: EngineConfig) -> jax.Array:
    """Return the tokens of a block behind its titles if all its branches stay empty."""
    tags = config.tags
    return tags.parallel_start_cost + fed_cost(titles, title_tokens, config) + titles * tags.branch_end_cost


class Room(NamedTuple):
    """Parts that fit the budget of all tokens together with what closes them, bool [B] each.

    Attributes:
        block: the smallest block.
        title: a further title of one token.
        title_token: a further token of the title under way.
    """

    block: Bool[Array, " B"]
    title: Bool[Array, " B"]
    title_token: Bool[Array, " B"]


def budget_room(titles: Titles, budget: Budget, chain: jax.Array, derived: Derived, config: EngineConfig) -> Room:
    """Return what the serial segment of each sequence may still begin (protocol, section 5).

    Args:
        chain: tokens of the tag that the segment ends with a part of, int32 [B].
    """
    tags, count = config.tags, titles.complete
    length, complete = derived.title_length, derived.titles_length
    # A further title of one token, and its head and closing tag.
    title_cost = tags.title_start_cost + 1 + tags.title_end_cost
    another = title_cost + len(tags.branch_start) + 1 + len(config.separator) + tags.branch_end_cost
    smallest = 2 * title_cost + _close_cost(jnp.asarray(2), jnp.asarray(2), config)

    # In a title: one more token, its copy in the head, and then everything that has to follow. Tokens that may turn
    # out to begin a tag count as text until they do.
    missing = jnp.where(count + 1 < 2, another, 0)
    after_token = 1 + tags.title_end_cost + _close_cost(count + 1, complete + length + 1, config) + missing
    # Between titles, the tokens of the next tag that are there already have been reserved with it.
    reserved = budget.tokens + chain
    return Room(
        block=(budget.tokens >= smallest) & (budget.content >= 1),
        title=(count < 2) | (reserved >= another + _close_cost(count, complete, config)),
        title_token=(length == 0) | (budget.tokens >= after_token),
    )


def fork_segments(titles: Titles, start: jax.Array, config: EngineConfig) -> Segments:
    """Return the segments of a fork: `<|para|>` pending in the serial one, and in each branch its head.

    Args:
        start: token that opens the block, int32 [B].
    """
    size, opening = config.max_queued, len(config.tags.branch_start)
    place, length = jnp.arange(size), titles.length[..., None]
    opened = jnp.asarray(config.tags.branch_start, jnp.int32)[jnp.minimum(place, opening - 1)]
    title = titles.tokens[:, :, jnp.clip(place - opening, 0, config.max_title_tokens - 1)]
    separator = jnp.asarray(config.separator or (0,), jnp.int32)
    separated = separator[jnp.clip(place - opening - length, 0, separator.size - 1)]
    heads = jnp.where(place < opening, opened, jnp.where(place < opening + length, title, separated))
    exists = jnp.arange(config.max_branches)[None] < titles.complete[:, None]
    counts = jnp.where(exists, opening + titles.length + len(config.separator), 0)
    serial = jnp.broadcast_to(start[:, None, None], (start.size, 1, size))
    zeros = jnp.zeros((start.size, 1 + config.max_branches), jnp.int32)
    return Segments(
        queue=jnp.concatenate([serial, heads], axis=1),
        queued=jnp.concatenate([jnp.ones_like(counts[:, :1]), counts], axis=1),
        node=zeros,
        sampled=zeros,
    )
