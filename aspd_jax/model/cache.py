"""The key-value cache: one preallocated pytree, written in place, never moved (spec, section 5).

B batch, C cache slots, F tokens fed, K kv heads, H head size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from aspd_jax.layout import Layout
from aspd_jax.model.config import ModelConfig
from aspd_jax.sharding import named_sharding


class LayerCache(NamedTuple):
    """Keys and values of one layer, [B, K, C, H] each."""

    key: jax.Array
    value: jax.Array


class Cache(NamedTuple):
    """Everything that was fed, in the order in which it was fed.

    Attributes:
        layers: one entry per layer; separate arrays, so that each is updated in place.
        tokens: int32 [B, C], the token in each slot.
        layout: int32 [B, C] each; `sequence` is 0 in slots not written yet, which hides them.
        length: int32 [B], slots written.
    """

    layers: tuple[LayerCache, ...]
    tokens: jax.Array
    layout: Layout
    length: jax.Array


def empty_cache(config: ModelConfig, batch: int, capacity: int, mesh: Mesh | None = None) -> Cache:
    """A cache of `capacity` slots per sequence; on a mesh, split by kv heads and batch."""
    shape = (batch, config.kv_heads, capacity, config.head)
    sharding = None if mesh is None else named_sharding(("batch", "kv_heads", None, None), shape, mesh)

    def zeros() -> jax.Array:
        return jnp.zeros(shape, config.dtype, device=sharding)

    def slots() -> jax.Array:
        return jnp.zeros((batch, capacity), jnp.int32)

    return Cache(
        layers=tuple(LayerCache(zeros(), zeros()) for _ in range(config.layers)),
        tokens=slots(),
        layout=Layout(slots(), slots(), slots(), slots()),
        length=jnp.zeros((batch,), jnp.int32),
    )


def feed_slots(cache: Cache, fed: Layout) -> jax.Array:
    """int32 [B, F]: the slot each fed token goes to; padding gets one past the end, where writes are dropped."""
    capacity = cache.tokens.shape[1]
    real = fed.sequence > 0
    return jnp.where(real, cache.length[:, None] + jnp.cumsum(real, axis=1) - 1, capacity)


def record(cache: Cache, tokens: jax.Array, fed: Layout, slots: jax.Array) -> Cache:
    """Note which tokens are being fed, and where they stand; the layers follow with `write`."""
    rows = jnp.arange(tokens.shape[0])[:, None]

    def put(array: jax.Array, values: jax.Array) -> jax.Array:
        return array.at[rows, slots].set(values, mode="drop")

    return cache._replace(
        tokens=put(cache.tokens, tokens),
        layout=Layout(*(put(old, new) for old, new in zip(cache.layout, fed, strict=True))),
        length=cache.length + jnp.sum(fed.sequence > 0, axis=1, dtype=jnp.int32),
    )


def write(layer: LayerCache, key: jax.Array, value: jax.Array, slots: jax.Array) -> LayerCache:
    """Write the keys and values [B, F, K, H] of fed tokens to their slots [B, F]."""
    rows = jnp.arange(key.shape[0])[:, None]
    return LayerCache(
        layer.key.at[rows, :, slots].set(key.astype(layer.key.dtype), mode="drop"),
        layer.value.at[rows, :, slots].set(value.astype(layer.value.dtype), mode="drop"),
    )
