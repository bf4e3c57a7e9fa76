"""The one pure decoding step, and the loop of steps that is a program.

B rows, one sequence each, T tokens of a pass, L lanes, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int32

from aspd_jax.layout import Array
from aspd_jax.model.cache import Bucket
from infer.decode.grammar import lane_node, legal_tokens, recognise
from infer.decode.inputs import Inputs, Lanes, next_inputs, rows_of_pass, widths
from infer.decode.packed import Packed
from infer.decode.sampling import sample
from infer.decode.speculation import goes_on, hide_rejected, look_up
from infer.decode.state import (
    FORK,
    MERGE,
    NOTHING,
    PARALLEL,
    PROMPT,
    RUNNING,
    DecodeState,
    EngineConfig,
    SequenceState,
    shard_state,
)
from infer.decode.tag_automaton import END
from infer.decode.transition import advance, by_segment


def forward(params: Any, state: DecodeState, config: EngineConfig, inputs: Inputs, bucket: Bucket) -> tuple[Any, Any]:
    """One forward pass (`Transformer.decode`): logits [L, V], and the cache."""
    model = cast(Any, config.model).clone(mesh=config.mesh)
    logits, cache = model.apply({"params": params}, inputs.batch, state.cache, bucket, method="decode")
    return logits, cache


def step(
    params: Any,
    state: DecodeState,
    config: EngineConfig,
    bucket: Bucket,
    drafting: bool = False,
) -> DecodeState:
    """Feed what is due and fits, and take what is sampled after it.

    Args:
        drafting: feed the drafts of the state, too, and look up those of the next pass; else there must be none.
    """
    inputs = next_inputs(state, config, bucket, drafting)
    logits, cache = forward(params, state, config, inputs, bucket)
    state = state._replace(cache=cache, sequence=count_pass(state.sequence, inputs.fed))
    if not drafting:
        token, closing = choose(logits, state, config, inputs.lanes)
        taken = jnp.ones_like(closing)
        state = advance(state, config, by_segment(state.sequence, inputs.lanes, token, closing, taken))
        return hide_discarded(state)
    state, count = _verify(state, config, inputs, logits)
    state = hide_discarded(hide_rejected(state, inputs, count))
    return state._replace(sequence=state.sequence._replace(draft=look_up(state, config, bucket.slots)))


def choose(logits: jax.Array, state: DecodeState, config: EngineConfig, lanes: Lanes) -> tuple[jax.Array, jax.Array]:
    """The next token of every lane, int32 [L], under the grammar.

    In a branch, end of text becomes the first token of a closing tag; second result: where it has, bool [L].
    """
    logits = jnp.where(legal_tokens(state, config, lanes), logits, -jnp.inf)
    token = scripted(sample(logits, state, config, lanes), state, lanes)
    kind, _, _ = recognise(state, lane_node(state, lanes), token)
    ends_branch = (lanes.branch > 0) & (kind == END)
    return jnp.where(ends_branch, config.tags.branch_end, token), ends_branch


def scripted(token: jax.Array, state: DecodeState, lanes: Lanes) -> jax.Array:
    """What was sampled, int32 [L], or what the request's script has in its place."""
    request, s, row, segment = state.request, state.sequence, lanes.row, lanes.branch
    before = jnp.maximum(segment - 1, 0)  # the segment before a branch in the script, and the branch among branches
    place = jnp.where(segment > 0, request.script_end[row, before] + s.branch_sampled[row, before], s.sampled[row])
    return jnp.where(place < request.script_end[row, segment], request.script[row, place], token)


