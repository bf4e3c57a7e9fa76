"""Attention for training by tiles: nothing of size [S, S] exists, and tiles that nobody sees are never touched.

Here is what all platforms share, and the kernels for a TPU; those for a GPU are `model.flash_gpu`.

B rows, S tokens of a row, K kv heads, G query heads per kv head, H head size, T tokens of a tile, N tiles of a row
(padded to N x T tokens), V visits: pairs of a tile of queries and a tile of keys between which something is seen.

In the order of the linearisation, a query sees two intervals of keys: from the start of its sequence to the start of
its block, and from the start of its branch to itself. So the mask is a few numbers per token (`intervals`), from which
follows which pairs of tiles have to be visited (`tiles_in_sight`). The list of visits is computed in the same program
and handed to the kernels before they run: on a TPU, the grid has one step for each, which loads these two tiles and no
others.

The algorithm is that of FlashAttention-2 (Dao, 2023). Scores are kept as [keys, queries]: on a TPU, maxima and sums
over keys then run across sublanes, and numbers of a query lie side by side in a row.
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

MOST_TOKENS = 512  # of a tile
MOST_BYTES = 2**20  # of a tile of the queries of a kv head; a kernel holds up to eight such, and has 16 MiB
LANES = 128  # tiles are multiples of it
FIRST, LAST, WHOLE = 1, 2, 4  # flags of a visit

Arrays: TypeAlias = tuple[jax.Array, ...]
Attend: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array, Layout, jax.Array | None], jax.Array]


class Passes(NamedTuple):
    """What a platform computes by kernels, from a `Kernel`, (query, key, value), their layout and the window.

    Attributes:
        forward: to the result [B, S, K, G, H], with zeros at padding, and the log-sum-exp of scores
            float32 [B, K, G, N x T], which is for its own backward pass.
        backward: from these two and the slope of the result besides, to slopes of query, key and value.
    """

    forward: Callable[..., Arrays]
    backward: Callable[..., Arrays]


class Kernel(NamedTuple):
    """How attention is computed; static.

    Attributes:
        siblings: see `layout.visible`.
        tile: tokens of a tile.
        mesh: over which rows and kv heads are split, or None.
        passes: of every platform that has kernels, by its name.
        otherwise: attention on other platforms; None: interpret the kernels of the only platform.
    """

    siblings: Siblings
    tile: int
    mesh: AbstractMesh | None = None
    passes: tuple[tuple[str, Passes], ...] = ()
    otherwise: Attend | None = None


class Visits(NamedTuple):
    """Pairs of tiles in the order in which they are visited; int32 [V].

    Attributes:
        row: of the batch.
        query, key: number of the tile in its row.
        flags: `FIRST` and `LAST` of those that add to the same tile of the result; `WHOLE`: every query of the tile
            sees every key, so that no mask is needed.
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
    """Attention of a full pass; by kernels on platforms that have them, where memory grows with S. Traced under
    `sharding.over` a mesh, the kernels run on all its devices.

    Args:
        query: [B, S, K, G, H].
        key, value: [B, S, K, H].
        layout: int32 [B, S] each; padding lies between sequences, not inside one.
        siblings, window: see `layout.visible`.
        passes: of platforms with kernels, by the names of `jax.lax.platform_dependent`.
        otherwise: attention on other platforms; None: interpret the kernels of the only one, for tests.
        tile: tokens of a tile. Default: see `tile_for`.

    Returns:
        [B, S, K, G, H] in the dtype of the query. Kernels leave zeros at padding.
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
    """Tokens of a tile: as few as make the fewest tiles that are not too large.

    Args:
        length: of a row.
        width: bytes of one token in the queries of a kv head.
    """
    most = max(LANES, min(MOST_TOKENS, MOST_BYTES // width // LANES * LANES))
    return LANES * ceil(length / ceil(length / most) / LANES)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(kernel: Kernel, arrays: Arrays, layout: Layout, window: jax.Array | None) -> jax.Array:
    """Of query, key and value; window int32 [1]."""
    return _forward(kernel, arrays, layout, window)[0]


def _forward(kernel: Kernel, arrays: Arrays, layout: Layout, window: jax.Array | None) -> tuple[jax.Array, Any]:
    """The result; and what the backward pass needs: arguments, and both results of `Passes.forward`."""

    def plain(arrays: Arrays, layout: Layout, window: jax.Array | None) -> Arrays:
        assert kernel.otherwise is not None
        query, key, value = arrays
        B, S, K, G, _ = query.shape
        unused = jnp.zeros((B, K, G, S + -S % kernel.tile), jnp.float32)
        return kernel.otherwise(query, key, value, layout, window), unused

    by_kernels = {name: _by_shard(kernel, passes.forward) for name, passes in kernel.passes}
    out, total = _on_platform(kernel, by_kernels, plain)(arrays, layout, window)
    return out, (arrays, layout, window, out, total)


def _backward(kernel: Kernel, kept: Any, slope: jax.Array) -> tuple[Arrays, None, None]:
    def plain(arrays: Arrays, layout: Layout, window: jax.Array | None, *results: jax.Array) -> Arrays:
        assert kernel.otherwise is not None
        attend = kernel.otherwise
        return jax.vjp(lambda query, key, value: attend(query, key, value, layout, window), *arrays)[1](results[-1])

    by_kernels = {name: _by_shard(kernel, passes.backward) for name, passes in kernel.passes}
    return _on_platform(kernel, by_kernels, plain)(*kept, slope), None, None


_attention.defvjp(_forward, _backward)


def _on_platform(
    kernel: Kernel, by_kernels: Mapping[str, Callable[..., Any]], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """Chosen inside either pass, so that nothing of one way is kept for the backward pass of the other."""
    if kernel.otherwise is not None:
        return partial(jax.lax.platform_dependent, **by_kernels, default=plain)
    (interpreted,) = by_kernels.values()
    return interpreted


def _by_shard(kernel: Kernel, run: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """Over a mesh, each device runs kernels for its own rows and kv heads: XLA cannot take a kernel apart.

    Args:
        kernel: knows the mesh.
        run: one of `Passes`.
    """

    def spread(arrays: Arrays, layout: Layout, window: jax.Array | None, *results: jax.Array) -> Arrays:
        if kernel.mesh is None:
            return run(kernel, arrays, layout, window, *results)
        B, _, K, _ = arrays[1].shape
        rows, heads = partition_spec(("batch", "kv_heads"), (B, K), kernel.mesh)
        tokens, numbers = PartitionSpec(rows, None, heads), PartitionSpec(rows, heads)
        given = (tokens, PartitionSpec(rows), PartitionSpec(), *((tokens, numbers, tokens) if results else ()))
        made = tokens if results else (tokens, numbers)
        ours = jax.shard_map(partial(run, kernel), mesh=kernel.mesh, in_specs=given, out_specs=made, check_vma=False)
        return ours(arrays, layout, window, *results)

    return spread


def _heads_first(kernel: Kernel, x: jax.Array) -> jax.Array:
    """[B, S, K, …, H] -> [B, K, …, N x T, H], which for XLA is a choice of layout unless tokens have to be added."""
    return whole_tiles(kernel, jnp.moveaxis(x, 1, -2), -2)


def whole_tiles(kernel: Kernel, x: jax.Array, axis: int) -> jax.Array:
    """With zeros behind the S tokens along an axis, so that there are N x T."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % kernel.tile)
    return jnp.pad(x, widths) if widths[axis][1] else x


