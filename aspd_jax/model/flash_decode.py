"""Attention over the cache as one Pallas kernel: keys and values are read once, and scores stay on the chip.

This module holds the parts that all platforms share and the kernel for TPU; `model.flash_decode_gpu` holds that for
GPU.

B rows, Q queries of a row, C slots, K kv heads, G query heads per kv head, H head size; the kernel uses T tiles of P
queries, S tiles of W slots, and N = K or K x G groups of R = P x G or P rows of a product.

The grid runs over rows, query tiles and, innermost, slot tiles. All queries of a row, from all branches, form one tile
if they fit on the chip, so that a tile of the cache, with all its heads, is loaded once per row. Slots of different
branches interleave in the order of decoding, so the mask of every tile is computed from the layout. Softmax is computed
online over the slots (Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from aspd_jax.layout import HIDDEN, NO_WINDOW, Layout
from aspd_jax.sharding import partition_spec

QUERY_ROWS = 1 << 21  # maximum P x K x G x H of a tile: 8 MiB of float32 sums
SLOT_BYTES = 1 << 20  # maximum bytes of a key tile; large enough for full bandwidth
SLOTS = 128  # minimum slots of a tile: the lanes of a vector
ALIGNED = 16  # multiple of queries: 8 sublanes of two bfloat16
TOGETHER = 128  # rows of a product that fill the matrix unit of a TPU
MEMORY = 60 << 20  # maximum VMEM of the kernel in bytes


class Fields(NamedTuple):
    """The fields that the mask reads, for queries or keys; int32 [B, Q] or [B, C] each.

    Attributes:
        sequence, position, block, branch: fields of the layout.
    """

    sequence: jax.Array
    position: jax.Array
    block: jax.Array
    branch: jax.Array


class Tiles(NamedTuple):
    """The tile sizes of a call.

    Attributes:
        queries: P.
        slots: W.
        together: whether the G heads that share keys are rows of one product.
    """

    queries: int
    slots: int
    together: bool


Refs: TypeAlias = Any  # Pallas refs, for which there is no precise type
# Takes query, key, value, fields of both, window int32 [1], `interpret`; returns the result on one device.
Attend: TypeAlias = Callable[..., jax.Array]


def tiles_for(queries: int, slots: int, key: jax.Array, heads: int) -> Tiles:
    """Return the tile sizes for a row of `queries` and `slots`, a cache `key` [B, C, K, H] and `heads` query heads."""
    K, H = key.shape[2:]
    max_queries = max(QUERY_ROWS // (heads * H), ALIGNED)
    whole = pl.cdiv(queries, ALIGNED) * ALIGNED
    count = pl.cdiv(whole, max_queries)
    P = pl.cdiv(pl.cdiv(whole, count), ALIGNED) * ALIGNED
    W = SLOTS
    while slots > W and 2 * W * K * H * key.dtype.itemsize <= SLOT_BYTES:
        W *= 2
    return Tiles(P, W, P < TOGETHER)


def flash_decode(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seeing: Fields,
    seen: Fields,
    window: int | jax.Array | None,
    attend: Attend,
    interpret: bool = False,
) -> jax.Array:
    """Compute attention of queries over a cache; on the mesh of the context, each device uses its own heads and rows.

    Args:
        query: [B, Q, K, G, H].
        key: [B, C, K, H], or longer on the first two axes: the kernel skips the rest, because a slice would be a copy.
        value: same shape as `key`.
        seeing: fields of the queries; `sequence` is 0 at padding, whose results are finite but meaningless.
        seen: fields of the C slots in use.
        window: see `layout.visible`.
        attend: kernel of a platform.
        interpret: run the kernel as plain JAX, on any platform.

    Returns:
        [B, Q, K, G, H] in the dtype of the query.
    """
    attend = partial(attend, interpret=interpret)
    limit = jnp.reshape(jnp.asarray(NO_WINDOW if window is None else window, jnp.int32), 1)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return attend(query, key, value, seeing, seen, limit)
    # XLA cannot partition a kernel. Rows are split only if all rows of the cache have queries.
    rows = "batch" if len(query) == len(key) else None

    def place(shape: tuple[int, ...], *axes: str | None) -> Any:
        return partition_spec(axes, shape, mesh)

    queries = place(query.shape, rows, None, "kv_heads", None, None)
    slots = place(key.shape, rows, None, "kv_heads", None)
    of_rows = [jax.tree.map(lambda field: place(field.shape, rows, None), fields) for fields in (seeing, seen)]
    split = jax.shard_map(
        attend, in_specs=(queries, slots, slots, *of_rows, place((1,), None)), out_specs=queries, check_vma=False
    )
    return split(query, key, value, seeing, seen, limit)


def attend_on_tpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seeing: Fields,
    seen: Fields,
    window: jax.Array,
    interpret: bool,
) -> jax.Array:
    """Compute attention with the TPU kernel; see `Attend`."""
    (B, Q, K, G, H), C = query.shape, seen.sequence.shape[1]
    tiles = tiles_for(Q, C, key, K * G)
    P, W = tiles.queries, tiles.slots
    T, S = pl.cdiv(Q, P), pl.cdiv(C, W)
    N, R = (K, G * P) if tiles.together else (K * G, P)

    seeing = Fields(*(filled(field, T * P) for field in seeing))
    seen = Fields(*(filled(field, S * W) for field in seen))
    visits = in_sight(seeing, seen, window, P, W)
    rows = filled(query * H**-0.5, T * P).reshape(B, T, P, K, G, H).transpose(0, 1, 3, 4, 2, 5).reshape(B, T, N, R, H)

    def slots(b: Any, t: Any, s: Any, visits: Refs, _: Refs) -> tuple[Any, Any]:
        return b, jnp.clip(s, visits[b, t, 0], visits[b, t, 1])  # an unchanged index is not loaded again

    def cache_tile(*at: Any) -> tuple[Any, ...]:
        return *slots(*at), *[0] * (key.ndim - 2)

    def query_tile(b: Any, t: Any, *_: Any) -> tuple[Any, ...]:
        return b, t, 0, 0, 0

    if K == 1:  # drop the axis of size 1, for which XLA would copy the cache into another layout
        key, value = key[:, :, 0], value[:, :, 0]
    if not interpret:  # keep the cache in HBM: XLA would move a small cache to VMEM and back
        key, value = (pltpu.with_memory_space_constraint(of_cache, pltpu.HBM) for of_cache in (key, value))
    out = pl.pallas_call(
        partial(_kernel, slots=C, shared=N // K),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, T, S),
            in_specs=[
                pl.BlockSpec((1, P, len(seeing)), lambda b, t, *_: (b, t, 0)),
                pl.BlockSpec((1, len(seen), W), lambda *at: (slots(*at)[0], 0, slots(*at)[1])),
                pl.BlockSpec((1, 1, N, R, H), query_tile),
                pl.BlockSpec((1, W, *key.shape[2:]), cache_tile),
                pl.BlockSpec((1, W, *value.shape[2:]), cache_tile),
            ],
            out_specs=pl.BlockSpec((1, 1, N, R, H), query_tile),
            scratch_shapes=[
                pltpu.VMEM((K, W, H), key.dtype),
                pltpu.VMEM((K, W, H), value.dtype),
                pltpu.VMEM((R, W), jnp.float32),
                pltpu.VMEM((N, R, 1), jnp.float32),
                pltpu.VMEM((N, R, 1), jnp.float32),
                pltpu.VMEM((N, R, H), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, query.dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=MEMORY),
        name="flash_decode",
        interpret=interpret,
    )(visits, window, jnp.stack(seeing, axis=2), jnp.stack(seen, axis=1), rows, key, value)
    return out.reshape(B, T, K, G, P, H).transpose(0, 1, 4, 2, 3, 5).reshape(B, T * P, K, G, H)[:, :Q]


def filled(x: jax.Array, size: int) -> jax.Array:
    """Pad the second axis with zeros to `size`."""
    return jnp.pad(x, [(0, 0), (0, size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def in_sight(seeing: Fields, seen: Fields, window: jax.Array, queries: int, slots: int) -> jax.Array:
    """Return the first and last slot tile that a query tile may see, for every query tile.

    Args:
        seeing, seen: fields of whole tiles.
        window: int32 [1].
        queries, slots: sizes of a tile.

    Returns:
        Int32 [B, T, 2]; both are 0 if the tile sees nothing.
    """
    rows = len(seeing.position)

    def cut(field: jax.Array, size: int) -> jax.Array:
        return field.reshape(rows, -1, size)

    real, position = cut(seeing.sequence, queries) > 0, cut(seeing.position, queries)
    lowest = jnp.min(jnp.where(real, position, NO_WINDOW), axis=2)[:, :, None]
    highest = jnp.max(jnp.where(real, position, -1), axis=2)[:, :, None]
    held = seen.sequence[:, None] > 0
    near = held & (seen.position[:, None] <= highest) & (lowest - seen.position[:, None] < window)
    some = near.reshape(rows, real.shape[1], -1, slots).any(axis=3)
    last = some.shape[2] - 1 - jnp.argmax(some[:, :, ::-1], axis=2)
    none = ~some.any(axis=2)
    return jnp.stack([jnp.argmax(some, axis=2), jnp.where(none, 0, last)], axis=2).astype(jnp.int32)


def _kernel(
    visits: Refs,
    window: Refs,
    seeing: Refs,
    seen: Refs,
    query: Refs,
    key: Refs,
    value: Refs,
    out: Refs,
    keys: Refs,
    values: Refs,
    bias: Refs,
    highest: Refs,
    total: Refs,
    sums: Refs,
    *,
    slots: int,
    shared: int,
) -> None:
    """Add a slot tile to the sums of a query tile.

    Args:
        visits, window: scalars, int32 [B, T, 2] and int32 [1].
        seeing, seen: `Fields` of the queries [1, P, 4] and of the slots [1, 4, W].
        query, out: [1, 1, N, R, H].
        key, value: [1, W, K, H]; with one head, [1, W, H].
        keys, values: [K, W, H], the tile by head.
        bias: float32 [R, W], 0 where a row sees a slot.
        highest, total: float32 [N, R, 1], maximum score so far and sum of exponentials.
        sums: float32 [N, R, H], weighted sums of values.
        slots: C.
        shared: number of groups that share a kv head.
    """
    b, t, s = (pl.program_id(axis) for axis in range(3))
    (N, R, _), W = sums.shape, bias.shape[1]

    @pl.when(s == 0)
    def start() -> None:
        highest[...] = jnp.full_like(highest, HIDDEN)
        total[...] = jnp.zeros_like(total)
        sums[...] = jnp.zeros_like(sums)

    @pl.when((s >= visits[b, t, 0]) & (s <= visits[b, t, 1]))
    def add_tile() -> None:
        def by_head(tile: jax.Array) -> jax.Array:
            if slots % W:  # memory behind the cache may hold infinities, and 0 times infinity is NaN
                at = s * W + jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0)
                tile = jnp.where(at < slots, tile, 0)
            return tile[None] if tile.ndim == 2 else jnp.swapaxes(tile, 0, 1)

        keys[...], values[...] = by_head(key[0]), by_head(value[0])
        q = Fields(*(seeing[0, :, n : n + 1] for n in range(len(Fields._fields))))
        k = Fields(*(seen[0, n : n + 1] for n in range(len(Fields._fields))))
        hidden = jnp.where(sees(q, k, window[0]), 0.0, HIDDEN)
        bias[...] = jnp.tile(hidden, (R // hidden.shape[0], 1))

        def add(n: jax.Array, carry: None) -> None:
            head = jax.lax.div(n, shared)
            scores = _product(query[0, 0, n], keys[head], 1) + bias[...]
            before = highest[n]
            now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            probs, kept = jnp.exp(scores - now), jnp.exp(before - now)
            highest[n] = now
            total[n] = kept * total[n] + jnp.sum(probs, axis=1, keepdims=True)
            sums[n] = kept * sums[n] + _product(probs.astype(values.dtype), values[head], 0)

        jax.lax.fori_loop(0, N, add, None)

    @pl.when(s == pl.num_programs(2) - 1)
    def finish() -> None:
        out[0, 0] = (sums[...] / total[...]).astype(out.dtype)


def _product(rows: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """Multiply rows [R, X] by a matrix, summed over `axis` of the matrix; float32."""
    return jax.lax.dot_general(rows, matrix, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def sees(q: Fields, k: Fields, window: jax.Array) -> jax.Array:
    """Return `layout.visible` for a tile, bool [P, W], from fields [P, 1] and [1, W]."""
    same = (q.sequence == k.sequence) & (k.sequence > 0)
    sibling = (q.block == k.block) & (q.block > 0) & (q.branch != k.branch)
    return same & (k.position <= q.position) & ~sibling & (q.position - k.position < window)


def fields(layout: Layout) -> Fields:
    """Return the fields of a layout [B, …]."""
    position, sequence, block, branch = (jnp.asarray(field, jnp.int32) for field in layout)
    return Fields(sequence, position, block, branch)
