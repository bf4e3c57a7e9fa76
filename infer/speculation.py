"""Speculation by prompt lookup: what followed the last tokens of a stretch before is fed with them, and verified.

B sequences, N branches at most, F tokens fed in a pass, W lanes of a sequence, L lanes of all, D draft tokens of a
stretch, C cache slots, V vocabulary.

Drafts are guesses, so nothing depends on them but speed. A stretch takes the token that it would have sampled without
them: if that is the draft, the logits behind the draft are those of the next token, and it takes another; if not, the
rest of the drafts is hidden in the cache, and their slots are filled by what comes. Random streams go by the place of
a token in its stretch, so sampled answers too are the same with and without drafts, token by token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from aspd_jax.layout import Layout
from infer.budget import branch_budget
from infer.feed import Drafts, Feed, Lanes, pending_position
from infer.state import FORK, MERGE, PARALLEL, RUNNING, DecodeState, Protocol


def extends_alone(state: DecodeState) -> jax.Array:
    """Bool [B]: sequences whose stretches grow by one token a pass: no fork or merge is due."""
    return (state.phase != FORK) & (state.phase != MERGE)


def look_up(state: DecodeState, protocol: Protocol, used: int) -> jax.Array:
    """int32 [B, N, D]: what may follow the pending token of each stretch (serial: the first); -1: nothing.

    It is what was fed after the latest place in the cache at which the last three tokens of the stretch, pending one
    included, stand one after another; or the last two, where there is none.

    Args:
        used: C, slots of the cache that are in use.
    """
    number = jnp.arange(protocol.max_branches)[None]
    in_block = (state.phase == PARALLEL)[:, None]
    alone = (state.finish == RUNNING) & extends_alone(state)
    alive = alone[:, None] & jnp.where(in_block, state.branch_live, number == 0)
    pending = jnp.where(in_block, state.branch_token, state.token[:, None])
    position = jnp.where(in_block, pending_position(state, protocol), state.position[:, None])[..., None]
    block = jnp.where(in_block, state.block[:, None], 0)[..., None]
    branch = jnp.where(in_block, number + 1, 0)[..., None]

    tokens = state.cache.tokens[:, None, :used]
    layout = Layout(*(field[:, None, :used] for field in state.cache.layout))
    there = layout.sequence > 0
    own = there & (layout.block == block) & (layout.branch == branch)

    def back(steps: int) -> jax.Array:
        """The token so many places before the pending one in its stretch, [B, N, 1]; -1: none."""
        return jnp.max(jnp.where(own & (layout.position == position - steps), tokens, -1), axis=2, keepdims=True)

    def before(steps: int) -> jax.Array:
        """The token so many slots before each, [B, 1, C]."""
        return jnp.pad(tokens[:, :, :-steps], ((0, 0), (0, 0), (steps, 0)), constant_values=-2)

    followed = there & jnp.pad(there[:, :, 1:], ((0, 0), (0, 0), (0, 1)))
    hit = alive[..., None] & followed & (tokens == pending[..., None]) & (before(1) == back(1))
    slot = jnp.arange(used)
    score = jnp.where(hit, slot + used * (before(2) == back(2)), -1)
    found, best = jnp.max(score, axis=2) >= 0, jnp.argmax(score, axis=2)
    follow = best[..., None] + 1 + jnp.arange(protocol.draft_tokens)
    at = jnp.minimum(follow, used - 1).reshape(follow.shape[0], -1)

    def taken(array: jax.Array) -> jax.Array:
        return jnp.take_along_axis(array[:, 0], at, axis=1).reshape(follow.shape)

    known = found[..., None] & (follow < used) & taken(there)
    return jnp.where(jnp.cumprod(known, axis=2) > 0, taken(tokens), -1)


def add_drafts(feed: Feed, state: DecodeState) -> Feed:
    """A feed with the drafts of its stretches behind it, as far as there is room."""
    size, lanes = feed.tokens.shape[1], feed.lane.shape[1]
    batch, _, length = state.draft.shape
    alone = extends_alone(state)[:, None] & (feed.lane >= 0)
    stretch = jnp.maximum(feed.lane - 1, 0)
    tokens = jnp.take_along_axis(state.draft, stretch[..., None], axis=1)
    live = jnp.sum(feed.lane >= 0, axis=1)[:, None, None]
    fed = jnp.sum(feed.layout.sequence > 0, axis=1)[:, None, None]
    ahead = jnp.arange(length)[None, None]
    places = fed + ahead * live + jnp.arange(lanes)[None, :, None]
    real = alone[..., None] & (tokens >= 0) & (places < size)

    def behind(field: jax.Array, values: jax.Array) -> jax.Array:
        """A field [B, F] with values [B, W, D] in the drafts' places."""
        at = jnp.where(real, places, size).reshape(batch, -1)
        return field.at[jnp.arange(batch)[:, None], at].set(values.reshape(batch, -1), mode="drop")

    def pending(field: jax.Array) -> jax.Array:
        return jnp.take_along_axis(field, feed.rows, axis=1)[..., None]

    layout = Layout(
        position=behind(feed.layout.position, pending(feed.layout.position) + 1 + ahead),
        sequence=behind(feed.layout.sequence, jnp.ones_like(tokens)),
        block=behind(feed.layout.block, pending(feed.layout.block) + jnp.zeros_like(ahead)),
        branch=behind(feed.layout.branch, pending(feed.layout.branch) + jnp.zeros_like(ahead)),
    )
    drafts = Drafts(jnp.minimum(places, size - 1), jnp.where(real, tokens, -1))
    return feed._replace(tokens=behind(feed.tokens, tokens), layout=layout, drafts=drafts)


