"""Decisions of the host between steps: token masks, known tokens, rules of serial text, blocks and ends.

B rows, N maximum branches, M = N + 1 segments, Q maximum pending tokens of a segment, D draft tokens of a segment, P
segments that are changed, W words of 32 tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32, UInt32

from aspd_jax.errors import StructureError
from aspd_jax.sizes import next_power
from aspd_jax.trees import zeros
from infer.decode.checking import Check
from infer.decode.decode_step import StepSummary, summarise
from infer.decode.derived import merge_position
from infer.decode.packed import Packed
from infer.decode.state import (
    A_TEXT,
    FORK,
    MASK_EACH,
    MASK_ONCE,
    MERGE,
    NO_LIMIT,
    RUNNING,
    SERIAL,
    DecodeState,
    EngineConfig,
    Segments,
    SequenceState,
    shard_state,
)


class SerialRule(NamedTuple):
    """Rule of the serial segment until the next decision of the host: fields of `Cursor`."""

    rule: int
    writes: int = A_TEXT


@dataclass(frozen=True)
class RowGuidance:
    """Decisions for one sequence. Segments that wait go on, without a limit where none is given.

    Attributes:
        masks: tokens that may come next, and after each draft token, uint32 [W] each, by segment: 0 is serial, k is
            branch k. Empty: any. A segment with masks waits again after the next step, unless `left` is more than
            one token: then it goes on without a mask.
        left: tokens after which segments wait again, by segment.
        stops: classes of tokens after which segments wait, by segment; the others keep theirs, and new branches have
            none.
        drafts: draft tokens of segments that have masks; the others keep theirs.
        known_tokens: tokens that follow the pending ones, by segment; they are fed together with these.
        counted: whether known tokens count as sampled, and are subtracted from both budgets.
        leads: tokens of the plain text in the heads of the branches of a block that begins.
        serial: rule of serial text, which goes on now, or after the block that begins; None: unchanged.
        branches: number of branches of a block that begins with `known_tokens` as heads; 0: none begins.
        ending: numbers, from 1, of branches whose next token has to be the closing tag.
        closed: numbers of branches that end; their pending tokens are fed by the merge.
        emptied: those of `closed` whose pending tokens are dropped.
        merges: whether the pending tokens of all branches are fed next.
        finish: STOP or LENGTH to end the answer; RUNNING: it continues.
        resume_at: position from which on all tokens are hidden, and pending ones dropped; serial text goes on there,
            outside of a block. -1: none are.
        text: known serial tokens of any number that are fed next; pending ones were dropped.
        spent: tokens of the budget of all tokens that are fed now, or in the block that begins without being sampled.
        content: tokens of the budget of plain text that `known_tokens` of the serial segment take.
        discarded: sampled tokens that are no part of the answer.
        restarts: whether `resume_at` is the last token of the prompt: the answer begins again.
        check: draft tokens that serial text feeds in a pass of its own, behind its last token; it waits again then.
        scores: whether the next part of known branches is fed and read; the sequence waits again afterwards.
    """

    masks: Mapping[int, Sequence[np.ndarray]] = field(default_factory=dict)
    left: Mapping[int, int] = field(default_factory=dict)
    stops: Mapping[int, int] = field(default_factory=dict)
    drafts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    known_tokens: Mapping[int, Sequence[int]] = field(default_factory=dict)
    counted: bool = True
    leads: Sequence[int] = ()
    serial: SerialRule | None = None
    branches: int = 0
    ending: frozenset[int] = frozenset()
    closed: frozenset[int] = frozenset()
    emptied: frozenset[int] = frozenset()
    merges: bool = False
    finish: int = RUNNING
    resume_at: int = -1
    text: Sequence[int] = ()
    spent: int = 0
    content: int = 0
    discarded: int = 0
    restarts: bool = False
    check: Check | None = None
    scores: bool = False


class Guidance(NamedTuple):
    """Decisions for all sequences (`RowGuidance`).

    Attributes:
        row, segment: segments that are changed; a row out of range: none.
        masked: whether `bits` restrict the next tokens (`Segments.masked`).
        bits: token masks.
        left: see `Segments`; NO_LIMIT where none is given.
        stops: see `Segments`; -1: unchanged.
        drafts: draft tokens; -1: none.
        drafted: branch, from 0, whose draft tokens are replaced; 0 also serves the serial segment; N: none are.
        known_tokens: known tokens.
        size: number of known tokens.
        counted: number of known tokens that count as sampled.
        lead: tokens of plain text in the head of a branch.
        rule, writes: rule of serial text (`SerialRule`); rows without `goes_on` keep theirs.
        goes_on: sequences whose serial text gets a rule.
        decided: sequences with decisions.
        branches: branches of a block that begins.
        ending, closed, emptied: branches that end.
        merges: sequences that merge.
        finish: new values of `Cursor.finish`; RUNNING: unchanged.
        resume_at, spent, content: see `RowGuidance`.
    """

    row: Int32[Array, " P"]
    segment: Int32[Array, " P"]
    masked: Int32[Array, " P"]
    bits: UInt32[Array, "P 1+D W"]
    left: Int32[Array, " P"]
    stops: Int32[Array, " P"]
    drafts: Int32[Array, "P D"]
    drafted: Int32[Array, " P"]
    known_tokens: Int32[Array, "P Q"]
    size: Int32[Array, " P"]
    counted: Int32[Array, " P"]
    lead: Int32[Array, " P"]
    rule: Int32[Array, " B"]
    writes: Int32[Array, " B"]
    goes_on: Bool[Array, " B"]
    decided: Bool[Array, " B"]
    branches: Int32[Array, " B"]
    ending: Bool[Array, "B N"]
    closed: Bool[Array, "B N"]
    emptied: Bool[Array, "B N"]
    merges: Bool[Array, " B"]
    finish: Int32[Array, " B"]
    resume_at: Int32[Array, " B"]
    spent: Int32[Array, " B"]
    content: Int32[Array, " B"]


def guidance_arrays(
    rows: Mapping[int, RowGuidance], batch: int, words: int, config: EngineConfig, min_size: int = 1
) -> Packed[Guidance]:
    """Return the decisions for rows as arrays. P is 1, or a power of two with room for a fork: few programs.

    Args:
        rows: decisions by row.
        batch: B.
        words: W.
        config: configuration of the engine.
        min_size: minimum P.

    Raises:
        StructureError: known tokens do not fit the queue of a segment.
    """
    entries = [
        (row, segment)
        for row, guidance in rows.items()
        for segment in sorted({*guidance.masks, *guidance.known_tokens, *guidance.left, *guidance.stops})
    ]
    size = max(min_size, len(entries))
    size = 1 if size == 1 else next_power(max(size, 1 + config.max_branches))
    sizes = {"P": size, "Q": config.max_queued, "D": config.draft_tokens, "1+D": 1 + config.draft_tokens}
    sizes |= {"W": words, "B": batch, "N": config.max_branches}
    made: Any = zeros(Guidance, sizes, np)
    unused = {"row": batch, "left": NO_LIMIT, "stops": -1, "drafts": -1, "drafted": config.max_branches}
    for name, value in (unused | {"resume_at": -1}).items():
        getattr(made, name).fill(value)
    for number, (row, segment) in enumerate(entries):
        guidance = rows[row]
        tokens = guidance.known_tokens.get(segment, ())
        made.row[number], made.segment[number] = row, segment
        masks, drafts = guidance.masks.get(segment, ()), guidance.drafts.get(segment)
        if masks:
            made.bits[number, : len(masks)] = masks
            made.masked[number] = MASK_ONCE if guidance.left.get(segment, 1) > 1 else MASK_EACH
        made.left[number] = guidance.left.get(segment, len(masks) or NO_LIMIT)
        made.stops[number] = guidance.stops.get(segment, -1)
        if drafts is not None:
            made.drafts[number, : len(drafts)], made.drafted[number] = drafts, max(segment - 1, 0)
        if len(tokens) > config.max_queued:
            raise StructureError(f"known tokens: expected at most {config.max_queued} in a segment, got {len(tokens)}.")
        made.known_tokens[number, : len(tokens)], made.size[number] = tokens, len(tokens)
        made.counted[number] = len(tokens) * guidance.counted
        if guidance.leads and segment:
            made.lead[number] = guidance.leads[segment - 1]
    for row, guidance in rows.items():
        made.decided[row] = True
        for name in ("branches", "merges", "finish", "resume_at", "spent", "content"):
            getattr(made, name)[row] = getattr(guidance, name)
        if guidance.serial is not None:
            made.goes_on[row], made.rule[row], made.writes[row] = True, *guidance.serial
        for name in ("ending", "closed", "emptied"):
            getattr(made, name)[row, [number - 1 for number in getattr(guidance, name)]] = True
    result: Packed[Guidance] = Packed.pack(made)
    return result


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def guide(
    state: DecodeState, decisions: Packed[Guidance], config: EngineConfig
) -> tuple[DecodeState, Packed[StepSummary]]:
    """Apply decisions of the host; return the state and its summary."""
    guidance = decisions.unpack()
    token_mask = state.token_mask.at[guidance.row, guidance.segment].set(guidance.bits, mode="drop")
    draft = state.sequence.draft.at[guidance.row, guidance.drafted].set(guidance.drafts, mode="drop")
    state = _take_back(state._replace(token_mask=token_mask), guidance)
    sequence = state.sequence._replace(draft=draft)
    sequence = _open_blocks(_go_on(_close_branches(sequence, guidance), guidance), guidance)
    sequence = sequence._replace(segments=_limited(sequence.segments, guidance))
    sequence = _begin_merges(_queue_known(sequence, guidance), guidance, config)
    cursor = sequence.cursor
    cursor = cursor._replace(finish=jnp.where(guidance.finish != RUNNING, guidance.finish, cursor.finish))
    state = state._replace(sequence=sequence._replace(cursor=cursor))
    return shard_state(state, config.mesh), summarise(state, config)


def _take_back(state: DecodeState, guidance: Guidance) -> DecodeState:
    """Hide the last tokens in the cache, whose slots later tokens take, and drop pending ones."""
    s, cache, takes = state.sequence, state.cache, guidance.resume_at >= 0
    hidden = takes[:, None] & (cache.layout.position >= guidance.resume_at[:, None])
    layout = cache.layout._replace(sequence=jnp.where(hidden, 0, cache.layout.sequence))
    ends = jnp.where(layout.sequence > 0, 1 + jnp.arange(layout.sequence.shape[1]), 0)
    least = s.cursor.prompt_length - 1  # the last tokens of a prompt may be hidden draft tokens of the row it continues
    length = jnp.where(takes, jnp.maximum(jnp.max(ends, axis=1), least), cache.length)
    s = s._replace(
        cursor=s.cursor._replace(
            position=jnp.where(takes, guidance.resume_at, s.cursor.position),
            phase=jnp.where(takes, SERIAL, s.cursor.phase),
        ),
        segments=s.segments._replace(queued=jnp.where(takes[:, None], 0, s.segments.queued)),
        branches=s.branches._replace(live=s.branches.live & ~takes[:, None]),
        budget=s.budget._replace(exhausted=s.budget.exhausted & ~takes[:, None]),
    )
    return state._replace(sequence=s, cache=cache._replace(layout=layout, length=length))


def _go_on(s: SequenceState, guidance: Guidance) -> SequenceState:
    """Give serial text its rule, and subtract what it spends from the budgets."""
    goes_on, cursor = guidance.goes_on, s.cursor
    return s._replace(
        cursor=cursor._replace(
            phase=jnp.where(goes_on, SERIAL, cursor.phase),
            rule=jnp.where(goes_on, guidance.rule, cursor.rule),
            writes=jnp.where(goes_on, guidance.writes, cursor.writes),
        ),
        budget=s.budget._replace(tokens=s.budget.tokens - guidance.spent, content=s.budget.content - guidance.content),
    )


def _close_branches(s: SequenceState, guidance: Guidance) -> SequenceState:
    """End branches."""
    queued = s.segments.queued.at[:, 1:].set(jnp.where(guidance.emptied, 0, s.segments.queued[:, 1:]))
    return s._replace(
        segments=s.segments._replace(queued=queued),
        branches=s.branches._replace(
            live=s.branches.live & ~guidance.closed,
            closing=s.branches.closing | (s.branches.live & guidance.ending),
        ),
    )


def _open_blocks(s: SequenceState, guidance: Guidance) -> SequenceState:
    """Begin blocks whose heads `_queue_known` queues."""
    opens = guidance.branches > 0
    number = jnp.arange(s.branches.live.shape[1])[None]

    def cleared(array: jax.Array) -> jax.Array:
        return jnp.where(opens[:, None], jnp.zeros((), array.dtype), array)

    live = jnp.where(opens[:, None], number < guidance.branches[:, None], s.branches.live)
    segments, budget = s.segments, s.budget
    leads = cleared(s.branches.lead)
    leads = leads.at[guidance.row, jnp.maximum(guidance.segment - 1, 0)].add(guidance.lead, mode="drop")
    content = jnp.sum(leads, axis=1) * opens
    return s._replace(
        cursor=s.cursor._replace(phase=jnp.where(opens, FORK, s.cursor.phase), block=s.cursor.block + opens),
        segments=segments._replace(
            queued=segments.queued.at[:, 1:].set(cleared(segments.queued[:, 1:])),
            sampled=segments.sampled.at[:, 1:].set(cleared(segments.sampled[:, 1:])),
            masked=segments.masked.at[:, 1:].set(cleared(segments.masked[:, 1:])),
            stops=segments.stops.at[:, 1:].set(cleared(segments.stops[:, 1:])),
            left=jnp.where(opens[:, None], NO_LIMIT, segments.left),
        ),
        branches=s.branches._replace(
            number=jnp.where(opens, guidance.branches, s.branches.number),
            offset=cleared(s.branches.offset),
            live=live,
            closing=cleared(s.branches.closing),
            lead=leads,
        ),
        budget=budget._replace(
            content=budget.content - content,
            block_tokens=jnp.where(opens, budget.tokens, budget.block_tokens),
            block_content=jnp.where(opens, budget.content, budget.block_content),
            exhausted=cleared(budget.exhausted),
        ),
    )


def _limited(segments: Segments, guidance: Guidance) -> Segments:
    """Return the segments with the limits of their next tokens."""
    left = jnp.where(guidance.decided[:, None] & (segments.left <= 0), NO_LIMIT, segments.left)
    at = guidance.row, guidance.segment
    stops = jnp.where(guidance.stops < 0, segments.stops.at[at].get(mode="clip"), guidance.stops)
    return segments._replace(
        masked=segments.masked.at[at].set(guidance.masked, mode="drop"),
        left=left.at[at].set(guidance.left, mode="drop"),
        stops=segments.stops.at[at].set(stops, mode="drop"),
    )


def _queue_known(s: SequenceState, guidance: Guidance) -> SequenceState:
    """Queue known tokens after the pending ones, and subtract those that count from the budgets.

    In a fork, the position becomes that of the last serial token.
    """
    segments, place = s.segments, jnp.arange(guidance.known_tokens.shape[1])
    index = guidance.row, guidance.segment
    slot = segments.queued[index][:, None] + place
    slot = jnp.where(place < guidance.size[:, None], slot, guidance.known_tokens.shape[1])
    queue = segments.queue.at[guidance.row[:, None], guidance.segment[:, None], slot].set(
        guidance.known_tokens, mode="drop"
    )
    queued, budget = segments.queued.at[index].add(guidance.size, mode="drop"), s.budget
    before = jnp.where(guidance.branches > 0, queued[:, 0] - 1, 0)
    return s._replace(
        cursor=s.cursor._replace(position=s.cursor.position + before),
        segments=segments._replace(
            queue=queue,
            queued=queued,
            sampled=segments.sampled.at[index].add(guidance.counted, mode="drop"),
        ),
        budget=budget._replace(
            tokens=budget.tokens.at[guidance.row].add(-guidance.counted, mode="drop"),
            content=budget.content.at[guidance.row].add(-guidance.counted, mode="drop"),
        ),
    )


def _begin_merges(s: SequenceState, guidance: Guidance, config: EngineConfig) -> SequenceState:
    """Begin the merge of sequences that `merges` names; a merge without pending tokens is over."""
    merged = guidance.merges & (jnp.sum(s.segments.queued[:, 1:], axis=1) == 0)
    phase = jnp.where(merged, SERIAL, jnp.where(guidance.merges, MERGE, s.cursor.phase))
    position = jnp.where(merged, merge_position(s, config), s.cursor.position)
    left = s.segments.left.at[:, 0].set(jnp.where(merged, 0, s.segments.left[:, 0]))
    return s._replace(cursor=s.cursor._replace(phase=phase, position=position), segments=s.segments._replace(left=left))
