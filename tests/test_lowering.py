"""Forms for CPU: the same numbers as the plain ones, and really other programs."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aspd_jax.model.config import RopeConfig
from aspd_jax.model.lowering import (
    FEW_PRODUCTS,
    LARGE_KERNEL,
    SHARES,
    VECTOR,
    WINDOW,
    argmax,
    computed_once,
    mixture,
    product,
    scores,
    softmax,
)
from aspd_jax.model.transformer import rotation

SIDE = int(LARGE_KERNEL**0.5)
MOST_SLOTS = FEW_PRODUCTS // (2 * 3 * 5 * 2 * VECTOR)  # of which scores of 5 rows in each of 2 x 3 products are few


def numbers(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(prod(shape)).normal(size=shape), dtype)


SHAPES = [
    ((1, 1), (SIDE,), (SIDE,)),
    ((1, 2), (SIDE,), (4, SIDE // 2)),
    ((3, 1), (4, SIDE // 4), (SIDE,)),
    ((4,), (SIDE,), (SIDE,)),
    ((2, 2), (8,), (8,)),
    ((1, 2), (3, 5), (2, 7)),
    ((1, 0), (SIDE,), (SIDE,)),
    ((1,), (3, 5), (LARGE_KERNEL,)),
    ((1,), (LARGE_KERNEL // 8,), (2, 4)),
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize(("rows", "sizes", "features"), SHAPES)
def test_a_product_is_the_sum_over_its_inputs(
    rows: tuple[int, ...], sizes: tuple[int, ...], features: tuple[int, ...], inputs_first: bool, dtype: Any
) -> None:
    x, kernel = numbers(*rows, *sizes, dtype=dtype), numbers(*sizes, *features, dtype=dtype)
    exact = np.tensordot(np.asarray(x, np.float64), np.asarray(kernel, np.float64), len(sizes))
    given = kernel if inputs_first else jnp.moveaxis(kernel, range(len(sizes)), range(-len(sizes), 0))
    for run in (product, jax.jit(product, static_argnums=(2, 3, 4))):
        out = run(x, given, len(sizes), inputs_first, jnp.float32)
        assert out.shape == (*rows, *features) and out.dtype == jnp.float32
        np.testing.assert_allclose(out, exact, atol=2e-4)


def test_sums_are_not_rounded_to_the_dtype_of_the_inputs() -> None:
    """Logits of bfloat16 models: near 20, bfloat16 has a number in every 0.125."""
    x, kernel = numbers(3, 64, dtype=jnp.bfloat16), 3 * numbers(40, 64, dtype=jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T
    assert np.abs(product(x, kernel, dtype=jnp.float32) - exact).max() < 1e-3
    assert np.abs(np.asarray(product(x, kernel), np.float64) - exact).max() > 1e-2


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("inputs_first", [False, True])
def test_it_has_the_same_gradients(inputs_first: bool, rows: int) -> None:
    x, kernel = numbers(rows, SIDE), numbers(SIDE, SIDE)
    ours = jax.grad(lambda x, kernel: jnp.sin(product(x, kernel, 1, inputs_first)).sum(), (0, 1))(x, kernel)
    plain = jax.grad(lambda x, k: jnp.sin(x @ (k if inputs_first else k.T)).sum(), (0, 1))(x, kernel)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), ours, plain)


@pytest.mark.several
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("split", [("a", None), (None, "a")])
def test_a_kernel_may_lie_on_several_devices(split: tuple[str | None, str | None], rows: int) -> None:
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("a",))
    x, kernel = numbers(rows, SIDE), numbers(SIDE, SIDE)
    spread = jax.device_put(kernel, NamedSharding(mesh, PartitionSpec(*split)))
    np.testing.assert_allclose(jax.jit(product)(x, spread), x @ kernel.T, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "side", "dtype", "batched"),
    [
        (1, SIDE, jnp.float32, True),
        (2, SIDE, jnp.float32, False),
        (1, SIDE // 2, jnp.float32, False),
        (1, SIDE, jnp.bfloat16, False),
    ],
)
@pytest.mark.parametrize("inputs_first", [False, True])
def test_one_row_meets_a_large_kernel_as_halves(
    rows: int, side: int, dtype: Any, batched: bool, inputs_first: bool
) -> None:
    x, kernel = numbers(rows, side, dtype=dtype), numbers(side, side, dtype=dtype)
    lowered = jax.jit(product, static_argnums=(2, 3)).lower(x, kernel, 1, inputs_first)
    assert ("batching_dims" in lowered.as_text()) == batched


@pytest.mark.parametrize("inputs_first", [False, True])
def test_a_kernel_is_never_transposed(inputs_first: bool) -> None:
    """Whole kernels are read as they lie; a transposed one would be a second copy of the weights in every pass."""
    features, sizes = (3, 5, 64), (64,)
    kernel = numbers(*(sizes + features if inputs_first else features + sizes))
    compiled = jax.jit(product, static_argnums=(2, 3)).lower(numbers(1, 4, 64), kernel, 1, inputs_first).compile()
    assert " transpose(" not in compiled.as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("head", "slots", "by_sums"),
    [(2 * VECTOR, MOST_SLOTS, True), (2 * VECTOR, MOST_SLOTS + 1, False), (VECTOR + 1, 40, False), (VECTOR, 1, True)],
)
def test_few_scores_are_sums(head: int, slots: int, by_sums: bool, dtype: Any) -> None:
    rows, key = numbers(2, 3, 5, head, dtype=dtype), numbers(2, 3, head, slots, dtype=dtype)
    out = jax.jit(scores)(rows, key)
    exact = np.asarray(rows, np.float64) @ np.asarray(key, np.float64)
    assert out.dtype == jnp.float32 and out.shape == exact.shape
    np.testing.assert_allclose(out, exact, atol=1e-4)
    assert (" dot(" in jax.jit(scores).lower(rows, key).compile().as_text()) != by_sums


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("slots", "head", "by_sums"),
    [
        (SHARES * (WINDOW + 1), 2 * VECTOR, True),
        (SHARES * WINDOW, 2 * VECTOR, False),
        (SHARES * (WINDOW + 1) + 1, VECTOR, False),
        (SHARES * (WINDOW + 1), FEW_PRODUCTS // (2 * 3 * 5 * SHARES * (WINDOW + 1)), True),
        (SHARES * (WINDOW + 1), FEW_PRODUCTS // (2 * 3 * 5 * SHARES * (WINDOW + 1)) + 1, False),
    ],
)
def test_small_mixtures_are_sums(slots: int, head: int, by_sums: bool, dtype: Any) -> None:
    shares, value = softmax(numbers(2, 3, 5, slots)).astype(dtype), numbers(2, 3, slots, head, dtype=dtype)
    out = jax.jit(mixture)(shares, value)
    exact = np.asarray(shares, np.float64) @ np.asarray(value, np.float64)
    assert out.dtype == dtype and out.shape == exact.shape
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=1e-6 if dtype == jnp.float32 else 1e-2)
    assert (" dot(" in jax.jit(mixture).lower(shares, value).compile().as_text()) != by_sums


def sines(program: Any, positions: jax.Array) -> int:
    """How often a compiled program computes sines."""
    return jax.jit(program).lower(positions).compile().as_text().count(" sine(")


def test_a_rotation_is_computed_once_however_many_use_it() -> None:
    """The negative control is the plain form: if XLA computes that once too, the condition can go."""
    rope, positions = RopeConfig(), jnp.arange(3)[None]

    def layers(turn: tuple[jax.Array, jax.Array]) -> jax.Array:
        x = jnp.ones((32, 8))
        for _ in range(3):
            x = (x * turn[0][0, 0, :, None] + turn[1][0, 1, :, None]) @ jnp.ones((8, 8))
        return x

    def plain(at: jax.Array) -> jax.Array:
        return layers(rotation(rope, 64, at))

    def once(at: jax.Array) -> jax.Array:
        return layers(computed_once(lambda at: rotation(rope, 64, at), at))

    np.testing.assert_array_equal(jax.jit(once)(positions), jax.jit(plain)(positions))
    assert sines(once, positions) == 1
    assert sines(plain, positions) > 1


def test_position_zero_is_turned_too() -> None:
    first = jnp.zeros((1, 1), jnp.int32)
    cosine, sine = jax.jit(lambda at: computed_once(lambda at: rotation(RopeConfig(), 8, at), at))(first)
    assert (np.asarray(cosine) == 1).all() and (np.asarray(sine) == 0).all()


@pytest.mark.parametrize("width", [1, VECTOR, 2 * VECTOR, 100, 384, 1024, 2500])
def test_softmax_by_halves_is_softmax(width: int) -> None:
    scores = 5 * numbers(3, 2, width)
    scores = scores.at[0, 0, width // 2 :].set(-1e30).at[1, 1].set(-1e30)  # as of tokens that are not seen
    exact = np.exp(np.asarray(scores, np.float64) - np.asarray(scores, np.float64).max(axis=-1, keepdims=True))
    exact /= exact.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(jax.jit(softmax)(scores), exact, rtol=2e-6, atol=1e-30)


def test_what_is_not_seen_changes_no_share() -> None:
    """However many slots a pass looks at beyond those in use, an answer is the same to the last bit."""
    scores = numbers(4, 256)
    wide = jnp.pad(scores, ((0, 0), (0, 768)), constant_values=-1e30)
    np.testing.assert_array_equal(jax.jit(softmax)(wide)[:, :256], jax.jit(softmax)(scores))


def test_softmax_takes_no_sum_over_neighbours_on_cpu_alone() -> None:
    """The negative control is the plain form: if XLA stops going window by window there, the halves can go."""

    def windows(program: Any) -> int:
        return jax.jit(program).lower(numbers(4, 1024)).compile().as_text().count(" reduce-window(")

    assert windows(softmax) == 0 and windows(jax.nn.softmax) > 0
    elsewhere = jax.export.export(jax.jit(softmax), platforms=["cuda"])(jax.ShapeDtypeStruct((4, 1024), jnp.float32))
    assert "tensor<4x512xf32>" not in elsewhere.mlir_module()
    here = jax.export.export(jax.jit(softmax), platforms=["cpu"])(jax.ShapeDtypeStruct((4, 1024), jnp.float32))
    assert "tensor<4x512xf32>" in here.mlir_module()


@pytest.mark.parametrize("width", [1, 2, VECTOR, VECTOR + 1, 33, 768, 4096, 32_006])
def test_argmax_by_halves_is_the_first_of_the_largest(width: int) -> None:
    x = np.random.default_rng(width).integers(0, 5, (6, width)).astype(np.float32)  # most numbers are there often
    x[1] = -np.inf
    x[2, : width // 2] = -np.inf
    x[3, width // 3] = x[3, -1] = 9
    x[4, -1] = 9
    x[5, width // 2] = np.nan
    found = jax.jit(argmax)(x)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, np.argmax(x, axis=-1))
    np.testing.assert_array_equal(argmax(x[0]), np.argmax(x[0]))


def test_argmax_takes_vectors_on_cpu_alone() -> None:
    """The negative control is the plain form: if XLA stops going number by number there, the halves can go."""
    x = numbers(4, 1024)

    def pairs(program: Any) -> int:
        return len(re.findall(r"\(f32\[4\]\S*, s32\[4\]\S*\) reduce\(", jax.jit(program).lower(x).compile().as_text()))

    def plain(x: jax.Array) -> jax.Array:
        return jnp.argmax(x, axis=-1)

    assert pairs(argmax) == 0 and pairs(plain) > 0
    elsewhere = jax.export.export(jax.jit(argmax), platforms=["cuda"])(jax.ShapeDtypeStruct((4, 1024), jnp.float32))
    assert "tensor<4x512xf32>" not in elsewhere.mlir_module()
