"""The key-value cache: one preallocated pytree, written in place and never moved (protocol, section 5).

B rows (sequences) of the cache, C slots of a row, T tokens of a step, L tokens that get logits, K kv heads, H head
size; R rows and F tokens per row of a `RowView`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float, Int32

from aspd_jax.layout import Layout
from aspd_jax.model.config import ModelConfig
from aspd_jax.sharding import named_sharding

# Kind of a token: OTHER is a prompt, a tag or the head of a branch; the rest are plain text and titles of an answer.
OTHER, PLAIN_TEXT, TITLE_TEXT = 0, 1, 2


class LayerCache(NamedTuple):
    """Keys and values of one layer.

    Attributes:
        key: rotated keys, in the dtype of the model.
        value: values, in the dtype of the model.
    """

    key: Float[Array, "B C K H"]
    value: Float[Array, "B C K H"]


class Cache(NamedTuple):
    """Keys and values of all layers, and the tokens that they belong to.

    Attributes:
        layers: keys and values, one entry per layer.
        tokens: token ids.
        kind: kind of each token: PLAIN_TEXT, TITLE_TEXT or OTHER.
        layout: layout of the tokens, int32 [B, C] per field; `sequence` is 0 in empty slots, which hides them. A prompt
            is laid out here before it is fed; tokens that are fed earlier never see it.
        length: written slots of each row.
    """

    layers: tuple[LayerCache, ...]
    tokens: Int32[Array, "B C"]
    kind: Int32[Array, "B C"]
    layout: Layout
    length: Int32[Array, " B"]


class TokenBatch(NamedTuple):
    """The tokens of one step as a flat list: those of row 0, of row 1, …, and padding at the end.

    Attributes:
        tokens: token ids.
        layout: layout of the tokens, int32 [T] per field; `sequence` is 0 at padding.
        row: cache row of each token; B at padding.
        slot: slot in the row; C at padding.
        kind: kind of each token, as in `Cache`.
        adapter: index of the adapter of each token, if the model has several; negative: the base model.
        logits_at: indices of the tokens that get logits.
    """

    tokens: Int32[Array, " T"]
    layout: Layout
    row: Int32[Array, " T"]
    slot: Int32[Array, " T"]
    kind: Int32[Array, " T"]
    adapter: Int32[Array, " T"]
    logits_at: Int32[Array, " L"]


class Bucket(NamedTuple):
    """The sizes that a program is compiled for.

    Attributes:
        rows: number of cache rows that feed tokens, counted from row 0; 1: a single row at any index.
        tokens: T, tokens of all rows together.
        per_row: maximum tokens per row.
        slots: number of cache slots in use, counted from slot 0, including those of the new tokens.
        longest: maximum tokens of one row that may exceed `per_row`: a fork, or a prompt beside decoding rows.
    """

    rows: int
    tokens: int
    per_row: int
    slots: int
    longest: int = 0

    @property
    def max_per_row(self) -> int:
        """Return the maximum number of tokens of any row."""
        return max(self.per_row, self.longest)


def layer_sharding(shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Return the sharding of the keys or values [B, C, K, H] of a layer."""
    return named_sharding(("batch", None, "kv_heads", None), shape, mesh)


def empty_cache(config: ModelConfig, batch: int, capacity: int, mesh: Mesh | None = None) -> Cache:
    """Return an empty cache with `batch` rows of `capacity` slots; on a mesh, split by kv heads and batch."""
    shape = (batch, capacity, config.kv_heads, config.head_dim)
    place = None if mesh is None else layer_sharding(shape, mesh)

    def slots() -> jax.Array:
        return jnp.zeros((batch, capacity), jnp.int32)

    def empty() -> jax.Array:
        return jnp.zeros(shape, config.dtype, device=place)

    return Cache(
        layers=tuple(LayerCache(empty(), empty()) for _ in range(config.layers)),
        tokens=slots(),
        kind=slots(),
        layout=Layout(slots(), slots(), slots(), slots()),
        length=jnp.zeros((batch,), jnp.int32),
    )


