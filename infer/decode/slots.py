"""What the host does to rows of the state between passes: give them to requests, read them, stop and bound them.

B rows, M some of them, N branches at most, S tokens of a prompt, C cache slots.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int32

from aspd_jax.layout import Array, Layout
from aspd_jax.model.cache import OTHER
from infer.decode.derived import derive
from infer.decode.inputs import Pending, pending_tokens, widest
from infer.decode.packed import Packed
from infer.decode.state import (
    NOTHING,
    PARALLEL,
    PROMPT,
    RUNNING,
    SERIAL,
    STOP,
    Branches,
    DecodeState,
    EngineConfig,
    RequestArrays,
    SequenceState,
    shard_state,
)

NO_CAP = (1 << 31) - 1  # `Cursor.branch_cap` where all branches may be fed


class Admission(NamedTuple):
    """A request, and where it begins.

    Attributes:
        row: that it gets; past the end: none.
        request: what was asked for.
        kept: slots of the row that the prompt begins with; they are not fed again.
        tokens: of the prompt behind them.
        layout: of these, int32 [S] each; `sequence` is 0 at padding.
        position, block: of the last prompt token, and blocks of the prompt.
        budget, content: tokens of the answer, and of its plain text.
        stride: see `SequenceState`.
    """

    row: Int32[Array, ""]
    request: RequestArrays
    kept: Int32[Array, ""]
    tokens: Int32[Array, " S"]
    layout: Layout
    position: Int32[Array, ""]
    block: Int32[Array, ""]
    budget: Int32[Array, ""]
    content: Int32[Array, ""]
    stride: Int32[Array, ""]


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def admit(state: DecodeState, new: Admission, config: EngineConfig) -> DecodeState:
    """Give a row to a new request: its prompt is laid out, and fed by the next passes.

    What the row held is forgotten, but for the first `kept` slots of its cache.
    """
    cache, capacity = state.cache, state.cache.tokens.shape[1]
    slot = jnp.where(new.layout.sequence > 0, new.kept + jnp.arange(new.tokens.size), capacity)
    kept = jnp.where(jnp.arange(capacity) < new.kept, cache.layout.sequence[new.row], 0)

    def put(old: jax.Array, values: Any) -> jax.Array:
        return old.at[new.row, slot].set(values, mode="drop")

    layout = cache.layout._replace(sequence=cache.layout.sequence.at[new.row].set(kept, mode="drop"))
    cache = cache._replace(
        tokens=put(cache.tokens, new.tokens),
        kind=put(cache.kind, OTHER),
        layout=Layout(*map(put, layout, new.layout)),
        length=cache.length.at[new.row].set(new.kept, mode="drop"),
    )

    def cleared(old: jax.Array) -> jax.Array:
        return old.at[new.row].set(jnp.zeros((), old.dtype), mode="drop")

    def assigned(part: Any, **values: Any) -> Any:
        fields = {name: getattr(part, name) for name in values}
        set_to = {
            name: old.at[new.row].set(jnp.asarray(values[name], old.dtype), mode="drop") for name, old in fields.items()
        }
        return part._replace(**set_to)

    sequence = jax.tree.map(cleared, state.sequence)
    sequence = sequence._replace(
        cursor=assigned(
            sequence.cursor,
            prompt_length=new.kept + jnp.sum(new.layout.sequence > 0),
            phase=PROMPT,
            position=new.position,
            block=new.block,
            stride=new.stride,
            hide_from=NOTHING,
            branch_cap=NO_CAP,
        ),
        budget=assigned(sequence.budget, tokens=new.budget, content=new.content),
        draft=sequence.draft.at[new.row].set(-1, mode="drop"),
    )
    request = jax.tree.map(lambda old, own: old.at[new.row].set(own, mode="drop"), state.request, new.request)
    return shard_state(state._replace(request=request, sequence=sequence, cache=cache), config.mesh)


@partial(jax.jit, static_argnames=("config", "slots"), donate_argnames="state")
def copy_slots(
    state: DecodeState, source: jax.Array, target: jax.Array, config: EngineConfig, slots: int
) -> DecodeState:
    """Copy the first so many slots of rows of the cache to others, all at once; a target past the end: nowhere."""

    def copied(array: jax.Array) -> jax.Array:
        if array.ndim == 1:
            return array.at[target].set(array[source], mode="drop")
        return array.at[target, :slots].set(array[source, :slots], mode="drop")

    return shard_state(state._replace(cache=jax.tree.map(copied, state.cache)), config.mesh)


class Snapshot(NamedTuple):
    """What the host reads of some sequences: their part of the cache, what is pending, and counts; [M, …] each."""

    tokens: Int32[Array, "M C"]
    layout: Layout
    length: Int32[Array, " M"]
    pending: Pending
    sequence: SequenceState


@partial(jax.jit, static_argnames="config")
def snapshot(state: DecodeState, rows: jax.Array, config: EngineConfig) -> Packed[Snapshot]:
    """A copy of rows, with the tokens sampled or due but not fed, of finished sequences too."""
    pending = pending_tokens(state, derive(state.sequence, state.automaton, config), config, widest(config))
    read = Snapshot(state.cache.tokens, state.cache.layout, state.cache.length, pending, state.sequence)
    return Packed.of(jax.tree.map(lambda field: field[rows], read))


@partial(jax.jit, donate_argnames="state")
def stop_segments(state: DecodeState, answers: jax.Array, branches: jax.Array) -> DecodeState:
    """End segments in which a stop string was found: answers [B] at once, branches [B, N] by their closing tag."""
    cursor, alive = state.sequence.cursor, state.sequence.branches
    cursor = cursor._replace(finish=jnp.where(answers & (cursor.finish == RUNNING), STOP, cursor.finish))
    alive = alive._replace(closing=alive.closing | (branches & alive.live))
    return state._replace(sequence=state.sequence._replace(cursor=cursor, branches=alive))


@partial(jax.jit, donate_argnames="state")
def set_branch_cap(state: DecodeState, cap: jax.Array) -> DecodeState:
    """Bound the branches that a sequence may feed in a pass; int32 [B]."""
    cursor = state.sequence.cursor._replace(branch_cap=cap)
    return state._replace(sequence=state.sequence._replace(cursor=cursor))


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def set_token_mask(
    state: DecodeState, row: jax.Array, segment: jax.Array, bits: jax.Array, config: EngineConfig
) -> DecodeState:
    """Say which tokens may come next in segments int32 [P] of rows [P], past the end: none; uint32 [P, W]."""
    token_mask = state.token_mask.at[row, segment].set(bits, mode="drop")
    return shard_state(state._replace(token_mask=token_mask), config.mesh)


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def put_bias(state: DecodeState, row: jax.Array, bias: jax.Array, config: EngineConfig) -> DecodeState:
    """Set what is added to the logits of a row, float32 [V]; a row past the end: none."""
    return shard_state(state._replace(bias=state.bias.at[row].set(bias, mode="drop")), config.mesh)


@partial(jax.jit, static_argnames=("config", "width"), donate_argnames="state")
def fill_for_timing(state: DecodeState, config: EngineConfig, width: int, length: int) -> DecodeState:
    """A state whose sequences all decode so many branches (1: serially, 0: they are at rest), behind `length` tokens
    that nobody wrote: for timing passes.
    """
    s = state.sequence
    live = jnp.broadcast_to(jnp.arange(config.max_branches) < width, s.branches.live.shape) & (width > 1)
    branches = Branches(jnp.zeros_like(s.branches.offset), live, jnp.zeros_like(live))
    plenty = jnp.full_like(s.budget.tokens, 1 << 29)
    serial = jnp.full_like(s.segments.queued[:, :1], int(width == 1))
    queued = jnp.concatenate([serial, live.astype(jnp.int32)], axis=1)
    sequence = s._replace(
        cursor=s.cursor._replace(
            phase=jnp.full_like(s.cursor.phase, PARALLEL if width > 1 else SERIAL),
            finish=jnp.full_like(s.cursor.finish, RUNNING if width else STOP),
            prompt_length=jnp.full_like(s.cursor.prompt_length, length),
            position=jnp.full_like(s.cursor.position, length),
            block=jnp.ones_like(s.cursor.block),
            branch_cap=jnp.full_like(s.cursor.branch_cap, NO_CAP),
        ),
        segments=s.segments._replace(
            queue=jnp.ones_like(s.segments.queue), queued=queued, sampled=jnp.zeros_like(s.segments.sampled)
        ),
        branches=branches,
        titles=s.titles._replace(complete=jnp.full_like(s.titles.complete, width)),
        budget=s.budget._replace(tokens=plenty, content=plenty, block_tokens=plenty, block_content=plenty),
        draft=jnp.full_like(s.draft, -1),
    )
    request = state.request._replace(max_branch_tokens=jnp.full_like(state.request.max_branch_tokens, 1 << 24))
    layout = jax.tree.map(jnp.zeros_like, state.cache.layout)
    written = jnp.arange(layout.position.shape[1]) < length
    layout = layout._replace(
        sequence=layout.sequence + written, position=layout.position + jnp.arange(written.size) * written
    )
    cache = state.cache._replace(layout=layout, length=jnp.full_like(state.cache.length, length))
    return shard_state(state._replace(request=request, sequence=sequence, cache=cache), config.mesh)
