"""Which tokens may come next: only well-formed structure that still fits the budget (protocol, section 5).

B sequences, L lanes, V vocabulary.

Every token belongs to one class; a rule allows or forbids whole classes. The budget forbids nothing in serial text and
titles: an answer that has no room for the block or title that the model begins ends there (`transition`). A branch
token is allowed only if the block can still be closed after it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool

from infer.decode.inputs import Lanes, branch_budget
from infer.decode.state import MERGE, PROMPT, SERIAL, TITLE, TITLED, DecodeState, EngineConfig
from infer.decode.tag_automaton import (
    BRANCH_END,
    CLASSES,
    CONTINUES,
    END,
    NO_NUMBER,
    OTHER,
    PARALLEL_START,
    PROGRESS,
    SLASH,
    TEXT,
    TITLE_END,
    TITLE_START,
)


def allowed(state: DecodeState, config: EngineConfig, lanes: Lanes) -> jax.Array:
    """Bool [L, 9]: the classes that may come next in each lane."""
    serial, branch = _serial_rule(state, config)[lanes.row], _branch_rule(state, config, lanes)
    return jnp.where((lanes.branch == 0)[:, None], serial, branch)


def legal_tokens(state: DecodeState, config: EngineConfig, lanes: Lanes) -> jax.Array:
    """Bool [L, V]: the tokens that stand for allowed classes, or go on with a tag of one."""
    rule = allowed(state, config, lanes)
    classes = jnp.arange(CLASSES)
    tag = (classes >= TITLE_START) & (classes <= BRANCH_END)
    bits = jnp.sum(rule * (1 << classes) + (rule & tag) * (1 << (PROGRESS + classes)), axis=1).astype(jnp.uint16)
    legal = (state.automaton.bits[lane_node(state, lanes)] & bits[:, None]) > 0
    in_title = (lanes.branch == 0) & (state.sequence.phase == TITLE)[lanes.row]
    legal &= ~(in_title[:, None] & state.automaton.line_break)
    legal = jax.lax.cond(jnp.any(state.request.constrained), lambda: permitted(legal, state, lanes), lambda: legal)
    if not config.distinct_titles:
        return legal
    barred = jnp.where(lanes.branch == 0, barred_token(state)[lanes.row], -1)
    return legal & (jnp.arange(legal.shape[1]) != barred[:, None])


def permitted(legal: jax.Array, state: DecodeState, lanes: Lanes) -> jax.Array:
    """Of legal tokens, bool [L, V], those that the schema of a lane permits; where that leaves none, a budget has ended
    the segment before its value was complete, and all.
    """
    bits = state.permitted[lanes.row, lanes.branch]
    each = (bits[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    both = legal & (each.reshape(len(bits), -1)[:, : legal.shape[1]] > 0)
    bound = state.request.constrained[lanes.row] & both.any(axis=1)
    return jnp.where(bound[:, None], both, legal)


def recognise(state: DecodeState, node: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The class of what a token completes, the node after it, and whether it goes on with a tag; any shape."""
    following = state.automaton.next[node, token].astype(jnp.int32)
    nodes = state.automaton.next.shape[0]
    completes = following >= nodes
    continues = (state.automaton.bits[node, token] >> CONTINUES) > 0
    return jnp.where(completes, following - nodes, TEXT), jnp.where(completes, 0, following), continues


def lane_node(state: DecodeState, lanes: Lanes) -> jax.Array:
    """int32 [L]: how much of a tag the segment of each lane ends with."""
    s = state.sequence
    serial = jnp.where(s.phase == MERGE, 0, s.node)[lanes.row]
    in_branch = s.branch_node[lanes.row, jnp.maximum(lanes.branch - 1, 0)]
    return jnp.where(lanes.branch > 0, in_branch, serial)


