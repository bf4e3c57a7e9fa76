"""Decisions of the host for constrained sequences between steps: token masks, known tokens and blocks of templates.

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

from aspd_jax.sizes import next_power
from infer.decode.decode_step import StepSummary, summarise
from infer.decode.derived import merge_position
from infer.decode.packed import Packed
from infer.decode.state import FORK, HELD, MERGE, RUNNING, DecodeState, EngineConfig, SequenceState, shard_state


@dataclass(frozen=True)
class RowGuidance:
    """Decisions for one sequence.

    Attributes:
        masks: tokens that may come next, and after each draft token, uint32 [W] each, by segment: 0 is serial, k is
            branch k.
        drafts: draft tokens of segments that have masks; the others keep theirs.
        known_tokens: tokens that follow the pending ones, by segment; they are fed together with these.
        branches: number of branches of a block that begins with the known tokens as leads; 0: none begins.
        closed: numbers, from 1, of branches that end; their pending tokens are fed by the merge.
        emptied: those of `closed` whose pending tokens are dropped.
        merges: whether the pending tokens of all branches are fed next.
        finish: STOP or LENGTH to end the answer; RUNNING: it continues.
    """

    masks: Mapping[int, Sequence[np.ndarray]] = field(default_factory=dict)
    drafts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    known_tokens: Mapping[int, list[int]] = field(default_factory=dict)
    branches: int = 0
    closed: frozenset[int] = frozenset()
    emptied: frozenset[int] = frozenset()
    merges: bool = False
    finish: int = RUNNING

    def __bool__(self) -> bool:
        return bool(self.masks or self.known_tokens or self.branches or self.closed or self.merges or self.finish)


class Guidance(NamedTuple):
    """Decisions for all sequences (`RowGuidance`).

    Attributes:
        row, segment: segments that are changed; a row out of range: none.
        bits: token masks.
        drafts: draft tokens; -1: none.
        drafted: branch, from 0, whose draft tokens are replaced; 0 also serves the serial segment; N: none are.
        known_tokens: known tokens.
        size: number of known tokens.
        branches: branches of a block that begins.
        closed, emptied: branches that end.
        merges: sequences that merge.
        finish: new values of `Cursor.finish`; RUNNING: unchanged.
    """

    row: Int32[Array, " P"]
    segment: Int32[Array, " P"]
    bits: UInt32[Array, "P 1+D W"]
    drafts: Int32[Array, "P D"]
    drafted: Int32[Array, " P"]
    known_tokens: Int32[Array, "P Q"]
    size: Int32[Array, " P"]
    branches: Int32[Array, " B"]
    closed: Bool[Array, "B N"]
    emptied: Bool[Array, "B N"]
    merges: Bool[Array, " B"]
    finish: Int32[Array, " B"]


def guidance_arrays(
    rows: Mapping[int, RowGuidance], batch: int, words: int, config: EngineConfig, min_size: int = 1
) -> Guidance:
    """Return the decisions for rows as arrays.

    Args:
        rows: decisions by row; every segment with known tokens has a mask.
        batch: B.
        words: W.
        config: configuration of the engine.
        min_size: minimum P.
    """
    entries = [(row, segment) for row, guidance in rows.items() for segment in guidance.masks]
    size = next_power(max(min_size, len(entries)))
    arrays: dict[str, Any] = {
        "row": np.full(size, batch, np.int32),
        "segment": np.zeros(size, np.int32),
        "bits": np.zeros((size, 1 + config.draft_tokens, words), np.uint32),
        "drafts": np.full((size, config.draft_tokens), -1, np.int32),
        "drafted": np.full(size, config.max_branches, np.int32),
        "known_tokens": np.zeros((size, config.max_queued), np.int32),
        "size": np.zeros(size, np.int32),
        "branches": np.zeros(batch, np.int32),
        "closed": np.zeros((batch, config.max_branches), bool),
        "emptied": np.zeros((batch, config.max_branches), bool),
        "merges": np.zeros(batch, bool),
        "finish": np.zeros(batch, np.int32),
    }
    made: Any = Guidance(**arrays)
    for number, (row, segment) in enumerate(entries):
        tokens = rows[row].known_tokens.get(segment, [])
        made.row[number], made.segment[number] = row, segment
        masks, drafts = rows[row].masks[segment], rows[row].drafts.get(segment)
        made.bits[number, : len(masks)] = masks
        if drafts is not None:
            made.drafts[number, : len(drafts)], made.drafted[number] = drafts, max(segment - 1, 0)
        made.known_tokens[number, : len(tokens)], made.size[number] = tokens, len(tokens)
    for row, guidance in rows.items():
        made.branches[row], made.merges[row], made.finish[row] = guidance.branches, guidance.merges, guidance.finish
        made.closed[row, [number - 1 for number in guidance.closed]] = True
        made.emptied[row, [number - 1 for number in guidance.emptied]] = True
    result: Guidance = made
    return result


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def guide(state: DecodeState, guidance: Guidance, config: EngineConfig) -> tuple[DecodeState, Packed[StepSummary]]:
    """Apply decisions of the host; return the state and its summary."""
    token_mask = state.token_mask.at[guidance.row, guidance.segment].set(guidance.bits, mode="drop")
    draft = state.sequence.draft.at[guidance.row, guidance.drafted].set(guidance.drafts, mode="drop")
    sequence = _close_branches(state.sequence._replace(draft=draft), guidance)
    sequence = _open_blocks(sequence, guidance)
    sequence = _begin_merges(_queue_known(sequence, guidance), guidance, config)
    cursor = sequence.cursor
    cursor = cursor._replace(finish=jnp.where(guidance.finish != RUNNING, guidance.finish, cursor.finish))
    state = state._replace(token_mask=token_mask, sequence=sequence._replace(cursor=cursor))
    return shard_state(state, config.mesh), summarise(state, config)


def _close_branches(s: SequenceState, guidance: Guidance) -> SequenceState:
    """End branches."""
    queued = s.segments.queued.at[:, 1:].set(jnp.where(guidance.emptied, 0, s.segments.queued[:, 1:]))
    return s._replace(
        segments=s.segments._replace(queued=queued),
        branches=s.branches._replace(live=s.branches.live & ~guidance.closed),
    )


def _open_blocks(s: SequenceState, guidance: Guidance) -> SequenceState:
    """Begin blocks whose leads `_queue_known` queues."""
    opens = guidance.branches > 0
    number = jnp.arange(s.branches.live.shape[1])[None]

    def cleared(array: jax.Array) -> jax.Array:
        return jnp.where(opens[:, None], jnp.zeros((), array.dtype), array)

    live = jnp.where(opens[:, None], number < guidance.branches[:, None], s.branches.live)
    segments, budget = s.segments, s.budget
    return s._replace(
        cursor=s.cursor._replace(phase=jnp.where(opens, FORK, s.cursor.phase), block=s.cursor.block + opens),
        segments=segments._replace(queued=cleared(segments.queued), sampled=cleared(segments.sampled)),
        branches=s.branches._replace(offset=cleared(s.branches.offset), live=live, closing=cleared(s.branches.closing)),
        titles=s.titles._replace(
            complete=jnp.where(opens, guidance.branches, s.titles.complete), length=cleared(s.titles.length)
        ),
        budget=budget._replace(
            block_tokens=jnp.where(opens, budget.tokens, budget.block_tokens),
            block_content=jnp.where(opens, budget.content, budget.block_content),
            exhausted=cleared(budget.exhausted),
        ),
    )


def _queue_known(s: SequenceState, guidance: Guidance) -> SequenceState:
    """Queue known tokens after the pending ones, and subtract them from the budgets."""
    segments, place = s.segments, jnp.arange(guidance.known_tokens.shape[1])
    index = guidance.row, guidance.segment
    slot = segments.queued[index][:, None] + place
    slot = jnp.where(place < guidance.size[:, None], slot, guidance.known_tokens.shape[1])
    queue = segments.queue.at[guidance.row[:, None], guidance.segment[:, None], slot].set(
        guidance.known_tokens, mode="drop"
    )
    budget = s.budget
    return s._replace(
        segments=segments._replace(
            queue=queue,
            queued=segments.queued.at[index].add(guidance.size, mode="drop"),
            sampled=segments.sampled.at[index].add(guidance.size, mode="drop"),
        ),
        budget=budget._replace(
            tokens=budget.tokens.at[guidance.row].add(-guidance.size, mode="drop"),
            content=budget.content.at[guidance.row].add(-guidance.size, mode="drop"),
        ),
    )


def _begin_merges(s: SequenceState, guidance: Guidance, config: EngineConfig) -> SequenceState:
    """Begin the merge of sequences that `merges` names; a merge without pending tokens is over."""
    merged = guidance.merges & (jnp.sum(s.segments.queued[:, 1:], axis=1) == 0)
    phase = jnp.where(merged, HELD, jnp.where(guidance.merges, MERGE, s.cursor.phase))
    position = jnp.where(merged, merge_position(s, config) - 1, s.cursor.position)
    return s._replace(cursor=s.cursor._replace(phase=phase, position=position))
