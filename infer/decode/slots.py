"""Operations of the host on rows of the state between steps: admission, copies, stops and limits.

B rows, N maximum branches, S tokens of a prompt, C cache slots, V vocabulary, W words of 32 tokens of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32, UInt32

from aspd_jax.layout import Array, Layout
from aspd_jax.model.cache import OTHER
from infer.decode.decode_step import StepSummary, summarise
from infer.decode.packed import Packed
from infer.decode.state import (
    NO_LIMIT,
    PARALLEL,
    PROMPT,
    RUNNING,
    SERIAL,
    STOP,
    DecodeState,
    EngineConfig,
    RequestArrays,
    shard_state,
)
from infer.decode.token_classes import ANY_TEXT


class Admission(NamedTuple):
    """A request that gets a row.

    Attributes:
        row: index of the cache row; out of range means none.
        request: parameters of the request, scalars.
        prefix_slots: number of slots of the row that hold a prefix of the prompt, which is not fed again.
        tokens: token ids of the prompt after the prefix.
        layout: layout of these tokens, int32 [S] per field; `sequence` is 0 at padding.
        position: position of the last prompt token.
        block: number of blocks in the prompt.
        budget: maximum tokens of the answer.
        content: maximum tokens of its plain text.
        arrival, rule: see `Cursor`.
        stops: classes of tokens after which serial text waits (`Segments.stops`).
        stop_tokens: see `DecodeState`, uint32 [W].
        bias: see `DecodeState`, float32 [V].
    """

    row: Int32[Array, ""]
    request: RequestArrays
    prefix_slots: Int32[Array, ""]
    tokens: Int32[Array, " S"]
    layout: Layout
    position: Int32[Array, ""]
    block: Int32[Array, ""]
    budget: Int32[Array, ""]
    content: Int32[Array, ""]
    arrival: Int32[Array, ""]
    rule: Int32[Array, ""]
    stops: Int32[Array, ""]
    stop_tokens: UInt32[Array, " W"]
    bias: Float32[Array, " V"]


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def admit(state: DecodeState, packed: Packed[Admission], config: EngineConfig) -> DecodeState:
    """Give a row to a request and lay out its prompt, which the next steps feed.

    The previous contents of the row are dropped, except for the first `prefix_slots` slots.
    """
    new, cache, capacity = packed.unpack(), state.cache, state.cache.tokens.shape[1]
    slot = jnp.where(new.layout.sequence > 0, new.prefix_slots + jnp.arange(new.tokens.size), capacity)
    cached = jnp.where(jnp.arange(capacity) < new.prefix_slots, cache.layout.sequence[new.row], 0)

    def put(old: jax.Array, values: Any) -> jax.Array:
        return old.at[new.row, slot].set(values, mode="drop")

    layout = cache.layout._replace(sequence=cache.layout.sequence.at[new.row].set(cached, mode="drop"))
    cache = cache._replace(
        tokens=put(cache.tokens, new.tokens),
        kind=put(cache.kind, OTHER),
        layout=Layout(*map(put, layout, new.layout)),
        length=cache.length.at[new.row].set(new.prefix_slots, mode="drop"),
    )

    length = new.prefix_slots + jnp.sum(new.layout.sequence > 0)

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
            prompt_length=length,
            known_length=length,
            phase=PROMPT,
            position=new.position,
            block=new.block,
            arrival=new.arrival,
            rule=new.rule,
        ),
        segments=sequence.segments._replace(
            stops=sequence.segments.stops.at[new.row, 0].set(new.stops, mode="drop"),
            left=sequence.segments.left.at[new.row].set(NO_LIMIT, mode="drop"),
        ),
        budget=assigned(sequence.budget, tokens=new.budget, content=new.content),
        draft=sequence.draft.at[new.row].set(-1, mode="drop"),
    )
    request = jax.tree.map(lambda old, own: old.at[new.row].set(own, mode="drop"), state.request, new.request)
    stop_tokens = state.stop_tokens.at[new.row].set(new.stop_tokens, mode="drop")
    bias = state.bias.at[new.row].set(new.bias, mode="drop")
    state = state._replace(request=request, sequence=sequence, cache=cache, stop_tokens=stop_tokens, bias=bias)
    return shard_state(state, config.mesh)


class KnownText(NamedTuple):
    """Known serial text of a row.

    Attributes:
        row: index of the cache row; out of range means none.
        size: number of tokens.
        tokens: token ids; padding behind the first `size`.
    """

    row: Int32[Array, ""]
    size: Int32[Array, ""]
    tokens: Int32[Array, " S"]

    @classmethod
    def pack(cls, row: int, tokens: Sequence[int], size: int) -> Packed[KnownText]:
        """Return text for `append_text`; `size`: S."""
        padded = np.pad(np.asarray(tokens, np.int32), (0, size - len(tokens)))
        made: Any = cls(np.int32(row), np.int32(len(tokens)), padded)
        return Packed.pack(made)


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def append_text(
    state: DecodeState, text: Packed[KnownText], config: EngineConfig
) -> tuple[DecodeState, Packed[StepSummary]]:
    """Append known serial text to a row that has no pending tokens; the next steps feed it as they feed a prompt.

    Returns the state and its summary.
    """
    row, size, tokens = text.unpack()
    cache, cursor, number = state.cache, state.sequence.cursor, jnp.arange(tokens.size)
    start, position = cache.length.at[row].get(mode="clip"), cursor.position.at[row].get(mode="clip")
    slot = jnp.where(number < size, start + number, cache.tokens.shape[1])
    one, none = jnp.ones_like(tokens), jnp.zeros_like(tokens)

    def put(old: jax.Array, values: jax.Array) -> jax.Array:
        return old.at[row, slot].set(values, mode="drop")

    def assigned(old: jax.Array, value: jax.Array) -> jax.Array:
        return old.at[row].set(value, mode="drop")

    layout = Layout(*map(put, cache.layout, Layout(position + number, one, none, none)))
    cursor = cursor._replace(
        phase=assigned(cursor.phase, jnp.int32(PROMPT)),
        position=assigned(cursor.position, position + size - 1),
        known_length=assigned(cursor.known_length, start + size),
    )
    cache = cache._replace(tokens=put(cache.tokens, tokens), layout=layout)
    state = state._replace(sequence=state.sequence._replace(cursor=cursor), cache=cache)
    return shard_state(state, config.mesh), summarise(state, config)


@partial(jax.jit, static_argnames=("config", "slots"), donate_argnames="state")
def copy_slots(
    state: DecodeState, source: jax.Array, target: jax.Array, config: EngineConfig, slots: int
) -> DecodeState:
    """Copy the first `slots` slots of a cache row to another row."""

    def copied(array: jax.Array) -> jax.Array:
        if array.ndim == 1:
            return array.at[target].set(array[source])
        return array.at[target, :slots].set(array[source, :slots])

    return shard_state(state._replace(cache=jax.tree.map(copied, state.cache)), config.mesh)


class RowContents(NamedTuple):
    """Tokens of a cache row and their layout, by slot, and number of slots in use."""

    tokens: Int32[Array, " C"]
    layout: Layout
    length: Int32[Array, ""]


@jax.jit
def row_contents(state: DecodeState, row: jax.Array) -> Packed[RowContents]:
    """Copy the contents of a cache row."""
    cache = state.cache
    return Packed.pack(jax.tree.map(lambda field: field[row], RowContents(cache.tokens, cache.layout, cache.length)))


@partial(jax.jit, static_argnames=("config", "width"), donate_argnames="state")
def fill_for_timing(state: DecodeState, config: EngineConfig, width: int, length: int) -> DecodeState:
    """Fill the state for timing: every sequence decodes after `length` arbitrary tokens.

    Args:
        width: branches of every sequence; 1: serial text; 0: all sequences are finished.
        length: tokens of the cache of every sequence.
    """
    s = jax.tree.map(jnp.zeros_like, state.sequence)
    live = s.branches.live | ((jnp.arange(config.max_branches) < width) & (width > 1))
    serial = jnp.full_like(s.segments.queued[:, :1], int(width == 1))
    plenty = s.budget.tokens + (1 << 29)
    sequence = s._replace(
        cursor=s.cursor._replace(
            phase=s.cursor.phase + (PARALLEL if width > 1 else SERIAL),
            finish=s.cursor.finish + (RUNNING if width else STOP),
            prompt_length=s.cursor.prompt_length + length,
            known_length=s.cursor.known_length + length,
            position=s.cursor.position + length,
            block=s.cursor.block + 1,
            rule=s.cursor.rule + ANY_TEXT,
        ),
        segments=s.segments._replace(
            queue=s.segments.queue + 1,
            queued=jnp.concatenate([serial, live.astype(jnp.int32)], axis=1),
            left=s.segments.left + NO_LIMIT,
        ),
        branches=s.branches._replace(number=s.branches.number + width, live=live),
        budget=s.budget._replace(tokens=plenty, content=plenty, block_tokens=plenty, block_content=plenty),
        draft=s.draft - 1,
    )
    request = state.request._replace(max_branch_tokens=jnp.full_like(state.request.max_branch_tokens, 1 << 24))
    layout = jax.tree.map(jnp.zeros_like, state.cache.layout)
    written = jnp.arange(layout.position.shape[1]) < length
    layout = layout._replace(
        sequence=layout.sequence + written, position=layout.position + jnp.arange(written.size) * written
    )
    cache = state.cache._replace(layout=layout, length=jnp.full_like(state.cache.length, length))
    return shard_state(state._replace(request=request, sequence=sequence, cache=cache), config.mesh)
