"""Which tokens may come next: only well-formed structure within the budget (protocol, section 5).

B sequences, L lanes, V vocabulary.

Every token belongs to one class; a rule allows or forbids whole classes. The budget forbids nothing in serial text and
titles: if the block or title that the model begins does not fit, the answer ends there (`transition`). A branch
token is allowed only if the block can still be closed after it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from infer.decode.derived import Derived
from infer.decode.inputs import Lanes
from infer.decode.state import COUNT, MERGE, PROMPT, SERIAL, TITLE, TITLED, DecodeState, EngineConfig
from infer.decode.tag_automaton import (
    BRANCH_END,
    CLASSES,
    CONTINUES,
    END,
    OTHER,
    PARALLEL_START,
    PROGRESS,
    TEXT,
    TITLE_END,
    TITLE_START,
    TagAutomaton,
)


def allowed_classes(state: DecodeState, derived: Derived, config: EngineConfig, lanes: Lanes) -> jax.Array:
    """Return the classes that may come next in each lane, bool [L, 9]."""
    serial, branch = _serial_rule(state, derived, config)[lanes.row], _branch_rule(state, derived, config, lanes)
    return jnp.where((lanes.branch == 0)[:, None], serial, branch)


def legal_tokens(state: DecodeState, derived: Derived, config: EngineConfig, lanes: Lanes) -> jax.Array:
    """Return the tokens of allowed classes, and those that continue a tag of one; bool [L, V]."""
    rule = allowed_classes(state, derived, config, lanes)
    classes = jnp.arange(CLASSES)
    tag = (classes >= TITLE_START) & (classes <= BRANCH_END)
    bits = jnp.sum(rule * (1 << classes) + (rule & tag) * (1 << (PROGRESS + classes)), axis=1).astype(jnp.uint16)
    legal = (state.automaton.bits[lane_tag_state(state, lanes)] & bits[:, None]) > 0
    if config.form.leads:
        counts = (lanes.branch == 0) & (state.sequence.cursor.phase == COUNT)[lanes.row]

        def counting() -> jax.Array:
            tag = jnp.arange(legal.shape[1]) == config.special.title_end
            return ~counts[:, None] | tag | number_tokens(state, config)[lanes.row]

        legal = jax.lax.cond(jnp.any(counts), lambda every: every & counting(), lambda every: every, legal)
    else:
        in_title = (lanes.branch == 0) & (state.sequence.cursor.phase == TITLE)[lanes.row]
        legal &= ~(in_title[:, None] & state.automaton.line_break)
    legal = jax.lax.cond(
        jnp.any(state.request.constrained), lambda: apply_token_mask(legal, state, lanes), lambda: legal
    )
    if not config.distinct_titles:
        return legal
    barred = jnp.where(lanes.branch == 0, derived.barred_token[lanes.row], -1)
    return legal & (jnp.arange(legal.shape[1]) != barred[:, None])


def extended_number(stated: jax.Array, token: jax.Array, automaton: TagAutomaton) -> jax.Array:
    """Append the digits of a token to a number; arrays of one shape."""
    return stated * automaton.scale[token].astype(jnp.int32) + automaton.number[token]


def number_tokens(state: DecodeState, config: EngineConfig) -> jax.Array:
    """Return the tokens that continue the number of leads, bool [B, V]: to 2 or more, and at most `max_branches`."""
    stated = state.sequence.titles.stated[:, None]
    number = extended_number(stated, jnp.arange(state.automaton.scale.size)[None], state.automaton)
    # A number begins without 0. 1 has to continue.
    fits = (number <= config.max_branches) & ((number > 1) | ((number == 1) & (config.max_branches >= 10)))
    first = 10 * state.automaton.number.astype(jnp.int32) >= state.automaton.scale
    return jnp.asarray(state.automaton.scale > 1) & fits & (first | (stated > 0))


def apply_token_mask(legal: jax.Array, state: DecodeState, lanes: Lanes) -> jax.Array:
    """Return the legal tokens, bool [L, V], that the grammar of a constrained request allows.

    Where it allows none of them, a budget has ended the segment before its value was complete; all are returned then.
    """
    bits = state.token_mask[lanes.row, lanes.branch, 0]
    each = (bits[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    both = legal & (each.reshape(len(bits), -1)[:, : legal.shape[1]] > 0)
    bound = state.request.constrained[lanes.row] & both.any(axis=1)
    return jnp.where(bound[:, None], both, legal)


class LaneTokens(NamedTuple):
    """The next tokens of lanes, with their classes and automaton states; [L] each.

    Attributes:
        token: token ids.
        kind: class of what the token completes.
        tag_state: state of the tag automaton after the token.
        continues: whether the token continues a tag.
        closing: whether it is the first token of a closing tag, in place of end of text.
    """

    token: Int32[Array, " L"]
    kind: Int32[Array, " L"]
    tag_state: Int32[Array, " L"]
    continues: Bool[Array, " L"]
    closing: Bool[Array, " L"]


def read_tokens(state: DecodeState, config: EngineConfig, lanes: Lanes, token: jax.Array) -> LaneTokens:
    """Return the classes and automaton states of next tokens; end of text in a branch becomes its closing tag.

    In templated sequences every token is text: the host reads where a branch ends.
    """
    tag_state, templated = lane_tag_state(state, lanes), state.sequence.cursor.templated[lanes.row]
    kind, _, _ = recognise(state.automaton, tag_state, token)
    closing = (lanes.branch > 0) & (kind == END) & ~templated
    token = jnp.where(closing, config.tags.branch_end, token)
    kind, tag_state, continues = recognise(state.automaton, tag_state, token)
    kind, tag_state = jnp.where(templated, TEXT, kind), jnp.where(templated, 0, tag_state)
    return LaneTokens(token, kind, tag_state, continues & ~templated, closing)


def recognise(
    automaton: TagAutomaton, tag_state: jax.Array, token: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the class of what a token completes, the next automaton state, and whether it continues a tag."""
    following = automaton.next[tag_state, token].astype(jnp.int32)
    states = automaton.next.shape[0]
    completes = following >= states
    continues = (automaton.bits[tag_state, token] >> CONTINUES) > 0
    return jnp.where(completes, following - states, TEXT), jnp.where(completes, 0, following), continues


