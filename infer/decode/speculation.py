"""Speculation by prompt lookup: what followed the last tokens of a segment before is fed with them, and verified.

B sequences, N branches at most, T tokens of a pass, L lanes, D draft tokens of a segment, C cache slots.

Drafts are guesses, so nothing depends on them but speed. A segment takes the token that it would have sampled without
them: if that is the draft, the logits behind the draft are those of the next token, and it takes another; if not, the
rest of the drafts is hidden in the cache, and their slots are filled by what comes. Random streams go by the place of
a token in its segment, so sampled answers too are the same with and without drafts, token by token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from aspd_jax.layout import Layout
from infer.decode.inputs import Inputs, Lanes, branch_budget, extends_alone, pending_position
from infer.decode.state import PARALLEL, RUNNING, DecodeState, EngineConfig


def look_up(state: DecodeState, config: EngineConfig, used: int) -> jax.Array:
    """int32 [B, N, D]: what may follow the pending token of each segment (serial: the first); -1: nothing.

    It is what was fed after the latest place in the cache at which the last three tokens of the segment, pending one
    included, stand one after another; or the last two, where there is none.

    Args:
        used: C, slots of the cache that are in use.
    """
    s, number = state.sequence, jnp.arange(config.max_branches)[None]
    in_block = (s.phase == PARALLEL)[:, None]
    alone = (s.finish == RUNNING) & extends_alone(s)
    alive = alone[:, None] & jnp.where(in_block, s.branch_live, number == 0)
    pending = jnp.where(in_block, s.branch_token, s.token[:, None])
    position = jnp.where(in_block, pending_position(s, config), s.position[:, None])[..., None]
    block = jnp.where(in_block, s.block[:, None], 0)[..., None]
    branch = jnp.where(in_block, number + 1, 0)[..., None]

    tokens = state.cache.tokens[:, None, :used]
    layout = Layout(*(field[:, None, :used] for field in state.cache.layout))
    there = layout.sequence > 0
    own = there & (layout.block == block) & (layout.branch == branch)

    def back(steps: int) -> jax.Array:
        """The token so many places before the pending one in its segment, [B, N, 1]; -1: none."""
        return jnp.max(jnp.where(own & (layout.position == position - steps), tokens, -1), axis=2, keepdims=True)

    def before(steps: int) -> jax.Array:
        """The token so many slots before each, [B, 1, C]."""
        return jnp.pad(tokens[:, :, :-steps], ((0, 0), (0, 0), (steps, 0)), constant_values=-2)

    followed = there & jnp.pad(there[:, :, 1:], ((0, 0), (0, 0), (0, 1)))
    hit = alive[..., None] & followed & (tokens == pending[..., None]) & (before(1) == back(1))
    slot = jnp.arange(used)
    score = jnp.where(hit, slot + used * (before(2) == back(2)), -1)
    found, best = jnp.max(score, axis=2) >= 0, jnp.argmax(score, axis=2)
    follow = best[..., None] + 1 + jnp.arange(config.draft_tokens)
    at = jnp.minimum(follow, used - 1).reshape(follow.shape[0], -1)

    def taken(array: jax.Array) -> jax.Array:
        return jnp.take_along_axis(array[:, 0], at, axis=1).reshape(follow.shape)

    known = found[..., None] & (follow < used) & taken(there)
    return jnp.where(jnp.cumprod(known, axis=2) > 0, taken(tokens), -1)


def goes_on(state: DecodeState, config: EngineConfig, lanes: Lanes) -> jax.Array:
    """Bool [L]: whether a lane that has just taken a token may take another in the same pass."""
    s = state.sequence
    serial = (lanes.branch == 0) & (s.phase != PARALLEL)[lanes.row]
    branch = (lanes.row, jnp.maximum(lanes.branch - 1, 0))
    in_block = (lanes.branch > 0) & (s.phase == PARALLEL)[lanes.row] & s.branch_live[branch]
    alone = ((s.finish == RUNNING) & extends_alone(s))[lanes.row]
    return alone & (serial | (in_block & branch_budget(s, config).known[branch]))


def hide_rejected(state: DecodeState, inputs: Inputs, taken: jax.Array) -> DecodeState:
    """The state with those drafts of a pass hidden in its cache that were not taken, and counted.

    Args:
        taken: int32 [L], tokens that each lane took.
    """
    assert inputs.drafts is not None
    capacity, batch, lanes = state.cache.tokens.shape[1], inputs.batch, inputs.lanes
    drafted = inputs.drafts.tokens >= 0
    kept = drafted & (jnp.arange(drafted.shape[1]) < taken[:, None] - 1)
    slot = jnp.where(drafted & ~kept, batch.slot[inputs.drafts.at], capacity)
    layout = state.cache.layout
    layout = layout._replace(sequence=layout.sequence.at[lanes.row[:, None], slot].set(0, mode="drop"))
    s = state.sequence

    def added(count: jax.Array, values: jax.Array) -> jax.Array:
        return count.at[lanes.row].add(jnp.sum(values, axis=1, dtype=jnp.int32), mode="drop")

    s = s._replace(drafted=added(s.drafted, drafted), accepted=added(s.accepted, kept))
    return state._replace(sequence=s, cache=state.cache._replace(layout=layout))
