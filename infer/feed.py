"""What every sequence feeds next: its pending tokens, where they stand, and which stretches get a next token.

B sequences, M some of them, N branches at most, F tokens fed in a pass, W lanes (stretches that get a next token),
D draft tokens of a stretch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from aspd_jax.layout import Layout
from infer.budget import ready_branches
from infer.state import FORK, MERGE, PARALLEL, RUNNING, DecodeState, Protocol, head_lengths, merge_position


class Drafts(NamedTuple):
    """Guessed tokens of a feed; int32 [B, W, D] each.

    Attributes:
        rows: which fed token each is.
        tokens: what it is; -1: there is none.
    """

    rows: jax.Array
    tokens: jax.Array


class Feed(NamedTuple):
    """The tokens of one pass.

    Attributes:
        tokens: int32 [B, F].
        layout: int32 [B, F] each; `sequence` is 0 where nothing is fed.
        rows: int32 [B, W], which fed token each lane samples from.
        lane: int32 [B, W], what a lane continues: 0 the serial stretch, k branch k, -1 nothing.
        drafts: guesses of what the lanes sample, fed with them.
    """

    tokens: jax.Array
    layout: Layout
    rows: jax.Array
    lane: jax.Array
    drafts: Drafts | None = None

    @property
    def asked(self) -> jax.Array:
        """int32 [B, W x (1 + D)]: the fed tokens that need logits: those that the lanes sample from, then drafts."""
        if self.drafts is None:
            return self.rows
        ahead = jnp.moveaxis(self.drafts.rows, 2, 1)
        return jnp.concatenate([self.rows, ahead.reshape(ahead.shape[0], -1)], axis=1)


class Lanes(NamedTuple):
    """Stretches that get a next token, of whatever sequences; [L] each.

    Attributes:
        row: the sequence.
        lane: as in `Feed`.
        layout: of the token that the next one follows.
    """

    row: jax.Array
    lane: jax.Array
    layout: Layout


def lanes_of(feed: Feed, rows: jax.Array | None) -> Lanes:
    """The lanes of a feed of some rows (None: of all), [M * W]; rows past the end stand for none."""
    of_rows = jnp.arange(feed.lane.shape[0]) if rows is None else rows
    row = jnp.broadcast_to(of_rows[:, None], feed.lane.shape)
    layout = Layout(*(jnp.take_along_axis(field, feed.rows, axis=1).reshape(-1) for field in feed.layout))
    return Lanes(row.reshape(-1), feed.lane.reshape(-1), layout)


def width(state: DecodeState, protocol: Protocol) -> jax.Array:
    """int32 [B]: how many tokens each sequence feeds in its next pass; 0 if it is finished."""
    fork = 1 + jnp.sum(head_lengths(state, protocol), axis=1)
    merge = state.titles + len(protocol.tags.parallel_end)
    ready = ready_branches(state, protocol)
    drafted = state.draft[:, :, :1] >= 0
    parallel = jnp.sum(ready, axis=1)
    serial = 1 + state.draft.shape[2] * jnp.any(drafted[:, 0], axis=1)
    parallel *= 1 + state.draft.shape[2] * jnp.any(drafted & ready[..., None], axis=(1, 2))
    pending = jnp.select(
        [state.phase == FORK, state.phase == PARALLEL, state.phase == MERGE], [fork, parallel, merge], serial
    )
    return jnp.where(state.finish == RUNNING, pending, 0)


def widest_feed(protocol: Protocol) -> int:
    """Most tokens that one sequence can feed in a pass: a fork with the longest titles, or branches with drafts."""
    tags, limit = protocol.tags, protocol.max_branches
    head = len(tags.branch_start) + protocol.max_title_tokens + len(protocol.separator)
    return max(1 + limit * head, limit * (1 + protocol.draft_tokens), limit + len(tags.parallel_end))


def branch_position(state: DecodeState, protocol: Protocol, branch: jax.Array, offset: jax.Array) -> jax.Array:
    """Positions of tokens `offset` tokens into branches (from 0) of the current block; int32 [B, …]."""
    before = branch * state.stride[:, None] if protocol.model.config.positions == "predict" else 0
    return state.position[:, None] + 1 + offset + before


def pending_position(state: DecodeState, protocol: Protocol) -> jax.Array:
    """int32 [B, N]: position of the pending token of each branch."""
    number = jnp.arange(protocol.max_branches)[None]
    return branch_position(state, protocol, number, state.branch_offset)


def plan(state: DecodeState, protocol: Protocol, size: int, everything: bool = False) -> Feed:
    """The tokens that every sequence feeds next, whether it is finished or not.

    Args:
        size: F. Sequences that have more than F tokens to feed get a meaningless feed; see `width`.
        everything: the pending tokens of branches that have to wait, too.
    """
    tags, limit = protocol.tags, protocol.max_branches
    lanes = min(size, limit)
    place = jnp.arange(size)[None]
    lane_place = jnp.arange(lanes)[None]
    zero = jnp.zeros_like(state.phase)[:, None] + jnp.zeros_like(place)
    zero_lanes = zero[:, :lanes]
    phase, titles = state.phase[:, None], state.titles[:, None]

    # One token: a serial stretch or a title.
    tokens = zero + state.token[:, None]
    position, branch, count = zero + state.position[:, None], zero, zero[:, :1] + 1
    rows, lane = zero_lanes, jnp.where(lane_place == 0, 0, -1) + zero_lanes

    if size > 4:  # the smallest fork: `<|para|>` and two heads of two tokens
        heads = head_lengths(state, protocol)
        ends = jnp.cumsum(heads, axis=1)
        own = jnp.sum(place[..., None] - 1 >= ends[:, None], axis=-1)  # branch each place belongs to
        own = jnp.minimum(own, limit - 1)
        offset = place - 1 - jnp.take_along_axis(ends - heads, own, axis=1)
        length = jnp.take_along_axis(state.title_length, own, axis=1)
        opening = len(tags.branch_start)
        in_title = jnp.clip(offset - opening, 0, protocol.max_title_tokens - 1)
        flat = own * protocol.max_title_tokens + in_title
        title = jnp.take_along_axis(state.title_tokens.reshape(flat.shape[0], -1), flat, axis=1)
        separator = jnp.asarray(protocol.separator or (0,), jnp.int32)
        separated = separator[jnp.clip(offset - opening - length, 0, separator.size - 1)]
        opened = jnp.asarray(tags.branch_start, jnp.int32)[jnp.clip(offset, 0, opening - 1)]
        text = jnp.where(offset < opening, opened, jnp.where(offset < opening + length, title, separated))
        is_fork, is_para = phase == FORK, place == 0
        tokens = jnp.where(is_fork & ~is_para, text, tokens)
        position = jnp.where(is_fork & ~is_para, branch_position(state, protocol, own, offset), position)
        branch = jnp.where(is_fork & ~is_para, own + 1, branch)
        count = jnp.where(is_fork, 1 + ends[:, -1:], count)
        rows = jnp.where(is_fork, ends[:, :lanes], rows)
        lane = jnp.where(is_fork, jnp.where(lane_place < titles, lane_place + 1, -1), lane)

    is_parallel = phase == PARALLEL
    ready = state.branch_live if everything else ready_branches(state, protocol)
    order = jnp.argsort(~ready, axis=1, stable=True)[:, :lanes]  # ready branches first
    live = jnp.sum(ready, axis=1, keepdims=True)

    def widen(values: jax.Array) -> jax.Array:
        return jnp.pad(values, ((0, 0), (0, size - lanes)))

    pending = widen(jnp.take_along_axis(state.branch_token, order, axis=1))
    offset = widen(jnp.take_along_axis(state.branch_offset, order, axis=1))
    tokens = jnp.where(is_parallel, pending, tokens)
    position = jnp.where(is_parallel, branch_position(state, protocol, widen(order), offset), position)
    branch = jnp.where(is_parallel, widen(order) + 1, branch)
    count = jnp.where(is_parallel, live, count)
    rows = jnp.where(is_parallel, lane_place, rows)
    lane = jnp.where(is_parallel, jnp.where(lane_place < live, order + 1, -1), lane)

    if size >= 3:  # the smallest merge: two closing tags and `<|/para|>`
        is_merge, is_last = phase == MERGE, place >= titles
        ending = jnp.asarray(tags.parallel_end, jnp.int32)
        after = jnp.clip(place - titles, 0, ending.size - 1)
        own = jnp.minimum(place, limit - 1) + zero
        offset = jnp.take_along_axis(state.branch_offset, own, axis=1)
        last_position = merge_position(state, protocol)[:, None] + after
        in_branch = branch_position(state, protocol, own, offset)
        closing = jnp.take_along_axis(state.branch_token, own, axis=1)
        tokens = jnp.where(is_merge, jnp.where(is_last, ending[after], closing), tokens)
        position = jnp.where(is_merge, jnp.where(is_last, last_position, in_branch), position)
        branch = jnp.where(is_merge, jnp.where(is_last, 0, own + 1), branch)
        count = jnp.where(is_merge, titles + ending.size, count)
        rows = jnp.where(is_merge, titles + ending.size - 1, rows)

    fed = place < count
    layout = Layout(
        position=jnp.where(fed, position, 0),
        sequence=fed.astype(jnp.int32),
        block=jnp.where(fed & (branch > 0), state.block[:, None], 0),
        branch=jnp.where(fed, branch, 0),
    )
    return Feed(jnp.where(fed, tokens, 0), layout, jnp.minimum(rows, size - 1), lane)


def only(feed: Feed, active: jax.Array) -> Feed:
    """The feed without the tokens and lanes of sequences that are not active, bool [B]."""
    sequence = jnp.where(active[:, None], feed.layout.sequence, 0)
    lane = jnp.where(active[:, None], feed.lane, -1)
    drafts = feed.drafts
    if drafts is not None:
        drafts = drafts._replace(tokens=jnp.where(active[:, None, None], drafts.tokens, -1))
    return feed._replace(layout=feed.layout._replace(sequence=sequence), lane=lane, drafts=drafts)