def _at_tokens(layout: Layout, x: jax.Array) -> jax.Array:
    """[B, K, …, N x T, H] -> [B, S, K, …, H], and zeros at padding: tiles of nothing else are never written."""
    real = layout.sequence > 0
    x = jnp.moveaxis(x, -2, 1)[:, : real.shape[1]]
    return jnp.where(real.reshape(*real.shape, *(1,) * (x.ndim - 2)), x, 0)


def along_slope(kernel: Kernel, out: jax.Array, slope: jax.Array) -> jax.Array:
    """The sum of result x slope of every query head: from [B, S, K, G, H] to float32 [B, K, G, N x T]."""
    sums = jnp.sum(out.astype(jnp.float32) * slope.astype(jnp.float32), axis=-1)
    return whole_tiles(kernel, jnp.moveaxis(sums, 1, -1), -1)


def intervals(kernel: Kernel, layout: Layout) -> jax.Array:
    """What a token sees: keys from `start` to itself, but for those from `hidden` to before `branch`.

    Returns:
        int32 [B, 4, N x T]: `start`, `hidden`, `branch`, and the position, which a sliding window counts in. Padding
        starts after itself; where nothing is hidden, `hidden` and `branch` are the next token.
    """
    position, sequence, block, branch = (whole_tiles(kernel, field, 1) for field in layout)
    index = jnp.arange(sequence.shape[1], dtype=jnp.int32)

    def run_start(*fields: jax.Array) -> jax.Array:
        """Of the run of tokens alike in all fields to which a token belongs."""
        new = jnp.zeros(fields[0].shape, bool).at[:, 0].set(True)
        for field in fields:
            new = new.at[:, 1:].set(new[:, 1:] | (field[:, 1:] != field[:, :-1]))
        return jax.lax.cummax(jnp.where(new, index, 0), axis=1)

    first, own = run_start(sequence, block), run_start(sequence, block, branch)
    some = (kernel.siblings == "invisible") & (block > 0) & (first < own)
    start = jnp.where(sequence > 0, run_start(sequence), index + 1)
    hidden, shown = jnp.where(some, first, index + 1), jnp.where(some, own, index + 1)
    return jnp.stack([start, hidden, shown, position], axis=1).astype(jnp.int32)


