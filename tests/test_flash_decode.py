"""The kernel for decoding, interpreted on CPU, against the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspd_jax import LanguageModel, SpecialTokens, build_layout
from aspd_jax.layout import Layout
from aspd_jax.model import flash_decode
from aspd_jax.model.attention import BACK_ENDS, View
from aspd_jax.model.transformer import Transformer
from aspd_jax.sharding import make_mesh
from infer import Engine
from tests.answers import EXAMPLE, SEPARATOR, linearise

SPECIAL = SpecialTokens(57, 58, 59, 60, 61, 62)
SLOTS, CAPACITY, QUERIES = 300, 340, 21  # no multiples of a tile
K, G, H = 2, 3, 8

text = st.lists(st.integers(1, 50), max_size=12)
block = st.lists(st.tuples(st.lists(st.integers(1, 50), min_size=1, max_size=3), text), min_size=2, max_size=5)
parts = st.lists(st.one_of(text, block), min_size=1, max_size=6)


def scene(rows: list[list], seed: int) -> tuple[Any, ...]:
    """Query, key, value and view: slots in the order of time with gaps, some discarded, and the last tokens as queries.

    There is one row more in the cache than rows, and more slots than in use; what they hold is not a number.
    """
    random = np.random.default_rng(seed)
    B = len(rows)
    key_layout = Layout(*(np.zeros((B, SLOTS), np.int32) for _ in range(4)))
    query_layout = Layout(*(np.zeros((B, QUERIES), np.int32) for _ in range(4)))
    query_slot = np.full((B, QUERIES), CAPACITY, np.int32)
    for b, of_row in enumerate(rows):
        tokens = np.array([[3, *linearise(SPECIAL, of_row)]])[:, :SLOTS]
        layout = build_layout(tokens, SPECIAL)
        # Branches side by side: as far as they have a common length, in turns.
        order = np.lexsort((layout.branch[0], layout.position[0] - layout.branch[0], layout.block[0]))
        order = np.argsort(layout.position[0] * 8 + random.integers(0, 8, tokens.size), kind="stable")
        slot = np.sort(random.choice(SLOTS, tokens.size, replace=False))
        for field, of in zip(key_layout, layout, strict=True):
            field[b, slot] = of[0, order]
        discarded = random.random(tokens.size) < 0.1
        discarded[0] = False
        key_layout.sequence[b, slot[discarded]] = 0
        count = min(QUERIES - 2, tokens.size)
        for field, of in zip(query_layout, layout, strict=True):
            field[b, :count] = of[0, order[-count:]]
        query_slot[b, :count] = slot[-count:]
    draw = [random.standard_normal(shape).astype(np.float32) for shape in ((B, QUERIES, K, G, H), *[(B, SLOTS, K, H)] * 2)]
    query, key, value = map(jnp.asarray, draw)
    whole = [(0, 1), (0, CAPACITY - SLOTS), (0, 0), (0, 0)]
    key, value = (jnp.pad(x, whole, constant_values=jnp.nan) for x in (key, value))
    view = View(
        Layout(*map(jnp.asarray, query_layout)),
        Layout(*map(jnp.asarray, key_layout)),
        jnp.asarray(query_slot),
        jnp.arange(SLOTS)[None],
    )
    return query, key, value, view


def compare(args: tuple[Any, ...], siblings: Any, window: int | None, name: str = "flash_decode") -> float:
    """Largest difference of a back end from the definition, over queries that are none of padding."""
    expected, got = (jax.jit(BACK_ENDS[of], static_argnums=(4, 5))(*args, siblings, window) for of in ("reference", name))
    real = np.asarray(args[3].query.sequence) > 0
    assert np.isfinite(got).all()
    return float(np.abs(np.asarray(got) - np.asarray(expected))[real].max())


@pytest.mark.parametrize("siblings", ["invisible", "shared"])
@pytest.mark.parametrize("window", [None, 9])
def test_equal_to_the_definition(siblings: Any, window: int | None) -> None:
    """Branches interleaved, padding, discarded slots, slots and rows of the cache that are not in use."""

    @settings(max_examples=10)
    @given(rows=st.lists(parts, min_size=2, max_size=2), seed=st.integers(0, 99))
    def holds(rows: list[list], seed: int) -> None:
        assert compare(scene(rows, seed), siblings, window) < 1e-5

    holds()
