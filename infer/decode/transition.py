"""Effects of sampled tokens on a sequence: titles, forks, branches, merges, budgets and ends.

B sequences, N maximum branches, M = N + 1 segments, L lanes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from infer.decode.derived import Derived, opened_branches
from infer.decode.grammar import recognise
from infer.decode.inputs import Lanes
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
    Budget,
    Cursor,
    DecodeState,
    EngineConfig,
    Segments,
    SequenceState,
    Titles,
)
from infer.decode.tag_automaton import BRANCH_END, END, PARALLEL_START, TITLE_END, TITLE_START
from infer.decode.titles import budget_room, fed_cost, fork_segments, repeats_title


class Sampled(NamedTuple):
    """The tokens that segments took in a step; 0 the serial segment, k branch k.

    Attributes:
        token: token ids.
        took: whether a segment took a token.
        closing: whether the token is the first of a closing tag, in place of end of text.
    """

    token: Int32[Array, "B M"]
    took: Bool[Array, "B M"]
    closing: Bool[Array, "B M"]


def scatter_lanes(s: SequenceState, lanes: Lanes, token: jax.Array, closing: jax.Array, taken: jax.Array) -> Sampled:
    """Return the tokens of lanes by segment.

    Args:
        token, closing, taken: `Sampled`, [L] each; lanes that have not `taken` a token are left out.
    """
    none = jnp.zeros_like(s.segments.queued)
    at = jnp.where(taken, lanes.row, none.shape[0]), lanes.branch
    return Sampled(
        token=none.at[at].set(token, mode="drop"),
        took=none.astype(bool).at[at].set(True, mode="drop"),
        closing=none.astype(bool).at[at].set(closing, mode="drop"),
    )


def advance(state: DecodeState, derived: Derived, config: EngineConfig, sampled: Sampled) -> DecodeState:
    """Take the tokens sampled behind those that were fed; sequences that took none stay as they are."""
    after_serial = _advance_serial(state, derived, config, sampled.token[:, 0])
    after_block = _advance_block(state, derived, config, sampled)
    in_block = jnp.any(sampled.took[:, 1:], axis=1)
    took = sampled.took[:, 0] | in_block

    def select(old: jax.Array, serial: jax.Array, block: jax.Array) -> jax.Array:
        shape = (-1,) + (1,) * (old.ndim - 1)
        new = jnp.where(in_block.reshape(shape), block, serial)
        return jnp.where(took.reshape(shape), new, old)

    return state._replace(sequence=jax.tree.map(select, state.sequence, after_serial, after_block))


class SerialEvents(NamedTuple):
    """What a token of the serial segment does, bool [B] each.

    Attributes:
        ends: ends the answer.
        opens_title: completes `<|title|>`.
        opens_block: completes the `<|title|>` of the first title.
        extends_title: is part of a title.
        closes_title: completes `<|/title|>`.
        discards: completes `<|/title|>` of a title that repeats another: the list ends.
        forks: completes `<|para|>`, or `discards`.
        stays_titled: is part of a tag behind a title.
        is_content: is plain text.
    """

    ends: Bool[Array, " B"]
    opens_title: Bool[Array, " B"]
    opens_block: Bool[Array, " B"]
    extends_title: Bool[Array, " B"]
    closes_title: Bool[Array, " B"]
    discards: Bool[Array, " B"]
    forks: Bool[Array, " B"]
    stays_titled: Bool[Array, " B"]
    is_content: Bool[Array, " B"]


def _serial_events(state: DecodeState, config: EngineConfig, kind: jax.Array) -> SerialEvents:
    """Return what tokens that complete something of class `kind`, int32 [B], do."""
    phase = state.sequence.cursor.phase
    rule = jnp.where((phase == MERGE) | (phase == PROMPT), SERIAL, phase)
    opens_title = kind == TITLE_START
    closes_title = (rule == TITLE) & (kind == TITLE_END)
    discards = closes_title & (state.sequence.titles.complete >= 2) & repeats_title(state) & config.distinct_titles
    forks = ((rule == TITLED) & (kind == PARALLEL_START)) | discards
    ends = (rule == SERIAL) & (kind == END)
    return SerialEvents(
        ends=ends,
        opens_title=opens_title,
        opens_block=opens_title & (rule == SERIAL),
        extends_title=(rule == TITLE) & ~closes_title,
        closes_title=closes_title & ~discards,
        discards=discards,
        forks=forks,
        stays_titled=(rule == TITLED) & ~opens_title & ~forks,
        is_content=(rule == SERIAL) & ~opens_title & ~ends,
    )


def _advance_serial(state: DecodeState, derived: Derived, config: EngineConfig, token: jax.Array) -> SequenceState:
    """Return the progress after a token of the serial segment, int32 [B]."""
    s = state.sequence
    node = jnp.where(s.cursor.phase == MERGE, 0, s.segments.node[:, 0])
    kind, node, continues = recognise(state, node, token)
    event = _serial_events(state, config, kind)
    # A discarded title ends the list: `<|para|>` stands where the title began.
    token = jnp.where(event.discards, config.special.parallel_start, token)
    discarded = jnp.where(event.discards, 1 + derived.title_length, 0)
    titles = _advance_titles(s.titles, event, s.cursor.chain, token)
    room = budget_room(s.titles, s.budget, s.cursor.chain, derived, config)
    no_room = (event.opens_block & ~room.block) | (event.extends_title & ~room.title_token)
    no_room |= (s.cursor.phase == TITLED) & event.opens_title & ~room.title
    budget = _spend_serial(s.budget, titles, event, config)
    forks = event.forks[:, None]
    return SequenceState(
        cursor=_advance_cursor(s, derived, event, budget, no_room, discarded)._replace(
            chain=jnp.where(node == 0, 0, jnp.where(continues, s.cursor.chain + 1, 1))
        ),
        segments=_serial_segments(s.segments, titles, token, node, event, config),
        branches=opened_branches(s, (jnp.arange(config.max_branches)[None] < titles.complete[:, None]) & forks),
        titles=titles,
        budget=budget,
        counters=s.counters._replace(
            discarded=s.counters.discarded + discarded,
            critical_path=s.counters.critical_path + 1 - discarded,
            blocks=s.counters.blocks + event.forks,
            branches=s.counters.branches + jnp.where(event.forks, titles.complete, 0),
        ),
        draft=s.draft,
    )


def _advance_titles(titles: Titles, event: SerialEvents, chain: jax.Array, token: jax.Array) -> Titles:
    """Return the titles after a token of the serial segment; a block that opens begins with none."""
    number, place = jnp.arange(titles.length.shape[1])[None], jnp.arange(titles.tokens.shape[2])
    count = jnp.where(event.opens_block, 0, titles.complete) + event.closes_title
    restarts = event.opens_block[:, None] | (number >= count[:, None]) & event.opens_title[:, None]
    length = jnp.where(restarts, 0, titles.length)
    is_current = number == titles.complete[:, None]
    extends = is_current & event.extends_title[:, None]
    writes = extends[..., None] & (place == length[..., None])
    tokens = jnp.where(writes, token[:, None, None], titles.tokens)
    # The beginning of the tag that closes a title was taken for a part of the title.
    tag = jnp.where(event.closes_title, chain, 0)[:, None] * is_current
    return Titles(count, length + extends - tag, tokens)


def _spend_serial(budget: Budget, titles: Titles, event: SerialEvents, config: EngineConfig) -> Budget:
    """Return the budget after a token of the serial segment; a fork reserves the tokens that the engine feeds."""
    number = jnp.arange(config.max_branches)[None]
    title_tokens = jnp.sum(jnp.where(number < titles.complete[:, None], titles.length, 0), axis=1)
    reserved = jnp.where(event.forks, fed_cost(titles.complete, title_tokens, config), 0)
    tokens, content = budget.tokens - 1 - reserved, budget.content - event.is_content
    return budget._replace(
        tokens=tokens,
        content=content,
        block_tokens=jnp.where(event.forks, tokens, budget.block_tokens),
        block_content=jnp.where(event.forks, content, budget.block_content),
    )


def _advance_cursor(
    s: SequenceState, derived: Derived, event: SerialEvents, budget: Budget, no_room: jax.Array, discarded: jax.Array
) -> Cursor:
    """Return the cursor after a token of the serial segment.

    A block or title without room ends the answer; the host leaves it out.
    """
    cursor = s.cursor
    first = jnp.where(cursor.phase == MERGE, derived.merge_position, cursor.position)
    position = first + jnp.where(cursor.phase == PROMPT, 1, derived.due[:, 0]) - discarded
    spent = (budget.tokens <= 0) | (event.is_content & (budget.content <= 0)) | no_room
    in_title, titled = event.opens_title | event.extends_title, event.closes_title | event.stays_titled
    return cursor._replace(
        phase=jnp.select([in_title, titled, event.forks], [TITLE, TITLED, FORK], SERIAL),
        finish=jnp.select([event.ends, spent & ~event.forks], [STOP, LENGTH], RUNNING),
        position=position,
        block=cursor.block + event.forks,
        hide_from=jnp.where(event.discards, position, cursor.hide_from),
    )


def _serial_segments(
    segments: Segments, titles: Titles, token: jax.Array, node: jax.Array, event: SerialEvents, config: EngineConfig
) -> Segments:
    """Return the segments after a token of the serial one: it is pending, and in a fork the heads are."""
    forked = fork_segments(titles, token, config)
    is_serial = jnp.arange(segments.queued.shape[1])[None] == 0
    return Segments(
        queue=forked.queue,
        queued=jnp.where(event.forks[:, None], forked.queued, is_serial.astype(jnp.int32)),
        node=jnp.where(is_serial, node[:, None], 0),
        sampled=jnp.where(is_serial, segments.sampled + 1, 0),
    )


def _advance_block(state: DecodeState, derived: Derived, config: EngineConfig, sampled: Sampled) -> SequenceState:
    """Return the progress after tokens of branches."""
    s, did, token = state.sequence, sampled.took[:, 1:], sampled.token[:, 1:]
    kind, node, _ = recognise(state, s.segments.node[:, 1:], token)
    closes = did & (kind == BRANCH_END)
    live = s.branches.live & ~closes
    done = ~jnp.any(live, axis=1)
    taken = s.segments.sampled[:, 1:]
    budget = _spend_branches(state, derived, config, did, closes)
    spent = (budget.tokens <= 0) | (budget.content <= 0) | (budget.cut_branch > 0)
    longest = jnp.max(taken + did, axis=1)
    return s._replace(
        cursor=s.cursor._replace(
            phase=jnp.where(done, MERGE, PARALLEL), finish=jnp.where(done & spent, LENGTH, RUNNING)
        ),
        segments=_branch_segments(s.segments, did, token, node, done, config),
        branches=s.branches._replace(
            offset=s.branches.offset + jnp.where(did, derived.due[:, 1:], 0),
            live=live,
            closing=s.branches.closing | sampled.closing[:, 1:],
        ),
        budget=budget,
        counters=s.counters._replace(critical_path=s.counters.critical_path + jnp.where(done, longest, 0)),
    )


def _branch_segments(
    segments: Segments, did: jax.Array, token: jax.Array, node: jax.Array, done: jax.Array, config: EngineConfig
) -> Segments:
    """Return the segments after tokens of branches: these are pending, and when all are closed `<|/para|>` is."""
    serial = jnp.zeros_like(did[:, :1])
    took = jnp.concatenate([serial, did], axis=1)
    tokens = jnp.pad(token, ((0, 0), (1, 0)))[..., None]
    ending = jnp.asarray(config.tags.parallel_end, jnp.int32)
    ending = ending[jnp.minimum(jnp.arange(segments.queue.shape[2]), ending.size - 1)]
    queue = jnp.where(took[..., None], tokens, segments.queue)
    queued = jnp.where(took, 1, segments.queued)
    return Segments(
        queue=queue.at[:, 0].set(jnp.where(done[:, None], ending, queue[:, 0])),
        queued=queued.at[:, 0].set(jnp.where(done, len(config.tags.parallel_end), 0)),
        node=jnp.where(took, jnp.pad(node, ((0, 0), (1, 0))), segments.node),
        sampled=segments.sampled + took,
    )


def _spend_branches(
    state: DecodeState, derived: Derived, config: EngineConfig, did: jax.Array, closes: jax.Array
) -> Budget:
    """Return the budget after tokens of branches, and whether a limit has closed one of these.

    Args:
        did: branches that took a token, bool [B, N].
        closes: branches whose token completes the closing tag, bool [B, N].
    """
    s, budget, allowed = state.sequence, state.sequence.budget, derived.budget
    within = s.segments.sampled[:, 1:] + config.tags.branch_end_cost < state.request.max_branch_tokens[:, None]
    closed = closes & ~s.branches.closing
    number = 1 + jnp.arange(config.max_branches)
    first_cut = jnp.min(jnp.where(closed & ~allowed.affordable, number, NOTHING), axis=1)
    cut_branch = jnp.minimum(jnp.where(budget.cut_branch > 0, budget.cut_branch, NOTHING), first_cut) % NOTHING
    return budget._replace(
        tokens=budget.tokens - jnp.sum(did, axis=1),
        content=budget.content - jnp.sum(did & ~closes, axis=1),
        cut=budget.cut | jnp.any(closed & allowed.affordable & allowed.readable & ~within, axis=1),
        cut_branch=cut_branch,
    )
