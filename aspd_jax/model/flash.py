"""Tiled attention for training: no array of size [S, S] exists, and tiles whose mask is empty are skipped.

This module holds the parts that all platforms share and the kernels for TPU; `model.flash_gpu` holds those for GPU.

B rows, S tokens of a row, K kv heads, G query heads per kv head, H head size, T tokens of a tile, N tiles of a row
(padded to N x T tokens), V visits: pairs of a query tile and a key tile with a non-empty mask.

In the order of the linearisation, a query sees two intervals of keys: from the start of its sequence to the start of
its block, and from the start of its branch to itself. The mask is therefore a few numbers per token (`intervals`),
which determine the pairs of tiles to visit (`tiles_in_sight`). The same program computes the list of visits and passes
it to the kernels as scalars: on a TPU, the grid has one step per visit, which loads only the two tiles of that visit.

The algorithm is FlashAttention-2 (Dao, 2023). Scores are stored as [keys, queries]: on a TPU, reductions over keys then
run across sublanes, and the statistics of the queries lie along lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, prod
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, PartitionSpec

from aspd_jax.layout import HIDDEN, Layout, Siblings
from aspd_jax.sharding import MESH_AXES, partition_spec

MAX_TOKENS = 512  # maximum tokens of a tile
MAX_BYTES = 2**20  # maximum bytes of a query tile of one kv head; a kernel holds up to eight of them in 16 MiB
LANES = 128  # tokens of a tile are a multiple of this
FIRST, LAST, WHOLE = 1, 2, 4  # flags of a visit, see `Visits`

Arrays: TypeAlias = tuple[jax.Array, ...]
Attend: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array, Layout, jax.Array | None], jax.Array]


class Passes(NamedTuple):
    """Forward and backward pass of a platform; both take a `Kernel`, (query, key, value), their layout and the window.

    Attributes:
        forward: function that returns the result [B, S, K, G, H], with zeros at padding, and the log-sum-exp of the
            scores, float32 [B, K, G, N x T], which only its own backward pass reads.
        backward: function that also takes the two results and the gradient of the first, and returns the gradients of
            query, key and value.
    """

    forward: Callable[..., Arrays]
    backward: Callable[..., Arrays]


class Kernel(NamedTuple):
    """Static parameters of an attention computation.

    Attributes:
        siblings: mask of siblings, see `layout.visible`.
        tile: tokens of a tile.
        mesh: mesh over which rows and kv heads are split, or None.
        passes: pairs of platform name and kernels.
        otherwise: attention for other platforms; None: interpret the kernels of the only platform.
    """

    siblings: Siblings
    tile: int
    mesh: AbstractMesh | None = None
    passes: tuple[tuple[str, Passes], ...] = ()
    otherwise: Attend | None = None


class Visits(NamedTuple):
    """Pairs of tiles in the order of their visits; int32 [V].

    Attributes:
        row: index of the row in the batch.
        query, key: index of the tile in its row.
        flags: `FIRST` and `LAST` mark the first and last visit to one tile of the result; `WHOLE`: every query of the
            tile sees every key, so that no mask is needed.
    """

    row: jax.Array
    query: jax.Array
    key: jax.Array
    flags: jax.Array


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layout: Layout,
    siblings: Siblings,
    window: int | jax.Array | None,
    passes: Mapping[str, Passes],
    otherwise: Attend | None,
    tile: int | None = None,
) -> jax.Array:
    """Compute attention of a full pass, with kernels on the platforms that have them.

    Kernel memory grows with S. Traced under `sharding.use_mesh`, the kernels run on all its devices.

    Args:
        query: [B, S, K, G, H].
        key, value: [B, S, K, H].
        layout: layout of the tokens, int32 [B, S] per field; padding lies between sequences, never inside one.
        siblings, window: see `layout.visible`.
        passes: kernels by platform name, as in `jax.lax.platform_dependent`.
        otherwise: attention for other platforms; None: interpret the kernels of the only platform, for tests.
        tile: tokens of a tile; default: see `tile_for`.

    Returns:
        [B, S, K, G, H] in the dtype of the query. Kernels return zeros at padding.
    """
    length = query.shape[1]
    if tile is None:
        tile = tile_for(length, prod(query.shape[3:]) * query.dtype.itemsize)
    mesh = jax.sharding.get_abstract_mesh()
    split = mesh.axis_names == MESH_AXES and mesh.size > 1
    kernel = Kernel(siblings, tile, mesh if split else None, tuple(passes.items()), otherwise)
    limit = None if window is None else jnp.asarray(window, jnp.int32).reshape(1)
    return _attention(kernel, (query, key, value), Layout(*map(jnp.asarray, layout)), limit)


def tile_for(length: int, width: int) -> int:
    """Return the tokens of a tile: the smallest tile with the minimum number of tiles per row.

    Args:
        length: tokens of a row.
        width: bytes per token in the queries of a kv head.
    """
    max_tokens = max(LANES, min(MAX_TOKENS, MAX_BYTES // width // LANES * LANES))
    return LANES * ceil(length / ceil(length / max_tokens) / LANES)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(kernel: Kernel, arrays: Arrays, layout: Layout, window: jax.Array | None) -> jax.Array:
    """Compute attention from (query, key, value); window int32 [1] or None."""
    return _forward(kernel, arrays, layout, window)[0]


def _forward(kernel: Kernel, arrays: Arrays, layout: Layout, window: jax.Array | None) -> tuple[jax.Array, Any]:
    """Return the result and the residuals of the backward pass: the arguments and both results of `Passes.forward`."""

    def plain(arrays: Arrays, layout: Layout, window: jax.Array | None) -> Arrays:
        assert kernel.otherwise is not None
        query, key, value = arrays
        B, S, K, G, _ = query.shape
        unused = jnp.zeros((B, K, G, S + -S % kernel.tile), jnp.float32)
        return kernel.otherwise(query, key, value, layout, window), unused

    by_kernels = {name: _by_shard(kernel, passes.forward) for name, passes in kernel.passes}
    out, total = _on_platform(kernel, by_kernels, plain)(arrays, layout, window)
    return out, (arrays, layout, window, out, total)


def _backward(kernel: Kernel, kept: Any, gradient: jax.Array) -> tuple[Arrays, None, None]:
    def plain(arrays: Arrays, layout: Layout, window: jax.Array | None, *results: jax.Array) -> Arrays:
        assert kernel.otherwise is not None
        attend = kernel.otherwise
        return jax.vjp(lambda query, key, value: attend(query, key, value, layout, window), *arrays)[1](results[-1])

    by_kernels = {name: _by_shard(kernel, passes.backward) for name, passes in kernel.passes}
    return _on_platform(kernel, by_kernels, plain)(*kept, gradient), None, None


_attention.defvjp(_forward, _backward)


def _on_platform(
    kernel: Kernel, by_kernels: Mapping[str, Callable[..., Any]], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """Select the kernels of the platform, or `plain` elsewhere.

    The selection happens inside each pass, so that no residual of one implementation is kept for the other.
    """
    if kernel.otherwise is not None:
        return partial(jax.lax.platform_dependent, **by_kernels, default=plain)
    (interpreted,) = by_kernels.values()
    return interpreted


def _by_shard(kernel: Kernel, run: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """Run the kernels on every device of the mesh for its own rows and kv heads, because XLA cannot partition a kernel.

    Args:
        kernel: static parameters, with the mesh.
        run: one of the functions of `Passes`.
    """

    def run_sharded(arrays: Arrays, layout: Layout, window: jax.Array | None, *results: jax.Array) -> Arrays:
        if kernel.mesh is None:
            return run(kernel, arrays, layout, window, *results)
        B, _, K, _ = arrays[1].shape
        rows, heads = partition_spec(("batch", "kv_heads"), (B, K), kernel.mesh)
        tokens, numbers = PartitionSpec(rows, None, heads), PartitionSpec(rows, heads)
        in_specs = (tokens, PartitionSpec(rows), PartitionSpec(), *((tokens, numbers, tokens) if results else ()))
        out_specs = tokens if results else (tokens, numbers)
        sharded = jax.shard_map(
            partial(run, kernel), mesh=kernel.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return sharded(arrays, layout, window, *results)

    return run_sharded


def _heads_first(kernel: Kernel, x: jax.Array) -> jax.Array:
    """Transpose [B, S, K, …, H] to [B, K, …, N x T, H] and pad the tokens to whole tiles.

    Without padding, XLA implements the transpose as a choice of layout.
    """
    return whole_tiles(kernel, jnp.moveaxis(x, 1, -2), -2)


def whole_tiles(kernel: Kernel, x: jax.Array, axis: int) -> jax.Array:
    """Pad an axis of S tokens with zeros to N x T tokens."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % kernel.tile)
    return jnp.pad(x, widths) if widths[axis][1] else x


