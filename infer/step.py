"""The one pure decoding step, and the programs built from it.

B sequences, F tokens fed, W lanes, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from aspd_jax.layout import Layout
from infer.grammar import END, allowed, token_classes
from infer.sampling import sample
from infer.state import (
    FORK,
    MERGE,
    PARALLEL,
    RUNNING,
    STOP,
    DecodeState,
    Feed,
    Protocol,
    active_only,
    advance,
    plan,
    width,
)


def forward(
    params: Any, state: DecodeState, protocol: Protocol, feed: Feed, every: bool = False
) -> tuple[jax.Array, DecodeState]:
    """One forward pass over a feed.

    Returns:
        Logits, float32 [B, W, V] of the lanes (of all fed tokens, [B, F, V], if `every`), and the state
        with the tokens in its cache.
    """
    rows = None if every else feed.rows
    logits, cache = cast(Any, protocol.model.apply)({"params": params}, feed.tokens, feed.layout, state.cache, rows)
    return logits, state._replace(cache=cache)


def choose(logits: jax.Array, state: DecodeState, protocol: Protocol, feed: Feed) -> jax.Array:
    """int32 [B, W]: the next token of every lane, under the grammar; end of text closes a branch."""
    classes = jnp.asarray(token_classes(protocol))
    legal = jnp.take(allowed(state, protocol, feed), classes, axis=-1)
    token = sample(jnp.where(legal, logits, -jnp.inf), state, protocol, feed)
    ends_branch = (feed.lane > 0) & (classes[token] == END)
    return jnp.where(ends_branch, protocol.special.branch_end, token)


def step(params: Any, state: DecodeState, protocol: Protocol, size: int) -> DecodeState:
    """Feed all pending tokens of every running sequence, and sample what follows.

    Args:
        size: F, at least `width(state)` of every sequence.
    """
    feed = active_only(plan(state, protocol, size), state)
    logits, state = forward(params, state, protocol, feed)
    state = count_pass(state)
    return advance(state, protocol, feed, choose(logits, state, protocol, feed))


def count_pass(state: DecodeState) -> DecodeState:
    """Count a pass for every running sequence, by what it fed."""
    running = state.finish == RUNNING
    in_block = (state.phase == FORK) | (state.phase == PARALLEL) | (state.phase == MERGE)
    return state._replace(passes=state.passes + running, parallel_passes=state.parallel_passes + (running & in_block))


@partial(jax.jit, static_argnames=("protocol", "size"), donate_argnames="state")
def run(
    params: Any, state: DecodeState, steps: jax.Array, protocol: Protocol, size: int
) -> tuple[DecodeState, jax.Array]:
    """Up to `steps` steps on the device, as long as the widest sequence needs `size` and no less than half of it.

    Returns:
        The state, and int32 [B] of the widths needed next (0: finished).
    """

    def more(carry: tuple[DecodeState, jax.Array]) -> jax.Array:
        state, left = carry
        widest = jnp.max(width(state, protocol))
        return (left > 0) & (widest <= size) & (2 * widest > size)

    def body(carry: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
        state, left = carry
        return step(params, state, protocol, size), left - 1

    state, _ = jax.lax.while_loop(more, body, (state, steps))
    return state, width(state, protocol)


@partial(jax.jit, static_argnames=("protocol", "scripted"), donate_argnames="state")
def prefill(
    params: Any,
    state: DecodeState,
    tokens: jax.Array,
    layout: Layout,
    last: jax.Array,
    protocol: Protocol,
    scripted: bool = False,
) -> DecodeState:
    """Feed prompts, or a chunk of them, and sample the first token of the sequences whose prompt ends in it.

    Args:
        tokens: int32 [B, S], padded.
        layout: of the tokens.
        last: int32 [B], place of the last prompt token in this chunk, or -1.
        scripted: sample nothing; the caller goes on with `replay_advance`.
    """
    ends = last >= 0
    feed = Feed(tokens, layout, jnp.maximum(last, 0)[:, None], jnp.where(ends, 0, -1)[:, None])
    before = state.finish
    logits, state = forward(params, state, protocol, feed)
    if not scripted:
        state = state._replace(finish=jnp.where(ends, RUNNING, STOP))  # rows that decode already stand still
        state = advance(state, protocol, feed, choose(logits, state, protocol, feed))
    return state._replace(finish=jnp.where(ends, RUNNING if scripted else state.finish, before))


@partial(jax.jit, static_argnames="protocol")
def next_widths(state: DecodeState, protocol: Protocol) -> jax.Array:
    """`infer.state.width`, for the host."""
    return width(state, protocol)


@partial(jax.jit, static_argnames=("protocol", "size"))
def pending(state: DecodeState, protocol: Protocol, size: int) -> Feed:
    """The tokens sampled or due but not fed, of finished sequences too."""
    return plan(state, protocol, size)


@partial(jax.jit, static_argnames=("protocol", "size"), donate_argnames="state")
def replay_pass(params: Any, state: DecodeState, protocol: Protocol, size: int) -> tuple[jax.Array, Feed, DecodeState]:
    """One pass without sampling: logits of every fed token, float32 [B, F, V], the feed, and the state."""
    feed = active_only(plan(state, protocol, size), state)
    logits, state = forward(params, state, protocol, feed, every=True)
    return logits, feed, count_pass(state)


@partial(jax.jit, static_argnames="protocol", donate_argnames="state")
def replay_advance(state: DecodeState, protocol: Protocol, feed: Feed, sampled: jax.Array) -> DecodeState:
    """Take scripted tokens, one per lane, in place of sampled ones."""
    return advance(state, protocol, feed, sampled)


@partial(jax.jit, donate_argnames="state")
def stop_stretches(state: DecodeState, answers: jax.Array, branches: jax.Array) -> DecodeState:
    """End stretches in which a stop string was found: answers [B] at once, branches [B, N] by their closing tag."""
    return state._replace(
        finish=jnp.where(answers & (state.finish == RUNNING), STOP, state.finish),
        branch_closing=state.branch_closing | (branches & state.branch_live),
    )
