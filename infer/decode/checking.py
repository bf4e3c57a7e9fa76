"""Checks of draft tokens: a pass feeds many draft tokens of serial segments, and samples after each of them.

B rows, T tokens of the program, V vocabulary, W words of 32 tokens of it.

The segment samples as it would without draft tokens, but for tokens that are known: after each token from the logits,
the token mask and the random stream of its place. It takes the samples up to the first one that differs from the draft
token in its place. The draft tokens behind it are hidden, and later tokens fill their slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32, UInt32

from aspd_jax.layout import Layout
from aspd_jax.model.cache import OTHER, PLAIN_TEXT, Bucket, TokenBatch
from aspd_jax.trees import zeros
from infer.decode.decode_step import (
    StepSummary,
    TokenLog,
    count_step,
    forward,
    logits_of,
    summarise,
    taken_tokens,
)
from infer.decode.derived import derive
from infer.decode.grammar import LaneTokens, read_tokens, sample_lanes
from infer.decode.inputs import Lanes
from infer.decode.packed import Packed
from infer.decode.state import MASK_EACH, UNMASKED, DecodeState, EngineConfig, replicate, shard_state
from infer.decode.transition import advance

LANES = 16  # maximum lanes whose logits are in memory at a time


class Check(NamedTuple):
    """Tokens that serial text may go on with.

    Attributes:
        tokens: the last token of the segment, which is fed first, and the draft tokens behind it.
        masks: tokens that may follow each of these, uint32 [W] each; empty: any may.
        known: whether what follows each of them is determined: it is taken without sampling.
        last: draft token behind the last one, which is not fed; -1: none.
    """

    tokens: Sequence[int]
    masks: Sequence[np.ndarray]
    known: Sequence[bool]
    last: int = -1


class CheckArrays(NamedTuple):
    """Checks of several rows, that of the lowest row first.

    Attributes:
        row: row of each token; B: unused.
        token: token ids.
        nth: index of the token in its check.
        draft: draft token behind each token; -1: none.
        known: whether the draft token is taken without sampling.
        masked: rows in which `bits` restrict the samples.
        bits: tokens that may follow each token.
    """

    row: Int32[Array, " T"]
    token: Int32[Array, " T"]
    nth: Int32[Array, " T"]
    draft: Int32[Array, " T"]
    known: Bool[Array, " T"]
    masked: Bool[Array, " B"]
    bits: UInt32[Array, "T W"]


def check_arrays(checks: Mapping[int, Check], batch: int, words: int, size: int) -> Packed[CheckArrays]:
    """Return checks by row as arrays; `batch`: B, `words`: W, `size`: T."""
    made: Any = zeros(CheckArrays, {"T": size, "B": batch, "W": words}, np)
    made.row.fill(batch)
    made.draft.fill(-1)
    start = 0
    for row, one in sorted(checks.items()):
        place = slice(start, start := start + len(one.tokens))
        made.row[place], made.token[place], made.nth[place] = row, one.tokens, range(len(one.tokens))
        made.draft[place] = [*one.tokens[1:], one.last]
        made.known[place] = np.asarray(one.known) & (made.draft[place] >= 0)
        if one.masks:
            made.masked[row], made.bits[place] = True, one.masks
    result: Packed[CheckArrays] = Packed.pack(made)
    return result


@partial(jax.jit, static_argnames=("config", "bucket"), donate_argnames="state")
def run_checks(
    params: Any, state: DecodeState, arrays: Packed[CheckArrays], config: EngineConfig, bucket: Bucket
) -> tuple[DecodeState, Packed[StepSummary]]:
    """Feed draft tokens, and take the samples up to the first difference; the sequences wait for the host afterwards.

    Args:
        params: parameters of the model.
        state: state in which the sequences are in serial text, and have their last token pending, or none.
        arrays: tokens that fit the budgets of their sequences.
        config: configuration of the engine.
        bucket: sizes of the program.
    """
    checks = arrays.unpack()
    (batch, capacity), s, cache = state.cache.tokens.shape, state.sequence, state.cache
    own, real = jnp.minimum(checks.row, batch - 1), checks.row < batch
    fed = jnp.zeros(batch, jnp.int32).at[checks.row].add(1, mode="drop")
    checked = fed > 0
    # Before the first sample of an answer, the first token is the last one of the prompt.
    in_prompt = (checks.nth == 0) & (s.segments.sampled[own, 0] == 0)
    none = jnp.zeros_like(checks.nth)
    layout = Layout(jnp.where(real, s.cursor.position[own] + checks.nth, 0), real.astype(jnp.int32), none, none)
    slot = jnp.where(real, cache.length[own] + checks.nth, capacity)
    tokens = TokenBatch(
        tokens=checks.token,
        layout=layout,
        row=checks.row,
        slot=slot,
        kind=jnp.where(in_prompt, OTHER, PLAIN_TEXT),
        adapter=state.request.adapter[own],
        logits_at=jnp.arange(bucket.tokens),
    )
    lanes = Lanes(checks.row, none, layout, checks.nth, checks.bits)
    hidden, filled = forward(params, state, config, tokens, bucket)
    masked = s.segments.masked.at[:, 0].set(
        jnp.where(checked, jnp.where(checks.masked, MASK_EACH, UNMASKED), s.segments.masked[:, 0])
    )
    s = count_step(s._replace(segments=s.segments._replace(masked=masked)), fed)
    state = state._replace(cache=filled, sequence=s)
    chosen = _sample(params, state, config, tokens, lanes, hidden, real & ~checks.known)
    sampled = read_tokens(state, config, lanes, jnp.where(checks.known, checks.draft, chosen))

    differs = real & (sampled.token != checks.draft)
    accepted = jnp.maximum(fed - 1, 0).at[checks.row].min(jnp.where(differs, checks.nth, bucket.tokens), mode="drop")
    taken = real & (checks.nth <= accepted[own])
    hides = jnp.where(real & (checks.nth > accepted[own]), slot, capacity)
    sequence = filled.layout.sequence.at[checks.row, hides].set(0, mode="drop")
    length = jnp.where(checked, cache.length + 1 + accepted, filled.length)
    state = state._replace(cache=filled._replace(layout=filled.layout._replace(sequence=sequence), length=length))

    budget, counters = s.budget, s.counters
    s = s._replace(
        segments=s.segments._replace(sampled=s.segments.sampled.at[:, 0].add(accepted)),
        budget=budget._replace(tokens=budget.tokens - accepted, content=budget.content - accepted),
        counters=counters._replace(
            drafted=counters.drafted + jnp.where(checked, fed - 1, 0), accepted=counters.accepted + accepted
        ),
        draft=jnp.where(checked[:, None, None], -1, s.draft),
    )
    derived = derive(s, config)
    derived = derived._replace(due=derived.due.at[:, 0].set(jnp.where(checked, 1 + accepted, derived.due[:, 0])))
    last = (
        jnp.zeros(batch, jnp.int32).at[jnp.where(taken, checks.row, batch)].max(jnp.arange(bucket.tokens), mode="drop")
    )
    rows = jnp.where(checked, jnp.arange(batch), batch)
    ends = Lanes(rows, jnp.zeros_like(rows), Layout(*(field[last] for field in layout)))
    final = LaneTokens(sampled.token[last], sampled.kind[last])
    state = advance(state._replace(sequence=s), derived, config, ends, final, checked)
    left = state.sequence.segments.left
    left = left.at[:, 0].set(jnp.where(checked, 0, left[:, 0]))
    sequence = state.sequence._replace(segments=state.sequence.segments._replace(left=left))
    state = state._replace(sequence=sequence)
    entries = taken_tokens(state, lanes, jnp.where(taken, sampled.token, -1)[None])
    log = TokenLog(jnp.zeros_like(entries), jnp.int32(0)).append(entries, batch)
    return shard_state(state, config.mesh), summarise(state, config, replicate(log, config.mesh))


def _sample(
    params: Any,
    state: DecodeState,
    config: EngineConfig,
    tokens: TokenBatch,
    lanes: Lanes,
    hidden: jax.Array,
    wanted: jax.Array,
) -> Int32[Array, " T"]:
    """Return a sample after each wanted token; logits of `LANES` lanes are in memory at a time."""
    derived, size = derive(state.sequence, config), min(LANES, hidden.shape[0])
    order = jnp.argsort(~wanted, stable=True)

    def chunk(number: jax.Array, sampled: jax.Array) -> jax.Array:
        at = jax.lax.dynamic_slice_in_dim(order, number * size, size)
        logits = logits_of(params, config, tokens.adapter[at], hidden[at])
        own = jax.tree.map(lambda a: a[at], lanes)
        return sampled.at[at].set(sample_lanes(logits, state, derived, config, own).token)

    chunks = -(-jnp.count_nonzero(wanted) // size)
    sampled: jax.Array = jax.lax.fori_loop(0, chunks, chunk, jnp.zeros(hidden.shape[0], jnp.int32))
    return sampled
