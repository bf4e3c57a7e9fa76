"""The cache: tokens that follow each other are written as a slice, and as a scatter would write them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspd_jax.layout import Layout
from aspd_jax.model.cache import Cache, Group, LayerCache, Place, find_place

KV_HEADS, HEAD = 2, 3


def layer(capacity: int, dtype: type = jnp.float32) -> LayerCache:
    """Keys and values of one row, no two alike."""
    key, value = 1 + np.arange(2 * KV_HEADS * HEAD * capacity).reshape(2, 1, KV_HEADS, HEAD, capacity)
    return LayerCache(jnp.asarray(key, dtype), jnp.asarray(value.swapaxes(2, 3), dtype))


def fed_tokens(size: int) -> tuple[jax.Array, jax.Array]:
    key, value = -1.0 - np.arange(2 * size * KV_HEADS * HEAD).reshape(2, 1, size, KV_HEADS, HEAD)
    return jnp.asarray(key, jnp.float32), jnp.asarray(value, jnp.float32)


def place(capacity: int, length: int, count: int, size: int) -> Place:
    """Of a group that feeds `count` tokens in `size` places to a row with `length` tokens."""
    slots = jnp.zeros((1, capacity), jnp.int32)
    fed = (jnp.arange(size)[None] < count).astype(jnp.int32)
    cache = Cache((), slots, slots, Layout(slots, slots, slots, slots), jnp.asarray([length], jnp.int32))
    return find_place(cache, Group(fed, Layout(fed, fed, fed, fed)))


@given(st.data())
def test_a_slice_is_what_a_scatter_writes(data: st.DataObject) -> None:
    """At the very end of a row, too, where the places of a group reach past it."""
    capacity = data.draw(st.integers(2, 9))
    size = data.draw(st.integers(2, capacity + 2))
    length = data.draw(st.integers(0, capacity))
    count = data.draw(st.integers(0, min(size, capacity - length)))
    of = place(capacity, length, count, size)
    before, (key, value) = layer(capacity), fed_tokens(size)
    after = of.write(before, key, value)
    scattered = of._replace(start=None).write(before, key, value)
    jax.tree.map(np.testing.assert_array_equal, after, scattered)
    expected = np.array(before.key)
    expected[0, :, :, length : length + count] = np.moveaxis(np.asarray(key[0, :count]), 0, 2)
    np.testing.assert_array_equal(after.key, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("start", "scatters"), [(True, False), (False, True)])
def test_tokens_that_follow_each_other_are_no_scatter(start: bool, scatters: bool, dtype: type) -> None:
    of = place(8, 3, 2, 4) if start else place(8, 3, 2, 4)._replace(start=None)
    lowered = jax.jit(partial(Place.write, of)).lower(layer(8, dtype), *fed_tokens(4))
    assert ("scatter" in lowered.as_text()) == scatters