def tiles_in_sight(spans: jax.Array, tile: int, window: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Between which tiles of queries and keys something is seen, and between which of them everything.

    With a window, tiles may be taken for more seen than they are, and for less whole.

    Args:
        spans: `intervals`.
        tile: tokens of a tile.
        window: int32 [1], or None.

    Returns:
        Bool [B, N, N] both, queries first.
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
        there = position.reshape(B, 1, 1, -1, tile)
        seen = seen & (position - there.max(-1) < window)
        whole = whole & (position - there.min(-1) < window)
    return seen.any(2), whole.all(2)


def visits(seen: jax.Array, whole: jax.Array, by_key: bool) -> tuple[jax.Array, Visits]:
    """Tiles in the order of what is computed: one tile of queries after another, or one of keys.

    Args:
        seen, whole: `tiles_in_sight`.
        by_key: keys outside.

    Returns:
        How many there are, int32 []; and these, followed by others of no meaning. There is always one, as a grid
        has to have a step.
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
    query, *_ = first = [_heads_first(kernel, x) for x in arrays]
    _, _, G, _, H = query.shape
    at_query, at_key, stat, _, _ = blocks = _blocks(G, kernel.tile, H)
    results = jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct(query.shape[:-1], jnp.float32)
    scratch = (G, kernel.tile), (G, kernel.tile), (G, H, kernel.tile)
    body, places = partial(_forward_kernel, window is not None), (at_query, at_key, at_key, *blocks[3:])
    spans = intervals(kernel, layout)
    out, total = _pallas(kernel, body, spans, window, first, places, results, (at_query, stat), scratch, by_key=False)
    return _at_tokens(layout, out), total


def _backward_tiles(
    kernel: Kernel, arrays: Arrays, layout: Layout, window: jax.Array | None, *results: jax.Array
) -> Arrays:
    """Slopes of keys and values in a pass of their own."""
    out, total, slope = results
    first = [*(_heads_first(kernel, x) for x in (*arrays, slope)), total, along_slope(kernel, out, slope)]
    of = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in first[:3]]
    _, _, G, _, H = of[0].shape
    at_query, at_key, stat, _, _ = blocks = _blocks(G, kernel.tile, H)
    places = (at_query, at_key, at_key, at_query, stat, stat, *blocks[3:])
    run = partial(_pallas, kernel, spans=intervals(kernel, layout), window=window, arrays=first, blocks=places)
    by_query, by_key = partial(_query_kernel, window is not None), partial(_key_kernel, window is not None)
    to_query = run(by_query, results=of[:1], at=(at_query,), scratch=((G, H, kernel.tile),), by_key=False)
    to_both = run(by_key, results=of[1:], at=(at_key, at_key), scratch=((kernel.tile, H),) * 2, by_key=True)
    return tuple(_at_tokens(layout, x) for x in (*to_query, *to_both))


TPU = Passes(_forward_tiles, _backward_tiles)


def _blocks(G: int, tile: int, H: int) -> tuple[pl.BlockSpec, ...]:
    """What a step of the grid loads or stores of queries, keys, numbers per query, and intervals of both."""
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
    """Run a kernel once for every kv head and visit, on `arrays` and the intervals of queries and keys."""
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
            shares, kept = jnp.exp(scores - highest), jnp.exp(before - highest)
            top[here] = highest
            mass[here] = kept * mass[here] + shares.sum(axis=0, keepdims=True)
            sums[g] = kept * sums[g] + product(value[...], shares.astype(value.dtype), 0, 0)

    def finish() -> None:
        for g in range(query.shape[0]):
            out[g] = (sums[g] / mass[g : g + 1]).T.astype(out.dtype)
        # A query that sees nothing gets 0, with which the backward pass makes all its shares 0.
        total[...] = jnp.where(top[...] > HIDDEN, top[...] + jnp.log(mass[...]), 0)

    _visit(windowed, visit, (of_query, of_key), ((top, HIDDEN), (mass, 0.0), (sums, 0.0)), add, finish)


def _query_kernel(windowed: bool, *refs: Any) -> None:
    *visit, query, key, value, slope, total, delta, of_query, of_key, out, sums = refs

    def add(mask: jax.Array | None) -> None:
        for g in range(query.shape[0]):
            numbers = total[g : g + 1], delta[g : g + 1]
            _, to_scores = _slopes(_scaled(query[g]), key[...], value[...], slope[g], *numbers, mask)
            sums[g] += product(key[...], to_scores, 0, 0)

    def finish() -> None:
        for g in range(query.shape[0]):
            out[g] = (sums[g] * out.shape[-1] ** -0.5).T.astype(out.dtype)

    _visit(windowed, visit, (of_query, of_key), ((sums, 0.0),), add, finish)


def _key_kernel(windowed: bool, *refs: Any) -> None:
    *visit, query, key, value, slope, total, delta, of_query, of_key, to_key, to_value, of_keys, of_values = refs

    def add(mask: jax.Array | None) -> None:
        for g in range(query.shape[0]):
            scaled, numbers = _scaled(query[g]), (total[g : g + 1], delta[g : g + 1])
            shares, to_scores = _slopes(scaled, key[...], value[...], slope[g], *numbers, mask)
            of_keys[...] += product(to_scores, scaled, 1, 0)
            of_values[...] += product(shares, slope[g], 1, 0)

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
    """One step of the grid.

    Args:
        windowed: whether there is a sliding window.
        visit: all `Visits`, and the window.
        spans: `intervals` of the queries and of the keys of this step, [4, T].
        sums: over visits to one tile of the result, with what they begin with.
        add: is called with the mask, bool [T keys, T queries], or with None where all is seen.
        finish: is called after the last visit.
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
            there = jnp.broadcast_to(of_key[3:], (tile, tile)).T  # a row becomes a column only within a square
            mask = mask & (position - there < window[0])
        add(mask)

    pl.when(flags & FIRST != 0)(begin)
    pl.when(flags & WHOLE != 0)(lambda: add(None))
    pl.when(flags & WHOLE == 0)(masked)
    pl.when(flags & LAST != 0)(finish)


def _scaled(query: jax.Array) -> jax.Array:
    return (query.astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)


def _scores(scaled: jax.Array, key: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Float32 [T keys, T queries]."""
    scores = product(key, scaled, 1, 1)
    return scores if mask is None else jnp.where(mask, scores, HIDDEN)


def _slopes(
    scaled: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slope: jax.Array,
    total: jax.Array,
    delta: jax.Array,
    mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax, and the slope of its scores: [T keys, T queries] in the dtype of the query."""
    shares = jnp.exp(_scores(scaled, key, mask) - total)
    to_scores = shares * (product(value, slope, 1, 1) - delta)
    return shares.astype(scaled.dtype), to_scores.astype(scaled.dtype)


def product(a: jax.Array, b: jax.Array, axis: int, other: int) -> jax.Array:
    """Float32 matrix product over an axis of each."""
    return jax.lax.dot_general(a, b, (((axis,), (other,)), ((), ())), preferred_element_type=jnp.float32)
