"""Rules for the titles of a block: repeated titles, complete plans and budget.

B sequences, N maximum branches, E maximum title tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from infer.decode.state import TITLE, EngineConfig, SequenceState, Titles
from infer.decode.token_classes import NO_NUMBER, SLASH, TokenClasses


def _names(titles: Titles, classes: TokenClasses) -> tuple[jax.Array, jax.Array]:
    """Return titles without leading markers: tokens int32 [B, N, E], -1 after them, and lengths [B, N].

    A title that consists of markers keeps them.
    """
    place = jnp.arange(titles.tokens.shape[2])
    inside = place < titles.length[..., None]
    markers = jnp.sum(jnp.cumprod(inside & classes.marker[titles.tokens], axis=2), axis=2)
    skipped = jnp.where(markers < titles.length, markers, 0)
    at = jnp.minimum(place + skipped[..., None], place.size - 1)
    length = titles.length - skipped
    return jnp.where(place < length[..., None], jnp.take_along_axis(titles.tokens, at, axis=2), -1), length


def repeats_title(titles: Titles, classes: TokenClasses) -> Bool[Array, " B"]:
    """Return whether the title under way equals an earlier one of its block, leading markers aside."""
    count = titles.complete
    names, length = _names(titles, classes)
    number = jnp.arange(length.shape[1])[None]
    current = jnp.sum(jnp.where((number == count[:, None])[..., None], names, 0), axis=1, keepdims=True)
    return jnp.any(jnp.all(names == current, axis=2) & (number < count[:, None]), axis=1)


def completes_plan(titles: Titles, classes: TokenClasses) -> Bool[Array, " B"]:
    """Return whether the last complete title says that it is the last, as `5/5 Rest` does (`pipeline.titles`)."""
    last = (jnp.arange(titles.length.shape[1])[None] == titles.complete[:, None] - 1).astype(jnp.int32)
    tokens = jnp.sum(titles.tokens * last[..., None], axis=1)
    length = jnp.sum(titles.length * last, axis=1)
    place = jnp.arange(tokens.shape[1])[None]
    number = jnp.where(place < length[:, None], classes.number[tokens], NO_NUMBER)
    size = jnp.sum(jnp.cumprod(number >= 0, axis=1), axis=1)  # tokens before the slash, if that is what follows

    def at(index: jax.Array) -> jax.Array:
        value = jnp.take_along_axis(number, jnp.minimum(index, number.shape[1] - 1), axis=1)
        return jnp.where(index < number.shape[1], value, NO_NUMBER)

    slash, after = at(size[:, None]) == SLASH, at(place + size[:, None] + 1)
    alike = jnp.all((after == number) | (place >= size[:, None]), axis=1)
    ends = at(2 * size[:, None] + 1) < 0  # 1/1 is not the beginning of 1/10
    return (size > 0) & slash[:, 0] & alike & ends[:, 0]


def barred_token(titles: Titles, phase: jax.Array, classes: TokenClasses) -> jax.Array:
    """Return the token that would make a block's second title repeat the first, int32 [B]; -1: none.

    A block needs two titles, so the second cannot be discarded as later ones are. Leading markers are ignored.
    """
    names, lengths = _names(titles, classes)
    first, size = names[:, 0], lengths[:, 0]
    tokens, length = titles.tokens[:, 1], titles.length[:, 1]
    place = jnp.arange(tokens.shape[1])
    marked = classes.marker[tokens] & (place < length[:, None])
    markers = jnp.sum(jnp.cumprod(marked, axis=1), axis=1)
    # The next token may be the first one after the markers. A first title that consists of markers is compared with
    # them.
    skipped = jnp.where(classes.marker[jnp.maximum(first[:, 0], 0)], 0, markers)
    at = jnp.minimum(place + skipped[:, None], place.size - 1)
    alike = (jnp.take_along_axis(tokens, at, axis=1) == first) | (place >= (length - skipped)[:, None])
    completes = (length - skipped == size - 1) & jnp.all(alike, axis=1)
    last = jnp.take_along_axis(first, jnp.maximum(size - 1, 0)[:, None], axis=1)[:, 0]
    return jnp.where((phase == TITLE) & (titles.complete == 1) & completes, last, -1)


def complete_tokens(titles: Titles) -> Int32[Array, " B"]:
    """Return the tokens of all complete titles of the block."""
    number = jnp.arange(titles.length.shape[1])[None]
    return jnp.sum(jnp.where(number < titles.complete[:, None], titles.length, 0), axis=1)


def fed_cost(titles: jax.Array, title_tokens: jax.Array, config: EngineConfig) -> jax.Array:
    """Return the tokens that the engine feeds for a block by itself: all heads and `<|/para|>`."""
    return titles * (1 + len(config.form.separator)) + title_tokens + 1


def _close_cost(titles: jax.Array, title_tokens: jax.Array, config: EngineConfig) -> jax.Array:
    """Return the tokens of a block after its titles if all its branches stay empty."""
    return 1 + fed_cost(titles, title_tokens, config) + titles


class Fits(NamedTuple):
    """Parts that the budget permits, bool [B] each; the tags that close a part are included.

    Attributes:
        block: the smallest block.
        stated: the leads whose number is stated, of one token each.
        title: a further title of one token.
        title_token: a further token of the title under way.
    """

    block: Bool[Array, " B"]
    stated: Bool[Array, " B"]
    title: Bool[Array, " B"]
    title_token: Bool[Array, " B"]


def fitting_parts(s: SequenceState, length: jax.Array, complete: jax.Array, config: EngineConfig) -> Fits:
    """Return whether the next parts of the serial segment fit the budget (protocol, section 5).

    Args:
        s: progress of the sequences.
        length: tokens of the title under way, int32 [B].
        complete: tokens of all complete titles of the block, int32 [B].
        config: configuration of the engine.
    """
    count, stated, budget = s.titles.complete, s.titles.stated, s.budget
    title_cost = 3  # a title of one token, with tags
    another = title_cost + 1 + 1 + len(config.form.separator) + 1  # and its head and closing tag
    number_cost = title_cost * config.form.leads  # a number of one digit, with tags
    smallest = number_cost + 2 * title_cost + _close_cost(jnp.asarray(2), jnp.asarray(2), config)
    every = 1 + stated * title_cost + _close_cost(stated, stated, config)

    # In a title: one more token, its copy in the head, and the tokens that have to follow.
    missing = jnp.maximum(jnp.where(stated > 0, stated, 2) - (count + 1), 0) * another
    after_token = 2 + _close_cost(count + 1, complete + length + 1, config) + missing
    return Fits(
        block=(budget.tokens >= smallest) & (budget.content >= 1),
        stated=budget.tokens >= every,
        title=(count < 2) | (budget.tokens >= another + _close_cost(count, complete, config)),
        title_token=(length == 0) | (budget.tokens >= after_token),
    )
