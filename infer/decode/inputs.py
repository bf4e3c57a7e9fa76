"""The batch of a step: the pending tokens of every sequence, their layout, and the segments that get a next token.

B rows, one sequence each, N maximum branches, M = N + 1 segments, T tokens of a step, L lanes (segments that get a next
token in it), D draft tokens of a segment, C cache slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32, UInt32

from aspd_jax.layout import Layout
from aspd_jax.model.cache import OTHER, PLAIN_TEXT, TITLE_TEXT, Bucket, TokenBatch
from infer.decode.derived import Derived, derive
from infer.decode.state import (
    A_NUMBER,
    A_TITLE,
    FORK,
    MERGE,
    PARALLEL,
    PROMPT,
    RUNNING,
    SERIAL,
    DecodeState,
    EngineConfig,
)


class Pending(NamedTuple):
    """Pending tokens of any rows; arrays of one shape.

    Attributes:
        tokens: token ids.
        layout: layout; `sequence` is 0 where no token is pending.
        lane: segment that samples the token after this one (0 serial, k branch k); -1: none.
    """

    tokens: Array
    layout: Layout
    lane: Array


class Lanes(NamedTuple):
    """Segments that get a next token, of any sequences.

    Attributes:
        row: row of the sequence; B: unused lane.
        branch: 0 the serial segment, k branch k.
        layout: layout of the token that the next one follows, int32 [L] per field.
        ahead: draft tokens of the segment before the next one, which count as sampled; None: none.
        bits: tokens that may come next in a masked segment, uint32 [L, W]; None: those of `DecodeState.token_mask`.
    """

    row: Int32[Array, " L"]
    branch: Int32[Array, " L"]
    layout: Layout
    ahead: Int32[Array, " L"] | None = None
    bits: UInt32[Array, "L W"] | None = None

    def sampled(self, state: DecodeState) -> Int32[Array, " L"]:
        """Return the tokens sampled in each segment before the next one."""
        before = state.sequence.segments.sampled[self.row, self.branch]
        return before if self.ahead is None else before + self.ahead


class Drafts(NamedTuple):
    """Draft tokens that the lanes may sample, fed with their pending tokens.

    Attributes:
        indices: indices of the draft tokens in the step.
        tokens: token ids; -1: none.
    """

    indices: Int32[Array, "L D"]
    tokens: Int32[Array, "L D"]


class Inputs(NamedTuple):
    """The inputs of a step.

    Attributes:
        batch: tokens of the step; `logits_at` lists the lanes, then the draft tokens.
        lanes: segments that get a next token.
        drafts: draft tokens; None: the step feeds none.
        fed: tokens that each sequence feeds.
    """

    batch: TokenBatch
    lanes: Lanes
    drafts: Drafts | None
    fed: Int32[Array, " B"]


class Widths(NamedTuple):
    """Tokens and lanes of every sequence in the next step; 0 if it is finished.

    Attributes:
        tokens: due tokens and draft tokens; for a prompt, all remaining tokens.
        lanes: segments that get a next token.
    """

    tokens: Int32[Array, " B"]
    lanes: Int32[Array, " B"]


class StepPlan(NamedTuple):
    """Quantities of the next step that follow from its state.

    Attributes:
        derived: due tokens, budgets and positions.
        need: tokens and lanes of every sequence.
        rows: rows that the step may feed.
    """

    derived: Derived
    need: Widths
    rows: Bool[Array, " B"]


def plan_step(state: DecodeState, config: EngineConfig, bucket: Bucket) -> StepPlan:
    """Return the plan of the next step.

    Args:
        state: state before the step.
        config: configuration of the engine.
        bucket: sizes of the program.
    """
    derived = derive(state.sequence, config)
    need = widths(state, derived)
    is_prompt = state.sequence.cursor.phase == PROMPT
    return StepPlan(derived, need, rows_of_step(need.tokens, is_prompt, bucket))


def widths(state: DecodeState, derived: Derived) -> Widths:
    """Return the tokens and lanes that each sequence needs in the next step."""
    s, is_prompt = state.sequence, state.sequence.cursor.phase == PROMPT
    first = s.draft[:, :, :1]  # index 0 holds the drafts of branch 1 or of the serial segment
    has_draft = jnp.concatenate([first[:, :1], first], axis=1) >= 0
    follows = jnp.any(has_draft & derived.samples[..., None], axis=(1, 2)) & derived.grows
    due = jnp.sum(derived.due, axis=1) * (1 + follows * s.draft.shape[2])
    tokens = jnp.where(is_prompt, s.cursor.known_length - state.cache.length, due)
    lanes = jnp.where(is_prompt, s.cursor.rule != 0, jnp.sum(derived.samples, axis=1))
    running = s.cursor.finish == RUNNING
    return Widths(jnp.where(running, tokens, 0), jnp.where(running & (tokens > 0), lanes, 0))


def widest(config: EngineConfig) -> int:
    """Return the maximum tokens of a sequence in a step: a fork with the longest titles, or branches with drafts."""
    limit, drafted = config.max_branches, config.max_branches * (1 + config.draft_tokens)
    return max(2 + limit * config.longest_head, drafted, limit + 1)


def max_lanes(config: EngineConfig, batch: int, bucket: Bucket) -> int:
    """Return L: `bucket.tokens`, capped when rows feed many tokens; at least 2 N for a fork beside other rows."""
    if bucket.max_per_row < 2 * config.max_branches:  # `Buckets` rounds N up to a power of two
        return bucket.tokens
    return min(bucket.tokens, batch * config.max_branches, max(2 * config.max_branches, bucket.tokens // 4))


def next_inputs(state: DecodeState, plan: StepPlan, config: EngineConfig, bucket: Bucket, drafting: bool) -> Inputs:
    """Return the inputs of a step: all due tokens that fit (`share_tokens`), in the order of the rows.

    A sequence whose tokens do not fit feeds nothing.

    Args:
        state: state before the step.
        plan: plan of the step.
        config: configuration of the engine.
        bucket: sizes of the program.
        drafting: whether to feed the draft tokens of the state; if false, the state has none.
    """
    derived = plan.derived
    batch, capacity = state.cache.tokens.shape
    count = max_lanes(config, batch, bucket)
    fed = share_tokens(state, plan.need, plan.rows, bucket, count)
    ends = jnp.cumsum(fed)
    flat = jnp.arange(bucket.tokens)
    row = jnp.searchsorted(ends, flat, side="right", method="compare_all").astype(jnp.int32)
    own = jnp.minimum(row, batch - 1)
    place = flat - (ends - fed)[own]
    pending = with_prompt(state, own, place, due_tokens(state, derived, config, own, place))
    real = (pending.layout.sequence > 0) & (row < batch)
    slot = state.cache.length[own] + place
    if drafting:  # accepted draft tokens fill the slots of rejected ones
        nth = jnp.cumsum(real) - jnp.cumsum(jnp.pad(real, (1, 0)))[(ends - fed)[own]]
        in_gaps = _empty_slots(state, bucket.slots)[own, jnp.clip(nth - 1, 0, bucket.slots - 1)]
        slot = jnp.where(state.sequence.cursor.phase[own] == PROMPT, slot, in_gaps)
    tokens = TokenBatch(
        tokens=jnp.where(real, pending.tokens, 0),
        layout=Layout(*(jnp.where(real, field, 0) for field in pending.layout)),
        row=row,
        slot=jnp.where(real, slot, capacity),
        kind=_kinds(state, own, slot, pending, config),
        adapter=state.request.adapter[own],
        logits_at=flat,
    )
    index = jnp.nonzero(real & (pending.lane >= 0), size=count, fill_value=bucket.tokens)[0]
    used, index = index < bucket.tokens, jnp.minimum(index, bucket.tokens - 1)
    layout = Layout(*(field[index] for field in tokens.layout))
    lanes = Lanes(jnp.where(used, row[index], batch), pending.lane[index], layout)
    drafts, logits_at = None, index
    if drafting:
        drafts = _drafts(derived, config, tokens, lanes, index)
        logits_at = jnp.concatenate([index, drafts.indices.reshape(-1)])
    return Inputs(tokens._replace(logits_at=logits_at), lanes, drafts, fed)


def share_tokens(state: DecodeState, need: Widths, selected: jax.Array, bucket: Bucket, lanes: int) -> jax.Array:
    """Return the tokens that each sequence feeds in a step, int32 [B].

    The due tokens of an answer are fed together or wait; a prompt may be fed in part. Where not all of them fit,
    answers come before prompts, and requests that were admitted earlier come first.

    Args:
        state: state before the step.
        need: tokens and lanes of every sequence.
        selected: rows that the step may feed, bool [B].
        bucket: sizes of the program.
        lanes: L.
    """
    order = jnp.argsort(state.sequence.cursor.arrival)
    is_prompt, length = (state.sequence.cursor.phase == PROMPT)[order], state.cache.length[order]
    by_age = Widths(need.tokens[order], need.lanes[order])
    shares = _share_in_order(is_prompt, length, by_age, selected[order], bucket, lanes)
    return jnp.zeros_like(shares).at[order].set(shares)


def _share_in_order(
    is_prompt: jax.Array, length: jax.Array, need: Widths, selected: jax.Array, bucket: Bucket, lanes: int
) -> jax.Array:
    """Return the tokens of each sequence, int32 [B]; all arguments have the sequences that come first in front."""
    # Answers: all due tokens, if they fit the row, beside at most one longer row, and then what is left of the step.
    whole = jnp.where(selected & ~is_prompt, need.tokens, 0)
    whole = jnp.where((whole <= bucket.max_per_row) & (length + whole <= bucket.slots), whole, 0)
    whole = jnp.where(_first_long(whole, bucket), whole, 0)
    whole_lanes = jnp.where(whole > 0, need.lanes, 0)
    whole = jnp.where((jnp.cumsum(whole) <= bucket.tokens) & (jnp.cumsum(whole_lanes) <= lanes), whole, 0)
    # Prompts: parts of what is left, one of them longer if no answer is.
    lanes_left = lanes - jnp.sum(jnp.where(whole > 0, need.lanes, 0))
    part = jnp.minimum(jnp.minimum(need.tokens, bucket.max_per_row), bucket.slots - length)
    part = jnp.where(selected & is_prompt, part, 0)
    alone = ~jnp.any(whole > bucket.per_row)
    part = jnp.where(_first_long(part, bucket) & alone, part, jnp.minimum(part, bucket.per_row))
    part = jnp.where(jnp.cumsum(part > 0) <= lanes_left, part, 0)
    left = bucket.tokens - jnp.sum(whole) - (jnp.cumsum(part) - part)
    return whole + jnp.clip(left, 0, part)


def rows_of_step(need: jax.Array, is_prompt: jax.Array, bucket: Bucket) -> jax.Array:
    """Return the rows that a step may feed, bool [B]; a bucket of one row serves `only_row`."""
    number = jnp.arange(need.size)
    if bucket.rows > 1:
        return number < bucket.rows
    return number == only_row(need, is_prompt)


def only_row(need: Any, is_prompt: Any) -> Any:
    """Return the row that a step of one row feeds: the first with a prompt, else the first with due tokens.

    Args:
        need: tokens that each row would feed, int32 [B], of NumPy or JAX.
        is_prompt: whether a row feeds its prompt, bool [B].
    """
    return ((need > 0) * (1 + is_prompt)).argmax()


def _first_long(tokens: jax.Array, bucket: Bucket) -> jax.Array:
    """Return the rows that feed at most `per_row` tokens, and the first of those that feed more; bool [B]."""
    long = tokens > bucket.per_row
    return ~long | (jnp.cumsum(long) == 1)


def _empty_slots(state: DecodeState, slots: int) -> jax.Array:
    """Return the empty slots after each prompt in ascending order, int32 [B, slots]; `slots` after the last one."""
    number = jnp.arange(slots)
    is_empty = state.cache.layout.sequence[:, :slots] == 0
    is_empty &= number >= state.sequence.cursor.prompt_length[:, None]
    return jax.vmap(lambda row: jnp.nonzero(row, size=slots, fill_value=slots)[0])(is_empty)


def _kinds(state: DecodeState, row: jax.Array, slot: jax.Array, pending: Pending, config: EngineConfig) -> jax.Array:
    """Return the kinds of tokens in slots of rows, as `Cache.kind` has them."""
    phase, writes = state.sequence.cursor.phase[row], state.sequence.cursor.writes[row]
    text = jnp.where((writes == A_TITLE) & (not config.form.leads), TITLE_TEXT, PLAIN_TEXT)
    serial = jnp.where(writes == A_NUMBER, OTHER, text)
    appended = (phase == PROMPT) & (slot >= state.sequence.cursor.prompt_length[row])
    kind = jnp.select([phase == SERIAL, (phase == PARALLEL) | appended], [serial, PLAIN_TEXT], OTHER)
    tags = (pending.tokens == config.special.title_start) | (pending.tokens == config.special.title_end)
    return jnp.where(tags, OTHER, kind)


def _drafts(derived: Derived, config: EngineConfig, batch: TokenBatch, lanes: Lanes, index: jax.Array) -> Drafts:
    """Return the draft tokens of lanes; `index` holds the indices of their pending tokens in the step."""
    size, own = batch.tokens.size, jnp.minimum(lanes.row, derived.grows.size - 1)
    ahead = 1 + jnp.arange(config.draft_tokens)
    indices = index[:, None] + jnp.sum(derived.due, axis=1)[own][:, None] * ahead
    inside = (indices < size) & derived.grows[own][:, None]
    indices = jnp.minimum(indices, size - 1)
    real = inside & (batch.row[indices] == lanes.row[:, None]) & (batch.layout.sequence[indices] > 0)
    return Drafts(indices, jnp.where(real, batch.tokens[indices], -1))


def due_tokens(state: DecodeState, derived: Derived, config: EngineConfig, row: jax.Array, place: jax.Array) -> Pending:
    """Return the due tokens of answers, segment by segment, then the first draft token of each segment, and so on.

    Args:
        row: rows, any shape.
        place: index of each token among those of its sequence, from 0.
    """
    s = state.sequence
    due = derived.due
    count = jnp.sum(due, axis=1)[row]
    is_due = place < count
    segment, index = _segment_at(due, row, jnp.where(is_due, place, (place - count) % jnp.maximum(count, 1)))
    tokens = s.segments.queue[row, segment, jnp.clip(index, 0, config.max_queued - 1)]
    position = _positions(state, derived, row, segment, index)
    is_last = index == due[row, segment] - 1
    lane = jnp.where(is_due & is_last & derived.samples[row, segment], segment, -1)
    if config.draft_tokens:
        ahead = jnp.clip((place - count) // jnp.maximum(count, 1), 0, config.draft_tokens - 1)
        draft = s.draft[row, jnp.maximum(segment - 1, 0), ahead]
        is_draft = ~is_due & derived.grows[row] & (place < count * (1 + config.draft_tokens)) & (draft >= 0)
        is_draft &= ahead + 2 <= s.segments.left[row, segment]  # the segment waits after `left` tokens
        tokens, position = jnp.where(is_due, tokens, draft), jnp.where(is_due, position, position + 1 + ahead)
        is_due |= is_draft
    block = jnp.where(segment > 0, s.cursor.block[row], 0)
    return Pending(tokens, Layout(position, is_due.astype(jnp.int32), block, segment), lane)


def _segment_at(due: jax.Array, row: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the segments of tokens, from their places in the sequence, and their indices in the queues."""
    ends = jnp.cumsum(due, axis=1)
    segment = jnp.minimum(jnp.sum(place[..., None] >= ends[row], axis=-1), due.shape[1] - 1)
    return segment, place - (ends - due)[row, segment]


