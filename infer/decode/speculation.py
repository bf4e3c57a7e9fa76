"""Speculation: draft tokens are fed after the pending token of a segment, and verified.

Draft tokens come from the draft heads of the model, or from the text: the tokens that followed the last tokens of the
segment before.

B sequences, N maximum branches, T tokens of a step, L lanes, D draft tokens of a segment, C cache slots.

A segment samples as it would without draft tokens. While the sample equals the next draft token, the segment takes it
and samples again from the logits after it. The remaining draft tokens are hidden, and later tokens fill their slots.
The random key depends on the position in the segment, so draft tokens do not change answers.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp

from aspd_jax.layout import Layout
from infer.decode.derived import Derived, derive
from infer.decode.grammar import sample_lanes
from infer.decode.inputs import Inputs, Lanes
from infer.decode.state import PARALLEL, RUNNING, DecodeState, EngineConfig, SequenceState
from infer.decode.transition import advance


def speculate(
    params: Any,
    state: DecodeState,
    derived: Derived,
    config: EngineConfig,
    inputs: Inputs,
    hidden: jax.Array,
    logits: jax.Array,
    used: int,
) -> tuple[DecodeState, jax.Array]:
    """Take the tokens sampled in a step with draft tokens, and make the next draft tokens.

    Args:
        params: parameters of the model.
        state: state after the step has fed its tokens.
        derived: derived from the state before the step.
        config: configuration of the engine.
        inputs: inputs of the step.
        hidden, logits: input and output of the head for all lanes, then for all draft tokens.
        used: C, slots of the cache that are in use.

    Returns:
        The state, and the tokens of each lane, int32 [1 + D, L]; -1: none.
    """
    state, after, taken = _verify(state, derived, config, inputs, logits)
    count = jnp.sum(taken >= 0, axis=0)
    state = hide_rejected(state, inputs, count)
    if config.drafts == "heads":
        draft = drafts_from_heads(params, state, config, inputs, hidden, count)
    else:
        draft = drafts_from_text(state, after, config, used)
    return state._replace(sequence=state.sequence._replace(draft=draft)), taken


def _verify(
    state: DecodeState, derived: Derived, config: EngineConfig, inputs: Inputs, logits: jax.Array
) -> tuple[DecodeState, Derived, jax.Array]:
    """Sample each lane until a token differs from its draft token, or no draft token is left.

    The loop runs at least once, also without lanes: what it returns is derived from the state that it returns.

    Returns:
        The state, the quantities derived from it, and the tokens of each lane, int32 [1 + D, L]; -1: none.
    """
    assert inputs.drafts is not None
    lanes, size = inputs.lanes, inputs.lanes.row.size
    first, further = logits[:size, None], logits[size:].reshape(size, config.draft_tokens, -1)
    all_logits = jnp.concatenate([first, further], axis=1)
    drafts = jnp.pad(inputs.drafts.tokens, ((0, 0), (0, 1)), constant_values=-1)
    began = lanes.row < state.sequence.cursor.phase.size

    def more(carry: tuple[SequenceState, Derived, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(carry[3]) | (carry[2] == 0)

    def body(
        carry: tuple[SequenceState, Derived, jax.Array, jax.Array, jax.Array],
    ) -> tuple[SequenceState, Derived, jax.Array, jax.Array, jax.Array]:
        sequence, derived, nth, active, taken = carry
        mask = jax.lax.dynamic_slice_in_dim(state.token_mask, nth, 1, axis=2)
        now = state._replace(sequence=sequence, token_mask=mask)
        nth_logits = jnp.take(all_logits, nth, axis=1)
        moved = lanes._replace(layout=lanes.layout._replace(position=lanes.layout.position + nth))
        tokens = sample_lanes(nth_logits, now, derived, config, moved)
        now = advance(now, derived, config, lanes, tokens, active)
        derived = derive(now.sequence, config)
        taken = taken.at[nth].set(jnp.where(active, tokens.token, -1))
        active &= (tokens.token == drafts[:, nth]) & continues(now, derived, lanes)
        return now.sequence, derived, nth + 1, active, taken

    start = state.sequence, derived, jnp.int32(0), began, jnp.full((1 + config.draft_tokens, size), -1, jnp.int32)
    sequence, derived, _, _, taken = jax.lax.while_loop(more, body, start)
    counters = sequence.counters
    counters = counters._replace(segments=counters.segments.at[lanes.row].add(began, mode="drop"))
    return state._replace(sequence=sequence._replace(counters=counters)), derived, taken


def drafts_from_text(state: DecodeState, derived: Derived, config: EngineConfig, used: int) -> jax.Array:
    """Return the draft tokens of each segment from the text, int32 [B, N, D]; -1: none.

    Find the last occurrence, in any segment of the cache, of the segment's last three tokens, pending one included, or
    else of its last two; return the tokens after it there. Index 0 of the branches also serves the serial segment.

    Args:
        state: state after the step.
        derived: quantities derived from `state`.
        config: configuration of the engine.
        used: C, slots of the cache that are in use.
    """
    s, number = state.sequence, jnp.arange(config.max_branches)[None]
    in_block = (s.cursor.phase == PARALLEL)[:, None]
    grows = (s.cursor.finish == RUNNING) & derived.grows
    alive = grows[:, None] & jnp.where(in_block, s.branches.live, number == 0)
    first = s.segments.queue[:, :, 0]
    pending = jnp.where(in_block, first[:, 1:], first[:, :1])
    in_branch = s.cursor.position[:, None] + 1 + s.branches.offset
    position = jnp.where(in_block, in_branch, s.cursor.position[:, None])[..., None]
    block = jnp.where(in_block, s.cursor.block[:, None], 0)[..., None]
    branch = jnp.where(in_block, number + 1, 0)[..., None]

    layout = Layout(*(field[:, :used] for field in state.cache.layout))
    order = jnp.lexsort((layout.position, layout.branch, layout.block, layout.sequence == 0))

    def sorted_text(array: jax.Array) -> jax.Array:
        """Return the values of all slots, segment by segment and in the order of the text, [B, 1, C]."""
        return jnp.take_along_axis(array, order, axis=1)[:, None]

    tokens, layout = sorted_text(state.cache.tokens[:, :used]), Layout(*map(sorted_text, layout))
    written = layout.sequence > 0
    segment = written & (layout.block == block) & (layout.branch == branch)

    def back(steps: int) -> jax.Array:
        """Return the token `steps` places before the pending one in its segment, [B, N, 1]; -1: none."""
        return jnp.max(jnp.where(segment & (layout.position == position - steps), tokens, -1), axis=2, keepdims=True)

    def shifted(array: jax.Array, steps: int) -> jax.Array:
        ahead = (0, steps) if steps > 0 else (-steps, 0)
        return jnp.pad(array, ((0, 0), (0, 0), ahead))[:, :, max(steps, 0) :][:, :, :used]

    def adjacent(steps: int) -> jax.Array:
        """Return whether the place `steps` further belongs to the same segment, bool [B, 1, C]."""
        alike = [shifted(field, steps) == field for field in (layout.block, layout.branch)]
        return written & shifted(written, steps) & alike[0] & alike[1]

    def before(steps: int) -> jax.Array:
        """Return the token `steps` places before each place of its segment, [B, 1, C]; -2: none."""
        return jnp.where(adjacent(-steps), shifted(tokens, -steps), -2)

    hit = alive[..., None] & adjacent(1) & (tokens == pending[..., None]) & (before(1) == back(1))
    # The latest of the longest: slots are filled in the order of time.
    time = sorted_text(jnp.broadcast_to(jnp.arange(used), order.shape))
    score = jnp.where(hit, time + used * (before(2) == back(2)), -1)
    found, best = jnp.max(score, axis=2) >= 0, jnp.argmax(score, axis=2)
    follow = best[..., None] + 1 + jnp.arange(config.draft_tokens)
    at = jnp.minimum(follow, used - 1).reshape(follow.shape[0], -1)

    def gathered(array: jax.Array) -> jax.Array:
        return jnp.take_along_axis(array[:, 0], at, axis=1).reshape(follow.shape)

    joined = jnp.cumprod(jnp.take_along_axis(adjacent(1)[:, 0], at - 1, axis=1).reshape(follow.shape), axis=2) > 0
    known = found[..., None] & (follow < used) & joined
    return jnp.where(known, gathered(tokens), -1)


def drafts_from_heads(
    params: Any, state: DecodeState, config: EngineConfig, inputs: Inputs, hidden: jax.Array, counts: jax.Array
) -> jax.Array:
    """Return the draft tokens of each segment from the draft heads, int32 [B, N, D].

    Segments that took no token in the step keep their draft tokens.

    Args:
        params: parameters of the model.
        state: state after the step.
        inputs: inputs of the step.
        hidden: input of the head for all lanes, then for all draft tokens.
        counts: number of tokens that each lane took, int32 [L].
    """
    s, lanes, size = state.sequence, inputs.lanes, inputs.lanes.row.size
    first, ahead = hidden[:size, None], hidden[size:].reshape(size, config.draft_tokens, -1)
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    last_hidden = jnp.take_along_axis(jnp.concatenate([first, ahead], axis=1), last, axis=1)[:, 0]
    own = jnp.minimum(lanes.row, s.draft.shape[0] - 1)
    adapter = state.request.adapter[own] if config.model.config.adapters else None
    pending = s.segments.queue[own, lanes.branch, 0]
    tokens = cast(Any, config.model).apply(
        {"params": params}, last_hidden, pending, config.draft_tokens, adapter, method="draft"
    )
    return s.draft.at[lanes.row, jnp.maximum(lanes.branch - 1, 0)].set(tokens, mode="drop")


def continues(state: DecodeState, derived: Derived, lanes: Lanes) -> jax.Array:
    """Return whether a lane that has just taken a token may take another one in the same step, bool [L].

    Args:
        derived: derived from `state`, which holds the token.
    """
    s = state.sequence
    branch = (lanes.row, jnp.maximum(lanes.branch - 1, 0))
    in_block = (s.cursor.phase == PARALLEL)[lanes.row]
    goes_on = s.segments.left[lanes.row, lanes.branch] > 0
    grows = goes_on & ((s.cursor.finish == RUNNING) & derived.grows)[lanes.row]
    may_go_on = in_block & s.branches.live[branch] & derived.budget.final[branch]
    return grows & jnp.where(lanes.branch == 0, ~in_block, may_go_on)


def hide_rejected(state: DecodeState, inputs: Inputs, counts: jax.Array) -> DecodeState:
    """Hide the draft tokens of a step that were not accepted in the cache, and count those fed and accepted.

    Args:
        counts: number of tokens that each lane took, int32 [L].
    """
    assert inputs.drafts is not None
    capacity, batch, lanes = state.cache.tokens.shape[1], inputs.batch, inputs.lanes
    drafted = inputs.drafts.tokens >= 0
    accepted = drafted & (jnp.arange(drafted.shape[1]) < counts[:, None] - 1)
    slot = jnp.where(drafted & ~accepted, batch.slot[inputs.drafts.indices], capacity)
    layout = state.cache.layout
    layout = layout._replace(sequence=layout.sequence.at[lanes.row[:, None], slot].set(0, mode="drop"))
    counters = state.sequence.counters

    def added(count: jax.Array, values: jax.Array) -> jax.Array:
        return count.at[lanes.row].add(jnp.sum(values, axis=1, dtype=jnp.int32), mode="drop")

    counters = counters._replace(drafted=added(counters.drafted, drafted), accepted=added(counters.accepted, accepted))
    sequence = state.sequence._replace(counters=counters)
    return state._replace(sequence=sequence, cache=state.cache._replace(layout=layout))