def _verify(
    state: DecodeState, config: EngineConfig, inputs: Inputs, logits: jax.Array
) -> tuple[DecodeState, jax.Array]:
    """Let every lane take tokens as long as they are what was drafted, and one more.

    Returns:
        The state, and how many tokens each lane took, int32 [L].
    """
    assert inputs.drafts is not None
    lanes, size = inputs.lanes, inputs.lanes.row.size
    own, ahead = logits[:size, None], logits[size:].reshape(size, config.draft_tokens, -1)
    after = jnp.concatenate([own, ahead], axis=1)
    drafts = jnp.pad(inputs.drafts.tokens, ((0, 0), (0, 1)), constant_values=-1)
    began = lanes.row < state.sequence.phase.size

    def more(carry: tuple[SequenceState, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(carry[2])

    def body(
        carry: tuple[SequenceState, jax.Array, jax.Array, jax.Array],
    ) -> tuple[SequenceState, jax.Array, jax.Array, jax.Array]:
        sequence, nth, active, taken = carry
        now = state._replace(sequence=sequence)
        at = jnp.take(after, nth, axis=1)
        here = lanes._replace(layout=lanes.layout._replace(position=lanes.layout.position + nth))
        token, closing = choose(at, now, config, here)
        now = advance(now, config, by_segment(sequence, lanes, token, closing, active))
        active &= (token == drafts[:, nth]) & goes_on(now, config, lanes)
        return now.sequence, nth + 1, active, taken + active

    start = state.sequence, jnp.int32(0), began, began.astype(jnp.int32)
    sequence, _, _, taken = jax.lax.while_loop(more, body, start)
    segments = sequence.segments.at[lanes.row].add(began, mode="drop")
    return state._replace(sequence=sequence._replace(segments=segments)), taken


def hide_discarded(state: DecodeState) -> DecodeState:
    """The state with titles hidden in its cache that were discarded: nothing else stands at or after their position."""
    layout, s = state.cache.layout, state.sequence
    kept = jnp.where(layout.position >= s.hide_from[:, None], 0, layout.sequence)
    cache = state.cache._replace(layout=layout._replace(sequence=kept))
    return state._replace(cache=cache, sequence=s._replace(hide_from=jnp.full_like(s.hide_from, NOTHING)))


def count_pass(s: SequenceState, fed: jax.Array) -> SequenceState:
    """Count a pass for every sequence that feeds something of its answer, by what it feeds."""
    answers = (fed > 0) & (s.phase != PROMPT)
    in_block = (s.phase == FORK) | (s.phase == PARALLEL) | (s.phase == MERGE)
    return s._replace(passes=s.passes + answers, parallel_passes=s.parallel_passes + (answers & in_block))


class Limits(NamedTuple):
    """When `run` gives control back to the host.

    Attributes:
        steps: after so many steps.
        smaller: when the next pass would feed no more tokens: a smaller program is better; -1: never.
        larger: when it would feed more tokens: there is a larger one.
        join: as soon as a sequence finishes, because another waits for its place.
    """

    steps: Int32[Array, ""]
    smaller: Int32[Array, ""]
    larger: Int32[Array, ""]
    join: Bool[Array, ""]


class Report(NamedTuple):
    """What the host has to know between runs.

    Attributes:
        tokens, lanes: as in `Widths`, of the next pass.
        left: how many of `Limits.steps` are left.
        phase, finish, passes, parallel_passes, segments, accepted: as in the state.
        length: of the cache.
    """

    tokens: Int32[Array, " B"]
    lanes: Int32[Array, " B"]
    left: Int32[Array, ""]
    phase: Int32[Array, " B"]
    finish: Int32[Array, " B"]
    passes: Int32[Array, " B"]
    parallel_passes: Int32[Array, " B"]
    segments: Int32[Array, " B"]
    accepted: Int32[Array, " B"]
    length: Int32[Array, " B"]


@partial(jax.jit, static_argnames="config")
def report_of(state: DecodeState, config: EngineConfig, left: jax.Array | int = 0) -> Packed[Report]:
    """What the host has to know of a state."""
    due, s = widths(state, config), state.sequence
    counts = (s.phase, s.finish, s.passes, s.parallel_passes, s.segments, s.accepted, state.cache.length)
    return Packed.of(Report(due.tokens, due.lanes, jnp.int32(left), *counts))


@partial(jax.jit, static_argnames=("config", "bucket", "drafting"), donate_argnames="state")
def run(
    params: Any,
    state: DecodeState,
    limits: Limits,
    config: EngineConfig,
    bucket: Bucket,
    drafting: bool,
) -> tuple[DecodeState, Packed[Report]]:
    """Steps on the device, as long as this is the program for them: what is due in its rows fits, but for prompts."""
    if not drafting:
        state = state._replace(sequence=state.sequence._replace(draft=jnp.full_like(state.sequence.draft, -1)))
    running = jnp.sum(state.sequence.finish == RUNNING)
    prompts = jnp.sum(state.sequence.phase == PROMPT)

    def more(carry: tuple[DecodeState, jax.Array]) -> jax.Array:
        state, left = carry
        s, due = state.sequence, widths(state, config)
        is_prompt = s.phase == PROMPT
        here = rows_of_pass(due.tokens, is_prompt, bucket)
        tokens = jnp.where(here, due.tokens, 0)
        answers = jnp.where(is_prompt, 0, tokens)
        length = jnp.max(jnp.where(tokens > 0, state.cache.length + jnp.maximum(answers, 1), 0))
        fits = (jnp.sum(answers) <= limits.larger) & (jnp.max(answers) <= bucket.most) & (length <= bucket.slots)
        if bucket.rows > 1:
            fits &= jnp.all(here | (due.tokens == 0))
        changed = (jnp.sum(is_prompt) < prompts) | (limits.join & (jnp.sum(s.finish == RUNNING) < running))
        few = jnp.sum(tokens) <= limits.smaller
        return (left > 0) & jnp.any(tokens > 0) & fits & ~changed & ~few

    def body(carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
        state, left = carry
        return shard_state(step(params, state, config, bucket, drafting), config.mesh), left - 1

    state, left = jax.lax.while_loop(more, body, (state, jnp.int32(limits.steps)))
    return state, report_of(state, config, left)