def _at_tokens(layout: Layout, x: jax.Array) -> jax.Array:
    """Transpose [B, K, …, N x T, H] to [B, S, K, …, H], with zeros at padding.

    Kernels never write tiles that hold only padding, so their contents are undefined.
    """
    real = layout.sequence > 0
    x = jnp.moveaxis(x, -2, 1)[:, : real.shape[1]]
    return jnp.where(real.reshape(*real.shape, *(1,) * (x.ndim - 2)), x, 0)


def row_deltas(kernel: Kernel, out: jax.Array, gradient: jax.Array) -> jax.Array:
    """Return the sum of result x gradient per query head: [B, S, K, G, H] to float32 [B, K, G, N x T]."""
    sums = jnp.sum(out.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1)
    return whole_tiles(kernel, jnp.moveaxis(sums, 1, -1), -1)


def intervals(kernel: Kernel, layout: Layout) -> jax.Array:
    """Return the intervals of keys that each token sees: `start` to itself, except `hidden` to `branch` - 1.

    Returns:
        int32 [B, 4, N x T]: `start`, `hidden`, `branch`, and the position, in which a sliding window is measured.
        Padding starts after itself. Where nothing is hidden, `hidden` and `branch` are the index of the next token.
    """
    position, sequence, block, branch = (whole_tiles(kernel, field, 1) for field in layout)
    index = jnp.arange(sequence.shape[1], dtype=jnp.int32)

    def run_start(*fields: jax.Array) -> jax.Array:
        """Return the start of each token's run, where a run is consecutive tokens with equal fields."""
        new = jnp.zeros(fields[0].shape, bool).at[:, 0].set(True)
        for field in fields:
            new = new.at[:, 1:].set(new[:, 1:] | (field[:, 1:] != field[:, :-1]))
        return jax.lax.cummax(jnp.where(new, index, 0), axis=1)

    block_start, branch_start = run_start(sequence, block), run_start(sequence, block, branch)
    has_hidden = (kernel.siblings == "invisible") & (block > 0) & (block_start < branch_start)
    start = jnp.where(sequence > 0, run_start(sequence), index + 1)
    hidden, shown = jnp.where(has_hidden, block_start, index + 1), jnp.where(has_hidden, branch_start, index + 1)
    return jnp.stack([start, hidden, shown, position], axis=1).astype(jnp.int32)


