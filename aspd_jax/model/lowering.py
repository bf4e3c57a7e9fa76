"""Forms of a computation that XLA compiles to faster programs on CPU; on other platforms they are the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Value = TypeVar("Value")

LARGE_KERNEL = 1 << 16  # elements; smaller ones are in a core's own cache, where it is fast enough alone
PARTS = 2
VECTOR = 16  # numbers that a core takes at once
FEW_PRODUCTS = 3 << 18  # multiplications, up to which scores and mixtures are sums on CPU
SHARES = 8  # shares of values that are added up before all are
WINDOW = 32  # XLA adds more than so many numbers in two steps, as vectors; fewer one after another, which is slow


def product(
    x: jax.Array, kernel: jax.Array, inputs: int = 1, inputs_first: bool = False, dtype: Any = None
) -> jax.Array:
    """`x` [..., *sizes] times a kernel, summed over the `inputs` axes of `sizes`: [..., *features].

    XLA on CPU transposes a kernel before a product over more than two axes, so there it meets it as a matrix. And it
    gives a product of one row to one core, of a batch of products each to a core: so one row meets a large kernel as
    two halves of its first axis.

    Args:
        kernel: [*features, *sizes], or with `inputs_first` [*sizes, *features].
        dtype: of the sums; default: that of the inputs.
    """
    outer, cut = x.shape[: x.ndim - inputs], inputs if inputs_first else kernel.ndim - inputs
    features = kernel.shape[cut:] if inputs_first else kernel.shape[:cut]

    def contracted(x: jax.Array, kernel: jax.Array, inputs: int, batch: int = 0) -> jax.Array:
        first = batch if inputs_first else kernel.ndim - inputs
        contract = tuple(range(x.ndim - inputs, x.ndim)), tuple(range(first, first + inputs))
        batched = tuple(range(batch))
        return jax.lax.dot_general(x, kernel, (contract, (batched, batched)), preferred_element_type=dtype)

    def whole(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return contracted(x, kernel, inputs)

    def as_matrices(x: jax.Array, kernel: jax.Array) -> jax.Array:
        rows = x.reshape(prod(outer), prod(x.shape[x.ndim - inputs :]))
        matrix = kernel.reshape(prod(kernel.shape[:cut]), prod(kernel.shape[cut:]))
        large = kernel.size >= LARGE_KERNEL and kernel.dtype == jnp.float32 and len(matrix) % PARTS == 0
        if len(rows) != 1 or not large:
            return contracted(rows, matrix, 1).reshape(*outer, *features)
        halves = matrix.reshape(PARTS, -1, matrix.shape[1])
        if inputs_first:
            return contracted(rows.reshape(PARTS, 1, -1), halves, 1, 1).sum(axis=0).reshape(*outer, *features)
        return contracted(jnp.broadcast_to(rows, (PARTS, *rows.shape)), halves, 1, 1).reshape(*outer, *features)

    return jax.lax.platform_dependent(x, kernel, cpu=as_matrices, default=whole)


def scores(rows: jax.Array, key: jax.Array) -> jax.Array:
    """Queries as rows [B, K, R, H] by keys [B, K, H, C], summed over H: float32 [B, K, R, C]."""
    return _multiplied(rows, key, VECTOR, jnp.dtype(jnp.float32))


def mixture(shares: jax.Array, value: jax.Array) -> jax.Array:
    """Shares as rows [B, K, R, C] of values [B, K, C, H], summed over C: [B, K, R, H] in the dtype of the values."""
    return _multiplied(shares, value, SHARES if shares.shape[3] > SHARES * WINDOW else 0, value.dtype)


def _multiplied(rows: jax.Array, columns: jax.Array, terms: int, dtype: jnp.dtype[Any]) -> jax.Array:
    """`rows` [B, K, R, N] by `columns` [B, K, N, M], summed over N: [B, K, R, M].

    On CPU, XLA calls a library for a product, which leaves one this small to a core while the others fall asleep. Sums
    it compiles together with what is done to them, and shares them out. So few products are sums of sums.

    Args:
        terms: numbers of the inner sums; 0: these are never sums.
    """

    def whole(rows: jax.Array, columns: jax.Array) -> jax.Array:
        return jnp.einsum("BKRN,BKNM->BKRM", rows, columns, preferred_element_type=dtype)

    def by_sums(rows: jax.Array, columns: jax.Array) -> jax.Array:
        left = rows.reshape(*rows.shape[:3], -1, terms, 1).astype(jnp.float32)
        right = columns.reshape(*columns.shape[:2], 1, -1, terms, columns.shape[3]).astype(jnp.float32)
        inner = (left[..., number, :] * right[..., number, :] for number in range(terms))
        return reduce(jnp.add, inner).sum(axis=3).astype(dtype)

    few = terms > 0 and rows.size * columns.shape[3] <= FEW_PRODUCTS and rows.shape[3] % terms == 0
    return jax.lax.platform_dependent(rows, columns, cpu=by_sums, default=whole) if few else whole(rows, columns)


def softmax(scores: jax.Array) -> jax.Array:
    """Softmax over the last axis; not for training, where the halves would be kept.

    XLA on CPU takes a sum or a maximum over neighbours one number after another. Halves that meet are vectors.
    """

    def by_halves(scores: jax.Array) -> jax.Array:
        shares = jnp.exp(scores - _largest(scores))
        return shares / jnp.sum(_folded(jnp.add, shares), axis=-1, keepdims=True)

    return jax.lax.platform_dependent(scores, cpu=by_halves, default=jax.nn.softmax)


def argmax(x: jax.Array) -> jax.Array:
    """The place of the largest number of the last axis, the first of several, int32 [...]; NaN counts as the largest.

    XLA on CPU looks for it number by number, with its place at hand. A maximum and the first place that holds it are
    two looks, but of vectors.
    """

    def by_halves(x: jax.Array) -> jax.Array:
        place = jnp.arange(x.shape[-1], dtype=jnp.int32)
        found = jnp.where((x == _largest(x)) | jnp.isnan(x), place, x.shape[-1])
        return jnp.min(_folded(jnp.minimum, found, twice=True), axis=-1)

    def plain(x: jax.Array) -> jax.Array:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)

    return jax.lax.platform_dependent(x, cpu=by_halves, default=plain)


def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(_folded(jnp.maximum, x, twice=True), axis=-1, keepdims=True)


def _folded(operation: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, twice: bool = False) -> jax.Array:
    """The halves of the last axis put together, again and again while it is not narrower than a vector.

    Args:
        twice: whether the operation may take a number twice: halves of an odd number share the one in the middle then,
            which are left alone else.
    """
    while (size := x.shape[-1]) > VECTOR and (twice or size % 2 == 0):
        half = -(-size // 2)
        x = operation(x[..., :half], x[..., size - half :])
    return x


def computed_once(make: Callable[[jax.Array], Value], positions: jax.Array) -> Value:
    """`make(positions)`, which are 0 or more.

    XLA on CPU merges what is cheap by its own measure, sines and masks too, with everything that uses it, and so
    computes it again for every layer and head. It does not look into a condition, not even into one that always holds.
    """

    def behind_condition(positions: jax.Array) -> Value:
        shapes = jax.eval_shape(make, positions)

        def never(positions: jax.Array) -> Value:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        return jax.lax.cond((positions >= 0).any(), make, never, positions)

    return jax.lax.platform_dependent(positions, cpu=behind_condition, default=make)


def copies_slices() -> bool:
    """Whether what is multiplied with a part of an array copies this part first; elsewhere it is read where it lies."""
    return jax.default_backend() == "cpu"
