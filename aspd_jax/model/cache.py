"""The key-value cache: one preallocated pytree, written in place, never moved (spec, section 5).

B rows (sequences) of the cache, C slots of a row, M rows fed, F tokens fed, K kv heads, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from aspd_jax.layout import Layout
from aspd_jax.model.config import ModelConfig
from aspd_jax.sharding import named_sharding

# What a token is a part of: a prompt, a tag or the head of a branch; the plain text of an answer; a title.
OTHER, PLAIN_TEXT, TITLE_TEXT = 0, 1, 2


class LayerCache(NamedTuple):
    """Keys [B, K, H, C] and values [B, K, C, H] of one layer: the two products of attention read them as they lie."""

    key: jax.Array
    value: jax.Array


class Cache(NamedTuple):
    """Everything that was fed, in the order in which it was fed.

    Attributes:
        layers: one entry per layer; separate arrays, so that each is updated in place.
        tokens: int32 [B, C], the token in each slot.
        kind: int32 [B, C], what the token is a part of: PLAIN_TEXT or TITLE_TEXT of an answer, or OTHER.
        layout: int32 [B, C] each; `sequence` is 0 in slots not written yet, which hides them.
        length: int32 [B], slots written.
    """

    layers: tuple[LayerCache, ...]
    tokens: jax.Array
    kind: jax.Array
    layout: Layout
    length: jax.Array


def layer_sharding(shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Where keys [B, K, H, C] or values [B, K, C, H] of a layer lie."""
    return named_sharding(("batch", "kv_heads", None, None), shape, mesh)


def empty_cache(config: ModelConfig, batch: int, capacity: int, mesh: Mesh | None = None) -> Cache:
    """A cache of `capacity` slots per sequence; on a mesh, split by kv heads and batch."""

    def zeros(*sizes: int) -> jax.Array:
        shape = (batch, config.kv_heads, *sizes)
        return jnp.zeros(shape, config.dtype, device=None if mesh is None else layer_sharding(shape, mesh))

    def slots() -> jax.Array:
        return jnp.zeros((batch, capacity), jnp.int32)

    return Cache(
        layers=tuple(
            LayerCache(zeros(config.head, capacity), zeros(capacity, config.head)) for _ in range(config.layers)
        ),
        tokens=slots(),
        kind=slots(),
        layout=Layout(slots(), slots(), slots(), slots()),
        length=jnp.zeros((batch,), jnp.int32),
    )


class Group(NamedTuple):
    """Tokens that are fed to some rows of the cache, the same number of places for each.

    Attributes:
        tokens: int32 [M, F]. Those that are fed come first, unless there is a `floor`.
        layout: int32 [M, F] each; `sequence` is 0 where nothing is fed.
        rows: int32 [M], the row of the cache that each goes to, past the end for none; None: to all rows, in order.
        out: int32 [M, W], which of the F tokens get logits; None: all.
        floor: int32 [M], fill the first empty slots from this one on, those of hidden tokens too; None: those behind
            all that were written.
        kind: int32 [M, F], as in `Cache`; None: OTHER.
    """

    tokens: jax.Array
    layout: Layout
    rows: jax.Array | None = None
    out: jax.Array | None = None
    floor: jax.Array | None = None
    kind: jax.Array | None = None


