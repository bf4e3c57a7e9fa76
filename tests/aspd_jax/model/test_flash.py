"""Attention by tiles, its kernels interpreted on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from aspd_jax import SpecialTokens, build_layout, visible
from aspd_jax.layout import Layout
from aspd_jax.model import flash_gpu
from aspd_jax.model.attention import FULL_PASS_BACK_ENDS, View, reference
from aspd_jax.model.flash import TPU, WHOLE, Kernel, flash_attention, intervals, tile_for, tiles_in_sight, visits
from aspd_jax.sharding import make_mesh, use_mesh

SPECIAL = SpecialTokens(57, 58, 59, 60, 61, 62)
START, END = SPECIAL.branch_start, SPECIAL.branch_end
ROWS, LENGTH, TILE = 2, 45, 8  # the last tile is not full
K, G, H = 2, 2, 8
PASSES = {"tpu": TPU, "cuda": flash_gpu.GPU}
kernels = pytest.mark.parametrize("name", PASSES)


@st.composite
def sequences(draw: st.DrawFn) -> list[int]:
    """Serial tokens and blocks of branches, which may be cut off."""
    tokens: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        tokens += [9] * draw(st.integers(1, 9))
        if draw(st.booleans()):
            for _ in range(draw(st.integers(1, 4))):
                tokens += [START] + [5] * draw(st.integers(0, 7)) + [END]
            tokens += [SPECIAL.parallel_end] * draw(st.booleans())
    return tokens[: draw(st.integers(1, len(tokens)))]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Rows of several sequences with padding before, between and behind; int32 [ROWS, LENGTH] each."""
    tokens, owner = np.zeros((2, ROWS, LENGTH), int)
    for row in range(ROWS):
        at = draw(st.sampled_from([0, 0, 3, 11]))
        for number, sequence in enumerate(draw(st.lists(sequences(), max_size=4)), start=1):
            part = sequence[: LENGTH - at]
            tokens[row, at : at + len(part)], owner[row, at : at + len(part)] = part, number
            at += len(part) + draw(st.sampled_from([0, 0, 2]))
            if at >= LENGTH:
                break
    return build_layout(tokens, SPECIAL, draw(st.sampled_from(["sequential", "max", "predict"])), sequence=owner)


def drawn(seed: int) -> list[jax.Array]:
    """Query, key, value, and the slope of the result."""
    random = np.random.default_rng(seed)
    shapes = (ROWS, LENGTH, K, G, H), (ROWS, LENGTH, K, H), (ROWS, LENGTH, K, H), (ROWS, LENGTH, K, G, H)
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]


@partial(jax.jit, static_argnames=("name", "siblings", "tile"))
def computed(
    name: str, arrays: Any, layout: Layout, siblings: Any, window: Any, tile: int = TILE
) -> tuple[jax.Array, ...]:
    """Result and slopes of query, key and value; zeros at padding."""
    *of, slope = arrays

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if name in PASSES:
            return flash_attention(query, key, value, layout, siblings, window, {name: PASSES[name]}, None, tile)
        out = reference(query, key, value, View(layout, layout), siblings, window)
        return jnp.where((layout.sequence > 0)[..., None, None, None], out, 0)

    out, pull = jax.vjp(attention, *of)
    return (out, *pull(slope))


@pytest.mark.default_cases(1)
@kernels
@pytest.mark.parametrize(("siblings", "windowed"), [("invisible", False), ("shared", False), ("invisible", True)])
def test_result_and_gradients_equal_the_reference(siblings: Any, windowed: bool, name: str) -> None:
    """Check structures and window sizes that Hypothesis finds, with one compiled program."""

    @settings(max_examples=40)
    @given(layouts(), st.integers(0, 9), st.integers(1, 30))
    def check(layout: Layout, seed: int, size: int) -> None:
        window = size if windowed else None
        got, expected = (computed(which, drawn(seed), layout, siblings, window) for which in (name, "reference"))
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)

    check()


