"""Effects of sampled tokens on a sequence: serial text, branches, merges, budgets and ends.

B sequences, N maximum branches, M = N + 1 segments, L lanes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from infer.decode.derived import Derived
from infer.decode.grammar import LaneTokens
from infer.decode.inputs import Inputs, Lanes
from infer.decode.state import (
    A_TEXT,
    LENGTH,
    MASK_EACH,
    MASK_ONCE,
    MERGE,
    NO_LIMIT,
    PARALLEL,
    PROMPT,
    RUNNING,
    SERIAL,
    STOP,
    UNMASKED,
    Budget,
    DecodeState,
    EngineConfig,
    Segments,
    SequenceState,
)
from infer.decode.token_classes import BRANCH_END, END, ITEM, LINE_OPENER, LINE_START, LINES, OPENER, TITLE_START


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
    after_serial = _advance_serial(state.sequence, derived, jax.tree.map(lambda field: field[:, 0], by_segment))
    after_block = _advance_block(state, derived, config, jax.tree.map(lambda field: field[:, 1:], by_segment))
    in_block = jnp.any(by_segment.active[:, 1:], axis=1)
    moves = by_segment.active[:, 0] | in_block

    def select(old: jax.Array, serial: jax.Array, block: jax.Array) -> jax.Array:
        rank = (-1,) + (1,) * (old.ndim - 1)
        new = jnp.where(in_block.reshape(rank), block, serial)
        return jnp.where(moves.reshape(rank), new, old)

    sequence = jax.tree.map(select, state.sequence, after_serial, after_block)
    segments = sequence.segments._replace(left=_left_after(state, by_segment))
    return state._replace(sequence=sequence._replace(segments=segments))


def hold(state: DecodeState, derived: Derived, inputs: Inputs) -> DecodeState:
    """Let sequences and segments wait for the host after a step.

    Args:
        derived: derived from the state before its tokens were taken.
    """
    return _hold_masked(_hold_silent(state, derived, inputs.fed), inputs.lanes)


def _left_after(state: DecodeState, tokens: SegmentTokens) -> Int32[Array, "B M"]:
    """Return `Segments.left` after tokens, `tokens` [B, M] each."""
    segments, token = state.sequence.segments, tokens.token
    # Before the first token behind a prompt or known text, nothing is pending: it may begin a line.
    last = jnp.take_along_axis(segments.queue, jnp.maximum(segments.queued - 1, 0)[..., None], axis=2)[..., 0]
    at_line = ((LINES >> state.classes[last].astype(jnp.int32)) & 1 > 0) | (segments.queued == 0)
    starts = at_line & ((LINES >> tokens.kind) & 1 == 0)
    item = (tokens.kind == LINE_OPENER) | (starts & (tokens.kind == OPENER))
    at_start = jnp.where(item, 1 << ITEM, 0) | jnp.where(starts, 1 << LINE_START, 0)
    words = jnp.take_along_axis(state.stop_tokens, token // 32, axis=1)
    in_set = (words >> (token % 32).astype(jnp.uint32)) & 1 > 0
    stops = in_set | (segments.stops & (1 << tokens.kind | at_start) > 0)
    fewer = jnp.where(segments.left < NO_LIMIT, segments.left - 1, NO_LIMIT)
    return jnp.where(tokens.active, jnp.where(stops, 0, fewer), segments.left)


def _hold_silent(state: DecodeState, derived: Derived, fed: jax.Array) -> DecodeState:
    """Let sequences without serial text wait for the host when they have fed their prompt or a merge.

    Those that took a token have fed neither: their merge, if they begin one, is due in the next step.

    Args:
        fed: tokens that each sequence fed, int32 [B].
    """
    s, phase = state.sequence, state.sequence.cursor.phase
    is_prompt = (phase == PROMPT) & (state.cache.length >= s.cursor.known_length)
    silent = (s.cursor.rule == 0) & ~jnp.any(derived.samples, axis=1)
    held = silent & (fed > 0) & (is_prompt | (phase == MERGE))
    position = jnp.where(phase == MERGE, derived.merge_position, s.cursor.position + 1)
    position = jnp.where(held, position, s.cursor.position)
    cursor = s.cursor._replace(phase=jnp.where(held, SERIAL, phase), position=position)
    segments = s.segments._replace(
        queued=jnp.where(held[:, None], 0, s.segments.queued), left=jnp.where(held[:, None], 0, s.segments.left)
    )
    return state._replace(sequence=s._replace(cursor=cursor, segments=segments))


def _hold_masked(state: DecodeState, lanes: Lanes) -> DecodeState:
    """Let segments wait for the host, which makes their next token mask; others go on without one.

    Args:
        lanes: lanes that took tokens.
    """
    segments, at = state.sequence.segments, (lanes.row, lanes.branch)
    masked, left = (field.at[at].get(mode="clip") for field in (segments.masked, segments.left))
    segments = segments._replace(
        left=segments.left.at[at].set(jnp.where(masked == MASK_EACH, 0, left), mode="drop"),
        masked=segments.masked.at[at].set(jnp.where(masked == MASK_ONCE, UNMASKED, masked), mode="drop"),
    )
    return state._replace(sequence=state.sequence._replace(segments=segments))


def _advance_serial(s: SequenceState, derived: Derived, tokens: SegmentTokens) -> SequenceState:
    """Return the progress after tokens of the serial segment, `tokens` [B] each: the token is pending.

    A budget ends the sequence in plain text. Elsewhere the segment waits first, and the host knows what still fits.
    """
    cursor, budget, kind = s.cursor, s.budget, tokens.kind
    ends, is_tag = kind == END, (kind >= TITLE_START) & (kind <= BRANCH_END)
    waits = is_tag | ((cursor.writes != A_TEXT) & (s.segments.left[:, 0] <= 1))
    is_content = (cursor.writes == A_TEXT) & ~ends & ~is_tag
    budget = budget._replace(tokens=budget.tokens - 1, content=budget.content - is_content)
    spent = (budget.tokens <= 0) | (is_content & (budget.content <= 0))
    first = jnp.where(cursor.phase == MERGE, derived.merge_position, cursor.position)
    is_serial = jnp.arange(s.segments.queued.shape[1])[None] == 0
    branches = s.branches
    return s._replace(
        cursor=cursor._replace(
            phase=jnp.full_like(cursor.phase, SERIAL),
            finish=jnp.select([ends, spent & ~waits], [STOP, LENGTH], RUNNING),
            position=first + jnp.where(cursor.phase == PROMPT, 1, derived.due[:, 0]),
        ),
        segments=s.segments._replace(
            queue=s.segments.queue.at[:, 0, 0].set(tokens.token),
            queued=jnp.broadcast_to(is_serial, s.segments.queued.shape).astype(jnp.int32),
            sampled=jnp.where(is_serial, s.segments.sampled + 1, 0),
        ),
        branches=branches._replace(
            offset=jnp.zeros_like(branches.offset),
            live=jnp.zeros_like(branches.live),
            closing=jnp.zeros_like(branches.closing),
        ),
        budget=budget,
    )


def _advance_block(state: DecodeState, derived: Derived, config: EngineConfig, tokens: SegmentTokens) -> SequenceState:
    """Return the progress after tokens of branches, `tokens` [B, N] each."""
    s, active = state.sequence, tokens.active
    closes = active & (tokens.kind == BRANCH_END)
    live = s.branches.live & ~closes
    done = ~jnp.any(live, axis=1)
    budget = _spend_branches(state, derived, config, active, closes)
    spent = (budget.tokens <= 0) | (budget.content <= 0) | jnp.any(budget.exhausted, axis=1)
    return s._replace(
        cursor=s.cursor._replace(
            phase=jnp.where(done, MERGE, PARALLEL), finish=jnp.where(done & spent, LENGTH, RUNNING)
        ),
        segments=_branch_segments(s.segments, tokens, done, config),
        branches=s.branches._replace(
            offset=s.branches.offset + jnp.where(active, s.segments.queued[:, 1:], 0),  # all that was pending was fed
            live=live,
        ),
        budget=budget,
    )


def _branch_segments(segments: Segments, tokens: SegmentTokens, done: jax.Array, config: EngineConfig) -> Segments:
    """Return the segments after tokens of branches: these are pending, then, if all are closed, `<|/para|>`."""
    active, token = (jnp.pad(field, ((0, 0), (1, 0))) for field in (tokens.active, tokens.token))
    queue = jnp.where(active[..., None], token[..., None], segments.queue)
    queued = jnp.where(active, 1, segments.queued)
    return segments._replace(
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