class Place(NamedTuple):
    """Where a group stands in the cache.

    Attributes:
        rows: int32 [M]; None: all.
        slots: int32 [M, F], past the end where nothing is fed.
        start: int32 [M], the slot of the first token, where the others follow in order; None: they fill gaps.
    """

    rows: jax.Array | None
    slots: jax.Array
    start: jax.Array | None

    def pick(self, array: jax.Array) -> jax.Array:
        """The group's rows of an array [B, …]."""
        return array if self.rows is None else jnp.take(array, self.rows, axis=0, mode="clip")

    def put(self, array: jax.Array, values: jax.Array) -> jax.Array:
        """An array [B, C] with values [M, F] in the group's slots; those past the end are dropped."""
        return array.at[self._rows(), self.slots].set(values, mode="drop")

    def write(self, layer: LayerCache, key: jax.Array, value: jax.Array) -> LayerCache:
        """A layer with keys and values [M, F, K, H] in the group's slots."""
        rows, slots = self._rows(), self.slots
        capacity = layer.value.shape[2]
        if self.start is not None and self.rows is None and len(slots) == 1 < slots.size <= capacity:
            return self._write_slice(layer, key, value)
        if slots.size == 1:
            # A write of one slot becomes an update that XLA on CPU merges with the reading of the cache, for which it
            # copies the cache several times a pass. So a second one, past the end, goes with it.
            beyond = jnp.full_like(slots, capacity)
            slots = jnp.concatenate([slots, beyond], axis=1)
            key, value = (jnp.concatenate([x, x], axis=1) for x in (key, value))
        return LayerCache(
            layer.key.at[rows, :, :, slots].set(key.astype(layer.key.dtype), mode="drop"),
            layer.value.at[rows, :, slots].set(value.astype(layer.value.dtype), mode="drop"),
        )

    def _write_slice(self, layer: LayerCache, key: jax.Array, value: jax.Array) -> LayerCache:
        """The same for one row and tokens that follow each other: XLA on CPU scatters number by number."""
        assert self.start is not None
        slots, size, capacity = self.slots[0], self.slots.size, layer.value.shape[2]
        begin = jnp.minimum(self.start[0], capacity - size)  # no slice reaches past the end
        token = begin + jnp.arange(size) - self.start[0]
        fed = (token >= 0) & (jnp.take(slots, token, mode="clip") < capacity)

        def put(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
            before = jax.lax.dynamic_slice_in_dim(old, begin, size, axis)
            moved = jnp.take(new.astype(old.dtype), token, axis=axis, mode="clip")
            kept = jnp.where(jnp.expand_dims(fed, range(1, 4 - axis)), moved, before)
            return jax.lax.dynamic_update_slice_in_dim(old, kept, begin, axis)

        return LayerCache(
            put(layer.key, key.transpose(0, 2, 3, 1), 3), put(layer.value, value.transpose(0, 2, 1, 3), 2)
        )

    def _rows(self) -> jax.Array:
        return (jnp.arange(self.slots.shape[0]) if self.rows is None else self.rows)[:, None]


def find_place(cache: Cache, group: Group, used: int | None = None) -> Place:
    """Where the tokens of a group will stand; `used`: they all stand in the first so many slots."""
    real = group.layout.sequence > 0
    length = cache.length if group.rows is None else jnp.take(cache.length, group.rows, mode="clip")
    nth = jnp.cumsum(real, axis=1)
    slots = length[:, None] + nth - 1
    if group.floor is not None:
        written = (
            cache.layout.sequence[:, :used]
            if group.rows is None
            else jnp.take(cache.layout.sequence[:, :used], group.rows, axis=0, mode="clip")
        )
        empty = (written == 0) & (jnp.arange(written.shape[1])[None] >= group.floor[:, None])
        slots = jax.vmap(jnp.searchsorted)(jnp.cumsum(empty, axis=1), nth)
    start = length if group.floor is None else None
    return Place(group.rows, jnp.where(real, slots, cache.tokens.shape[1]), start)


def record(cache: Cache, group: Group, used: int | None = None) -> tuple[Cache, Place]:
    """Note which tokens are being fed, and where they stand; the layers follow with `Place.write`."""
    place = find_place(cache, group, used)
    written = place.slots < cache.tokens.shape[1]
    ends = jnp.max(jnp.where(written, place.slots + 1, 0), axis=1)
    if group.rows is None:
        grown = jnp.maximum(cache.length, ends)
    else:
        grown = cache.length.at[group.rows].max(ends, mode="drop")
    layout = Layout(*(place.put(old, new) for old, new in zip(cache.layout, group.layout, strict=True)))
    tokens = place.put(cache.tokens, group.tokens)
    kind = place.put(cache.kind, jnp.full_like(group.tokens, OTHER) if group.kind is None else group.kind)
    return cache._replace(tokens=tokens, kind=kind, layout=layout, length=grown), place
