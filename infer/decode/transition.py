"""What a sampled token does to a sequence: titles, forks, branches, merges, budgets and ends.

B sequences, N branches at most, W lanes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from infer.decode.grammar import budget_room, recognise, repeated_title
from infer.decode.inputs import Lanes, branch_budget
from infer.decode.state import (
    FORK,
    LENGTH,
    MERGE,
    NOTHING,
    PARALLEL,
    PROMPT,
    RUNNING,
    SERIAL,
    STOP,
    TITLE,
    TITLED,
    DecodeState,
    EngineConfig,
    SequenceState,
    head_lengths,
    merge_position,
)
from infer.decode.tag_automaton import BRANCH_END, END, PARALLEL_START, TITLE_END, TITLE_START


class Sampled(NamedTuple):
    """What segments have taken in a pass.

    Attributes:
        serial, branch: tokens.
        took_serial, took_branch: whether they took one.
        closing: end of text has become the first token of the closing tag.
    """

    serial: Int32[Array, " B"]
    took_serial: Bool[Array, " B"]
    branch: Int32[Array, "B N"]
    took_branch: Bool[Array, "B N"]
    closing: Bool[Array, "B N"]


def by_segment(s: SequenceState, lanes: Lanes, token: jax.Array, closing: jax.Array, taken: jax.Array) -> Sampled:
    """What lanes sampled, [L] each, where it belongs; `taken`: those that took a token."""
    serial, branches = jnp.zeros_like(s.token), jnp.zeros_like(s.branch_token)
    at = jnp.where(taken & (lanes.branch == 0), lanes.row, s.phase.size)
    own = jnp.where(taken & (lanes.branch > 0), lanes.row, s.phase.size), jnp.maximum(lanes.branch - 1, 0)
    return Sampled(
        serial=serial.at[at].set(token, mode="drop"),
        took_serial=serial.astype(bool).at[at].set(True, mode="drop"),
        branch=branches.at[own].set(token, mode="drop"),
        took_branch=branches.astype(bool).at[own].set(True, mode="drop"),
        closing=branches.astype(bool).at[own].set(closing, mode="drop"),
    )


def advance(state: DecodeState, config: EngineConfig, sampled: Sampled) -> DecodeState:
    """Take what was sampled after tokens that have been fed; sequences that took nothing stand still."""
    s = state.sequence
    after_serial = _advance_serial(state, config, sampled.serial)
    after_block = _advance_block(state, config, sampled)
    in_block = jnp.any(sampled.took_branch, axis=1)

    def choose(old: jax.Array, serial: jax.Array, block: jax.Array) -> jax.Array:
        shape = (-1,) + (1,) * (old.ndim - 1)
        new = jnp.where(in_block.reshape(shape), block, serial)
        return jnp.where((sampled.took_serial | in_block).reshape(shape), new, old)

    return state._replace(sequence=jax.tree.map(choose, s, after_serial, after_block))


def _advance_serial(state: DecodeState, config: EngineConfig, token: jax.Array) -> SequenceState:
    s, tags = state.sequence, config.tags
    merging = s.phase == MERGE
    rule = jnp.where(merging | (s.phase == PROMPT), SERIAL, s.phase)
    merged = merge_position(s, config) + len(tags.parallel_end) - 1
    position = jnp.where(merging, merged, s.position) + 1
    kind, node, continues = recognise(state, jnp.where(merging, 0, s.node), token)
    chain = jnp.where(node == 0, 0, jnp.where(continues, s.chain + 1, 1))
    opens_title = kind == TITLE_START
    closes_title = (rule == TITLE) & (kind == TITLE_END)
    # A title that repeats another ends the list: it is discarded, and `<|para|>` stands where it began.
    discards = closes_title & (s.titles >= 2) & repeated_title(state) & config.distinct_titles
    own = jnp.sum(jnp.where(jnp.arange(config.max_branches) == s.titles[:, None], s.title_length, 0), axis=1)
    discarded = jnp.where(discards, 1 + own, 0)
    closes_title &= ~discards
    token = jnp.where(discards, config.special.parallel_start, token)
    position -= discarded
    forks = ((rule == TITLED) & (kind == PARALLEL_START)) | discards
    extends_title = (rule == TITLE) & ~closes_title & ~discards
    stays_titled = (rule == TITLED) & ~opens_title & ~forks
    ends = (rule == SERIAL) & (kind == END)

    opens_block = opens_title & (rule == SERIAL)
    titles = jnp.where(opens_block, 0, s.titles) + closes_title
    number = jnp.arange(config.max_branches)[None]
    title_length = jnp.where(
        (opens_block[:, None]) | (number >= titles[:, None]) & opens_title[:, None], 0, s.title_length
    )
    current = (number == s.titles[:, None]) & extends_title[:, None]
    place = jnp.arange(config.max_title_tokens)
    writes = current[..., None] & (place == title_length[..., None])
    title_tokens = jnp.where(writes, token[:, None, None], s.title_tokens)
    # The beginning of the tag that closes a title was taken for a part of it.
    of_tag = jnp.where(closes_title, s.chain, 0)[:, None] * (number == s.titles[:, None])
    title_length = title_length + current - of_tag

    after = s._replace(titles=titles, title_length=title_length)
    due = jnp.sum(head_lengths(after, config), axis=1) + len(tags.parallel_end)  # heads and `<|/para|>`
    remaining = s.remaining - 1 - jnp.where(forks, due, 0)
    is_content = (rule == SERIAL) & ~opens_title & ~ends
    content = s.content - is_content
    # A block or title that does not fit ends the answer; the host leaves it out.
    room = budget_room(state, config)
    no_room = (opens_block & ~room.block) | (extends_title & ~room.title_token)
    no_room |= (rule == TITLED) & opens_title & ~room.title
    out_of_budget = ((remaining <= 0) | (is_content & (content <= 0)) | no_room) & ~ends & ~forks
    phase = jnp.select([opens_title | extends_title, closes_title | stays_titled, forks], [TITLE, TITLED, FORK], SERIAL)
    none_yet = jnp.zeros_like(s.branch_offset)
    return after._replace(
        phase=phase,
        finish=jnp.select([ends, out_of_budget], [STOP, LENGTH], RUNNING),
        token=token,
        node=node,
        chain=chain,
        branch_node=none_yet,
        position=position,
        block=s.block + forks,
        title_tokens=title_tokens,
        branch_offset=none_yet,
        branch_sampled=none_yet,
        branch_live=(number < titles[:, None]) & forks[:, None],
        branch_closing=none_yet.astype(bool),
        remaining=remaining,
        content=content,
        block_budget=jnp.where(forks, remaining, s.block_budget),
        block_content=jnp.where(forks, content, s.block_content),
        hide_from=jnp.where(discards, position, s.hide_from),
        discarded=s.discarded + discarded,
        sampled=s.sampled + 1,
        critical_path=s.critical_path + 1 - discarded,
        blocks=s.blocks + forks,
        branches=s.branches + jnp.where(forks, titles, 0),
    )


def _advance_block(state: DecodeState, config: EngineConfig, sampled: Sampled) -> SequenceState:
    s, did, token = state.sequence, sampled.took_branch, sampled.branch
    kind, node, _ = recognise(state, s.branch_node, token)
    closes = did & (kind == BRANCH_END)
    fed = jnp.where((s.phase == FORK)[:, None], head_lengths(s, config), did.astype(jnp.int32))
    live = s.branch_live & ~closes
    branch_sampled = s.branch_sampled + did
    done = ~jnp.any(live, axis=1)
    remaining = s.remaining - jnp.sum(did, axis=1)
    content = s.content - jnp.sum(did & ~closes, axis=1)
    within = s.branch_sampled + config.tags.branch_end_cost < state.request.max_branch_tokens[:, None]
    budget, closed = branch_budget(s, config), closes & ~s.branch_closing
    number = 1 + jnp.arange(config.max_branches)
    first_cut = jnp.min(jnp.where(closed & ~budget.affordable, number, NOTHING), axis=1)
    cut_branch = jnp.minimum(jnp.where(s.cut_branch > 0, s.cut_branch, NOTHING), first_cut) % NOTHING
    return s._replace(
        phase=jnp.where(done, MERGE, PARALLEL),
        finish=jnp.where(done & ((remaining <= 0) | (content <= 0) | (cut_branch > 0)), LENGTH, RUNNING),
        branch_token=jnp.where(did, token, s.branch_token),
        branch_node=jnp.where(did, node, s.branch_node),
        branch_closing=s.branch_closing | sampled.closing,
        branch_offset=s.branch_offset + fed,
        branch_sampled=branch_sampled,
        branch_live=live,
        remaining=remaining,
        content=content,
        cut=s.cut | jnp.any(closed & budget.affordable & budget.readable & ~within, axis=1),
        cut_branch=cut_branch,
        critical_path=s.critical_path + jnp.where(done, jnp.max(branch_sampled, axis=1), 0),
    )
