"""What a sampled token does to a sequence: titles, forks, branches, merges, budgets and ends.

B sequences, N branches at most, W lanes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from infer.budget import branch_budget
from infer.grammar import repeated_title
from infer.recogniser import BRANCH_END, CONTINUES, END, PARALLEL_START, TEXT, TITLE_END, TITLE_START
from infer.state import (
    FORK,
    LENGTH,
    MERGE,
    PARALLEL,
    RUNNING,
    SERIAL,
    STOP,
    TITLE,
    TITLED,
    DecodeState,
    Protocol,
    head_lengths,
    merge_position,
)


def advance(
    state: DecodeState, protocol: Protocol, lane: jax.Array, sampled: jax.Array, closing: jax.Array
) -> DecodeState:
    """Take what was sampled from a feed (already in the cache); sequences without a lane stand still.

    Args:
        lane: int32 [B, W], as in `Feed`.
        sampled: int32 [B, W], one token per lane; end of text in a branch has become the first of its closing tag.
        closing: bool [B, W], where it has.
    """
    fed = (state.finish == RUNNING) & jnp.any(lane >= 0, axis=1)
    in_block = (state.phase == FORK) | (state.phase == PARALLEL)
    after_serial = _advance_serial(state, protocol, sampled[:, 0])
    after_block = _advance_block(state, protocol, lane, sampled, closing)

    def choose(old: jax.Array, serial: jax.Array, block: jax.Array) -> jax.Array:
        shape = (-1,) + (1,) * (old.ndim - 1)
        new = jnp.where(in_block.reshape(shape), block, serial)
        return jnp.where(fed.reshape(shape), new, old)

    fixed = {"cache", "request", "recogniser"}
    changed: dict[str, Any] = {
        name: choose(getattr(state, name), getattr(after_serial, name), getattr(after_block, name))
        for name in state._fields
        if name not in fixed
    }
    return state._replace(**changed)


def recognise(state: DecodeState, node: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The class of what a token completes, the node after it, and whether it goes on with a tag; any shape."""
    following = state.recogniser.next[node, token].astype(jnp.int32)
    nodes = state.recogniser.next.shape[0]
    completes = following >= nodes
    continues = (state.recogniser.bits[node, token] >> CONTINUES) > 0
    return jnp.where(completes, following - nodes, TEXT), jnp.where(completes, 0, following), continues


