"""Attention for training on an NVIDIA GPU: the kernels of `model.flash`, in the form that Triton compiles.

B rows, S tokens of a row (whole tiles), K kv heads, G query heads per kv head, H head size (a power of two), T tokens
of a tile, N tiles of a row.

Every program of the grid computes one tile of a result: it loops over the tiles of the other side that share a
non-empty mask with it, and accumulates in registers. These tiles are listed before the kernel runs (`Order`); tiles
with a full mask come first and are computed without a mask. Arrays keep the layout of the model, with heads after
tokens: a kernel reads its rows by their strides, and nothing is transposed or copied.

Exponentials have base 2, which the hardware computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import e, log2
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from aspd_jax.layout import HIDDEN, NO_WINDOW, Layout
from aspd_jax.model.flash import Arrays, Kernel, Passes, intervals, product, row_deltas, tiles_in_sight, whole_tiles
from aspd_jax.sizes import next_power

# Limits of a tile: tokens, and bytes of one head. They keep bfloat16 sums in registers; keys and values need two sums.
LEAST, MOST, MAX_BY_KEY, MAX_BYTES = 16, 128, 64, 2**15
MIN_SIZE = 16  # minimum head size: the smallest side of a matrix product
WARPS, STAGES = 8, 2


class Order(NamedTuple):
    """For each tile of a result, the tiles of the other side in the order of visits.

    Attributes:
        tiles: int32 [B, N, N], indices of the tiles: first those with a full mask, then those with a partial mask.
        ends: int32 [B, N, 2], number of tiles with a full mask, and with a non-empty mask.
    """

    tiles: jax.Array
    ends: jax.Array


def order(seen: jax.Array, whole: jax.Array) -> Order:
    """Return the `Order` of every tile along the first tile axis.

    Args:
        seen, whole: bool [B, N, N], results of `tiles_in_sight`.
    """
    rank = jnp.where(whole, 0, jnp.where(seen, 1, 2))
    ends = jnp.stack([whole.sum(-1, dtype=jnp.int32), seen.sum(-1, dtype=jnp.int32)], axis=-1)
    return Order(jnp.argsort(rank, axis=-1).astype(jnp.int32), ends)


def forward(kernel: Kernel, arrays: Arrays, layout: Layout, window: jax.Array | None) -> Arrays:
    """Run the forward pass, see `Passes`; the log-sum-exp has base 2."""
    query, *_ = inputs = [_padded(kernel, x) for x in arrays]
    B, S, K, G, _ = query.shape
    results = jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((B, K, G, S), jnp.float32)
    body = partial(_forward_kernel, _scale(arrays))
    out, total = _run(kernel, body, layout, window, inputs, results, by_key=False)
    return _unpadded(out, arrays[0]), total


def backward(kernel: Kernel, arrays: Arrays, layout: Layout, window: jax.Array | None, *results: jax.Array) -> Arrays:
    """Run the backward pass, see `Passes`; keys and values have a kernel of their own."""
    out, total, gradient = results
    inputs = [*(_padded(kernel, x) for x in (*arrays, gradient)), total, row_deltas(kernel, out, gradient)]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:3]]
    by_query, by_key = (partial(body, _scale(arrays)) for body in (_query_kernel, _key_kernel))
    to_query = _run(kernel, by_query, layout, window, inputs, shapes[:1], by_key=False)
    to_both = _run(kernel, by_key, layout, window, inputs, shapes[1:], by_key=True)
    return tuple(map(_unpadded, (*to_query, *to_both), arrays))


GPU = Passes(forward, backward)


def _scale(arrays: Arrays) -> float:
    return float(arrays[0].shape[-1] ** -0.5)


def _padded(kernel: Kernel, x: jax.Array) -> jax.Array:
    """Pad [B, S, …, H] to whole tiles of tokens and to a head size that kernels support."""
    x = whole_tiles(kernel, x, 1)
    more = max(MIN_SIZE, next_power(x.shape[-1])) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x


def _unpadded(x: jax.Array, original: jax.Array) -> jax.Array:
    return x[:, : original.shape[1], ..., : original.shape[-1]]


def _run(
    kernel: Kernel,
    body: Callable[..., None],
    layout: Layout,
    window: jax.Array | None,
    arrays: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    by_key: bool,
) -> Any:
    """Run a kernel for every row, head and tile.

    Args:
        kernel, layout, window: arguments of `Passes`.
        body: the kernel.
        arrays: query, key, value; for a backward pass also gradient, log-sum-exp and `row_deltas`.
        results: shapes of two arrays like the keys; or of one like the queries, and optionally of a number per query.
        by_key: whether a program computes a key tile with the queries of all heads of its group, instead of a query
            tile of one head.
    """
    B, S, K, G, H = arrays[0].shape
    # The tile here is a power of two that divides the tile of `kernel`, to which the arrays are padded.
    T = min(kernel.tile, MAX_BY_KEY if by_key else MOST, max(LEAST, MAX_BYTES // (H * arrays[0].dtype.itemsize)))
    spans = intervals(kernel, layout)
    sight = tiles_in_sight(spans, T, window)
    tiles, ends = order(*(jnp.swapaxes(x, 1, 2) for x in sight) if by_key else sight)
    tables = [
        pl.BlockSpec((None, None, S // T), lambda n, h, b: (b, n, 0)),
        pl.BlockSpec((None, None, 2), lambda n, h, b: (b, n, 0)),
        pl.BlockSpec((1,), lambda n, h, b: (0,)),
        pl.BlockSpec((None, 4, S), lambda n, h, b: (b, 0, 0)),
    ]
    if by_key:
        queries = pl.BlockSpec((None, S, None, G, H), lambda n, k, b: (b, 0, k, 0, 0))
        keys = pl.BlockSpec((None, T, None, H), lambda n, k, b: (b, n, k, 0))
        numbers = pl.BlockSpec((None, None, G, S), lambda n, k, b: (b, k, 0, 0))
    else:
        queries = pl.BlockSpec((None, T, None, None, H), lambda n, h, b: (b, n, h // G, h % G, 0))
        keys = pl.BlockSpec((None, S, None, H), lambda n, h, b: (b, 0, h // G, 0))
        numbers = pl.BlockSpec((None, None, None, T), lambda n, h, b: (b, h // G, h % G, n))
    run = pl.pallas_call(
        body,
        results,
        grid=(S // T, K if by_key else K * G, B),
        in_specs=[*tables, *(queries, keys, keys, queries, numbers, numbers)[: len(arrays)]],
        out_specs=[keys, keys] if by_key else [queries, numbers][: len(results)],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=kernel.otherwise is None,
    )
    return run(tiles, ends, jnp.full(1, NO_WINDOW) if window is None else window, spans, *arrays)


def _forward_kernel(scale: float, *refs: Any) -> None:
    tiles, ends, limit, spans, query, key, value, out, total = refs
    (T, H), queries, now = query.shape, query[...], pl.program_id(0)

    def add(masked: bool, visit: jax.Array, sums: Arrays) -> Arrays:
        top, mass, weighted = sums
        key_tile = tiles[visit]
        at = pl.ds(key_tile * T, T)
        scores = product(queries, key[at, :], 1, 1) * (scale * log2(e))
        if masked:
            scores = jnp.where(_mask(spans, limit, now, key_tile, T, 0), scores, HIDDEN)
        highest = jnp.maximum(top, scores.max(axis=1))
        probs, kept = jnp.exp2(scores - highest[:, None]), jnp.exp2(top - highest)
        weighted = kept[:, None] * weighted + product(probs.astype(value.dtype), value[at, :], 1, 0)
        return highest, kept * mass + probs.sum(axis=1), weighted

    initial = jnp.full(T, HIDDEN, jnp.float32), jnp.zeros(T, jnp.float32), jnp.zeros((T, H), jnp.float32)
    top, mass, weighted = _visit(ends, add, initial)
    # A query that sees no key gets the result 0, and a log-sum-exp of 0, so that its probabilities are 0 later.
    some = top > HIDDEN
    out[...] = jnp.where(some[:, None], weighted / mass[:, None], 0).astype(out.dtype)
    total[...] = jnp.where(some, top + jnp.log2(mass), 0)


def _query_kernel(scale: float, *refs: Any) -> None:
    tiles, ends, limit, spans, query, key, value, gradient, total, delta, out = refs
    (T, H), now = query.shape, pl.program_id(0)
    queries, gradients, totals, deltas = query[...], gradient[...], total[...][:, None], delta[...][:, None]

    def add(masked: bool, visit: jax.Array, sums: jax.Array) -> jax.Array:
        key_tile = tiles[visit]
        keys, values = (x[pl.ds(key_tile * T, T), :] for x in (key, value))
        scores = product(queries, keys, 1, 1) * (scale * log2(e))
        if masked:
            scores = jnp.where(_mask(spans, limit, now, key_tile, T, 0), scores, HIDDEN)
        to_scores = jnp.exp2(scores - totals) * (product(gradients, values, 1, 1) - deltas)
        return sums + product(to_scores.astype(key.dtype), keys, 1, 0)

    out[...] = (scale * _visit(ends, add, jnp.zeros((T, H), jnp.float32))).astype(out.dtype)


def _key_kernel(scale: float, *refs: Any) -> None:
    tiles, ends, limit, spans, query, key, value, gradient, total, delta, to_key, to_value = refs
    (T, H), now = key.shape, pl.program_id(0)
    keys, values = key[...], value[...]

    def of_head(g: jax.Array, sums: Arrays) -> Arrays:
        def add(masked: bool, visit: jax.Array, sums: Arrays) -> Arrays:
            of_keys, of_values = sums
            query_tile = tiles[visit]
            at = pl.ds(query_tile * T, T)
            queries, gradients = query[at, g, :], gradient[at, g, :]
            scores = product(keys, queries, 1, 1) * (scale * log2(e))
            if masked:
                scores = jnp.where(_mask(spans, limit, query_tile, now, T, 1), scores, HIDDEN)
            probs = jnp.exp2(scores - total[g, at][None])
            to_scores = probs * (product(values, gradients, 1, 1) - delta[g, at][None])
            of_keys += product(to_scores.astype(query.dtype), queries, 1, 0)
            return of_keys, of_values + product(probs.astype(gradient.dtype), gradients, 1, 0)

        return _visit(ends, add, sums)

    initial = jnp.zeros((T, H), jnp.float32)
    of_keys, of_values = jax.lax.fori_loop(0, query.shape[1], of_head, (initial, initial))
    to_key[...] = (scale * of_keys).astype(to_key.dtype)
    to_value[...] = of_values.astype(to_value.dtype)


def _visit(ends: Any, add: Callable[..., Any], sums: Any) -> Any:
    """Accumulate over all tiles with a non-empty mask; the first argument of `add` is whether to apply the mask."""
    sums = jax.lax.fori_loop(0, ends[0], partial(add, False), sums)
    return jax.lax.fori_loop(ends[0], ends[1], partial(add, True), sums)


def _mask(spans: Any, limit: Any, of_query: jax.Array, of_key: jax.Array, T: int, axis: int) -> jax.Array:
    """Return the mask between a query tile and a key tile, from the `intervals` of the whole row.

    Args:
        spans: int32 [4, S].
        limit: sliding window, int32 [1].
        of_query, of_key: indices of the tiles.
        T: tokens of a tile.
        axis: axis of the queries in the result.

    Returns:
        Bool [T, T].
    """
    start, hidden, branch, position = (jnp.expand_dims(spans[n, pl.ds(of_query * T, T)], 1 - axis) for n in range(4))
    query, key = (
        jnp.expand_dims(tile * T + jnp.arange(T), side) for tile, side in ((of_query, 1 - axis), (of_key, axis))
    )
    key_position = jnp.expand_dims(spans[3, pl.ds(of_key * T, T)], axis)
    return (start <= key) & (key <= query) & ((key < hidden) | (branch <= key)) & (position - key_position < limit[0])