def _names(state: DecodeState) -> tuple[jax.Array, jax.Array]:
    """Titles without the markers that they begin with: tokens int32 [B, N, T], -1 behind them, and lengths [B, N].

    A title of nothing but markers keeps them.
    """
    s = state.sequence
    place = jnp.arange(s.title_tokens.shape[2])
    inside = place < s.title_length[..., None]
    markers = jnp.sum(jnp.cumprod(inside & state.automaton.marker[s.title_tokens], axis=2), axis=2)
    skipped = jnp.where(markers < s.title_length, markers, 0)
    at = jnp.minimum(place + skipped[..., None], place.size - 1)
    length = s.title_length - skipped
    return jnp.where(place < length[..., None], jnp.take_along_axis(s.title_tokens, at, axis=2), -1), length


def repeated_title(state: DecodeState) -> jax.Array:
    """Bool [B]: whether the title under way is an earlier one of its block, their markers aside."""
    s = state.sequence
    names, length = _names(state)
    number = jnp.arange(length.shape[1])[None]
    own = jnp.sum(jnp.where((number == s.titles[:, None])[..., None], names, 0), axis=1, keepdims=True)
    return jnp.any(jnp.all(names == own, axis=2) & (number < s.titles[:, None]), axis=1)


def completes_plan(state: DecodeState) -> jax.Array:
    """Bool [B]: whether the last complete title says that it is the last, as `5/5 Rest` does (`pipeline.titles`)."""
    s = state.sequence
    last = (jnp.arange(s.title_length.shape[1])[None] == s.titles[:, None] - 1).astype(jnp.int32)
    tokens = jnp.sum(s.title_tokens * last[..., None], axis=1)
    length = jnp.sum(s.title_length * last, axis=1)
    place = jnp.arange(tokens.shape[1])[None]
    number = jnp.where(place < length[:, None], state.automaton.number[tokens], NO_NUMBER)
    size = jnp.sum(jnp.cumprod(number >= 0, axis=1), axis=1)  # tokens before the slash, if that is what follows

    def at(where: jax.Array) -> jax.Array:
        found = jnp.take_along_axis(number, jnp.minimum(where, number.shape[1] - 1), axis=1)
        return jnp.where(where < number.shape[1], found, NO_NUMBER)

    slash, behind = at(size[:, None]) == SLASH, at(place + size[:, None] + 1)
    alike = jnp.all((behind == number) | (place >= size[:, None]), axis=1)
    ends = at(2 * size[:, None] + 1) < 0  # 1/1 is not the beginning of 1/10
    return (size > 0) & slash[:, 0] & alike & ends[:, 0]


def barred_token(state: DecodeState) -> jax.Array:
    """int32 [B]: the token that would make a block's second title repeat the first, their markers aside; -1: none.

    A block needs two titles, so the second cannot be discarded as later ones are that repeat another.
    """
    s = state.sequence
    names, lengths = _names(state)
    first, size = names[:, 0], lengths[:, 0]
    tokens, length = s.title_tokens[:, 1], s.title_length[:, 1]
    place = jnp.arange(tokens.shape[1])
    marked = state.automaton.marker[tokens] & (place < length[:, None])
    markers = jnp.sum(jnp.cumprod(marked, axis=1), axis=1)
    # The next token may be the first one after the markers. A first title of nothing but markers is compared with them.
    skipped = jnp.where(state.automaton.marker[jnp.maximum(first[:, 0], 0)], 0, markers)
    at = jnp.minimum(place + skipped[:, None], place.size - 1)
    alike = (jnp.take_along_axis(tokens, at, axis=1) == first) | (place >= (length - skipped)[:, None])
    completes = (length - skipped == size - 1) & jnp.all(alike, axis=1)
    last = jnp.take_along_axis(first, jnp.maximum(size - 1, 0)[:, None], axis=1)[:, 0]
    return jnp.where((s.phase == TITLE) & (s.titles == 1) & completes, last, -1)


