"""The kernel for decoding, interpreted on CPU, against the definition."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspd_jax import LanguageModel, SpecialTokens, build_layout
from aspd_jax.layout import Layout, sees
from aspd_jax.model import flash_decode
from aspd_jax.model.attention import DECODE_BACK_ENDS, View
from aspd_jax.model.cache import layer_sharding
from aspd_jax.model.transformer import Transformer
from aspd_jax.sharding import make_mesh
from infer import Engine
from tests.helpers.answers import EXAMPLE, SEPARATOR, linearise
from tests.helpers.replay import replay

SPECIAL = SpecialTokens(57, 58, 59, 60, 61, 62)
SLOTS, CAPACITY, QUERIES = 300, 340, 21  # no multiples of a tile
K, G, H = 2, 3, 8

text = st.lists(st.integers(1, 50), max_size=12)
block = st.lists(st.tuples(st.lists(st.integers(1, 50), min_size=1, max_size=3), text), min_size=2, max_size=5)
parts = st.lists(st.one_of(text, block), min_size=1, max_size=6)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_decode, "SLOT_BYTES", 0)


def scene(rows: list[list], seed: int) -> tuple[Any, ...]:
    """Query, key, value and view: slots in the order of time with gaps, some discarded, and the last tokens as queries.

    There is one row more in the cache than rows, and more slots than in use; what they hold is not a number.
    """
    random = np.random.default_rng(seed)
    B = len(rows)
    key_layout = Layout(*(np.zeros((B, SLOTS), np.int32) for _ in range(4)))
    query_layout = Layout(*(np.zeros((B, QUERIES), np.int32) for _ in range(4)))
    for b, of_row in enumerate(rows):
        tokens = np.array([[3, *linearise(SPECIAL, of_row)]])[:, :SLOTS]
        layout = build_layout(tokens, SPECIAL)
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
    draw = [
        random.standard_normal(shape).astype(np.float32) for shape in ((B, QUERIES, K, G, H), *[(B, SLOTS, K, H)] * 2)
    ]
    query, key, value = map(jnp.asarray, draw)
    whole = [(0, 1), (0, CAPACITY - SLOTS), (0, 0), (0, 0)]
    key, value = (jnp.pad(x, whole, constant_values=jnp.nan) for x in (key, value))
    return query, key, value, View(Layout(*map(jnp.asarray, query_layout)), Layout(*map(jnp.asarray, key_layout)))


def compare(args: tuple[Any, ...], window: int | None) -> float:
    """Largest difference of the kernel from the definition, over queries that see something: none of padding."""
    expected, got = (
        jax.jit(DECODE_BACK_ENDS[name], static_argnums=4)(*args, window) for name in ("reference", "flash_decode")
    )
    real = np.asarray(args[3].mask("invisible", window).any(axis=2))
    assert np.isfinite(got).all()
    return float(np.abs(np.asarray(got) - np.asarray(expected))[real].max())


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("window", [None, 9])
def test_equal_to_the_definition(window: int | None) -> None:
    """Check interleaved branches, padding, discarded slots, and unused slots and rows of the cache."""

    @settings(max_examples=4)
    @given(rows=st.lists(parts, min_size=2, max_size=2), seed=st.integers(0, 99))
    def holds(rows: list[list], seed: int) -> None:
        assert compare(scene(rows, seed), window) < 1e-5

    holds()


def without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel see siblings."""

    def wrong(q: Layout, k: Layout, **others: Any) -> Any:
        return sees(q._replace(block=0 * q.block), k, **others)

    monkeypatch.setattr(flash_decode, "sees", wrong)


def test_a_wrong_mask_changes_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: check that a mask with visible siblings gives another result."""
    args = scene([[[1] * 30, [([5], [6] * 9), ([7], [8] * 9), ([9], [10] * 9)]]] * 2, 0)
    assert compare(args, None) < 1e-5
    without_blocks(monkeypatch)
    jax.clear_caches()
    assert compare(args, None) > 1e-2


@pytest.mark.further
def test_many_queries_are_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that each tile of queries reads only visible slots; with a window, not from the first slot."""
    monkeypatch.setattr(flash_decode, "MAX_ROWS", 16)
    args = scene([[[1] * 280], [[2] * 100]], 1)
    jax.clear_caches()
    for window in (None, 9):
        assert compare(args, window) < 1e-5


@pytest.mark.further
def test_same_tokens_from_an_engine(bare_lm: LanguageModel) -> None:
    """Check that a replay with the kernel takes equal steps, and predicts equal tokens."""
    engines = []
    for name in ("decode", "flash_decode"):
        config = replace(bare_lm.config, decode_attention=name)
        lm = replace(bare_lm, config=config, model=Transformer(config))
        engines.append(Engine(lm, max_length=128, max_batch=1, max_branches=3, separator_ids=SEPARATOR))
    answer = linearise(engines[0].config.special, EXAMPLE)
    plain, kernel = (replay(engine, [1, 2], answer) for engine in engines)
    assert plain.widths == kernel.widths and max(kernel.widths) > 1
    np.testing.assert_allclose(kernel.logits, plain.logits, atol=1e-4)
    assert (kernel.logits.argmax(1) == plain.logits.argmax(1)).all()


@pytest.mark.further
@given(st.integers(0, 600), st.integers(0, 600), st.integers(1, 132))
def test_every_tile_is_of_one_part(first: int, more: int, parts: int) -> None:
    of_parts = flash_decode.tiles_of(*np.int32([first, first + more])[:, None], np.arange(parts, dtype=np.int32), parts)
    begin, end = map(np.asarray, of_parts)
    assert begin[0] == first and end[-1] == first + more + 1
    assert (begin[1:] == end[:-1]).all() and np.ptp(end - begin) <= 1


@pytest.mark.parametrize(("queries", "times"), [(1, 1), (16, 1), (32, 1), (33, 2), (512, 16)])
def test_queries_of_a_row_read_the_cache_together(queries: int, times: int) -> None:
    """Check the number of GPU programs for each part of the slots and each of 8 heads."""
    layouts = [Layout(*[jax.ShapeDtypeStruct((1, size), jnp.int32)] * 4) for size in (queries, 32768)]
    query, cache = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, queries, 8, 4, 128), (1, 32768, 8, 128))
    )
    attend = partial(flash_decode.flash_decode, window=None)
    traced = jax.make_jaxpr(attend)(query, cache, cache, *layouts)
    (call,) = (one for one in traced.eqns if one.primitive.name == "pallas_call")
    assert call.params["grid_mapping"].grid == (times, 8 * max(1, 16 // times), 1)


@pytest.mark.further
@pytest.mark.several
def test_heads_and_rows_of_a_mesh() -> None:
    """Check that each device computes its heads and rows of the mesh."""
    args = scene([[[1] * 30], [[2] * 9, [([5], [6]), ([7], [8])]]], 2)
    query, key, value, view = args[0], args[1][:2], args[2][:2], args[3]
    expected = DECODE_BACK_ENDS["reference"](query, key, value, view, None)
    mesh = make_mesh({"data": 2, "tensor": 2})  # so that a device has one head

    def split(*of: Any) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return DECODE_BACK_ENDS["flash_decode"](*of, None)

    spread = [jax.device_put(x, layer_sharding(x.shape, mesh)) for x in (key, value)]
    got = jax.jit(split)(query, *spread, view)
    assert got.sharding.shard_shape(got.shape)[::2] == (1, 1, H)
    real = np.asarray(view.query.sequence) > 0
    np.testing.assert_allclose(np.asarray(got)[real], np.asarray(expected)[real], atol=1e-5)