def _advance_serial(state: DecodeState, protocol: Protocol, token: jax.Array) -> DecodeState:
    tags = protocol.tags
    merging = state.phase == MERGE
    rule = jnp.where(merging, SERIAL, state.phase)
    merged = merge_position(state, protocol) + len(tags.parallel_end) - 1
    position = jnp.where(merging, merged, state.position) + 1
    kind, node, continues = recognise(state, jnp.where(merging, 0, state.node), token)
    chain = jnp.where(node == 0, 0, jnp.where(continues, state.chain + 1, 1))
    opens_title = kind == TITLE_START
    closes_title = (rule == TITLE) & (kind == TITLE_END)
    # A title that repeats another ends the list: it is discarded, and `<|para|>` stands where it began.
    discards = closes_title & (state.titles >= 2) & repeated_title(state) & protocol.distinct_titles
    own = jnp.sum(jnp.where(jnp.arange(protocol.max_branches) == state.titles[:, None], state.title_length, 0), axis=1)
    discarded = jnp.where(discards, 1 + own, 0)
    closes_title &= ~discards
    token = jnp.where(discards, protocol.special.parallel_start, token)
    position -= discarded
    forks = ((rule == TITLED) & (kind == PARALLEL_START)) | discards
    extends_title = (rule == TITLE) & ~closes_title & ~discards
    stays_titled = (rule == TITLED) & ~opens_title & ~forks
    ends = (rule == SERIAL) & (kind == END)

    opens_block = opens_title & (rule == SERIAL)
    titles = jnp.where(opens_block, 0, state.titles) + closes_title
    number = jnp.arange(protocol.max_branches)[None]
    title_length = jnp.where(
        (opens_block[:, None]) | (number >= titles[:, None]) & opens_title[:, None], 0, state.title_length
    )
    current = (number == state.titles[:, None]) & extends_title[:, None]
    place = jnp.arange(protocol.max_title_tokens)
    writes = current[..., None] & (place == title_length[..., None])
    title_tokens = jnp.where(writes, token[:, None, None], state.title_tokens)
    # The beginning of the tag that closes a title was taken for a part of it.
    of_tag = jnp.where(closes_title, state.chain, 0)[:, None] * (number == state.titles[:, None])
    title_length = title_length + current - of_tag

    after = state._replace(titles=titles, title_length=title_length)
    due = jnp.sum(head_lengths(after, protocol), axis=1) + len(tags.parallel_end)  # heads and `<|/para|>`
    remaining = state.remaining - 1 - jnp.where(forks, due, 0)
    is_content = (rule == SERIAL) & ~opens_title & ~ends
    content = state.content - is_content
    out_of_budget = ((remaining <= 0) | (is_content & (content <= 0))) & ~ends & ~forks
    phase = jnp.select([opens_title | extends_title, closes_title | stays_titled, forks], [TITLE, TITLED, FORK], SERIAL)
    none_yet = jnp.zeros_like(state.branch_offset)
    return after._replace(
        phase=phase,
        finish=jnp.select([ends, out_of_budget], [STOP, LENGTH], RUNNING),
        token=token,
        node=node,
        chain=chain,
        branch_node=none_yet,
        position=position,
        block=state.block + forks,
        title_tokens=title_tokens,
        branch_offset=none_yet,
        branch_sampled=none_yet,
        branch_live=(number < titles[:, None]) & forks[:, None],
        branch_closing=none_yet.astype(bool),
        remaining=remaining,
        content=content,
        block_budget=jnp.where(forks, remaining, state.block_budget),
        block_content=jnp.where(forks, content, state.block_content),
        hide_from=jnp.where(discards, position, state.hide_from),
        discarded=state.discarded + discarded,
        sampled=state.sampled + 1,
        critical_path=state.critical_path + 1 - discarded,
        blocks=state.blocks + forks,
        branches=state.branches + jnp.where(forks, titles, 0),
    )


def _advance_block(
    state: DecodeState, protocol: Protocol, lane: jax.Array, sampled: jax.Array, closing: jax.Array
) -> DecodeState:
    limit = protocol.max_branches
    # By branch instead of by lane: what it sampled, and whether it did.
    lane_of = lane[:, None] == jnp.arange(1, limit + 1)[None, :, None]
    did = jnp.any(lane_of, axis=2)
    token = jnp.sum(jnp.where(lane_of, sampled[:, None], 0), axis=2)
    kind, node, _ = recognise(state, state.branch_node, token)
    closes = did & (kind == BRANCH_END)
    must_close = jnp.any(lane_of & closing[:, None], axis=2)
    fed = jnp.where((state.phase == FORK)[:, None], head_lengths(state, protocol), did.astype(jnp.int32))
    live = state.branch_live & ~closes
    branch_sampled = state.branch_sampled + did
    done = ~jnp.any(live, axis=1)
    remaining = state.remaining - jnp.sum(did, axis=1)
    content = state.content - jnp.sum(did & ~closes, axis=1)
    within = state.branch_sampled + protocol.tags.branch_end_cost < state.request.max_branch_tokens[:, None]
    forced = ~(branch_budget(state, protocol).affordable & within) & ~state.branch_closing
    return state._replace(
        phase=jnp.where(done, MERGE, PARALLEL),
        finish=jnp.where(done & ((remaining <= 0) | (content <= 0)), LENGTH, RUNNING),
        branch_token=jnp.where(did, token, state.branch_token),
        branch_node=jnp.where(did, node, state.branch_node),
        branch_closing=state.branch_closing | must_close,
        branch_offset=state.branch_offset + fed,
        branch_sampled=branch_sampled,
        branch_live=live,
        remaining=remaining,
        content=content,
        cut=state.cut | jnp.any(closes & forced, axis=1),
        critical_path=state.critical_path + jnp.where(done, jnp.max(branch_sampled, axis=1), 0),
    )
