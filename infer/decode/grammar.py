"""Next tokens: only well-formed structure within the budget is sampled (protocol, section 5).

B sequences, L lanes, V vocabulary.

Every token belongs to one class; a rule allows or forbids whole classes. The host states the rule of serial text. A
branch token is allowed only if the block can still be closed after it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from infer.decode.derived import Derived
from infer.decode.inputs import Lanes
from infer.decode.sampling import sample
from infer.decode.state import UNMASKED, DecodeState, EngineConfig
from infer.decode.token_classes import ANY_TEXT, BRANCH_END, END


def legal_tokens(state: DecodeState, derived: Derived, config: EngineConfig, lanes: Lanes) -> jax.Array:
    """Return the tokens that may come next in each lane, bool [L, V]."""
    serial, branch = state.sequence.cursor.rule[lanes.row], _branch_rule(state, derived, lanes)
    rule = jnp.where(lanes.branch == 0, serial, branch)
    legal = (rule[:, None] >> state.classes.astype(jnp.int32)) & 1 > 0
    masked = state.sequence.segments.masked != UNMASKED
    return jax.lax.cond(jnp.any(masked), lambda: apply_token_mask(legal, state, lanes), lambda: legal)


def apply_token_mask(legal: jax.Array, state: DecodeState, lanes: Lanes) -> jax.Array:
    """Return the legal tokens, bool [L, V], that the token mask of a masked segment allows.

    Where it allows none of them, a budget has ended the segment before its value was complete; all are returned then.
    """
    bits = state.token_mask[lanes.row, lanes.branch, 0] if lanes.bits is None else lanes.bits
    each = (bits[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    both = legal & (each.reshape(len(bits), -1)[:, : legal.shape[1]] > 0)
    bound = (state.sequence.segments.masked[lanes.row, lanes.branch] != UNMASKED) & both.any(axis=1)
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

    Where the host ends the branches (`Segments.stops`), it stays the end of text, and so does a closing tag.
    """
    kind = state.classes[token].astype(jnp.int32)
    by_host = (state.sequence.segments.stops[lanes.row, lanes.branch] >> END) & 1 > 0
    closes = (lanes.branch > 0) & (kind == END) & ~by_host
    token, kind = jnp.where(closes, config.special.branch_end, token), jnp.where(closes, BRANCH_END, kind)
    return LaneTokens(token, jnp.where(by_host & (kind == BRANCH_END), END, kind))


def sample_lanes(
    logits: jax.Array, state: DecodeState, derived: Derived, config: EngineConfig, lanes: Lanes
) -> LaneTokens:
    """Return the next token of every lane under the grammar."""
    logits = jnp.where(legal_tokens(state, derived, config, lanes), logits, -jnp.inf)
    return read_tokens(state, config, lanes, sample(logits, state, config, lanes))


def _branch_rule(state: DecodeState, derived: Derived, lanes: Lanes) -> jax.Array:
    """Return the rule of lanes of branches, int32 [L]: bit c permits class c. End of text counts as the closing tag."""
    at, branch = (lanes.row, lanes.branch), (lanes.row, jnp.maximum(lanes.branch - 1, 0))
    affordable = (derived.budget.affordable & derived.budget.readable)[branch]
    within = state.sequence.segments.sampled[at] + 1 < state.request.max_branch_tokens[lanes.row]
    free = affordable & ~state.sequence.branches.closing[branch] & within
    return jnp.where(free, ANY_TEXT, 0) | (1 << BRANCH_END | 1 << END)
