"""What a pass feeds: the pending tokens of every sequence, where they stand, and which segments get a next token.

B rows, one sequence each, N branches at most, T tokens of a pass, L lanes (segments that get a next token in it), D
draft tokens of a segment, C cache slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from aspd_jax.layout import Layout
from aspd_jax.model.cache import OTHER, PLAIN_TEXT, TITLE_TEXT, Bucket, TokenBatch
from infer.decode.state import (
    FORK,
    MERGE,
    PARALLEL,
    PROMPT,
    RUNNING,
    SERIAL,
    TITLE,
    DecodeState,
    EngineConfig,
    SequenceState,
    head_lengths,
    merge_position,
)


class Pending(NamedTuple):
    """Tokens that are due, of any rows; one shape each.

    Attributes:
        tokens: ids.
        layout: `sequence` is 0 where nothing is due.
        lane: what the token that is sampled after this one goes on with: 0 the serial segment, k branch k; -1: none is.
    """

    tokens: Array
    layout: Layout
    lane: Array


class Lanes(NamedTuple):
    """Segments that get a next token, of whatever sequences.

    Attributes:
        row: the sequence; B: no lane.
        branch: 0 the serial segment, k branch k.
        layout: of the token that the next one follows, [L] each.
    """

    row: Int32[Array, " L"]
    branch: Int32[Array, " L"]
    layout: Layout


class Drafts(NamedTuple):
    """Guesses of what the lanes sample, fed with them.

    Attributes:
        at: which of the T tokens of the pass each is.
        tokens: -1: there is none.
    """

    at: Int32[Array, "L D"]
    tokens: Int32[Array, "L D"]


class Inputs(NamedTuple):
    """A pass.

    Attributes:
        batch: its tokens; logits are those of all lanes, and then of all drafts.
        lanes: segments that get a next token.
        drafts: None: the pass feeds none.
        fed: tokens that each sequence feeds.
    """

    batch: TokenBatch
    lanes: Lanes
    drafts: Drafts | None
    fed: Int32[Array, " B"]


class Widths(NamedTuple):
    """What every sequence would feed next; 0 if it is finished.

    Attributes:
        tokens: pending, drafts included; of a prompt: all that is left.
        lanes: segments that get a next token.
    """

    tokens: Int32[Array, " B"]
    lanes: Int32[Array, " B"]


def ready_branches(s: SequenceState, config: EngineConfig) -> Bool[Array, "B N"]:
    """The live branches that the next pass may feed: the first `branch_cap` that need not wait."""
    able = s.branch_live & branch_budget(s, config).known
    return able & (jnp.cumsum(able, axis=1) <= s.branch_cap[:, None])


class BranchBudget(NamedTuple):
    """Permission of each branch to take another token that is not its closing tag.

    Attributes:
        affordable: the budget of all tokens has room for it.
        readable: the budget of plain text has room for it, in reading order.
        known: whether `affordable` is final, whatever the other branches take.
    """

    affordable: Bool[Array, "B N"]
    readable: Bool[Array, "B N"]
    known: Bool[Array, "B N"]


def branch_budget(s: SequenceState, config: EngineConfig) -> BranchBudget:
    """Return which branches may go on within the budgets of their block (protocol, section 5).

    The order in which branches are decoded must not change an answer. The budget of all tokens is therefore spent in
    lockstep: whether a branch may take its s-th token is decided as if every branch took one token per pass. All of
    them have taken s - 1 tokens, as far as they are that long, those that are long enough take one now, and each of
    these still needs its closing tag. Branches behind are assumed to be long enough. Where that decides, the branch
    waits until it is known.

    The budget of plain text is spent in reading order: a branch goes on while its text and the texts of the branches
    before it, as far as they are, leave room. Tokens beyond it are dropped when the answer is read.
    """
    exists = jnp.arange(s.branch_live.shape[1])[None] < s.titles[:, None]
    taken = s.branch_sampled[:, :, None]  # of the branch whose token it is
    others = s.branch_sampled[:, None, :]
    still = (s.branch_live & exists)[:, None, :]

    before = jnp.where(still, taken, jnp.minimum(others, taken))
    now = (still | (others > taken)) & exists[:, None, :]
    spent = jnp.sum(jnp.where(exists[:, None, :], before, 0), axis=2)
    affordable = s.block_budget[:, None] - spent >= (1 + config.tags.branch_end_cost) * jnp.sum(now, axis=2)
    behind = jnp.any(still & (others < taken), axis=2)

    closed = exists & ~s.branch_live & (s.branch_sampled > 0)
    text = jnp.where(exists, s.branch_sampled - closed, 0)
    readable = jnp.cumsum(text, axis=1) < s.block_content[:, None]
    return BranchBudget(affordable, readable, affordable | ~behind)


def widths(state: DecodeState, config: EngineConfig) -> Widths:
    """See `Widths`."""
    s = state.sequence
    ready = ready_branches(s, config)
    base = _undrafted(s, config, ready)
    in_block, has_drafts = s.phase == PARALLEL, s.draft[:, :, :1] >= 0
    drafted = jnp.where(in_block, jnp.any(has_drafts & ready[..., None], axis=(1, 2)), jnp.any(has_drafts[:, 0], 1))
    drafted &= extends_alone(s)
    tokens = jnp.where(s.phase == PROMPT, s.prompt_length - state.cache.length, base)
    lanes = jnp.select([s.phase == FORK, in_block], [s.titles, base], 1)
    running = s.finish == RUNNING
    return Widths(
        jnp.where(running, tokens * (1 + drafted * s.draft.shape[2]), 0), jnp.where(running & (tokens > 0), lanes, 0)
    )


def _undrafted(s: SequenceState, config: EngineConfig, ready: jax.Array) -> jax.Array:
    """int32 [B]: tokens that are due, of a prompt and of guesses none."""
    fork = 1 + jnp.sum(head_lengths(s, config), axis=1)
    merge = s.titles + len(config.tags.parallel_end)
    of_phase = [s.phase == FORK, s.phase == PARALLEL, s.phase == MERGE, s.phase == PROMPT]
    return jnp.select(of_phase, [fork, jnp.sum(ready, axis=1), merge, 0], 1)


def extends_alone(s: SequenceState) -> jax.Array:
    """Bool [B]: sequences whose segments grow by one token a pass: no prompt, fork or merge is due."""
    return (s.phase != FORK) & (s.phase != MERGE) & (s.phase != PROMPT)


def widest(config: EngineConfig) -> int:
    """Most tokens that a sequence feeds in a pass: a fork with the longest titles, or branches with drafts."""
    tags, limit = config.tags, config.max_branches
    head = len(tags.branch_start) + config.max_title_tokens + len(config.separator)
    return max(1 + limit * head, limit * (1 + config.draft_tokens), limit + len(tags.parallel_end))


def most_lanes(config: EngineConfig, batch: int, bucket: Bucket) -> int:
    """L: one for every token where rows feed few; else so many that a fork of N branches has them, beside others."""
    if bucket.most < 2 * config.max_branches:  # `Buckets` rounds N up to a power of two
        return bucket.tokens
    return min(bucket.tokens, batch * config.max_branches, max(2 * config.max_branches, bucket.tokens // 4))


def next_inputs(state: DecodeState, config: EngineConfig, bucket: Bucket, drafting: bool) -> Inputs:
    """What the next pass feeds: everything that is due and fits, in the order of the rows; then of prompts what there
    is room for. A sequence that does not fit stands still.

    Args:
        drafting: feed the drafts of the state, too; else there must be none.
    """
    batch, capacity = state.cache.tokens.shape
    count = most_lanes(config, batch, bucket)
    fed = _share_out(state, config, bucket, count)
    ends = jnp.cumsum(fed)
    flat = jnp.arange(bucket.tokens)
    row = jnp.searchsorted(ends, flat, side="right", method="compare_all").astype(jnp.int32)
    own = jnp.minimum(row, batch - 1)
    place = flat - (ends - fed)[own]
    due = pending(state, config, own, place, bucket.most)
    layout = due.layout._replace(sequence=jnp.where(row < batch, due.layout.sequence, 0))
    real = layout.sequence > 0
    slot = state.cache.length[own] + place
    if drafting:  # accepted drafts fill the gaps of rejected ones
        nth = jnp.cumsum(real) - jnp.cumsum(jnp.pad(real, (1, 0)))[(ends - fed)[own]]
        in_gaps = _nth_empty(state, bucket.slots)[own, jnp.clip(nth - 1, 0, bucket.slots - 1)]
        slot = jnp.where(state.sequence.phase[own] == PROMPT, slot, in_gaps)
    tokens = TokenBatch(
        tokens=jnp.where(real, due.tokens, 0),
        layout=Layout(*(jnp.where(real, field, 0) for field in layout)),
        row=row,
        slot=jnp.where(real, slot, capacity),
        kind=_kinds(state.sequence.phase[own], due, config),
        adapter=state.request.adapter[own],
        logits_at=flat,
    )
    at = jnp.nonzero(real & (due.lane >= 0), size=count, fill_value=bucket.tokens)[0]
    there, at = at < bucket.tokens, jnp.minimum(at, bucket.tokens - 1)
    lanes = Lanes(jnp.where(there, row[at], batch), due.lane[at], Layout(*(field[at] for field in tokens.layout)))
    drafts, logits_at = None, at
    if drafting:
        drafts = _drafts(state.sequence, config, tokens, lanes, at)
        logits_at = jnp.concatenate([at, drafts.at.reshape(-1)])
    return Inputs(tokens._replace(logits_at=logits_at), lanes, drafts, fed)


def _share_out(state: DecodeState, config: EngineConfig, bucket: Bucket, lanes: int) -> jax.Array:
    """int32 [B]: tokens that each sequence feeds in a pass."""
    due = widths(state, config)
    is_prompt, length = state.sequence.phase == PROMPT, state.cache.length
    here = rows_of_pass(due.tokens, is_prompt, bucket)
    whole = jnp.where(here & ~is_prompt, due.tokens, 0)
    whole = jnp.where((whole <= bucket.most) & (length + whole <= bucket.slots), whole, 0)
    whole = jnp.where(_first_long(whole, bucket), whole, 0)
    of_lanes = jnp.where(whole > 0, due.lanes, 0)
    whole = jnp.where((jnp.cumsum(whole) <= bucket.tokens) & (jnp.cumsum(of_lanes) <= lanes), whole, 0)
    lanes_left = lanes - jnp.sum(jnp.where(whole > 0, due.lanes, 0))
    piece = jnp.minimum(jnp.minimum(due.tokens, bucket.most), bucket.slots - length)
    piece = jnp.where(here & is_prompt, piece, 0)
    alone = ~jnp.any(whole > bucket.per_row)
    piece = jnp.where(_first_long(piece, bucket) & alone, piece, jnp.minimum(piece, bucket.per_row))
    piece = jnp.where(jnp.cumsum(piece > 0) <= lanes_left, piece, 0)
    room = bucket.tokens - jnp.sum(whole) - (jnp.cumsum(piece) - piece)
    return whole + jnp.clip(room, 0, piece)


def rows_of_pass(due: jax.Array, is_prompt: jax.Array, bucket: Bucket) -> jax.Array:
    """Bool [B]: rows that a pass may feed; if only one, it is the first that has a prompt left, else the first in which
    anything is due.
    """
    number = jnp.arange(due.size)
    if bucket.rows > 1:
        return number < bucket.rows
    return number == only_row(due, is_prompt)


def only_row(due: Any, is_prompt: Any) -> Any:
    """Which row a pass for one row feeds; on the host (NumPy), too."""
    return ((due > 0) * (1 + is_prompt)).argmax()


def _first_long(tokens: jax.Array, bucket: Bucket) -> jax.Array:
    """Bool [B]: rows that feed no more than all may, and the first of those that would."""
    long = tokens > bucket.per_row
    return ~long | (jnp.cumsum(long) == 1)


def _nth_empty(state: DecodeState, slots: int) -> jax.Array:
    """int32 [B, slots]: the first empty slot behind the prompt, the second, …"""
    number = jnp.arange(slots)
    empty = (state.cache.layout.sequence[:, :slots] == 0) & (number >= state.sequence.prompt_length[:, None])
    return jax.vmap(lambda row: jnp.nonzero(row, size=slots, fill_value=slots)[0])(empty)


def _kinds(phase: jax.Array, due: Pending, config: EngineConfig) -> jax.Array:
    """What tokens are a part of, as `Cache.kind` says it."""
    of_phase = jnp.select([(phase == SERIAL) | (phase == PARALLEL), phase == TITLE], [PLAIN_TEXT, TITLE_TEXT], OTHER)
    return jnp.where(due.tokens == config.special.title_start, OTHER, of_phase)


def _drafts(s: SequenceState, config: EngineConfig, batch: TokenBatch, lanes: Lanes, at: jax.Array) -> Drafts:
    """The drafts of lanes at these places of a pass."""
    size, own = batch.tokens.size, jnp.minimum(lanes.row, s.phase.size - 1)
    ahead = 1 + jnp.arange(config.draft_tokens)
    behind = at[:, None] + _undrafted(s, config, ready_branches(s, config))[own][:, None] * ahead
    there = (behind < size) & extends_alone(s)[own][:, None]
    behind = jnp.minimum(behind, size - 1)
    real = there & (batch.row[behind] == lanes.row[:, None]) & (batch.layout.sequence[behind] > 0)
    return Drafts(behind, jnp.where(real, batch.tokens[behind], -1))


def branch_position(
    s: SequenceState, config: EngineConfig, row: jax.Array, branch: jax.Array, offset: jax.Array
) -> jax.Array:
    """Positions of tokens `offset` tokens into branches (from 0) of the current block of rows; any shape."""
    before = branch * s.stride[row] if config.model.config.positions == "predict" else 0
    return s.position[row] + 1 + offset + before


def pending_position(s: SequenceState, config: EngineConfig) -> jax.Array:
    """int32 [B, N]: position of the pending token of each branch."""
    number, row = jnp.arange(config.max_branches)[None], jnp.arange(s.phase.size)[:, None]
    return branch_position(s, config, row, number, s.branch_offset)


def pending(
    state: DecodeState, config: EngineConfig, row: jax.Array, place: jax.Array, most: int, every: bool = False
) -> Pending:
    """The tokens that are due, whether their sequence is finished or not.

    Args:
        row: sequences, any shape.
        place: which of the tokens of its sequence each is, from 0.
        most: no place is as large.
        every: the pending tokens of branches that have to wait, too; of a prompt, and of guesses, nothing.
    """
    s, tags, limit = state.sequence, config.tags, config.max_branches
    phase, titles = s.phase[row], s.titles[row]
    ready = s.branch_live if every else ready_branches(s, config)
    count = _undrafted(s, config, ready)[row]

    # One token: a serial segment or a title.
    tokens, position = s.token[row], s.position[row]
    branch = jnp.zeros_like(row)
    lane = jnp.where(place == 0, 0, -1)

    if most > 4:  # the smallest fork: `<|para|>` and two heads of two tokens
        heads = head_lengths(s, config)
        ends = jnp.cumsum(heads, axis=1)
        own = jnp.minimum(jnp.sum(place[..., None] - 1 >= ends[row], axis=-1), limit - 1)
        offset = place - 1 - (ends - heads)[row, own]
        length, opening = s.title_length[row, own], len(tags.branch_start)
        title = s.title_tokens[row, own, jnp.clip(offset - opening, 0, config.max_title_tokens - 1)]
        separator = jnp.asarray(config.separator or (0,), jnp.int32)
        separated = separator[jnp.clip(offset - opening - length, 0, separator.size - 1)]
        opened = jnp.asarray(tags.branch_start, jnp.int32)[jnp.clip(offset, 0, opening - 1)]
        text = jnp.where(offset < opening, opened, jnp.where(offset < opening + length, title, separated))
        is_fork, in_head = phase == FORK, (phase == FORK) & (place > 0)
        tokens = jnp.where(in_head, text, tokens)
        position = jnp.where(in_head, branch_position(s, config, row, own, offset), position)
        branch = jnp.where(in_head, own + 1, branch)
        lane = jnp.where(is_fork, jnp.where(in_head & (place == ends[row, own]), own + 1, -1), lane)

    is_parallel = phase == PARALLEL
    order = jnp.argsort(~ready, axis=1, stable=True)  # ready branches first
    nth = jnp.where(place < count, place, (place - count) % jnp.maximum(count, 1))  # of guesses: of the segment
    own = order[row, jnp.minimum(nth, limit - 1)]
    tokens = jnp.where(is_parallel, s.branch_token[row, own], tokens)
    position = jnp.where(is_parallel, branch_position(s, config, row, own, s.branch_offset[row, own]), position)
    branch = jnp.where(is_parallel, own + 1, branch)
    lane = jnp.where(is_parallel, own + 1, lane)

    if most >= 3:  # the smallest merge: two closing tags and `<|/para|>`
        is_merge, is_last = phase == MERGE, place >= titles
        ending = jnp.asarray(tags.parallel_end, jnp.int32)
        after = jnp.clip(place - titles, 0, ending.size - 1)
        own = jnp.minimum(place, limit - 1)
        in_branch = branch_position(s, config, row, own, s.branch_offset[row, own])
        tokens = jnp.where(is_merge, jnp.where(is_last, ending[after], s.branch_token[row, own]), tokens)
        last_position = merge_position(s, config)[row] + after
        position = jnp.where(is_merge, jnp.where(is_last, last_position, in_branch), position)
        branch = jnp.where(is_merge, jnp.where(is_last, 0, own + 1), branch)
        lane = jnp.where(is_merge, jnp.where(place == titles + ending.size - 1, 0, -1), lane)

    block = jnp.where(branch > 0, s.block[row], 0)
    due = place < count
    if not every and config.draft_tokens:
        ahead = jnp.clip((place - count) // jnp.maximum(count, 1), 0, config.draft_tokens - 1)
        guess = s.draft[row, jnp.maximum(branch - 1, 0), ahead]
        is_guess = ~due & extends_alone(s)[row] & (place < count * (1 + config.draft_tokens)) & (guess >= 0)
        tokens, position = jnp.where(due, tokens, guess), jnp.where(due, position, position + 1 + ahead)
        lane = jnp.where(due, lane, -1)
        due |= is_guess
    layout = Layout(position, due.astype(jnp.int32), block, branch)
    if not every:
        is_prompt = phase == PROMPT
        slot = state.cache.length[row] + place
        at = row, jnp.minimum(slot, state.cache.tokens.shape[1] - 1)
        left = is_prompt & (slot < s.prompt_length[row])
        of_prompt = Layout(*(field[at] for field in state.cache.layout))
        of_prompt = of_prompt._replace(sequence=left.astype(jnp.int32))
        layout = jax.tree.map(lambda prompt, answer: jnp.where(is_prompt, prompt, answer), of_prompt, layout)
        tokens = jnp.where(is_prompt, state.cache.tokens[at], tokens)
        lane = jnp.where(is_prompt, jnp.where(slot == s.prompt_length[row] - 1, 0, -1), lane)
    return Pending(tokens, layout, lane)
