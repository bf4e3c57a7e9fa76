"""Effects of sampled tokens on a sequence: titles, forks, branches, merges, budgets and ends.

B sequences, N maximum branches, M = N + 1 segments, L lanes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from infer.decode.derived import Derived
from infer.decode.grammar import LaneTokens, extended_number
from infer.decode.inputs import Lanes
from infer.decode.state import (
    COUNT,
    FORK,
    HELD,
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
    Branches,
    Budget,
    Cursor,
    DecodeState,
    EngineConfig,
    Segments,
    SequenceState,
    Titles,
)
from infer.decode.title_rules import complete_tokens, fed_cost
from infer.decode.token_classes import BRANCH_END, END, PARALLEL_START, TITLE_END, TITLE_START, TokenClasses


class SegmentTokens(NamedTuple):
    """The tokens that segments take in a step; 0 the serial segment, k branch k.

    Attributes:
        active: whether a segment takes a token.
        token, kind: see `LaneTokens`.
    """

    active: Bool[Array, "B M"]
    token: Int32[Array, "B M"]
    kind: Int32[Array, "B M"]


def advance(
    state: DecodeState, derived: Derived, config: EngineConfig, lanes: Lanes, tokens: LaneTokens, active: jax.Array
) -> DecodeState:
    """Take the tokens sampled after those that were fed; sequences without one stay as they are.

    Args:
        active: lanes that take their token, bool [L].
    """
    shape = state.sequence.segments.queued.shape
    at = jnp.where(active, lanes.row, shape[0]), lanes.branch

    def scattered(values: jax.Array) -> jax.Array:
        return jnp.zeros(shape, values.dtype).at[at].set(values, mode="drop")

    by_segment = SegmentTokens(scattered(active), *map(scattered, tokens))
    after_serial = _advance_serial(state, derived, config, jax.tree.map(lambda field: field[:, 0], by_segment))
    after_block = _advance_block(state, derived, config, jax.tree.map(lambda field: field[:, 1:], by_segment))
    in_block = jnp.any(by_segment.active[:, 1:], axis=1)
    moves = by_segment.active[:, 0] | in_block

    def select(old: jax.Array, serial: jax.Array, block: jax.Array) -> jax.Array:
        rank = (-1,) + (1,) * (old.ndim - 1)
        new = jnp.where(in_block.reshape(rank), block, serial)
        return jnp.where(moves.reshape(rank), new, old)

    return state._replace(sequence=jax.tree.map(select, state.sequence, after_serial, after_block))


def hold_templated(state: DecodeState, derived: Derived, fed: jax.Array) -> DecodeState:
    """Hold templated sequences that have fed their prompt or a merge, int32 [B] tokens fed, for the host.

    `Cursor.position` becomes the position of the last token before the next block.
    """
    s, phase = state.sequence, state.sequence.cursor.phase
    is_prompt = (phase == PROMPT) & (state.cache.length >= s.cursor.prompt_length)
    held = s.cursor.templated & (fed > 0) & (is_prompt | (phase == MERGE))
    position = jnp.where(held & (phase == MERGE), derived.merge_position - 1, s.cursor.position)
    cursor = s.cursor._replace(phase=jnp.where(held, HELD, phase), position=position)
    segments = s.segments._replace(queued=jnp.where(held[:, None], 0, s.segments.queued))
    return state._replace(sequence=s._replace(cursor=cursor, segments=segments))


def hide_discarded(state: DecodeState) -> DecodeState:
    """Hide discarded tokens in the cache: all from `Cursor.hide_from` on."""
    layout, sequence = state.cache.layout, state.sequence
    hide_from = sequence.cursor.hide_from
    visible = jnp.where(layout.position >= hide_from[:, None], 0, layout.sequence)
    cache = state.cache._replace(layout=layout._replace(sequence=visible))
    cursor = sequence.cursor._replace(hide_from=jnp.full_like(hide_from, NOTHING))
    return state._replace(cache=cache, sequence=sequence._replace(cursor=cursor))


class SerialEvents(NamedTuple):
    """Effects of a token of the serial segment, bool [B] each.

    Attributes:
        ends: whether the token ends the answer.
        opens_block: whether it is the first `<|title|>` of a block.
        counts: whether it is a digit of the number of leads.
        closes_count: whether it is `<|/title|>` after this number.
        opens_title: whether it is `<|title|>`, or is followed by it as a known tag, as between leads.
        extends_title: whether it is part of a title.
        closes_title: whether it is `<|/title|>`.
        completes: whether it completes the last stated lead, after which `<|para|>` is known.
        discards: whether the title repeats an earlier one, or has no end: it is discarded, which ends the list.
        takes_back: whether a lead has no end and too few are before it: the first lead becomes serial text.
        knows_tag: whether a known tag follows the token and is pending with it: `<|title|>` or `<|para|>`.
        forks: whether it is `<|para|>`, or `completes`, or `discards`.
        is_content: whether it is plain text.
    """

    ends: Bool[Array, " B"]
    opens_block: Bool[Array, " B"]
    counts: Bool[Array, " B"]
    closes_count: Bool[Array, " B"]
    opens_title: Bool[Array, " B"]
    extends_title: Bool[Array, " B"]
    closes_title: Bool[Array, " B"]
    completes: Bool[Array, " B"]
    discards: Bool[Array, " B"]
    takes_back: Bool[Array, " B"]
    knows_tag: Bool[Array, " B"]
    forks: Bool[Array, " B"]
    is_content: Bool[Array, " B"]


def _serial_events(s: SequenceState, derived: Derived, config: EngineConfig, kind: jax.Array) -> SerialEvents:
    """Return the effects of serial tokens of class `kind`, int32 [B]."""
    phase, leads = s.cursor.phase, config.form.leads
    rule = jnp.where((phase == MERGE) | (phase == PROMPT), SERIAL, phase)
    starts, closes = kind == TITLE_START, kind == TITLE_END
    closes_title = (rule == TITLE) & closes
    # A lead that begins with an earlier one would go on with its text; a name may begin with another.
    repeats = derived.repeats_title & config.distinct_titles
    endless = (rule == TITLE) & leads & ~closes & (derived.title_length >= config.max_title_tokens)
    discards = ((((rule == TITLE) if leads else closes_title) & repeats) | endless) & (s.titles.complete >= 2)
    takes_back = endless & ~discards
    closes_title &= ~discards
    closes_count = (rule == COUNT) & closes
    completes = closes_title & leads & (s.titles.complete + 1 >= s.titles.stated)
    opens_title = closes_count | (closes_title & ~completes) if leads else starts
    forks = ((rule == TITLED) & (kind == PARALLEL_START)) | completes | discards
    ends = (rule == SERIAL) & (kind == END)
    return SerialEvents(
        ends=ends,
        opens_block=starts & (rule == SERIAL),
        counts=(rule == COUNT) & ~closes,
        closes_count=closes_count,
        opens_title=opens_title,
        extends_title=(rule == TITLE) & ~closes & ~discards & ~takes_back,
        closes_title=closes_title,
        completes=completes,
        discards=discards,
        takes_back=takes_back,
        knows_tag=(opens_title | completes) & leads,
        forks=forks,
        is_content=(rule == SERIAL) & ~starts & ~ends,
    )


def _advance_serial(state: DecodeState, derived: Derived, config: EngineConfig, tokens: SegmentTokens) -> SequenceState:
    """Return the progress after tokens of the serial segment, `tokens` [B] each."""
    s = state.sequence
    event = _serial_events(s, derived, config, tokens.kind)
    # A discarded title ends the list: `<|para|>` stands where the title began.
    token = jnp.where(event.discards, config.special.parallel_start, tokens.token)
    in_title = derived.title_length + (not config.form.leads)
    # A block is taken back whole, with the token; its first lead remains. Known tags were not sampled.
    in_block = s.cursor.position + derived.due[:, 0] - s.cursor.opened
    in_block -= s.titles.complete + s.titles.length[:, 0]
    sampled = jnp.select([event.discards, event.takes_back], [in_title, in_block], 0)
    titles = _advance_titles(s.titles, state.classes, event, token)
    budget = _spend_serial(s.budget, titles, event, config)
    cursor = _advance_cursor(s, derived, event, budget, config)
    live = (jnp.arange(config.max_branches)[None] < titles.complete[:, None]) & event.forks[:, None]
    return SequenceState(
        cursor=cursor,
        segments=_serial_segments(s.segments, titles, token, event, config),
        branches=Branches(jnp.zeros_like(s.branches.offset), live, jnp.zeros_like(live)),
        titles=titles,
        budget=budget,
        counters=s.counters._replace(
            discarded=s.counters.discarded + sampled,
            critical_path=s.counters.critical_path + 1 - sampled,
            blocks=s.counters.blocks + event.forks,
            branches=s.counters.branches + jnp.where(event.forks, titles.complete, 0),
        ),
        draft=s.draft,
    )


def _advance_titles(titles: Titles, classes: TokenClasses, event: SerialEvents, token: jax.Array) -> Titles:
    """Return the titles after a token of the serial segment; a block that opens begins with none."""
    number, place = jnp.arange(titles.length.shape[1])[None], jnp.arange(titles.tokens.shape[2])
    count = jnp.where(event.opens_block, 0, titles.complete) + event.closes_title
    restarts = event.opens_block[:, None] | (number >= count[:, None]) & event.opens_title[:, None]
    length = jnp.where(restarts, 0, titles.length)
    is_current = number == titles.complete[:, None]
    extends = is_current & event.extends_title[:, None]
    writes = extends[..., None] & (place == length[..., None])
    tokens = jnp.where(writes, token[:, None, None], titles.tokens)
    stated = jnp.where(event.opens_block, 0, titles.stated)
    stated = jnp.where(event.counts, extended_number(stated, token, classes), stated)
    return Titles(count, length + extends, tokens, stated)


def _spend_serial(budget: Budget, titles: Titles, event: SerialEvents, config: EngineConfig) -> Budget:
    """Return the budget after a serial token and the known tags that follow it.

    A fork reserves the tokens that the engine feeds, and the leads, which are plain text.
    """
    lengths = complete_tokens(titles)
    cost = fed_cost(titles.complete, lengths, config)
    returned = jnp.where(event.takes_back, titles.length[:, 0], 0)  # tokens that are fed again
    tokens = budget.tokens - 1 - event.knows_tag - jnp.where(event.forks, cost, 0) - returned
    content = budget.content - event.is_content - returned
    return budget._replace(
        tokens=tokens,
        content=content - jnp.where(event.forks, lengths * config.form.leads, 0),
        block_tokens=jnp.where(event.forks, tokens, budget.block_tokens),
        block_content=jnp.where(event.forks, content, budget.block_content),
        exhausted=budget.exhausted & ~event.forks[:, None],
    )


def _advance_cursor(
    s: SequenceState,
    derived: Derived,
    event: SerialEvents,
    budget: Budget,
    config: EngineConfig,
) -> Cursor:
    """Return the cursor after a token of the serial segment.

    A block or title that does not fit the budget ends the answer; the host leaves it out.
    """
    cursor, fits = s.cursor, derived.fits
    exceeds = (event.opens_block & ~fits.block) | (event.extends_title & ~fits.title_token)
    exceeds |= (cursor.phase == TITLED) & event.opens_title & ~fits.title
    exceeds |= event.closes_count & ~fits.stated
    first = jnp.where(cursor.phase == MERGE, derived.merge_position, cursor.position)
    discarded = jnp.where(event.discards, 1 + derived.title_length, 0)
    position = first + jnp.where(cursor.phase == PROMPT, 1, derived.due[:, 0]) - discarded + event.completes
    position = jnp.where(event.takes_back, cursor.opened, position)
    spent = (budget.tokens <= 0) | ((event.is_content | event.takes_back) & (budget.content <= 0)) | exceeds
    counts = (event.opens_block & config.form.leads) | event.counts
    in_title, titled = event.opens_title | event.extends_title, event.closes_title
    conditions = [event.forks, counts, in_title, titled]
    return cursor._replace(
        phase=jnp.select(conditions, [FORK, COUNT, TITLE, TITLED], SERIAL),
        finish=jnp.select([event.ends, spent & ~event.forks], [STOP, LENGTH], RUNNING),
        position=position,
        block=cursor.block + event.forks,
        opened=jnp.where(event.opens_block, position, cursor.opened),
        hide_from=jnp.where(event.discards | event.takes_back, position, cursor.hide_from),
        took_back=cursor.took_back | event.takes_back,
    )


def _serial_segments(
    segments: Segments,
    titles: Titles,
    token: jax.Array,
    event: SerialEvents,
    config: EngineConfig,
) -> Segments:
    """Return the segments after a serial token: it is pending, and in a fork the heads are.

    The first lead of a block that is taken back is pending instead.
    """
    tags = config.special
    known = jnp.where(event.completes, tags.parallel_start, tags.title_start)  # the known tag after the token
    serial = jnp.stack([token, known], axis=1)
    queue, heads = fork_queue(titles, serial, config)
    lead, size = titles.tokens[:, 0], jnp.where(event.takes_back, titles.length[:, 0], 1 + event.knows_tag)
    lead = jnp.pad(lead, ((0, 0), (0, queue.shape[2] - lead.shape[1])))
    is_serial = jnp.arange(segments.queued.shape[1])[None] == 0
    return Segments(
        queue=queue.at[:, 0].set(jnp.where(event.takes_back[:, None], lead, queue[:, 0])),
        queued=jnp.where(is_serial, size[:, None], jnp.where(event.forks[:, None], heads, 0)),
        sampled=jnp.where(is_serial, segments.sampled + 1, 0),
    )


def fork_queue(titles: Titles, serial: jax.Array, config: EngineConfig) -> tuple[jax.Array, jax.Array]:
    """Return `Segments.queue` and `queued` of a fork: serial tokens, and the heads of the branches.

    Args:
        serial: the last tokens before the branches, int32 [B, 2]; `queued` counts none of them.
    """
    size, place, length = config.max_queued, jnp.arange(config.max_queued), titles.length[..., None]
    title = titles.tokens[:, :, jnp.clip(place - 1, 0, config.max_title_tokens - 1)]
    separator = jnp.asarray(config.form.separator or (0,), jnp.int32)
    separated = separator[jnp.clip(place - 1 - length, 0, separator.size - 1)]
    heads = jnp.where(place == 0, config.special.branch_start, jnp.where(place <= length, title, separated))
    exists = jnp.arange(config.max_branches)[None] < titles.complete[:, None]
    counts = jnp.where(exists, 1 + titles.length + len(config.form.separator), 0)
    first = jnp.pad(serial[:, None], ((0, 0), (0, 0), (0, size - 2)))
    return jnp.concatenate([first, heads], axis=1), jnp.pad(counts, ((0, 0), (1, 0)))


def _advance_block(state: DecodeState, derived: Derived, config: EngineConfig, tokens: SegmentTokens) -> SequenceState:
    """Return the progress after tokens of branches, `tokens` [B, N] each."""
    s, active = state.sequence, tokens.active
    closes = active & (tokens.kind == BRANCH_END)
    live = s.branches.live & ~closes
    done = ~jnp.any(live, axis=1)
    budget = _spend_branches(state, derived, config, active, closes)
    spent = (budget.tokens <= 0) | (budget.content <= 0) | jnp.any(budget.exhausted, axis=1)
    longest = jnp.max(s.segments.sampled[:, 1:] + active, axis=1)
    return s._replace(
        cursor=s.cursor._replace(
            phase=jnp.where(done, MERGE, PARALLEL), finish=jnp.where(done & spent, LENGTH, RUNNING)
        ),
        segments=_branch_segments(s.segments, tokens, done, config),
        branches=s.branches._replace(
            offset=s.branches.offset + jnp.where(active, derived.due[:, 1:], 0),
            live=live,
        ),
        budget=budget,
        counters=s.counters._replace(critical_path=s.counters.critical_path + jnp.where(done, longest, 0)),
    )


def _branch_segments(segments: Segments, tokens: SegmentTokens, done: jax.Array, config: EngineConfig) -> Segments:
    """Return the segments after tokens of branches: these are pending, then, if all are closed, `<|/para|>`."""
    active, token = (jnp.pad(field, ((0, 0), (1, 0))) for field in (tokens.active, tokens.token))
    queue = jnp.where(active[..., None], token[..., None], segments.queue)
    queued = jnp.where(active, 1, segments.queued)
    return Segments(
        queue=queue.at[:, 0, 0].set(jnp.where(done, config.special.parallel_end, queue[:, 0, 0])),
        queued=queued.at[:, 0].set(done.astype(jnp.int32)),
        sampled=segments.sampled + active,
    )


def _spend_branches(
    state: DecodeState, derived: Derived, config: EngineConfig, active: jax.Array, closes: jax.Array
) -> Budget:
    """Return the budget after tokens of branches; `cut` and `exhausted` record those that a budget ended.

    Args:
        active: branches that take a token, bool [B, N].
        closes: branches whose token is the closing tag, bool [B, N].
    """
    s, budget, allowed = state.sequence, state.sequence.budget, derived.budget
    within = s.segments.sampled[:, 1:] + 1 < state.request.max_branch_tokens[:, None]
    closed = closes & ~s.branches.closing
    permitted = allowed.affordable & allowed.readable
    return budget._replace(
        tokens=budget.tokens - jnp.sum(active, axis=1),
        content=budget.content - jnp.sum(active & ~closes, axis=1),
        cut=budget.cut | jnp.any(closed & permitted & ~within, axis=1),
        exhausted=budget.exhausted | (active & ~s.branches.closing & ~permitted),
    )
