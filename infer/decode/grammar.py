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
from jaxtyping import Int32

from infer.decode.derived import Derived
from infer.decode.inputs import Lanes
from infer.decode.state import COUNT, MERGE, PROMPT, SERIAL, TITLE, TITLED, DecodeState, EngineConfig
from infer.decode.token_classes import (
    BRANCH_END,
    CLASSES,
    END,
    OTHER,
    PARALLEL_START,
    TEXT,
    TITLE_END,
    TITLE_START,
    TokenClasses,
)


def allowed_classes(state: DecodeState, derived: Derived, config: EngineConfig, lanes: Lanes) -> jax.Array:
    """Return the classes that may come next in each lane, bool [L, 9]."""
    serial, branch = _serial_rule(state, derived, config)[lanes.row], _branch_rule(state, derived, config, lanes)
    return jnp.where((lanes.branch == 0)[:, None], serial, branch)


def legal_tokens(state: DecodeState, derived: Derived, config: EngineConfig, lanes: Lanes) -> jax.Array:
    """Return the tokens of allowed classes, bool [L, V]."""
    rule = allowed_classes(state, derived, config, lanes)
    bits = jnp.sum(rule * (1 << jnp.arange(CLASSES)), axis=1).astype(jnp.uint16)
    legal = (bits[:, None] >> state.classes.kind) & 1 > 0
    if config.form.leads:
        counts = (lanes.branch == 0) & (state.sequence.cursor.phase == COUNT)[lanes.row]

        def counting() -> jax.Array:
            tag = jnp.arange(legal.shape[1]) == config.special.title_end
            return ~counts[:, None] | tag | number_tokens(state, config)[lanes.row]

        legal = jax.lax.cond(jnp.any(counts), lambda every: every & counting(), lambda every: every, legal)
    else:
        in_title = (lanes.branch == 0) & (state.sequence.cursor.phase == TITLE)[lanes.row]
        legal &= ~(in_title[:, None] & state.classes.line_break)
    legal = jax.lax.cond(
        jnp.any(state.request.constrained), lambda: apply_token_mask(legal, state, lanes), lambda: legal
    )
    if not config.distinct_titles:
        return legal
    barred = jnp.where(lanes.branch == 0, derived.barred_token[lanes.row], -1)
    return legal & (jnp.arange(legal.shape[1]) != barred[:, None])


def extended_number(stated: jax.Array, token: jax.Array, classes: TokenClasses) -> jax.Array:
    """Append the digits of a token to a number; arrays of one shape."""
    return stated * classes.scale[token].astype(jnp.int32) + classes.number[token]


def number_tokens(state: DecodeState, config: EngineConfig) -> jax.Array:
    """Return the tokens that continue the number of leads, bool [B, V]: to 2 or more, and at most `max_branches`."""
    stated = state.sequence.titles.stated[:, None]
    number = extended_number(stated, jnp.arange(state.classes.scale.size)[None], state.classes)
    # A number begins without 0. 1 has to continue.
    fits = (number <= config.max_branches) & ((number > 1) | ((number == 1) & (config.max_branches >= 10)))
    first = 10 * state.classes.number.astype(jnp.int32) >= state.classes.scale
    return jnp.asarray(state.classes.scale > 1) & fits & (first | (stated > 0))


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
    """The next tokens of lanes, with their classes; [L] each.

    Attributes:
        token: token ids.
        kind: class of the token.
    """

    token: Int32[Array, " L"]
    kind: Int32[Array, " L"]


def read_tokens(state: DecodeState, config: EngineConfig, lanes: Lanes, token: jax.Array) -> LaneTokens:
    """Return the classes of next tokens; end of text in a branch becomes its closing tag.

    In templated sequences every token is text: the host reads where a branch ends.
    """
    templated = state.sequence.cursor.templated[lanes.row]
    kind = state.classes.kind[token].astype(jnp.int32)
    closes = (lanes.branch > 0) & (kind == END) & ~templated
    token, kind = jnp.where(closes, config.special.branch_end, token), jnp.where(closes, BRANCH_END, kind)
    return LaneTokens(token, jnp.where(templated, TEXT, kind))


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
    columns[TITLE_END] = (in_title & (length > 0)) | (counts & (state.sequence.titles.stated > 1))
    columns[PARALLEL_START] = titled & (count >= 2)
    return jnp.stack(columns, axis=1)


def _branch_rule(state: DecodeState, derived: Derived, config: EngineConfig, lanes: Lanes) -> jax.Array:
    """Return the classes that may come next in lanes of branches, bool [L, 9]; lanes of serial text are undefined."""
    segments = state.sequence.segments
    at, branch = (lanes.row, lanes.branch), (lanes.row, jnp.maximum(lanes.branch - 1, 0))
    affordable = (derived.budget.affordable & derived.budget.readable)[branch]
    within = segments.sampled[at] + 1 < state.request.max_branch_tokens[lanes.row]
    free = affordable & ~state.sequence.branches.closing[branch] & within
    never, always = jnp.zeros_like(free), jnp.ones_like(free)
    columns = [never] * CLASSES
    columns[TEXT] = free
    columns[BRANCH_END] = always
    columns[END] = always  # it counts as the closing tag
    return jnp.stack(columns, axis=1)