def _positions(state: DecodeState, derived: Derived, row: jax.Array, segment: jax.Array, index: jax.Array) -> jax.Array:
    """Return the positions of pending tokens."""
    s, branch = state.sequence, jnp.maximum(segment - 1, 0)
    # In a fork, the position of the cursor is that of the last serial token.
    before = jnp.where(s.cursor.phase == FORK, s.segments.queued[:, 0] - 1, 0)
    first = jnp.where(s.cursor.phase == MERGE, derived.merge_position, s.cursor.position - before)
    in_branch = s.cursor.position[row] + 1 + s.branches.offset[row, branch]
    return jnp.where(segment > 0, in_branch, first[row]) + index


def with_prompt(state: DecodeState, row: jax.Array, place: jax.Array, pending: Pending) -> Pending:
    """Return `pending`, with prompt tokens in rows that feed their prompt."""
    cursor, cache = state.sequence.cursor, state.cache
    is_prompt, slot = cursor.phase[row] == PROMPT, cache.length[row] + place
    index = row, jnp.minimum(slot, cache.tokens.shape[1] - 1)
    left = is_prompt & (slot < cursor.known_length[row])
    layout = Layout(*(field[index] for field in cache.layout))._replace(sequence=left.astype(jnp.int32))
    samples = (slot == cursor.known_length[row] - 1) & (cursor.rule[row] != 0)
    prompt = Pending(cache.tokens[index], layout, jnp.where(samples, 0, -1))
    chosen: Pending = jax.tree.map(lambda own, other: jnp.where(is_prompt, own, other), prompt, pending)
    return chosen