def tiles_in_sight(spans: jax.Array, tile: int, window: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return which pairs of query and key tiles have a non-empty mask, and which have a full mask.

    With a window, the result is conservative: more pairs may count as non-empty, and fewer as full.

    Args:
        spans: result of `intervals`.
        tile: tokens of a tile.
        window: int32 [1], or None.

    Returns:
        Bool [B, N, N] each, queries first.
    """
    B, _, S = spans.shape
    start, hidden, branch, position = spans.reshape(B, 4, -1, tile, 1).swapaxes(0, 1)
    index = jnp.arange(S).reshape(-1, tile, 1)
    first = jnp.arange(0, S, tile)
    last = first + tile - 1
    low, high = jnp.maximum(start, first), jnp.minimum(index, last)
    seen = (low <= high) & ~((hidden <= low) & (high < branch))
    whole = (start <= first) & (last <= index) & ((last < hidden) | (branch <= first))
    if window is not None:
        key_position = position.reshape(B, 1, 1, -1, tile)
        seen = seen & (position - key_position.max(-1) < window)
        whole = whole & (position - key_position.min(-1) < window)
    return seen.any(2), whole.all(2)


def visits(seen: jax.Array, whole: jax.Array, by_key: bool) -> tuple[jax.Array, Visits]:
    """Return the visits in the order of the result tiles.

    Args:
        seen, whole: results of `tiles_in_sight`.
        by_key: whether the result tiles are those of keys instead of queries.

    Returns:
        The number of visits, int32 [], at least one because a grid needs a step; and the visits, followed by padding.
    """
    B, N, _ = seen.shape
    flat = jnp.nonzero(jnp.swapaxes(seen, 1, 2) if by_key else seen, size=B * N * (N + 1) // 2, fill_value=0)
    row, outer, inner = (x.astype(jnp.int32) for x in flat)
    count = jnp.maximum(seen.sum(dtype=jnp.int32), 1)
    place, group = jnp.arange(row.size), row * N + outer
    first = (place == 0) | (group != jnp.roll(group, 1))
    last = (place == count - 1) | (group != jnp.roll(group, -1))
    query, key = (inner, outer) if by_key else (outer, inner)
    flags = FIRST * first + LAST * last + WHOLE * whole[row, query, key]
    return count, Visits(row, query, key, flags.astype(jnp.int32))


def _forward_tiles(kernel: Kernel, arrays: Arrays, layout: Layout, window: jax.Array | None) -> Arrays:
    query, *_ = inputs = [_heads_first(kernel, x) for x in arrays]
    _, _, G, _, H = query.shape
    at_query, at_key, stat, _, _ = blocks = _blocks(G, kernel.tile, H)
    results = jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct(query.shape[:-1], jnp.float32)
    scratch = (G, kernel.tile), (G, kernel.tile), (G, H, kernel.tile)
    body, places = partial(_forward_kernel, window is not None), (at_query, at_key, at_key, *blocks[3:])
    spans = intervals(kernel, layout)
    out, total = _pallas(kernel, body, spans, window, inputs, places, results, (at_query, stat), scratch, by_key=False)
    return _at_tokens(layout, out), total


def _backward_tiles(
    kernel: Kernel, arrays: Arrays, layout: Layout, window: jax.Array | None, *results: jax.Array
) -> Arrays:
    """Compute the gradients of queries in one kernel, and those of keys and values in another."""
    out, total, gradient = results
    inputs = [*(_heads_first(kernel, x) for x in (*arrays, gradient)), total, row_deltas(kernel, out, gradient)]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:3]]
    _, _, G, _, H = shapes[0].shape
    at_query, at_key, stat, _, _ = blocks = _blocks(G, kernel.tile, H)
    places = (at_query, at_key, at_key, at_query, stat, stat, *blocks[3:])
    run = partial(_pallas, kernel, spans=intervals(kernel, layout), window=window, arrays=inputs, blocks=places)
    by_query, by_key = partial(_query_kernel, window is not None), partial(_key_kernel, window is not None)
    to_query = run(by_query, results=shapes[:1], at=(at_query,), scratch=((G, H, kernel.tile),), by_key=False)
    to_both = run(by_key, results=shapes[1:], at=(at_key, at_key), scratch=((kernel.tile, H),) * 2, by_key=True)
    return tuple(_at_tokens(layout, x) for x in (*to_query, *to_both))


TPU = Passes(_forward_tiles, _backward_tiles)


def _blocks(G: int, tile: int, H: int) -> tuple[pl.BlockSpec, ...]:
    """Return the block specs of a grid step: queries, keys, statistics per query, intervals of queries and keys."""
    return (
        pl.BlockSpec((None, None, G, tile, H), lambda k, v, row, query, key, *_: (row[v], k, 0, query[v], 0)),
        pl.BlockSpec((None, None, tile, H), lambda k, v, row, query, key, *_: (row[v], k, key[v], 0)),
        pl.BlockSpec((None, None, G, tile), lambda k, v, row, query, key, *_: (row[v], k, 0, query[v])),
        pl.BlockSpec((None, 4, tile), lambda k, v, row, query, key, *_: (row[v], 0, query[v])),
        pl.BlockSpec((None, 4, tile), lambda k, v, row, query, key, *_: (row[v], 0, key[v])),
    )


def _pallas(
    kernel: Kernel,
    body: Callable[..., None],
    spans: jax.Array,
    window: jax.Array | None,
    arrays: Sequence[jax.Array],
    blocks: Sequence[pl.BlockSpec],
    results: Sequence[jax.ShapeDtypeStruct],
    at: Sequence[pl.BlockSpec],
    scratch: Sequence[tuple[int, ...]],
    by_key: bool,
) -> Any:
    """Run a kernel for every kv head and visit, on `arrays` and the intervals of queries and keys."""
    count, order = visits(*tiles_in_sight(spans, kernel.tile, window), by_key)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=5,
        grid=(arrays[1].shape[1], count),
        in_specs=blocks,
        out_specs=at,
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
    )
    parameters = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))
    interpret = kernel.otherwise is None
    run = pl.pallas_call(body, results, grid_spec=grid, compiler_params=parameters, interpret=interpret)
    return run(*order, jnp.zeros(1, jnp.int32) if window is None else window, *arrays, spans, spans)


def _forward_kernel(windowed: bool, *refs: Any) -> None:
    *visit, query, key, value, of_query, of_key, out, total, top, mass, sums = refs

    def add(mask: jax.Array | None) -> None:
        for g in range(query.shape[0]):
            here = slice(g, g + 1)
            scores = _scores(_scaled(query[g]), key[...], mask)
            before, highest = top[here], jnp.maximum(top[here], scores.max(axis=0, keepdims=True))
            probs, kept = jnp.exp(scores - highest), jnp.exp(before - highest)
            top[here] = highest
            mass[here] = kept * mass[here] + probs.sum(axis=0, keepdims=True)
            sums[g] = kept * sums[g] + product(value[...], probs.astype(value.dtype), 0, 0)

    def finish() -> None:
        for g in range(query.shape[0]):
            out[g] = (sums[g] / mass[g : g + 1]).T.astype(out.dtype)
        # A query that sees no key gets 0, so that all its probabilities are 0 in the backward pass.
        total[...] = jnp.where(top[...] > HIDDEN, top[...] + jnp.log(mass[...]), 0)

    _visit(windowed, visit, (of_query, of_key), ((top, HIDDEN), (mass, 0.0), (sums, 0.0)), add, finish)


def _query_kernel(windowed: bool, *refs: Any) -> None:
    *visit, query, key, value, gradient, total, delta, of_query, of_key, out, sums = refs

    def add(mask: jax.Array | None) -> None:
        for g in range(query.shape[0]):
            numbers = total[g : g + 1], delta[g : g + 1]
            _, to_scores = _score_gradients(_scaled(query[g]), key[...], value[...], gradient[g], *numbers, mask)
            sums[g] += product(key[...], to_scores, 0, 0)

    def finish() -> None:
        for g in range(query.shape[0]):
            out[g] = (sums[g] * out.shape[-1] ** -0.5).T.astype(out.dtype)

    _visit(windowed, visit, (of_query, of_key), ((sums, 0.0),), add, finish)


def _key_kernel(windowed: bool, *refs: Any) -> None:
    *visit, query, key, value, gradient, total, delta, of_query, of_key, to_key, to_value, of_keys, of_values = refs

    def add(mask: jax.Array | None) -> None:
        for g in range(query.shape[0]):
            scaled, numbers = _scaled(query[g]), (total[g : g + 1], delta[g : g + 1])
            probs, to_scores = _score_gradients(scaled, key[...], value[...], gradient[g], *numbers, mask)
            of_keys[...] += product(to_scores, scaled, 1, 0)
            of_values[...] += product(probs, gradient[g], 1, 0)

    def finish() -> None:
        to_key[...] = of_keys[...].astype(to_key.dtype)
        to_value[...] = of_values[...].astype(to_value.dtype)

    _visit(windowed, visit, (of_query, of_key), ((of_keys, 0.0), (of_values, 0.0)), add, finish)


def _visit(
    windowed: bool,
    visit: Sequence[Any],
    spans: tuple[Any, Any],
    sums: Sequence[tuple[Any, float]],
    add: Callable[[jax.Array | None], None],
    finish: Callable[[], None],
) -> None:
    """Run one step of the grid.

    Args:
        windowed: whether there is a sliding window.
        visit: fields of `Visits`, and the window.
        spans: `intervals` of the queries and of the keys of this step, [4, T].
        sums: pairs of an accumulator over the visits to one tile of the result, and its initial value.
        add: function that adds a visit, with the mask, bool [T keys, T queries], or None if the mask is full.
        finish: function that writes the result after the last visit.
    """
    _, query_tile, key_tile, all_flags, window = visit
    of_query, of_key = spans
    now, tile = pl.program_id(1), of_query.shape[-1]
    flags = all_flags[now]

    def begin() -> None:
        for ref, value in sums:
            ref[...] = jnp.full(ref.shape, value, ref.dtype)

    def masked() -> None:
        start, hidden, branch, position = (of_query[n : n + 1] for n in range(4))
        query = query_tile[now] * tile + jax.lax.broadcasted_iota(jnp.int32, (1, tile), 1)
        key = key_tile[now] * tile + jax.lax.broadcasted_iota(jnp.int32, (tile, tile), 0)
        mask = (start <= key) & (key <= query) & ((key < hidden) | (branch <= key))
        if windowed:
            # Mosaic transposes a row only as part of a square.
            key_position = jnp.broadcast_to(of_key[3:], (tile, tile)).T
            mask = mask & (position - key_position < window[0])
        add(mask)

    pl.when(flags & FIRST != 0)(begin)
    pl.when(flags & WHOLE != 0)(lambda: add(None))
    pl.when(flags & WHOLE == 0)(masked)
    pl.when(flags & LAST != 0)(finish)


def _scaled(query: jax.Array) -> jax.Array:
    return (query.astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)


def _scores(scaled: jax.Array, key: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Return masked scores, float32 [T keys, T queries]."""
    scores = product(key, scaled, 1, 1)
    return scores if mask is None else jnp.where(mask, scores, HIDDEN)


def _score_gradients(
    scaled: jax.Array,
    key: jax.Array,
    value: jax.Array,
    gradient: jax.Array,
    total: jax.Array,
    delta: jax.Array,
    mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the softmax and the gradient of its scores: [T keys, T queries], in the dtype of the query."""
    probs = jnp.exp(_scores(scaled, key, mask) - total)
    to_scores = probs * (product(value, gradient, 1, 1) - delta)
    return probs.astype(scaled.dtype), to_scores.astype(scaled.dtype)


def product(a: jax.Array, b: jax.Array, axis: int, other: int) -> jax.Array:
    """Return the float32 matrix product over one axis of each operand."""
    return jax.lax.dot_general(a, b, (((axis,), (other,)), ((), ())), preferred_element_type=jnp.float32)