@pytest.mark.further
def test_tiles_of_keys_may_be_smaller_than_those_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the tile sizes of a GPU."""
    monkeypatch.setattr(flash_gpu, "MAX_BY_KEY", TILE)

    @settings(max_examples=10)
    @given(layouts(), st.integers(1, 30))
    def check(layout: Layout, window: int) -> None:
        got = computed("cuda", drawn(0), layout, "invisible", window, 2 * TILE)
        expected = computed("reference", drawn(0), layout, "invisible", window)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), got, expected)

    check()


@kernels
def test_what_is_hidden_matters(name: str) -> None:
    """Negative controls of the test above: with visible siblings, or with sequences that see each other."""
    tokens = np.array([[9] * 5 + [START, 5, END, START, 5, END, 60] + [9] * 33] * ROWS)
    owner = np.array([[1] * 20 + [2] * 25] * ROWS)
    layout = build_layout(tokens, SPECIAL, sequence=owner)
    expected = computed("reference", drawn(0), layout, "invisible", None)
    shared = computed(name, drawn(0), layout, "shared", None)
    merged = computed(name, drawn(0), build_layout(tokens, SPECIAL), "invisible", None)
    for x, y, z in zip(shared, merged, expected, strict=True):
        assert np.abs(x - z).max() > 1e-2 and np.abs(y - z).max() > 1e-2


@partial(jax.jit, static_argnames="kernel")
def in_sight(kernel: Kernel, layout: Layout, window: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    return tiles_in_sight(intervals(kernel, layout), kernel.tile, window)


ordered = jax.jit(visits, static_argnames="by_key")


def by_tile(mask: np.ndarray, tile: int) -> np.ndarray:
    """[B, S, S] -> [B, N, N, tile, tile]."""
    B, S, _ = mask.shape
    return mask.reshape(B, S // tile, tile, S // tile, tile).swapaxes(2, 3)


@pytest.mark.further
@settings(max_examples=100)
@given(layouts(), st.sampled_from(["invisible", "shared"]), st.one_of(st.none(), st.integers(1, 30)))
def test_visited_are_the_tiles_with_a_visible_pair(layout: Layout, siblings: Any, window: int | None) -> None:
    """Check that all and, without a window, only these tiles are visited, and that partly visible tiles are masked."""
    padded = Layout(*(np.pad(field, ((0, 0), (0, -LENGTH % TILE))) for field in layout))
    mask = by_tile(np.asarray(visible(padded, padded, siblings, window)), TILE)
    size = None if window is None else jnp.array([window])
    seen, whole = map(np.asarray, in_sight(Kernel(siblings, TILE), layout, size))
    some, every = mask.any((-1, -2)), mask.all((-1, -2))
    assert (seen >= some).all() and (whole <= every).all()
    if window is None:
        np.testing.assert_array_equal(seen, some)
        np.testing.assert_array_equal(whole, every)
    for by_key in (False, True):
        count, order = ordered(seen, whole, by_key)
        assert int(count) == max(seen.sum(), 1)
        row, query, key, flags = (np.asarray(x)[: int(count)] for x in order)
        places = np.stack([row, key, query] if by_key else [row, query, key], axis=1)
        if seen.any():
            np.testing.assert_array_equal(places, np.argwhere(seen.swapaxes(1, 2) if by_key else seen))
            np.testing.assert_array_equal(flags & WHOLE > 0, whole[row, query, key])


def test_packed_rows_and_branches_take_fewer_visits() -> None:
    """Check the visits of 8,192 tokens in tiles of 512; causal attention visits 136."""

    def count(tokens: np.ndarray, owner: np.ndarray | None = None) -> int:
        layout = build_layout(tokens[None], SPECIAL, sequence=owner)
        return int(ordered(*in_sight(Kernel("invisible", 512), layout), by_key=False)[0])

    serial = np.full(8192, 9)
    branches = serial.copy()
    branches[1024::1024] = START
    branches[2047::1024] = END
    assert count(serial) == 16 * 17 // 2
    assert count(serial, np.repeat(np.arange(1, 9), 1024)[None]) == 8 * 3
    assert count(branches) == 3 + 7 * (2 * 2 + 3)


def test_tiles_hold_a_row_with_little_padding() -> None:
    assert [tile_for(length, 1024) for length in (1, 128, 512, 600, 1000, 8192)] == [128, 128, 512, 384, 512, 512]
    assert tile_for(8192, 8192) == 128 and tile_for(8192, 1 << 20) == 128


def test_other_platforms_get_the_chunks() -> None:
    """Check that results and gradients are bitwise equal, also with a window that is an array."""
    *of, slope = drawn(0)
    layout = Layout(*map(jnp.asarray, build_layout(np.full((ROWS, LENGTH), 9), SPECIAL)))
    for window in (None, jnp.array(4)):
        results = []
        for name in ("chunked", "flash"):
            attention = partial(
                FULL_PASS_BACK_ENDS[name], view=View(layout, layout), siblings="invisible", window=window
            )
            out, pull = jax.vjp(attention, *of)
            results.append((out, *pull(slope)))
        jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.further
@kernels
@pytest.mark.several
def test_devices_of_a_mesh_run_kernels_for_their_rows_and_heads(name: str) -> None:
    """Check that results equal those of one device, without communication."""
    mesh = make_mesh({"fsdp": 2, "tensor": 2})
    layout = build_layout(np.array([[9] * 10 + [START, 5, END, START, 5, END, 60] + [9] * 28] * ROWS), SPECIAL)
    arrays = drawn(0)
    expected = computed(name, arrays, layout, "invisible", None)
    spread = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp", None, "tensor"))) for x in arrays]
    layout = Layout(*(jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp"))) for x in layout))
    program = jax.jit(lambda *x: under_mesh(name, mesh, *x)).lower(spread, layout).compile()
    for x, y in zip(program(spread, layout), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in program.as_text()


def under_mesh(name: str, mesh: Any, arrays: Any, layout: Layout) -> tuple[jax.Array, ...]:
    """`computed` of the kernels, where they find the mesh."""
    with use_mesh(mesh):
        return computed.__wrapped__(name, arrays, layout, "invisible", None)