def lane_tag_state(state: DecodeState, lanes: Lanes) -> jax.Array:
    """Return the state of the tag automaton in the segment of each lane, int32 [L]."""
    restarts = (lanes.branch == 0) & (state.sequence.cursor.phase == MERGE)[lanes.row]
    return jnp.where(restarts, 0, state.sequence.segments.tag_state[lanes.row, lanes.branch])


def _serial_rule(state: DecodeState, derived: Derived, config: EngineConfig) -> jax.Array:
    """Return the classes that may come next in the serial segment, bool [B, 9]."""
    cursor, limit, count = state.sequence.cursor, config.max_branches, state.sequence.titles.complete
    rule = jnp.where((cursor.phase == MERGE) | (cursor.phase == PROMPT), SERIAL, cursor.phase)
    length = derived.title_length
    in_serial, in_title, titled, counts = (rule == kind for kind in (SERIAL, TITLE, TITLED, COUNT))
    may_open = state.request.adaptive & ~cursor.took_back & (limit >= 2)
    may_add_title = (count < limit) & ((count < 2) | ~derived.completes_plan)
    never = jnp.zeros_like(in_serial)
    columns = [never] * CLASSES
    goes_on = (length < config.max_title_tokens) | config.form.leads  # a lead without end is discarded (`transition`)
    columns[TEXT] = in_serial | (in_title & goes_on) | counts
    columns[OTHER] = columns[END] = in_serial
    columns[TITLE_START] = (in_serial & may_open) | (titled & may_add_title)
    columns[TITLE_END] = (in_title & (length > cursor.match_length)) | (counts & (state.sequence.titles.stated > 1))
    columns[PARALLEL_START] = titled & (count >= 2)
    return jnp.stack(columns, axis=1)


def _branch_rule(state: DecodeState, derived: Derived, config: EngineConfig, lanes: Lanes) -> jax.Array:
    """Return the classes that may come next in lanes of branches, bool [L, 9]; lanes of serial text are undefined."""
    segments = state.sequence.segments
    at, branch = (lanes.row, lanes.branch), (lanes.row, jnp.maximum(lanes.branch - 1, 0))
    affordable = (derived.budget.affordable & derived.budget.readable)[branch]
    within = segments.sampled[at] + config.tags.branch_end_cost < state.request.max_branch_tokens[lanes.row]
    free = affordable & ~state.sequence.branches.closing[branch] & within
    never, always = jnp.zeros_like(free), jnp.ones_like(free)
    columns = [never] * CLASSES
    columns[TEXT] = free
    columns[BRANCH_END] = always
    columns[END] = segments.tag_state[at] == 0  # it counts as the closing tag, unless one is under way
    return jnp.stack(columns, axis=1)