def goes_on(state: DecodeState, protocol: Protocol, lanes: Lanes) -> jax.Array:
    """Bool [L]: whether a lane that has just taken a token may take another in the same pass."""
    serial = (lanes.lane == 0) & (state.phase != PARALLEL)[lanes.row]
    branch = (lanes.row, jnp.maximum(lanes.lane - 1, 0))
    in_block = (lanes.lane > 0) & (state.phase == PARALLEL)[lanes.row] & state.branch_live[branch]
    alone = ((state.finish == RUNNING) & extends_alone(state))[lanes.row]
    return alone & (serial | (in_block & branch_budget(state, protocol).known[branch]))


def hide_rejected(
    state: DecodeState, rows: jax.Array | None, slots: jax.Array, feed: Feed, taken: jax.Array
) -> DecodeState:
    """The state with those drafts of a group hidden in its cache that were not taken, and counted.

    Args:
        rows: int32 [M], of the group; None: all.
        slots: int32 [M, F], where its tokens stand in the cache.
        taken: int32 [M, W], tokens that each lane took.
    """
    assert feed.drafts is not None
    capacity = state.cache.tokens.shape[1]
    at = (jnp.arange(slots.shape[0]) if rows is None else rows)[:, None]
    drafted = feed.drafts.tokens >= 0
    kept = drafted & (jnp.arange(drafted.shape[2]) < taken[..., None] - 1)
    places = feed.drafts.rows.reshape(slots.shape[0], -1)
    standing = jnp.take_along_axis(slots, places, axis=1)
    hidden = jnp.where((drafted & ~kept).reshape(places.shape), standing, capacity)
    layout = state.cache.layout
    layout = layout._replace(sequence=layout.sequence.at[at, hidden].set(0, mode="drop"))

    def added(count: jax.Array, values: jax.Array) -> jax.Array:
        return count.at[at[:, 0]].add(jnp.sum(values, axis=(1, 2), dtype=jnp.int32), mode="drop")

    return state._replace(
        cache=state.cache._replace(layout=layout),
        drafted=added(state.drafted, drafted),
        accepted=added(state.accepted, kept),
    )
