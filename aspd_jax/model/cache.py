"""The key-value cache: one preallocated pytree, written in place, never moved (protocol, section 5).

B rows (sequences) of the cache, C slots of a row, T tokens of a pass, L tokens that get logits, K kv heads, H head
size.
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

# What a token is a part of: a prompt, a tag or the head of a branch; the plain text of an answer; a title.
OTHER, PLAIN_TEXT, TITLE_TEXT = 0, 1, 2


class LayerCache(NamedTuple):
    """Keys and values of one layer."""

    key: Float[Array, "B C K H"]
    value: Float[Array, "B C K H"]


class Cache(NamedTuple):
    """Keys and values, and what they belong to.

    Attributes:
        layers: one per layer.
        tokens: ids.
        kind: what each token is a part of: PLAIN_TEXT or TITLE_TEXT of an answer, or OTHER.
        layout: int32 [B, C] each; `sequence` is 0 in slots that hold nothing, which hides them. A prompt is laid out
            here before it is fed: nothing that is fed before a token of it may see it.
        length: slots written.
    """

    layers: tuple[LayerCache, ...]
    tokens: Int32[Array, "B C"]
    kind: Int32[Array, "B C"]
    layout: Layout
    length: Int32[Array, " B"]


class TokenBatch(NamedTuple):
    """The tokens of one pass, a flat list: those of row 0, of row 1, …, and padding at the end.

    Attributes:
        tokens: ids.
        layout: int32 [T] each; `sequence` is 0 at padding.
        row: of the cache; B at padding.
        slot: of the row; C at padding.
        kind: as in `Cache`.
        adapter: of the request that a token belongs to, where the model has several; negative: none.
        logits_at: which of the T tokens get logits.
    """

    tokens: Int32[Array, " T"]
    layout: Layout
    row: Int32[Array, " T"]
    slot: Int32[Array, " T"]
    kind: Int32[Array, " T"]
    adapter: Int32[Array, " T"]
    logits_at: Int32[Array, " L"]


class Bucket(NamedTuple):
    """The sizes that a pass is compiled for.

    Attributes:
        rows: only the first so many rows of the cache feed tokens; 1: only one does, wherever it lies.
        tokens: T, of all rows together.
        per_row: most tokens of a row.
        slots: only the first so many slots of a row are in use, the new tokens' included.
        longest: most tokens of one of the rows, where that is more: of a fork, or of a prompt beside answers.
    """

    rows: int
    tokens: int
    per_row: int
    slots: int
    longest: int = 0

    @property
    def most(self) -> int:
        """Most tokens of any row."""
        return max(self.per_row, self.longest)


def layer_sharding(shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Where keys or values [B, C, K, H] of a layer lie."""
    return named_sharding(("batch", None, "kv_heads", None), shape, mesh)


def empty_cache(config: ModelConfig, batch: int, capacity: int, mesh: Mesh | None = None) -> Cache:
    """A cache of `capacity` slots per sequence; on a mesh, split by kv heads and batch."""
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
    """Note which tokens are being fed, and where they stand; the layers follow with `write`."""

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
    """A layer with the keys and values [T, K, H] of a pass."""

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[batch.row, batch.slot].set(new.astype(old.dtype), mode="drop")

    return LayerCache(put(layer.key, key), put(layer.value, value))


class RowView(NamedTuple):
    """Flat tokens of a pass by row, as attention needs them.

    Attributes:
        row: the only row there is; None: these are the first R of the cache.
        token: which flat token each place of a row is.
        layout: int32 [R, F] each, of these; `sequence` is 0 where there is none.
        slot: of these.
    """

    row: Int32[Array, ""] | None
    token: Int32[Array, "R F"]
    layout: Layout
    slot: Int32[Array, "R F"]

    def of(self, array: jax.Array) -> jax.Array:
        """Its rows of an array of the cache, [B, ...]; with those behind them where the first ones are meant."""
        return array if self.row is None else jax.lax.dynamic_slice_in_dim(array, self.row, 1)


class ByRow(NamedTuple):
    """A pass as attention sees it.

    Attributes:
        parts: the first tokens of every row; and all of the row that has most, where one may have more than others. Or
            those of the only row.
        place: where each flat token is in the parts, one behind the other.
    """

    parts: tuple[RowView, ...]
    place: Int32[Array, " T"]


def by_row(batch: TokenBatch, bucket: Bucket) -> ByRow:
    """See `ByRow`; R is `bucket.rows`, F `bucket.per_row`; then 1 and `bucket.longest`."""

    def part(row: jax.Array, start: jax.Array, size: int) -> RowView:
        place = start[:, None] + jnp.arange(size)
        token = jnp.minimum(place, bucket.tokens - 1)
        mine = (place < bucket.tokens) & (batch.row[token] == row[:, None])
        layout = Layout(*(field[token] for field in batch.layout))
        layout = layout._replace(sequence=jnp.where(mine, layout.sequence, 0))
        return RowView(None, token, layout, batch.slot[token])

    rows = batch.row[:1] if bucket.rows == 1 else jnp.arange(bucket.rows)
    start = jnp.searchsorted(batch.row, rows)
    own = jnp.minimum(batch.row, bucket.rows - 1)
    nth = jnp.arange(bucket.tokens) - start[own]
    every, place = part(rows, start, bucket.per_row), own * bucket.per_row + jnp.clip(nth, 0, bucket.per_row - 1)
    if bucket.rows == 1:
        every = every._replace(row=rows[0])
    if bucket.longest <= bucket.per_row:
        return ByRow((every,), place)
    longest = jnp.argmax(jnp.searchsorted(batch.row, rows, side="right") - start)
    one = part(longest[None], start[longest][None], bucket.longest)._replace(row=longest)
    behind = every.token.size + jnp.clip(nth, 0, bucket.longest - 1)
    return ByRow((every, one), jnp.where(own == longest, behind, place))