def _close_cost(titles: jax.Array, title_tokens: jax.Array, config: EngineConfig) -> jax.Array:
    """Tokens still to come when a block forks right after its titles and all its branches stay empty:
    `<|para|>`, heads, closing tags, `<|/para|>`.
    """
    tags = config.tags
    of_branch = len(tags.branch_start) + len(config.separator) + tags.branch_end_cost
    return tags.parallel_start_cost + len(tags.parallel_end) + titles * of_branch + title_tokens


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


def budget_room(state: DecodeState, config: EngineConfig) -> Room:
    """Return what the serial segment of each sequence may still begin (protocol, section 5)."""
    s, tags = state.sequence, config.tags
    remaining, titles = s.remaining, s.titles
    number = jnp.arange(config.max_branches)[None]
    length = jnp.sum(jnp.where(number == titles[:, None], s.title_length, 0), axis=1)
    complete = jnp.sum(jnp.where(number < titles[:, None], s.title_length, 0), axis=1)
    # A further title of one token, and its head and closing tag.
    of_title = tags.title_start_cost + 1 + tags.title_end_cost
    another = of_title + len(tags.branch_start) + 1 + len(config.separator) + tags.branch_end_cost
    smallest = 2 * of_title + _close_cost(jnp.asarray(2), jnp.asarray(2), config)

    # In a title: one more token, its copy in the head, and then everything that has to follow. Tokens that may turn
    # out to begin a tag count as text until they do.
    missing = jnp.where(titles + 1 < 2, another, 0)
    after_token = 1 + tags.title_end_cost + _close_cost(titles + 1, complete + length + 1, config) + missing
    # Between titles, the tokens of the next tag that are there already have been reserved with it.
    reserved = remaining + s.chain
    return Room(
        block=(remaining >= smallest) & (s.content >= 1),
        title=(titles < 2) | (reserved >= another + _close_cost(titles, complete, config)),
        title_token=(length == 0) | (remaining >= after_token),
    )


def _serial_rule(state: DecodeState, config: EngineConfig) -> jax.Array:
    """Bool [B, 9], for the serial lane."""
    s, limit, titles = state.sequence, config.max_branches, state.sequence.titles
    rule = jnp.where((s.phase == MERGE) | (s.phase == PROMPT), SERIAL, s.phase)
    length = jnp.sum(jnp.where(jnp.arange(limit)[None] == titles[:, None], s.title_length, 0), axis=1)
    in_serial, in_title, titled = rule == SERIAL, rule == TITLE, rule == TITLED
    may_open = state.request.adaptive & (limit >= 2)
    may_add_title = (titles < limit) & ((titles < 2) | ~completes_plan(state))
    never = jnp.zeros_like(in_serial)
    columns = [never] * CLASSES
    columns[TEXT] = in_serial | (in_title & (length < config.max_title_tokens))
    columns[OTHER] = columns[END] = in_serial
    columns[TITLE_START] = (in_serial & may_open) | (titled & may_add_title)
    columns[TITLE_END] = in_title & (length > s.chain)
    columns[PARALLEL_START] = titled & (titles >= 2)
    return jnp.stack(columns, axis=1)


def _branch_rule(state: DecodeState, config: EngineConfig, lanes: Lanes) -> jax.Array:
    """Bool [L, 9], for lanes that continue branches."""
    s = state.sequence
    at = (lanes.row, jnp.maximum(lanes.branch - 1, 0))
    budget = branch_budget(s, config)
    affordable = (budget.affordable & budget.readable)[at]
    within = s.branch_sampled[at] + config.tags.branch_end_cost < state.request.max_branch_tokens[lanes.row]
    free = affordable & ~s.branch_closing[at] & within
    never, always = jnp.zeros_like(free), jnp.ones_like(free)
    columns = [never] * CLASSES
    columns[TEXT] = free
    columns[BRANCH_END] = always
    columns[END] = s.branch_node[at] == 0  # it counts as the closing tag, unless one is under way
    return jnp.stack(columns, axis=1)
