"""What the host does to rows of the state between passes: give them to requests, read them, stop and bound them.

B sequences, M some of them, N branches at most.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from aspd_jax.layout import Layout
from infer.feed import Feed, plan
from infer.packed import Packed
from infer.state import NOTHING, RUNNING, STOP, DecodeState, Protocol, Request, take


class Admission(NamedTuple):
    """Where new requests begin; int32 [M] each.

    Attributes:
        kept: slots of the row's cache that the prompt begins with; they are not fed again.
        prompt_length: slots that are in use when the prompt has been fed.
        position, block: of the last prompt token, and blocks of the prompt.
        budget, content: tokens of the answer, and of its plain text.
        stride: see `DecodeState`.
    """

    kept: Any
    prompt_length: Any
    position: Any
    block: Any
    budget: Any
    content: Any
    stride: Any


@partial(jax.jit, donate_argnames="state")
def admit(state: DecodeState, rows: jax.Array, request: Request, begin: Admission) -> DecodeState:
    """Give rows [M] to new requests; they stand still until their prompt has been fed. Rows past the end are dropped.

    What the rows held is forgotten, but for the first `begin.kept` slots of their cache.
    """
    cache = state.cache
    kept = jnp.arange(cache.tokens.shape[1])[None] < begin.kept[:, None]
    sequence = jnp.where(kept, jnp.take(cache.layout.sequence, rows, axis=0, mode="clip"), 0)
    cache = cache._replace(
        length=cache.length.at[rows].set(begin.kept, mode="drop"),
        layout=cache.layout._replace(sequence=cache.layout.sequence.at[rows].set(sequence, mode="drop")),
    )
    asked = Request(*(old.at[rows].set(new, mode="drop") for old, new in zip(state.request, request, strict=True)))
    initial = {
        "finish": STOP,
        "prompt_length": begin.prompt_length,
        "position": begin.position,
        "block": begin.block,
        "remaining": begin.budget,
        "content": begin.content,
        "hide_from": NOTHING,
        "stride": begin.stride,
        "draft": -1,
    }
    fresh: dict[str, Any] = {
        name: old.at[rows].set(jnp.asarray(initial.get(name, 0), old.dtype), mode="drop")
        for name, old in state._asdict().items()
        if name not in ("cache", "request", "recogniser")
    }
    return state._replace(**fresh)._replace(cache=cache, request=asked)


@partial(jax.jit, donate_argnames="state")
def copy_row(state: DecodeState, source: jax.Array, target: jax.Array) -> DecodeState:
    """Copy what is in the cache of one row to another."""

    def copied(array: jax.Array) -> jax.Array:
        return array.at[target].set(array[source])

    return state._replace(cache=jax.tree.map(copied, state.cache))


class Snapshot(NamedTuple):
    """What the host reads of some sequences: their part of the cache, what is pending, and counts; [M, …] each."""

    tokens: jax.Array
    layout: Layout
    length: jax.Array
    pending: Feed
    state: DecodeState


@partial(jax.jit, static_argnames=("protocol", "size"))
def snapshot(state: DecodeState, rows: jax.Array, protocol: Protocol, size: int) -> Packed[Snapshot]:
    """A copy of rows, with the tokens sampled or due but not fed, of finished sequences too."""
    some, nothing = take(state, rows), cast(Any, ())
    feed = plan(some, protocol, size, everything=True)
    cache = some.cache
    rest = some._replace(cache=nothing, request=nothing, recogniser=nothing)
    return Packed.of(Snapshot(cache.tokens, cache.layout, cache.length, feed, rest))


@partial(jax.jit, donate_argnames="state")
def stop_stretches(state: DecodeState, answers: jax.Array, branches: jax.Array) -> DecodeState:
    """End stretches in which a stop string was found: answers [B] at once, branches [B, N] by their closing tag."""
    return state._replace(
        finish=jnp.where(answers & (state.finish == RUNNING), STOP, state.finish),
        branch_closing=state.branch_closing | (branches & state.branch_live),
    )


@partial(jax.jit, donate_argnames="state")
def set_branch_cap(state: DecodeState, cap: jax.Array) -> DecodeState:
    """Bound the branches that a sequence may feed in a pass; int32 [B]."""
    return state._replace(request=state.request._replace(branch_cap=cap))