def record(cache: Cache, batch: TokenBatch) -> Cache:
    """Write ids, kinds and layout of the tokens of a step to the cache; `write` adds the keys and values of a layer."""

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[batch.row, batch.slot].set(new, mode="drop")

    written = jnp.where(batch.slot < cache.tokens.shape[1], batch.slot + 1, 0)

    return cache._replace(
        tokens=put(cache.tokens, batch.tokens),
        kind=put(cache.kind, batch.kind),
        layout=Layout(*map(put, cache.layout, batch.layout)),
        length=cache.length.at[batch.row].max(written, mode="drop"),
    )


def write(layer: LayerCache, batch: TokenBatch, key: jax.Array, value: jax.Array) -> LayerCache:
    """Return the layer with the keys and values [T, K, H] of a step written to its slots."""

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[batch.row, batch.slot].set(new.astype(old.dtype), mode="drop")

    return LayerCache(put(layer.key, key), put(layer.value, value))


class RowView(NamedTuple):
    """The flat tokens of a step arranged by row, as attention reads them.

    Attributes:
        row: index of the single row; None: rows 0 to R - 1 of the cache.
        token: index of the flat token at each place of a row.
        layout: layout of these tokens, int32 [R, F] per field; `sequence` is 0 at unused places.
    """

    row: Int32[Array, ""] | None
    token: Int32[Array, "R F"]
    layout: Layout

    def select(self, array: jax.Array) -> jax.Array:
        """Select this view's rows of an array [B, ...]; return the whole array when the view is rows 0..R-1."""
        return array if self.row is None else jax.lax.dynamic_slice_in_dim(array, self.row, 1)


class ByRow(NamedTuple):
    """The tokens of a step as attention reads them.

    Attributes:
        parts: a view of the first `per_row` tokens of every row, and, if one row may have more, a view of all tokens of
            the longest row. With one row: a view of that row.
        place: index of each flat token in the concatenation of the parts.
    """

    parts: tuple[RowView, ...]
    place: Int32[Array, " T"]


def by_row(batch: TokenBatch, bucket: Bucket) -> ByRow:
    """Arrange the flat tokens of a step by row.

    The first part has R = `bucket.rows` and F = `bucket.per_row`; the second has R = 1 and F = `bucket.longest`.
    """

    def part(row: jax.Array, start: jax.Array, size: int) -> RowView:
        place = start[:, None] + jnp.arange(size)
        token = jnp.minimum(place, bucket.tokens - 1)
        valid = (place < bucket.tokens) & (batch.row[token] == row[:, None])
        layout = Layout(*(field[token] for field in batch.layout))
        layout = layout._replace(sequence=jnp.where(valid, layout.sequence, 0))
        return RowView(None, token, layout)

    rows = batch.row[:1] if bucket.rows == 1 else jnp.arange(bucket.rows)
    start = jnp.searchsorted(batch.row, rows)
    row_index = jnp.minimum(batch.row, bucket.rows - 1)
    nth = jnp.arange(bucket.tokens) - start[row_index]
    all_rows = part(rows, start, bucket.per_row)
    place = row_index * bucket.per_row + jnp.clip(nth, 0, bucket.per_row - 1)
    if bucket.rows == 1:
        all_rows = all_rows._replace(row=rows[0])
    if bucket.longest <= bucket.per_row:
        return ByRow((all_rows,), place)
    longest = jnp.argmax(jnp.searchsorted(batch.row, rows, side="right") - start)
    longest_row = part(longest[None], start[longest][None], bucket.longest)._replace(row=longest)
    behind = all_rows.token.size + jnp.clip(nth, 0, bucket.longest - 1)
    return ByRow((all_rows, longest_row), jnp.where(row_index == longest, behind, place))
